//! RMS norm, with the residual addition before it.

use super::{
    Accumulate, Kernel, Residual, Work,
    accumulate::Old,
    check::Check,
    cut::{Cut, PIECE_BYTES},
    norm::{LayerNormBackward, Skip, cut_stretches, cut_sums, per_row_tile, push_residual, push_sums},
};
use crate::{Access, DType, Error, Op, Site, View};

/// y = x · rstd · weight with rstd = 1 / sqrt(mean of x² + eps) over the columns of each row.
///
/// f32 or bf16; rstd is f32.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a> {
    /// `[rows, cols]`.
    pub x: &'a View,
    /// Adds to x first.
    pub residual: Option<Residual<'a>>,
    /// `[cols]`.
    pub weight: &'a View,
    /// `[rows, cols]`, written.
    pub y: &'a View,
    /// `[rows]`, written, for the backward pass.
    pub rstd: &'a View,
    /// Added to the mean square, over 0.
    pub eps: f32,
}

impl RmsNorm<'_> {
    /// Accesses: x, weight, y, rstd, then r and sum.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`], [`Error::Strided`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("rms_norm", site);
        let x = ("x", self.x);
        check.values(&[x, ("weight", self.weight), ("y", self.y)])?;
        check.dtype(DType::F32, &[("rstd", self.rstd)])?;
        check.same_sizes(&[x, ("y", self.y)])?;
        check.per_column(x, &[("weight", self.weight)])?;
        check.per_row(x, &[("rstd", self.rstd)])?;
        check.setting(self.eps > 0.0, "eps", self.eps.into(), "it must be over 0")?;
        let mut accesses =
            vec![Access::read(self.x), Access::read(self.weight), Access::write(self.y), Access::write(self.rstd)];
        push_residual(&check, self.residual, x, &mut accesses)?;
        let residual = self.residual.is_some();
        Ok(check.launch(accesses, Kernel::RmsNorm(RmsNormSpec { eps: self.eps, residual })))
    }
}

/// Settings of [`Kernel::RmsNorm`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RmsNormSpec {
    pub(crate) eps: f32,
    pub(crate) residual: bool,
}

impl RmsNormSpec {
    fn cut(&self, accesses: &[Access]) -> Cut {
        let x = &accesses[0].view;
        Cut::rows(x.row_count(), x.cols() * if self.residual { 16 } else { 8 }, PIECE_BYTES)
    }
}

impl Work for RmsNormSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        self.cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        per_row_tile(self.cut(accesses), accesses, &[0, 2, 4, 5], &[3], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        (accesses[0].view.numel() * if self.residual { 5 } else { 4 }) as u64
    }
}

/// dx of an RMS norm; the gradient of its weight is [`RmsNormGrad`], or made from the sums.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormBackward<'a> {
    /// Gradient of y, `[rows, cols]`.
    pub dy: &'a View,
    /// What was normalised: x, or the sum with the residual.
    pub x: &'a View,
    /// `[cols]`.
    pub weight: &'a View,
    /// `[rows]`, from the forward pass.
    pub rstd: &'a View,
    /// Gradient that reaches the sum past the norm, `[rows, cols]`: added. May be the same view as dx.
    pub skip: Option<&'a View>,
    /// `[rows, cols]`, written.
    pub dx: &'a View,
    /// Σ dy·x·rstd over stretches of rows, f32, `[RmsNormBackward::stretches(rows), cols]`, written, if it is wanted: a
    /// [`BiasGrad`](super::BiasGrad) of it gives the gradient of the weight, and nobody reads dy and x again.
    pub sums: Option<&'a View>,
}

