//! Products through the `gemm` crate, one thread, with the epilogue over the rows just written.

use super::{activation::times_gelu_slope, lines, math, wide::wide};
use crate::{
    Args, OpError, Rows, RowsMut,
    ops::{GemmFinish, GemmSpec},
};

pub(super) fn gemm(spec: &GemmSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let a = Factor { rows: args.rows(0)?, transposed: spec.trans.a() };
    let b = Factor { rows: args.rows(1)?, transposed: spec.trans.b() };
    let mut c = args.rows_mut::<f32>(2)?;
    match spec.finish {
        GemmFinish::Into(old) => {
            let keep = lines::keep(old, args, 3)?;
            product(&mut c, keep.unwrap_or(0.0), 1.0, a, b);
        }
        GemmFinish::Bias => {
            let bias = args.read::<f32>(3)?;
            product(&mut c, 0.0, 1.0, a, b);
            add_bias(c, bias);
        }
        GemmFinish::BiasGelu => {
            let (bias, mut pre) = (args.read::<f32>(3)?, args.rows_mut::<f32>(4)?);
            product(&mut pre, 0.0, 1.0, a, b);
            bias_gelu(c, pre, bias);
        }
        GemmFinish::Residual => {
            product(&mut c, 0.0, 1.0, a, b);
            add_rows(c, args.rows(3)?);
        }
        GemmFinish::BiasResidual => {
            product(&mut c, 0.0, 1.0, a, b);
            add_bias_and_rows(c, args.read::<f32>(3)?, args.rows(4)?);
        }
        GemmFinish::GeluBackward => {
            product(&mut c, 0.0, 1.0, a, b);
            lines::two(c, args.rows(3)?, times_gelu_slope);
        }
    }
    Ok(())
}

wide! {
    fn add_bias(c: RowsMut<'_, f32>, bias: &[f32]) {
        let mut c = c;
        for i in 0..c.len() {
            for (c, &b) in c.row_mut(i).iter_mut().zip(bias) {
                *c += b;
            }
        }
    }
}

wide! {
    fn add_rows(c: RowsMut<'_, f32>, r: Rows<'_, f32>) {
        let mut c = c;
        for i in 0..c.len() {
            for (c, &r) in c.row_mut(i).iter_mut().zip(r.row(i)) {
                *c += r;
            }
        }
    }
}

wide! {
    fn add_bias_and_rows(c: RowsMut<'_, f32>, bias: &[f32], r: Rows<'_, f32>) {
        let mut c = c;
        for i in 0..c.len() {
            for ((c, &b), &r) in c.row_mut(i).iter_mut().zip(bias).zip(r.row(i)) {
                *c = (*c + b) + r;
            }
        }
    }
}

wide! {
    fn bias_gelu(c: RowsMut<'_, f32>, pre: RowsMut<'_, f32>, bias: &[f32]) {
        let (mut c, mut pre) = (c, pre);
        for i in 0..c.len() {
            for ((c, pre), &b) in c.row_mut(i).iter_mut().zip(pre.row_mut(i)).zip(bias) {
                *pre += b;
                *c = math::gelu(*pre);
            }
        }
    }
}

/// A factor of a product.
#[derive(Clone, Copy)]
pub(super) struct Factor<'a> {
    pub(super) rows: Rows<'a, f32>,
    pub(super) transposed: bool,
}

impl<'a> Factor<'a> {
    /// As stored.
    pub(super) fn plain(rows: Rows<'a, f32>) -> Factor<'a> {
        Factor { rows, transposed: false }
    }

    /// Rows and columns exchanged.
    pub(super) fn transposed(rows: Rows<'a, f32>) -> Factor<'a> {
        Factor { rows, transposed: true }
    }

    /// Rows and columns as the product sees them.
    fn sizes(&self) -> (usize, usize) {
        if self.transposed { (self.rows.cols(), self.rows.len()) } else { (self.rows.len(), self.rows.cols()) }
    }

    /// Elements between two rows and between two columns, as the product sees them.
    #[cfg(not(miri))]
    fn strides(&self) -> (isize, isize) {
        let pitch = self.rows.pitch() as isize;
        if self.transposed { (1, pitch) } else { (pitch, 1) }
    }
}

/// c = keep·c + alpha·a·b; with a keep of 0 c is not read.
///
/// # Panics
/// If the sizes do not fit.
pub(super) fn product(c: &mut RowsMut<'_, f32>, keep: f32, alpha: f32, a: Factor<'_>, b: Factor<'_>) {
    let ((m, k), (k_of_b, n)) = (a.sizes(), b.sizes());
    assert!(
        k == k_of_b && m == c.len() && n == c.cols(),
        "BUG: {m}x{k} times {k_of_b}x{n} into {}x{}",
        c.len(),
        c.cols()
    );
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        for i in 0..m {
            c.row_mut(i).iter_mut().for_each(|c| *c = if keep == 0.0 { 0.0 } else { keep * *c });
        }
        return;
    }
    #[cfg(miri)]
    product_slowly(c, keep, alpha, a, b);
    #[cfg(not(miri))]
    {
        let ((a_row, a_col), (b_row, b_col)) = (a.strides(), b.strides());
        let c_row = c.pitch() as isize;
        // The library wants the entries of a column of the result beside each other; ours are rows, so it gets everything
        // transposed, factors exchanged.
        // SAFETY: sizes agree (asserted) and each of the three is a matrix whose rows lie inside a region that
        // `Args` claimed for this operation (or a slice): entry (i, j) is at i·row + j·column, in bounds. c is
        // borrowed mutably and conflicts with neither a nor b, because claims of one operation do not conflict.
        unsafe {
            let columns_first = gemm_f32::gemm::f32::get_gemm_fn();
            columns_first(
                n,
                m,
                k,
                c.as_mut_ptr(),
                c_row,
                1,
                keep != 0.0,
                b.rows.as_ptr(),
                b_row,
                b_col,
                a.rows.as_ptr(),
                a_row,
                a_col,
                keep,
                alpha,
                false,
                false,
                false,
                gemm_common::Parallelism::None,
            );
        }
    }
}

/// The slow twin: three loops. Runs under Miri, which has no inline assembly, and in tests.
#[cfg(any(miri, test))]
fn product_slowly(c: &mut RowsMut<'_, f32>, keep: f32, alpha: f32, a: Factor<'_>, b: Factor<'_>) {
    let at = |f: &Factor<'_>, i: usize, j: usize| if f.transposed { f.rows.row(j)[i] } else { f.rows.row(i)[j] };
    let k = a.sizes().1;
    for i in 0..c.len() {
        for j in 0..c.cols() {
            let sum: f32 = (0..k).map(|l| at(&a, i, l) * at(&b, l, j)).sum();
            let c = &mut c.row_mut(i)[j];
            *c = if keep == 0.0 { alpha * sum } else { keep.mul_add(*c, alpha * sum) };
        }
    }
}

#[cfg(test)]
mod tests;
