//! The kernel for compute capability 9.0, which computes products of bf16 together with GELU or its slope: against its
//! twins on the host and sums in f64. Other cards refuse it, and there is nothing to see there.

use std::fs;

use device::{
    cuda::{CudaError, CudaOptions, Products, prepare},
    ops::*,
    *,
};

use super::{
    capture_graphs::{executable, order},
    card_bench::{Bench, Lie, Tensor, close_on, values},
    card_kernels::{FAR, gelu},
    card_products::{After, Case, choices_in, measuring_folder, open_in, shapes},
    drivers::{LIMIT, card_turn, cuda_with},
};

/// A poisoned machine whose products take the kernel wherever it can; none on cards that it is not for.
fn hopper() -> Option<Machine> {
    prepare().expect("the environment can be prepared");
    let kernel_cache = Some(std::env::temp_dir().join("warpweft-test-kernels"));
    let cuda = CudaOptions { kernel_cache, products: Products::Hopper, ..CudaOptions::default() };
    match Machine::cuda_with(cuda, Options { timeout: LIMIT, fresh: Fresh::Poisoned }) {
        Ok(machine) => Some(machine),
        Err(Error::Cuda { source: CudaError::Unable { what, .. }, .. }) if what.contains("capability 9.0") => None,
        Err(error) => panic!("{error}"),
    }
}

fn both(sizes: [usize; 3], lie: Lie) -> [Case; 2] {
    [(Trans::Nt, After::BiasGelu), (Trans::Nn, After::GeluBackward)].map(|(trans, after)| Case {
        sizes,
        trans,
        after,
        lie,
        types: [DType::Bf16; 2],
    })
}

/// Rows, columns and depth: one tile; clusters of which a block has nothing to do, or little of a tile; odd rows.
const ALIGNED: [[usize; 3]; 5] = [[128, 192, 64], [129, 200, 72], [257, 392, 200], [640, 400, 72], [301, 200, 1000]];
/// Rows without gaps; and so many tiles that each half of a block has its third.
const WHOLE: [[usize; 3]; 3] = [[128, 192, 64], [384, 776, 136], [4225, 3000, 64]];

#[test]
fn products_by_the_kernel_for_9_0_are_as_exact_as_on_the_host() {
    let _turn = card_turn();
    let Some(machine) = hopper() else { return };
    let aligned = ALIGNED.into_iter().flat_map(|sizes| both(sizes, Lie::Aligned));
    let whole = WHOLE.into_iter().flat_map(|sizes| both(sizes, Lie::Whole));
    for case in aligned.chain(whole) {
        close_on(&machine, &case.want(Products::Hopper), |b| case.run(b));
    }
}

/// What the kernel does not take is computed all the same.
#[test]
fn products_that_the_kernel_for_9_0_does_not_take_are_as_exact_as_on_the_host() {
    let _turn = card_turn();
    let Some(machine) = hopper() else { return };
    let (apart, small) = (both([130, 200, 72], Lie::Gaps), both([127, 192, 64], Lie::Aligned));
    // The copy engine writes pieces of 8 columns, and all rows of these have something behind them.
    let odd =
        [[129, 193, 65], [257, 388, 200], [300, 200, 1001]].into_iter().flat_map(|sizes| both(sizes, Lie::Aligned));
    for case in apart.into_iter().chain(small).chain(odd) {
        close_on(&machine, &case.want(Products::Hopper), |b| case.run(b));
    }
}

const SMALL: [usize; 3] = [300, 392, 72];

/// Factors whose products are a few units at most, and the sums of their absolute values.
struct Small {
    a: Vec<f32>,
    b: Vec<f32>,
    sums: Vec<[f64; 2]>,
}

impl Small {
    fn new(trans: Trans) -> Small {
        let [m, n, k] = SMALL;
        let a = values(DType::Bf16, 1, m * k);
        let b: Vec<f32> = values(DType::Bf16, 2, k * n).into_iter().map(|x| x / 16.0).collect();
        let at = |j: usize, l: usize| b[if trans == Trans::Nt { j * k + l } else { l * n + j }];
        let product = |i: usize, j: usize, l: usize| f64::from(a[i * k + l]) * f64::from(at(j, l));
        let sum = |i, j| (0..k).map(|l| product(i, j, l)).fold([0.0; 2], |[x, y], z| [x + z, y + z.abs()]);
        let sums = (0..m * n).map(|at| sum(at / n, at % n)).collect();
        Small { a, b, sums }
    }
}

