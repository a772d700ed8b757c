//! Optimizer, and the sums behind the global norm.

use super::factor;
use crate::{
    Access, Kernel,
    cuda::{
        kernels::THREADS,
        launch::{Call, Value, address},
    },
    ops::{AdamWSpec, SquaredNorm},
};

pub(super) fn call(kernel: &Kernel, accesses: &[Access]) -> Call {
    let at = |index: usize| &accesses[index].view;
    let mat = |index: usize| Value::matrix(at(index));
    match kernel {
        Kernel::AdamW(spec) => adamw(spec, accesses),
        Kernel::AdvanceAdam(spec) => {
            let betas = [spec.beta1, spec.beta2, 0.0, 0.0].map(f64::to_bits);
            let skip = if spec.skip { address(at(2)) } else { 0 };
            let values = vec![mat(0), mat(1), Value::words([skip]), Value::words(betas)];
            Call::blocks("advance_adam", 1, values)
        }
        Kernel::Sum(spec) => Call::blocks("sum", 1, vec![mat(0), mat(1), factor(spec.by, accesses)]),
        Kernel::SquaredNorm(_) => {
            let piece = SquaredNorm::cut(at(0).numel()).range(0).len() as u64;
            let values = vec![mat(0), mat(1), Value::words([piece])];
            Call::blocks("squared_norm", at(1).numel(), values)
        }
        Kernel::ClipFactor(spec) => {
            let mut values: Vec<Value> = (0..4).map(mat).collect();
            values.push(Value::words([spec.limit.to_bits().into()]));
            Call::blocks("clip_factor", 1, values)
        }
        other => unreachable!("BUG: {other:?} has other steps"),
    }
}

fn adamw(spec: &AdamWSpec, accesses: &[Access]) -> Call {
    let at = |index: usize| &accesses[index].view;
    let mut values: Vec<Value> = (0..5).map(|index| Value::matrix(at(index))).collect();
    values.push(if spec.copy { Value::matrix(at(5)) } else { Value::no_matrix() });
    values.push(Value::words([spec.copy.into()]));
    values.push(Value::words([if spec.skip { address(at(5 + usize::from(spec.copy))) } else { 0 }]));
    values.push(Value::words([spec.beta1, spec.beta2, spec.eps, spec.weight_decay].map(f64::to_bits)));
    // Runs of elements a thread: each thread works out the factors of the step first.
    Call::blocks("adamw", at(0).numel().div_ceil(8 * THREADS as usize), values)
}
