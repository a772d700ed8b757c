//! AdamW.

use std::ops::Range;

use super::{math::Real, wide::wide};
use crate::{
    Args, DType, OpError, bf16,
    ops::{AdamWSpec, AdvanceAdamSpec, Hyper, join_master, split_master},
};

/// A skip flag at `index`, where there is one.
fn skipped(declared: bool, args: &Args<'_>, index: usize) -> Result<bool, OpError> {
    Ok(declared && args.read::<i32>(index)?[0] != 0)
}

pub(super) fn adamw(spec: &AdamWSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    if skipped(spec.skip, args, if spec.rest { 6 } else { 5 })? {
        return Ok(());
    }
    match args.dtype(3)? {
        DType::Bf16 => step::<bf16>(spec, args),
        _ => step::<f32>(spec, args),
    }
}

/// Factors of one step, each rounded to f32 once.
#[derive(Clone, Copy)]
struct Rules {
    clip: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    /// 1 − lr·decay.
    shrink: f32,
    /// lr / (1 − beta1ᵗ).
    rate: f32,
    /// 1 / √(1 − beta2ᵗ).
    spread: f32,
    eps: f32,
}

impl Rules {
    /// Scalars of one group are behind those of the one before.
    fn of_groups(spec: &AdamWSpec, scalars: &[f32]) -> Vec<Rules> {
        let groups = scalars.chunks_exact(Hyper::LEN).zip(spec.decays.iter());
        groups.map(|(scalars, decay)| Rules::new(spec, scalars, *decay)).collect()
    }

    fn new(spec: &AdamWSpec, scalars: &[f32], decay: f64) -> Rules {
        let at = |index: usize| f64::from(scalars[index]);
        Rules {
            clip: scalars[Hyper::CLIP],
            beta1: spec.beta1 as f32,
            rest1: (1.0 - spec.beta1) as f32,
            beta2: spec.beta2 as f32,
            rest2: (1.0 - spec.beta2) as f32,
            shrink: (1.0 - at(Hyper::LR) * decay) as f32,
            rate: (at(Hyper::LR) / at(Hyper::CORRECTION1)) as f32,
            spread: (1.0 / at(Hyper::CORRECTION2).sqrt()) as f32,
            eps: spec.eps as f32,
        }
    }
}

/// Each run with the rules of its group.
fn step<T: Real>(spec: &AdamWSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let groups = Rules::of_groups(spec, args.read(4)?);
    let (mut m, mut v, grad) = (args.rows_mut(1)?, args.rows_mut(2)?, args.rows::<T>(3)?);
    // A piece of a buffer of several runs has the gradients from the first one on.
    let first = grad.cols() - m.cols();
    let runs = runs(spec, first, m.cols());
    if spec.rest {
        let (mut value, mut rest) = (args.rows_mut(0)?, args.rows_mut(5)?);
        for i in 0..grad.len() {
            for (run, group) in &runs {
                let master = (&mut value.row_mut(i)[run.clone()], &mut rest.row_mut(i)[run.clone()]);
                let moments = (&mut m.row_mut(i)[run.clone()], &mut v.row_mut(i)[run.clone()]);
                update_halves(master, moments, &grad.row(i)[first + run.start..first + run.end], groups[*group]);
            }
        }
    } else {
        let mut param = args.rows_mut(0)?;
        for i in 0..grad.len() {
            for (run, group) in &runs {
                let moments = (&mut m.row_mut(i)[run.clone()], &mut v.row_mut(i)[run.clone()]);
                let (param, grad) =
                    (&mut param.row_mut(i)[run.clone()], &grad.row(i)[first + run.start..first + run.end]);
                update(param, moments, grad, groups[*group]);
            }
        }
    }
    Ok(())
}

/// Columns of each run in a piece of `cols` columns from `first` on, and its group.
fn runs(spec: &AdamWSpec, first: usize, cols: usize) -> Vec<(Range<usize>, usize)> {
    if let [all] = spec.runs[..] {
        // It may be of a matrix, of which a piece has some rows.
        return vec![(0..cols, all.group)];
    }
    let mut from = 0;
    let mut found = Vec::new();
    for run in spec.runs.iter() {
        let to = run.end.saturating_sub(first).min(cols);
        if from < to {
            found.push((from..to, run.group));
            from = to;
        }
    }
    found
}

#[inline(always)]
fn take_step(param: f32, m: &mut f32, v: &mut f32, grad: f32, rules: Rules) -> f32 {
    let g = grad * rules.clip;
    *m = rules.beta1.mul_add(*m, rules.rest1 * g);
    *v = rules.beta2.mul_add(*v, rules.rest2 * g * g);
    let step = rules.rate * *m / v.sqrt().mul_add(rules.spread, rules.eps);
    param.mul_add(rules.shrink, -step)
}

wide! {
    fn update[T: Real](param: &mut [f32], moments: (&mut [f32], &mut [f32]), grad: &[T], rules: Rules) {
        let (m, v) = moments;
        for (((param, m), v), grad) in param.iter_mut().zip(m).zip(v).zip(grad) {
            *param = take_step(*param, m, v, grad.load(), rules);
        }
    }
}

wide! {
    fn update_halves[T: Real](
        master: (&mut [bf16], &mut [i16]),
        moments: (&mut [f32], &mut [f32]),
        grad: &[T],
        rules: Rules,
    ) {
        let ((value, rest), (m, v)) = (master, moments);
        for ((((value, rest), m), v), grad) in value.iter_mut().zip(rest).zip(m).zip(v).zip(grad) {
            let master = take_step(join_master(*value, *rest), m, v, grad.load(), rules);
            (*value, *rest) = split_master(master);
        }
    }
}

pub(super) fn advance(spec: &AdvanceAdamSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    if skipped(spec.skip, args, 2)? {
        return Ok(());
    }
    let step = &mut args.write::<i32>(0)?[0];
    *step = step.saturating_add(1);
    let scalars = args.write::<f32>(1)?;
    scalars[Hyper::CORRECTION1] = (1.0 - spec.beta1.powi(*step)) as f32;
    scalars[Hyper::CORRECTION2] = (1.0 - spec.beta2.powi(*step)) as f32;
    Ok(())
}

#[cfg(test)]
mod halves_tests;
#[cfg(test)]
mod tests;
