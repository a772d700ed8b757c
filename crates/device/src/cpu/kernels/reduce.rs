//! Sums in a fixed order.

use super::{
    lines,
    math::{self, Real},
    wide::wide,
};
use crate::{
    Args, DType, OpError, Rows, bf16,
    ops::{BiasGradSpec, ClipFactorSpec, SquaredNorm, SumSpec},
};

/// Columns that are summed at once.
pub(super) const STRIP: usize = 32;

/// Rows whose sum is finished before it joins the total: rounding errors grow with the square root of the longer of
/// the two chains instead of the number of rows.
const BLOCK: usize = 64;

/// Sums each column over all rows. `add(row, column, width, sums)` adds `width` columns of one row to `N` sums each.
#[inline(always)]
pub(super) fn column_sums<const N: usize>(
    rows: usize,
    cols: usize,
    add: impl Fn(usize, usize, usize, &mut [[f32; STRIP]; N]),
    mut done: impl FnMut(usize, [f32; N]),
) {
    for at in (0..cols).step_by(STRIP) {
        let width = STRIP.min(cols - at);
        let mut totals = [[0.0; STRIP]; N];
        for from in (0..rows).step_by(BLOCK) {
            let mut sums = [[0.0; STRIP]; N];
            let block = from..(from + BLOCK).min(rows);
            // Two loops, so that the compiler knows the width of the usual one.
            if width == STRIP {
                block.for_each(|i| add(i, at, STRIP, &mut sums));
            } else {
                block.for_each(|i| add(i, at, width, &mut sums));
            }
            for (total, sum) in totals.iter_mut().zip(&sums) {
                for (total, sum) in total.iter_mut().zip(sum) {
                    *total += sum;
                }
            }
        }
        (0..width).for_each(|l| done(at + l, totals.map(|total| total[l])));
    }
}

pub(super) fn bias_grad(spec: &BiasGradSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (dy, dbias) = (args.rows(0)?, args.write(1)?);
    let keep = lines::keep(spec.old, args, 2)?;
    bias_grad_cols(dy, dbias, keep);
    Ok(())
}

wide! {
    fn bias_grad_cols(dy: Rows<'_, f32>, dbias: &mut [f32], keep: Option<f32>) {
        let add = |i: usize, at: usize, width: usize, [b]: &mut [[f32; STRIP]; 1]| {
            let dy = &dy.row(i)[at..at + width];
            for l in 0..width {
                b[l] += dy[l];
            }
        };
        column_sums(dy.len(), dy.cols(), add, |j, [b]| lines::store(&mut dbias[j], keep, b));
    }
}

/// Elements summed in f32 before they join a total in f64.
const RUN: usize = 2048;

pub(super) fn sum(spec: &SumSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let x = args.rows::<f32>(0)?.flat();
    let factor = f64::from(lines::factor(spec.by, args, 2)?);
    // Few elements and a total that is compared across layouts: f64 from the start.
    let total: f64 = (0..x.len()).flat_map(|i| x.row(i)).map(|&x| f64::from(x)).sum();
    args.write(1)?[0] = (factor * total) as f32;
    Ok(())
}

pub(super) fn squared_norm(args: &mut Args<'_>) -> Result<(), OpError> {
    match args.dtype(0)? {
        DType::Bf16 => squared_norm_as::<bf16>(args),
        _ => squared_norm_as::<f32>(args),
    }
}

fn squared_norm_as<T: Real>(args: &mut Args<'_>) -> Result<(), OpError> {
    let (x, partials) = (args.read::<T>(0)?, args.write::<f32>(1)?);
    let cut = SquaredNorm::cut(x.len());
    for (i, partial) in partials.iter_mut().enumerate() {
        *partial = squares(&x[cut.range(i)]) as f32;
    }
    Ok(())
}

wide! {
    fn squares[T: Real](x: &[T]) -> f64 {
        let mut total = 0.0;
        for run in x.chunks(RUN) {
            total += f64::from(math::sums2(run.len(), |j| (run[j].load() * run[j].load(), 0.0)).0);
        }
        total
    }
}

pub(super) fn clip_factor(spec: &ClipFactorSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let norm = f64::from(args.read::<f32>(0)?[0]).sqrt();
    let finite = norm.is_finite();
    let limit = f64::from(spec.limit);
    args.write::<f32>(1)?[0] = norm as f32;
    args.write::<f32>(2)?[0] = match limit {
        _ if !finite => 0.0,
        0.0 => 1.0,
        _ => (limit / (norm + 1e-6)).min(1.0) as f32,
    };
    args.write::<i32>(3)?[0] = i32::from(!finite);
    Ok(())
}

#[cfg(test)]
mod tests;
