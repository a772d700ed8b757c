//! Ways to compute products, chosen by their times on a card that does nothing else.

use std::{
    collections::BTreeMap,
    ffi::CStr,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::sys;

use super::{
    CudaEngine, CudaError,
    blaslt::{self, BlasLt, WORKSPACE},
    card::{Card, SideStream},
    choices::{self, Choice, Choices},
    contest::fastest,
    error::check,
    fault::Post,
    hopper, kernels,
    launch::address,
    memory::{self, PinnedBlock},
    product::{Product, ProductShape},
    requests,
    steps::{Launchable, Step, Steps},
    stopwatch::Stopwatch,
    workspace::Workspace,
};
use crate::{
    Access, DType, Device, Error, Kernel, MemoryKind, View,
    ops::{GemmFinish, GemmShape, MatrixShape},
};

/// What measuring products led to. Cards of one kind have one choice.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ProductChoices {
    /// Shapes that there is a choice for, on all kinds of card together.
    pub chosen: usize,
    /// Of these: those that were measured now. The others are known from earlier runs.
    pub measured: usize,
    /// Of these: those for which the library's first algorithm is not the fastest.
    pub better: usize,
    /// Shapes whose matrices do not fit on a card; they keep the library's first algorithm.
    pub too_large: usize,
    /// How long it took.
    pub took: Duration,
    /// Tells choices apart: runs whose fingerprints are equal compute their products in the same way.
    pub fingerprint: u64,
}

/// Algorithms that the library is asked for.
const MOST: usize = 16;
/// How long a card works before its times count: clocks rise slowly.
const WARM: Duration = Duration::from_millis(20);
/// What is timed at once: launches one behind the other, as in a step. A launch behind a pause is slower by as much as
/// algorithms differ.
const BURST: Duration = Duration::from_millis(2);
const MOST_OF_A_BURST: f64 = 16.0;

impl CudaEngine {
    /// Chooses algorithms for `products` on every kind of card, and lets all cards of the kind have them. `device` opens
    /// the device of a rank; no other one is open.
    pub(crate) fn measure(
        &self,
        products: &[GemmShape],
        device: impl Fn(u32) -> Result<Device, Error>,
    ) -> Result<ProductChoices, Error> {
        let (begin, mut told) = (Instant::now(), ProductChoices::default());
        for (key, ranks) in self.kinds().map_err(failed)? {
            let first = self.card(ranks[0]);
            let Some(blas) = first.products().map_err(failed)? else { continue };
            let mut choices = Choices::open(self.folder.as_deref(), format!("{key}, cuBLASLt {}", blaslt::version()));
            let (mut bench, mut shapes) = (None, Vec::new());
            for product in products {
                let own = library_shapes(product);
                if own.is_empty() {
                    continue;
                }
                if !is_known(&choices, first, blas, &own).map_err(failed)? {
                    if bench.is_none() {
                        bench = Some(Bench::new(first, device(ranks[0])?).map_err(failed)?);
                    }
                    let bench = bench.as_ref().expect("BUG: a bench that was just made");
                    match bench.measure(blas, product, &mut choices)? {
                        Some(better) => {
                            told.measured += 1;
                            told.better += usize::from(better);
                        }
                        None => {
                            told.too_large += 1;
                            continue;
                        }
                    }
                }
                told.chosen += 1;
                shapes.extend(own);
            }
            drop(bench);
            choices.keep();
            memory::give_back(first).map_err(failed)?;
            for rank in ranks {
                self.card(rank).bind().map_err(failed)?;
                let Some(blas) = self.card(rank).products().map_err(failed)? else { continue };
                let mut known = shapes.iter().filter_map(|shape| Some((shape, choices.get(shape)?)));
                known.try_for_each(|(shape, choice)| blas.adopt(shape, choice)).map_err(failed)?;
            }
            told.fingerprint = told.fingerprint.rotate_left(1) ^ choices.fingerprint(shapes.iter());
        }
        told.took = begin.elapsed();
        tracing::info!(?told, "cuda.measure_products");
        Ok(told)
    }

