//! Products on a card against their twins on the host and sums in f64: by the library, and by the kernel that stands in
//! where the library has no algorithm.

use std::{
    fs,
    path::{Path, PathBuf},
};

use device::{
    cuda::{CudaOptions, Products},
    ops::*,
    *,
};

use super::{
    capture_graphs::{executable, order},
    card_bench::{Bench, LIES, Lie, Side, Tensor, Want, close_by, close_on, half_a_unit, values},
    card_kernels::{far_slopes, gelu, gelu_slope},
    drivers::{card_turn, cuda},
};

/// What follows a product, with what it starts from.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum After {
    Overwrite,
    Add,
    /// A factor on the device; 0 over what was never written.
    Keep(f32),
    Bias,
    BiasGelu,
    Residual,
    BiasResidual,
    GeluBackward,
}

const AFTER: [After; 9] = [
    After::Overwrite,
    After::Add,
    After::Keep(0.0),
    After::Keep(0.25),
    After::Bias,
    After::BiasGelu,
    After::Residual,
    After::BiasResidual,
    After::GeluBackward,
];

#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) sizes: [usize; 3],
    pub(super) trans: Trans,
    pub(super) after: After,
    pub(super) lie: Lie,
    /// Of the factors and all else, and of the result.
    pub(super) types: [DType; 2],
}

/// Odd ones, some with a single row or column, and some that kernels like.
const SIZES: [[usize; 3]; 5] = [[1, 1, 1], [5, 7, 3], [1, 130, 65], [67, 130, 93], [192, 128, 64]];

/// Of long sums.
const LONG: [usize; 3] = [96, 257, 1000];

impl Case {
    fn all(sizes: &[[usize; 3]], after: &[After], types: [DType; 2]) -> Vec<Case> {
        let ways = [Trans::Nn, Trans::Nt, Trans::Tn, Trans::Tt];
        let each = sizes.iter().flat_map(|&sizes| ways.map(|trans| (sizes, trans)));
        let each = each.flat_map(|(sizes, trans)| LIES.map(|lie| (sizes, trans, lie)));
        let all = each
            .flat_map(|(sizes, trans, lie)| after.iter().map(move |&after| Case { sizes, trans, after, lie, types }));
        // What follows a product is the same whichever way its factors are stored.
        let plain = |case: &Case| matches!(case.after, After::Overwrite | After::Add | After::Keep(_));
        let mixed = types[0] != types[1];
        all.filter(|case| plain(case) || (!mixed && matches!(case.trans, Trans::Nt | Trans::Nn))).collect()
    }

    fn stored(&self) -> [[usize; 2]; 2] {
        let [m, n, k] = self.sizes;
        let (ta, tb) = (matches!(self.trans, Trans::Tn | Trans::Tt), matches!(self.trans, Trans::Nt | Trans::Tt));
        [if ta { [k, m] } else { [m, k] }, if tb { [n, k] } else { [k, n] }]
    }

    fn factors(&self) -> [Vec<f32>; 2] {
        let [m, n, k] = self.sizes;
        [values(self.types[0], 1, m * k), values(self.types[0], 2, k * n)]
    }

    fn bias(&self) -> Vec<f32> {
        values(self.types[0], 3, self.sizes[1])
    }

    /// What c holds, or is added, or what the activation had taken.
    fn other(&self, dtype: DType) -> Vec<f32> {
        values(dtype, 4, self.sizes[0] * self.sizes[1])
    }

