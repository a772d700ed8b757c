//! GELU and SwiGLU.

use super::{
    lines,
    math::{self, sigmoid},
    wide::wide,
};
use crate::{
    Args, OpError, Rows, RowsMut,
    ops::{GeluBackwardSpec, GeluSpec, Place},
};

pub(super) fn gelu(spec: &GeluSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let y = args.rows_mut(0)?;
    match spec.place {
        Place::InPlace => lines::one(y, gelu_in_place),
        Place::Apart => lines::two(y, args.rows(1)?, gelu_apart),
    }
    Ok(())
}

wide! {
    fn gelu_in_place(y: &mut [f32]) {
        for y in y {
            *y = math::gelu(*y);
        }
    }
}

wide! {
    fn gelu_apart(y: &mut [f32], x: &[f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = math::gelu(x);
        }
    }
}

pub(super) fn gelu_backward(spec: &GeluBackwardSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (dx, x) = (args.rows_mut(0)?, args.rows(1)?);
    match spec.place {
        Place::InPlace => lines::two(dx, x, times_gelu_slope),
        Place::Apart => lines::three(dx, x, args.rows(2)?, gelu_backward_apart),
    }
    Ok(())
}

wide! {
    /// d ·= GELU'(x), also the end of a product's backward epilogue.
    pub(super) fn times_gelu_slope(d: &mut [f32], x: &[f32]) {
        for (d, &x) in d.iter_mut().zip(x) {
            *d *= math::gelu_slope(x);
        }
    }
}

wide! {
    fn gelu_backward_apart(dx: &mut [f32], x: &[f32], dy: &[f32]) {
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            *dx = dy * math::gelu_slope(x);
        }
    }
}

pub(super) fn swiglu(args: &mut Args<'_>) -> Result<(), OpError> {
    lines::three(args.rows_mut(0)?, args.rows(1)?, args.rows(2)?, swiglu_rows);
    Ok(())
}

wide! {
    fn swiglu_rows(y: &mut [f32], gate: &[f32], up: &[f32]) {
        for ((y, &g), &u) in y.iter_mut().zip(gate).zip(up) {
            *y = g * sigmoid(g).0 * u;
        }
    }
}

pub(super) fn swiglu_backward(args: &mut Args<'_>) -> Result<(), OpError> {
    let (dgate, dup) = (args.rows_mut(0)?, args.rows_mut(1)?);
    swiglu_backward_rows(dgate, dup, args.rows(2)?, args.rows(3)?, args.rows(4)?);
    Ok(())
}

wide! {
    fn swiglu_backward_rows(
        dgate: RowsMut<'_, f32>,
        dup: RowsMut<'_, f32>,
        gate: Rows<'_, f32>,
        up: Rows<'_, f32>,
        dy: Rows<'_, f32>,
    ) {
        let (mut dgate, mut dup) = (dgate, dup);
        for i in 0..gate.len() {
            let outs = dgate.row_mut(i).iter_mut().zip(dup.row_mut(i));
            let ins = gate.row(i).iter().zip(up.row(i)).zip(dy.row(i));
            for ((dgate, dup), ((&g, &u), &dy)) in outs.zip(ins) {
                let (s, slope) = sigmoid(g);
                *dup = dy * g * s;
                *dgate = dy * u * g.mul_add(slope, s);
            }
        }
    }
}

#[cfg(test)]
mod tests;
