//! Kernels in f32 over bf16 arguments.

use std::ptr::NonNull;

use super::{elementwise::convert, lines};
use crate::{
    Args, DType, Mode, OpError, Rows, RowsMut, bf16,
    cpu::{ArgError, Staged},
};

/// Runs `compute` with f32 copies in place of all bf16 arguments, then rounds what it has written there, each element
/// once.
pub(super) fn run(
    args: &mut Args<'_>,
    compute: impl FnOnce(&mut Args<'_>) -> Result<(), OpError>,
) -> Result<(), OpError> {
    let mut narrow = false;
    for index in 0..args.len() {
        narrow |= args.dtype(index)? == DType::Bf16;
    }
    if narrow { run_narrow(args, compute) } else { compute(args) }
}

fn run_narrow(args: &mut Args<'_>, compute: impl FnOnce(&mut Args<'_>) -> Result<(), OpError>) -> Result<(), OpError> {
    let mut outputs = Vec::new();
    let mut copies = Vec::new();
    for index in 0..args.len() {
        copies.push(copy(args, index, &mut outputs)?);
    }
    let staged = |copy: &mut Option<Vec<f32>>| copy.as_mut().map(|x| Staged(NonNull::from(&mut x[..]).cast()));
    let widened: Vec<Option<Staged>> = copies.iter_mut().map(staged).collect();
    // SAFETY: there is a copy for each bf16 argument, of its size, and nobody else knows it. What was taken from `args`
    // are bf16 arguments, which the copies stand for.
    compute(&mut unsafe { args.widened(&widened) })?;
    for (index, output) in outputs {
        let wide = copies[index].as_deref().expect("BUG: outputs have copies");
        let (rows, cols) = (output.len(), output.cols());
        lines::two(output, Rows::of(wide, rows, cols), convert::<bf16, f32>);
    }
    Ok(())
}

/// The f32 copy of argument `index`, if it is bf16; also takes it if it is an output.
fn copy<'a>(
    args: &mut Args<'a>,
    index: usize,
    outputs: &mut Vec<(usize, RowsMut<'a, bf16>)>,
) -> Result<Option<Vec<f32>>, ArgError> {
    if args.dtype(index)? != DType::Bf16 {
        return Ok(None);
    }
    let mode = args.mode(index)?;
    if mode == Mode::Read {
        return Ok(Some(widen(args.rows(index)?)));
    }
    let output = args.rows_mut(index)?;
    let copy = match mode {
        Mode::Update => widen(output.as_rows()),
        // NaN shows what a kernel has left out.
        _ => vec![f32::NAN; output.len() * output.cols()],
    };
    outputs.push((index, output));
    Ok(Some(copy))
}

fn widen(rows: Rows<'_, bf16>) -> Vec<f32> {
    let mut copy = vec![0.0; rows.len() * rows.cols()];
    lines::two(RowsMut::of(&mut copy, rows.len(), rows.cols()), rows, convert::<f32, bf16>);
    copy
}

#[cfg(test)]
mod tests;
