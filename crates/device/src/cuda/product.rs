//! Products as the library takes them: what they are, apart from how they are computed.

use std::fmt;

use super::launch::address;
use crate::{
    Access, DType,
    ops::{GemmFinish, GemmSpec, MatrixShape, Old, Trans},
};

/// d = op(a)·op(b) + beta·c and what follows, in our order of rows.
#[derive(Clone, Debug)]
pub(super) struct Product {
    pub(super) shape: ProductShape,
    pub(super) a: u64,
    pub(super) b: u64,
    pub(super) c: u64,
    pub(super) d: u64,
    pub(super) beta: Beta,
    /// Where what follows finds a bias, and a matrix as large as d.
    pub(super) bias: u64,
    pub(super) aux: u64,
}

/// All that the choice of an algorithm depends on. Its text tells shapes apart, between runs too.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct ProductShape {
    pub(super) a: MatrixShape,
    pub(super) b: MatrixShape,
    pub(super) c: MatrixShape,
    pub(super) d: MatrixShape,
    pub(super) trans: Trans,
    /// Whether something is added, and where its factor comes from.
    pub(super) adds: Adds,
    pub(super) follow: Follow,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Adds {
    Nothing,
    C,
    /// As much of c as a scalar on the device says.
    PartOfC,
}

/// How much of c is added.
#[derive(Clone, Copy, Debug)]
pub(super) enum Beta {
    Zero,
    One,
    /// As much as the scalar there says.
    Device(u64),
}

/// What the library does behind a product.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Follow {
    Nothing,
    Bias(DType),
    /// Adds a bias, keeps the sum in a matrix, and takes GELU of it.
    BiasGelu(DType, Aux),
    /// Multiplies with the slope of GELU at a matrix.
    GeluSlope(Aux),
}

/// A matrix as large as d that is kept or read behind a product.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Aux {
    pub(super) pitch: u64,
    pub(super) align: u32,
}

impl From<MatrixShape> for Aux {
    fn from(matrix: MatrixShape) -> Aux {
        Aux { pitch: matrix.pitch, align: matrix.align }
    }
}

impl ProductShape {
    /// The product of `spec` with as much as `follow` says of what follows it, into `d`.
    fn new(spec: &GemmSpec, at: &[MatrixShape], d: MatrixShape, follow: Follow) -> ProductShape {
        ProductShape { a: at[0], b: at[1], c: d, d, trans: spec.trans, adds: Adds::Nothing, follow }
    }

    /// With the whole of what `spec` asks for; `at` by access of the operation.
    pub(super) fn whole(spec: &GemmSpec, at: &[MatrixShape]) -> ProductShape {
        let with = |follow| ProductShape::new(spec, at, at[2], follow);
        match spec.finish {
            GemmFinish::Into(old) => {
                let adds = match old {
                    Old::Overwrite => Adds::Nothing,
                    Old::Add => Adds::C,
                    Old::Keep => Adds::PartOfC,
                };
                ProductShape { adds, ..with(Follow::Nothing) }
            }
            GemmFinish::Bias => with(Follow::Bias(at[3].dtype)).beside(at[3]),
            GemmFinish::BiasGelu => with(Follow::BiasGelu(at[3].dtype, at[4].into())).beside(at[3]).beside(at[4]),
            GemmFinish::Residual => with(Follow::Nothing).onto(at[3]),
            GemmFinish::BiasResidual => with(Follow::Bias(at[3].dtype)).beside(at[3]).onto(at[4]),
            GemmFinish::GeluBackward => with(Follow::GeluSlope(at[3].into())).beside(at[3]),
        }
    }

    /// With its bias, into what GELU is taken of.
    pub(super) fn up_to_gelu(spec: &GemmSpec, at: &[MatrixShape]) -> ProductShape {
        ProductShape::new(spec, at, at[4], Follow::Bias(at[3].dtype)).beside(at[3])
    }

    /// Alone, before the slope of GELU.
    pub(super) fn up_to_slope(spec: &GemmSpec, at: &[MatrixShape]) -> ProductShape {
        ProductShape::new(spec, at, at[2], Follow::Nothing)
    }

    /// Whatever a kernel reads or writes together with d is reached in steps of the same size.
    fn beside(mut self, other: MatrixShape) -> ProductShape {
        self.d.align = self.d.align.min(other.align);
        self
    }

    /// Adds `r`.
    fn onto(self, r: MatrixShape) -> ProductShape {
        ProductShape { c: r, adds: Adds::C, ..self }
    }

    /// Whether the library's rules for matrices kept or read behind a product hold; it refuses those without elements.
    pub(super) fn is_allowed(&self) -> bool {
        let has_elements = ![&self.a, &self.b, &self.d].into_iter().any(MatrixShape::is_empty);
        has_elements
            && match self.follow {
                Follow::Nothing | Follow::Bias(_) => true,
                Follow::BiasGelu(_, aux) | Follow::GeluSlope(aux) => {
                    // Its GELU is of the accuracy of bf16.
                    self.d.dtype == DType::Bf16 && aux.pitch.is_multiple_of(8) && aux.align >= 16
                }
            }
    }
}

