//! Walking through matrices of equal sizes together: as one long row where none has gaps, else row by row.

use crate::{Args, Element, OpError, Rows, RowsMut, ops::By, ops::Old};

/// Rows of one output.
pub(super) fn one<A: Element>(a: RowsMut<'_, A>, mut f: impl FnMut(&mut [A])) {
    let mut a = a.flat();
    for i in 0..a.len() {
        f(a.row_mut(i));
    }
}

/// Rows of an output and an input.
pub(super) fn two<A: Element, B: Element>(a: RowsMut<'_, A>, b: Rows<'_, B>, mut f: impl FnMut(&mut [A], &[B])) {
    let (mut a, b) = if a.is_flat() && b.is_flat() { (a.flat(), b.flat()) } else { (a, b) };
    for i in 0..a.len() {
        f(a.row_mut(i), b.row(i));
    }
}

/// Rows of an output and two inputs.
pub(super) fn three<A: Element, B: Element, C: Element>(
    a: RowsMut<'_, A>,
    b: Rows<'_, B>,
    c: Rows<'_, C>,
    mut f: impl FnMut(&mut [A], &[B], &[C]),
) {
    let flat = a.is_flat() && b.is_flat() && c.is_flat();
    let (mut a, b, c) = if flat { (a.flat(), b.flat(), c.flat()) } else { (a, b, c) };
    for i in 0..a.len() {
        f(a.row_mut(i), b.row(i), c.row(i));
    }
}

/// A factor: the setting, or the scalar at `index`.
pub(super) fn factor(by: By, args: &Args<'_>, index: usize) -> Result<f32, OpError> {
    match by {
        By::Const(value) => Ok(value),
        By::Device => Ok(args.read::<f32>(index)?[0]),
    }
}

/// What the old values of an output are multiplied by, the scalar being at `index`; `None`: they are not read.
pub(super) fn keep(old: Old, args: &Args<'_>, index: usize) -> Result<Option<f32>, OpError> {
    match old {
        Old::Overwrite => Ok(None),
        Old::Add => Ok(Some(1.0)),
        Old::Keep => Ok(Some(args.read::<f32>(index)?[0]).filter(|keep| *keep != 0.0)),
    }
}

/// `new` put into `out` as `keep` says.
#[inline(always)]
pub(super) fn store(out: &mut f32, keep: Option<f32>, new: f32) {
    *out = match keep {
        None => new,
        Some(keep) => keep.mul_add(*out, new),
    };
}
