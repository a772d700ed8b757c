//! Matrix products with what usually follows them.

use std::ops::Range;

use super::{
    Accumulate, Kernel, Work,
    accumulate::Old,
    check::Check,
    cut::{Axis, Cut, PIECE_FLOPS, cols_of, rows_of},
};
use crate::{Access, DType, Error, Op, Site, View};

/// Which factors of a product are taken transposed: first letter A, second B, `N` as stored, `T` transposed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Trans {
    /// A `[m, k]`, B `[k, n]`.
    Nn,
    /// A `[m, k]`, B `[n, k]`: a linear layer's forward with its weight stored `[out, in]`.
    Nt,
    /// A `[k, m]`, B `[k, n]`: its weight gradient.
    Tn,
    /// A `[k, m]`, B `[n, k]`.
    Tt,
}

impl Trans {
    pub(crate) const fn a(self) -> bool {
        matches!(self, Trans::Tn | Trans::Tt)
    }

    pub(crate) const fn b(self) -> bool {
        matches!(self, Trans::Nt | Trans::Tt)
    }
}

/// What a product does with its result while it is in cache.
#[derive(Clone, Copy, Debug)]
pub enum Finish<'a> {
    /// Stores it, or adds it to C.
    Into(Accumulate<'a>),
    /// C = A·B + bias, bias `[n]`.
    Bias(&'a View),
    /// pre = A·B + bias and C = GELU(pre), tanh form; pre `[m, n]` is kept for the backward pass.
    BiasGelu {
        /// `[n]`.
        bias: &'a View,
        /// `[m, n]`, written.
        pre: &'a View,
    },
    /// C = A·B + bias + r: the end of a branch, back in the residual stream.
    Residual {
        /// `[n]`.
        bias: Option<&'a View>,
        /// `[m, n]`, another view than C: what a norm has taken is kept for its backward pass.
        r: &'a View,
    },
    /// C = (A·B) ⊙ GELU'(pre): the gradient before the activation, from the one behind it.
    GeluBackward {
        /// `[m, n]`, as [`Finish::BiasGelu`] kept it.
        pre: &'a View,
    },
}

/// C = op(A)·op(B), all of one element type, f32 or bf16, and with strided rows where wanted. Under [`Finish::Into`] C
/// may also be f32 where A and B are bf16.
///
/// Tiles cut m or n, never k: each element is one sum in an order that depends on the shapes only.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<'a> {
    /// Left factor.
    pub a: &'a View,
    /// Right factor.
    pub b: &'a View,
    /// `[m, n]`.
    pub c: &'a View,
    /// How A and B are stored.
    pub trans: Trans,
    /// What follows the product.
    pub finish: Finish<'a>,
}

impl Gemm<'_> {
    /// Accesses: a, b, c, then what `finish` names (bias, pre, r, keep).
    ///
    /// # Errors
    /// [`Error::Shapes`] or [`Error::ElementType`] if the tensors do not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("gemm", site);
        let (a, b, c) = (("a", self.a), ("b", self.b), ("c", self.c));
        check.values(&[a, b])?;
        // A weight gradient is f32 whatever its factors are.
        if !(matches!(self.finish, Finish::Into(_)) && self.c.dtype() == DType::F32) {
            check.dtype(self.a.dtype(), &[c])?;
        }
        let (m, k) = oriented(self.a, self.trans.a());
        let (k_of_b, n) = oriented(self.b, self.trans.b());
        check.shapes(k == k_of_b, a, b, self.inner_rule())?;
        check.shapes(m == self.c.row_count(), a, c, "rows of op(a) and of c must be equal")?;
        check.shapes(n == self.c.cols(), b, c, "columns of op(b) and of c must be equal")?;
        let mut accesses = vec![Access::read(self.a), Access::read(self.b)];
        let finish = match self.finish {
            Finish::Into(into) => GemmFinish::Into(into.push(&check, self.c, &mut accesses)?),
            Finish::Bias(bias) => {
                check.dtype(self.c.dtype(), &[("bias", bias)])?;
                check.per_column(c, &[("bias", bias)])?;
                accesses.extend([Access::write(self.c), Access::read(bias)]);
                GemmFinish::Bias
            }
            Finish::BiasGelu { bias, pre } => {
                check.dtype(self.c.dtype(), &[("bias", bias), ("pre", pre)])?;
                check.per_column(c, &[("bias", bias)])?;
                check.same_sizes(&[c, ("pre", pre)])?;
                accesses.extend([Access::write(self.c), Access::read(bias), Access::write(pre)]);
                GemmFinish::BiasGelu
            }
            Finish::Residual { bias, r } => {
                check.dtype(self.c.dtype(), &[("r", r)])?;
                check.same_sizes(&[c, ("r", r)])?;
                accesses.push(Access::write(self.c));
                if let Some(bias) = bias {
                    check.dtype(self.c.dtype(), &[("bias", bias)])?;
                    check.per_column(c, &[("bias", bias)])?;
                    accesses.push(Access::read(bias));
                }
                accesses.push(Access::read(r));
                if bias.is_some() { GemmFinish::BiasResidual } else { GemmFinish::Residual }
            }
            Finish::GeluBackward { pre } => {
                check.dtype(self.c.dtype(), &[("pre", pre)])?;
                check.same_sizes(&[c, ("pre", pre)])?;
                accesses.extend([Access::write(self.c), Access::read(pre)]);
                GemmFinish::GeluBackward
            }
        };
        Ok(check.launch(accesses, Kernel::Gemm(GemmSpec { trans: self.trans, finish })))
    }

    fn inner_rule(&self) -> &'static str {
        match self.trans {
            Trans::Nn => "columns of a and rows of b must be equal",
            Trans::Nt => "columns of a and columns of b must be equal (b is taken transposed)",
            Trans::Tn => "rows of a and rows of b must be equal (a is taken transposed)",
            Trans::Tt => "rows of a and columns of b must be equal (both are taken transposed)",
        }
    }
}

