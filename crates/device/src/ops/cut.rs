//! How a large operation is cut: along rows or columns, by shape only.

use std::ops::Range;

use crate::{Access, View};

/// Memory that one piece of a streaming kernel moves: 20 to 50 µs, below which help costs more than it gives.
pub(crate) const PIECE_BYTES: usize = 1 << 21;

/// Floating-point operations of one piece of a product: about 70 µs.
pub(crate) const PIECE_FLOPS: usize = 1 << 24;

/// Direction of a cut through views taken as matrices of [`View::row_count`] rows and [`View::cols`] columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Axis {
    Rows,
    Cols,
}

/// Equal pieces of `0..len`, `step` each, the last one shorter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cut {
    pub(crate) axis: Axis,
    len: usize,
    step: usize,
}

impl Cut {
    /// Pieces of at least `least` entries, a multiple of `grain`, with `least` rounded up to it.
    pub(crate) fn at_least(axis: Axis, len: usize, least: usize, grain: usize) -> Cut {
        let least = least.max(1).next_multiple_of(grain);
        let pieces = (len / least).max(1);
        Cut { axis, len, step: len.div_ceil(pieces).max(1).next_multiple_of(grain) }
    }

    /// Rows of `cost` each (bytes or operations), `piece` to a piece.
    pub(crate) fn rows(rows: usize, cost: usize, piece: usize) -> Cut {
        Cut::at_least(Axis::Rows, rows, piece.div_ceil(cost.max(1)), 1)
    }

    /// Columns of `cost` each, `piece` to a piece; never narrower than 3 KiB of f32, because memory is read in runs.
    pub(crate) fn cols(cols: usize, cost: usize, piece: usize) -> Cut {
        Cut::at_least(Axis::Cols, cols, piece.div_ceil(cost.max(1)).max(768), 64)
    }

    /// An element-wise kernel over `rows` by `cols`, `cost` bytes an element: by rows where there are enough of them.
    pub(crate) fn elements(rows: usize, cols: usize, cost: usize) -> Cut {
        if rows >= cols.min(64) || rows * cols * cost < 2 * PIECE_BYTES {
            Cut::rows(rows, cols * cost, PIECE_BYTES)
        } else {
            Cut::cols(cols, rows * cost, PIECE_BYTES)
        }
    }

    /// How many pieces.
    pub(crate) fn pieces(&self) -> usize {
        self.len.div_ceil(self.step).max(1)
    }

    /// Entries of piece `i`.
    pub(crate) fn range(&self, i: usize) -> Range<usize> {
        (i * self.step).min(self.len)..((i + 1) * self.step).min(self.len)
    }

    /// Piece `i` of a view that the cut runs through.
    pub(crate) fn of(&self, view: &View, i: usize) -> View {
        match self.axis {
            Axis::Rows => rows_of(view, self.range(i)),
            Axis::Cols => cols_of(view, self.range(i)),
        }
    }

    /// Piece `i` of each access that `cut` names by position; the others whole.
    pub(crate) fn accesses(&self, accesses: &[Access], cut: &[usize], i: usize) -> Vec<Access> {
        let piece = |(at, access): (usize, &Access)| Access {
            view: if cut.contains(&at) { self.of(&access.view, i) } else { access.view.clone() },
            mode: access.mode,
        };
        accesses.iter().enumerate().map(piece).collect()
    }
}

/// Rows of a view taken as a matrix.
pub(crate) fn rows_of(view: &View, range: Range<usize>) -> View {
    let matrix = view.reshape(&[view.row_count(), view.cols()]).expect("BUG: outer dimensions always regroup");
    matrix.rows(range).expect("BUG: a piece lies inside its view")
}

