//! Views: typed, shaped pieces of an allocation.

use std::{fmt, ops::Range, sync::Arc};

use crate::{DType, Error, Region, Shape, device::DeviceInner, memory::Backing};

/// What memory is for; memory plans are summed by it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum MemoryKind {
    /// Parameters.
    Param,
    /// Gradients.
    Grad,
    /// Optimizer state.
    Optimizer,
    /// Activations and temporaries of planned frames.
    Arena,
    /// Tokens, scalars, read-back slots and all else.
    Other,
}

/// One piece of memory of one device. Its address never changes.
pub struct Allocation {
    pub(crate) rank: u32,
    /// Numbered per device from 0, in the order of allocation.
    pub(crate) id: u32,
    pub(crate) label: Arc<str>,
    pub(crate) bytes: usize,
    pub(crate) kind: MemoryKind,
    /// None on the `dry` driver.
    pub(crate) storage: Option<Backing>,
    /// Planned memory is reused in the order of one stream, and no other may touch it: number and name.
    pub(crate) only_stream: Option<(u32, String)>,
    /// The device, which need not live any more; ranks are not enough, because two machines can have the same.
    pub(crate) owner: Arc<()>,
}

/// Shape, element type and region of an allocation, which it keeps alive.
///
/// Strided views (columns of a matrix) have gaps between the rows of their last dimension; within a row elements
/// are adjacent. Cloning is cheap.
#[derive(Clone)]
pub struct View {
    alloc: Arc<Allocation>,
    region: Region,
    shape: Shape,
    dtype: DType,
}

impl View {
    pub(crate) fn whole(alloc: Arc<Allocation>, shape: Shape, dtype: DType) -> View {
        let region = Region::contiguous(0, shape.numel() * dtype.size_bytes());
        View { alloc, region, shape, dtype }
    }

    /// A contiguous view of `shape` at byte `start` of this view's allocation. Only planned memory is cut this way.
    pub(crate) fn carve(&self, start: usize, shape: Shape, dtype: DType) -> View {
        let region = Region::contiguous(start, shape.numel() * dtype.size_bytes());
        debug_assert!(region.end() <= self.alloc.bytes, "BUG: planned view ends past its arena");
        View { alloc: self.alloc.clone(), region, shape, dtype }
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        self.shape.dims()
    }

