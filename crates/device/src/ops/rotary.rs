//! Rotary position embedding, half-split form.

use super::{
    Kernel, Work,
    activation::Place,
    check::Check,
    cut::{Cut, PIECE_BYTES, rows_of},
};
use crate::{Access, DType, Error, Op, Site, View};

/// Fills a table of angles: row `t` is cos(t·base^(−2i/d)) for i in 0..d/2, then the sines, f32 computed in f64.
#[derive(Clone, Copy, Debug)]
pub struct RotaryTable<'a> {
    /// `[positions, head_dim]`, written.
    pub table: &'a View,
    /// Usually 10000.
    pub base: f64,
}

impl RotaryTable<'_> {
    /// Accesses: table.
    ///
    /// # Errors
    /// [`Error::ElementType`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("rotary_table", site);
        check.dtype(DType::F32, &[("table", self.table)])?;
        let head_dim = self.table.cols();
        check.setting(head_dim.is_multiple_of(2), "head_dim", head_dim as f64, "it must be even")?;
        check.setting(self.base > 0.0, "base", self.base, "it must be over 0")?;
        Ok(check.launch(vec![Access::write(self.table)], Kernel::RotaryTable(RotaryTableSpec { base: self.base })))
    }
}

/// Settings of [`Kernel::RotaryTable`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RotaryTableSpec {
    pub(crate) base: f64,
}

impl Work for RotaryTableSpec {
    fn flops(&self, accesses: &[Access]) -> u64 {
        3 * accesses[0].view.numel() as u64
    }
}

/// Which way heads are turned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Turning {
    /// By the angle of the position.
    Forward,
    /// Back: the gradient of the forward pass.
    Backward,
}

/// Turns the pairs (i, i + d/2) of every head by their position's angles, f32 or bf16. Row `r` of x is position
/// `r % seq_len` of the table: cut the table by rows to start at a later position.
#[derive(Clone, Copy, Debug)]
pub struct Rotary<'a> {
    /// `[rows, heads · head_dim]`.
    pub x: &'a View,
    /// `[at least seq_len, head_dim]`, from [`RotaryTable`].
    pub table: &'a View,
    /// Rows of one sequence; divides the rows.
    pub seq_len: usize,
    /// Which way.
    pub turning: Turning,
    /// As x, written. May be the same view as x.
    pub y: &'a View,
}

impl Rotary<'_> {
    /// Accesses: y (update if x is the same view), table, then x if it is another.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`] or [`Error::Setting`] if something does not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("rotary", site);
        let (x, table) = (("x", self.x), ("table", self.table));
        check.values(&[x, ("y", self.y)])?;
        check.dtype(DType::F32, &[table])?;
        check.same_sizes(&[x, ("y", self.y)])?;
        let head_dim = self.table.cols();
        let even = head_dim > 0 && head_dim.is_multiple_of(2);
        check.setting(even, "head_dim", head_dim as f64, "it must be even and over 0")?;
        let divides = self.x.cols().is_multiple_of(head_dim);
        check.shapes(divides, x, table, "columns of the table (head_dim) must divide columns of x")?;
        check.sequences(x, self.seq_len)?;
        let enough = self.seq_len <= self.table.row_count();
        check.setting(enough, "seq_len", self.seq_len as f64, "the table has fewer rows")?;
        let place = Place::of(self.x, self.y);
        let mut accesses = vec![place.output(self.y), Access::read(self.table)];
        place.push_input(self.x, &mut accesses);
        let spec = RotarySpec { seq_len: self.seq_len, turning: self.turning, place };
        Ok(check.launch(accesses, Kernel::Rotary(spec)))
    }
}

/// Settings of [`Kernel::Rotary`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RotarySpec {
    pub(crate) seq_len: usize,
    pub(crate) turning: Turning,
    pub(crate) place: Place,
}

impl RotarySpec {
    /// Whole sequences, so that positions need no offset.
    fn cut(&self, accesses: &[Access]) -> Cut {
        let y = &accesses[0].view;
        Cut::rows(y.row_count() / self.seq_len, self.seq_len * y.cols() * 8, PIECE_BYTES)
    }
}

impl Work for RotarySpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        self.cut(accesses).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        let sequences = self.cut(accesses).range(tile);
        let rows = sequences.start * self.seq_len..sequences.end * self.seq_len;
        let piece = |(at, access): (usize, &Access)| {
            let view = match at {
                1 => access.view.clone(),
                _ => rows_of(&access.view, rows.clone()),
            };
            Access { view, mode: access.mode }
        };
        accesses.iter().enumerate().map(piece).collect()
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        3 * accesses[0].view.numel() as u64
    }
}
