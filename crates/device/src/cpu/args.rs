//! The only way from an operation to memory: its declared accesses, each checked and each mutable one taken once.

use std::{cell::Cell, marker::PhantomData, ops::Range, ptr::NonNull, slice};

use thiserror::Error;

use crate::{Access, DType, Element, Mode};

/// An operation asked for an argument in a way it had not declared.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ArgError {
    /// No such argument.
    #[error("argument {index} asked, the operation declares {have}")]
    Index {
        /// Asked position.
        index: usize,
        /// Declared accesses.
        have: usize,
    },
    /// Declared with another element type.
    #[error("argument {index} is {declared}, the operation asks for {asked}")]
    DType {
        /// Position.
        index: usize,
        /// Type of the view.
        declared: DType,
        /// Type asked for.
        asked: DType,
    },
    /// Declared with another mode.
    #[error("argument {index} is declared {declared:?}, the operation asks to {asked}")]
    Mode {
        /// Position.
        index: usize,
        /// Declared mode.
        declared: Mode,
        /// What was asked.
        asked: &'static str,
    },
    /// There are gaps between rows.
    #[error("argument {index} has gaps between its rows; take it row by row")]
    Strided {
        /// Position.
        index: usize,
    },
    /// A mutable argument can be taken once.
    #[error("argument {index} was taken before; a mutable argument can be taken once")]
    Taken {
        /// Position.
        index: usize,
    },
}

/// Where the elements of an access lie on the host while it runs.
#[derive(Clone, Copy)]
pub(crate) struct Staged(pub(crate) NonNull<u8>);

// SAFETY: a bare address. Whoever dereferences it has promised to be alone with those bytes (`Args::staged`).
unsafe impl Send for Staged {}
// SAFETY: as above.
unsafe impl Sync for Staged {}

/// The memory of a running operation.
pub struct Args<'a> {
    accesses: &'a [Access],
    /// By access, where its elements lie without gaps, if not in the memory of the views.
    staged: Option<&'a [Staged]>,
    /// By access, the f32 copy that stands for its bf16 elements; empty where there are no copies.
    widened: &'a [Option<Staged>],
    taken: Cell<u64>,
}

impl<'a> Args<'a> {
    /// # Safety
    /// For `'a`, the caller holds a claim on every access: no other thread touches their bytes in a conflicting
    /// mode, and no two accesses of the list conflict with each other. All views have storage.
    pub(crate) unsafe fn new(accesses: &'a [Access]) -> Args<'a> {
        debug_assert!(accesses.len() <= 64, "BUG: more accesses than the taken mask holds");
        Args { accesses, staged: None, widened: &[], taken: Cell::new(0) }
    }

    /// The same operation on copies: rows follow each other without gaps.
    ///
    /// # Safety
    /// For `'a`, each of `staged` (one per access) has room for all elements of its view, aligned for them, and no
    /// other thread touches it.
    pub(crate) unsafe fn staged(accesses: &'a [Access], staged: &'a [Staged]) -> Args<'a> {
        debug_assert!(accesses.len() == staged.len(), "BUG: a copy for each access");
        Args { accesses, staged: Some(staged), widened: &[], taken: Cell::new(0) }
    }

    /// The same operation, with f32 copies in place of its bf16 arguments: rows follow each other without gaps.
    ///
    /// # Safety
    /// `widened` has an entry for each argument, a copy exactly where it is bf16. For `'b`, each copy has room for all
    /// elements as f32, nobody else touches it, and no other argument is taken from `self`.
    pub(crate) unsafe fn widened<'b>(&'b self, widened: &'b [Option<Staged>]) -> Args<'b> {
        debug_assert!(self.accesses.len() == widened.len(), "BUG: an entry for each access");
        Args { accesses: self.accesses, staged: self.staged, widened, taken: Cell::new(0) }
    }

    /// Declared accesses.
    pub fn len(&self) -> usize {
        self.accesses.len()
    }

    /// The operation reaches no memory.
    pub fn is_empty(&self) -> bool {
        self.accesses.is_empty()
    }