    /// The same sizes as a value.
    pub fn shape_value(&self) -> Shape {
        self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// Bytes that the view covers, gaps left out.
    pub fn bytes(&self) -> usize {
        self.numel() * self.dtype.size_bytes()
    }

    /// Size of the last dimension.
    pub fn cols(&self) -> usize {
        self.shape.cols()
    }

    /// All other dimensions multiplied.
    pub fn row_count(&self) -> usize {
        self.shape.rows()
    }

    /// Elements from the start of one row of the last dimension to the next.
    pub fn pitch(&self) -> usize {
        if self.region.rows == 1 { self.cols() } else { self.region.pitch / self.dtype.size_bytes() }
    }

    /// The bytes covered, relative to the allocation.
    pub fn region(&self) -> Region {
        self.region
    }

    /// No gaps between rows.
    pub fn is_contiguous(&self) -> bool {
        self.region.rows <= 1
    }

    /// Rank whose device owns the memory.
    pub fn rank(&self) -> u32 {
        self.alloc.rank
    }

    /// Number of the allocation on its device.
    pub fn allocation_id(&self) -> u32 {
        self.alloc.id
    }

    /// Label given when the memory was allocated.
    pub fn label(&self) -> &str {
        &self.alloc.label
    }

    pub(crate) fn shared_label(&self) -> &Arc<str> {
        &self.alloc.label
    }

    pub(crate) fn is_of(&self, device: &Arc<DeviceInner>) -> bool {
        Arc::ptr_eq(&self.alloc.owner, &device.identity)
    }

    pub(crate) fn allocation(&self) -> &Arc<Allocation> {
        &self.alloc
    }

    /// Where the first element is on its card, for calls of libraries that this crate does not make: they have to be
    /// ordered with its streams, and the view kept until they are over. None for memory of a host, and on `dry`.
    pub fn card_address(&self) -> Option<u64> {
        match self.alloc.storage.as_ref()? {
            Backing::Card(memory) => Some(memory.address() + self.region.start as u64),
            Backing::Host(_) => None,
        }
    }

    /// Both views are of the same allocation and share a byte.
    pub fn overlaps(&self, other: &View) -> bool {
        Arc::ptr_eq(&self.alloc, &other.alloc) && self.region.overlaps(&other.region)
    }

    /// Same memory, shape and type.
    pub fn same_as(&self, other: &View) -> bool {
        Arc::ptr_eq(&self.alloc, &other.alloc)
            && self.region == other.region
            && self.shape == other.shape
            && self.dtype == other.dtype
    }

    /// Entries `range` of the outermost dimension.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the range ends past the dimension or the view is a scalar.
    pub fn rows(&self, range: Range<usize>) -> Result<View, Error> {
        let dims = self.shape.dims();
        let have = dims.first().copied().unwrap_or(0);
        if dims.is_empty() || range.start > range.end || range.end > have {
            return Err(self.out_of_range("rows", &range, have));
        }
        if dims.len() == 1 {
            return Ok(self.cut_cols(range));
        }
        let inner = self.shape.numel().checked_div(have).unwrap_or(0);
        let mut kept = [0; Shape::MAX];
        kept[..dims.len()].copy_from_slice(dims);
        kept[0] = range.len();
        let shape = Shape::new(&kept[..dims.len()]).expect("BUG: as many dimensions as before");
        let size = self.dtype.size_bytes();
        let region = if self.is_contiguous() {
            Region::contiguous(self.region.start + range.start * inner * size, range.len() * inner * size)
        } else {
            let rows_each = inner / self.cols().max(1);
            Region {
                start: self.region.start + range.start * rows_each * self.region.pitch,
                rows: range.len() * rows_each,
                ..self.region
            }
            .normal()
        };
        Ok(View { alloc: self.alloc.clone(), region, shape, dtype: self.dtype })
    }

    /// Entries `range` of the innermost dimension: a strided view when there are several rows.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the range ends past the dimension or the view is a scalar.
    pub fn columns(&self, range: Range<usize>) -> Result<View, Error> {
        let have = self.shape.dims().last().copied().unwrap_or(0);
        if self.shape.dims().is_empty() || range.start > range.end || range.end > have {
            return Err(self.out_of_range("columns", &range, have));
        }
        Ok(self.cut_cols(range))
    }

    fn cut_cols(&self, range: Range<usize>) -> View {
        let size = self.dtype.size_bytes();
        let dims = self.shape.dims();
        let mut kept = [0; Shape::MAX];
        kept[..dims.len()].copy_from_slice(dims);
        kept[dims.len() - 1] = range.len();
        let shape = Shape::new(&kept[..dims.len()]).expect("BUG: as many dimensions as before");
        let region = Region {
            start: self.region.start + range.start * size,
            row_bytes: range.len() * size,
            rows: self.row_count(),
            pitch: self.pitch() * size,
        }
        .normal();
        View { alloc: self.alloc.clone(), region, shape, dtype: self.dtype }
    }

    /// Elements `range` of a contiguous view, as one dimension.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] past the end, [`Error::Strided`] if there are gaps.
    pub fn flat(&self, range: Range<usize>) -> Result<View, Error> {
        self.reshape(&[self.numel()])?.rows(range)
    }

    /// The same elements with other sizes. A strided view may only regroup its outer dimensions.
    ///
    /// # Errors
    /// [`Error::Reshape`] if the number of elements differs or there are more than [`Shape::MAX`] dimensions,
    /// [`Error::Strided`] if gaps would fall inside a row.
    pub fn reshape(&self, dims: &[usize]) -> Result<View, Error> {
        let shape = Shape::new(dims).filter(|s| s.numel() == self.numel()).ok_or_else(|| Error::Reshape {
            label: self.label().to_owned(),
            from: self.shape.dims().to_vec(),
            to: dims.to_vec(),
        })?;
        if !self.is_contiguous() && shape.cols() != self.cols() {
            return Err(Error::Strided { label: self.label().to_owned(), shape: self.shape.dims().to_vec() });
        }
        Ok(View { shape, ..self.clone() })
    }

    fn out_of_range(&self, what: &'static str, range: &Range<usize>, have: usize) -> Error {
        Error::OutOfRange {
            label: self.label().to_owned(),
            shape: self.shape.dims().to_vec(),
            what,
            range: range.clone(),
            have,
        }
    }
}

impl Region {
    /// One row where rows touch or there is but one, so that equal bytes compare equal.
    fn normal(self) -> Region {
        if self.rows == 1 || self.pitch == self.row_bytes || self.is_empty() {
            let bytes = self.rows * self.row_bytes;
            Region::contiguous(self.start, bytes)
        } else {
            self
        }
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}{}:{}", self.alloc.label, self.alloc.id, self.shape, self.dtype)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::{
        DType, Error, Fresh,
        testing::{get, holding, put, scratch},
    };

