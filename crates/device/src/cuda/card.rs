//! A card: its context, and what is made once for it.

use std::{
    ffi::CString,
    path::PathBuf,
    ptr,
    sync::{Arc, Mutex, MutexGuard, OnceLock},
    time::{Duration, Instant},
};

use cudarc::driver::sys;

use super::{
    Arch, CudaError,
    begin::{Beginnings, STANDING},
    blaslt::BlasLt,
    compile::{self, Cache},
    cudnn::Cudnn,
    error::check,
    functions::{Functions, Loaded},
    fused::Sums,
    hopper, kernels,
    launch::Call,
    memory::{Blocks, Pinned},
    product::ProductShape,
    stacks,
};

/// Which cards a machine uses, and where compiled kernels are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// Numbers of the cards, as the driver counts them. Rank `r` is on the card at place `r % cards.len()`; ranks may
    /// share a card.
    pub cards: Vec<u32>,
    /// Folder for compiled kernels, by source, options and version of the compiler. Without one they are compiled
    /// whenever a machine is opened, which takes seconds.
    pub kernel_cache: Option<PathBuf>,
    /// What computes matrix products.
    pub products: Products,
    /// What computes attention of bf16.
    pub attentions: Attentions,
    /// Whether everything a card computes has the same bits whenever it runs. Without it gradients of attention are
    /// faster: cuDNN adds those of queries as they come.
    pub deterministic: bool,
    /// The most blocks of a card that one collective of one rank takes. Ranks on one card wait there for each other, so
    /// all that may wait at once must fit. Unless it is set: one block for a group with several members on a card, what
    /// NCCL thinks best for others.
    pub ctas: Option<u32>,
}

impl Default for CudaOptions {
    /// Card 0, no cache, products and attention by libraries, always the same bits, blocks as [`CudaOptions::ctas`]
    /// says.
    fn default() -> Self {
        let (products, attentions) = (Products::CuBlasLt, Attentions::CuDnn);
        CudaOptions { cards: vec![0], kernel_cache: None, products, attentions, deterministic: true, ctas: None }
    }
}

/// What computes matrix products on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Products {
    /// cuBLASLt; a kernel of this crate for sizes, types and addresses that it has no algorithm for.
    CuBlasLt,
    /// A kernel of this crate: many times slower, and the twin that the library is held against. Needs no library.
    Own,
    /// The kernel of this crate for compute capability 9.0 wherever it can, measured or not; else as [`Products::Own`].
    /// Refused on other cards. Needs no library.
    Hopper,
}

/// What computes attention of bf16 on a card. That of f32 is always computed by kernels of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attentions {
    /// cuDNN, from 9.16 on; kernels of this crate for what it has no plan for, and where there is no such library,
    /// which the log tells.
    CuDnn,
    /// Kernels of this crate, the twins that the library is held against.
    Own,
}

/// Version of CUDA that a driver must support: for kernel nodes and memory operations in graphs as they are used here.
const NEEDED_VERSION: i32 = 12_000;
/// How long the card's own stream is waited for.
const ASIDE: Duration = Duration::from_secs(60);

/// One card. Everything on it is made in its primary context, which all machines of the process share.
pub(crate) struct Card {
    pub(super) ordinal: u32,
    pub(super) multiprocessors: u32,
    pub(super) device: sys::CUdevice,
    context: Context,
    functions: Functions,
    modules: Vec<Module>,
    /// Events that nobody uses.
    pub(super) events: Mutex<Vec<RawEvent>>,
    pub(super) pinned: Mutex<Pinned>,
    pub(super) freed: Mutex<Blocks>,
    /// For what no stream asks for: filling fresh memory.
    side: RawStream,
    /// A record that is reached: for gates that wait for nothing.
    pub(super) reached: RawEvent,
    /// Of all cards of the machine.
    pub(super) beginnings: Arc<Beginnings>,
    /// What broke the context.
    lost: OnceLock<CudaError>,
    pub(super) products: Products,
    blas: OnceLock<Result<BlasLt, CudaError>>,
    attentions: Attentions,
    deterministic: bool,
    /// None: it cannot be used here.
    cudnn: OnceLock<Option<Cudnn>>,
}

