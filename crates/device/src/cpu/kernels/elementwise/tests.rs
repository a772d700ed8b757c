use super::*;
use crate::{
    DType, Fresh, View,
    ops::{
        Add, Axpy, Cast, Factor, Fill, Scale,
        trial::{Gaps, assert_close, assert_order_free, few, random, refusal, run_checked, vector, wide},
    },
    testing::{get, holding, put, scratch},
};

const SIZES: [(usize, usize); 5] = [(1, 1), (3, 17), (1, 65), (7, 32), (2, 3)];

/// A matrix of the element type, with gaps.
fn poisoned(dtype: DType, rows: usize, cols: usize) -> View {
    scratch("y", &[rows, cols + 3], dtype, Fresh::Poisoned).columns(1..1 + cols).unwrap()
}

fn halves(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|x| bf16::from_f32(*x)).collect()
}

fn from_halves(x: &[bf16]) -> Vec<f64> {
    x.iter().map(|x| f64::from(x.to_f32())).collect()
}

#[test]
fn fill_overwrites_poison_of_every_type() {
    for &(rows, cols) in few(&SIZES) {
        let y = poisoned(DType::F32, rows, cols);
        run_checked(&Fill { y: &y, value: -1.5 }.op("t").unwrap());
        assert_eq!(get::<f32>(&y), vec![-1.5; rows * cols]);
        let y = poisoned(DType::Bf16, rows, cols);
        run_checked(&Fill { y: &y, value: 1.0 / 3.0 }.op("t").unwrap());
        assert_eq!(get::<bf16>(&y), vec![bf16::from_f32(1.0 / 3.0); rows * cols]);
        let y = poisoned(DType::I32, rows, cols);
        run_checked(&Fill { y: &y, value: -7.0 }.op("t").unwrap());
        assert_eq!(get::<i32>(&y), vec![-7; rows * cols]);
        let y = poisoned(DType::I16, rows, cols);
        run_checked(&Fill { y: &y, value: -7.0 }.op("t").unwrap());
        assert_eq!(get::<i16>(&y), vec![-7; rows * cols]);
    }
    for (dtype, value) in [(DType::I32, 0.5), (DType::I16, 32768.0)] {
        let text = refusal(Fill { y: &poisoned(dtype, 1, 1), value }.op("t"));
        assert_eq!(text, format!("fill@t: value is {value}, an i32 or i16 tensor needs a whole number of its range"));
    }
}

#[test]
fn cast_keeps_values_and_rounds_to_the_nearest_bf16() {
    for &(rows, cols) in few(&SIZES) {
        let x = random(1, rows * cols);
        let xv = Gaps::Some.holding("x", rows, cols, &x);
        let [same, half, back] = [DType::F32, DType::Bf16, DType::F32].map(|t| poisoned(t, rows, cols));
        run_checked(&Cast { x: &xv, y: &same }.op("t").unwrap());
        assert_eq!(get::<f32>(&same), x);
        run_checked(&Cast { x: &xv, y: &half }.op("t").unwrap());
        assert_eq!(get::<bf16>(&half), halves(&x));
        run_checked(&Cast { x: &half, y: &back }.op("t").unwrap());
        assert_eq!(wide(&get::<f32>(&back)), from_halves(&halves(&x)));
        let again = poisoned(DType::Bf16, rows, cols);
        run_checked(&Cast { x: &half, y: &again }.op("t").unwrap());
        assert_eq!(get::<bf16>(&again), halves(&x));
        let ids = holding("ids", &[rows, cols], &(0..(rows * cols) as i32).collect::<Vec<_>>());
        let copied = poisoned(DType::I32, rows, cols);
        run_checked(&Cast { x: &ids, y: &copied }.op("t").unwrap());
        assert_eq!(get::<i32>(&copied), get::<i32>(&ids));
        let rests = holding("rests", &[rows, cols], &(0..(rows * cols) as i16).map(|i| -i).collect::<Vec<_>>());
        let copied = poisoned(DType::I16, rows, cols);
        run_checked(&Cast { x: &rests, y: &copied }.op("t").unwrap());
        assert_eq!(get::<i16>(&copied), get::<i16>(&rests));
        assert_eq!(refusal(Cast { x: &rests, y: &ids }.op("t")), "cast@t: y is i32, needs i16");
        assert_eq!(refusal(Cast { x: &ids, y: &half }.op("t")), "cast@t: y is bf16, needs i32");
        assert_eq!(refusal(Cast { x: &half, y: &ids }.op("t")), "cast@t: y is i32, needs f32");
    }
}

