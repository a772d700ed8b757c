use super::*;
use crate::{
    DType, Fresh, View,
    ops::{
        Accumulate, BiasGrad, BiasGrads, ClipFactor, Factor, Sum,
        trial::{Gaps, assert_close, assert_order_free, few, poisoned_vector, random, refusal, run_checked, vector},
    },
    testing::{get, holding, put, scratch},
};

#[test]
fn bias_gradient_is_the_sum_of_columns_and_accumulates() {
    for &(rows, cols) in few(&[(3, 17), (65, 3), (65, 33), (130, 64), (1, 1)]) {
        for gaps in Gaps::BOTH {
            let dy = random(1, rows * cols);
            let want: Vec<f64> = (0..cols).map(|j| (0..rows).map(|i| f64::from(dy[i * cols + j])).sum()).collect();
            let times = |k: f64| want.iter().map(|w| w * k).collect::<Vec<_>>();
            let dyv = gaps.holding("dy", rows, cols, &dy);
            let dbias = poisoned_vector("dbias", cols);
            let run = |into| run_checked(&BiasGrad { dy: &dyv, dbias: &dbias, into }.op("t").unwrap());
            run(Accumulate::Overwrite);
            assert_close(&dbias, &want, 2e-6);
            run(Accumulate::Add);
            assert_close(&dbias, &times(2.0), 2e-6);
            let keep = vector("keep", &[-1.0]);
            run(Accumulate::Keep(&keep));
            assert_close(&dbias, &times(-1.0), 4e-6);
            put(&dbias, &vec![f32::NAN; cols]);
            put(&keep, &[0.0]);
            run(Accumulate::Keep(&keep));
            assert_close(&dbias, &want, 2e-6);
        }
    }
}

#[test]
fn a_large_bias_gradient_is_cut_with_the_same_bits_in_any_order() {
    if cfg!(miri) {
        return;
    }
    assert_order_free(|| {
        let dy = Gaps::Some.holding("dy", 900, 1700, &random(1, 1_530_000));
        let dbias = vector("dbias", &random(2, 1700));
        let keep = vector("keep", &[0.5]);
        (BiasGrad { dy: &dy, dbias: &dbias, into: Accumulate::Keep(&keep) }.op("t").unwrap(), vec![dbias])
    });
}