    /// Ranks that have the first places of each card, by the kind of the card.
    fn kinds(&self) -> Result<BTreeMap<String, Vec<u32>>, CudaError> {
        let mut kinds = BTreeMap::<String, Vec<u32>>::new();
        let mut seen = Vec::new();
        for (rank, card) in (0..).zip(&self.cards) {
            if !seen.contains(&card.ordinal) {
                seen.push(card.ordinal);
                kinds.entry(kind(card)?).or_default().push(rank);
            }
        }
        Ok(kinds)
    }
}

/// What times depend on, apart from the library.
fn kind(card: &Card) -> Result<String, CudaError> {
    let (mut name, mut driver) = ([0u8; 128], 0);
    // SAFETY: the driver is initialised; writes as many bytes as it is told at most, the last one 0, and one integer.
    unsafe {
        let code = sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, card.device);
        check("cuDeviceGetName", code)?;
        check("cuDriverGetVersion", sys::cuDriverGetVersion(&mut driver))?;
    }
    let name = CStr::from_bytes_until_nul(&name).map(CStr::to_string_lossy).unwrap_or_default();
    let (arch, multiprocessors) = (card.arch()?, card.multiprocessors);
    let own = kernels::is_hopper(arch).then(|| choices::fingerprint([kernels::COMMON, kernels::HOPPER.text]));
    let own = own.map_or_else(String::new, |own| format!(", kernel of products {own:016x}"));
    Ok(format!("{name}, {arch}, {multiprocessors} multiprocessors, driver {driver}{own}"))
}

fn failed(source: CudaError) -> Error {
    Error::Cuda { what: "products cannot be measured".to_owned(), source }
}

/// What the library may be asked for on the way to `product`.
fn library_shapes(product: &GemmShape) -> Vec<ProductShape> {
    let GemmShape { spec, matrices } = product;
    let parts = match spec.finish {
        GemmFinish::BiasGelu => Some(ProductShape::up_to_gelu(spec, matrices)),
        GemmFinish::GeluBackward => Some(ProductShape::up_to_slope(spec, matrices)),
        _ => None,
    };
    [ProductShape::whole(spec, matrices)].into_iter().chain(parts).filter(ProductShape::is_allowed).collect()
}

