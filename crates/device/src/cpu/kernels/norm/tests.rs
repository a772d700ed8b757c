use crate::{
    Op, View,
    ops::{
        Accumulate, BiasGrad, LayerNorm, LayerNormBackward, LayerNormGrad, Residual, RmsNorm, RmsNormBackward,
        RmsNormGrad, StretchSums,
        trial::{
            Gaps, assert_close, assert_order_free, differences, few, inner, poisoned_vector, random, refusal,
            run_checked, vector, wide,
        },
    },
    testing::{get, put},
};

const EPS: f32 = 1e-5;
const SIZES: [(usize, usize); 5] = [(1, 1), (3, 17), (70, 3), (5, 65), (2, 32)];

/// Layer norm of each row: outputs, means, reciprocal deviations.
fn layer(x: &[f64], w: &[f64], b: &[f64]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (mut y, mut means, mut rstds) = (vec![], vec![], vec![]);
    for row in x.chunks(w.len()) {
        let mean = row.iter().sum::<f64>() / row.len() as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64;
        let rstd = 1.0 / (variance + f64::from(EPS)).sqrt();
        y.extend(row.iter().zip(w).zip(b).map(|((x, w), b)| (x - mean) * rstd * w + b));
        means.push(mean);
        rstds.push(rstd);
    }
    (y, means, rstds)
}

fn rms(x: &[f64], w: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (mut y, mut rstds) = (vec![], vec![]);
    for row in x.chunks(w.len()) {
        let rstd = 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64 + f64::from(EPS)).sqrt();
        y.extend(row.iter().zip(w).map(|(x, w)| x * rstd * w));
        rstds.push(rstd);
    }
    (y, rstds)
}

#[test]
fn layer_norm_with_and_without_residual_equals_its_formula() {
    for &(rows, cols) in few(&SIZES) {
        for gaps in Gaps::BOTH {
            let (x, r) = (random(1, rows * cols), random(2, rows * cols));
            let (w, b) = (random(3, cols), random(4, cols));
            let (xv, rv) = (gaps.holding("x", rows, cols, &x), gaps.holding("r", rows, cols, &r));
            let (wv, bv) = (vector("w", &w), vector("b", &b));
            for with in [false, true] {
                let [y, sum] = ["y", "sum"].map(|label| gaps.poisoned(label, rows, cols));
                let [mean, rstd] = ["mean", "rstd"].map(|label| poisoned_vector(label, rows));
                let residual = with.then_some(Residual { r: &rv, sum: &sum });
                let request =
                    LayerNorm { x: &xv, residual, weight: &wv, bias: &bv, y: &y, mean: &mean, rstd: &rstd, eps: EPS };
                run_checked(&request.op("t").unwrap());
                let input: Vec<f64> =
                    x.iter().zip(&r).map(|(x, r)| f64::from(*x) + if with { f64::from(*r) } else { 0.0 }).collect();
                let want = layer(&input, &wide(&w), &wide(&b));
                assert_close(&y, &want.0, 3e-6);
                // The variance of one column is exactly zero.
                assert_close(&mean, &want.1, 1e-6);
                assert_close(&rstd, &want.2, 1e-5);
                if with {
                    assert_close(&sum, &input, 1e-7);
                }
            }
        }
    }
}

#[test]
fn a_row_far_from_zero_keeps_its_variance() {
    for &cols in few(&[3, 65, 384, 1000]) {
        for offset in [0.0, 1e3, -1e4] {
            let x: Vec<f32> = random(1, cols).iter().map(|x| x + offset).collect();
            let xv = Gaps::None.holding("x", 1, cols, &x);
            let (one, zero) = (vector("w", &vec![1.0; cols]), vector("b", &vec![0.0; cols]));
            let y = Gaps::None.poisoned("y", 1, cols);
            let [mean, rstd] = ["mean", "rstd"].map(|label| poisoned_vector(label, 1));
            let (weight, bias) = (&one, &zero);
            let request = LayerNorm { x: &xv, residual: None, weight, bias, y: &y, mean: &mean, rstd: &rstd, eps: EPS };
            run_checked(&request.op("t").unwrap());
            let want = layer(&wide(&x), &vec![1.0; cols], &vec![0.0; cols]);
            assert_close(&rstd, &want.2, 2e-6);
            // The mean is rounded to f32: an ulp of the offset, against a deviation of about 0.6.
            assert_close(&y, &want.0, 3e-6 + f64::from(offset.abs()) * 2e-7);
        }
    }
}