/// Columns of a view taken as a matrix.
pub(crate) fn cols_of(view: &View, range: Range<usize>) -> View {
    view.columns(range).expect("BUG: a piece lies inside its view")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        DType, Fresh,
        ops::{
            Accumulate, Add, Attention, BiasGrad, Finish, Gemm, LayerNorm, Trans,
            trial::{assert_pieces_partition, pieces},
        },
        testing::scratch,
    };

    fn zeros(dims: &[usize]) -> View {
        scratch("x", dims, DType::F32, Fresh::Zeroed)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 24 }))]

        #[test]
        fn pieces_of_products_are_disjoint_and_cover(m in 1usize..2500, n in 1usize..2500, k in 1usize..300, t in 0usize..4) {
            let trans = [Trans::Nn, Trans::Nt, Trans::Tn, Trans::Tt][t];
            let a = if trans.a() { zeros(&[k, m]) } else { zeros(&[m, k]) };
            let b = if trans.b() { zeros(&[n, k]) } else { zeros(&[k, n]) };
            let (c, bias, pre) = (zeros(&[m, n]), zeros(&[n]), zeros(&[m, n]));
            let finish = Finish::BiasGelu { bias: &bias, pre: &pre };
            let op = Gemm { a: &a, b: &b, c: &c, trans, finish }.op("t").unwrap();
            assert_pieces_partition(&op);
            prop_assert!(m * n * k < 1 << 26 || m.max(n) < 400 || pieces(&op).len() > 1);
        }

        #[test]
        fn pieces_of_attention_are_disjoint_and_cover(
            batch in 1usize..20, kv in 1usize..7, group in 1usize..4, seq_len in 1usize..300, wide in any::<bool>(),
        ) {
            let (head_dim, heads) = (if wide { 64 } else { 6 }, kv * group);
            let (rows, kv_cols) = (batch * seq_len, kv * head_dim);
            let qkv = zeros(&[rows, heads * head_dim + 2 * kv_cols]);
            let start = heads * head_dim;
            let q = qkv.columns(0..start).unwrap();
            let k = qkv.columns(start..start + kv_cols).unwrap();
            let v = qkv.columns(start + kv_cols..start + 2 * kv_cols).unwrap();
            let (o, lse) = (zeros(&[rows, start]), zeros(&[batch, heads, seq_len]));
            let request = Attention { q: &q, k: &k, v: &v, o: &o, lse: &lse, head_dim, seq_len, scale: 1.0 };
            assert_pieces_partition(&request.op("t").unwrap());
        }

        #[test]
        fn pieces_of_streaming_kernels_are_disjoint_and_cover(rows in 1usize..2000, cols in 1usize..2000) {
            let (x, y, z) = (zeros(&[rows, cols]), zeros(&[rows, cols]), zeros(&[rows, cols]));
            let (weight, mean, rstd) = (zeros(&[cols]), zeros(&[rows]), zeros(&[rows]));
            let dbias = zeros(&[cols]);
            let (weight, mean, rstd) = (&weight, &mean, &rstd);
            let norm = LayerNorm { x: &x, residual: None, weight, bias: weight, y: &y, mean, rstd, eps: 1e-5 };
            assert_pieces_partition(&norm.op("t").unwrap());
            assert_pieces_partition(&Add { a: &x, b: &z, y: &y }.op("t").unwrap());
            let into = Accumulate::Add;
            assert_pieces_partition(&BiasGrad { dy: &x, dbias: &dbias, into }.op("t").unwrap());
        }
    }

    proptest! {
        #[test]
        fn pieces_cover_the_length_once_and_are_large_enough(len in 0usize..5000, least in 1usize..700, grain in 1usize..70) {
            let cut = Cut::at_least(Axis::Rows, len, least, grain);
            let mut next = 0;
            for i in 0..cut.pieces() {
                let r = cut.range(i);
                prop_assert_eq!(r.start, next);
                prop_assert!(r.start.is_multiple_of(grain));
                next = r.end;
            }
            prop_assert_eq!(next, len);
            if cut.pieces() > 1 {
                prop_assert!(cut.range(0).len() >= least);
            }
        }
    }
}
