//! Layer norm and RMS norm: each row is read from memory once and stays in cache for its passes.

use std::ops::Range;

use super::{lanes::Lanes, lines, math, reduce::column_sums, wide::wide};
use crate::{
    Args, OpError, Rows, RowsMut,
    ops::{
        LayerNormBackwardSpec, LayerNormGradSpec, LayerNormSpec, RmsNormBackwardSpec, RmsNormGradSpec, RmsNormSpec,
        Skip,
    },
};

pub(super) fn layer_norm(spec: &LayerNormSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let x = args.rows(0)?;
    let (weight, bias) = (args.read(1)?, args.read(2)?);
    let (y, mean, rstd) = (args.rows_mut(3)?, args.write(4)?, args.write(5)?);
    let residual = if spec.residual { Some((args.rows(6)?, args.rows_mut(7)?)) } else { None };
    layer_norm_rows(x, residual, weight, bias, y, mean, rstd, spec.eps);
    Ok(())
}

/// A second summand and where the sum goes.
type Residual<'a> = Option<(Rows<'a, f32>, RowsMut<'a, f32>)>;

/// Row `i` of what is normalised; writes the sum where there is a residual.
#[inline(always)]
fn summed<'a>(x: &'a Rows<'_, f32>, residual: &'a mut Residual<'_>, i: usize) -> &'a [f32] {
    let Some((r, sum)) = residual else { return x.row(i) };
    let sum = sum.row_mut(i);
    for ((sum, &x), &r) in sum.iter_mut().zip(x.row(i)).zip(r.row(i)) {
        *sum = x + r;
    }
    sum
}

/// Row `i` of what is normalised, once the sum is written.
#[inline(always)]
fn input<'a>(x: &'a Rows<'_, f32>, residual: &'a Residual<'_>, i: usize) -> &'a [f32] {
    residual.as_ref().map_or(x.row(i), |(_, sum)| sum.row(i))
}

/// In one pass, by sums over distances from the mean of the first few elements. Those are part of the row, so that
/// their mean cannot be far away against the variance: cancellation costs nothing on ordinary rows, and a factor of
/// `x.len() / PIVOT` on the worst ones.
#[inline(always)]
fn mean_and_variance<V: Lanes>(x: &[f32]) -> (f32, f32) {
    const PIVOT: usize = 32;
    let first = &x[..PIVOT.min(x.len())];
    let pivot = math::sum::<V>(first) / first.len() as f32;
    let shift = V::splat(pivot);
    let [sum, squares] = math::sums::<V, _, 1, 2>([x], |[x]| [x - shift, (x - shift) * (x - shift)]);
    let count = 1.0 / x.len() as f32;
    let distance = sum * count;
    let variance = distance.mul_add(-distance, squares * count);
    // Rounding may leave it below zero. Written so that a NaN stays.
    (pivot + distance, if variance < 0.0 { 0.0 } else { variance })
}

/// Rows that go through each pass together: sums end in a chain of waits, and rows do not wait for each other.
const GROUP: usize = 4;

wide! {
    fn layer_norm_rows(
        x: Rows<'_, f32>,
        residual: Residual<'_>,
        weight: &[f32],
        bias: &[f32],
        y: RowsMut<'_, f32>,
        mean: &mut [f32],
        rstd: &mut [f32],
        eps: f32,
    ) {
        let (mut y, mut residual) = (y, residual);
        for from in (0..x.len()).step_by(GROUP) {
            let group = from..(from + GROUP).min(x.len());
            for i in group.clone() {
                let (m, variance) = mean_and_variance::<V>(summed(&x, &mut residual, i));
                (mean[i], rstd[i]) = (m, 1.0 / (variance + eps).sqrt());
            }
            for i in group {
                let (m, r) = (mean[i], rstd[i]);
                let inputs = input(&x, &residual, i).iter().zip(weight).zip(bias);
                for (y, ((&x, &w), &b)) in y.row_mut(i).iter_mut().zip(inputs) {
                    *y = ((x - m) * r).mul_add(w, b);
                }
            }
        }
    }
}