#[test]
fn scale_multiplies_by_constants_and_device_scalars_apart_and_in_place() {
    let scalar = vector("factor", &[-0.75]);
    for &(rows, cols) in few(&SIZES) {
        for factor in [Factor::Const(-0.75), Factor::Device(&scalar)] {
            let x = random(1, rows * cols);
            let want: Vec<f64> = x.iter().map(|x| f64::from(*x) * -0.75).collect();
            let xv = Gaps::Some.holding("x", rows, cols, &x);
            let y = Gaps::None.poisoned("y", rows, cols);
            run_checked(&Scale { x: &xv, factor, y: &y }.op("t").unwrap());
            assert_close(&y, &want, 1e-7);
            run_checked(&Scale { x: &xv, factor, y: &xv }.op("t").unwrap());
            assert_close(&xv, &want, 1e-7);
            let half = poisoned(DType::Bf16, rows, cols);
            put(&half, &halves(&x));
            run_checked(&Scale { x: &half, factor, y: &half }.op("t").unwrap());
            let want: Vec<f32> = from_halves(&halves(&x)).iter().map(|x| (x * -0.75) as f32).collect();
            assert_eq!(get::<bf16>(&half), halves(&want));
        }
    }
}

#[test]
fn add_sums_apart_and_in_place_of_either_input() {
    for &(rows, cols) in few(&SIZES) {
        let (a, b) = (random(1, rows * cols), random(2, rows * cols));
        let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        let views = || (Gaps::Some.holding("a", rows, cols, &a), Gaps::None.holding("b", rows, cols, &b));
        let ((av, bv), y) = (views(), Gaps::Some.poisoned("y", rows, cols));
        run_checked(&Add { a: &av, b: &bv, y: &y }.op("t").unwrap());
        assert_eq!(get::<f32>(&y), want);
        run_checked(&Add { a: &av, b: &bv, y: &av }.op("t").unwrap());
        assert_eq!(get::<f32>(&av), want);
        let (av, bv) = views();
        run_checked(&Add { a: &av, b: &bv, y: &bv }.op("t").unwrap());
        assert_eq!(get::<f32>(&bv), want);
        let [x, y] = [&a, &b].map(|x| holding("h", &[rows, cols], &halves(x)));
        run_checked(&Add { a: &x, b: &y, y: &x }.op("t").unwrap());
        let sums: Vec<f32> = halves(&a).iter().zip(&halves(&b)).map(|(a, b)| a.to_f32() + b.to_f32()).collect();
        assert_eq!(get::<bf16>(&x), halves(&sums));
    }
}

#[test]
fn axpy_adds_a_multiple_between_all_pairs_of_types() {
    let scalar = vector("alpha", &[0.5]);
    for &(rows, cols) in few(&SIZES) {
        for alpha in [Factor::Const(0.5), Factor::Device(&scalar)] {
            let (x, y) = (random(1, rows * cols), random(2, rows * cols));
            let view = |dtype, values: &[f32]| {
                let v = poisoned(dtype, rows, cols);
                if dtype == DType::F32 {
                    put(&v, values)
                } else {
                    put(&v, &halves(values))
                }
                v
            };
            for x_type in [DType::F32, DType::Bf16] {
                let stored = if x_type == DType::F32 { wide(&x) } else { from_halves(&halves(&x)) };
                let (xv, yv) = (view(x_type, &x), view(DType::F32, &y));
                run_checked(&Axpy { alpha, x: &xv, y: &yv }.op("t").unwrap());
                let want: Vec<f64> = stored.iter().zip(&y).map(|(x, y)| 0.5 * x + f64::from(*y)).collect();
                assert_close(&yv, &want, 1e-7);
                let yv = view(DType::Bf16, &y);
                run_checked(&Axpy { alpha, x: &xv, y: &yv }.op("t").unwrap());
                let sums = stored.iter().zip(from_halves(&halves(&y))).map(|(x, y)| (0.5 * x + y) as f32);
                assert_eq!(get::<bf16>(&yv), halves(&sums.collect::<Vec<_>>()));
            }
        }
    }
}

