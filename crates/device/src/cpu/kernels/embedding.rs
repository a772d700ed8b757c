//! Rows of a table, and their gradient.

use super::{lines, math::Real, wide::wide};
use crate::{
    Args, DType, OpError, Rows, RowsMut, bf16,
    ops::{EmbeddingGradSpec, EmbeddingSpec, PositionGradSpec, ValueError, Vocab},
};

/// Row of the table that holds an id; `None` where another shard holds it.
fn row_of(id: i32, position: usize, vocab: Vocab, rows: usize) -> Result<Option<usize>, ValueError> {
    let index = usize::try_from(id).ok().filter(|i| *i < vocab.size);
    let index = index.ok_or(ValueError::Id { id, position, vocab: vocab.size })?;
    Ok(index.checked_sub(vocab.start).filter(|row| *row < rows))
}

pub(super) fn embedding(spec: &EmbeddingSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    match args.dtype(1)? {
        DType::Bf16 => embedding_as::<bf16>(spec, args),
        _ => embedding_as::<f32>(spec, args),
    }
}

fn embedding_as<T: Real>(spec: &EmbeddingSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (ids, table, mut y) = (args.read::<i32>(0)?, args.rows::<T>(1)?, args.rows_mut::<T>(2)?);
    let positions = spec.seq_len.map(|len| args.rows::<T>(3).map(|p| (p, len))).transpose()?;
    for (i, &id) in ids.iter().enumerate() {
        let y = y.row_mut(i);
        let token = row_of(id, i, spec.vocab, table.len())?.map(|row| table.row(row));
        match (token, positions.map(|(p, len)| p.row(i % len))) {
            (Some(token), None) => y.copy_from_slice(token),
            (Some(token), Some(position)) => sum(y, token, position),
            (None, None) => y.fill(T::store(0.0)),
            (None, Some(position)) => y.copy_from_slice(position),
        }
    }
    Ok(())
}

/// Rows are short and memory is the limit: the base instruction set is enough, a dispatch for each would not be.
#[inline]
fn sum<T: Real>(y: &mut [T], a: &[T], b: &[T]) {
    for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
        *y = T::store(a.load() + b.load());
    }
}

pub(super) fn embedding_grad(spec: &EmbeddingGradSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (ids, dy, mut dtable) = (args.read::<i32>(0)?, args.rows::<f32>(1)?, args.rows_mut::<f32>(2)?);
    let keep = lines::keep(spec.old, args, 3)?;
    for i in 0..dtable.len() {
        keep_row(dtable.row_mut(i), keep);
    }
    for (i, &id) in ids.iter().enumerate() {
        if let Some(row) = row_of(id, i, spec.vocab, dtable.len())? {
            add(dtable.row_mut(row), dy.row(i));
        }
    }
    Ok(())
}

fn keep_row(row: &mut [f32], keep: Option<f32>) {
    match keep {
        None => row.fill(0.0),
        Some(1.0) => {}
        Some(keep) => row.iter_mut().for_each(|x| *x *= keep),
    }
}

#[inline]
fn add(y: &mut [f32], x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += x;
    }
}

pub(super) fn position_grad(spec: &PositionGradSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (dy, dtable) = (args.rows(0)?, args.rows_mut(1)?);
    let keep = lines::keep(spec.old, args, 2)?;
    position_grad_rows(dy, dtable, spec.seq_len, keep);
    Ok(())
}

wide! {
    fn position_grad_rows(dy: Rows<'_, f32>, dtable: RowsMut<'_, f32>, seq_len: usize, keep: Option<f32>) {
        let mut dtable = dtable;
        for t in 0..dtable.len() {
            let row = dtable.row_mut(t);
            keep_row(row, keep);
            if t < seq_len {
                for i in (t..dy.len()).step_by(seq_len) {
                    add(row, dy.row(i));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
