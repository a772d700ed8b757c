//! Sums: over columns, over everything, and the norm that clips gradients.

use super::{
    Accumulate, Factor, Kernel, Work,
    accumulate::{By, Old},
    check::Check,
    cut::{Axis, Cut, PIECE_BYTES},
};
use crate::{Access, DType, Error, Op, Site, View};

/// dbias = Σ dy over the rows, in blocks of rows in order; dy f32 or bf16, dbias f32.
#[derive(Clone, Copy, Debug)]
pub struct BiasGrad<'a> {
    /// `[rows, cols]`.
    pub dy: &'a View,
    /// `[cols]`.
    pub dbias: &'a View,
    /// What happens to the old values.
    pub into: Accumulate<'a>,
}

impl BiasGrad<'_> {
    /// Accesses: dy, dbias, then keep.
    ///
    /// # Errors
    /// [`Error::Shapes`] or [`Error::ElementType`] if the tensors do not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("bias_grad", site);
        check.real(&[("dy", self.dy)])?;
        check.dtype(DType::F32, &[("dbias", self.dbias)])?;
        check.per_column(("dy", self.dy), &[("dbias", self.dbias)])?;
        let mut accesses = vec![Access::read(self.dy)];
        let old = self.into.push(&check, self.dbias, &mut accesses)?;
        Ok(check.launch(accesses, Kernel::BiasGrad(BiasGradSpec { old })))
    }
}

/// Settings of [`Kernel::BiasGrad`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BiasGradSpec {
    pub(crate) old: Old,
}

impl BiasGradSpec {
    fn cut(accesses: &[Access]) -> Cut {
        let dy = &accesses[0].view;
        Cut::cols(dy.cols(), dy.row_count() * 4, PIECE_BYTES)
    }
}

impl Work for BiasGradSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        Self::cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        Self::cut(accesses).accesses(accesses, &[0, 1], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        accesses[0].view.numel() as u64
    }
}

/// Two [`BiasGrad`]s of one size in one operation, with the same bits: what a norm's backward pass leaves of its weight and
/// its bias.
#[derive(Clone, Copy, Debug)]
pub struct BiasGrads<'a> {
    /// Matrices of the same sizes and element type.
    pub each: [BiasGrad<'a>; 2],
}

impl BiasGrads<'_> {
    /// Accesses: dy and dbias of the first, of the second, then keep of the first, of the second.
    ///
    /// # Errors
    /// [`Error::Shapes`] or [`Error::ElementType`] if the tensors do not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("bias_grads", site);
        let [first, second] = self.each;
        let (dy, other) = (("first dy", first.dy), ("second dy", second.dy));
        check.real(&[dy])?;
        check.dtype(first.dy.dtype(), &[other])?;
        check.same_sizes(&[dy, other])?;
        let outputs = [("first dbias", first.dbias), ("second dbias", second.dbias)];
        check.dtype(DType::F32, &outputs)?;
        check.per_column(dy, &outputs)?;
        let both = self.each.iter().flat_map(|grad| [Access::read(grad.dy), grad.into.output(grad.dbias)]);
        let mut accesses: Vec<Access> = both.collect();
        let old = [first.into.push_scalar(&check, &mut accesses)?, second.into.push_scalar(&check, &mut accesses)?];
        Ok(check.launch(accesses, Kernel::BiasGrads(BiasGradsSpec { old })))
    }
}

/// Settings of [`Kernel::BiasGrads`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BiasGradsSpec {
    pub(crate) old: [Old; 2],
}

impl BiasGradsSpec {
    /// The access of the scalar of each that has one.
    pub(crate) fn keeps(&self) -> [usize; 2] {
        [4, 4 + usize::from(self.old[0] == Old::Keep)]
    }

    fn cut(accesses: &[Access]) -> Cut {
        let dy = &accesses[0].view;
        Cut::cols(dy.cols(), dy.row_count() * 8, PIECE_BYTES)
    }
}

impl Work for BiasGradsSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        Self::cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        Self::cut(accesses).accesses(accesses, &[0, 1, 2, 3], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        2 * accesses[0].view.numel() as u64
    }
}

/// total = factor · Σ x over all elements, f32, summed in f64. Not cut: for losses, partial sums and the like.
#[derive(Clone, Copy, Debug)]
pub struct Sum<'a> {
    /// Any sizes.
    pub x: &'a View,
    /// A constant or a device scalar, such as one over the number of tokens.
    pub factor: Factor<'a>,
    /// One element, written.
    pub total: &'a View,
}

