//! Softmax cross-entropy fused with its gradient, whole or one vocabulary shard.

use super::{
    Factor, Kernel, Vocab, Work,
    accumulate::By,
    activation::Place,
    check::Check,
    cut::{Cut, PIECE_BYTES},
    norm::per_row_tile,
};
use crate::{Access, DType, Error, Op, Site, View};

/// A target that counts nothing: its loss and its row of the gradient are zero.
pub const IGNORE: i32 = -1;

/// losses = log Σ exp(logits) − logits\[target\] for each row and dlogits = scale · (softmax − onehot).
///
/// Logits and their gradient are f32 or bf16, losses f32.
///
/// Reads logits once from memory; a target that is neither an id nor [`IGNORE`] fails when it runs.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// `[rows, vocabulary]`.
    pub logits: &'a View,
    /// `[rows]`, i32, contiguous.
    pub targets: &'a View,
    /// `[rows]`, contiguous, written, not scaled.
    pub losses: &'a View,
    /// As logits, written. May be the same view as logits.
    pub dlogits: &'a View,
    /// Of the gradient only: usually one over the number of tokens.
    pub scale: Factor<'a>,
}

impl CrossEntropy<'_> {
    /// Accesses: dlogits (update if logits is the same view), targets, losses, logits if it is another, the scale.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`] or [`Error::Strided`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("cross_entropy", site);
        let logits = ("logits", self.logits);
        check_rows(&check, logits, self.targets, &[("losses", self.losses)])?;
        check.dtype(self.logits.dtype(), &[("dlogits", self.dlogits)])?;
        check.same_sizes(&[logits, ("dlogits", self.dlogits)])?;
        let place = Place::of(self.logits, self.dlogits);
        let mut accesses = vec![place.output(self.dlogits), Access::read(self.targets), Access::write(self.losses)];
        place.push_input(self.logits, &mut accesses);
        let scale = self.scale.push(&check, &mut accesses)?;
        Ok(check.launch(accesses, Kernel::CrossEntropy(CrossEntropySpec { place, scale })))
    }
}

fn check_rows(
    check: &Check,
    logits: (&'static str, &View),
    targets: &View,
    per_row: &[(&'static str, &View)],
) -> Result<(), Error> {
    check.real(&[logits])?;
    check.dtype(DType::I32, &[("targets", targets)])?;
    check.dtype(DType::F32, per_row)?;
    check.per_row(logits, &[("targets", targets)])?;
    check.per_row(logits, per_row)
}

/// Settings of [`Kernel::CrossEntropy`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CrossEntropySpec {
    pub(crate) place: Place,
    pub(crate) scale: By,
}

/// Rows of logits: their exponentials cost about as much as the memory they move.
fn cut(accesses: &[Access]) -> Cut {
    let logits = &accesses[0].view;
    Cut::rows(logits.row_count(), logits.cols() * 16, PIECE_BYTES)
}

/// Targets (access 1) are handed out from the first one to the tile's last, so that errors can tell positions.
fn row_tile(accesses: &[Access], matrices: &[usize], vectors: &[usize], tile: usize) -> Vec<Access> {
    let mut tiles = per_row_tile(cut(accesses), accesses, matrices, vectors, tile);
    let end = cut(accesses).range(tile).end;
    tiles[1].view = accesses[1].view.flat(0..end).expect("BUG: checked to be contiguous, one entry a row");
    tiles
}

impl Work for CrossEntropySpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        let matrices: &[usize] = if self.place == Place::Apart { &[0, 3] } else { &[0] };
        row_tile(accesses, matrices, &[2], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        5 * accesses[0].view.numel() as u64
    }
}

/// First half over one vocabulary shard: what the ranks that share a row must combine.
///
/// Then all-reduce a copy of `max` with Max, [`VocabRescale`] the sums to it, all-reduce sum and target with Sum,
/// and [`VocabFinish`].
#[derive(Clone, Copy, Debug)]
pub struct VocabPartials<'a> {
    /// `[rows, ids of the shard]`.
    pub logits: &'a View,
    /// `[rows]`, i32, contiguous, ids of the whole vocabulary or [`IGNORE`].
    pub targets: &'a View,
    /// The shard's place.
    pub vocab: Vocab,
    /// `[rows]`, contiguous, written: the shard's largest logit.
    pub max: &'a View,
    /// `[rows]`, contiguous, written: Σ exp(logits − max).
    pub sum: &'a View,
    /// `[rows]`, contiguous, written: the target's logit, 0 where the shard does not hold it.
    pub target: &'a View,
}