pub(super) fn layer_norm_backward(spec: &LayerNormBackwardSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (dy, x, weight) = (args.rows(0)?, args.rows(1)?, args.read(2)?);
    let (mean, rstd, dx) = (args.read(3)?, args.read(4)?, args.rows_mut(5)?);
    let skip = if spec.skip == Skip::Apart { Some(args.rows(6)?) } else { None };
    layer_norm_backward_rows(dy, x, weight, mean, rstd, dx, spec.skip, skip);
    let Some(stretch) = spec.stretch else { return Ok(()) };
    let at = spec.skip.behind(5);
    let (mut dweight, mut dbias) = (args.rows_mut(at)?, args.rows_mut(at + 1)?);
    for (s, rows) in stretches(dy.len(), stretch) {
        let [dy, x] = [dy, x].map(|all| all.block(rows.clone(), 0..all.cols()));
        let (mean, rstd) = (&mean[rows.clone()], &rstd[rows]);
        layer_norm_grad_cols(dy, x, mean, rstd, dweight.row_mut(s), dbias.row_mut(s), None);
    }
    Ok(())
}

/// The rows of each stretch of `stretch` rows.
fn stretches(rows: usize, stretch: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    (0..rows).step_by(stretch).map(move |from| from..rows.min(from + stretch)).enumerate()
}

/// dx = value of (dy, x, weight), plus what is skipped past the norm.
#[inline(always)]
fn store_dx(
    dx: &mut [f32],
    skip: Skip,
    apart: Option<&[f32]>,
    inputs: [&[f32]; 3],
    value: impl Fn(f32, f32, f32) -> f32,
) {
    let [dy, x, weight] = inputs;
    let inputs = dy.iter().zip(x).zip(weight);
    match (skip, apart) {
        (Skip::InPlace, _) => dx.iter_mut().zip(inputs).for_each(|(dx, ((&dy, &x), &w))| *dx += value(dy, x, w)),
        (_, Some(skip)) => {
            dx.iter_mut().zip(inputs).zip(skip).for_each(|((dx, ((&dy, &x), &w)), &s)| *dx = s + value(dy, x, w));
        }
        _ => dx.iter_mut().zip(inputs).for_each(|(dx, ((&dy, &x), &w))| *dx = value(dy, x, w)),
    }
}

wide! {
    fn layer_norm_backward_rows(
        dy: Rows<'_, f32>,
        x: Rows<'_, f32>,
        weight: &[f32],
        mean: &[f32],
        rstd: &[f32],
        dx: RowsMut<'_, f32>,
        skip: Skip,
        apart: Option<Rows<'_, f32>>,
    ) {
        let mut dx = dx;
        let count = 1.0 / x.cols() as f32;
        for i in 0..x.len() {
            let (dy, x, m, r) = (dy.row(i), x.row(i), mean[i], rstd[i]);
            let (mean, scale) = (V::splat(m), V::splat(r));
            let terms = |[dy, x, w]: [V; 3]| [dy * w, dy * w * ((x - mean) * scale)];
            let [shift, slope] = math::sums([dy, x, weight], terms);
            let (shift, slope) = (shift * count, slope * count);
            store_dx(dx.row_mut(i), skip, apart.as_ref().map(|s| s.row(i)), [dy, x, weight], |dy, x, w| {
                r * (dy.mul_add(w, -shift) - (x - m) * r * slope)
            });
        }
    }
}

pub(super) fn layer_norm_grad(spec: &LayerNormGradSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (dy, x, mean, rstd) = (args.rows(0)?, args.rows(1)?, args.read(2)?, args.read(3)?);
    let (dweight, dbias) = (args.write(4)?, args.write(5)?);
    let keep = lines::keep(spec.old, args, 6)?;
    layer_norm_grad_cols(dy, x, mean, rstd, dweight, dbias, keep);
    Ok(())
}

wide! {
    fn layer_norm_grad_cols(
        dy: Rows<'_, f32>,
        x: Rows<'_, f32>,
        mean: &[f32],
        rstd: &[f32],
        dweight: &mut [f32],
        dbias: &mut [f32],
        keep: Option<f32>,
    ) {
        let term = |i: usize, [dy, x]: [V; 2]| [dy * ((x - V::splat(mean[i])) * V::splat(rstd[i])), dy];
        column_sums::<V, 2, 2>([&dy, &x], term, |j, [w, b]| {
            lines::store(&mut dweight[j], keep, w);
            lines::store(&mut dbias[j], keep, b);
        });
    }
}