fn is_known(choices: &Choices, card: &Card, blas: &BlasLt, shapes: &[ProductShape]) -> Result<bool, CudaError> {
    for shape in shapes {
        let known = match choices.get(shape) {
            Some(Choice::Algorithm(algorithm)) => blas.takes(shape, algorithm)?,
            Some(Choice::Hopper) => card.multiplies(shape),
            Some(Choice::Otherwise) => true,
            None => false,
        };
        if !known {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A card with what is needed to time launches on it.
struct Bench {
    device: Device,
    card: Arc<Card>,
    stream: SideStream,
    post: Post,
    workspace: Workspace,
    /// Random numbers of f32 and of bf16, as many bytes as it has. Products of zeros take less power, and so less time.
    noise: [PinnedBlock; 2],
    clock: Stopwatch,
}

/// Bytes of random numbers that memory is filled with, over and over.
const NOISE: usize = 1 << 20;

impl Bench {
    /// The context of `card` is current; `device` is on it.
    fn new(card: &Arc<Card>, device: Device) -> Result<Bench, CudaError> {
        card.bind()?;
        Ok(Bench {
            device,
            card: card.clone(),
            stream: SideStream::new(card)?,
            post: Post::new(card)?,
            workspace: Workspace::new(card, WORKSPACE)?,
            noise: [noise(card, DType::F32)?, noise(card, DType::Bf16)?],
            clock: Stopwatch::new(card)?,
        })
    }

    /// Chooses for `product` and what the library may be asked for on the way; whether its first algorithm is not the
    /// choice. None: its matrices do not fit on the card.
    fn measure(&self, blas: &BlasLt, product: &GemmShape, choices: &mut Choices) -> Result<Option<bool>, Error> {
        let Some(accesses) = self.accesses(product)? else { return Ok(None) };
        self.card.bind().map_err(failed)?;
        accesses.iter().try_for_each(|access| self.fill(&access.view)).map_err(failed)?;
        let steps = requests::steps(&Kernel::Gemm(product.spec), &accesses, self.card.sums());
        let Steps::Several(mut steps) = steps else { unreachable!("BUG: a product is a step of a library") };
        let (mut step, mut ways, mut better) = (steps.pop(), Vec::<Way>::new(), false);
        while let Some(Step::Product { product, then, otherwise }) = step {
            step = Some(*otherwise);
            let shape = product.shape;
            if shape.is_allowed() {
                let found = self.by_library(blas, &product).map_err(failed)?;
                choices.set(&shape, found.as_ref().map_or(Choice::Otherwise, |(_, way)| way.choice.clone()));
                if let Some((at, mut way)) = found {
                    better |= at > 0 && ways.is_empty();
                    way.launches.extend(then.map(Launchable::Call));
                    ways.push(way);
                }
            }
            if self.card.multiplies(&shape) {
                let own = hopper::call(&self.card, &product).map_err(failed)?;
                ways.push(Way { shape, choice: Choice::Hopper, launches: vec![Launchable::Call(own)] });
            }
        }
        if let Some(won) = self.contest(ways.len(), |at| ways[at].launches.iter().collect()).map_err(failed)? {
            better |= won > 0;
            ways[..won].iter().for_each(|way| choices.set(&way.shape, Choice::Otherwise));
            choices.set(&ways[won].shape, ways[won].choice.clone());
        }
        Ok(Some(better))
    }

    /// The fastest algorithm of the library for `product`, and its place among those that the library offers.
    fn by_library(&self, blas: &BlasLt, product: &Product) -> Result<Option<(usize, Way)>, CudaError> {
        let plans = blas.candidates(&product.shape, MOST)?.into_iter().map(Arc::new);
        let (choices, launches): (Vec<_>, Vec<_>) =
            plans.map(|plan| (plan.algorithm(), Launchable::Product(Box::new(product.clone()), plan))).unzip();
        let won = self.contest(launches.len(), |at| vec![&launches[at]])?;
        let won = won.and_then(|at| Some((at, choices.into_iter().zip(launches).nth(at)?)));
        Ok(won.map(|(at, (algorithm, launch))| {
            (at, Way { shape: product.shape, choice: Choice::Algorithm(algorithm), launches: vec![launch] })
        }))
    }

    /// The place of the fastest of several ways; none if none can run.
    fn contest<'w>(
        &self,
        count: usize,
        launches: impl Fn(usize) -> Vec<&'w Launchable>,
    ) -> Result<Option<usize>, CudaError> {
        if count == 0 {
            return Ok(None);
        }
        let (begin, mut burst) = (Instant::now(), 1);
        while begin.elapsed() < WARM {
            let Some(time) = self.time(&launches(0), 1)? else { break };
            burst = (BURST.as_secs_f64() / time).clamp(1.0, MOST_OF_A_BURST) as usize;
        }
        Ok(fastest(count, |at| self.time(&launches(at), burst))?.map(|winner| winner.at))
    }

    /// Seconds that `launches` take `times` times, one behind the other; none if they cannot be launched.
    fn time(&self, launches: &[&Launchable], times: usize) -> Result<Option<f64>, CudaError> {
        let (card, stream) = (&self.card, self.stream.raw);
        // The clock starts behind a launch, when the card is at work.
        for time in 0..=times {
            if time == 1 {
                card.record(self.clock.begin, stream)?;
            }
            for launch in launches {
                match launch.launch(card, stream, &self.post, 1, Some(&self.workspace)) {
                    Err(error) if error.is_fatal() => return Err(error),
                    Err(_) => return Ok(None),
                    Ok(()) => {}
                }
            }
        }
        card.record(self.clock.end, stream)?;
        self.clock.read().map(Some)
    }

    /// Memory for each access of `product`; none if there is not enough.
    fn accesses(&self, product: &GemmShape) -> Result<Option<Vec<Access>>, Error> {
        let made = product.matrices.iter().map(|matrix| self.view(matrix).map(|view| Access::read(&view)));
        match made.collect() {
            Ok(accesses) => Ok(Some(accesses)),
            Err(Error::OutOfMemory { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A view that lies as `matrix` does.
    fn view(&self, matrix: &MatrixShape) -> Result<View, Error> {
        let [rows, cols, pitch] = [matrix.rows, matrix.cols, matrix.pitch].map(|size| size as usize);
        // Memory begins where everything is aligned.
        let shift = match matrix.align as usize {
            align if align < MatrixShape::ALIGN => align / matrix.dtype.size_bytes(),
            _ => 0,
        };
        let numel = rows * pitch;
        let all = self.device.alloc("product", &[shift + numel], matrix.dtype, MemoryKind::Other)?;
        let view = all.flat(shift..shift + numel)?.reshape(&[rows, pitch])?.columns(0..cols)?;
        debug_assert_eq!(MatrixShape::of(&view), *matrix, "BUG: a view that does not lie as it was asked to");
        Ok(view)
    }

    /// Fills all of the memory of `view` with random numbers. The context is current.
    fn fill(&self, view: &View) -> Result<(), CudaError> {
        let noise = &self.noise[usize::from(view.dtype() == DType::Bf16)];
        let (from, bytes) = (address(view) - view.region().start as u64, view.allocation().bytes);
        let first = bytes.min(NOISE);
        let host = noise.host().as_ptr().cast_const().cast();
        // SAFETY: the block holds NOISE bytes and lives as long as this; the memory is the bench's own.
        self.card.on_side(|stream| unsafe {
            ("cuMemcpyHtoDAsync", sys::cuMemcpyHtoDAsync_v2(from, host, first, stream.0))
        })?;
        let mut full = first;
        while full < bytes {
            let more = full.min(bytes - full);
            // SAFETY: both halves are inside the memory, and do not overlap.
            self.card.on_side(|stream| unsafe {
                ("cuMemcpyDtoDAsync", sys::cuMemcpyDtoDAsync_v2(from + full as u64, from, more, stream.0))
            })?;
            full += more;
        }
        Ok(())
    }
}

/// One way to compute a product: what runs one behind the other, and what to choose for `shape` so that it does.
struct Way {
    shape: ProductShape,
    choice: Choice,
    launches: Vec<Launchable>,
}

/// Numbers from -1 to 1 that look random and are the same everywhere.
fn noise(card: &Arc<Card>, dtype: DType) -> Result<PinnedBlock, CudaError> {
    let block = PinnedBlock::new(card, NOISE)?;
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    for at in 0..NOISE / dtype.size_bytes() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let value = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        // SAFETY: inside the block, which is larger and whose first byte is aligned to 4 KiB; the card does not know it.
        unsafe {
            match dtype {
                DType::Bf16 => block.host().cast::<half::bf16>().add(at).write(half::bf16::from_f32(value)),
                _ => block.host().cast::<f32>().add(at).write(value),
            }
        }
    }
    Ok(block)
}

impl fmt::Display for ProductChoices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ProductChoices { chosen, measured, better, too_large, took, fingerprint } = self;
        write!(
            f,
            "algorithms for {chosen} shapes of products, {measured} of them measured in {:.1} s",
            took.as_secs_f64()
        )?;
        write!(f, " ({better} not the library's first), fingerprint {fingerprint:016x}")?;
        if *too_large > 0 {
            write!(f, "; {too_large} more do not fit on a card and keep the library's first")?;
        }
        Ok(())
    }
}