impl VocabPartials<'_> {
    /// Accesses: logits, targets, max, sum, target.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`], [`Error::Strided`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("vocab_partials", site);
        let logits = ("logits", self.logits);
        let rows = [("max", self.max), ("sum", self.sum), ("target", self.target)];
        check_rows(&check, logits, self.targets, &rows)?;
        check_shard(&check, self.logits, self.vocab)?;
        let mut accesses = vec![Access::read(self.logits), Access::read(self.targets)];
        accesses.extend([self.max, self.sum, self.target].map(Access::write));
        Ok(check.launch(accesses, Kernel::VocabPartials(VocabPartialsSpec { vocab: self.vocab })))
    }
}

fn check_shard(check: &Check, logits: &View, vocab: Vocab) -> Result<(), Error> {
    let fits = vocab.start + logits.cols() <= vocab.size;
    check.setting(fits, "vocab.start", vocab.start as f64, "the shard's columns must end inside vocab.size")
}

/// Settings of [`Kernel::VocabPartials`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VocabPartialsSpec {
    pub(crate) vocab: Vocab,
}

impl Work for VocabPartialsSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        row_tile(accesses, &[0], &[2, 3, 4], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        4 * accesses[0].view.numel() as u64
    }
}

/// sum ·= exp(local − global): brings a shard's sums to the common maximum.
#[derive(Clone, Copy, Debug)]
pub struct VocabRescale<'a> {
    /// `[rows]`, contiguous: the shard's maximum.
    pub local: &'a View,
    /// `[rows]`, contiguous: the maximum over all shards.
    pub global: &'a View,
    /// `[rows]`, contiguous, updated.
    pub sum: &'a View,
}

impl VocabRescale<'_> {
    /// Accesses: local, global, sum.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`] or [`Error::Strided`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("vocab_rescale", site);
        let tensors = [("local", self.local), ("global", self.global), ("sum", self.sum)];
        check.dtype(DType::F32, &tensors)?;
        check.same_sizes(&tensors)?;
        check.contiguous(&tensors)?;
        let accesses = vec![Access::read(self.local), Access::read(self.global), Access::update(self.sum)];
        Ok(check.launch(accesses, Kernel::VocabRescale(VocabRescaleSpec)))
    }
}

/// Settings of [`Kernel::VocabRescale`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VocabRescaleSpec;

impl Work for VocabRescaleSpec {
    fn flops(&self, accesses: &[Access]) -> u64 {
        3 * accesses[0].view.numel() as u64
    }
}

/// Second half over one vocabulary shard: losses (equal on all ranks) and the shard's columns of the gradient.
#[derive(Clone, Copy, Debug)]
pub struct VocabFinish<'a> {
    /// `[rows, ids of the shard]`.
    pub logits: &'a View,
    /// `[rows]`, i32, contiguous, ids of the whole vocabulary or [`IGNORE`].
    pub targets: &'a View,
    /// The shard's place.
    pub vocab: Vocab,
    /// `[rows]`, contiguous, combined.
    pub max: &'a View,
    /// `[rows]`, contiguous, combined.
    pub sum: &'a View,
    /// `[rows]`, contiguous, combined.
    pub target: &'a View,
    /// `[rows]`, contiguous, written, not scaled.
    pub losses: &'a View,
    /// As logits, written. May be the same view as logits.
    pub dlogits: &'a View,
    /// Of the gradient only.
    pub scale: Factor<'a>,
}

impl VocabFinish<'_> {
    /// Accesses: dlogits (update if logits is the same view), targets, max, sum, target, losses, logits if it is
    /// another, the scale.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`], [`Error::Strided`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("vocab_finish", site);
        let logits = ("logits", self.logits);
        let rows = [("max", self.max), ("sum", self.sum), ("target", self.target), ("losses", self.losses)];
        check_rows(&check, logits, self.targets, &rows)?;
        check_shard(&check, self.logits, self.vocab)?;
        check.dtype(self.logits.dtype(), &[("dlogits", self.dlogits)])?;
        check.same_sizes(&[logits, ("dlogits", self.dlogits)])?;
        let place = Place::of(self.logits, self.dlogits);
        let mut accesses = vec![place.output(self.dlogits)];
        accesses.extend([self.targets, self.max, self.sum, self.target].map(Access::read));
        accesses.push(Access::write(self.losses));
        place.push_input(self.logits, &mut accesses);
        let scale = self.scale.push(&check, &mut accesses)?;
        Ok(check.launch(accesses, Kernel::VocabFinish(VocabFinishSpec { vocab: self.vocab, place, scale })))
    }
}

/// Settings of [`Kernel::VocabFinish`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct VocabFinishSpec {
    pub(crate) vocab: Vocab,
    pub(crate) place: Place,
    pub(crate) scale: By,
}

impl Work for VocabFinishSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        let matrices: &[usize] = if self.place == Place::Apart { &[0, 6] } else { &[0] };
        row_tile(accesses, matrices, &[2, 3, 4, 5], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        4 * accesses[0].view.numel() as u64
    }
}
