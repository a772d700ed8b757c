//! Layer norm, with the residual addition before it.

use super::{
    Accumulate, Kernel, Work,
    accumulate::Old,
    check::Check,
    cut::{Axis, Cut, PIECE_BYTES, rows_of},
};
use crate::{Access, DType, Error, Op, Site, View};

/// The addition before a norm: the norm sees `x + r`, which is also kept.
#[derive(Clone, Copy, Debug)]
pub struct Residual<'a> {
    /// Added to x, same sizes.
    pub r: &'a View,
    /// x + r, same sizes, written.
    pub sum: &'a View,
}

/// y = (x − mean) · rstd · weight + bias over the columns of each row, f32 or bf16; mean and rstd are f32.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm<'a> {
    /// `[rows, cols]`.
    pub x: &'a View,
    /// Adds to x first.
    pub residual: Option<Residual<'a>>,
    /// `[cols]`.
    pub weight: &'a View,
    /// `[cols]`.
    pub bias: &'a View,
    /// `[rows, cols]`, written.
    pub y: &'a View,
    /// `[rows]`, written, for the backward pass.
    pub mean: &'a View,
    /// `[rows]`, written: 1 / sqrt(variance + eps).
    pub rstd: &'a View,
    /// Added to the variance, over 0.
    pub eps: f32,
}

impl LayerNorm<'_> {
    /// Accesses: x, weight, bias, y, mean, rstd, then r and sum.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`], [`Error::Strided`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("layer_norm", site);
        let x = ("x", self.x);
        let columns = [("weight", self.weight), ("bias", self.bias)];
        let rows = [("mean", self.mean), ("rstd", self.rstd)];
        check.values(&[x, columns[0], columns[1], ("y", self.y)])?;
        check.dtype(DType::F32, &rows)?;
        check.same_sizes(&[x, ("y", self.y)])?;
        check.per_column(x, &columns)?;
        check.per_row(x, &rows)?;
        check.setting(self.eps > 0.0, "eps", self.eps.into(), "it must be over 0")?;
        let mut accesses = vec![
            Access::read(self.x),
            Access::read(self.weight),
            Access::read(self.bias),
            Access::write(self.y),
            Access::write(self.mean),
            Access::write(self.rstd),
        ];
        push_residual(&check, self.residual, x, &mut accesses)?;
        let residual = self.residual.is_some();
        Ok(check.launch(accesses, Kernel::LayerNorm(LayerNormSpec { eps: self.eps, residual })))
    }
}

pub(super) fn push_residual(
    check: &Check,
    residual: Option<Residual<'_>>,
    x: (&'static str, &View),
    accesses: &mut Vec<Access>,
) -> Result<(), Error> {
    let Some(Residual { r, sum }) = residual else { return Ok(()) };
    check.dtype(x.1.dtype(), &[("r", r), ("sum", sum)])?;
    check.same_sizes(&[x, ("r", r), ("sum", sum)])?;
    accesses.extend([Access::read(r), Access::write(sum)]);
    Ok(())
}

/// Settings of [`Kernel::LayerNorm`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LayerNormSpec {
    pub(crate) eps: f32,
    pub(crate) residual: bool,
}

impl Work for LayerNormSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        self.cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        per_row_tile(self.cut(accesses), accesses, &[0, 3, 6, 7], &[4, 5], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        let x = &accesses[0].view;
        (x.numel() * if self.residual { 9 } else { 8 }) as u64
    }
}

impl LayerNormSpec {
    fn cut(&self, accesses: &[Access]) -> Cut {
        let x = &accesses[0].view;
        Cut::rows(x.row_count(), x.cols() * if self.residual { 16 } else { 8 }, PIECE_BYTES)
    }
}

/// A cut of rows: `matrices` by rows, `vectors` (one entry a row) by entries, the rest whole.
pub(super) fn per_row_tile(
    cut: Cut,
    accesses: &[Access],
    matrices: &[usize],
    vectors: &[usize],
    tile: usize,
) -> Vec<Access> {
    let mut tiles = cut.accesses(accesses, matrices, tile);
    for &at in vectors {
        tiles[at].view =
            accesses[at].view.flat(cut.range(tile)).expect("BUG: checked to be contiguous, one entry a row");
    }
    tiles
}

/// Where a backward pass leaves what the gradients of a layer norm's weights are made of, so that nobody reads dy and x
/// again: sums over stretches of rows, f32, `[LayerNormBackward::stretches(rows), cols]`. A
/// [`BiasGrad`](super::BiasGrad) of each gives the gradient.
#[derive(Clone, Copy, Debug)]
pub struct StretchSums<'a> {
    /// Σ dy·(x − mean)·rstd, written.
    pub dweight: &'a View,
    /// Σ dy, written.
    pub dbias: &'a View,
}

