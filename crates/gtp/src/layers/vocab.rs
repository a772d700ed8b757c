//! Tables with a row for each token, cut over the vocabulary.

use device::{
    DType, Frame, Site, View,
    ops::{
        Accumulate, Cast, Embedding, EmbeddingGrad, Fill, Finish, Gemm, PositionGrad, Positions, Trans, Vocab as Ids,
    },
};
use pgroups::{Param, Weights};

use super::{LayerError, Region};

/// Rows of a vocabulary table, on all members of a tensor group together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VocabRows {
    /// Valid ids are `0..size`.
    pub size: usize,
    /// Rows of the undivided table, at least `size`. Cut over a group, it is padded to a multiple of its members.
    pub rows: usize,
}

/// What one member has of the vocabulary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VocabShard {
    /// All valid ids, and the one of this member's first row.
    pub(super) ids: Ids,
    /// Rows of its table, the same on every member.
    pub rows: usize,
    /// How many of them are of valid ids, the first ones: none where the table ends before this member's part.
    pub valid: usize,
}

impl VocabRows {
    /// The part of this rank.
    pub fn shard(self, region: &Region) -> VocabShard {
        self.part(region.place() as u32, region.size())
    }

    /// The part of the member at `place` of `members`.
    fn part(self, place: u32, members: u32) -> VocabShard {
        let rows = self.rows.div_ceil(members as usize);
        // Clipped: a part that is all padding begins where the valid ids end.
        let start = (place as usize * rows).min(self.size);
        VocabShard { ids: Ids { size: self.size, start }, rows, valid: rows.min(self.size - start) }
    }
}

impl VocabShard {
    /// The columns of `logits`, `[.., rows]`, that are of valid ids.
    pub(super) fn valid_of(&self, logits: &View) -> Result<View, LayerError> {
        Ok(logits.columns(0..self.valid)?)
    }

    /// The columns of padding, if there are some.
    pub(super) fn padding_of(&self, logits: &View) -> Result<Option<View>, LayerError> {
        Ok((self.valid < self.rows).then(|| logits.columns(self.valid..self.rows)).transpose()?)
    }
}

/// A table `[rows, columns]`, cut over the group by rows: tokens to activations, or activations to logits.
///
/// Rows of padding, and those past the valid ids, are no token's and have a gradient of 0. Products take them along, so
/// that sizes are those of the table; what they put into the columns of logits that are no id's is nobody's, and
/// [`cross_entropy`](super::cross_entropy) leaves a gradient of 0 there.
pub struct VocabTable {
    table: Param,
    vocab: VocabRows,
    site: Site,
}

/// Positions that are learned, whole on every rank of the group.
#[derive(Clone, Copy, Debug)]
pub struct LearnedPositions<'a> {
    /// `[at least seq_len, columns]`.
    pub table: &'a Param,
    /// Tokens in one sequence.
    pub seq_len: usize,
    /// Its place in traces and messages.
    pub site: &'a Site,
}

/// Rows of logits are a multiple of this apart.
const LOGITS_PITCH: usize = 64;

impl VocabTable {
    /// `site` is its place in traces and messages: a table that has two uses has two of them.
    pub fn new(table: &Param, vocab: VocabRows, site: &str) -> VocabTable {
        VocabTable { table: table.clone(), vocab, site: Site::from(site.to_owned()) }
    }

    /// table\[ids\], plus the positions' rows if they are given. `ids` is i32 and contiguous; the result has sizes
    /// `shape`, `[.., columns]`, or under a split this rank's rows of it. An id that is not valid fails when it runs.
    ///
    /// # Errors
    /// [`LayerError::UnevenRows`], [`LayerError::TableRows`]; of the device, the frame, the weights and the group.
    pub fn lookup(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        ids: &View,
        shape: &[usize],
        positions: Option<LearnedPositions<'_>>,
    ) -> Result<View, LayerError> {
        let region = Region::of(w);
        region.own_rows(ids.numel())?; // refused before anything is submitted
        let y = f.temp(shape, self.table.dtype())?;
        let on = f.stream().clone();
        let table = w.take(&self.table, &on)?;
        let vocab = self.check(&region, &table)?.ids;
        let taken = positions.map(|p| w.take(p.table, &on)).transpose()?;
        // What is the same on all members is added by one.
        let added = positions.zip(taken.as_ref()).filter(|_| region.place() == 0);
        let added = added.map(|(p, table)| Positions { table, seq_len: p.seq_len });
        on.launch(Embedding { ids, table: &table, vocab, positions: added, y: &y }.op(&self.site)?)?;
        w.give_back(&self.table, &on)?;
        positions.map_or(Ok(()), |p| w.give_back(p.table, &on))?;
        region.reduce(f, &y)
    }

    /// The gradients of [`VocabTable::lookup`], from dy over all rows: those of positions are complete, and the same on
    /// all members.
    ///
    /// # Errors
    /// Of the device and the weights.
    pub fn lookup_grad(
        &self,
        f: &Frame,
        w: &mut dyn Weights,
        ids: &View,
        dy: &View,
        positions: Option<LearnedPositions<'_>>,
    ) -> Result<(), LayerError> {
        let (vocab, on) = (self.vocab.shard(&Region::of(w)).ids, f.stream());
        let grad = w.grad(&self.table, on)?;
        let (dtable, into) = grad.target();
        on.launch(EmbeddingGrad { ids, dy, vocab, dtable, into }.op(&self.site)?)?;
        w.grad_done(&self.table, on)?;
        let Some(LearnedPositions { table, seq_len, site }) = positions else { return Ok(()) };
        let grad = w.grad(table, on)?;
        let (dtable, into) = grad.target();
        on.launch(PositionGrad { dy, seq_len, dtable, into }.op(site)?)?;
        Ok(w.grad_done(table, on)?)
    }

