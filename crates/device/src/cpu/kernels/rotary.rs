//! Rotary position embedding.

use super::wide::wide;
use crate::{
    Args, OpError, Rows, RowsMut,
    ops::{Place, RotarySpec, RotaryTableSpec, Turning},
};

pub(super) fn table(spec: &RotaryTableSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let mut table = args.rows_mut::<f32>(0)?;
    let half = table.cols() / 2;
    for t in 0..table.len() {
        let (cos, sin) = table.row_mut(t).split_at_mut(half);
        for i in 0..half {
            let angle = t as f64 * spec.base.powf(-(i as f64) / half as f64);
            (cos[i], sin[i]) = (angle.cos() as f32, angle.sin() as f32);
        }
    }
    Ok(())
}

pub(super) fn rotary(spec: &RotarySpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (y, table) = (args.rows_mut(0)?, args.rows(1)?);
    let sign = match spec.turning {
        Turning::Forward => 1.0,
        Turning::Backward => -1.0,
    };
    match spec.place {
        Place::InPlace => turn_in_place(y, table, spec.seq_len, sign),
        Place::Apart => turn(y, args.rows(2)?, table, spec.seq_len, sign),
    }
    Ok(())
}

wide! {
    fn turn_in_place(y: RowsMut<'_, f32>, table: Rows<'_, f32>, seq_len: usize, sign: f32) {
        let mut y = y;
        let half = table.cols() / 2;
        for r in 0..y.len() {
            let (cos, sin) = table.row(r % seq_len).split_at(half);
            for head in y.row_mut(r).chunks_exact_mut(2 * half) {
                let (low, high) = head.split_at_mut(half);
                for (((low, high), &c), &s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                    (*low, *high) = turned(*low, *high, c, sign * s);
                }
            }
        }
    }
}

wide! {
    fn turn(y: RowsMut<'_, f32>, x: Rows<'_, f32>, table: Rows<'_, f32>, seq_len: usize, sign: f32) {
        let mut y = y;
        let half = table.cols() / 2;
        for r in 0..y.len() {
            let (cos, sin) = table.row(r % seq_len).split_at(half);
            for (y, x) in y.row_mut(r).chunks_exact_mut(2 * half).zip(x.row(r).chunks_exact(2 * half)) {
                let ((y_low, y_high), (low, high)) = (y.split_at_mut(half), x.split_at(half));
                let outs = y_low.iter_mut().zip(y_high);
                for (((y, (&low, &high)), &c), &s) in outs.zip(low.iter().zip(high)).zip(cos).zip(sin) {
                    (*y.0, *y.1) = turned(low, high, c, sign * s);
                }
            }
        }
    }
}

#[inline(always)]
fn turned(low: f32, high: f32, cos: f32, sin: f32) -> (f32, f32) {
    (low.mul_add(cos, -(high * sin)), high.mul_add(cos, low * sin))
}

#[cfg(test)]
mod tests;