pub(super) fn rms_norm(spec: &RmsNormSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (x, weight) = (args.rows(0)?, args.read(1)?);
    let (y, rstd) = (args.rows_mut(2)?, args.write(3)?);
    let residual = if spec.residual { Some((args.rows(4)?, args.rows_mut(5)?)) } else { None };
    rms_norm_rows(x, residual, weight, y, rstd, spec.eps);
    Ok(())
}

wide! {
    fn rms_norm_rows(
        x: Rows<'_, f32>,
        residual: Residual<'_>,
        weight: &[f32],
        y: RowsMut<'_, f32>,
        rstd: &mut [f32],
        eps: f32,
    ) {
        let (mut y, mut residual) = (y, residual);
        let count = 1.0 / x.cols() as f32;
        for from in (0..x.len()).step_by(GROUP) {
            let group = from..(from + GROUP).min(x.len());
            for i in group.clone() {
                let [squares] = math::sums::<V, _, 1, 1>([summed(&x, &mut residual, i)], |[x]| [x * x]);
                rstd[i] = 1.0 / squares.mul_add(count, eps).sqrt();
            }
            for i in group {
                let r = rstd[i];
                for ((y, &x), &w) in y.row_mut(i).iter_mut().zip(input(&x, &residual, i)).zip(weight) {
                    *y = x * r * w;
                }
            }
        }
    }
}

pub(super) fn rms_norm_backward(spec: &RmsNormBackwardSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (dy, x, weight) = (args.rows(0)?, args.rows(1)?, args.read(2)?);
    let (rstd, dx) = (args.read(3)?, args.rows_mut(4)?);
    let skip = if spec.skip == Skip::Apart { Some(args.rows(5)?) } else { None };
    rms_norm_backward_rows(dy, x, weight, rstd, dx, spec.skip, skip);
    let Some(stretch) = spec.stretch else { return Ok(()) };
    let mut sums = args.rows_mut(spec.skip.behind(4))?;
    for (s, rows) in stretches(dy.len(), stretch) {
        let [dy, x] = [dy, x].map(|all| all.block(rows.clone(), 0..all.cols()));
        rms_norm_grad_cols(dy, x, &rstd[rows], sums.row_mut(s), None);
    }
    Ok(())
}

wide! {
    fn rms_norm_backward_rows(
        dy: Rows<'_, f32>,
        x: Rows<'_, f32>,
        weight: &[f32],
        rstd: &[f32],
        dx: RowsMut<'_, f32>,
        skip: Skip,
        apart: Option<Rows<'_, f32>>,
    ) {
        let mut dx = dx;
        let count = 1.0 / x.cols() as f32;
        for i in 0..x.len() {
            let (dy, x, r) = (dy.row(i), x.row(i), rstd[i]);
            let scale = V::splat(r);
            let [slope] = math::sums([dy, x, weight], |[dy, x, w]: [V; 3]| [dy * w * (x * scale)]);
            let slope = slope * count;
            store_dx(dx.row_mut(i), skip, apart.as_ref().map(|s| s.row(i)), [dy, x, weight], |dy, x, w| {
                r * dy.mul_add(w, -(x * r * slope))
            });
        }
    }
}

pub(super) fn rms_norm_grad(spec: &RmsNormGradSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (dy, x, rstd) = (args.rows(0)?, args.rows(1)?, args.read(2)?);
    let dweight = args.write(3)?;
    let keep = lines::keep(spec.old, args, 4)?;
    rms_norm_grad_cols(dy, x, rstd, dweight, keep);
    Ok(())
}

wide! {
    fn rms_norm_grad_cols(
        dy: Rows<'_, f32>,
        x: Rows<'_, f32>,
        rstd: &[f32],
        dweight: &mut [f32],
        keep: Option<f32>,
    ) {
        let term = |i: usize, [dy, x]: [V; 2]| [dy * (x * V::splat(rstd[i]))];
        column_sums::<V, 2, 1>([&dy, &x], term, |j, [w]| lines::store(&mut dweight[j], keep, w));
    }
}

#[cfg(test)]
mod tests;
