//! Sums over rows: gradients of norms' weights and of biases.

use super::{keep, keep_at};
use crate::{
    Access, DType, View,
    cuda::{
        blaslt::WORKSPACE,
        launch::{Call, Scratch, Value},
    },
    ops::{BiasGradSpec, BiasGradsSpec, LayerNormGradSpec, RmsNormGradSpec},
};

pub(super) fn layer_norm_grad(spec: &LayerNormGradSpec, accesses: &[Access]) -> Vec<Call> {
    let keep = keep(spec.old, accesses);
    two_passes("column_sums_centred", accesses, &[0, 1, 2, 3], [Some(4), Some(5)], keep)
}

pub(super) fn rms_norm_grad(spec: &RmsNormGradSpec, accesses: &[Access]) -> Vec<Call> {
    two_passes("column_sums_scaled", accesses, &[0, 1, 2], [Some(3), None], keep(spec.old, accesses))
}

/// Rows that a lane adds at once, as `columns.cu` has them.
const GROUP: usize = 8;
/// Rows up to which one launch is faster than two.
const FEW: usize = 512;

pub(super) fn bias_grad(spec: &BiasGradSpec, accesses: &[Access]) -> Vec<Call> {
    let (dy, keep) = (&accesses[0].view, keep(spec.old, accesses));
    let values = || vec![Value::matrix(dy), Value::matrix(&accesses[1].view), keep];
    if dy.row_count() <= GROUP {
        vec![Call::over("column_sums_of_group", dy.cols().div_ceil(RUN), values())]
    } else if dy.row_count() <= FEW {
        let second = [Value::no_matrix(), Value::no_matrix(), Value::words([0, 0])];
        vec![Call::blocks("column_sums_of_few", sectors(dy), values().into_iter().chain(second).collect())]
    } else {
        two_passes("column_sums", accesses, &[0], [Some(1), None], keep)
    }
}

pub(super) fn bias_grads(spec: &BiasGradsSpec, accesses: &[Access]) -> Vec<Call> {
    let dy = &accesses[0].view;
    let keeps = spec.keeps();
    let keep = |which: usize| keep_at(spec.old[which], accesses, keeps[which]);
    if dy.row_count() <= FEW {
        let mat = |at: usize| Value::matrix(&accesses[at].view);
        let values = vec![mat(0), mat(1), keep(0), mat(2), mat(3), keep(1)];
        return vec![Call::blocks("column_sums_of_few", 2 * sectors(dy), values)];
    }
    let each =
        |which: usize| two_passes("column_sums", accesses, &[2 * which], [Some(2 * which + 1), None], keep(which));
    [each(0), each(1)].into_iter().flatten().collect()
}

/// Blocks of `column_sums_of_few`, each with the columns of a sector.
fn sectors(dy: &View) -> usize {
    dy.cols().div_ceil(SECTOR / if dy.dtype() == DType::Bf16 { 2 } else { 4 })
}

/// Columns of a lane, and lanes of a warp.
const RUN: usize = 8;
const LANES: usize = 32;
/// Bytes of a row that a block of `column_sums_of_few` takes, and columns of one of `fold`, as `columns.cu` has them.
const SECTOR: usize = 32;
const FOLDED: usize = 8;
/// Columns that a block takes.
const TILE: usize = RUN * LANES;
/// Rows that the warps of a block take at once.
const GRAIN: usize = 8 * GROUP;
/// Blocks that keep a card busy.
const BLOCKS: usize = 2112;

/// `inputs`: accesses of dy and what goes with it; `outputs`: of the sum, and of the plain sum beside it.
fn two_passes(
    function: &'static str,
    accesses: &[Access],
    inputs: &[usize],
    outputs: [Option<usize>; 2],
    keep: Value,
) -> Vec<Call> {
    let mat = |at: usize| Value::matrix(&accesses[at].view);
    let dy = &accesses[inputs[0]].view;
    let (rows, cols) = (dy.row_count(), dy.cols());
    let (tiles, bytes) = (cols.div_ceil(TILE).max(1), 2 * cols.max(1) * size_of::<f64>());
    // By shape only, so that sums do not depend on the card.
    let most = (BLOCKS / tiles).min(WORKSPACE / bytes).max(1);
    let step = rows.div_ceil(most).next_multiple_of(GRAIN).max(GRAIN);
    let runs = rows.div_ceil(step).max(1);
    let [runs_word, step] = [runs, step].map(|size| Value::words([size as u64]));
    let mut values: Vec<Value> = inputs.iter().copied().chain(outputs.into_iter().flatten()).map(mat).collect();
    values.extend([keep, runs_word, step, Value::words([0])]);
    let scratch = |values: &[Value]| (runs > 1).then_some(Scratch { at: values.len() - 1, bytes: runs * bytes });
    let summed = Call { scratch: scratch(&values), ..Call::blocks(function, tiles * runs, values) };
    if runs == 1 {
        return vec![summed];
    }
    let [first, second] = outputs.map(|at| at.map_or_else(Value::no_matrix, mat));
    let values = vec![first, second, keep, runs_word, Value::words([0])];
    let sums = outputs.into_iter().flatten().count();
    vec![summed, Call { scratch: scratch(&values), ..Call::blocks("fold", sums * cols.div_ceil(FOLDED), values) }]
}