#[test]
fn an_outlier_at_the_start_costs_little_precision() {
    let cols = 1000;
    let mut x = random(1, cols);
    x[..32].fill(300.0);
    let xv = Gaps::None.holding("x", 1, cols, &x);
    let ones = vector("w", &vec![1.0; cols]);
    let y = Gaps::None.poisoned("y", 1, cols);
    let [mean, rstd] = ["mean", "rstd"].map(|label| poisoned_vector(label, 1));
    let request =
        LayerNorm { x: &xv, residual: None, weight: &ones, bias: &ones, y: &y, mean: &mean, rstd: &rstd, eps: EPS };
    run_checked(&request.op("t").unwrap());
    assert_close(&rstd, &layer(&wide(&x), &vec![1.0; cols], &vec![1.0; cols]).2, 5e-6);
}

#[test]
fn rms_norm_with_and_without_residual_equals_its_formula() {
    for &(rows, cols) in few(&SIZES) {
        for gaps in Gaps::BOTH {
            let (x, r, w) = (random(1, rows * cols), random(2, rows * cols), random(3, cols));
            let (xv, rv) = (gaps.holding("x", rows, cols, &x), gaps.holding("r", rows, cols, &r));
            for with in [false, true] {
                let [y, sum] = ["y", "sum"].map(|label| gaps.poisoned(label, rows, cols));
                let rstd = poisoned_vector("rstd", rows);
                let residual = with.then_some(Residual { r: &rv, sum: &sum });
                let weight = vector("w", &w);
                let request = RmsNorm { x: &xv, residual, weight: &weight, y: &y, rstd: &rstd, eps: EPS };
                run_checked(&request.op("t").unwrap());
                let input: Vec<f64> =
                    x.iter().zip(&r).map(|(x, r)| f64::from(*x) + if with { f64::from(*r) } else { 0.0 }).collect();
                let want = rms(&input, &wide(&w));
                assert_close(&y, &want.0, 2e-6);
                assert_close(&rstd, &want.1, 2e-6);
                if with {
                    assert_close(&sum, &input, 1e-7);
                }
            }
        }
    }
}

/// Where the gradient past the norm is.
#[derive(Clone, Copy)]
enum Past {
    None,
    Apart,
    InPlace,
}

/// Runs a backward request with each kind of skip and compares with `want` (plus the skip).
fn check_dx(gaps: Gaps, rows: usize, cols: usize, want: &[f64], op: impl Fn(Option<&View>, &View) -> Op) {
    let past = random(9, rows * cols);
    for kind in [Past::None, Past::Apart, Past::InPlace] {
        let dx = gaps.poisoned("dx", rows, cols);
        let skip = match kind {
            Past::None => None,
            Past::Apart => Some(gaps.holding("skip", rows, cols, &past)),
            Past::InPlace => {
                put(&dx, &past);
                Some(dx.clone())
            }
        };
        run_checked(&op(skip.as_ref(), &dx));
        let skipped = |i: usize| if skip.is_some() { f64::from(past[i]) } else { 0.0 };
        let want: Vec<f64> = want.iter().enumerate().map(|(i, w)| w + skipped(i)).collect();
        assert_close(&dx, &want, 2e-5);
    }
}