impl Product {
    fn new(shape: ProductShape, accesses: &[Access], d: usize) -> Product {
        let at = |index: usize| address(&accesses[index].view);
        let beta = if shape.adds == Adds::C { Beta::One } else { Beta::Zero };
        Product { shape, a: at(0), b: at(1), c: at(d), d: at(d), beta, bias: 0, aux: 0 }
    }

    /// With the whole of what `spec` asks for.
    pub(super) fn whole(spec: &GemmSpec, accesses: &[Access]) -> Product {
        let shape = ProductShape::whole(spec, &MatrixShape::all(accesses));
        let at = |index: usize| address(&accesses[index].view);
        let product = Product::new(shape, accesses, 2);
        match spec.finish {
            GemmFinish::Into(Old::Keep) => Product { beta: Beta::Device(at(3)), ..product },
            GemmFinish::Into(_) => product,
            GemmFinish::Bias => Product { bias: at(3), ..product },
            GemmFinish::BiasGelu => Product { bias: at(3), aux: at(4), ..product },
            GemmFinish::Residual => Product { c: at(3), ..product },
            GemmFinish::BiasResidual => Product { bias: at(3), c: at(4), ..product },
            GemmFinish::GeluBackward => Product { aux: at(3), ..product },
        }
    }

    /// The product with its bias into `pre`, before GELU.
    pub(super) fn up_to_gelu(spec: &GemmSpec, accesses: &[Access]) -> Product {
        let shape = ProductShape::up_to_gelu(spec, &MatrixShape::all(accesses));
        Product { bias: address(&accesses[3].view), ..Product::new(shape, accesses, 4) }
    }

    /// The product alone, before the slope of GELU.
    pub(super) fn up_to_slope(spec: &GemmSpec, accesses: &[Access]) -> Product {
        Product::new(ProductShape::up_to_slope(spec, &MatrixShape::all(accesses)), accesses, 2)
    }
}

impl fmt::Display for ProductShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.trans)?;
        for (name, m) in [("a", &self.a), ("b", &self.b), ("c", &self.c), ("d", &self.d)] {
            write!(f, " {name} {} {}x{}/{}@{}", m.dtype, m.rows, m.cols, m.pitch, m.align)?;
        }
        match self.adds {
            Adds::Nothing => {}
            Adds::C => f.write_str(" adds c")?,
            Adds::PartOfC => f.write_str(" adds a part of c")?,
        }
        match self.follow {
            Follow::Nothing => Ok(()),
            Follow::Bias(dtype) => write!(f, " bias {dtype}"),
            Follow::BiasGelu(dtype, aux) => write!(f, " bias {dtype} gelu /{}@{}", aux.pitch, aux.align),
            Follow::GeluSlope(aux) => write!(f, " slope of gelu /{}@{}", aux.pitch, aux.align),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(rows: u64, cols: u64) -> MatrixShape {
        MatrixShape { dtype: DType::Bf16, rows, cols, pitch: cols, align: 128 }
    }

    fn gelu(aux: MatrixShape) -> ProductShape {
        let at = [matrix(32, 64), matrix(96, 64), matrix(32, 96), matrix(1, 96), aux];
        ProductShape::whole(&GemmSpec { trans: Trans::Nt, finish: GemmFinish::BiasGelu }, &at)
    }

    #[test]
    fn shapes_that_need_other_algorithms_have_other_texts() {
        let text = gelu(matrix(32, 96)).to_string();
        let shape = "Nt a bf16 32x64/64@128 b bf16 96x64/64@128 c bf16 32x96/96@128 d bf16 32x96/96@128";
        assert_eq!(text, format!("{shape} bias bf16 gelu /96@128"));
        let finishes = [Old::Overwrite, Old::Add, Old::Keep].map(GemmFinish::Into);
        let finishes = finishes.into_iter().chain([GemmFinish::Bias, GemmFinish::Residual, GemmFinish::BiasResidual]);
        let at = [matrix(32, 64), matrix(96, 64), matrix(32, 96), matrix(32, 96), matrix(32, 96)];
        let texts = finishes.map(|finish| ProductShape::whole(&GemmSpec { trans: Trans::Nt, finish }, &at).to_string());
        let mut texts: Vec<_> = texts.chain([text]).collect();
        texts.sort();
        texts.dedup();
        // A residual has the shape of an addition to old values, and is computed in the same way.
        assert_eq!(texts.len(), 6, "{texts:#?}");
    }

    #[test]
    fn the_library_gets_gelu_only_where_its_rules_hold() {
        assert!(gelu(matrix(32, 96)).is_allowed());
        assert!(!gelu(MatrixShape { pitch: 99, ..matrix(32, 96) }).is_allowed());
        assert!(!gelu(MatrixShape { align: 8, ..matrix(32, 96) }).is_allowed());
    }
}