/// Stretches at most.
const STRETCHES: usize = 256;

/// Rows of a stretch: by their number only, as the order of sums depends on it.
pub(crate) fn stretch(rows: usize) -> usize {
    rows.div_ceil(STRETCHES).max(1).next_multiple_of(8)
}

/// Checks and appends sums over stretches of the rows of `x`; how many rows a stretch has.
pub(super) fn push_sums(
    check: &Check,
    x: (&'static str, &View),
    sums: &[(&'static str, &View)],
    accesses: &mut Vec<Access>,
) -> Result<usize, Error> {
    let stretch = stretch(x.1.row_count());
    check.dtype(DType::F32, sums)?;
    for sum in sums {
        let holds = sum.1.row_count() == x.1.row_count().div_ceil(stretch) && sum.1.cols() == x.1.cols();
        check.shapes(holds, x, *sum, "the second must have a row for each stretch of the first, and its columns")?;
        accesses.push(Access::write(sum.1));
    }
    Ok(stretch)
}

/// dx of a layer norm; the gradient of its weight and bias is [`LayerNormGrad`], or made from the sums.
#[derive(Clone, Copy, Debug)]
pub struct LayerNormBackward<'a> {
    /// Gradient of y, `[rows, cols]`.
    pub dy: &'a View,
    /// What was normalised: x, or the sum with the residual.
    pub x: &'a View,
    /// `[cols]`.
    pub weight: &'a View,
    /// `[rows]`, from the forward pass.
    pub mean: &'a View,
    /// `[rows]`, from the forward pass.
    pub rstd: &'a View,
    /// Gradient that reaches the sum past the norm, `[rows, cols]`: added. May be the same view as dx.
    pub skip: Option<&'a View>,
    /// `[rows, cols]`, written.
    pub dx: &'a View,
    /// Sums for the gradients of weight and bias, if they are wanted.
    pub sums: Option<StretchSums<'a>>,
}

impl LayerNormBackward<'_> {
    /// How many stretches `rows` rows have.
    pub fn stretches(rows: usize) -> usize {
        rows.div_ceil(stretch(rows))
    }

    /// Accesses: dy, x, weight, mean, rstd, dx (update if skip is the same view), then skip if it is another, then the
    /// sums.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`] or [`Error::Strided`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("layer_norm_backward", site);
        let x = ("x", self.x);
        let rows = [("mean", self.mean), ("rstd", self.rstd)];
        check.values(&[x, ("dy", self.dy), ("weight", self.weight), ("dx", self.dx)])?;
        check.dtype(DType::F32, &rows)?;
        check.same_sizes(&[x, ("dy", self.dy), ("dx", self.dx)])?;
        check.per_column(x, &[("weight", self.weight)])?;
        check.per_row(x, &rows)?;
        let mut accesses = [self.dy, self.x, self.weight, self.mean, self.rstd].map(Access::read).to_vec();
        let skip = Skip::push(&check, self.skip, ("dx", self.dx), &mut accesses)?;
        let push = |sums: StretchSums<'_>| {
            push_sums(&check, x, &[("dweight", sums.dweight), ("dbias", sums.dbias)], &mut accesses)
        };
        let stretch = self.sums.map(push).transpose()?;
        Ok(check.launch(accesses, Kernel::LayerNormBackward(LayerNormBackwardSpec { skip, stretch })))
    }
}

/// Whether a gradient past the norm is added, and where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Skip {
    None,
    InPlace,
    Apart,
}

impl Skip {
    /// Appends dx, and skip where it is not the same view.
    pub(super) fn push(
        check: &Check,
        skip: Option<&View>,
        dx: (&'static str, &View),
        accesses: &mut Vec<Access>,
    ) -> Result<Skip, Error> {
        let Some(skip) = skip else {
            accesses.push(Access::write(dx.1));
            return Ok(Skip::None);
        };
        check.dtype(dx.1.dtype(), &[("skip", skip)])?;
        check.same_sizes(&[dx, ("skip", skip)])?;
        if skip.same_as(dx.1) {
            accesses.push(Access::update(dx.1));
            return Ok(Skip::InPlace);
        }
        accesses.extend([Access::write(dx.1), Access::read(skip)]);
        Ok(Skip::Apart)
    }
}

/// Settings of [`Kernel::LayerNormBackward`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerNormBackwardSpec {
    pub(crate) skip: Skip,
    /// Rows of a stretch, if sums are wanted.
    pub(crate) stretch: Option<usize>,
}

