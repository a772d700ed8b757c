//! The optimizer against a plain f64 AdamW.

use ddp::{AdamConfig, Optimizer, OptimizerConfig, ParamGroup};

use crate::support::{Caught, One, Setup, cpu, declared, sim};

/// Decoupled weight decay Adam in f64.
/// Source: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2.
pub(crate) fn reference(w: &mut [f64], steps: &[(f64, Vec<f64>)], decay: impl Fn(usize) -> f64, config: AdamConfig) {
    let (mut m, mut v) = (vec![0.0; w.len()], vec![0.0; w.len()]);
    for (t, (lr, grads)) in steps.iter().enumerate() {
        let norm = grads.iter().map(|g| g * g).sum::<f64>().sqrt();
        let factor = if config.clip > 0.0 { (config.clip / (norm + 1e-6)).min(1.0) } else { 1.0 };
        for i in 0..w.len() {
            let g = grads[i] * factor;
            m[i] = config.beta1 * m[i] + (1.0 - config.beta1) * g;
            v[i] = config.beta2 * v[i] + (1.0 - config.beta2) * g * g;
            let t = t as i32 + 1;
            let (c1, c2) = (1.0 - config.beta1.powi(t), 1.0 - config.beta2.powi(t));
            w[i] -= lr * decay(i) * w[i];
            w[i] -= lr * (m[i] / c1) / ((v[i] / c2).sqrt() + config.eps);
        }
    }
}

/// Together 1000 elements.
const SIZES: [usize; 5] = [200, 131, 70, 301, 298];

/// Which of two groups a parameter is in: 0 decays, 1 does not.
fn group_of(name: &str) -> usize {
    usize::from(!matches!(name, "p1" | "p3"))
}

fn config(clip: f64) -> OptimizerConfig {
    let group = |name: &str, weight_decay| ParamGroup { name: name.into(), weight_decay, max_lr: 0.1, min_lr: 0.0 };
    OptimizerConfig {
        adam: AdamConfig { clip, ..AdamConfig::default() },
        groups: vec![group("decayed", 0.1), group("plain", 0.0)],
        ..OptimizerConfig::default()
    }
}

/// Rates that differ from step to step.
fn rate(step: usize) -> f32 {
    (0.01 * step as f64) as f32
}

/// A rank's gradient of a parameter: ranks differ.
fn gradient(step: usize, rank: u32, param: usize) -> Vec<f32> {
    let start: usize = SIZES[..param].iter().sum();
    let own = 0.1 + 0.05 * f64::from(rank);
    (start..start + SIZES[param]).map(|i| ((i as f64 * 1.3 + step as f64).cos() * own) as f32).collect()
}

/// All values, before and behind five steps.
fn train(one: &mut One, clip: f64) -> Result<[Vec<f32>; 2], Caught> {
    let all =
        |one: &One| Ok::<_, Caught>((0..SIZES.len()).map(|i| one.read(i)).collect::<Result<Vec<_>, _>>()?.concat());
    let mut optimizer = Optimizer::new(&one.ddp, &one.groups, config(clip), group_of, &one.stream)?;
    let before = all(one)?;
    for step in 1..=5 {
        one.microbatch(|one| {
            (0..SIZES.len()).rev().try_for_each(|i| one.contribute_on(&one.stream, i, gradient(step, one.rank, i)))
        })?;
        one.ddp.finish_grads()?;
        optimizer.step(&one.stream, &[rate(step), rate(step)])?;
    }
    Ok([before, all(one)?])
}

#[test]
fn steps_agree_with_a_plain_reference_in_f64() {
    let decay = |i: usize| if (200..331).contains(&i) || (401..702).contains(&i) { 0.1 } else { 0.0 };
    for (ranks, setup) in [(1, Setup::new(1, declared(&SIZES))), (2, Setup::new(2, declared(&SIZES)).sharded())] {
        let mean = |step: usize| -> Vec<f64> {
            let of_rank = |rank| (0..SIZES.len()).flat_map(move |i| gradient(step, rank, i));
            let sum = (0..ranks).map(of_rank).fold(vec![0.0; 1000], |sum, grads| {
                sum.iter().zip(grads).map(|(sum, grad): (&f64, f32)| sum + f64::from(grad)).collect()
            });
            sum.into_iter().map(|sum: f64| sum / f64::from(ranks)).collect()
        };
        let steps: Vec<(f64, Vec<f64>)> = (1..=5).map(|step| (f64::from(rate(step)), mean(step))).collect();
        for clip in [0.0, 1.0] {
            for machine in [cpu(), sim(3)] {
                for [before, after] in setup.run(&machine, |one| train(one, clip)).unwrap() {
                    let mut want: Vec<f64> = before.iter().map(|x| f64::from(*x)).collect();
                    reference(&mut want, &steps, decay, config(clip).adam);
                    let worst = after.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max);
                    assert!(worst < 1e-6, "{ranks} ranks, clip {clip}: {worst}");
                }
            }
        }
    }
}
