//! Rotary position embedding.

use std::ops::Range;

use super::{
    lanes::{Lanes, WIDTH},
    wide::wide,
};
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
            let angles = table.row(r % seq_len).split_at(half);
            for head in y.row_mut(r).chunks_exact_mut(2 * half) {
                let (low, high) = head.split_at_mut(half);
                for at in (0..half).step_by(WIDTH) {
                    let part = at..(at + WIDTH).min(half);
                    let (l, h) = (&mut low[part.clone()], &mut high[part.clone()]);
                    let (a, b) = turned::<V>(l, h, angles, part, sign);
                    a.store_first(l);
                    b.store_first(h);
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
            let angles = table.row(r % seq_len).split_at(half);
            for (y, x) in y.row_mut(r).chunks_exact_mut(2 * half).zip(x.row(r).chunks_exact(2 * half)) {
                let ((y_low, y_high), (low, high)) = (y.split_at_mut(half), x.split_at(half));
                for at in (0..half).step_by(WIDTH) {
                    let part = at..(at + WIDTH).min(half);
                    let (a, b) = turned::<V>(&low[part.clone()], &high[part.clone()], angles, part.clone(), sign);
                    a.store_first(&mut y_low[part.clone()]);
                    b.store_first(&mut y_high[part]);
                }
            }
        }
    }
}

/// The two halves of at most a vector of pairs, turned by entries `part` of (cosines, sines).
#[inline(always)]
fn turned<V: Lanes>(low: &[f32], high: &[f32], (cos, sin): (&[f32], &[f32]), part: Range<usize>, sign: f32) -> (V, V) {
    let (low, high) = (V::load_first(low, 0.0), V::load_first(high, 0.0));
    let (cos, sin) = (V::load_first(&cos[part.clone()], 0.0), V::load_first(&sin[part], 0.0) * V::splat(sign));
    (low * cos - high * sin, high.mul_add(cos, low * sin))
}

#[cfg(test)]
mod tests;
