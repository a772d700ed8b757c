//! What claims about kernels on a card are made of: the same trial on the host and on the card, over memory that is
//! poisoned and may have gaps.

use std::fs::File;

use device::{
    cuda::{CudaOptions, Products},
    *,
};

use super::drivers::{card_turn, cpu, cuda_with};

/// What fresh memory is full of.
const POISON: u8 = 0xFF;

/// Numbers that look random and are the same everywhere, from -2 to 2.
pub(super) fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 22) as f32 - 2.0
    };
    (0..n).map(|_| next()).collect()
}

/// A stream of one driver, and what a trial makes there.
pub(super) struct Bench {
    pub(super) device: Device,
    pub(super) stream: Stream,
    pub(super) side: Side,
}

/// A whole matrix, or columns with a gap on both sides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lie {
    Whole,
    Gaps,
    /// Gaps that leave every row at a multiple of eight elements.
    Aligned,
}

impl Lie {
    /// Columns to the left and to the right of `cols`.
    fn around(self, cols: usize) -> [usize; 2] {
        match self {
            Lie::Whole => [0, 0],
            Lie::Gaps => [3, 2],
            Lie::Aligned => [8, 8 + cols.next_multiple_of(8) - cols],
        }
    }
}

/// A tensor and the memory around it.
pub(super) struct Tensor {
    pub(super) all: View,
    pub(super) view: View,
    /// Columns in front of the view's.
    pub(super) left: usize,
}

impl Bench {
    pub(super) fn new(machine: &Machine) -> Bench {
        let device = machine.device(0).unwrap();
        let stream = device.stream("compute").unwrap();
        let side = if machine.driver() == "cuda" { Side::Card } else { Side::Host };
        Bench { device, stream, side }
    }

    /// Fresh, so poisoned.
    pub(super) fn tensor(&self, shape: &[usize], dtype: DType, lie: Lie) -> Tensor {
        let mut dims = shape.to_vec();
        let cols = *dims.last().unwrap();
        let [left, right] = lie.around(cols);
        *dims.last_mut().unwrap() += left + right;
        let all = self.device.alloc("t", &dims, dtype, MemoryKind::Other).unwrap();
        let view = if lie == Lie::Whole { all.clone() } else { all.columns(left..left + cols).unwrap() };
        Tensor { all, view, left }
    }

    pub(super) fn holding(&self, shape: &[usize], dtype: DType, lie: Lie, values: &[f32]) -> Tensor {
        let tensor = self.tensor(shape, dtype, lie);
        self.put(&tensor, values);
        tensor
    }

    /// Fills a tensor with `values`, rounded to its type.
    pub(super) fn put(&self, tensor: &Tensor, values: &[f32]) {
        match tensor.view.dtype() {
            DType::F32 => self.stream.upload(&tensor.view, values.to_vec()),
            DType::Bf16 => self.stream.upload(&tensor.view, values.iter().map(|x| bf16::from_f32(*x)).collect()),
            DType::I32 => self.stream.upload(&tensor.view, values.iter().map(|x| *x as i32).collect()),
            DType::I16 => self.stream.upload(&tensor.view, values.iter().map(|x| *x as i16).collect()),
        }
        .unwrap();
    }

    /// A contiguous vector of f32.
    pub(super) fn vector(&self, values: &[f32]) -> View {
        self.holding(&[values.len()], DType::F32, Lie::Whole, values).view
    }

    pub(super) fn ids(&self, ids: &[i32]) -> View {
        let view = self.device.alloc("ids", &[ids.len()], DType::I32, MemoryKind::Other).unwrap();
        self.stream.upload(&view, ids.to_vec()).unwrap();
        view
    }

    /// [`Bench::tensor`] of what is `dtype` on the card.
    pub(super) fn output(&self, shape: &[usize], dtype: DType, lie: Lie) -> Tensor {
        self.tensor(shape, self.side.of(dtype), lie)
    }

    /// The same, holding `values`.
    pub(super) fn input(&self, shape: &[usize], dtype: DType, lie: Lie, values: &[f32]) -> Tensor {
        self.holding(shape, self.side.of(dtype), lie, values)
    }

    pub(super) fn run(&self, op: Result<Op, Error>) {
        self.stream.launch(op.unwrap()).unwrap();
    }