#[test]
fn layer_norm_backward_equals_differences() {
    for &(rows, cols) in few(&[(3, 5), (2, 17), (70, 3), (5, 65), (2, 32)]) {
        for gaps in Gaps::BOTH {
            let (x, dy) = (random(1, rows * cols), random(2, rows * cols));
            let (w, b) = (random(3, cols), random(4, cols));
            let (wx, ww, wb) = (wide(&x), wide(&w), wide(&b));
            let (_, means, rstds) = layer(&wx, &ww, &wb);
            let narrow = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<_>>();
            let (mean, rstd) = (vector("mean", &narrow(&means)), vector("rstd", &narrow(&rstds)));
            let (xv, dyv) = (gaps.holding("x", rows, cols, &x), gaps.holding("dy", rows, cols, &dy));
            let weight = vector("w", &w);

            let want = differences(&wx, |x| inner(&layer(x, &ww, &wb).0, &dy));
            check_dx(gaps, rows, cols, &want, |skip, dx| {
                LayerNormBackward { dy: &dyv, x: &xv, weight: &weight, mean: &mean, rstd: &rstd, skip, dx, sums: None }
                    .op("t")
                    .unwrap()
            });

            let (dweight, dbias) = (poisoned_vector("dweight", cols), poisoned_vector("dbias", cols));
            let grad = |into: Accumulate<'_>| {
                let (dweight, dbias) = (&dweight, &dbias);
                LayerNormGrad { dy: &dyv, x: &xv, mean: &mean, rstd: &rstd, dweight, dbias, into }.op("t").unwrap()
            };
            let want_w = differences(&ww, |w| inner(&layer(&wx, w, &wb).0, &dy));
            let want_b = differences(&wb, |b| inner(&layer(&wx, &ww, b).0, &dy));
            check_accumulation(&[(&dweight, &want_w), (&dbias, &want_b)], grad);
        }
    }
}