#[derive(Clone, Copy)]
pub(super) struct Context(pub(super) sys::CUcontext);
#[derive(Clone, Copy)]
pub(super) struct RawStream(pub(super) sys::CUstream);
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct RawEvent(pub(super) sys::CUevent);
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Function(pub(super) sys::CUfunction);
struct Module(sys::CUmodule);

/// Handles are names that the driver gives out; it takes them from any thread that has their context.
macro_rules! any_thread {
    ($($handle:ident),+) => {$(
        // SAFETY: the driver's functions are safe to call from any thread, and nothing here follows the pointer.
        unsafe impl Send for $handle {}
        // SAFETY: as above.
        unsafe impl Sync for $handle {}
    )+};
}
any_thread!(Context, RawStream, RawEvent, Function, Module);

#[inline]
pub(super) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|poison| poison.into_inner())
}

/// How many cards the NVIDIA driver of this host has. Opens the libraries for it, and none of the cards.
///
/// # Errors
/// [`CudaError::Missing`] without the driver or the compiler of kernels, [`CudaError::OldDriver`].
pub fn count_cards() -> Result<u32, CudaError> {
    open_driver()
}

/// Opens the libraries, or says which is missing.
pub(super) fn open_driver() -> Result<u32, CudaError> {
    // SAFETY: opens a library that is made to be opened this way.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::Missing { library: "libcuda", what_for: "the NVIDIA driver" });
    }
    compile::open()?;
    let (mut version, mut count) = (0, 0);
    // SAFETY: the library is there; both calls write one integer.
    unsafe {
        check("cuDriverGetVersion", sys::cuDriverGetVersion(&mut version))?;
        if version < NEEDED_VERSION {
            return Err(CudaError::OldDriver { have: version, need: NEEDED_VERSION });
        }
        check("cuInit", sys::cuInit(0))?;
        check("cuDeviceGetCount", sys::cuDeviceGetCount(&mut count))?;
    }
    Ok(count as u32)
}