/// Rows and columns of op(view).
fn oriented(view: &View, transposed: bool) -> (usize, usize) {
    let (rows, cols) = (view.row_count(), view.cols());
    if transposed { (cols, rows) } else { (rows, cols) }
}

/// Settings of [`Kernel::Gemm`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct GemmSpec {
    pub(crate) trans: Trans,
    pub(crate) finish: GemmFinish,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) enum GemmFinish {
    Into(Old),
    Bias,
    BiasGelu,
    Residual,
    BiasResidual,
    GeluBackward,
}

impl GemmFinish {
    /// Access 3 is a vector or a scalar, not a matrix like C.
    const fn has_vector(self) -> bool {
        self.has_bias() || matches!(self, GemmFinish::Into(Old::Keep))
    }

    /// Access 3 has an entry for each column of C.
    const fn has_bias(self) -> bool {
        matches!(self, GemmFinish::Bias | GemmFinish::BiasGelu | GemmFinish::BiasResidual)
    }
}

impl GemmSpec {
    /// Rows (or columns) of a tile. Half of it costs 4% where the other factor is packed again for every tile.
    const TILE: usize = 512;
    /// Where tiles of that size are too few to share out, down to this size, which costs up to 10%.
    const SMALL_TILE: usize = 192;
    const FEW: usize = 4;

    fn cut(&self, accesses: &[Access]) -> Cut {
        let (m, k) = oriented(&accesses[0].view, self.trans.a());
        let n = accesses[2].view.cols();
        // Rows of C are cut first: their tiles are contiguous in C and, for forward products, in A.
        let (axis, len, other) = if m >= n.min(Self::TILE) { (Axis::Rows, m, n) } else { (Axis::Cols, n, m) };
        let tile = Self::TILE.min(len / Self::FEW).max(Self::SMALL_TILE);
        Cut::at_least(axis, len, tile.max(PIECE_FLOPS.div_ceil((2 * k * other).max(1))), 16)
    }
}

impl Work for GemmSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        self.cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        let cut = self.cut(accesses);
        let range = cut.range(tile);
        let piece = |at: usize, view: &View| match (at, cut.axis) {
            (0, Axis::Rows) => outer(view, range.clone(), self.trans.a()),
            (1, Axis::Cols) => outer(view, range.clone(), !self.trans.b()),
            (0 | 1, _) => view.clone(),
            // Keep's scalar and, under a cut of rows, the bias.
            (3, Axis::Cols) if self.finish.has_bias() => cols_of(view, range.clone()),
            (3, _) if self.finish.has_vector() => view.clone(),
            _ => cut.of(view, tile),
        };
        accesses.iter().enumerate().map(|(at, x)| Access { view: piece(at, &x.view), mode: x.mode }).collect()
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        let (m, k) = oriented(&accesses[0].view, self.trans.a());
        let n = accesses[2].view.cols();
        let per_element = match self.finish {
            GemmFinish::Into(Old::Overwrite) => 0,
            GemmFinish::Into(Old::Add) | GemmFinish::Bias | GemmFinish::Residual => 1,
            GemmFinish::Into(Old::Keep) | GemmFinish::BiasResidual => 2,
            GemmFinish::BiasGelu => 1 + super::activation::GELU_FLOPS,
            GemmFinish::GeluBackward => super::activation::GELU_BACKWARD_FLOPS,
        };
        2 * (m * n * k) as u64 + per_element * (m * n) as u64
    }
}

/// Entries of the dimension of a factor that is also one of C's.
fn outer(view: &View, range: Range<usize>, columns: bool) -> View {
    if columns { cols_of(view, range) } else { rows_of(view, range) }
}
