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

    /// Columns of `cost` each, `piece` to a piece; never narrower than 2 KiB of f32, because memory is read in runs.
    pub(crate) fn cols(cols: usize, cost: usize, piece: usize) -> Cut {
        Cut::at_least(Axis::Cols, cols, piece.div_ceil(cost.max(1)).max(512), 64)
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
