//! Products as the library takes them: what they are, apart from how they are computed.

use super::launch::address;
use crate::{
    Access, DType, View,
    ops::{GemmFinish, GemmSpec, Old, Trans},
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

/// All that the choice of an algorithm depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct ProductShape {
    pub(super) a: Matrix,
    pub(super) b: Matrix,
    pub(super) c: Matrix,
    pub(super) d: Matrix,
    pub(super) trans: Trans,
    pub(super) follow: Follow,
    /// Whether the factors are read from the device.
    pub(super) device_factors: bool,
}

/// A matrix of ours, whose rows may have gaps between them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Matrix {
    pub(super) dtype: DType,
    pub(super) rows: u64,
    pub(super) cols: u64,
    pub(super) pitch: u64,
    /// Bytes that its address is a multiple of, as far as that matters.
    pub(super) align: u32,
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
    /// Adds a bias, keeps the sum in a matrix of that pitch, and takes GELU of it.
    BiasGelu(DType, u64),
    /// Multiplies with the slope of GELU at a matrix of that pitch.
    GeluSlope(u64),
}

impl Matrix {
    fn of(view: &View) -> Matrix {
        let [rows, cols, pitch] = [view.row_count(), view.cols(), view.pitch()].map(|size| size as u64);
        // A single row's pitch means nothing, and the library wants one that its row fits into.
        Matrix { dtype: view.dtype(), rows, cols, pitch: pitch.max(cols), align: alignment(address(view)) }
    }
}

/// The largest power of two that divides an address, up to what matters to the library.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

impl Product {
    /// The product of `spec` with all that follows it, or with as much as `follow` says into `d`.
    fn new(spec: &GemmSpec, accesses: &[Access], d: &View, follow: Follow) -> Product {
        let (a, b) = (&accesses[0].view, &accesses[1].view);
        let shape = ProductShape {
            a: Matrix::of(a),
            b: Matrix::of(b),
            c: Matrix::of(d),
            d: Matrix::of(d),
            trans: spec.trans,
            follow,
            device_factors: false,
        };
        let d = address(d);
        Product { shape, a: address(a), b: address(b), c: d, d, beta: Beta::Zero, bias: 0, aux: 0 }
    }

    /// With the whole of what `spec` asks for.
    pub(super) fn whole(spec: &GemmSpec, accesses: &[Access]) -> Product {
        let at = |index: usize| &accesses[index].view;
        let c = at(2);
        let with_bias = |follow: fn(&[Access]) -> Follow| {
            let mut product = Product::new(spec, accesses, c, follow(accesses));
            product.with_bias(at(3));
            product
        };
        match spec.finish {
            GemmFinish::Into(old) => {
                let mut product = Product::new(spec, accesses, c, Follow::Nothing);
                product.beta = match old {
                    Old::Overwrite => Beta::Zero,
                    Old::Add => Beta::One,
                    Old::Keep => Beta::Device(address(at(3))),
                };
                product.shape.device_factors = old == Old::Keep;
                product
            }
            GemmFinish::Bias => with_bias(|accesses| Follow::Bias(accesses[3].view.dtype())),
            GemmFinish::BiasGelu => {
                let mut product = with_bias(|accesses| {
                    Follow::BiasGelu(accesses[3].view.dtype(), Matrix::of(&accesses[4].view).pitch)
                });
                product.with_aux(at(4));
                product
            }
            GemmFinish::Residual => Product::new(spec, accesses, c, Follow::Nothing).onto(at(3)),
            GemmFinish::BiasResidual => with_bias(|accesses| Follow::Bias(accesses[3].view.dtype())).onto(at(4)),
            GemmFinish::GeluBackward => {
                let pre = at(3);
                let mut product = Product::new(spec, accesses, c, Follow::GeluSlope(Matrix::of(pre).pitch));
                product.with_aux(pre);
                product
            }
        }
    }

    /// The product with its bias into `pre`, before GELU.
    pub(super) fn up_to_gelu(spec: &GemmSpec, accesses: &[Access]) -> Product {
        let (bias, pre) = (&accesses[3].view, &accesses[4].view);
        let mut product = Product::new(spec, accesses, pre, Follow::Bias(bias.dtype()));
        product.with_bias(bias);
        product
    }

    /// The product alone, before the slope of GELU.
    pub(super) fn up_to_slope(spec: &GemmSpec, accesses: &[Access]) -> Product {
        Product::new(spec, accesses, &accesses[2].view, Follow::Nothing)
    }

    // Whatever a kernel reads or writes together with d is reached in steps of the same size.

    fn with_bias(&mut self, bias: &View) {
        self.bias = address(bias);
        self.shape.d.align = self.shape.d.align.min(alignment(self.bias));
    }

    fn with_aux(&mut self, aux: &View) {
        self.aux = address(aux);
        self.shape.d.align = self.shape.d.align.min(alignment(self.aux));
    }

    /// Whether the library's rules for matrices kept or read behind a product hold.
    pub(super) fn is_allowed(&self) -> bool {
        match self.shape.follow {
            Follow::Nothing | Follow::Bias(_) => true,
            Follow::BiasGelu(_, pitch) | Follow::GeluSlope(pitch) => {
                // Its GELU is of the accuracy of bf16.
                self.shape.d.dtype == DType::Bf16 && pitch.is_multiple_of(8) && self.aux.is_multiple_of(16)
            }
        }
    }

    /// Adds `r`.
    fn onto(mut self, r: &View) -> Product {
        self.shape.c = Matrix::of(r);
        self.c = address(r);
        self.beta = Beta::One;
        self
    }
}