/// Each with what it does to old values, in one piece and in several; pieces in any order.
#[test]
fn two_bias_gradients_at_once_have_the_bits_of_one_behind_the_other() {
    let keeps = [vector("keep", &[0.5]), vector("keep", &[-2.0])];
    let intos = |which: usize| [Accumulate::Overwrite, Accumulate::Add, Accumulate::Keep(&keeps[which])];
    for &(rows, cols) in few(&[(1, 3), (70, 65), (300, 3000)]) {
        let dy = [1, 2].map(|seed| Gaps::Some.holding("dy", rows, cols, &random(seed, rows * cols)));
        for (first, second) in intos(0).into_iter().flat_map(|first| intos(1).map(|second| (first, second))) {
            let outputs = || [3, 4].map(|seed| vector("dbias", &random(seed, cols)));
            let grads = |dbias: &[View; 2], run: &dyn Fn([BiasGrad<'_>; 2])| {
                let grad = |at: usize, into| BiasGrad { dy: &dy[at], dbias: &dbias[at], into };
                run([grad(0, first), grad(1, second)]);
                dbias.each_ref().map(get::<f32>)
            };
            let apart = grads(&outputs(), &|each| each.iter().for_each(|grad| run_checked(&grad.op("t").unwrap())));
            let both = grads(&outputs(), &|each| run_checked(&BiasGrads { each }.op("t").unwrap()));
            assert_eq!(both, apart);
        }
    }
    if cfg!(miri) {
        return;
    }
    assert_order_free(|| {
        let dy = [1, 2].map(|seed| Gaps::Some.holding("dy", 300, 3000, &random(seed, 900_000)));
        let [one, two] = [3, 4].map(|seed| vector("dbias", &random(seed, 3000)));
        let first = BiasGrad { dy: &dy[0], dbias: &one, into: Accumulate::Add };
        let each = [first, BiasGrad { dy: &dy[1], dbias: &two, into: Accumulate::Keep(&keeps[0]) }];
        (BiasGrads { each }.op("t").unwrap(), vec![one, two])
    });
}

#[test]
fn two_bias_gradients_of_different_sizes_are_refused() {
    let [small, large] = [3, 4].map(|rows| Gaps::None.holding("dy", rows, 5, &random(1, rows * 5)));
    let [one, two] = [0; 2].map(|_| poisoned_vector("dbias", 5));
    let grad = |dy, dbias| BiasGrad { dy, dbias, into: Accumulate::Overwrite };
    let text = refusal(BiasGrads { each: [grad(&small, &one), grad(&large, &two)] }.op("t"));
    assert!(text.contains("first dy is [3, 5] and second dy is [4, 5]"), "{text}");
}

#[test]
fn sum_takes_the_factor_from_either_place() {
    let scalar = vector("factor", &[0.25]);
    for gaps in Gaps::BOTH {
        let values = random(1, 3 * 65);
        let x = gaps.holding("x", 3, 65, &values);
        let want: f64 = values.iter().map(|x| f64::from(*x)).sum::<f64>() * 0.25;
        for factor in [Factor::Const(0.25), Factor::Device(&scalar)] {
            let total = poisoned_vector("total", 1);
            run_checked(&Sum { x: &x, factor, total: &total }.op("t").unwrap());
            assert_eq!(get::<f32>(&total), [want as f32]);
        }
    }
}

/// Squared norm of one tensor through its partial sums.
fn squared(x: &View) -> f32 {
    let partials = poisoned_vector("partials", SquaredNorm::partials(x.numel()));
    run_checked(&SquaredNorm { x, partials: &partials }.op("t").unwrap());
    let total = poisoned_vector("total", 1);
    run_checked(&Sum { x: &partials, factor: Factor::Const(1.0), total: &total }.op("t").unwrap());
    get::<f32>(&total)[0]
}

#[test]
fn squared_norm_equals_f64_for_one_piece_and_for_many() {
    let large = if cfg!(miri) { 3000 } else { 1_200_003 };
    for n in [1, 3, 17, 65, 2049, large] {
        let values = random(1, n);
        let want: f64 = values.iter().map(|x| f64::from(*x).powi(2)).sum();
        let got = f64::from(squared(&vector("x", &values)));
        assert!((got - want).abs() <= 2e-7 * want, "{n}: {got}, not {want}");
        let halves: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
        let want: f64 = halves.iter().map(|x| f64::from(x.to_f32()).powi(2)).sum();
        let got = f64::from(squared(&holding("x", &[n], &halves)));
        assert!((got - want).abs() <= 2e-7 * want, "{n}: {got}, not {want}");
    }
    assert!(SquaredNorm::partials(1_200_003) > 1);
}

#[test]
fn partial_sums_have_the_same_bits_in_any_order() {
    if cfg!(miri) {
        return;
    }
    assert_order_free(|| {
        let x = vector("x", &random(1, 2_000_003));
        let partials = poisoned_vector("partials", SquaredNorm::partials(2_000_003));
        (SquaredNorm { x: &x, partials: &partials }.op("t").unwrap(), vec![partials])
    });
}

fn clip(squared: f32, limit: f32) -> (f32, f32, i32) {
    let squared = vector("squared", &[squared]);
    let [norm, factor] = ["norm", "factor"].map(|label| poisoned_vector(label, 1));
    let nonfinite = scratch("nonfinite", &[1], DType::I32, Fresh::Poisoned);
    let request = ClipFactor { squared: &squared, limit, norm: &norm, factor: &factor, nonfinite: &nonfinite };
    run_checked(&request.op("t").unwrap());
    (get::<f32>(&norm)[0], get::<f32>(&factor)[0], get::<i32>(&nonfinite)[0])
}

#[test]
fn gradients_are_clipped_to_the_limit_and_flagged_when_not_finite() {
    let (norm, factor, flag) = clip(25.0, 1.0);
    assert_eq!((norm, flag), (5.0, 0));
    assert!((factor - 0.2).abs() < 1e-7);
    assert_eq!(clip(0.25, 1.0), (0.5, 1.0, 0));
    assert_eq!(clip(0.0, 1.0), (0.0, 1.0, 0));
    assert_eq!(clip(25.0, 0.0), (5.0, 1.0, 0));
    assert_eq!(clip(f32::INFINITY, 1.0).1, 0.0);
    assert_eq!(clip(f32::INFINITY, 0.0).2, 1);
    let (norm, factor, flag) = clip(f32::NAN, 1.0);
    assert!(norm.is_nan());
    assert_eq!((factor, flag), (0.0, 1));
}

#[test]
fn a_single_nan_reaches_the_squared_norm() {
    let mut values = random(1, 5000);
    values[4321] = f32::NAN;
    assert!(squared(&vector("x", &values)).is_nan());
    values[4321] = f32::INFINITY;
    assert_eq!(squared(&vector("x", &values)), f32::INFINITY);
}

#[test]
fn wrong_sizes_are_told_with_both_shapes() {
    let (dy, dbias) = (Gaps::None.poisoned("dy", 3, 4), poisoned_vector("dbias", 5));
    let text = refusal(BiasGrad { dy: &dy, dbias: &dbias, into: Accumulate::Add }.op("fc1"));
    assert!(text.starts_with("bias_grad@fc1: dy is [3, 4] and dbias is [5]; "), "{text}");
    let text = refusal(SquaredNorm { x: &dy, partials: &dbias }.op("t"));
    assert!(text.contains("x is [3, 4] and partials is [5]"), "{text}");
    let gap = Gaps::Some.poisoned("dy", 3, 4);
    let one = poisoned_vector("p", 1);
    assert_eq!(
        refusal(SquaredNorm { x: &gap, partials: &one }.op("t")),
        "'dy' with sizes [3, 4] has gaps between its rows"
    );
    let text = refusal(Sum { x: &dy, factor: Factor::Const(1.0), total: &dbias }.op("t"));
    assert!(text.contains("total is [5]") && text.contains("exactly one element"), "{text}");
}