    /// All of its memory, gaps included, as bits.
    pub(super) fn bits(&self, tensor: &Tensor) -> Vec<u32> {
        match tensor.view.dtype() {
            DType::F32 => self.get::<f32>(&tensor.all).into_iter().map(f32::to_bits).collect(),
            DType::Bf16 => self.get::<bf16>(&tensor.all).into_iter().map(|x| x.to_bits().into()).collect(),
            DType::I32 => self.get::<i32>(&tensor.all).into_iter().map(|x| x as u32).collect(),
            DType::I16 => self.get::<i16>(&tensor.all).into_iter().map(|x| x as u32).collect(),
        }
    }

    /// The values of a tensor, and how many around it are not as they were.
    fn got(&self, tensor: &Tensor) -> Got {
        let bits = self.bits(tensor);
        let dtype = tensor.view.dtype();
        let poison = if dtype == DType::Bf16 {
            u32::from(u16::from_ne_bytes([POISON; 2]))
        } else {
            u32::from_ne_bytes([POISON; 4])
        };
        let values = match dtype {
            DType::Bf16 => self.get::<bf16>(&tensor.view).into_iter().map(bf16::to_f32).collect(),
            _ => self.get::<f32>(&tensor.view),
        };
        Got { values, gaps: gaps(&bits, tensor).into_iter().filter(|bits| *bits != poison).count(), dtype }
    }

    pub(super) fn get<T: Element>(&self, view: &View) -> Vec<T> {
        self.stream.download::<T>(view).unwrap().wait().unwrap()
    }
}

/// A machine on the card that a claim's trials share, and the right to it: opening one loads all kernels, which takes longer
/// than most trials.
pub(super) struct OpenCard {
    machine: Machine,
    _turn: File,
}

impl OpenCard {
    pub(super) fn new() -> OpenCard {
        OpenCard::with(CudaOptions::default())
    }

    fn with(options: CudaOptions) -> OpenCard {
        let turn = card_turn();
        OpenCard { machine: cuda_with(options).machine(), _turn: turn }
    }

    pub(super) fn bench(&self) -> Bench {
        Bench::new(&self.machine)
    }

    /// Runs `trial` on both; it gives the memory of its outputs.
    #[track_caller]
    pub(super) fn equal_bits(&self, trial: impl Fn(&Bench) -> Vec<Vec<u32>>) {
        let [host, card] = both_on(&self.machine, trial);
        for (i, (host, card)) in host.iter().zip(&card).enumerate() {
            let differ = host.iter().zip(card).position(|(a, b)| a != b);
            assert!(differ.is_none(), "output {i} differs at {differ:?}: {:?}", differ.map(|at| (host[at], card[at])));
        }
    }

    /// Outputs of both and the true values: no gap was touched, nothing was left unwritten, and the error is small.
    #[track_caller]
    pub(super) fn close(&self, want: &[Vec<f64>], trial: impl Fn(&Bench) -> Vec<Tensor>) {
        let want: Vec<Want> = want.iter().map(|values| Want::new(String::new(), values.clone())).collect();
        close_on(&self.machine, &want, trial);
    }
}

fn both_on<T>(card: &Machine, trial: impl Fn(&Bench) -> T) -> [T; 2] {
    [&cpu(1).machine(), card].map(|machine| trial(&Bench::new(machine)))
}

/// The true values of an output.
pub(super) struct Want {
    what: String,
    values: Vec<f64>,
    /// How much larger than the host's the card's error may be.
    times: f64,
    /// What may be added to that, by element; empty where nothing may.
    beside: Vec<f64>,
}

impl Want {
    pub(super) fn new(what: String, values: Vec<f64>) -> Want {
        Want { what, values, times: 2.0, beside: Vec::new() }
    }

    pub(super) fn within(self, times: f64) -> Want {
        Want { times, ..self }
    }

    /// For results that are rounded once more on their way.
    pub(super) fn beside(self, beside: Vec<f64>) -> Want {
        assert_eq!(beside.len(), self.values.len(), "one for each value");
        Want { beside, ..self }
    }
}

/// The most that rounding `x` to bf16, of 8 significant bits, changes.
pub(super) fn half_a_unit(x: f64) -> f64 {
    if x == 0.0 { 0.0 } else { (x.abs().log2().floor() - 8.0).exp2() }
}

