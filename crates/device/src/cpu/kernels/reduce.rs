//! Sums in a fixed order.

use super::{
    lanes::{Lanes, WIDTH},
    lines,
    math::{self, Real},
    wide::wide,
};
use crate::{
    Args, DType, OpError, Rows, bf16,
    ops::{BiasGradSpec, BiasGradsSpec, ClipFactorSpec, SquaredNorm, SumSpec},
};

/// Rows whose sum is finished before it joins the total: rounding errors grow with the square root of the longer of
/// the two chains instead of the number of rows.
const BLOCK: usize = 64;

/// Columns whose sums are kept at once: long runs of each row, sums that stay in the first-level cache.
const STRIP: usize = 1024;

/// Rows that are added before they join the sums, which then are read and written a quarter as often.
const QUAD: usize = 4;

/// Sums `N` terms of `M` matrices over all rows, for each column. `term` is given the number of the row.
#[inline(always)]
pub(super) fn column_sums<V: Lanes, const M: usize, const N: usize>(
    x: [&Rows<'_, f32>; M],
    term: impl Fn(usize, [V; M]) -> [V; N],
    mut done: impl FnMut(usize, [f32; N]),
) {
    let (rows, cols) = (x[0].len(), x[0].cols());
    for at in (0..cols).step_by(STRIP) {
        let width = STRIP.min(cols - at);
        let mut totals = [[0.0; STRIP]; N];
        for from in (0..rows).step_by(BLOCK) {
            let block = from..(from + BLOCK).min(rows);
            let mut sums = [[0.0; STRIP]; N];
            let quads = block.len() / QUAD * QUAD;
            for i in (block.start..block.start + quads).step_by(QUAD) {
                add_rows::<V, M, N, QUAD>(&x, i, at, width, &term, &mut sums);
            }
            for i in block.start + quads..block.end {
                add_rows::<V, M, N, 1>(&x, i, at, width, &term, &mut sums);
            }
            for n in 0..N {
                totals[n].iter_mut().zip(&sums[n]).for_each(|(total, sum)| *total += sum);
            }
        }
        for l in 0..width {
            let mut one = [0.0; N];
            for n in 0..N {
                one[n] = totals[n][l];
            }
            done(at + l, one);
        }
    }
}

/// Adds the terms of rows `i..i + R`, columns `at..at + width`.
#[inline(always)]
fn add_rows<V: Lanes, const M: usize, const N: usize, const R: usize>(
    x: &[&Rows<'_, f32>; M],
    i: usize,
    at: usize,
    width: usize,
    term: &impl Fn(usize, [V; M]) -> [V; N],
    sums: &mut [[f32; STRIP]; N],
) {
    let mut runs = [[&[][..]; M]; R];
    for r in 0..R {
        for m in 0..M {
            runs[r][m] = &x[m].row(i + r)[at..at + width];
        }
    }
    let whole = width / WIDTH * WIDTH;
    for l in (0..whole).step_by(WIDTH) {
        let mut terms = [[V::splat(0.0); N]; R];
        for r in 0..R {
            terms[r] = term(i + r, math::vectors(&runs[r], l));
        }
        for n in 0..N {
            let sum: &mut [f32; WIDTH] = sums[n][l..].first_chunk_mut().expect("BUG: inside the strip");
            *sum = (V::load(sum) + total(&terms, n)).to_array();
        }
    }
    if whole < width {
        let mut terms = [[V::splat(0.0); N]; R];
        for r in 0..R {
            terms[r] = term(i + r, math::padded(&runs[r], whole));
        }
        for n in 0..N {
            let more = total(&terms, n).to_array();
            sums[n][whole..width].iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        }
    }
}

/// Term `n` of all rows, pairwise.
#[inline(always)]
fn total<V: Lanes, const N: usize, const R: usize>(terms: &[[V; N]; R], n: usize) -> V {
    match R {
        QUAD => (terms[0][n] + terms[1][n]) + (terms[2][n] + terms[3][n]),
        _ => terms[0][n],
    }
}

pub(super) fn bias_grad(spec: &BiasGradSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (dy, dbias) = (args.rows(0)?, args.write(1)?);
    let keep = lines::keep(spec.old, args, 2)?;
    bias_grad_cols(dy, dbias, keep);
    Ok(())
}

pub(super) fn bias_grads(spec: &BiasGradsSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    for (which, (old, keep)) in spec.old.into_iter().zip(spec.keeps()).enumerate() {
        let (dy, dbias) = (args.rows(2 * which)?, args.write(2 * which + 1)?);
        let keep = lines::keep(old, args, keep)?;
        bias_grad_cols(dy, dbias, keep);
    }
    Ok(())
}

wide! {
    fn bias_grad_cols(dy: Rows<'_, f32>, dbias: &mut [f32], keep: Option<f32>) {
        let term = |_: usize, dy: [V; 1]| dy;
        column_sums::<V, 1, 1>([&dy], term, |j, [b]| lines::store(&mut dbias[j], keep, b));
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
            total += f64::from(math::sums([run], |[x]: [V; 1]| [x * x])[0]);
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
