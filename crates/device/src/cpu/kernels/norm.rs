//! Layer norm and RMS norm: each row is read from memory once and stays in cache for its passes.

use super::{
    lines, math,
    reduce::{STRIP, column_sums},
    wide::wide,
};
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
        let count = 1.0 / x.cols() as f32;
        for i in 0..x.len() {
            let row = summed(&x, &mut residual, i);
            let m = math::sum(row) * count;
            let r = 1.0 / math::sum_squares(row, m).mul_add(count, eps).sqrt();
            (mean[i], rstd[i]) = (m, r);
            for (((y, &x), &w), &b) in y.row_mut(i).iter_mut().zip(row).zip(weight).zip(bias) {
                *y = ((x - m) * r).mul_add(w, b);
            }
        }
    }
}

pub(super) fn layer_norm_backward(spec: &LayerNormBackwardSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (dy, x, weight) = (args.rows(0)?, args.rows(1)?, args.read(2)?);
    let (mean, rstd, dx) = (args.read(3)?, args.read(4)?, args.rows_mut(5)?);
    let skip = if spec.skip == Skip::Apart { Some(args.rows(6)?) } else { None };
    layer_norm_backward_rows(dy, x, weight, mean, rstd, dx, spec.skip, skip);
    Ok(())
}

/// dx = rstd·(g − shift − x̂·slope), plus what is skipped past the norm.
#[inline(always)]
fn store_dx(dx: &mut [f32], skip: Skip, apart: Option<&[f32]>, value: impl Fn(usize) -> f32) {
    match (skip, apart) {
        (Skip::InPlace, _) => dx.iter_mut().enumerate().for_each(|(j, dx)| *dx += value(j)),
        (_, Some(skip)) => dx.iter_mut().zip(skip).enumerate().for_each(|(j, (dx, s))| *dx = s + value(j)),
        _ => dx.iter_mut().enumerate().for_each(|(j, dx)| *dx = value(j)),
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
        let cols = x.cols();
        let count = 1.0 / cols as f32;
        let weight = &weight[..cols];
        for i in 0..x.len() {
            let (dy, x, m, r) = (&dy.row(i)[..cols], &x.row(i)[..cols], mean[i], rstd[i]);
            let (shift, slope) = math::sums2(cols, |j| {
                let g = dy[j] * weight[j];
                (g, g * ((x[j] - m) * r))
            });
            let (shift, slope) = (shift * count, slope * count);
            store_dx(&mut dx.row_mut(i)[..cols], skip, apart.as_ref().map(|s| &s.row(i)[..cols]), |j| {
                r * (dy[j].mul_add(weight[j], -shift) - (x[j] - m) * r * slope)
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
        let add = |i: usize, at: usize, width: usize, [w, b]: &mut [[f32; STRIP]; 2]| {
            let (m, r) = (mean[i], rstd[i]);
            let (dy, x) = (&dy.row(i)[at..at + width], &x.row(i)[at..at + width]);
            for l in 0..width {
                w[l] = dy[l].mul_add((x[l] - m) * r, w[l]);
                b[l] += dy[l];
            }
        };
        column_sums(x.len(), x.cols(), add, |j, [w, b]| {
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
        for i in 0..x.len() {
            let row = summed(&x, &mut residual, i);
            let r = 1.0 / math::sum_squares(row, 0.0).mul_add(count, eps).sqrt();
            rstd[i] = r;
            for ((y, &x), &w) in y.row_mut(i).iter_mut().zip(row).zip(weight) {
                *y = x * r * w;
            }
        }
    }
}

pub(super) fn rms_norm_backward(spec: &RmsNormBackwardSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (dy, x, weight) = (args.rows(0)?, args.rows(1)?, args.read(2)?);
    let (rstd, dx) = (args.read(3)?, args.rows_mut(4)?);
    let skip = if spec.skip == Skip::Apart { Some(args.rows(5)?) } else { None };
    rms_norm_backward_rows(dy, x, weight, rstd, dx, spec.skip, skip);
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
        let cols = x.cols();
        let count = 1.0 / cols as f32;
        let weight = &weight[..cols];
        for i in 0..x.len() {
            let (dy, x, r) = (&dy.row(i)[..cols], &x.row(i)[..cols], rstd[i]);
            let slope = math::sums2(cols, |j| (dy[j] * weight[j] * (x[j] * r), 0.0)).0 * count;
            store_dx(&mut dx.row_mut(i)[..cols], skip, apart.as_ref().map(|s| &s.row(i)[..cols]), |j| {
                r * dy[j].mul_add(weight[j], -(x[j] * r * slope))
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
        let add = |i: usize, at: usize, width: usize, [w]: &mut [[f32; STRIP]; 1]| {
            let r = rstd[i];
            let (dy, x) = (&dy.row(i)[at..at + width], &x.row(i)[at..at + width]);
            for l in 0..width {
                w[l] = dy[l].mul_add(x[l] * r, w[l]);
            }
        };
        column_sums(x.len(), x.cols(), add, |j, [w]| lines::store(&mut dweight[j], keep, w));
    }
}

#[cfg(test)]
mod tests;
