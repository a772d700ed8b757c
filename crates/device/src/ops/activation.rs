//! Activations: GELU (tanh form) and SwiGLU.

use super::{Kernel, Work, check::Check, cut::Cut};
use crate::{Access, Error, Op, Site, View};

/// Counted for one element of GELU, its exponential as one.
pub(crate) const GELU_FLOPS: u64 = 8;
/// Counted for one element of GELU's gradient, its exponential as one.
pub(crate) const GELU_BACKWARD_FLOPS: u64 = 14;

/// Whether an element-wise kernel's first input is its output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    Apart,
    InPlace,
}

impl Place {
    pub(super) fn of(input: &View, output: &View) -> Place {
        if input.same_as(output) { Place::InPlace } else { Place::Apart }
    }

    /// The output's access.
    pub(super) fn output(self, output: &View) -> Access {
        match self {
            Place::Apart => Access::write(output),
            Place::InPlace => Access::update(output),
        }
    }

    /// Appends the first input where it is not the output.
    pub(super) fn push_input(self, input: &View, accesses: &mut Vec<Access>) {
        if self == Place::Apart {
            accesses.push(Access::read(input));
        }
    }
}

/// A cut through views that all have the sizes of the first: `cost` bytes an element move.
pub(super) fn elements(accesses: &[Access], cost: usize) -> Cut {
    let first = &accesses[0].view;
    Cut::elements(first.row_count(), first.cols(), cost)
}

/// y = GELU(x) = x · (1 + tanh(√(2/π) · (x + 0.044715·x³))) / 2, f32 or bf16.
#[derive(Clone, Copy, Debug)]
pub struct Gelu<'a> {
    /// Any sizes.
    pub x: &'a View,
    /// Same sizes, written. May be the same view as x.
    pub y: &'a View,
}

impl Gelu<'_> {
    /// Accesses: y (update if x is the same view), then x if it is another.
    ///
    /// # Errors
    /// [`Error::Shapes`] or [`Error::ElementType`] if the tensors do not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("gelu", site);
        let tensors = [("x", self.x), ("y", self.y)];
        check.values(&tensors)?;
        check.same_sizes(&tensors)?;
        let place = Place::of(self.x, self.y);
        let mut accesses = vec![place.output(self.y)];
        place.push_input(self.x, &mut accesses);
        Ok(check.launch(accesses, Kernel::Gelu(GeluSpec { place })))
    }
}

/// Settings of [`Kernel::Gelu`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GeluSpec {
    pub(crate) place: Place,
}

impl Work for GeluSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        elements(accesses, 8).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        elements(accesses, 8).accesses(accesses, &[0, 1], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        GELU_FLOPS * accesses[0].view.numel() as u64
    }
}

/// dx = dy · GELU'(x), f32 or bf16.
#[derive(Clone, Copy, Debug)]
pub struct GeluBackward<'a> {
    /// Gradient of y.
    pub dy: &'a View,
    /// What the forward pass took.
    pub x: &'a View,
    /// Written. May be the same view as dy.
    pub dx: &'a View,
}

impl GeluBackward<'_> {
    /// Accesses: dx (update if dy is the same view), x, then dy if it is another.
    ///
    /// # Errors
    /// [`Error::Shapes`] or [`Error::ElementType`] if the tensors do not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("gelu_backward", site);
        let tensors = [("x", self.x), ("dy", self.dy), ("dx", self.dx)];
        check.values(&tensors)?;
        check.same_sizes(&tensors)?;
        let place = Place::of(self.dy, self.dx);
        let mut accesses = vec![place.output(self.dx), Access::read(self.x)];
        place.push_input(self.dy, &mut accesses);
        Ok(check.launch(accesses, Kernel::GeluBackward(GeluBackwardSpec { place })))
    }
}

/// Settings of [`Kernel::GeluBackward`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GeluBackwardSpec {
    pub(crate) place: Place,
}

impl Work for GeluBackwardSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        elements(accesses, 12).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        elements(accesses, 12).accesses(accesses, &[0, 1, 2], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        GELU_BACKWARD_FLOPS * accesses[0].view.numel() as u64
    }
}

/// y = silu(gate) · up, silu(z) = z / (1 + exp(−z)), f32 or bf16.
#[derive(Clone, Copy, Debug)]
pub struct SwiGlu<'a> {
    /// Any sizes.
    pub gate: &'a View,
    /// Same sizes.
    pub up: &'a View,
    /// Same sizes, written.
    pub y: &'a View,
}

impl SwiGlu<'_> {
    /// Accesses: y, gate, up.
    ///
    /// # Errors
    /// [`Error::Shapes`] or [`Error::ElementType`] if the tensors do not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("swiglu", site);
        let tensors = [("gate", self.gate), ("up", self.up), ("y", self.y)];
        check.values(&tensors)?;
        check.same_sizes(&tensors)?;
        let accesses = vec![Access::write(self.y), Access::read(self.gate), Access::read(self.up)];
        Ok(check.launch(accesses, Kernel::SwiGlu(SwiGluSpec)))
    }
}

/// Settings of [`Kernel::SwiGlu`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SwiGluSpec;

impl Work for SwiGluSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        elements(accesses, 12).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        elements(accesses, 12).accesses(accesses, &[0, 1, 2], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        5 * accesses[0].view.numel() as u64
    }
}

/// dgate = dy · up · silu'(gate) and dup = dy · silu(gate), f32 or bf16.
#[derive(Clone, Copy, Debug)]
pub struct SwiGluBackward<'a> {
    /// Gradient of y.
    pub dy: &'a View,
    /// What the forward pass took.
    pub gate: &'a View,
    /// What the forward pass took.
    pub up: &'a View,
    /// Written.
    pub dgate: &'a View,
    /// Written.
    pub dup: &'a View,
}

impl SwiGluBackward<'_> {
    /// Accesses: dgate, dup, gate, up, dy.
    ///
    /// # Errors
    /// [`Error::Shapes`] or [`Error::ElementType`] if the tensors do not fit.
    pub fn op(&self, site: impl Into<Site>) -> Result<Op, Error> {
        let check = Check::new("swiglu_backward", site);
        let tensors = [("gate", self.gate), ("up", self.up), ("dy", self.dy), ("dgate", self.dgate), ("dup", self.dup)];
        check.values(&tensors)?;
        check.same_sizes(&tensors)?;
        let mut accesses = [self.dgate, self.dup].map(Access::write).to_vec();
        accesses.extend([self.gate, self.up, self.dy].map(Access::read));
        Ok(check.launch(accesses, Kernel::SwiGluBackward(SwiGluBackwardSpec)))
    }
}

/// Settings of [`Kernel::SwiGluBackward`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SwiGluBackwardSpec;

impl Work for SwiGluBackwardSpec {
    fn tiles(&self, accesses: &[Access]) -> usize {
        elements(accesses, 20).pieces()
    }

    fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        elements(accesses, 20).accesses(accesses, &[0, 1, 2, 3, 4], tile)
    }

    fn flops(&self, accesses: &[Access]) -> u64 {
        11 * accesses[0].view.numel() as u64
    }
}
