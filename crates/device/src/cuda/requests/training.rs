//! Optimizer, and the sums behind the global norm.

use super::factor;
use crate::{
    Access, Kernel,
    cuda::{
        kernels::{MOST_RUNS, NORM_THREADS, THREADS},
        launch::{Call, Rare, Table, Value, address},
    },
    ops::{AdamRun, AdamWSpec, SquaredNorm},
};

pub(super) fn call(kernel: &Kernel, accesses: &[Access]) -> Call {
    let at = |index: usize| &accesses[index].view;
    let mat = |index: usize| Value::matrix(at(index));
    match kernel {
        Kernel::AdvanceAdam(spec) => {
            let betas = [spec.beta1, spec.beta2, 0.0].map(f64::to_bits);
            let skip = if spec.skip { address(at(2)) } else { 0 };
            let values = vec![mat(0), mat(1), Value::words([skip]), Value::words(betas)];
            Call::blocks("advance_adam", 1, values)
        }
        Kernel::Sum(spec) => Call::blocks("sum", 1, vec![mat(0), mat(1), factor(spec.by, accesses)]),
        Kernel::SquaredNorm(_) => {
            let piece = SquaredNorm::cut(at(0).numel()).range(0).len() as u64;
            let values = vec![mat(0), mat(1), Value::words([piece])];
            Call { threads: NORM_THREADS, ..Call::blocks("squared_norm", at(1).numel(), values) }
        }
        Kernel::ClipFactor(spec) => {
            let mut values: Vec<Value> = (0..4).map(mat).collect();
            values.push(Value::words([spec.limit.to_bits().into()]));
            Call::blocks("clip_factor", 1, values)
        }
        other => unreachable!("BUG: {other:?} has other steps"),
    }
}

/// Elements of a block of `adamw`, which goes on from there if there are more than blocks for them.
const STEPPED: usize = 8 * THREADS as usize;

/// One call for as many runs as a call takes.
pub(super) fn adamw(spec: &AdamWSpec, accesses: &[Access]) -> Vec<Call> {
    let mut from = 0;
    let mut part = |runs: &[AdamRun]| {
        let to = runs[runs.len() - 1].end;
        let mat = |index: usize| {
            let view = &accesses[index].view;
            // Several runs are of vectors; a single one may be of a matrix with gaps.
            let cut = (spec.runs.len() > 1).then(|| view.columns(from..to).expect("BUG: runs end inside the vector"));
            Value::matrix(cut.as_ref().unwrap_or(view))
        };
        let mut values: Vec<Value> = (0..4).map(mat).collect();
        values.push(Value::matrix(&accesses[4].view));
        values.push(if spec.rest { mat(5) } else { Value::no_matrix() });
        let skip = &accesses[accesses.len() - 1].view;
        values.push(Value::words([if spec.skip { address(skip) } else { 0 }]));
        values.push(Value::words([spec.beta1, spec.beta2, spec.eps].map(f64::to_bits)));
        let table = Table { at: values.len(), words: table(spec, runs, from) };
        values.push(Value::words([]));
        let blocks = (to - from).div_ceil(STEPPED);
        from = to;
        let rare = Rare { table: Some(table), ..Rare::default() };
        Call { rare: Some(Box::new(rare)), ..Call::blocks("adamw", blocks, values) }
    };
    spec.runs.chunks(MOST_RUNS).map(&mut part).collect()
}

/// `Runs`, of elements from `from` on.
fn table(spec: &AdamWSpec, runs: &[AdamRun], from: usize) -> Vec<u64> {
    let mut words = vec![0u64; 1 + 2 * MOST_RUNS];
    words[0] = runs.len() as u64;
    for (at, run) in runs.iter().enumerate() {
        words[1 + at] = (run.end - from) as u64 | (run.group as u64) << 48;
        words[1 + MOST_RUNS + at] = spec.decays[run.group].to_bits();
    }
    words
}
