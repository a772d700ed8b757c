//! Causal attention, grouped-query too, without a matrix of sequence length squared.

use super::{
    Kernel, Work,
    check::Check,
    cut::{cols_of, rows_of},
};
use crate::{Access, DType, Error, Op, Site, View};

/// Operations of one tile: about 50 µs.
const PIECE_FLOPS: usize = 1 << 23;

/// o = softmax(scale · q·kᵀ, causal) · v for each sequence and head, f32 or bf16.
///
/// Rows are `batch · seq_len` tokens, sequence by sequence; columns are heads side by side, so q, k and v are
/// usually columns of one interleaved tensor. k and v may have fewer heads: query head `h` uses head
/// `h / (heads / kv_heads)`.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// `[batch · seq_len, heads · head_dim]`.
    pub q: &'a View,
    /// `[batch · seq_len, kv_heads · head_dim]`.
    pub k: &'a View,
    /// As k.
    pub v: &'a View,
    /// As q, written.
    pub o: &'a View,
    /// `[batch, heads, seq_len]`, f32, contiguous, written: log of the sum of exponentials, for the backward pass.
    pub lse: &'a View,
    /// Columns of one head.
    pub head_dim: usize,
    /// Rows of one sequence.
    pub seq_len: usize,
    /// Usually 1 / √head_dim.
    pub scale: f32,
}

impl Attention<'_> {
    /// Accesses: q, k, v, o, lse.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`], [`Error::Strided`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("attention", site);
        let spec = AttentionSpec { head_dim: self.head_dim, seq_len: self.seq_len, scale: self.scale };
        spec.check(&check, [self.q, self.k, self.v, self.lse])?;
        check.values(&[("q", self.q), ("o", self.o)])?;
        check.same_sizes(&[("q", self.q), ("o", self.o)])?;
        let mut accesses = [self.q, self.k, self.v].map(Access::read).to_vec();
        accesses.extend([self.o, self.lse].map(Access::write));
        Ok(check.launch(accesses, Kernel::Attention(spec)))
    }
}

/// Settings of [`Kernel::Attention`] and [`Kernel::AttentionBackward`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AttentionSpec {
    pub(crate) head_dim: usize,
    pub(crate) seq_len: usize,
    pub(crate) scale: f32,
}

impl AttentionSpec {
    fn check(&self, check: &Check, [q, k, v, lse]: [&View; 4]) -> Result<(), Error> {
        let (q, k, v, lse) = (("q", q), ("k", k), ("v", v), ("lse", lse));
        check.values(&[q, k, v])?;
        check.dtype(DType::F32, &[lse])?;
        let head_dim = self.head_dim;
        let divides = |view: &View| head_dim > 0 && view.cols() > 0 && view.cols().is_multiple_of(head_dim);
        let whole = divides(q.1) && divides(k.1);
        check.setting(whole, "head_dim", head_dim as f64, "it must divide the columns of q and of k")?;
        check.shapes(q.1.row_count() == k.1.row_count(), q, k, "both must have the same rows")?;
        let groups = q.1.cols().is_multiple_of(k.1.cols());
        check.shapes(groups, q, k, "heads of k must divide heads of q")?;
        check.same_sizes(&[k, v])?;
        check.sequences(q, self.seq_len)?;
        let holds = lse.1.numel() * head_dim == q.1.numel();
        check.shapes(holds, q, lse, "lse must have one entry for each row and head of q: [batch, heads, seq_len]")?;
        check.contiguous(&[lse])
    }

    /// Query heads and key heads of the views.
    pub(crate) fn heads(&self, q: usize, k: usize) -> (usize, usize) {
        (q / self.head_dim, k / self.head_dim)
    }

    /// Key heads and sequences of a tile: one key head where that is enough work, else more of one sequence, else
    /// more sequences.
    fn piece(&self, accesses: &[Access], products: usize) -> Piece {
        let (q, k) = (&accesses[0].view, &accesses[1].view);
        let (heads, kv_heads) = self.heads(q.cols(), k.cols());
        let batch = q.row_count() / self.seq_len;
        // Half of each product is masked away.
        let one = products * self.seq_len * self.seq_len * self.head_dim * (heads / kv_heads);
        let want = PIECE_FLOPS.div_ceil(one.max(1));
        let pick = (1..=kv_heads).find(|n| kv_heads.is_multiple_of(*n) && *n >= want).unwrap_or(kv_heads);
        let sequences = if pick < kv_heads { 1 } else { want.div_ceil(kv_heads).clamp(1, batch.max(1)) };
        Piece { heads, kv_heads, batch, kv_each: pick, sequences }
    }

