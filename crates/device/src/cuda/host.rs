//! Host operations in the order of a stream: declared memory is copied down, a thread of ours runs the function while
//! the stream waits for a word that it sets, and what was written is copied up.
//!
//! The function does not run on the driver's own thread, which serves all streams and may call no CUDA: one that blocks
//! would hold up every other. Values that only go up are copied to pinned memory when they are submitted, and values that
//! only come down are taken when they are asked for: no stream waits for a thread then.

use std::{
    ffi::c_void,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use cudarc::driver::sys;

use super::{
    CudaError,
    card::{Card, RawStream},
    fault::Post,
    launch::{self, Call, Piece, address},
    memory::{PinnedBlock, fill_byte},
    steps::Place,
    workers::Workers,
};
use crate::{
    Access, Mode, Op, Position,
    cpu::{self, Args, Staged},
    device::DeviceInner,
};

/// Starts of copies are aligned to it, for vector loads.
const ALIGN: usize = 128;

/// A function of the copies of an operation's accesses.
type RunStaged = dyn Fn(&[Staged]) + Send + Sync;

/// One host operation, for as long as a stream or a graph may run it.
pub(super) struct HostCall {
    workers: Arc<Workers>,
    run: Box<RunStaged>,
    /// First the word that the stream waits for, then the copies.
    block: PinnedBlock,
    staged: Vec<Staged>,
    down: Vec<Copy>,
    up: Vec<Copy>,
    /// Copies that nothing fills before the function runs, with their lengths.
    fresh: Vec<(Staged, usize)>,
    fresh_byte: u8,
}

/// A piece of memory on both sides.
#[derive(Clone, Copy)]
struct Copy {
    host: Staged,
    /// The host's side as the card reaches it.
    mapped: u64,
    card: u64,
    row_bytes: usize,
    rows: usize,
    pitch: usize,
}

/// Where a graph's copies go, and what makes them.
#[derive(Clone, Copy)]
pub(super) struct Copies<'a> {
    pub(super) card: &'a Card,
    pub(super) at: Place<'a>,
    /// Kernels, which are a part of this operation of whoever owns the post; none: copy engines. What waits in an engine's
    /// queue holds up what is submitted behind it, and that may be what it waits for, where members of a group share a card.
    pub(super) by_kernels: Option<(&'a Post, u64)>,
}

/// Which way.
#[derive(Clone, Copy)]
enum Way {
    Down,
    Up,
}

impl HostCall {
    /// `run` is given the copies of `accesses`, in their order. The context is current.
    pub(super) fn new(
        card: &Arc<Card>,
        workers: &Arc<Workers>,
        device: &DeviceInner,
        accesses: &[Access],
        run: impl Fn(&[Staged]) + Send + Sync + 'static,
    ) -> Result<Arc<HostCall>, CudaError> {
        let mut end = ALIGN;
        let starts: Vec<usize> = accesses
            .iter()
            .map(|access| {
                let start = end;
                end = (start + access.view.bytes()).next_multiple_of(ALIGN);
                start
            })
            .collect();
        let block = PinnedBlock::new(card, end)?;
        // SAFETY: every start is inside the block, which is `end` bytes or more.
        let staged: Vec<Staged> = starts.iter().map(|start| Staged(unsafe { block.host().add(*start) })).collect();
        // SAFETY: both point into the block.
        let mapped = |host: Staged| block.card() + unsafe { host.0.offset_from(block.host()) } as u64;
        let copies = |wanted: fn(Mode) -> bool| {
            let chosen = accesses.iter().zip(&staged).filter(|(access, _)| wanted(access.mode));
            let copies = chosen.map(|(access, host)| copy(access, *host, mapped(*host)));
            copies.filter(|copy| copy.rows * copy.row_bytes > 0).collect::<Vec<_>>()
        };
        let (down, up) = (copies(|mode| mode != Mode::Write), copies(Mode::writes));
        let fresh = accesses.iter().zip(&staged).filter(|(access, _)| access.mode == Mode::Write);
        let fresh = fresh.map(|(access, host)| (*host, access.view.bytes())).collect();
        let fresh_byte = fill_byte(device.machine.options.fresh);
        let (workers, run) = (workers.clone(), Box::new(run));
        Ok(Arc::new(HostCall { workers, run, block, staged, down, up, fresh, fresh_byte }))
    }

    fn done(&self) -> &AtomicU32 {
        // SAFETY: the first word of the block is used for nothing else, and is aligned.
        unsafe { AtomicU32::from_ptr(self.block.host().cast().as_ptr()) }
    }

    /// Runs the function, with nothing of its copies under way.
    fn stage(&self) {
        for (host, bytes) in &self.fresh {
            // SAFETY: a piece of this call's own block, which no copy touches now.
            unsafe { host.0.write_bytes(self.fresh_byte, *bytes) };
        }
        (self.run)(&self.staged);
    }

    /// On a worker, while the stream stands still.
    fn run(self: Arc<Self>) {
        self.stage();
        let done = ptr::from_ref(self.done());
        // First, so that whoever has waited for the stream finds nothing of it held by a worker.
        drop(self);
        // SAFETY: whoever queued the call keeps it until the stream has passed, and it stands still until this store.
        unsafe { &*done }.store(1, Ordering::Release);
    }

    /// Queues all of it. Whoever queues keeps the call until the stream has passed it.
    pub(super) fn queue(self: &Arc<Self>, card: &Card, stream: RawStream) -> Result<(), CudaError> {
        self.down.iter().try_for_each(|copy| copy.queue(card, stream, Way::Down))?;
        let data = Arc::as_ptr(self).cast_mut().cast();
        // SAFETY: `data` lives until the stream has passed (see above), which is what `begin` needs.
        card.check("cuLaunchHostFunc", unsafe { sys::cuLaunchHostFunc(stream.0, Some(begin), data) })?;
        let equal = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ as u32;
        // SAFETY: the word lives as long as the call.
        let code = unsafe { sys::cuStreamWaitValue32_v2(stream.0, self.block.card(), 1, equal) };
        card.check("cuStreamWaitValue32", code)?;
        self.up.iter().try_for_each(|copy| copy.queue(card, stream, Way::Up))
    }

    /// Runs the function now, and queues copies of what it wrote. Whoever queues keeps the call as in `queue`.
    pub(super) fn queue_upload(&self, card: &Card, stream: RawStream) -> Result<(), CudaError> {
        self.stage();
        self.up.iter().try_for_each(|copy| copy.queue(card, stream, Way::Up))
    }

    /// Queues copies of what the function will read. It may run when the stream has passed them.
    pub(super) fn queue_download(&self, card: &Card, stream: RawStream) -> Result<(), CudaError> {
        self.down.iter().try_for_each(|copy| copy.queue(card, stream, Way::Down))
    }

    /// The function, over copies that the card has made: the stream has passed `queue_download`.
    pub(super) fn land(&self) {
        (self.run)(&self.staged);
    }

    /// Runs the function now, and adds nodes that copy what it wrote, at every launch.
    pub(super) fn add_upload(&self, copies: Copies<'_>) -> Result<Vec<sys::CUgraphNode>, CudaError> {
        self.stage();
        copies.add_all(&self.up, Way::Up)
    }

    /// Adds nodes for all of it behind those of the place; tells those that are its end. The graph keeps the call.
    pub(super) fn add_nodes(self: &Arc<Self>, copies: Copies<'_>) -> Result<Vec<sys::CUgraphNode>, CudaError> {
        let Copies { card, at: Place { graph, behind, .. }, .. } = copies;
        let down = copies.add_all(&self.down, Way::Down)?;
        let behind = if down.is_empty() { behind } else { &down };
        let params = sys::CUDA_HOST_NODE_PARAMS { fn_: Some(begin), userData: Arc::as_ptr(self).cast_mut().cast() };
        let (mut run, mut wait) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: as in `queue`; the graph keeps the call for as long as a launch of it may run.
        let code = unsafe { sys::cuGraphAddHostNode(&mut run, graph, behind.as_ptr(), behind.len(), &params) };
        card.check("cuGraphAddHostNode", code)?;
        let mut word = sys::CUstreamBatchMemOpParams { pad: [0; 6] };
        word.waitValue = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st {
            operation: sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_32,
            address: self.block.card(),
            __bindgen_anon_1: sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st__bindgen_ty_1 {
                value: 1,
            },
            flags: sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ as u32,
            alias: 0,
        };
        let params =
            sys::CUDA_BATCH_MEM_OP_NODE_PARAMS { ctx: card.context(), count: 1, paramArray: &mut word, flags: 0 };
        // SAFETY: the parameters are copied; the word lives as long as the call.
        let code = unsafe { sys::cuGraphAddBatchMemOpNode(&mut wait, graph, &run, 1, &params) };
        card.check("cuGraphAddBatchMemOpNode", code)?;
        let up = Copies { at: Place { behind: &[wait], ..copies.at }, ..copies }.add_all(&self.up, Way::Up)?;
        Ok(if up.is_empty() { vec![wait] } else { up })
    }
}

/// What the driver calls when the copies are down: leaves the rest to a worker.
///
/// # Safety
/// `data` is the address of a live [`HostCall`] that an `Arc` owns.
unsafe extern "C" fn begin(data: *mut c_void) {
    // SAFETY: the caller promises a live call in an `Arc`; the count goes up, so `from_raw` owns one of its own.
    let call = unsafe {
        Arc::increment_strong_count(data.cast::<HostCall>());
        Arc::from_raw(data.cast_const().cast::<HostCall>())
    };
    call.done().store(0, Ordering::Relaxed);
    let workers = call.workers.clone();
    workers.submit(Box::new(move || call.run()));
}

/// Whether a trace learns when a function ran.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Told {
    AsItRuns,
    /// It fills or reads what the card copies, and the card tells when that was.
    Not,
}

