//! Which bytes of an allocation a view covers.

/// `rows` runs of `row_bytes` bytes, `pitch` bytes apart, the first at `start`. All in bytes but `rows`.
///
/// A contiguous region is one row. Rows never overlap: `pitch >= row_bytes`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Region {
    /// First byte.
    pub start: usize,
    /// Bytes in a run.
    pub row_bytes: usize,
    /// Runs.
    pub rows: usize,
    /// From the start of one run to the start of the next.
    pub pitch: usize,
}

impl Region {
    /// `bytes` bytes without a gap.
    pub const fn contiguous(start: usize, bytes: usize) -> Region {
        Region { start, row_bytes: bytes, rows: 1, pitch: bytes }
    }

    /// One past the last byte; `start` when empty.
    pub const fn end(&self) -> usize {
        if self.is_empty() { self.start } else { self.start + (self.rows - 1) * self.pitch + self.row_bytes }
    }

    /// No byte is covered.
    pub const fn is_empty(&self) -> bool {
        self.rows == 0 || self.row_bytes == 0
    }

    /// At least one byte is in both. Exact for strided regions: columns of an interleaved matrix do not overlap.
    pub fn overlaps(&self, other: &Region) -> bool {
        if self.is_empty() || other.is_empty() || self.start >= other.end() || other.start >= self.end() {
            return false;
        }
        if self.rows == 1 {
            return other.touches(self.start, self.end());
        }
        if other.rows == 1 {
            return self.touches(other.start, other.end());
        }
        let (few, many) = if self.rows <= other.rows { (self, other) } else { (other, self) };
        (0..few.rows).any(|row| {
            let from = few.start + row * few.pitch;
            many.touches(from, from + few.row_bytes)
        })
    }

    /// Some row meets the bytes `from..to`.
    fn touches(&self, from: usize, to: usize) -> bool {
        if to <= self.start {
            return false;
        }
        // Of the rows that start before `to`, the last one ends last.
        let row = ((to - 1 - self.start) / self.pitch.max(1)).min(self.rows - 1);
        self.start + row * self.pitch + self.row_bytes > from
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(r: &Region) -> Vec<usize> {
        (0..r.rows).flat_map(|i| (r.start + i * r.pitch)..(r.start + i * r.pitch + r.row_bytes)).collect()
    }

    fn regions() -> impl Strategy<Value = Region> {
        (0usize..40, 0usize..6, 0usize..6, 0usize..8).prop_map(|(start, row_bytes, rows, gap)| Region {
            start,
            row_bytes,
            rows,
            pitch: row_bytes + gap,
        })
    }

    proptest! {
        #[test]
        fn overlap_is_exactly_a_shared_byte(a in regions(), b in regions()) {
            let shared = bytes(&a).iter().any(|x| bytes(&b).contains(x));
            prop_assert_eq!(a.overlaps(&b), shared);
            prop_assert_eq!(b.overlaps(&a), shared);
        }

        #[test]
        fn end_is_one_past_the_last_byte(a in regions()) {
            prop_assert_eq!(a.end(), bytes(&a).last().map_or(a.start, |x| x + 1));
        }
    }

    #[test]
    fn columns_of_an_interleaved_matrix_do_not_overlap() {
        let column = |i: usize| Region { start: i * 16, row_bytes: 16, rows: 100, pitch: 48 };
        assert!(!column(0).overlaps(&column(1)) && !column(1).overlaps(&column(2)));
        assert!(column(0).overlaps(&Region::contiguous(0, 4800)));
    }
}
