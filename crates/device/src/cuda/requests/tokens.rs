//! What reads token ids.

use super::{factor, keep};
use crate::{
    Access, Kernel, View,
    cuda::{
        blaslt::WORKSPACE,
        kernels::LOSS_THREADS,
        launch::{Call, Scratch, Value, address},
    },
    ops::{EmbeddingGradSpec, Old, Place, Vocab},
};

pub(super) fn call(kernel: &Kernel, accesses: &[Access]) -> Call {
    let at = |index: usize| &accesses[index].view;
    let mat = |index: usize| Value::matrix(at(index));
    match kernel {
        Kernel::Embedding(spec) => {
            let positions = spec.seq_len.map_or(Value::no_matrix(), |_| mat(3));
            let mut values = vec![mat(0), mat(1), mat(2), positions];
            values.extend(vocab(spec.vocab));
            values.push(Value::words([spec.seq_len.unwrap_or(0) as u64]));
            Call::rows("embedding", at(2).row_count(), values)
        }
        Kernel::PositionGrad(spec) => {
            let values = vec![mat(0), mat(1), Value::words([spec.seq_len as u64]), keep(spec.old, accesses)];
            Call::over("position_grad", at(1).row_count() * at(1).cols().div_ceil(RUN), values)
        }
        Kernel::CrossEntropy(spec) => {
            let logits = at(if spec.place == Place::InPlace { 0 } else { 3 });
            let values = vec![mat(0), mat(1), mat(2), Value::matrix(logits), factor(spec.scale, accesses)];
            cross_entropy([at(0), logits], values)
        }
        Kernel::VocabPartials(spec) => {
            let values = (0..5).map(mat).chain(vocab(spec.vocab)).collect();
            Call::blocks("vocab_partials", at(0).row_count(), values)
        }
        Kernel::VocabRescale(_) => Call::over("vocab_rescale", at(0).numel(), (0..3).map(mat).collect()),
        Kernel::VocabFinish(spec) => {
            let logits = mat(if spec.place == Place::InPlace { 0 } else { 6 });
            let mut values: Vec<Value> = (0..6).map(mat).chain([logits]).chain(vocab(spec.vocab)).collect();
            values.push(factor(spec.scale, accesses));
            Call::blocks("vocab_finish", at(0).row_count(), values)
        }
        other => unreachable!("BUG: {other:?} has other steps"),
    }
}

/// Bytes of a row that shared memory holds: any card has as much for a block, and one with twice as much for two.
const HELD: usize = (99 << 10) - 256;

/// Each row is read once where shared memory holds it, else twice.
fn cross_entropy(matrices: [&View; 2], values: Vec<Value>) -> Call {
    let [d, logits] = matrices;
    let (rows, held) = (d.row_count(), d.cols().next_multiple_of(8) * d.dtype().size_bytes());
    let is_wide = |view: &View| view.pitch().is_multiple_of(8) && address(view).is_multiple_of(16);
    let call = match held <= HELD && is_wide(d) && is_wide(logits) {
        true => Call { shared: held as u32, ..Call::blocks("cross_entropy", rows, values) },
        false => Call::blocks("cross_entropy_twice", rows, values),
    };
    Call { threads: LOSS_THREADS, ..call }
}

fn vocab(vocab: Vocab) -> [Value; 2] {
    [vocab.size, vocab.start].map(|size| Value::words([size as u64]))
}

/// Columns of a lane, and of a warp; ids of a block that sorts. As `tokens.cu` has them.
const RUN: usize = 8;
const TILE: usize = 32 * RUN;
const BUCKET: usize = 256;
/// A count in front, then for each row where it is and whose it is.
const SORTED: usize = 8;
/// Rows that are sorted together: as many as the workspace takes.
const MOST: usize = WORKSPACE / SORTED - 1;

/// First what the table keeps, unless that is all of it; then the rows, sorted by their ids and added.
pub(super) fn embedding_grad(spec: &EmbeddingGradSpec, accesses: &[Access]) -> Vec<Call> {
    let mat = |index: usize| Value::matrix(&accesses[index].view);
    let (rows, dy, table) = (accesses[1].view.row_count(), &accesses[1].view, &accesses[2].view);
    let mut calls = Vec::new();
    if spec.old != Old::Add {
        let values = vec![mat(2), keep(spec.old, accesses)];
        calls.push(Call::over("embedding_keep", table.numel().div_ceil(RUN), values));
    }
    for from in (0..rows).step_by(MOST) {
        let to = rows.min(from + MOST);
        let bytes = SORTED * (1 + to - from);
        let [first, end] = [from, to].map(|row| Value::words([row as u64]));
        let mut values = vec![mat(0), mat(2)];
        values.extend(vocab(spec.vocab));
        values.extend([first, end, Value::words([0])]);
        let sort = Call::blocks("embedding_sort", table.row_count().div_ceil(BUCKET), values);
        calls.push(Call { scratch: Some(Scratch { at: 6, bytes }), ..sort });
        let values = vec![mat(1), mat(2), first, Value::words([0])];
        let add = Call::rows("embedding_add", (to - from) * dy.cols().div_ceil(TILE), values);
        calls.push(Call { scratch: Some(Scratch { at: 3, bytes }), ..add });
    }
    calls
}