    /// Sizes of argument `index`; empty when there is no such argument.
    pub fn shape(&self, index: usize) -> &'a [usize] {
        self.accesses.get(index).map_or(&[], |a| a.view.shape())
    }

    /// Element type of argument `index`.
    ///
    /// # Errors
    /// [`ArgError::Index`] when there is no such argument.
    pub fn dtype(&self, index: usize) -> Result<DType, ArgError> {
        self.access(index).map(|a| self.copy(index).map_or(a.view.dtype(), |_| DType::F32))
    }

    /// How argument `index` is declared.
    pub(crate) fn mode(&self, index: usize) -> Result<Mode, ArgError> {
        self.access(index).map(|a| a.mode)
    }

    /// All elements of a contiguous argument that is declared as read.
    ///
    /// # Errors
    /// [`ArgError`] when it is not.
    pub fn read<T: Element>(&self, index: usize) -> Result<&'a [T], ArgError> {
        let rows = self.rows::<T>(index)?;
        if !self.access(index)?.view.is_contiguous() {
            return Err(ArgError::Strided { index });
        }
        // SAFETY: contiguous, so the rows are `rows * cols` adjacent elements of the claimed region.
        Ok(unsafe { slice::from_raw_parts(rows.base, rows.rows * rows.cols) })
    }

    /// All elements of a contiguous argument that is declared as written or updated.
    ///
    /// # Errors
    /// [`ArgError`] when it is not, or was taken before.
    pub fn write<T: Element>(&mut self, index: usize) -> Result<&'a mut [T], ArgError> {
        let access = self.access(index)?;
        if !access.view.is_contiguous() {
            return Err(ArgError::Strided { index });
        }
        let rows = self.rows_mut::<T>(index)?;
        // SAFETY: contiguous, as checked; taken once, so nobody else has a reference into it.
        Ok(unsafe { slice::from_raw_parts_mut(rows.base, rows.rows * rows.cols) })
    }

    /// The rows of an argument that is declared as read, with or without gaps between them.
    ///
    /// # Errors
    /// [`ArgError`] when it is not.
    pub fn rows<T: Element>(&self, index: usize) -> Result<Rows<'a, T>, ArgError> {
        let access = self.access(index)?;
        if access.mode != Mode::Read {
            return Err(ArgError::Mode { index, declared: access.mode, asked: "read only" });
        }
        let base = self.base::<T>(index, access)?;
        let (view, pitch) = (&access.view, self.pitch(index, access));
        Ok(Rows { base, rows: view.row_count(), cols: view.cols(), pitch, life: PhantomData })
    }

    /// The rows of an argument that is declared as written or updated, with or without gaps between them.
    ///
    /// # Errors
    /// [`ArgError`] when it is not, or was taken before.
    pub fn rows_mut<T: Element>(&mut self, index: usize) -> Result<RowsMut<'a, T>, ArgError> {
        let access = self.access(index)?;
        if !access.mode.writes() {
            return Err(ArgError::Mode { index, declared: access.mode, asked: "write" });
        }
        let base = self.base::<T>(index, access)?;
        let bit = 1u64 << index;
        if self.taken.get() & bit != 0 {
            return Err(ArgError::Taken { index });
        }
        self.taken.set(self.taken.get() | bit);
        let (view, pitch) = (&access.view, self.pitch(index, access));
        Ok(RowsMut { base, rows: view.row_count(), cols: view.cols(), pitch, life: PhantomData })
    }

    fn access(&self, index: usize) -> Result<&'a Access, ArgError> {
        self.accesses.get(index).ok_or(ArgError::Index { index, have: self.accesses.len() })
    }

    fn copy(&self, index: usize) -> Option<Staged> {
        self.widened.get(index).copied().flatten()
    }

    fn pitch(&self, index: usize, access: &Access) -> usize {
        let moved = self.staged.is_some() || self.copy(index).is_some();
        if moved { access.view.cols() } else { access.view.pitch() }
    }

    fn base<T: Element>(&self, index: usize, access: &Access) -> Result<*mut T, ArgError> {
        let declared = self.dtype(index)?;
        if declared != T::DTYPE {
            return Err(ArgError::DType { index, declared, asked: T::DTYPE });
        }
        if let Some(copy) = self.copy(index) {
            return Ok(copy.0.as_ptr().cast());
        }
        if let Some(staged) = self.staged {
            return Ok(staged[index].0.as_ptr().cast());
        }
        let storage = access.view.allocation().storage.as_ref().expect("BUG: a kernel ran without storage");
        // SAFETY: a view's region lies inside its allocation, and starts at a multiple of the element size because
        // allocations are aligned and every cut is in whole elements.
        Ok(unsafe { storage.host().add(access.view.region().start) }.cast())
    }
}

/// A matrix whose rows may have gaps between them, for reading.
#[derive(Clone, Copy)]
pub struct Rows<'a, T> {
    base: *const T,
    rows: usize,
    cols: usize,
    pitch: usize,
    life: PhantomData<&'a [T]>,
}

impl<'a, T> Rows<'a, T> {
    /// A contiguous matrix. Panics unless `data` is `rows * cols` long.
    pub fn of(data: &'a [T], rows: usize, cols: usize) -> Rows<'a, T> {
        assert_eq!(data.len(), rows * cols, "matrix {rows}x{cols}");
        Rows { base: data.as_ptr(), rows, cols, pitch: cols, life: PhantomData }
    }

    /// How many rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// No rows.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Elements in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements between the starts of two rows.
    pub fn pitch(&self) -> usize {
        self.pitch
    }

    /// First element, for libraries that take pointers: row `i` starts at `i * pitch()`.
    pub fn as_ptr(&self) -> *const T {
        self.base
    }

    /// Row `i`. Panics past the end.
    #[inline]
    pub fn row(&self, i: usize) -> &'a [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: row `i` is inside the region that `Args` checked, or inside the slice given to `of`.
        unsafe { slice::from_raw_parts(self.base.add(i * self.pitch), self.cols) }
    }