impl RmsNormBackward<'_> {
    /// How many stretches `rows` rows have.
    pub fn stretches(rows: usize) -> usize {
        LayerNormBackward::stretches(rows)
    }

    /// Accesses: dy, x, weight, rstd, dx (update if skip is the same view), then skip if it is another, then the sums.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`] or [`Error::Strided`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("rms_norm_backward", site);
        let x = ("x", self.x);
        let (weight, rstd, dx) = (("weight", self.weight), ("rstd", self.rstd), ("dx", self.dx));
        check.values(&[x, ("dy", self.dy), weight, dx])?;
        check.dtype(DType::F32, &[rstd])?;
        check.same_sizes(&[x, ("dy", self.dy), dx])?;
        check.per_column(x, &[weight])?;
        check.per_row(x, &[rstd])?;
        let mut accesses = [self.dy, self.x, self.weight, self.rstd].map(Access::read).to_vec();
        let skip = Skip::push(&check, self.skip, dx, &mut accesses)?;
        let push = |sums: &View| push_sums(&check, x, &[("sums", sums)], &mut accesses);
        let stretch = self.sums.map(push).transpose()?;
        Ok(check.launch(accesses, Kernel::RmsNormBackward(RmsNormBackwardSpec { skip, stretch })))
    }
}

/// Settings of [`Kernel::RmsNormBackward`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RmsNormBackwardSpec {
    pub(crate) skip: Skip,
    /// Rows of a stretch, if sums are wanted.
    pub(crate) stretch: Option<usize>,
}

impl RmsNormBackwardSpec {
    fn cut(&self, accesses: &[Access]) -> Cut {
        cut_stretches(&accesses[1].view, self.skip, self.stretch)
    }
}

impl Work for RmsNormBackwardSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        self.cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        let (cut, past) = (self.cut(accesses), self.skip.past(4).unwrap_or(4));
        let mut tiles = per_row_tile(cut, accesses, &[0, 1, 4, past], &[3], tile);
        cut_sums(cut, self.stretch, self.skip.behind(4), tile, &mut tiles);
        tiles
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        let each = if self.skip == Skip::None { 8 } else { 9 } + if self.stretch.is_some() { 2 } else { 0 };
        (accesses[1].view.numel() * each) as u64
    }
}

/// dweight = Σ dy·x·rstd over the rows, in blocks of rows in order.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormGrad<'a> {
    /// Gradient of y, `[rows, cols]`.
    pub dy: &'a View,
    /// What was normalised, `[rows, cols]`.
    pub x: &'a View,
    /// `[rows]`, from the forward pass.
    pub rstd: &'a View,
    /// `[cols]`.
    pub dweight: &'a View,
    /// What happens to the old values.
    pub into: Accumulate<'a>,
}

impl RmsNormGrad<'_> {
    /// Accesses: dy, x, rstd, dweight, then keep.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`] or [`Error::Strided`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("rms_norm_grad", site);
        let x = ("x", self.x);
        let (rstd, dweight) = (("rstd", self.rstd), ("dweight", self.dweight));
        check.values(&[x, ("dy", self.dy)])?;
        check.dtype(DType::F32, &[rstd, dweight])?;
        check.same_sizes(&[x, ("dy", self.dy)])?;
        check.per_row(x, &[rstd])?;
        check.per_column(x, &[dweight])?;
        let mut accesses = [self.dy, self.x, self.rstd].map(Access::read).to_vec();
        let old = self.into.push(&check, self.dweight, &mut accesses)?;
        Ok(check.launch(accesses, Kernel::RmsNormGrad(RmsNormGradSpec { old })))
    }
}

/// Settings of [`Kernel::RmsNormGrad`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RmsNormGradSpec {
    pub(crate) old: Old,
}

impl RmsNormGradSpec {
    fn cut(accesses: &[Access]) -> Cut {
        let x = &accesses[1].view;
        Cut::cols(x.cols(), x.row_count() * 8, PIECE_BYTES)
    }
}

impl Work for RmsNormGradSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        Self::cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        Self::cut(accesses).accesses(accesses, &[0, 1, 3], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        3 * accesses[1].view.numel() as u64
    }
}
