use super::*;
use crate::{
    Access, View,
    ops::{
        Accumulate, Finish, Gemm, Trans,
        trial::{
            Gaps, assert_close, assert_order_free, few, poisoned_vector, random, refusal, run_checked, run_now, vector,
            wide,
        },
    },
    testing::{get, put},
};

const ALL: [Trans; 4] = [Trans::Nn, Trans::Nt, Trans::Tn, Trans::Tt];

struct Case {
    a: View,
    b: View,
    c: View,
    /// A·B.
    want: Vec<f64>,
}

/// a and b of random values, c of NaN.
fn operands(trans: Trans, gaps: Gaps, [m, n, k]: [usize; 3]) -> [View; 3] {
    let swap = |x: &[f32], rows: usize, cols: usize| -> Vec<f32> {
        (0..cols).flat_map(|j| (0..rows).map(move |i| x[i * cols + j])).collect()
    };
    let view = |label: &str, x: &[f32], rows: usize, cols: usize, transposed: bool| {
        if transposed {
            gaps.holding(label, cols, rows, &swap(x, rows, cols))
        } else {
            gaps.holding(label, rows, cols, x)
        }
    };
    let a = view("a", &random(1, m * k), m, k, trans.a());
    let b = view("b", &random(2, k * n), k, n, trans.b());
    [a, b, gaps.poisoned("c", m, n)]
}

fn case(trans: Trans, gaps: Gaps, [m, n, k]: [usize; 3]) -> Case {
    let (wa, wb) = (wide(&random(1, m * k)), wide(&random(2, k * n)));
    let entry = |i: usize, j: usize| (0..k).map(|l| wa[i * k + l] * wb[l * n + j]).sum();
    let want = (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| entry(i, j)).collect();
    let [a, b, c] = operands(trans, gaps, [m, n, k]);
    Case { a, b, c, want }
}

fn each(mut f: impl FnMut(Trans, Gaps, [usize; 3])) {
    let sizes = [[1, 1, 1], [3, 5, 2], [3, 17, 5], [17, 3, 65], [65, 33, 1], [64, 48, 32], [5, 1, 130]];
    for trans in ALL {
        for gaps in Gaps::BOTH {
            few(&sizes).iter().for_each(|size| f(trans, gaps, *size));
        }
    }
}

#[test]
fn products_overwrite_poison_in_all_transpositions() {
    each(|trans, gaps, size| {
        let x = case(trans, gaps, size);
        let finish = Finish::Into(Accumulate::Overwrite);
        run_checked(&Gemm { a: &x.a, b: &x.b, c: &x.c, trans, finish }.op("t").unwrap());
        assert_close(&x.c, &x.want, 2e-6);
    });
}

#[test]
fn products_add_to_what_is_there() {
    each(|trans, gaps, size| {
        let x = case(trans, gaps, size);
        let old = random(3, size[0] * size[1]);
        put(&x.c, &old);
        run_checked(&Gemm { a: &x.a, b: &x.b, c: &x.c, trans, finish: Finish::Into(Accumulate::Add) }.op("t").unwrap());
        let want: Vec<f64> = x.want.iter().zip(&old).map(|(w, o)| w + f64::from(*o)).collect();
        assert_close(&x.c, &want, 2e-6);
    });
}

#[test]
fn a_keep_of_zero_overwrites_nan_and_others_multiply() {
    each(|trans, gaps, size| {
        let x = case(trans, gaps, size);
        let keep = vector("keep", &[0.0]);
        let finish = Finish::Into(Accumulate::Keep(&keep));
        let op = Gemm { a: &x.a, b: &x.b, c: &x.c, trans, finish }.op("t").unwrap();
        run_checked(&op);
        assert_close(&x.c, &x.want, 2e-6);
        put(&keep, &[-0.5]);
        run_checked(&op);
        let want: Vec<f64> = x.want.iter().map(|w| w * 0.5).collect();
        assert_close(&x.c, &want, 4e-6);
    });
}