/// Runs the function of `op`, unless its device has failed; what it ends with is the device's.
pub(super) fn run_host(device: &DeviceInner, (op, at): (&Op, Position), staged: &[Staged], told: Told) {
    if device.failed() {
        return;
    }
    let run = op.launch.on_host().expect("BUG: a kernel is no host operation");
    let start = device.machine.tracer.now();
    // SAFETY: `staged` holds a copy of each access, of its size, which nobody else touches while the stream waits.
    let result = cpu::catch(|| run(&mut unsafe { Args::staged(&op.accesses, staged) }));
    // First, so that whoever learns of the error finds in the trace what ran.
    if start > 0 && told == Told::AsItRuns {
        cpu::trace_run(device, at, op.name, start, device.machine.tracer.now());
    }
    if let Err(error) = result {
        device.machine.fail(device, cpu::failure(device.op_ref_of(op.name, op.site.as_str(), at), error));
    }
    device.machine.progress.fetch_add(1, Ordering::Relaxed);
}

fn copy(access: &Access, host: Staged, mapped: u64) -> Copy {
    let region = access.view.region();
    Copy {
        host,
        mapped,
        card: address(&access.view),
        row_bytes: region.row_bytes,
        rows: region.rows,
        pitch: region.pitch,
    }
}

impl Copies<'_> {
    fn add_all(&self, copies: &[Copy], way: Way) -> Result<Vec<sys::CUgraphNode>, CudaError> {
        let Copies { card, at, by_kernels } = self;
        let add = |copy: &Copy| match by_kernels {
            None => copy.add_node(card, at.graph, at.behind, way),
            Some((post, operation)) => launch::add_node(card, at, &copy.call(way), post, *operation, None),
        };
        copies.iter().map(add).collect()
    }
}