/// Each element is off by twice its rounding at most, or by what sums in f32 lose of terms whose absolute values add up to
/// that of `terms`.
#[track_caller]
fn each_is_close(what: &str, got: &[f32], want: &[f64], terms: &[f64]) {
    let n = SMALL[1];
    assert_eq!((got.len(), want.len()), (terms.len(), terms.len()));
    for (at, ((got, want), terms)) in got.iter().zip(want).zip(terms).enumerate() {
        let off = (f64::from(*got) - want).abs();
        let fits = off <= want.abs() / 256.0 + 1e-6 * terms + 1e-30 || got.is_nan() && want.is_nan();
        assert!(fits, "{what} at {} {}: {got}, in f64 {want:e}, off by {off:e}", at / n, at % n);
    }
}

fn get(b: &Bench, tensor: &Tensor) -> Vec<f32> {
    b.get::<bf16>(&tensor.view).into_iter().map(bf16::to_f32).collect()
}

#[test]
fn each_gelu_by_the_kernel_for_9_0_is_within_twice_its_rounding() {
    let _turn = card_turn();
    let Some(machine) = hopper() else { return };
    let (b, [m, n, k], small) = (Bench::new(&machine), SMALL, Small::new(Trans::Nt));
    let make = |shape: &[usize], values: &[f32]| b.holding(shape, DType::Bf16, Lie::Aligned, values);
    let bias_values = values(DType::Bf16, 3, n);
    let bias = b.holding(&[n], DType::Bf16, Lie::Whole, &bias_values).view;
    let (x, w) = (make(&[m, k], &small.a), make(&[n, k], &small.b));
    let [c, pre] = [0; 2].map(|_| b.tensor(&[m, n], DType::Bf16, Lie::Aligned));
    let finish = Finish::BiasGelu { bias: &bias, pre: &pre.view };
    b.run(Gemm { a: &x.view, b: &w.view, c: &c.view, trans: Trans::Nt, finish }.op("test"));
    let biases = bias_values.iter().map(|x| f64::from(*x)).cycle();
    let (wants, terms): (Vec<f64>, Vec<f64>) =
        small.sums.iter().zip(biases).map(|([sum, terms], bias)| (sum + bias, terms + bias.abs())).unzip();
    each_is_close("pre", &get(&b, &pre), &wants, &terms);
    each_is_close("gelu", &get(&b, &c), &wants.iter().copied().map(gelu).collect::<Vec<_>>(), &terms);
}

/// The slope of GELU by exponentials: far below zero a tanh cancels against 1, and elements are held to their own size here.
fn slope(x: f32) -> f64 {
    if x.is_infinite() {
        return f64::from(u8::from(x > 0.0));
    }
    let (x, c) = (f64::from(x), (8.0 / std::f64::consts::PI).sqrt());
    let z = c * (x + 0.044_715 * x.powi(3));
    let (s, rest) = (1.0 / (1.0 + (-z).exp()), 1.0 / (1.0 + z.exp()));
    s + x * s * rest * c * (1.0 + 3.0 * 0.044_715 * x * x)
}

/// With values in the first row and in the last whose exponentials are far from 1, or no numbers.
#[test]
fn each_slope_by_the_kernel_for_9_0_is_within_twice_its_rounding() {
    let _turn = card_turn();
    let Some(machine) = hopper() else { return };
    let (b, [m, n, k], small) = (Bench::new(&machine), SMALL, Small::new(Trans::Nn));
    let make = |shape: &[usize], values: &[f32]| b.holding(shape, DType::Bf16, Lie::Aligned, values);
    let mut taken: Vec<f32> = values(DType::Bf16, 4, m * n).into_iter().map(|x| x * 4.0).collect();
    let special = FAR.into_iter().chain([0.0, 1e30, f32::NAN]).flat_map(|x| [x, -x]);
    for (at, x) in special.map(|x| bf16::from_f32(x).to_f32()).enumerate() {
        (taken[at], taken[m * n - 1 - at]) = (x, x);
    }
    let (dy, w, pre) = (make(&[m, k], &small.a), make(&[k, n], &small.b), make(&[m, n], &taken));
    let dx = b.tensor(&[m, n], DType::Bf16, Lie::Aligned);
    let finish = Finish::GeluBackward { pre: &pre.view };
    b.run(Gemm { a: &dy.view, b: &w.view, c: &dx.view, trans: Trans::Nn, finish }.op("test"));
    let times = |which: usize| taken.iter().zip(&small.sums).map(move |(x, sums)| slope(*x) * sums[which]);
    let terms: Vec<f64> = times(1).map(f64::abs).collect();
    each_is_close("dx", &get(&b, &dx), &times(0).collect::<Vec<_>>(), &terms);
}

