//! How far steps may be apart whose gradients were summed over the replicas in another order.

use ddp::{AdamConfig, OptimizerConfig};

use crate::{
    optimizer::{RATE, SIZES, STEPS, gradient},
    support::Setup,
};

/// Where `got` and `want` differ by more than the order of the sums over the replicas may bring.
pub(crate) fn beyond_reordering(
    got: &[f32],
    want: &[f32],
    setup: &Setup,
    config: &OptimizerConfig,
    samples: usize,
) -> Option<String> {
    let mean = |step: usize, of: fn(f64) -> f64| {
        let params = SIZES.iter().enumerate();
        let elements = params.flat_map(|(i, &numel)| {
            let all: Vec<Vec<f32>> = (0..samples).map(|sample| gradient(step, sample, i, numel)).collect();
            (0..numel).map(move |at| all.iter().map(|grad| of(f64::from(grad[at]))).sum::<f64>() / samples as f64)
        });
        elements.collect::<Vec<f64>>()
    };
    let means = (0..STEPS).map(|step| mean(step, |x| x)).collect();
    let magnitudes = (0..STEPS).map(|step| mean(step, f64::abs)).collect();
    let gradients = Gradients { means, magnitudes };
    let bounds = bounds(&gradients, setup.replica_count() as usize, f64::from(RATE), config.adam, want);
    got.iter().zip(want).zip(bounds).enumerate().find_map(|(i, ((got, want), bound))| {
        let off = f64::from((got - want).abs());
        (off.is_nan() || off > bound)
            .then(|| format!("element {i}: {got}, not {want}: off by {off:e}, at most {bound:e}"))
    })
}

/// By step and element: the mean gradient, and the mean of the magnitudes that it was summed from.
struct Gradients {
    means: Vec<Vec<f64>>,
    magnitudes: Vec<Vec<f64>>,
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Bounds by element, behind all steps at the rate `lr`, for `end` values of one of the two.
///
/// A mean over n replicas takes n - 1 additions and a scaling, so each side is off by at most n roundings of half a unit of
/// the magnitudes, and the two are within `n EPSILON` of them of each other; the norm that clips is within the same of its
/// gradients' magnitudes, and of its own sums: squares are rounded, added up eight at a time in f32 and then in f64, so that
/// the root is off by at most 4 half units, on each side. With gradients d apart, the average m and the root of v, whose weights each sum to one, are at most
/// the largest d of all steps apart, and so is m / r by d (1 + |m| / r) / (r - d). The steps themselves round: 8 times half a
/// unit of the value and of its change covers what each takes.
fn bounds(gradients: &Gradients, replicas: usize, lr: f64, config: AdamConfig, end: &[f32]) -> Vec<f64> {
    let unit = replicas as f64 * f64::from(f32::EPSILON);
    let n = end.len();
    let (mut m, mut v, mut apart) = (vec![0.0; n], vec![0.0; n], vec![0f64; n]);
    let (mut bounds, mut moved) = (vec![0.0; n], vec![0.0; n]);
    for (t, (means, magnitudes)) in (1..).zip(gradients.means.iter().zip(&gradients.magnitudes)) {
        let length = norm(means);
        let factor = if config.clip > 0.0 { (config.clip / (length + 1e-6)).min(1.0) } else { 1.0 };
        let sums = 4.0 * f64::from(f32::EPSILON);
        let clip = if config.clip > 0.0 { unit * norm(magnitudes) / length + sums } else { 0.0 };
        let (c1, c2) = (1.0 - config.beta1.powi(t), 1.0 - config.beta2.powi(t));
        for i in 0..n {
            let g = means[i] * factor;
            apart[i] = apart[i].max(factor * unit * magnitudes[i] + g.abs() * clip);
            m[i] = config.beta1 * m[i] + (1.0 - config.beta1) * g;
            v[i] = config.beta2 * v[i] + (1.0 - config.beta2) * g * g;
            let root = (v[i] / c2).sqrt() + config.eps;
            let ratio = (m[i] / c1).abs() / root;
            assert!(root > 2.0 * apart[i], "element {i} has no digit that both orders agree on");
            bounds[i] += lr * apart[i] * (1.0 + ratio) / (root - apart[i]);
            moved[i] += lr * ratio;
        }
    }
    let steps = gradients.means.len() as f64;
    let rounding = |i: usize| 8.0 * f64::from(f32::EPSILON) / 2.0 * (f64::from(end[i].abs()) + moved[i]);
    (0..n).map(|i| bounds[i] + steps * rounding(i)).collect()
}