    /// What it should be by the library or by us.
    ///
    /// The library rounds a product of bf16, with its bias if GELU follows, before it adds old values or a residual, takes
    /// GELU or multiplies with its slope: each element may be off by half a unit of what was rounded, times what that is
    /// multiplied with. GELU's slope is nowhere larger than 1.13.
    pub(super) fn want(&self, products: Products) -> Vec<Want> {
        let [m, n, k] = self.sizes;
        let [[_, wide_a], [_, wide_b]] = self.stored();
        let ([a, b], bias, [other, old]) = (self.factors(), self.bias(), self.types.map(|dtype| self.other(dtype)));
        let (ta, tb) = (matches!(self.trans, Trans::Tn | Trans::Tt), matches!(self.trans, Trans::Nt | Trans::Tt));
        let (mut c, mut pre, mut rounded) = (Vec::new(), Vec::new(), Vec::new());
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let a = |l: usize| f64::from(a[if ta { l * wide_a + i } else { i * wide_a + l }]);
            let b = |l: usize| f64::from(b[if tb { j * wide_b + l } else { l * wide_b + j }]);
            let sum: f64 = (0..k).map(|l| a(l) * b(l)).sum();
            let [bias, other, old] = [bias[j], other[i * n + j], old[i * n + j]].map(f64::from);
            pre.push(sum + bias);
            rounded.push(match self.after {
                After::Overwrite | After::Keep(0.0) | After::Bias => 0.0,
                After::Add | After::Keep(_) | After::Residual | After::BiasResidual => half_a_unit(sum),
                After::BiasGelu => 1.13 * half_a_unit(sum + bias),
                After::GeluBackward => gelu_slope(other).abs() * half_a_unit(sum),
            });
            c.push(match self.after {
                After::Overwrite => sum,
                After::Add => sum + old,
                After::Keep(0.0) => sum,
                After::Keep(keep) => sum + f64::from(keep) * old,
                After::Bias => sum + bias,
                After::BiasGelu => gelu(sum + bias),
                After::Residual => sum + other,
                After::BiasResidual => sum + bias + other,
                After::GeluBackward => sum * gelu_slope(other),
            });
        }
        let c = Want::new(format!("c of {self:?}"), c);
        let by_library = products == Products::CuBlasLt && self.types == [DType::Bf16; 2];
        let mut want = vec![if by_library { c.beside(rounded) } else { c }];
        if self.after == After::BiasGelu {
            want.push(Want::new(format!("pre of {self:?}"), pre));
        }
        want
    }

    pub(super) fn run(&self, b: &Bench) -> Vec<Tensor> {
        let [m, n, _] = self.sizes;
        let [dtype, result] = self.types;
        let make = |shape: &[usize], values: &[f32]| b.input(shape, dtype, self.lie, values);
        let ([sa, sb], [va, vb]) = (self.stored(), self.factors());
        let (a, right) = (make(&sa, &va), make(&sb, &vb));
        let bias = b.input(&[n], dtype, Lie::Whole, &self.bias()).view;
        let other = make(&[m, n], &self.other(dtype));
        let fresh = matches!(self.after, After::Add) || matches!(self.after, After::Keep(keep) if keep != 0.0);
        let c = match fresh {
            true => b.input(&[m, n], result, self.lie, &self.other(result)),
            false => b.output(&[m, n], result, self.lie),
        };
        let pre = b.output(&[m, n], dtype, self.lie);
        let keep = b.vector(&[if let After::Keep(keep) = self.after { keep } else { 1.0 }]);
        let finish = match self.after {
            After::Overwrite => Finish::Into(Accumulate::Overwrite),
            After::Add => Finish::Into(Accumulate::Add),
            After::Keep(_) => Finish::Into(Accumulate::Keep(&keep)),
            After::Bias => Finish::Bias(&bias),
            After::BiasGelu => Finish::BiasGelu { bias: &bias, pre: &pre.view },
            After::Residual => Finish::Residual { bias: None, r: &other.view },
            After::BiasResidual => Finish::Residual { bias: Some(&bias), r: &other.view },
            After::GeluBackward => Finish::GeluBackward { pre: &other.view },
        };
        b.run(Gemm { a: &a.view, b: &right.view, c: &c.view, trans: self.trans, finish }.op("test"));
        if self.after == After::BiasGelu { vec![c, pre] } else { vec![c] }
    }
}

fn all_are_close(products: Products, types: [DType; 2]) {
    are_close(products, Case::all(&SIZES, &AFTER, types));
}

fn are_close(products: Products, cases: Vec<Case>) {
    let want: Vec<Want> = cases.iter().flat_map(|case| case.want(products)).collect();
    close_by(products, &want, |b| cases.iter().flat_map(|case| case.run(b)).collect());
}

#[test]
fn products_by_the_library_are_as_exact_as_on_the_host() {
    all_are_close(Products::CuBlasLt, [DType::F32; 2]);
}

#[test]
fn products_by_our_kernel_are_as_exact_as_on_the_host() {
    all_are_close(Products::Own, [DType::F32; 2]);
}

#[test]
fn products_of_bf16_by_the_library_are_those_of_f32_rounded() {
    all_are_close(Products::CuBlasLt, [DType::Bf16; 2]);
}

#[test]
fn products_of_bf16_by_our_kernel_are_those_of_f32_rounded() {
    all_are_close(Products::Own, [DType::Bf16; 2]);
}

fn long_ones_are_close(products: Products, after: &[After]) {
    for types in [[DType::F32; 2], [DType::Bf16; 2], [DType::Bf16, DType::F32]] {
        are_close(products, Case::all(&[LONG], after, types));
    }
}

#[test]
fn long_products_by_the_library_are_as_exact_as_on_the_host() {
    long_ones_are_close(Products::CuBlasLt, &AFTER);
}

#[test]
fn long_products_by_our_kernel_are_as_exact_as_on_the_host() {
    long_ones_are_close(Products::Own, &[After::Overwrite, After::Keep(0.25), After::BiasGelu]);
}

#[test]
fn weight_gradients_from_bf16_are_f32() {
    all_are_close(Products::CuBlasLt, [DType::Bf16, DType::F32]);
    all_are_close(Products::Own, [DType::Bf16, DType::F32]);
}

