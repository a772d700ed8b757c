//! AdamW.

use super::{lines, math::Real, wide::wide};
use crate::{
    Args, DType, OpError, Rows, RowsMut, bf16,
    ops::{AdamWSpec, AdvanceAdamSpec, Hyper},
};

/// A skip flag at `index`, where there is one.
fn skipped(declared: bool, args: &Args<'_>, index: usize) -> Result<bool, OpError> {
    Ok(declared && args.read::<i32>(index)?[0] != 0)
}

pub(super) fn adamw(spec: &AdamWSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let groups = Rules::of_groups(spec, args.read(4)?);
    let skip = skipped(spec.skip, args, if spec.copy { 6 } else { 5 })?;
    let mut param = args.rows_mut::<f32>(0)?;
    if !skip {
        let (mut m, mut v) = (args.rows_mut(1)?, args.rows_mut(2)?);
        match args.dtype(3)? {
            DType::Bf16 => step(spec, &groups, [&mut param, &mut m, &mut v], args.rows::<bf16>(3)?),
            _ => step(spec, &groups, [&mut param, &mut m, &mut v], args.rows::<f32>(3)?),
        }
    }
    if spec.copy {
        lines::two(args.rows_mut(5)?, param.as_rows(), round);
    }
    Ok(())
}

wide! {
    fn round(copy: &mut [bf16], param: &[f32]) {
        for (copy, &param) in copy.iter_mut().zip(param) {
            *copy = bf16::store(param);
        }
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
fn step<T: Real>(spec: &AdamWSpec, groups: &[Rules], state: [&mut RowsMut<'_, f32>; 3], grad: Rows<'_, T>) {
    let [param, m, v] = state;
    let (rows, cols) = (0..param.len(), param.cols());
    // A piece of a buffer of several runs has the gradients from the first one on.
    let first = grad.cols() - cols;
    let mut from = 0;
    for run in spec.runs.iter() {
        let to = if spec.runs.len() == 1 { cols } else { run.end.saturating_sub(first).min(cols) };
        if from < to {
            let [param, m, v] = [&mut *param, &mut *m, &mut *v].map(|all| all.block_mut(rows.clone(), from..to));
            let grad = grad.block(rows.clone(), first + from..first + to);
            update(param, m, v, grad, groups[run.group]);
            from = to;
        }
    }
}

wide! {
    fn update[T: Real](
        param: RowsMut<'_, f32>,
        m: RowsMut<'_, f32>,
        v: RowsMut<'_, f32>,
        grad: Rows<'_, T>,
        rules: Rules,
    ) {
        let (mut param, mut m, mut v) = (param, m, v);
        for i in 0..grad.len() {
            let state = param.row_mut(i).iter_mut().zip(m.row_mut(i)).zip(v.row_mut(i));
            for (((param, m), v), &grad) in state.zip(grad.row(i)) {
                let g = grad.load() * rules.clip;
                *m = rules.beta1.mul_add(*m, rules.rest1 * g);
                *v = rules.beta2.mul_add(*v, rules.rest2 * g * g);
                let step = rules.rate * *m / v.sqrt().mul_add(rules.spread, rules.eps);
                *param = param.mul_add(rules.shrink, -step);
            }
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
mod tests;