#[test]
fn no_inner_dimension_gives_zero() {
    let x = case(Trans::Nn, Gaps::None, [3, 4, 0]);
    let finish = Finish::Into(Accumulate::Overwrite);
    run_checked(&Gemm { a: &x.a, b: &x.b, c: &x.c, trans: Trans::Nn, finish }.op("t").unwrap());
    assert_eq!(get::<f32>(&x.c), [0.0; 12]);
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

#[test]
fn epilogues_equal_the_product_followed_by_their_formulas() {
    each(|trans, gaps, size| {
        let x = case(trans, gaps, size);
        let [m, n, _] = size;
        let bias = random(4, n);
        let with_bias: Vec<f64> = x.want.iter().enumerate().map(|(i, w)| w + f64::from(bias[i % n])).collect();
        let bias = vector("bias", &bias);
        run_checked(&Gemm { a: &x.a, b: &x.b, c: &x.c, trans, finish: Finish::Bias(&bias) }.op("t").unwrap());
        assert_close(&x.c, &with_bias, 2e-6);

        let (c, pre) = (gaps.poisoned("c", m, n), gaps.poisoned("pre", m, n));
        let finish = Finish::BiasGelu { bias: &bias, pre: &pre };
        run_checked(&Gemm { a: &x.a, b: &x.b, c: &c, trans, finish }.op("t").unwrap());
        assert_close(&pre, &with_bias, 2e-6);
        let want: Vec<f64> = with_bias.iter().map(|x| gelu(*x)).collect();
        assert_close(&c, &want, 3e-6);

        let dx = gaps.poisoned("dx", m, n);
        let finish = Finish::GeluBackward { pre: &pre };
        run_checked(&Gemm { a: &x.a, b: &x.b, c: &dx, trans, finish }.op("t").unwrap());
        let slope = |x: f64| (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5;
        let want: Vec<f64> = x.want.iter().zip(&wide(&get(&pre))).map(|(w, p)| w * slope(*p)).collect();
        assert_close(&dx, &want, 3e-6);
    });
}

#[test]
fn a_residual_is_added_behind_the_bias_with_the_bits_of_an_addition_of_its_own() {
    each(|trans, gaps, size| {
        let [m, n, _] = size;
        let (r, bias) = (random(6, m * n), vector("bias", &random(4, n)));
        for bias in [None, Some(&bias)] {
            let x = case(trans, gaps, size);
            let before = bias.map_or(Finish::Into(Accumulate::Overwrite), Finish::Bias);
            run_checked(&Gemm { a: &x.a, b: &x.b, c: &x.c, trans, finish: before }.op("t").unwrap());
            let want: Vec<u32> = get::<f32>(&x.c).iter().zip(&r).map(|(c, r)| (c + r).to_bits()).collect();
            let (c, r) = (gaps.poisoned("c", m, n), gaps.holding("r", m, n, &r));
            let finish = Finish::Residual { bias, r: &r };
            run_checked(&Gemm { a: &x.a, b: &x.b, c: &c, trans, finish }.op("t").unwrap());
            assert_eq!(get::<f32>(&c).into_iter().map(f32::to_bits).collect::<Vec<_>>(), want, "{trans:?} {size:?}");
        }
    });
}

#[test]
fn large_products_are_cut_with_the_same_bits_in_any_order() {
    if cfg!(miri) {
        return;
    }
    for trans in ALL {
        for size in [[1100, 96, 400], [96, 1100, 400], [1040, 1030, 33]] {
            for gaps in Gaps::BOTH {
                let [m, n, _] = size;
                assert_order_free(|| {
                    let [a, b, c] = operands(trans, gaps, size);
                    let (bias, pre) = (vector("bias", &random(4, n)), gaps.poisoned("pre", m, n));
                    let finish = Finish::BiasGelu { bias: &bias, pre: &pre };
                    (Gemm { a: &a, b: &b, c: &c, trans, finish }.op("t").unwrap(), vec![c, pre])
                });
                for biased in [true, false] {
                    assert_order_free(|| {
                        let [a, b, c] = operands(trans, gaps, size);
                        let bias = vector("bias", &random(4, n));
                        let r = gaps.holding("r", m, n, &random(6, m * n));
                        let finish = Finish::Residual { bias: biased.then_some(&bias), r: &r };
                        (Gemm { a: &a, b: &b, c: &c, trans, finish }.op("t").unwrap(), vec![c])
                    });
                }
                assert_order_free(|| {
                    let [a, b, c] = operands(trans, gaps, size);
                    put(&c, &random(5, m * n));
                    let keep = vector("keep", &[0.5]);
                    let finish = Finish::Into(Accumulate::Keep(&keep));
                    (Gemm { a: &a, b: &b, c: &c, trans, finish }.op("t").unwrap(), vec![c])
                });
            }
        }
    }
}

#[test]
fn pieces_of_a_product_equal_the_slow_twin() {
    let size = if cfg!(miri) { [5, 7, 3] } else { [1100, 96, 400] };
    for trans in ALL {
        let [a, b, c] = operands(trans, Gaps::Some, size);
        let finish = Finish::Into(Accumulate::Overwrite);
        run_now(&Gemm { a: &a, b: &b, c: &c, trans, finish }.op("t").unwrap()).unwrap();
        let (a, b) = ([Access::read(&a)], [Access::read(&b)]);
        // SAFETY: the test's own memory, touched by this thread only.
        let (a, b) = unsafe { (Args::new(&a), Args::new(&b)) };
        let a = Factor { rows: a.rows(0).unwrap(), transposed: trans.a() };
        let b = Factor { rows: b.rows(0).unwrap(), transposed: trans.b() };
        let mut twin = vec![f32::NAN; size[0] * size[1]];
        product_slowly(&mut RowsMut::of(&mut twin, size[0], size[1]), 0.0, 1.0, a, b);
        assert_close(&c, &wide(&twin), 5e-6);
    }
}

#[test]
fn sizes_that_do_not_fit_are_told_with_both_shapes() {
    let view = |rows, cols| Gaps::None.poisoned("m", rows, cols);
    let (a, b, c) = (view(3, 4), view(5, 6), view(3, 6));
    let finish = Finish::Into(Accumulate::Overwrite);
    let error = |a: &View, b: &View, c: &View, trans, finish| refusal(Gemm { a, b, c, trans, finish }.op("h0.fc1"));
    assert_eq!(
        error(&a, &b, &c, Trans::Nn, finish),
        "gemm@h0.fc1: a is [3, 4] and b is [5, 6]; columns of a and rows of b must be equal"
    );
    assert_eq!(
        error(&a, &b, &c, Trans::Nt, finish),
        "gemm@h0.fc1: a is [3, 4] and b is [5, 6]; columns of a and columns of b must be equal (b is taken transposed)"
    );
    assert_eq!(
        error(&a, &view(4, 6), &view(2, 6), Trans::Nn, finish),
        "gemm@h0.fc1: a is [3, 4] and c is [2, 6]; rows of op(a) and of c must be equal"
    );
    let bias = poisoned_vector("bias", 5);
    let text = error(&a, &view(4, 6), &c, Trans::Nn, Finish::Bias(&bias));
    assert!(text.contains("c is [3, 6] and bias is [5]"), "{text}");
    let r = view(3, 5);
    let text = error(&a, &view(4, 6), &c, Trans::Nn, Finish::Residual { bias: None, r: &r });
    assert!(text.contains("c is [3, 6] and r is [3, 5]"), "{text}");
    let ids = crate::testing::holding("ids", &[3, 4], &[0i32; 12]);
    assert_eq!(error(&ids, &view(4, 6), &c, Trans::Nn, finish), "gemm@h0.fc1: a is i32, needs f32");
}