impl Copy {
    fn call(&self, way: Way) -> Call {
        let host = Piece { at: self.mapped, pitch: self.row_bytes };
        let memory = Piece { at: self.card, pitch: if self.rows == 1 { self.row_bytes } else { self.pitch } };
        let (to, from) = match way {
            Way::Down => (host, memory),
            Way::Up => (memory, host),
        };
        Call::copy(to, from, self.rows, self.row_bytes)
    }

    fn host(&self) -> NonNull<u8> {
        self.host.0
    }

    fn queue(&self, card: &Card, stream: RawStream, way: Way) -> Result<(), CudaError> {
        let (host, memory) = (self.host().as_ptr().cast::<c_void>(), self.card);
        if self.rows == 1 {
            // SAFETY: both sides have `row_bytes` bytes, and whoever queued the operation keeps them.
            let code = unsafe {
                match way {
                    Way::Down => sys::cuMemcpyDtoHAsync_v2(host, memory, self.row_bytes, stream.0),
                    Way::Up => sys::cuMemcpyHtoDAsync_v2(memory, host, self.row_bytes, stream.0),
                }
            };
            return card.check("cuMemcpyAsync", code);
        }
        let params = self.params(way);
        let params = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: params.srcMemoryType,
            srcHost: params.srcHost,
            srcDevice: params.srcDevice,
            srcArray: ptr::null_mut(),
            srcPitch: params.srcPitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: params.dstMemoryType,
            dstHost: params.dstHost,
            dstDevice: params.dstDevice,
            dstArray: ptr::null_mut(),
            dstPitch: params.dstPitch,
            WidthInBytes: self.row_bytes,
            Height: self.rows,
        };
        // SAFETY: as above, for rows `pitch` apart on the card and without gaps on the host.
        card.check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&params, stream.0) })
    }

    fn add_node(
        &self,
        card: &Card,
        graph: sys::CUgraph,
        behind: &[sys::CUgraphNode],
        way: Way,
    ) -> Result<sys::CUgraphNode, CudaError> {
        let (mut node, params) = (ptr::null_mut(), self.params(way));
        let (first, count) = (behind.as_ptr(), behind.len());
        // SAFETY: as in `queue`; the graph keeps both sides.
        let code = unsafe { sys::cuGraphAddMemcpyNode(&mut node, graph, first, count, &params, card.context()) };
        card.check("cuGraphAddMemcpyNode", code).map(|()| node)
    }

    fn params(&self, way: Way) -> sys::CUDA_MEMCPY3D {
        let (host, memory) = (sys::CUmemorytype::CU_MEMORYTYPE_HOST, sys::CUmemorytype::CU_MEMORYTYPE_DEVICE);
        let (pointer, pitch) =
            (self.host().as_ptr().cast::<c_void>(), if self.rows == 1 { self.row_bytes } else { self.pitch });
        let (src, dst) = match way {
            Way::Down => ((memory, pitch), (host, self.row_bytes)),
            Way::Up => ((host, self.row_bytes), (memory, pitch)),
        };
        sys::CUDA_MEMCPY3D {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: src.0,
            srcHost: pointer.cast_const(),
            srcDevice: self.card,
            srcArray: ptr::null_mut(),
            reserved0: ptr::null_mut(),
            srcPitch: src.1,
            srcHeight: self.rows,
            dstXInBytes: 0,
            dstY: 0,
            dstZ: 0,
            dstLOD: 0,
            dstMemoryType: dst.0,
            dstHost: pointer,
            dstDevice: self.card,
            dstArray: ptr::null_mut(),
            reserved1: ptr::null_mut(),
            dstPitch: dst.1,
            dstHeight: self.rows,
            WidthInBytes: self.row_bytes,
            Height: self.rows,
            Depth: 1,
        }
    }
}