impl LayerNormBackwardSpec {
    fn cut(&self, accesses: &[Access]) -> Cut {
        cut_stretches(&accesses[1].view, self.skip, self.stretch)
    }
}

/// By rows, in whole stretches.
pub(super) fn cut_stretches(x: &View, skip: Skip, stretch: Option<usize>) -> Cut {
    let cost = x.cols() * if skip == Skip::None { 12 } else { 16 };
    Cut::at_least(Axis::Rows, x.row_count(), PIECE_BYTES.div_ceil(cost.max(1)), stretch.unwrap_or(1))
}

impl Skip {
    /// The access of dx, behind which another skip is.
    pub(crate) fn past(self, dx: usize) -> Option<usize> {
        match self {
            Skip::None => None,
            Skip::InPlace => Some(dx),
            Skip::Apart => Some(dx + 1),
        }
    }

    /// The first access behind dx and another skip.
    pub(crate) fn behind(self, dx: usize) -> usize {
        if self == Skip::Apart { dx + 2 } else { dx + 1 }
    }
}

/// The part of sums, access `from` and behind, that is of piece `tile`.
pub(super) fn cut_sums(cut: Cut, stretch: Option<usize>, from: usize, tile: usize, tiles: &mut [Access]) {
    let (Some(stretch), range) = (stretch, cut.range(tile)) else { return };
    for access in &mut tiles[from..] {
        access.view = rows_of(&access.view, range.start / stretch..range.end.div_ceil(stretch));
    }
}

impl Work for LayerNormBackwardSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        self.cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        let (cut, past) = (self.cut(accesses), self.skip.past(5).unwrap_or(5));
        let mut tiles = per_row_tile(cut, accesses, &[0, 1, 5, past], &[3, 4], tile);
        cut_sums(cut, self.stretch, self.skip.behind(5), tile, &mut tiles);
        tiles
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        let each = if self.skip == Skip::None { 12 } else { 13 } + if self.stretch.is_some() { 3 } else { 0 };
        (accesses[1].view.numel() * each) as u64
    }
}

/// dweight = Σ dy·(x − mean)·rstd and dbias = Σ dy over the rows, in blocks of rows in order.
#[derive(Clone, Copy, Debug)]
pub struct LayerNormGrad<'a> {
    /// Gradient of y, `[rows, cols]`.
    pub dy: &'a View,
    /// What was normalised, `[rows, cols]`.
    pub x: &'a View,
    /// `[rows]`, from the forward pass.
    pub mean: &'a View,
    /// `[rows]`, from the forward pass.
    pub rstd: &'a View,
    /// `[cols]`.
    pub dweight: &'a View,
    /// `[cols]`.
    pub dbias: &'a View,
    /// What happens to the old values of both.
    pub into: Accumulate<'a>,
}

impl LayerNormGrad<'_> {
    /// Accesses: dy, x, mean, rstd, dweight, dbias, then keep.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`] or [`Error::Strided`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("layer_norm_grad", site);
        let x = ("x", self.x);
        let rows = [("mean", self.mean), ("rstd", self.rstd)];
        let columns = [("dweight", self.dweight), ("dbias", self.dbias)];
        check.values(&[x, ("dy", self.dy)])?;
        check.dtype(DType::F32, &[rows[0], rows[1], columns[0], columns[1]])?;
        check.same_sizes(&[x, ("dy", self.dy)])?;
        check.per_row(x, &rows)?;
        check.per_column(x, &columns)?;
        let mut accesses = [self.dy, self.x, self.mean, self.rstd].map(Access::read).to_vec();
        accesses.extend([self.into.output(self.dweight), self.into.output(self.dbias)]);
        let old = self.into.push_scalar(&check, &mut accesses)?;
        Ok(check.launch(accesses, Kernel::LayerNormGrad(LayerNormGradSpec { old })))
    }
}

/// Settings of [`Kernel::LayerNormGrad`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerNormGradSpec {
    pub(crate) old: Old,
}

impl LayerNormGradSpec {
    fn cut(&self, accesses: &[Access]) -> Cut {
        let x = &accesses[1].view;
        Cut::cols(x.cols(), x.row_count() * 8, PIECE_BYTES)
    }
}

impl Work for LayerNormGradSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        self.cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        self.cut(accesses).accesses(accesses, &[0, 1, 4, 5], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        5 * accesses[1].view.numel() as u64
    }
}
