//! Sums over rows: gradients of norms' weights and of biases.

use super::keep;
use crate::{
    Access, View,
    cuda::{
        blaslt::WORKSPACE,
        launch::{Call, Scratch, Value},
    },
    ops::{BiasGradSpec, LayerNormGradSpec, RmsNormGradSpec},
};

/// What is summed, as `columns.cu` numbers it.
#[derive(Clone, Copy)]
enum Term {
    Plain = 0,
    Centred = 1,
    Scaled = 2,
}

pub(super) fn layer_norm_grad(spec: &LayerNormGradSpec, accesses: &[Access]) -> Vec<Call> {
    sums(accesses, [0, 1, 2, 3].map(Some), [4, 5].map(Some), Term::Centred, keep(spec.old, accesses))
}

pub(super) fn rms_norm_grad(spec: &RmsNormGradSpec, accesses: &[Access]) -> Vec<Call> {
    sums(accesses, [Some(0), Some(1), None, Some(2)], [Some(3), None], Term::Scaled, keep(spec.old, accesses))
}

pub(super) fn bias_grad(spec: &BiasGradSpec, accesses: &[Access]) -> Vec<Call> {
    sums(accesses, [Some(0), None, None, None], [Some(1), None], Term::Plain, keep(spec.old, accesses))
}

/// Columns that a block takes.
const TILE: usize = 256;
/// Blocks that keep a card busy.
const BLOCKS: usize = 1024;
/// Rows that are worth a block.
const ROWS: usize = 64;

/// `inputs`: accesses of dy, x, mean and rstd; `outputs`: of the sum and of the plain sum beside it.
fn sums(
    accesses: &[Access],
    inputs: [Option<usize>; 4],
    outputs: [Option<usize>; 2],
    term: Term,
    keep: Value,
) -> Vec<Call> {
    let view = |at: Option<usize>| at.map(|at| &accesses[at].view);
    let mat = |at: Option<usize>| view(at).map_or_else(Value::no_matrix, Value::matrix);
    let dy: &View = view(inputs[0]).expect("BUG: a gradient without dy");
    let (rows, cols) = (dy.row_count(), dy.cols());
    let (tiles, bytes) = (cols.div_ceil(TILE).max(1), 2 * cols.max(1) * size_of::<f64>());
    // By shape only, so that sums do not depend on the card.
    let runs = (BLOCKS / tiles).min(rows / ROWS).min(WORKSPACE / bytes).max(1);
    let mut values: Vec<Value> = inputs.into_iter().chain(outputs).map(mat).collect();
    let runs_word = Value::words([runs as u64]);
    values.extend([Value::words([term as u64]), keep, runs_word, Value::words([0])]);
    let mut summed = Call::blocks("column_sums", tiles * runs, values);
    if runs == 1 {
        return vec![summed];
    }
    let scratch = |at: usize| Some(Scratch { at, bytes: runs * bytes });
    summed.scratch = scratch(9);
    let values = vec![mat(outputs[0]), mat(outputs[1]), keep, runs_word, Value::words([0])];
    let mut folded = Call::rows("fold", 2 * cols, values);
    folded.scratch = scratch(4);
    vec![summed, folded]
}
