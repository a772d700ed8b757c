//! Sizes of a tensor, kept inline.

use std::fmt;

/// Up to four dimensions, outermost first. No dimensions is a scalar of one element.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; Shape::MAX],
    len: u8,
}

impl Shape {
    /// The most dimensions a view can have.
    pub const MAX: usize = 4;

    /// The most elements, sizes of 0 counted as 1: their bytes still fit an allocation, and no product of sizes
    /// overflows.
    pub const MAX_NUMEL: usize = isize::MAX as usize / 16;

    /// `None` with more than [`Shape::MAX`] dimensions or [`Shape::MAX_NUMEL`] elements.
    pub fn new(dims: &[usize]) -> Option<Shape> {
        let mut kept = [1; Shape::MAX];
        kept.get_mut(..dims.len())?.copy_from_slice(dims);
        dims.iter().try_fold(1usize, |n, d| n.checked_mul((*d).max(1)).filter(|n| *n <= Shape::MAX_NUMEL))?;
        Some(Shape { dims: kept, len: dims.len() as u8 })
    }

    /// The sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.len as usize]
    }

    /// Elements in all.
    pub fn numel(&self) -> usize {
        self.dims().iter().product()
    }

    /// The last size; 1 for a scalar.
    pub fn cols(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    /// All sizes but the last, multiplied; 1 for a scalar or a vector.
    pub fn rows(&self) -> usize {
        let dims = self.dims();
        dims[..dims.len().saturating_sub(1)].iter().product()
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl PartialEq<[usize]> for Shape {
    fn eq(&self, other: &[usize]) -> bool {
        self.dims() == other
    }
}