#[test]
fn large_element_wise_kernels_are_cut_with_the_same_bits_in_any_order() {
    if cfg!(miri) {
        return;
    }
    for (rows, cols) in [(1200, 1001), (1, 1_200_001), (3, 400_000)] {
        let view = |label: &str, seed| Gaps::Some.holding(label, rows, cols, &random(seed, rows * cols));
        assert_order_free(|| {
            let y = Gaps::Some.poisoned("y", rows, cols);
            (Fill { y: &y, value: 2.0 }.op("t").unwrap(), vec![y])
        });
        assert_order_free(|| {
            let (x, y) = (view("x", 1), Gaps::None.poisoned("y", rows, cols));
            (Cast { x: &x, y: &y }.op("t").unwrap(), vec![y])
        });
        assert_order_free(|| {
            let (x, factor) = (view("x", 1), vector("factor", &[0.3]));
            (Scale { x: &x, factor: Factor::Device(&factor), y: &x }.op("t").unwrap(), vec![x])
        });
        assert_order_free(|| {
            let (x, factor, y) = (view("x", 1), vector("factor", &[0.3]), Gaps::None.poisoned("y", rows, cols));
            (Scale { x: &x, factor: Factor::Device(&factor), y: &y }.op("t").unwrap(), vec![y])
        });
        assert_order_free(|| {
            let (a, b, y) = (view("a", 1), view("b", 2), Gaps::None.poisoned("y", rows, cols));
            (Add { a: &a, b: &b, y: &y }.op("t").unwrap(), vec![y])
        });
        assert_order_free(|| {
            let (x, y, alpha) = (view("x", 1), view("y", 2), vector("alpha", &[0.3]));
            (Axpy { alpha: Factor::Device(&alpha), x: &x, y: &y }.op("t").unwrap(), vec![y])
        });
    }
}

#[test]
fn a_matrix_of_one_element_is_not_taken_for_the_factor() {
    let (x, factor) = (vector("x", &[3.0]), vector("factor", &[2.0]));
    run_checked(&Scale { x: &x, factor: Factor::Device(&factor), y: &x }.op("t").unwrap());
    assert_eq!(get::<f32>(&x), [6.0]);
}

#[test]
fn wrong_sizes_and_types_are_told() {
    let (a, b) = (Gaps::None.poisoned("a", 2, 3), Gaps::None.poisoned("b", 3, 2));
    let rule = "both must have the same rows and columns";
    assert_eq!(refusal(Cast { x: &a, y: &b }.op("t")), format!("cast@t: x is [2, 3] and y is [3, 2]; {rule}"));
    assert_eq!(refusal(Add { a: &a, b: &b, y: &a }.op("t")), format!("add@t: a is [2, 3] and b is [3, 2]; {rule}"));
    let factor = Factor::Device(&b);
    let text = refusal(Scale { x: &a, factor, y: &a }.op("t"));
    assert_eq!(text, "scale@t: factor is [3, 2] and factor is [3, 2]; it must have exactly one element");
    let half = poisoned(DType::Bf16, 2, 3);
    assert_eq!(refusal(Add { a: &a, b: &half, y: &a }.op("t")), "add@t: b is bf16, needs f32");
    assert!(refusal(Axpy { alpha: Factor::Const(1.0), x: &a, y: &b }.op("t")).starts_with("axpy@t: x is [2, 3]"));
}