    /// x · tableᵀ over this rank's rows of the table: `[.., columns]`, all rows, to `[.., rows]`, of which the first
    /// columns are those of the valid ids.
    ///
    /// # Errors
    /// [`LayerError::TableRows`]; of the device, the frame and the weights.
    pub fn logits(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<View, LayerError> {
        let region = Region::of(w);
        let rows = self.vocab.shard(&region).rows;
        let (_, outer) = x.shape().split_last().unwrap_or((&0, &[]));
        // Rows apart by a multiple of what products like, whatever the table is.
        let width = rows.next_multiple_of(LOGITS_PITCH);
        let logits = f.temp(&[outer, &[width]].concat(), x.dtype())?.columns(0..rows)?;
        let on = f.stream();
        let table = w.take(&self.table, on)?;
        self.check(&region, &table)?;
        let finish = Finish::Into(Accumulate::Overwrite);
        on.launch(Gemm { a: x, b: &table, c: &logits, trans: Trans::Nt, finish }.op(&self.site)?)?;
        w.give_back(&self.table, on)?;
        Ok(logits)
    }

    /// This rank's part of dx, all rows: [`Region::reduce`] adds the parts. `dlogits` is 0 in the columns of padding.
    ///
    /// # Errors
    /// Of the device, the frame and the weights.
    pub fn logits_backward_input(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        dlogits: &View,
        dx: &View,
    ) -> Result<(), LayerError> {
        let on = f.stream();
        let table = w.take(&self.table, on)?;
        let finish = Finish::Into(Accumulate::Overwrite);
        on.launch(Gemm { a: dlogits, b: &table, c: dx, trans: Trans::Nn, finish }.op(&self.site)?)?;
        Ok(w.give_back(&self.table, on)?)
    }

    /// The table's gradient from that of the logits, over all rows of x. Where x is finite, rows of padding get 0, like
    /// any other contribution: a first one clears what is there.
    ///
    /// # Errors
    /// Of the device, the frame and the weights.
    pub fn logits_backward_weight(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        dlogits: &View,
        x: &View,
    ) -> Result<(), LayerError> {
        let grad = w.grad(&self.table, f.stream())?;
        let (dtable, into) = grad.target();
        let product = Gemm { a: dlogits, b: x, c: dtable, trans: Trans::Tn, finish: Finish::Into(into) };
        f.stream().launch(product.op(&self.site)?)?;
        Ok(w.grad_done(&self.table, f.stream())?)
    }

    /// What [`VocabTable::logits`] gave, of all members: `[rows, valid ids of all]`, f32, the same on every member.
    ///
    /// # Errors
    /// Of the device, the frame and the group.
    pub fn gather_logits(&self, f: &mut Frame, w: &dyn Weights, logits: &View) -> Result<View, LayerError> {
        let region = Region::of(w);
        let (count, on) = (logits.row_count(), f.stream().clone());
        let shard = self.vocab.shard(&region);
        let own_ids = shard.valid_of(logits)?;
        let Some(group) = region.group() else {
            if logits.dtype() == DType::F32 {
                return Ok(own_ids);
            }
            let all = f.temp(own_ids.shape(), DType::F32)?;
            on.launch(Cast { x: &own_ids, y: &all }.op(&self.site)?)?;
            return Ok(all);
        };
        let VocabShard { rows: part, valid, .. } = shard;
        // Members send equal sizes, so what they have not is sent as 0 and left out by the receiver.
        let own = f.temp(&[count, part], DType::F32)?;
        if valid > 0 {
            let own_ids = own_ids.reshape(&[count, valid])?;
            on.launch(Cast { x: &own_ids, y: &own.columns(0..valid)? }.op(&self.site)?)?;
        }
        if valid < part {
            on.launch(Fill { y: &own.columns(valid..part)?, value: 0.0 }.op(&self.site)?)?;
        }
        let parts = f.temp(&[group.size() as usize * count, part], DType::F32)?;
        group.all_gather(&on, &own, &parts)?;
        let all = f.temp(&[count, self.vocab.size], DType::F32)?;
        for member in 0..group.size() as usize {
            let columns = (member * part).min(self.vocab.size)..((member + 1) * part).min(self.vocab.size);
            if columns.is_empty() {
                break;
            }
            let x = parts.rows(member * count..(member + 1) * count)?.columns(0..columns.len())?;
            on.launch(Cast { x: &x, y: &all.columns(columns)? }.op(&self.site)?)?;
        }
        Ok(all)
    }

    fn check(&self, region: &Region, table: &View) -> Result<VocabShard, LayerError> {
        let shard = self.vocab.shard(region);
        let have = table.shape().first().copied().unwrap_or(0);
        if have != shard.rows {
            let (param, rows, size) = (self.table.name().to_owned(), self.vocab.rows, region.size());
            return Err(LayerError::TableRows { param, have, want: shard.rows, rows, size });
        }
        Ok(shard)
    }
}