#[test]
fn the_slope_of_gelu_far_from_zero_follows_products_by_our_kernel_as_0_or_1() {
    let (x, slopes) = far_slopes();
    let n = x.len();
    let w = values(DType::F32, 1, n);
    let dx = slopes.iter().zip(&w).map(|(slope, w)| slope * f64::from(*w)).collect();
    close_by(Products::Own, &[Want::new("dx".to_owned(), dx)], |b| {
        let make = |shape: &[usize], values: &[f32]| b.holding(shape, DType::F32, Lie::Whole, values);
        let (one, w, pre, dx) = (make(&[1, 1], &[1.0]), make(&[1, n], &w), make(&[1, n], &x), make(&[1, n], &x));
        let finish = Finish::GeluBackward { pre: &pre.view };
        b.run(Gemm { a: &one.view, b: &w.view, c: &dx.view, trans: Trans::Nn, finish }.op("test"));
        vec![dx]
    });
}

/// Branches of a graph that work in memory of the library's, and products one behind the other in the same.
#[test]
fn a_graph_of_products_gives_the_bits_of_its_eager_twin() {
    let _turn = card_turn();
    let machine = cuda().machine();
    let run = |replay: bool| {
        let b = Bench::new(&machine);
        let side = b.device.stream("side").unwrap();
        let [m, n, k] = [384, 512, 4096];
        let make = |seed, shape: &[usize]| {
            b.holding(shape, DType::F32, Lie::Whole, &values(DType::F32, seed, shape.iter().product()))
        };
        let (a, w, keep) = (make(1, &[m, k]).view, make(2, &[n, k]).view, b.vector(&[0.5]));
        let outputs: Vec<View> = (3..7).map(|seed| make(seed, &[m, n]).view).collect();
        let submit = || {
            order(&b.stream, &side, "fork");
            for (at, c) in outputs.iter().enumerate() {
                let into = if at < 2 { Accumulate::Keep(&keep) } else { Accumulate::Add };
                let product = Gemm { a: &a, b: &w, c, trans: Trans::Nt, finish: Finish::Into(into) };
                let stream = if at % 2 == 0 { &b.stream } else { &side };
                stream.launch(product.op("test").unwrap()).unwrap();
                stream.launch(Gelu { x: c, y: c }.op("test").unwrap()).unwrap();
            }
            order(&side, &b.stream, "join");
        };
        let exec = replay.then(|| executable(&b.stream, submit));
        for _ in 0..5 {
            exec.as_ref().map_or_else(submit, |exec| b.stream.launch_graph(exec).unwrap());
        }
        outputs.iter().map(|c| b.get::<f32>(c).into_iter().map(f32::to_bits).collect()).collect::<Vec<Vec<u32>>>()
    };
    let eager = run(false);
    assert_eq!(eager, run(false), "eager, twice");
    assert_eq!(eager, run(true), "eager and replayed");
}

/// Rows and columns of products with one.
const PLAIN: [[usize; 2]; 4] = [[64, 64], [257, 96], [128, 256], [512, 1024]];

/// f32 values of 24 significant bits, the last of which is set.
fn odd(n: usize) -> Vec<f32> {
    (0..n as u32).map(|at| f32::from_bits(0x3f80_0001 + at.wrapping_mul(7919) % (1 << 22) * 2)).collect()
}

fn times_one(b: &Bench) -> Vec<Tensor> {
    let product = |[m, n]: [usize; 2]| {
        let mut one = vec![0f32; n * n];
        (0..n).for_each(|at| one[at * n + at] = 1.0);
        let (a, one) =
            (b.input(&[m, n], DType::F32, Lie::Whole, &odd(m * n)), b.input(&[n, n], DType::F32, Lie::Whole, &one));
        let c = b.output(&[m, n], DType::F32, Lie::Whole);
        let finish = Finish::Into(Accumulate::Overwrite);
        b.run(Gemm { a: &a.view, b: &one.view, c: &c.view, trans: Trans::Nt, finish }.op("test"));
        c
    };
    PLAIN.map(product).into()
}

/// Factors times one, and zeros: whatever the order, no sum rounds, so each bit that is missing was taken from a factor.
#[test]
fn f32_factors_keep_all_their_bits_by_first_and_by_measured_algorithms() {
    let _turn = card_turn();
    for measured in [false, true] {
        let machine = cuda().machine();
        if measured {
            let dry = Machine::dry();
            drop(times_one(&Bench { side: Side::Card, ..Bench::new(&dry) }));
            machine.measure_products(&dry.products()).unwrap();
        }
        let b = Bench::new(&machine);
        for ([m, n], c) in PLAIN.into_iter().zip(times_one(&b)) {
            let want: Vec<u32> = odd(m * n).into_iter().map(f32::to_bits).collect();
            let lost = b.bits(&c).iter().zip(&want).filter(|(got, want)| got != want).count();
            assert_eq!(lost, 0, "elements of {m} x {n} that lost bits, measured: {measured}");
        }
    }
}