    #[test]
    fn columns_and_rows_pick_the_same_elements_as_indexing() {
        let values: Vec<i32> = (0..2 * 3 * 5).collect();
        let v = holding("m", &[2, 3, 5], &values);
        let got: Vec<i32> = get(&v.columns(1..3).unwrap().rows(1..2).unwrap());
        assert_eq!(got, [16, 17, 21, 22, 26, 27]);
        let got: Vec<i32> = get(&v.rows(1..2).unwrap().columns(1..3).unwrap());
        assert_eq!(got, [16, 17, 21, 22, 26, 27]);
    }

    #[test]
    fn a_strided_view_regroups_outer_dimensions_only() {
        let v = scratch("m", &[4, 6], DType::F32, Fresh::Zeroed).columns(2..5).unwrap();
        assert_eq!(v.reshape(&[2, 2, 3]).unwrap().rows(1..2).unwrap().region().start, 4 * (2 * 6 + 2));
        assert!(matches!(v.reshape(&[12]), Err(Error::Strided { .. })));
        assert!(matches!(v.reshape(&[4, 4]), Err(Error::Reshape { .. })));
    }

    #[test]
    fn a_piece_past_the_end_names_what_there_is() {
        let v = scratch("wte", &[4, 6], DType::F32, Fresh::Zeroed);
        assert_eq!(v.rows(2..5).unwrap_err().to_string(), "rows 2..5 of 'wte' with sizes [4, 6]: there are 4");
        assert_eq!(v.columns(6..7).unwrap_err().to_string(), "columns 6..7 of 'wte' with sizes [4, 6]: there are 6");
    }

    proptest! {
        #[test]
        fn a_cut_of_a_cut_is_where_indexing_says(b in 1usize..4, t in 1usize..4, d in 1usize..7, seed in 0usize..1000) {
            let values: Vec<i32> = (0..(b * t * d) as i32).collect();
            let v = holding("m", &[b, t, d], &values);
            let (c0, r0) = (seed % d, seed % b);
            let (c1, r1) = (c0 + 1 + seed % (d - c0), r0 + 1 + seed % (b - r0));
            let cut = v.columns(c0..c1).unwrap().rows(r0..r1).unwrap();
            let want: Vec<i32> = (r0..r1).flat_map(|i| (0..t).flat_map(move |j| (c0..c1).map(move |k| ((i * t + j) * d + k) as i32))).collect();
            prop_assert_eq!(get::<i32>(&cut), want.clone());
            let minus: Vec<i32> = want.iter().map(|x| -x).collect();
            put(&cut, &minus);
            let changed = get::<i32>(&v).iter().zip(&values).filter(|(a, b)| a != b).count();
            prop_assert_eq!(changed, want.iter().filter(|x| **x != 0).count());
        }
    }
}