    /// There are no gaps between rows.
    pub fn is_flat(&self) -> bool {
        self.rows <= 1 || self.pitch == self.cols
    }

    /// All elements as one row, where there are no gaps; the same matrix otherwise.
    pub(crate) fn flat(self) -> Rows<'a, T> {
        if !self.is_flat() {
            return self;
        }
        let cols = self.rows * self.cols;
        Rows { rows: 1, cols, pitch: cols, ..self }
    }

    /// A part. Panics past the end.
    pub(crate) fn block(&self, rows: Range<usize>, cols: Range<usize>) -> Rows<'a, T> {
        inside((self.rows, self.cols), &rows, &cols);
        if rows.is_empty() || cols.is_empty() {
            return Rows { rows: rows.len(), cols: cols.len(), pitch: cols.len(), ..*self };
        }
        // SAFETY: the first element of the part is an element of the matrix.
        let base = unsafe { self.base.add(rows.start * self.pitch + cols.start) };
        Rows { base, rows: rows.len(), cols: cols.len(), pitch: self.pitch, life: PhantomData }
    }
}

/// Panics unless the part lies inside the matrix.
fn inside((have_rows, have_cols): (usize, usize), rows: &Range<usize>, cols: &Range<usize>) {
    let fits = rows.start <= rows.end && rows.end <= have_rows && cols.start <= cols.end && cols.end <= have_cols;
    assert!(fits, "rows {rows:?}, columns {cols:?} of {have_rows}x{have_cols}");
}

/// A matrix whose rows may have gaps between them, for writing.
pub struct RowsMut<'a, T> {
    base: *mut T,
    rows: usize,
    cols: usize,
    pitch: usize,
    life: PhantomData<&'a mut [T]>,
}

impl<'a, T> RowsMut<'a, T> {
    /// A contiguous matrix. Panics unless `data` is `rows * cols` long.
    pub fn of(data: &'a mut [T], rows: usize, cols: usize) -> RowsMut<'a, T> {
        assert_eq!(data.len(), rows * cols, "matrix {rows}x{cols}");
        RowsMut { base: data.as_mut_ptr(), rows, cols, pitch: cols, life: PhantomData }
    }

    /// How many rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// No rows.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Elements in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements between the starts of two rows.
    pub fn pitch(&self) -> usize {
        self.pitch
    }

    /// First element, for libraries that take pointers: row `i` starts at `i * pitch()`.
    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.base
    }

    /// Row `i`. Panics past the end.
    #[inline]
    pub fn row(&self, i: usize) -> &[T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: row `i` is inside the claimed region; `&self` keeps `row_mut` away.
        unsafe { slice::from_raw_parts(self.base.add(i * self.pitch), self.cols) }
    }

    /// Row `i`. Panics past the end.
    #[inline]
    pub fn row_mut(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: row `i` is inside the claimed region; `&mut self` makes this the only reference into it.
        unsafe { slice::from_raw_parts_mut(self.base.add(i * self.pitch), self.cols) }
    }

    /// There are no gaps between rows.
    pub fn is_flat(&self) -> bool {
        self.rows <= 1 || self.pitch == self.cols
    }

    /// All elements as one row, where there are no gaps; the same matrix otherwise.
    pub(crate) fn flat(self) -> RowsMut<'a, T> {
        if !self.is_flat() {
            return self;
        }
        let cols = self.rows * self.cols;
        RowsMut { rows: 1, cols, pitch: cols, ..self }
    }

    /// The same matrix for reading.
    pub(crate) fn as_rows(&self) -> Rows<'_, T> {
        Rows { base: self.base, rows: self.rows, cols: self.cols, pitch: self.pitch, life: PhantomData }
    }

    /// A part. Panics past the end.
    pub(crate) fn block_mut(&mut self, rows: Range<usize>, cols: Range<usize>) -> RowsMut<'_, T> {
        inside((self.rows, self.cols), &rows, &cols);
        if rows.is_empty() || cols.is_empty() {
            return RowsMut { rows: rows.len(), cols: cols.len(), pitch: cols.len(), life: PhantomData, ..*self };
        }
        // SAFETY: the first element of the part is an element of the matrix.
        let base = unsafe { self.base.add(rows.start * self.pitch + cols.start) };
        RowsMut { base, rows: rows.len(), cols: cols.len(), pitch: self.pitch, life: PhantomData }
    }
}