/// What products of `sizes` leave, one behind the other and on two streams.
fn bits(machine: &Machine, sizes: [usize; 3], replay: bool) -> Vec<Vec<u32>> {
    let b = Bench::new(machine);
    let side = b.device.stream("side").unwrap();
    let [m, n, k] = sizes;
    let make = |seed, shape: &[usize]| {
        b.holding(shape, DType::Bf16, Lie::Whole, &values(DType::Bf16, seed, shape.iter().product()))
    };
    let (x, w, back, bias) = (make(1, &[m, k]), make(2, &[n, k]), make(3, &[n, m]), make(4, &[n]));
    let outputs: Vec<[Tensor; 3]> = (0..2).map(|_| [make(5, &[m, n]), make(6, &[m, n]), make(7, &[m, m])]).collect();
    let aside = make(8, &[m, m]);
    let submit = || {
        order(&b.stream, &side, "fork");
        for (at, [c, pre, dx]) in outputs.iter().enumerate() {
            let stream = if at == 0 { &b.stream } else { &side };
            let finish = Finish::BiasGelu { bias: &bias.view, pre: &pre.view };
            let forward = Gemm { a: &x.view, b: &w.view, c: &c.view, trans: Trans::Nt, finish };
            stream.launch(forward.op("test").unwrap()).unwrap();
            let finish = Finish::GeluBackward { pre: &aside.view };
            let backward = Gemm { a: &c.view, b: &back.view, c: &dx.view, trans: Trans::Nn, finish };
            stream.launch(backward.op("test").unwrap()).unwrap();
        }
        order(&side, &b.stream, "join");
    };
    let exec = replay.then(|| executable(&b.stream, submit));
    for _ in 0..3 {
        exec.as_ref().map_or_else(submit, |exec| b.stream.launch_graph(exec).unwrap());
    }
    outputs.iter().flatten().map(|tensor| b.bits(tensor)).collect()
}

/// That of all kernels it is this one shows in bits that another order of sums does not give.
#[test]
fn the_kernel_for_9_0_gives_bits_of_its_own_eager_and_replayed() {
    let _turn = card_turn();
    let Some(machine) = hopper() else { return };
    let sizes = [392, 456, 1000];
    let eager = bits(&machine, sizes, false);
    assert_eq!(eager, bits(&machine, sizes, false), "eager, twice");
    assert_eq!(eager, bits(&machine, sizes, true), "eager and replayed");
    let slow =
        bits(&cuda_with(CudaOptions { products: Products::Own, ..CudaOptions::default() }).machine(), sizes, false);
    for (at, (own, slow)) in eager.iter().zip(&slow).enumerate() {
        assert!(own != slow, "output {at} has the bits of the slow kernel");
    }
}

#[test]
fn a_kept_choice_of_the_kernel_for_9_0_is_followed_where_the_kernel_takes_the_product() {
    let _turn = card_turn();
    let Some(own) = hopper() else { return };
    let folder = measuring_folder("hopper");
    let open = || open_in(&folder, Products::CuBlasLt).unwrap();
    let cases = both([256, 384, 512], Lie::Whole);
    let products = shapes(&cases);
    let run = |machine: &Machine| -> Vec<Vec<u32>> {
        let b = Bench::new(machine);
        cases.iter().flat_map(|case| case.run(&b)).map(|tensor| b.bits(&tensor)).collect()
    };
    let want = run(&own);
    drop(own);
    let told = open().measure_products(&products).unwrap().unwrap();
    assert_eq!((told.chosen, told.measured), (2, 2));

    // Of all shapes in the file only those with GELU are any of its.
    let kept = choices_in(&folder);
    let choose = |chosen: fn(&str) -> bool| {
        let text = fs::read_to_string(&kept).unwrap();
        let lines = text.lines().map(|line| match line.split_once(" = ") {
            Some((shape, _)) if chosen(shape) => format!("{shape} = hopper\n"),
            _ => format!("{line}\n"),
        });
        fs::write(&kept, lines.collect::<String>()).unwrap();
    };
    choose(|shape| shape.contains("gelu /"));
    let machine = open();
    let known = machine.measure_products(&products).unwrap().unwrap();
    assert_eq!((known.chosen, known.measured), (2, 0));
    assert_eq!(run(&machine), want);
    drop(machine);

    choose(|_| true);
    let anew = open().measure_products(&products).unwrap().unwrap();
    assert_eq!((anew.chosen, anew.measured), (2, 2), "the kernel takes no product alone or with a bias");
    fs::remove_dir_all(&folder).unwrap();
}