impl Card {
    /// Opens card `ordinal`: its context, and all kernels.
    pub(super) fn open(
        ordinal: u32,
        options: &CudaOptions,
        beginnings: &Arc<Beginnings>,
    ) -> Result<Arc<Card>, CudaError> {
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: the driver is initialised (`open_driver`); each call writes one value.
        unsafe {
            check("cuDeviceGet", sys::cuDeviceGet(&mut device, ordinal as i32))?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&mut context, device))?;
        }
        // From here on `Drop` gives back what was made so far.
        let mut card = Card {
            ordinal,
            multiprocessors: 0,
            device,
            context: Context(context),
            functions: Functions::default(),
            modules: Vec::new(),
            events: Mutex::default(),
            pinned: Mutex::default(),
            freed: Mutex::default(),
            side: RawStream(ptr::null_mut()),
            reached: RawEvent(ptr::null_mut()),
            beginnings: beginnings.clone(),
            lost: OnceLock::new(),
            products: options.products,
            blas: OnceLock::new(),
            attentions: options.attentions,
            deterministic: options.deterministic,
            cudnn: OnceLock::new(),
        };
        card.bind()?;
        if card.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)? == 0 {
            return Err(CudaError::Unable { card: ordinal, what: "let a stream wait for a value in memory" });
        }
        card.multiprocessors =
            card.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        card.side = card.new_stream()?;
        card.reached = card.new_event()?;
        card.record(card.reached, card.side)?;
        if card.products == Products::Hopper && !kernels::is_hopper(card.arch()?) {
            let what = "compute products by the kernel for compute capability 9.0, which it does not have";
            return Err(CudaError::Unable { card: ordinal, what });
        }
        card.load(&Cache::new(options.kernel_cache.clone()))?;
        stacks::fit(&card)?;
        card.wait_side()?;
        Ok(Arc::new(card))
    }

    /// Makes its context the calling thread's. Every entry of this driver begins with it.
    #[inline]
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        let mut current = ptr::null_mut();
        // SAFETY: writes one handle. Asking takes less than half of what setting does.
        let asked = unsafe { sys::cuCtxGetCurrent(&mut current) };
        if asked == sys::CUresult::CUDA_SUCCESS && current == self.context.0 {
            return Ok(());
        }
        // SAFETY: the context is retained as long as this card lives.
        self.check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context.0) })
    }

    pub(super) fn context(&self) -> sys::CUcontext {
        self.context.0
    }

    /// As [`check`]; what breaks the context is kept.
    #[inline]
    pub(super) fn check(&self, call: &'static str, code: sys::CUresult) -> Result<(), CudaError> {
        check(call, code).inspect_err(|error| self.keep_fatal(error))
    }

    #[cold]
    fn keep_fatal(&self, error: &CudaError) {
        if error.is_fatal() {
            self.lost.get_or_init(|| error.clone());
        }
    }

    /// What broke the context, if something did. Nothing on this card will move any more.
    pub(super) fn lost(&self) -> Option<&CudaError> {
        self.lost.get()
    }

    fn attribute(&self, which: sys::CUdevice_attribute) -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: writes one integer.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, which, self.device) })?;
        Ok(value)
    }

    pub(super) fn arch(&self) -> Result<Arch, CudaError> {
        let major = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(Arch { major: major as u32, minor: minor as u32 })
    }

    pub(super) fn function(&self, call: &Call) -> Result<Function, CudaError> {
        let (function, need) = (call.function, call.shared);
        let Loaded { raw, shared } =
            self.functions.get(function).unwrap_or_else(|| panic!("BUG: no kernel is called {function}"));
        if need > shared {
            return Err(CudaError::SharedMemory { function, card: self.ordinal, need, have: shared });
        }
        Ok(raw)
    }

    /// The library for products, opened by the first one; none where the options say that kernels of ours compute them.
    pub(super) fn products(&self) -> Result<Option<&BlasLt>, CudaError> {
        match self.products {
            Products::Own | Products::Hopper => Ok(None),
            Products::CuBlasLt => {
                self.blas.get_or_init(|| self.making(BlasLt::open)).as_ref().map(Some).map_err(|error| error.clone())
            }
        }
    }

    /// Whether it has our kernel for compute capability 9.0, and that takes products of `shape`.
    pub(super) fn multiplies(&self, shape: &ProductShape) -> bool {
        hopper::function(shape).is_some_and(|function| self.functions.get(function).is_some())
    }

    /// The library for attention, opened by the first one; none where the options say that kernels of ours compute it,
    /// or where there is none, which is told once.
    pub(super) fn cudnn(&self) -> Option<&Cudnn> {
        if self.attentions == Attentions::Own {
            return None;
        }
        let open = || {
            let told = |error: &CudaError| {
                tracing::warn!(card = self.ordinal, %error, "cuda.attention_without_cudnn");
            };
            self.making(Cudnn::open).inspect_err(told).ok()
        };
        self.cudnn.get_or_init(open).as_ref()
    }

    /// Around a library's making of something that may have memory of the card.
    pub(super) fn making<T>(&self, make: impl FnOnce() -> T) -> T {
        let _waits = self.beginnings.may_wait();
        make()
    }

    pub(super) fn sums(&self) -> Sums {
        if self.deterministic { Sums::InOrder } else { Sums::AsTheyCome }
    }

    fn load(&mut self, cache: &Cache) -> Result<(), CudaError> {
        let arch = self.arch()?;
        let most = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let images = compile::side_by_side(kernels::sources(arch).collect(), |(source, target)| {
            Ok((*source, cache.compiled(source, target)?))
        })?;
        for (source, image) in images {
            let mut module = ptr::null_mut();
            // SAFETY: the image is a whole object file, as the compiler made it; it is copied.
            let code = unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) };
            self.check("cuModuleLoadData", code)?;
            self.modules.push(Module(module));
            for name in source.functions {
                let (mut function, symbol) = (ptr::null_mut(), CString::new(*name).expect("BUG: a name without NUL"));
                // SAFETY: the module was just loaded, and lives as long as this card.
                let code = unsafe { sys::cuModuleGetFunction(&mut function, module, symbol.as_ptr()) };
                self.check("cuModuleGetFunction", code)?;
                let shared = self.allow_shared(function, most)?;
                self.functions.insert(name, Loaded { raw: Function(function), shared });
            }
        }
        Ok(())
    }

    /// Lets launches of a function ask for as much shared memory as its own leaves of `most` bytes; how much that is.
    fn allow_shared(&self, function: sys::CUfunction, most: i32) -> Result<u32, CudaError> {
        use sys::CUfunction_attribute_enum as Which;
        let mut own = 0;
        // SAFETY: the function was just loaded; writes one integer.
        let code = unsafe { sys::cuFuncGetAttribute(&mut own, Which::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function) };
        self.check("cuFuncGetAttribute", code)?;
        let (which, left) = (Which::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most - own);
        // SAFETY: as above.
        self.check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(function, which, left) })?;
        Ok(left as u32)
    }

    /// All that were loaded.
    pub(super) fn functions(&self) -> impl Iterator<Item = Function> {
        self.functions.values().map(|loaded| loaded.raw)
    }

    /// A stream that no other one orders by its mere existence.
    pub(super) fn new_stream(&self) -> Result<RawStream, CudaError> {
        self.new_stream_with(Priority::Usual)
    }

    fn new_stream_with(&self, priority: Priority) -> Result<RawStream, CudaError> {
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let _waits = self.beginnings.may_wait();
        // SAFETY: the context is current (callers bind); writes one handle.
        let code = unsafe { sys::cuStreamCreateWithPriority(&mut stream, flags, priority.number()) };
        self.check("cuStreamCreateWithPriority", code)?;
        Ok(RawStream(stream))
    }

    /// Destroys `stream`, which nobody uses any more. The driver goes on with what is queued in it, marks and waits.
    pub(super) fn end_stream(&self, stream: RawStream) {
        if self.bind().is_err() {
            return;
        }
        if let Some(Some(cudnn)) = self.cudnn.get() {
            // SAFETY: the stream lives, of the card whose context is current.
            let is_empty = unsafe { sys::cuStreamQuery(stream.0) } == sys::CUresult::CUDA_SUCCESS;
            if is_empty { cudnn.leave(stream, self.side) } else { cudnn.abandon(stream) }
        }
        let _waits = self.beginnings.may_wait();
        // SAFETY: made by `new_stream_with`, destroyed once.
        let _ = unsafe { sys::cuStreamDestroy_v2(stream.0) };
    }

    fn new_event(&self) -> Result<RawEvent, CudaError> {
        let mut event = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the context is current (callers bind); writes one handle.
        self.check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(RawEvent(event))
    }

    /// An event that nobody uses.
    pub(super) fn take_event(&self) -> Result<RawEvent, CudaError> {
        let pooled = lock(&self.events).pop();
        pooled.map_or_else(|| self.new_event(), Ok)
    }

    pub(super) fn record(&self, event: RawEvent, stream: RawStream) -> Result<(), CudaError> {
        // SAFETY: both are of this card and live; the context is current (callers bind).
        self.check("cuEventRecord", unsafe { sys::cuEventRecord(event.0, stream.0) })
    }

    /// Whether the last record of `event` is reached. A broken context reaches nothing.
    pub(super) fn is_reached(&self, event: RawEvent) -> Result<bool, CudaError> {
        self.bind()?;
        // SAFETY: the event is of this card and lives.
        match unsafe { sys::cuEventQuery(event.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => self.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Fills fresh memory, and returns when that is done: no stream is behind it.
    pub(super) fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller has just been given these bytes, so nobody else touches them.
        self.on_side(|stream| unsafe { ("cuMemsetD8Async", sys::cuMemsetD8Async(address, byte, bytes, stream.0)) })
    }

    /// Queues what no stream asks for, and returns when it is done.
    pub(super) fn on_side(
        &self,
        queue: impl FnOnce(RawStream) -> (&'static str, sys::CUresult),
    ) -> Result<(), CudaError> {
        let (call, code) = queue(self.side);
        self.check(call, code)?;
        self.wait_side()
    }

    fn wait_side(&self) -> Result<(), CudaError> {
        let event = self.take_event()?;
        let waited = self
            .record(event, self.side)
            .and_then(|()| self.wait_aside(event, || std::thread::sleep(Duration::from_micros(10))));
        lock(&self.events).push(event);
        waited
    }

    /// Returns when `event` is reached, which no stream keeps from it. Nothing of a card that stands still is.
    fn wait_aside(&self, event: RawEvent, pause: impl Fn()) -> Result<(), CudaError> {
        let begin = Instant::now();
        while !self.is_reached(event)? {
            let limit = if self.beginnings.some_stand() { STANDING } else { ASIDE };
            if begin.elapsed() > limit {
                let what = "do what no stream asks for, such as filling fresh memory: something stands still on it";
                return Err(CudaError::Unable { card: self.ordinal, what });
            }
            pause();
        }
        Ok(())
    }

    /// Records `event` where nothing is queued, and returns when it is reached, without a pause. The context is current.
    pub(super) fn record_aside(&self, event: RawEvent) -> Result<(), CudaError> {
        self.record(event, self.side)?;
        self.wait_aside(event, std::thread::yield_now)
    }
}

/// A stream that goes with its owner, for captures.
pub(super) struct SideStream {
    pub(super) raw: RawStream,
    card: Arc<Card>,
}

/// Whose blocks the card starts first, where two could start.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Priority {
    Usual,
    /// In front of what has the usual one. A card that knows one priority takes it for the usual.
    First,
}

impl Priority {
    /// As the driver counts: less is earlier.
    pub(super) fn number(self) -> i32 {
        match self {
            Priority::Usual => 0,
            Priority::First => -1,
        }
    }
}

impl SideStream {
    /// The context is current.
    pub(super) fn new(card: &Arc<Card>) -> Result<SideStream, CudaError> {
        SideStream::with(card, Priority::Usual)
    }

    /// Nodes that it captures have `priority`. The context is current.
    pub(super) fn with(card: &Arc<Card>, priority: Priority) -> Result<SideStream, CudaError> {
        Ok(SideStream { raw: card.new_stream_with(priority)?, card: card.clone() })
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        self.card.end_stream(self.raw);
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        if let Some(Ok(blas)) = self.blas.get() {
            blas.close();
        }
        if let Some(Some(cudnn)) = self.cudnn.get() {
            cudnn.close();
        }
        let events = lock(&self.events).drain(..).chain([self.reached]).collect::<Vec<_>>();
        let (pinned, freed) = (lock(&self.pinned).take_all(), lock(&self.freed).take_all());
        // SAFETY: everything on the card holds it, so nothing uses these handles any more. What a broken context
        // refuses is gone with it.
        unsafe {
            for event in events.iter().filter(|event| !event.0.is_null()) {
                let _ = sys::cuEventDestroy_v2(event.0);
            }
            for base in pinned {
                let _ = sys::cuMemFreeHost(base.as_ptr().cast());
            }
            for address in freed {
                let _ = sys::cuMemFree_v2(address);
            }
            if !self.side.0.is_null() {
                let _ = sys::cuStreamDestroy_v2(self.side.0);
            }
            for module in &self.modules {
                let _ = sys::cuModuleUnload(module.0);
            }
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}
