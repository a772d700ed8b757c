//! Embedding of tokens and positions, whole or one vocabulary shard.

use super::{
    Accumulate, Kernel, Work,
    accumulate::Old,
    check::Check,
    cut::{Cut, PIECE_BYTES},
};
use crate::{Access, DType, Error, Op, Site, View};

/// Which ids are valid and which of them a table holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vocab {
    /// Ids are `0..size`; any other is an error.
    pub size: usize,
    /// Id of the table's first row. Ids outside the table contribute zero.
    pub start: usize,
}

impl Vocab {
    /// A table that holds the whole vocabulary, padding rows behind it allowed.
    pub const fn whole(size: usize) -> Vocab {
        Vocab { size, start: 0 }
    }
}

/// Positions are learned: row `i` of the ids is position `i % seq_len`.
#[derive(Clone, Copy, Debug)]
pub struct Positions<'a> {
    /// `[at least seq_len, cols]`; cut it by rows to start at a later position.
    pub table: &'a View,
    /// Length of one sequence.
    pub seq_len: usize,
}

/// y = table\[ids\] (+ positions), f32 or bf16; ids i32.
///
/// Cut by columns, so that an id out of range is told by its position.
#[derive(Clone, Copy, Debug)]
pub struct Embedding<'a> {
    /// `[rows]`, contiguous.
    pub ids: &'a View,
    /// `[rows of the table, cols]`.
    pub table: &'a View,
    /// Which ids the table holds.
    pub vocab: Vocab,
    /// Added if given. With vocabulary shards only one rank may give it.
    pub positions: Option<Positions<'a>>,
    /// `[rows, cols]`, written.
    pub y: &'a View,
}

impl Embedding<'_> {
    /// Accesses: ids, table, y, then the position table. An id outside the vocabulary fails when it runs.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`], [`Error::Strided`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("embedding", site);
        let (ids, table, y) = (("ids", self.ids), ("table", self.table), ("y", self.y));
        check.dtype(DType::I32, &[ids])?;
        check.values(&[table, y])?;
        check.per_row(y, &[ids])?;
        check.shapes(self.table.cols() == self.y.cols(), table, y, "both must have the same columns")?;
        check_vocab(&check, self.vocab)?;
        let mut accesses = vec![Access::read(self.ids), Access::read(self.table), Access::write(self.y)];
        if let Some(Positions { table, seq_len }) = self.positions {
            check.dtype(self.y.dtype(), &[("positions", table)])?;
            check.shapes(table.cols() == self.y.cols(), ("positions", table), y, "both must have the same columns")?;
            check.sequences(y, seq_len)?;
            let rows = table.row_count() as f64;
            check.setting(seq_len as f64 <= rows, "seq_len", seq_len as f64, "the position table has fewer rows")?;
            accesses.push(Access::read(table));
        }
        let seq_len = self.positions.map(|p| p.seq_len);
        Ok(check.launch(accesses, Kernel::Embedding(EmbeddingSpec { vocab: self.vocab, seq_len })))
    }
}

fn check_vocab(check: &Check, vocab: Vocab) -> Result<(), Error> {
    check.setting(vocab.size <= i32::MAX as usize, "vocab.size", vocab.size as f64, "ids are i32")?;
    check.setting(vocab.start <= vocab.size, "vocab.start", vocab.start as f64, "it must not be past vocab.size")
}

/// Settings of [`Kernel::Embedding`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EmbeddingSpec {
    pub(crate) vocab: Vocab,
    pub(crate) seq_len: Option<usize>,
}

impl EmbeddingSpec {
    fn cut(&self, accesses: &[Access]) -> Cut {
        let y = &accesses[2].view;
        Cut::cols(y.cols(), y.row_count() * if self.seq_len.is_some() { 12 } else { 8 }, PIECE_BYTES)
    }
}

impl Work for EmbeddingSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        self.cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        self.cut(accesses).accesses(accesses, &[1, 2, 3], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        self.seq_len.map_or(0, |_| accesses[2].view.numel() as u64)
    }
}