/// Overwrites poison, adds, multiplies by keep, and overwrites NaN with a keep of 0.
fn check_accumulation(outputs: &[(&View, &Vec<f64>)], op: impl Fn(Accumulate<'_>) -> Op) {
    let expect = |times: f64| {
        for (view, want) in outputs {
            let want: Vec<f64> = want.iter().map(|w| w * times).collect();
            assert_close(view, &want, 1e-5);
        }
    };
    run_checked(&op(Accumulate::Overwrite));
    expect(1.0);
    run_checked(&op(Accumulate::Add));
    expect(2.0);
    let keep = vector("keep", &[0.25]);
    run_checked(&op(Accumulate::Keep(&keep)));
    expect(1.5);
    put(&keep, &[0.0]);
    outputs.iter().for_each(|(view, _)| put(view, &vec![f32::NAN; view.numel()]));
    run_checked(&op(Accumulate::Keep(&keep)));
    expect(1.0);
}

#[test]
fn rms_norm_backward_equals_differences() {
    for &(rows, cols) in few(&[(3, 5), (2, 17), (70, 3), (5, 65), (2, 32)]) {
        for gaps in Gaps::BOTH {
            let (x, dy, w) = (random(1, rows * cols), random(2, rows * cols), random(3, cols));
            let (wx, ww) = (wide(&x), wide(&w));
            let rstds: Vec<f32> = rms(&wx, &ww).1.iter().map(|x| *x as f32).collect();
            let (rstd, weight) = (vector("rstd", &rstds), vector("w", &w));
            let (xv, dyv) = (gaps.holding("x", rows, cols, &x), gaps.holding("dy", rows, cols, &dy));

            let want = differences(&wx, |x| inner(&rms(x, &ww).0, &dy));
            check_dx(gaps, rows, cols, &want, |skip, dx| {
                RmsNormBackward { dy: &dyv, x: &xv, weight: &weight, rstd: &rstd, skip, dx, sums: None }
                    .op("t")
                    .unwrap()
            });

            let dweight = poisoned_vector("dweight", cols);
            let want = differences(&ww, |w| inner(&rms(&wx, w).0, &dy));
            check_accumulation(&[(&dweight, &want)], |into| {
                RmsNormGrad { dy: &dyv, x: &xv, rstd: &rstd, dweight: &dweight, into }.op("t").unwrap()
            });
        }
    }
}

/// In one stretch of rows, and in so many that pieces have several.
#[test]
fn sums_over_stretches_of_rows_add_up_to_the_gradients() {
    for &(rows, cols) in few(&[(3, 5), (70, 17), (9000, 65)]) {
        let matrix = |label: &str, seed| Gaps::Some.holding(label, rows, cols, &random(seed, rows * cols));
        let (dy, x, skip, dx) = (&matrix("dy", 1), &matrix("x", 2), &matrix("skip", 3), &matrix("dx", 4));
        let (mean, rstd) = (&vector("mean", &random(5, rows)), &vector("rstd", &random(6, rows)));
        let (weight, into) = (&vector("w", &random(7, cols)), Accumulate::Overwrite);
        let stretches = LayerNormBackward::stretches(rows);
        let sums = |label: &str| Gaps::Some.poisoned(label, stretches, cols);
        let gradient = |sums: &View| {
            let gradient = poisoned_vector("gradient", cols);
            run_checked(&BiasGrad { dy: sums, dbias: &gradient, into }.op("t").unwrap());
            gradient
        };
        for skip in [None, Some(skip), Some(dx)] {
            let (dweight, dbias, scaled) = (sums("dweight"), sums("dbias"), sums("scaled"));
            let both = Some(StretchSums { dweight: &dweight, dbias: &dbias });
            run_checked(&LayerNormBackward { dy, x, weight, mean, rstd, skip, dx, sums: both }.op("t").unwrap());
            run_checked(&RmsNormBackward { dy, x, weight, rstd, skip, dx, sums: Some(&scaled) }.op("t").unwrap());
            let [dw, db, ds] = [0; 3].map(|_| poisoned_vector("want", cols));
            run_checked(&LayerNormGrad { dy, x, mean, rstd, dweight: &dw, dbias: &db, into }.op("t").unwrap());
            run_checked(&RmsNormGrad { dy, x, rstd, dweight: &ds, into }.op("t").unwrap());
            for (sums, want) in [(&dweight, dw), (&dbias, db), (&scaled, ds)] {
                assert_close(&gradient(sums), &wide(&get::<f32>(&want)), 2e-6);
            }
        }
    }
}

#[test]
fn large_norms_are_cut_with_the_same_bits_in_any_order() {
    if cfg!(miri) {
        return;
    }
    let (rows, cols) = (700, 1701);
    let x = random(1, rows * cols);
    let view = |label: &str, seed| Gaps::Some.holding(label, rows, cols, &random(seed, rows * cols));
    let stats = |label: &str, seed| vector(label, &random(seed, rows));
    assert_order_free(|| {
        let x = Gaps::Some.holding("x", rows, cols, &x);
        let [y, sum] = ["y", "sum"].map(|label| Gaps::None.poisoned(label, rows, cols));
        let [mean, rstd] = ["mean", "rstd"].map(|label| poisoned_vector(label, rows));
        let (weight, bias) = (vector("w", &random(3, cols)), vector("b", &random(4, cols)));
        let residual = Some(Residual { r: &view("r", 2), sum: &sum });
        let (weight, bias, eps) = (&weight, &bias, EPS);
        let request = LayerNorm { x: &x, residual, weight, bias, y: &y, mean: &mean, rstd: &rstd, eps };
        (request.op("t").unwrap(), vec![y, sum, mean, rstd])
    });
    assert_order_free(|| {
        let dx = view("dx", 5);
        let (dy, x, weight) = (view("dy", 6), view("x", 7), vector("w", &random(3, cols)));
        let (mean, rstd) = (stats("mean", 8), stats("rstd", 9));
        let (skip, stretches) = (Some(&dx), LayerNormBackward::stretches(rows));
        let [dweight, dbias] = ["dw", "db"].map(|label| Gaps::None.poisoned(label, stretches, cols));
        let (mean, rstd, sums) = (&mean, &rstd, Some(StretchSums { dweight: &dweight, dbias: &dbias }));
        let request = LayerNormBackward { dy: &dy, x: &x, weight: &weight, mean, rstd, skip, dx: &dx, sums };
        (request.op("t").unwrap(), vec![dx, dweight, dbias])
    });
    assert_order_free(|| {
        let (dy, x, mean, rstd) = (view("dy", 6), view("x", 7), stats("mean", 8), stats("rstd", 9));
        let (dweight, dbias) = (vector("dw", &random(1, cols)), vector("db", &random(2, cols)));
        let (dw, db, into) = (&dweight, &dbias, Accumulate::Add);
        let request = LayerNormGrad { dy: &dy, x: &x, mean: &mean, rstd: &rstd, dweight: dw, dbias: db, into };
        (request.op("t").unwrap(), vec![dweight, dbias])
    });
    assert_order_free(|| {
        let (x, weight, y, rstd) = (
            view("x", 7),
            vector("w", &random(3, cols)),
            Gaps::None.poisoned("y", rows, cols),
            poisoned_vector("r", rows),
        );
        let request = RmsNorm { x: &x, residual: None, weight: &weight, y: &y, rstd: &rstd, eps: EPS };
        (request.op("t").unwrap(), vec![y, rstd])
    });
    assert_order_free(|| {
        let (dy, x, weight, rstd) = (view("dy", 6), view("x", 7), vector("w", &random(3, cols)), stats("rstd", 9));
        let (skip, dx) = (view("skip", 4), Gaps::Some.poisoned("dx", rows, cols));
        let request =
            RmsNormBackward { dy: &dy, x: &x, weight: &weight, rstd: &rstd, skip: Some(&skip), dx: &dx, sums: None };
        (request.op("t").unwrap(), vec![dx])
    });
    assert_order_free(|| {
        let (dy, x, rstd, dweight) = (view("dy", 6), view("x", 7), stats("rstd", 9), poisoned_vector("dw", cols));
        let into = Accumulate::Overwrite;
        (RmsNormGrad { dy: &dy, x: &x, rstd: &rstd, dweight: &dweight, into }.op("t").unwrap(), vec![dweight])
    });
}

#[test]
fn sums_over_many_rows_stay_close_to_f64() {
    let rows = if cfg!(miri) { 70 } else { 20_000 };
    let dy: Vec<f32> = random(1, rows * 3).iter().map(|x| x + 1.0).collect();
    let ones = vec![1.0; rows];
    let dyv = Gaps::None.holding("dy", rows, 3, &dy);
    let x = Gaps::None.holding("x", rows, 3, &vec![2.0; rows * 3]);
    let dweight = poisoned_vector("dweight", 3);
    let rstd = vector("rstd", &ones);
    run_checked(
        &RmsNormGrad { dy: &dyv, x: &x, rstd: &rstd, dweight: &dweight, into: Accumulate::Overwrite }.op("t").unwrap(),
    );
    let want: Vec<f64> = (0..3).map(|j| (0..rows).map(|i| 2.0 * f64::from(dy[i * 3 + j])).sum()).collect();
    assert_close(&dweight, &want, 1e-6);
}

#[test]
fn wrong_sizes_are_told_with_both_shapes() {
    let x = Gaps::None.poisoned("x", 3, 8);
    let [y, narrow] = [8, 7].map(|cols| Gaps::None.poisoned("y", 3, cols));
    let (w, short) = (poisoned_vector("w", 8), poisoned_vector("short", 2));
    let (mean, rstd) = (poisoned_vector("mean", 3), poisoned_vector("rstd", 3));
    let good = LayerNorm { x: &x, residual: None, weight: &w, bias: &w, y: &y, mean: &mean, rstd: &rstd, eps: EPS };
    assert!(good.op("t").is_ok());
    let residual = Some(Residual { r: &narrow, sum: &y });
    for (request, want) in [
        (LayerNorm { y: &narrow, ..good }, "x is [3, 8] and y is [3, 7]"),
        (LayerNorm { bias: &short, ..good }, "x is [3, 8] and bias is [2]"),
        (LayerNorm { rstd: &short, ..good }, "x is [3, 8] and rstd is [2]"),
        (LayerNorm { residual, ..good }, "x is [3, 8] and r is [3, 7]"),
        (LayerNorm { eps: 0.0, ..good }, "eps is 0, it must be over 0"),
    ] {
        let text = refusal(request.op("ln"));
        assert!(text.starts_with("layer_norm@ln: ") && text.contains(want), "{text}");
    }
    let bad = RmsNormBackward { dy: &y, x: &x, weight: &short, rstd: &rstd, skip: None, dx: &y, sums: None };
    assert!(refusal(bad.op("t")).contains("x is [3, 8] and weight is [2]"));
    assert!(get::<f32>(&mean).iter().all(|m| m.is_nan()));
}