    fn tile(
        &self,
        accesses: &[Access],
        products: usize,
        query_like: &[usize],
        rows: &[usize],
        tile: usize,
    ) -> Vec<Access> {
        let p = self.piece(accesses, products);
        let across = p.kv_heads / p.kv_each;
        let (b0, kv0) = (tile / across * p.sequences, tile % across * p.kv_each);
        let b1 = (b0 + p.sequences).min(p.batch);
        let group = p.heads / p.kv_heads;
        let cut = |at: usize, view: &View| {
            if rows.contains(&at) {
                // [batch, heads, seq_len]: either all heads of some sequences or some heads of one.
                let entry = |b: usize, kv: usize| (b * p.heads + kv * group) * self.seq_len;
                let end = if across > 1 { entry(b0, kv0 + p.kv_each) } else { entry(b1, 0) };
                return view.flat(entry(b0, kv0)..end).expect("BUG: checked to be contiguous");
            }
            let width = if query_like.contains(&at) { self.head_dim * group } else { self.head_dim };
            cols_of(&rows_of(view, b0 * self.seq_len..b1 * self.seq_len), kv0 * width..(kv0 + p.kv_each) * width)
        };
        accesses.iter().enumerate().map(|(at, x)| Access { view: cut(at, &x.view), mode: x.mode }).collect()
    }

    /// Multiply-adds of `products` causal products, two operations each.
    fn flops(&self, accesses: &[Access], products: usize) -> u64 {
        let q = &accesses[0].view;
        products as u64 * q.numel() as u64 * (self.seq_len as u64 + 1)
    }
}

/// How attention is cut.
struct Piece {
    heads: usize,
    kv_heads: usize,
    batch: usize,
    kv_each: usize,
    sequences: usize,
}

impl Piece {
    fn count(&self) -> usize {
        (self.batch.div_ceil(self.sequences) * (self.kv_heads / self.kv_each)).max(1)
    }
}

impl AttentionSpec {
    const FORWARD_PRODUCTS: usize = 2;
    const BACKWARD_PRODUCTS: usize = 5;

    pub(crate) fn forward(&self) -> AttentionWork<'_> {
        AttentionWork { spec: self, products: Self::FORWARD_PRODUCTS, query_like: &[0, 3], rows: &[4] }
    }

    pub(crate) fn backward(&self) -> AttentionWork<'_> {
        AttentionWork { spec: self, products: Self::BACKWARD_PRODUCTS, query_like: &[0, 3, 4, 6], rows: &[5] }
    }
}

/// One of the two passes.
pub(crate) struct AttentionWork<'a> {
    spec: &'a AttentionSpec,
    products: usize,
    query_like: &'static [usize],
    rows: &'static [usize],
}

impl Work for AttentionWork<'_> {
    fn tiles(&self, accesses: &[Access]) -> usize {
        self.spec.piece(accesses, self.products).count()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        self.spec.tile(accesses, self.products, self.query_like, self.rows, tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        self.spec.flops(accesses, self.products)
    }
}

/// Gradients of [`Attention`]; probabilities are computed again from lse.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBackward<'a> {
    /// As in the forward pass.
    pub q: &'a View,
    /// As in the forward pass.
    pub k: &'a View,
    /// As in the forward pass.
    pub v: &'a View,
    /// Result of the forward pass.
    pub o: &'a View,
    /// Gradient of o.
    pub d_o: &'a View,
    /// From the forward pass.
    pub lse: &'a View,
    /// As q, written.
    pub dq: &'a View,
    /// As k, written.
    pub dk: &'a View,
    /// As v, written.
    pub dv: &'a View,
    /// Columns of one head.
    pub head_dim: usize,
    /// Rows of one sequence.
    pub seq_len: usize,
    /// As in the forward pass.
    pub scale: f32,
}

impl AttentionBackward<'_> {
    /// Accesses: q, k, v, o, d_o, lse, dq, dk, dv.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`], [`Error::Strided`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("attention_backward", site);
        let spec = AttentionSpec { head_dim: self.head_dim, seq_len: self.seq_len, scale: self.scale };
        spec.check(&check, [self.q, self.k, self.v, self.lse])?;
        let query_like = [("o", self.o), ("d_o", self.d_o), ("dq", self.dq)];
        let key_like = [("dk", self.dk), ("dv", self.dv)];
        check.dtype(self.q.dtype(), &query_like)?;
        check.dtype(self.q.dtype(), &key_like)?;
        check.same_sizes(&[("q", self.q), query_like[0], query_like[1], query_like[2]])?;
        check.same_sizes(&[("k", self.k), key_like[0], key_like[1]])?;
        let mut accesses = [self.q, self.k, self.v, self.o, self.d_o, self.lse].map(Access::read).to_vec();
        accesses.extend([self.dq, self.dk, self.dv].map(Access::write));
        Ok(check.launch(accesses, Kernel::AttentionBackward(spec)))
    }
}