impl Sum<'_> {
    /// Accesses: x, total, the factor's scalar.
    ///
    /// # Errors
    /// [`Error::Shapes`] or [`Error::ElementType`] if the tensors do not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("sum", site);
        check.dtype(DType::F32, &[("x", self.x)])?;
        check.scalars(&[("total", self.total)])?;
        let mut accesses = vec![Access::read(self.x), Access::write(self.total)];
        let by = self.factor.push(&check, &mut accesses)?;
        Ok(check.launch(accesses, Kernel::Sum(SumSpec { by })))
    }
}

/// Settings of [`Kernel::Sum`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SumSpec {
    pub(crate) by: By,
}

impl Work for SumSpec {
    fn flops(&self, accesses: &[Access]) -> u64 {
        accesses[0].view.numel() as u64 + 1
    }
}

/// Squares of x summed piece by piece: as many partial sums as [`SquaredNorm::partials`] says.
///
/// [`Sum`] over the partials of all tensors, an all-reduce where they are sharded, then [`ClipFactor`].
#[derive(Clone, Copy, Debug)]
pub struct SquaredNorm<'a> {
    /// f32 or bf16, contiguous.
    pub x: &'a View,
    /// f32, contiguous, written.
    pub partials: &'a View,
}

impl SquaredNorm<'_> {
    /// Elements in a piece.
    const PIECE: usize = PIECE_BYTES / 4;

    /// Partial sums that a tensor of `numel` elements needs.
    pub fn partials(numel: usize) -> usize {
        Self::cut(numel).pieces()
    }

    pub(crate) fn cut(numel: usize) -> Cut {
        Cut::at_least(Axis::Rows, numel, Self::PIECE, 64)
    }

    /// Accesses: x, partials.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`] or [`Error::Strided`] if the tensors do not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("squared_norm", site);
        let (x, partials) = (("x", self.x), ("partials", self.partials));
        check.real(&[x])?;
        check.dtype(DType::F32, &[partials])?;
        check.contiguous(&[x, partials])?;
        let holds = self.partials.numel() == Self::partials(self.x.numel());
        check.shapes(holds, x, partials, "partials must have SquaredNorm::partials(elements of x) elements")?;
        let accesses = vec![Access::read(self.x), Access::write(self.partials)];
        Ok(check.launch(accesses, Kernel::SquaredNorm(SquaredNormSpec)))
    }
}

/// Settings of [`Kernel::SquaredNorm`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SquaredNormSpec;

impl Work for SquaredNormSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        SquaredNorm::partials(accesses[0].view.numel())
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        let range = SquaredNorm::cut(accesses[0].view.numel()).range(tile);
        let flat = |view: &View, range| view.flat(range).expect("BUG: checked to be contiguous");
        vec![
            Access { view: flat(&accesses[0].view, range), mode: accesses[0].mode },
            Access { view: flat(&accesses[1].view, tile..tile + 1), mode: accesses[1].mode },
        ]
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        2 * accesses[0].view.numel() as u64
    }
}

/// Norm, clip factor and whether the step must be skipped, from a squared norm.
///
/// norm = √squared, factor = min(1, limit / (norm + 1e-6)); where the norm is NaN or infinite, nonfinite is 1 and
/// the factor 0, so that nothing else reads a NaN. A squared norm overflows when a gradient exceeds about 1.8e19.
#[derive(Clone, Copy, Debug)]
pub struct ClipFactor<'a> {
    /// f32, one element: the squared norm of all gradients.
    pub squared: &'a View,
    /// The largest norm that is not clipped; 0 turns clipping off.
    pub limit: f32,
    /// f32, one element, written.
    pub norm: &'a View,
    /// f32, one element, written: usually [`Hyper::CLIP`](super::Hyper::CLIP) of the optimizer's scalars.
    pub factor: &'a View,
    /// i32, one element, written: 1 or 0.
    pub nonfinite: &'a View,
}

impl ClipFactor<'_> {
    /// Accesses: squared, norm, factor, nonfinite.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("clip_factor", site);
        check.scalars(&[("squared", self.squared), ("norm", self.norm), ("factor", self.factor)])?;
        check.dtype(DType::I32, &[("nonfinite", self.nonfinite)])?;
        check.single(&[("nonfinite", self.nonfinite)])?;
        check.setting(
            self.limit >= 0.0,
            "limit",
            self.limit.into(),
            "it must not be negative; 0 turns clipping off",
        )?;
        let mut accesses = vec![Access::read(self.squared)];
        accesses.extend([self.norm, self.factor, self.nonfinite].map(Access::write));
        Ok(check.launch(accesses, Kernel::ClipFactor(ClipFactorSpec { limit: self.limit })))
    }
}

/// Settings of [`Kernel::ClipFactor`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ClipFactorSpec {
    pub(crate) limit: f32,
}

impl Work for ClipFactorSpec {
    fn flops(&self, _accesses: &[Access]) -> u64 {
        4
    }
}
