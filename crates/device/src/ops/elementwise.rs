//! Fill, copy with conversion, scale, add.

use super::{
    Factor, Kernel, Work,
    accumulate::By,
    activation::{Place, elements},
    check::Check,
};
use crate::{Access, DType, Error, Op, Site, View};

/// Every element of y becomes `value`: any element type; rounded to bf16, whole for i32 and i16.
#[derive(Clone, Copy, Debug)]
pub struct Fill<'a> {
    /// Written.
    pub y: &'a View,
    /// The value.
    pub value: f32,
}

impl Fill<'_> {
    /// Accesses: y.
    ///
    /// # Errors
    /// [`Error::Setting`] if y is of whole numbers and the value is none of them.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("fill", site);
        let fits = match self.y.dtype() {
            DType::F32 | DType::Bf16 => true,
            DType::I32 => (self.value as i32) as f32 == self.value,
            DType::I16 => f32::from(self.value as i16) == self.value,
        };
        check.setting(fits, "value", self.value.into(), "an i32 or i16 tensor needs a whole number of its range")?;
        Ok(check.launch(vec![Access::write(self.y)], Kernel::Fill(FillSpec { value: self.value })))
    }
}

/// Settings of [`Kernel::Fill`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FillSpec {
    pub(crate) value: f32,
}

impl Work for FillSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        elements(accesses, 4).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        elements(accesses, 4).accesses(accesses, &[0], tile)
    }

    fn flops(&self, _accesses: &[Access]) -> u64 {
        0
    }
}

/// y = x: a copy between equal element types, a conversion between f32 and bf16 (to nearest, ties to even).
#[derive(Clone, Copy, Debug)]
pub struct Cast<'a> {
    /// Any sizes.
    pub x: &'a View,
    /// Same sizes, written.
    pub y: &'a View,
}

impl Cast<'_> {
    /// Accesses: y, x.
    ///
    /// # Errors
    /// [`Error::Shapes`] if the sizes differ, [`Error::ElementType`] if whole numbers would be converted.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("cast", site);
        check.same_sizes(&[("x", self.x), ("y", self.y)])?;
        if self.x.dtype().is_whole() {
            check.dtype(self.x.dtype(), &[("y", self.y)])?;
        } else {
            check.real(&[("y", self.y)])?;
        }
        Ok(check.launch(vec![Access::write(self.y), Access::read(self.x)], Kernel::Cast(CastSpec)))
    }
}

/// Settings of [`Kernel::Cast`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CastSpec;

impl Work for CastSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        elements(accesses, 8).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        elements(accesses, 8).accesses(accesses, &[0, 1], tile)
    }

    fn flops(&self, _accesses: &[Access]) -> u64 {
        0
    }
}

/// y = factor · x, f32 or bf16.
#[derive(Clone, Copy, Debug)]
pub struct Scale<'a> {
    /// Any sizes.
    pub x: &'a View,
    /// A constant or a device scalar. A factor of 0 leaves NaN where x has it: use [`Fill`] to clear.
    pub factor: Factor<'a>,
    /// Same sizes and element type, written. May be the same view as x.
    pub y: &'a View,
}

impl Scale<'_> {
    /// Accesses: y (update if x is the same view), x if it is another, the factor's scalar.
    ///
    /// # Errors
    /// [`Error::Shapes`] or [`Error::ElementType`] if the tensors do not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("scale", site);
        let tensors = [("x", self.x), ("y", self.y)];
        check.real(&tensors)?;
        check.dtype(self.x.dtype(), &tensors)?;
        check.same_sizes(&tensors)?;
        let place = Place::of(self.x, self.y);
        let mut accesses = vec![place.output(self.y)];
        place.push_input(self.x, &mut accesses);
        let by = self.factor.push(&check, &mut accesses)?;
        Ok(check.launch(accesses, Kernel::Scale(ScaleSpec { place, by })))
    }
}

/// Settings of [`Kernel::Scale`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ScaleSpec {
    pub(crate) place: Place,
    pub(crate) by: By,
}

impl Work for ScaleSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        elements(accesses, 8).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        let tensors: &[usize] = if self.place == Place::Apart { &[0, 1] } else { &[0] };
        elements(accesses, 8).accesses(accesses, tensors, tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        accesses[0].view.numel() as u64
    }
}

/// y = a + b, all of one element type, f32 or bf16 (summed in f32).
#[derive(Clone, Copy, Debug)]
pub struct Add<'a> {
    /// Any sizes.
    pub a: &'a View,
    /// Same sizes.
    pub b: &'a View,
    /// Same sizes, written. May be the same view as a or b.
    pub y: &'a View,
}

impl Add<'_> {
    /// Accesses: y (update if a or b is the same view), then those of b, a that are others.
    ///
    /// # Errors
    /// [`Error::Shapes`] or [`Error::ElementType`] if the tensors do not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("add", site);
        let tensors = [("a", self.a), ("b", self.b), ("y", self.y)];
        check.real(&tensors)?;
        check.dtype(self.a.dtype(), &tensors)?;
        check.same_sizes(&tensors)?;
        // Sums commute exactly, so whichever input is the output can be the first.
        let (a, b) = if self.b.same_as(self.y) { (self.b, self.a) } else { (self.a, self.b) };
        let place = Place::of(a, self.y);
        let mut accesses = vec![place.output(self.y), Access::read(b)];
        place.push_input(a, &mut accesses);
        Ok(check.launch(accesses, Kernel::Add(AddSpec { place })))
    }
}

/// Settings of [`Kernel::Add`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddSpec {
    pub(crate) place: Place,
}

impl Work for AddSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        elements(accesses, 12).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        elements(accesses, 12).accesses(accesses, &[0, 1, 2], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        accesses[0].view.numel() as u64
    }
}

/// y += alpha · x, each f32 or bf16 (summed in f32).
#[derive(Clone, Copy, Debug)]
pub struct Axpy<'a> {
    /// A constant or a device scalar.
    pub alpha: Factor<'a>,
    /// Any sizes.
    pub x: &'a View,
    /// Same sizes, updated.
    pub y: &'a View,
}

impl Axpy<'_> {
    /// Accesses: y, x, the factor's scalar.
    ///
    /// # Errors
    /// [`Error::Shapes`] or [`Error::ElementType`] if the tensors do not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("axpy", site);
        let tensors = [("x", self.x), ("y", self.y)];
        check.real(&tensors)?;
        check.same_sizes(&tensors)?;
        let mut accesses = vec![Access::update(self.y), Access::read(self.x)];
        let by = self.alpha.push(&check, &mut accesses)?;
        Ok(check.launch(accesses, Kernel::Axpy(AxpySpec { by })))
    }
}

/// Settings of [`Kernel::Axpy`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AxpySpec {
    pub(crate) by: By,
}

impl Work for AxpySpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        elements(accesses, 12).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        elements(accesses, 12).accesses(accesses, &[0, 1], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        2 * accesses[0].view.numel() as u64
    }
}