/// Every finish, in sizes for which the library has many algorithms.
fn measured_cases() -> Vec<Case> {
    let case = |after, types| Case { sizes: [256, 384, 512], trans: Trans::Nt, after, lie: Lie::Whole, types };
    let bf16 = AFTER.map(|after| case(after, [DType::Bf16; 2]));
    bf16.into_iter().chain([case(After::Add, [DType::Bf16, DType::F32]), case(After::Bias, [DType::F32; 2])]).collect()
}

/// The shapes of `cases`, as a program that is run dry has them.
pub(super) fn shapes(cases: &[Case]) -> Vec<GemmShape> {
    let dry = Machine::dry();
    let bench = Bench { side: Side::Card, ..Bench::new(&dry) };
    cases.iter().for_each(|case| drop(case.run(&bench)));
    dry.products()
}

/// A folder of its own for what a test measures, where kernels need not be compiled again. The test has the card.
pub(super) fn measuring_folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("warpweft-{name}-{}", std::process::id()));
    drop(cuda().machine());
    fs::create_dir_all(&folder).unwrap();
    for file in fs::read_dir(std::env::temp_dir().join("warpweft-test-kernels")).unwrap().map(Result::unwrap) {
        if file.path().extension().is_some_and(|kind| kind == "kernel") {
            fs::copy(file.path(), folder.join(file.file_name())).unwrap();
        }
    }
    folder
}

/// A poisoned machine that keeps what it measures in `folder`.
pub(super) fn open_in(folder: &Path, products: Products) -> Result<Machine, Error> {
    let options = Options { fresh: Fresh::Poisoned, ..Options::default() };
    let kernel_cache = Some(folder.to_owned());
    Machine::cuda_with(CudaOptions { kernel_cache, products, ..CudaOptions::default() }, options)
}

/// The file of choices in `folder`.
pub(super) fn choices_in(folder: &Path) -> PathBuf {
    let mut kept = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    kept.find(|path| path.extension().is_some_and(|kind| kind == "choices")).unwrap()
}

/// The fastest algorithms are as exact as the first ones. They are chosen once: afterwards, and on other machines that
/// keep what they measure in the same folder, products have the same bits.
#[test]
fn measured_algorithms_are_exact_and_the_same_ones_again() {
    let _turn = card_turn();
    let folder = measuring_folder("measured");
    let open = || open_in(&folder, Products::CuBlasLt).unwrap();
    let cases = measured_cases();
    let products = shapes(&cases);
    assert_eq!(products.len(), cases.len() - 1, "two values of a factor are one shape");
    let bits = |machine: &Machine| -> Vec<Vec<u32>> {
        let b = Bench::new(machine);
        cases.iter().flat_map(|case| case.run(&b)).map(|tensor| b.bits(&tensor)).collect()
    };

    let machine = open();
    let told = machine.measure_products(&products).unwrap().unwrap();
    // A residual is added as old values are, and whoever measures GELU's slope has measured the product alone.
    assert_eq!((told.chosen, told.measured, told.too_large), (products.len(), products.len() - 2, 0));
    let again = machine.measure_products(&products).unwrap().unwrap();
    assert_eq!((again.chosen, again.measured, again.fingerprint), (told.chosen, 0, told.fingerprint));
    let device = machine.device(3).unwrap();
    let refused = machine.measure_products(&products).unwrap_err();
    assert!(matches!(refused, Error::RankTaken { rank: 3 }), "{refused}");
    drop(device);
    let want: Vec<Want> = cases.iter().flat_map(|case| case.want(Products::CuBlasLt)).collect();
    close_on(&machine, &want, |b| cases.iter().flat_map(|case| case.run(b)).collect());
    let first = bits(&machine);
    drop(machine);

    let machine = open();
    let known = machine.measure_products(&products).unwrap().unwrap();
    assert_eq!((known.chosen, known.measured, known.fingerprint), (told.chosen, 0, told.fingerprint));
    assert_eq!(bits(&machine), first);
    drop(machine);

    // A file that is cut off is measured anew.
    let kept = choices_in(&folder);
    let text = fs::read_to_string(&kept).unwrap();
    fs::write(&kept, &text[..text.len() / 2]).unwrap();
    let anew = open().measure_products(&products).unwrap().unwrap();
    assert_eq!((anew.chosen, anew.measured), (told.chosen, told.measured));
    assert_eq!(fs::read_to_string(&kept).unwrap().lines().count(), text.lines().count());
    fs::remove_dir_all(&folder).unwrap();
}