/// dtable\[id\] += dy of each row with that id, in the order of rows; dy f32 or bf16, dtable f32.
/// Ids outside the table are left out.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingGrad<'a> {
    /// `[rows]`, contiguous.
    pub ids: &'a View,
    /// `[rows, cols]`.
    pub dy: &'a View,
    /// Which ids the table holds.
    pub vocab: Vocab,
    /// `[rows of the table, cols]`.
    pub dtable: &'a View,
    /// What happens to the old values, also of rows that no id names.
    pub into: Accumulate<'a>,
}

impl EmbeddingGrad<'_> {
    /// Accesses: ids, dy, dtable, then keep. An id outside the vocabulary fails when it runs.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`], [`Error::Strided`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("embedding_grad", site);
        let (ids, dy, dtable) = (("ids", self.ids), ("dy", self.dy), ("dtable", self.dtable));
        check.dtype(DType::I32, &[ids])?;
        check.real(&[dy])?;
        check.dtype(DType::F32, &[dtable])?;
        check.per_row(dy, &[ids])?;
        check.shapes(self.dtable.cols() == self.dy.cols(), dtable, dy, "both must have the same columns")?;
        check_vocab(&check, self.vocab)?;
        let mut accesses = vec![Access::read(self.ids), Access::read(self.dy)];
        let old = self.into.push(&check, self.dtable, &mut accesses)?;
        Ok(check.launch(accesses, Kernel::EmbeddingGrad(EmbeddingGradSpec { vocab: self.vocab, old })))
    }
}

/// Settings of [`Kernel::EmbeddingGrad`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EmbeddingGradSpec {
    pub(crate) vocab: Vocab,
    pub(crate) old: Old,
}

impl EmbeddingGradSpec {
    fn cut(&self, accesses: &[Access]) -> Cut {
        let (dy, dtable) = (&accesses[1].view, &accesses[2].view);
        let table_cost = if self.old == Old::Keep { 8 } else { 4 };
        Cut::cols(dy.cols(), dy.row_count() * 12 + dtable.row_count() * table_cost, PIECE_BYTES)
    }
}

impl Work for EmbeddingGradSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        self.cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        self.cut(accesses).accesses(accesses, &[1, 2], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        accesses[1].view.numel() as u64
    }
}

/// dtable\[t\] = Σ dy over the rows of position t (row `i` is position `i % seq_len`), in order; dy f32 or bf16, dtable
/// f32.
#[derive(Clone, Copy, Debug)]
pub struct PositionGrad<'a> {
    /// `[rows, cols]`.
    pub dy: &'a View,
    /// Length of one sequence; divides the rows.
    pub seq_len: usize,
    /// `[at least seq_len, cols]`.
    pub dtable: &'a View,
    /// What happens to the old values, also of positions past seq_len.
    pub into: Accumulate<'a>,
}

impl PositionGrad<'_> {
    /// Accesses: dy, dtable, then keep.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("position_grad", site);
        let (dy, dtable) = (("dy", self.dy), ("dtable", self.dtable));
        check.real(&[dy])?;
        check.dtype(DType::F32, &[dtable])?;
        check.shapes(self.dtable.cols() == self.dy.cols(), dtable, dy, "both must have the same columns")?;
        check.sequences(dy, self.seq_len)?;
        let seq_len = self.seq_len as f64;
        let rows = self.dtable.row_count() as f64;
        check.setting(seq_len <= rows, "seq_len", seq_len, "the position table has fewer rows")?;
        let mut accesses = vec![Access::read(self.dy)];
        let old = self.into.push(&check, self.dtable, &mut accesses)?;
        Ok(check.launch(accesses, Kernel::PositionGrad(PositionGradSpec { seq_len: self.seq_len, old })))
    }
}

/// Settings of [`Kernel::PositionGrad`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PositionGradSpec {
    pub(crate) seq_len: usize,
    pub(crate) old: Old,
}

impl PositionGradSpec {
    fn cut(accesses: &[Access]) -> Cut {
        let (dy, dtable) = (&accesses[0].view, &accesses[1].view);
        Cut::cols(dy.cols(), (dy.row_count() + dtable.row_count()) * 4, PIECE_BYTES)
    }
}

impl Work for PositionGradSpec {
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
