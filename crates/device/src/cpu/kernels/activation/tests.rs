use crate::{
    ops::{
        Gelu, GeluBackward, SwiGlu, SwiGluBackward,
        trial::{Gaps, assert_close, assert_order_free, differences, few, inner, random, refusal, run_checked, wide},
    },
    testing::put,
};

const SIZES: [(usize, usize); 5] = [(1, 1), (3, 17), (1, 65), (7, 32), (2, 3)];

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

fn swiglu(gate: &[f64], up: &[f64]) -> Vec<f64> {
    gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
}

/// Values from −8 to 8.
fn spread(seed: u64, n: usize) -> Vec<f32> {
    random(seed, n).iter().map(|x| x * 8.0).collect()
}

#[test]
fn gelu_and_its_gradient_equal_formula_and_differences_apart_and_in_place() {
    for &(rows, cols) in few(&SIZES) {
        for gaps in Gaps::BOTH {
            let (x, dy) = (spread(1, rows * cols), random(2, rows * cols));
            let xv = gaps.holding("x", rows, cols, &x);
            let y = gaps.poisoned("y", rows, cols);
            let want: Vec<f64> = wide(&x).into_iter().map(gelu).collect();
            run_checked(&Gelu { x: &xv, y: &y }.op("t").unwrap());
            assert_close(&y, &want, 1e-6);

            let dyv = gaps.holding("dy", rows, cols, &dy);
            let want_dx = differences(&wide(&x), |x| x.iter().zip(&dy).map(|(x, d)| gelu(*x) * f64::from(*d)).sum());
            let dx = gaps.poisoned("dx", rows, cols);
            run_checked(&GeluBackward { dy: &dyv, x: &xv, dx: &dx }.op("t").unwrap());
            assert_close(&dx, &want_dx, 2e-6);
            run_checked(&GeluBackward { dy: &dyv, x: &xv, dx: &dyv }.op("t").unwrap());
            assert_close(&dyv, &want_dx, 2e-6);

            run_checked(&Gelu { x: &xv, y: &xv }.op("t").unwrap());
            assert_close(&xv, &want, 1e-6);
        }
    }
}

#[test]
fn swiglu_and_its_gradient_equal_formula_and_differences() {
    for &(rows, cols) in few(&SIZES) {
        for gaps in Gaps::BOTH {
            let (g, u, dy) = (spread(1, rows * cols), random(2, rows * cols), random(3, rows * cols));
            let view = |label: &str, x: &[f32]| gaps.holding(label, rows, cols, x);
            let (gate, up, dyv) = (view("gate", &g), view("up", &u), view("dy", &dy));
            let [y, dgate, dup] = ["y", "dgate", "dup"].map(|label| gaps.poisoned(label, rows, cols));
            run_checked(&SwiGlu { gate: &gate, up: &up, y: &y }.op("t").unwrap());
            assert_close(&y, &swiglu(&wide(&g), &wide(&u)), 1e-6);
            run_checked(&SwiGluBackward { dy: &dyv, gate: &gate, up: &up, dgate: &dgate, dup: &dup }.op("t").unwrap());
            assert_close(&dgate, &differences(&wide(&g), |g| inner(&swiglu(g, &wide(&u)), &dy)), 2e-6);
            assert_close(&dup, &differences(&wide(&u), |u| inner(&swiglu(&wide(&g), u), &dy)), 2e-6);
        }
    }
}

#[test]
fn gate_and_up_may_be_columns_of_one_tensor() {
    let x = Gaps::None.poisoned("gate_up", 5, 14);
    put(&x, &random(1, 70));
    let (gate, up) = (x.columns(0..7).unwrap(), x.columns(7..14).unwrap());
    let y = Gaps::None.poisoned("y", 5, 7);
    run_checked(&SwiGlu { gate: &gate, up: &up, y: &y }.op("t").unwrap());
    let x = wide(&random(1, 70));
    let pick = |from: usize| (0..5).flat_map(|i| x[i * 14 + from..i * 14 + from + 7].to_vec()).collect::<Vec<_>>();
    assert_close(&y, &swiglu(&pick(0), &pick(7)), 1e-6);
}

#[test]
fn large_activations_are_cut_with_the_same_bits_in_any_order() {
    if cfg!(miri) {
        return;
    }
    for (rows, cols) in [(1200, 501), (1, 600_001), (3, 250_000)] {
        let view = |label: &str, seed| Gaps::Some.holding(label, rows, cols, &random(seed, rows * cols));
        assert_order_free(|| {
            let (x, y) = (view("x", 1), Gaps::None.poisoned("y", rows, cols));
            (Gelu { x: &x, y: &y }.op("t").unwrap(), vec![y])
        });
        assert_order_free(|| {
            let (x, d) = (view("x", 1), view("d", 2));
            (GeluBackward { dy: &d, x: &x, dx: &d }.op("t").unwrap(), vec![d])
        });
        assert_order_free(|| {
            let (gate, up, y) = (view("gate", 1), view("up", 2), Gaps::None.poisoned("y", rows, cols));
            (SwiGlu { gate: &gate, up: &up, y: &y }.op("t").unwrap(), vec![y])
        });
        assert_order_free(|| {
            let (gate, up, dy) = (view("gate", 1), view("up", 2), view("dy", 3));
            let [dgate, dup] = ["dgate", "dup"].map(|label| Gaps::Some.poisoned(label, rows, cols));
            let request = SwiGluBackward { dy: &dy, gate: &gate, up: &up, dgate: &dgate, dup: &dup };
            (request.op("t").unwrap(), vec![dgate, dup])
        });
    }
}

#[test]
fn wrong_sizes_are_told_with_both_shapes() {
    let (a, b) = (Gaps::None.poisoned("a", 2, 3), Gaps::None.poisoned("b", 3, 2));
    let text = refusal(Gelu { x: &a, y: &b }.op("mlp"));
    assert_eq!(text, "gelu@mlp: x is [2, 3] and y is [3, 2]; both must have the same rows and columns");
    assert!(GeluBackward { dy: &b, x: &a, dx: &a }.op("t").is_err());
    assert!(SwiGlu { gate: &a, up: &a, y: &b }.op("t").is_err());
    assert!(SwiGluBackward { dy: &a, gate: &a, up: &a, dgate: &a, dup: &b }.op("t").is_err());
}