/// Where a trial runs: outputs of the card's type are f32 on the host, whose values are rounded afterwards.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Host,
    Card,
}

impl Side {
    /// The type of a value that is `dtype` on the card.
    pub(super) fn of(self, dtype: DType) -> DType {
        if self == Side::Host { DType::F32 } else { dtype }
    }
}

/// What a trial left in an output.
struct Got {
    values: Vec<f32>,
    gaps: usize,
    dtype: DType,
}

/// [`OpenCard::close`], with what computes products.
#[track_caller]
pub(super) fn close_by(products: Products, want: &[Want], trial: impl Fn(&Bench) -> Vec<Tensor>) {
    close_with(CudaOptions { products, ..CudaOptions::default() }, want, trial);
}

/// The same, with settings.
#[track_caller]
pub(super) fn close_with(options: CudaOptions, want: &[Want], trial: impl Fn(&Bench) -> Vec<Tensor>) {
    close_on(&OpenCard::with(options).machine, want, trial);
}

/// [`close_with`] for whoever has the card, and a machine that is poisoned. All that misses is told at once.
#[track_caller]
pub(super) fn close_on(card: &Machine, want: &[Want], trial: impl Fn(&Bench) -> Vec<Tensor>) {
    let [host, card] = both_on(card, |bench| trial(bench).iter().map(|tensor| bench.got(tensor)).collect::<Vec<_>>());
    assert_eq!((host.len(), card.len()), (want.len(), want.len()), "outputs");
    let misses = host.iter().zip(&card).zip(want).enumerate().filter_map(|(i, ((host, card), want))| {
        let miss = miss(host, card, want)?;
        Some(format!("output {i} {}: {miss}", want.what))
    });
    let misses: Vec<String> = misses.collect();
    assert!(misses.is_empty(), "{} of {} outputs miss:\n{}", misses.len(), want.len(), misses.join("\n"));
}

fn miss(host: &Got, card: &Got, Want { values: want, times, beside, .. }: &Want) -> Option<String> {
    let (round, step) = match card.dtype {
        DType::Bf16 => ((|x| bf16::from_f32(x).to_f32()) as fn(f32) -> f32, 1.0 / 256.0),
        _ => ((|x| x) as fn(f32) -> f32, f64::from(f32::EPSILON)),
    };
    let most = |most: f64, e: f64| if e > most || e.is_nan() { e } else { most };
    let errors = |got: Vec<f32>| got.into_iter().zip(want).map(|(a, b)| (f64::from(a) - b).abs());
    let other = errors(host.values.iter().map(|x| round(*x)).collect()).fold(0.0, most);
    let largest = want.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let allowed = (times * other).max(largest * step / 2.0);
    // What is left of each error when that is taken off which its element may have beside the others.
    let beside = beside.iter().copied().chain(std::iter::repeat(0.0));
    let own = errors(card.values.clone()).zip(beside).map(|(e, beside)| e - beside).fold(0.0, most);
    if card.gaps > 0 {
        return Some(format!("{} values outside of its view were written", card.gaps));
    }
    // A NaN is what was not written, or computed from that.
    (own.is_nan() || own > allowed).then(|| format!("error {own:e}, the host has {other:e}, largest value {largest:e}"))
}

/// What lies between the rows.
pub(super) fn gaps(all: &[u32], tensor: &Tensor) -> Vec<u32> {
    let (width, cols, left) = (tensor.all.cols(), tensor.view.cols(), tensor.left);
    if width == cols {
        return Vec::new();
    }
    all.chunks_exact(width).flat_map(|row| row[..left].iter().chain(&row[left + cols..])).copied().collect()
}

pub(super) fn f64s(values: &[f32]) -> Vec<f64> {
    values.iter().map(|x| f64::from(*x)).collect()
}

pub(super) const SHAPES: [&[usize]; 4] = [&[1, 1], &[7, 13], &[3, 5, 67], &[2, 1023]];
pub(super) const REAL: [DType; 2] = [DType::F32, DType::Bf16];
pub(super) const LIES: [Lie; 2] = [Lie::Whole, Lie::Gaps];

/// [`noise`] that `dtype` holds exactly.
pub(super) fn values(dtype: DType, seed: u64, n: usize) -> Vec<f32> {
    let mut values = noise(seed, n);
    if dtype == DType::Bf16 {
        values.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
    }
    values
}
