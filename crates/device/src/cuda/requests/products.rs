//! Products: by the library where it has an algorithm or by our kernel for compute capability 9.0, else by one for all cards.

use super::keep;
use crate::{
    Access,
    cuda::{
        launch::{Call, Value},
        product::Product,
        steps::Step,
    },
    ops::{GemmFinish, GemmSpec, Old},
};

/// The whole at once; else the product by the library and what follows by a kernel; else all of it by a kernel.
pub(super) fn gemm(spec: &GemmSpec, accesses: &[Access]) -> Step {
    let own = Step::Call(own(spec, accesses));
    let mat = |at: usize| Value::matrix(&accesses[at].view);
    let elements = accesses[2].view.numel();
    let otherwise = match spec.finish {
        GemmFinish::BiasGelu => {
            let then = Call::over("gelu", elements, vec![mat(2), mat(4)]);
            product(Product::up_to_gelu(spec, accesses), Some(then), own)
        }
        GemmFinish::GeluBackward => {
            let then = Call::over("gelu_backward", elements, vec![mat(2), mat(3), mat(2)]);
            product(Product::up_to_slope(spec, accesses), Some(then), own)
        }
        _ => own,
    };
    product(Product::whole(spec, accesses), None, otherwise)
}

fn product(product: Product, then: Option<Call>, otherwise: Step) -> Step {
    Step::Product { product: Box::new(product), then, otherwise: Box::new(otherwise) }
}

/// Rows and columns that a block of the kernel takes.
const SIDE: usize = 64;

fn own(spec: &GemmSpec, accesses: &[Access]) -> Call {
    let mat = |at: usize| Value::matrix(&accesses[at].view);
    let (none, c) = (Value::no_matrix(), &accesses[2].view);
    let (finish, bias, other) = match spec.finish {
        GemmFinish::Into(_) => (0, none, none),
        GemmFinish::Bias => (1, mat(3), none),
        GemmFinish::BiasGelu => (2, mat(3), mat(4)),
        GemmFinish::Residual => (3, none, mat(3)),
        GemmFinish::BiasResidual => (4, mat(3), mat(4)),
        GemmFinish::GeluBackward => (5, none, mat(3)),
    };
    let kept = if let GemmFinish::Into(old) = spec.finish { old } else { Old::Overwrite };
    let trans = u64::from(spec.trans.a()) | u64::from(spec.trans.b()) << 1;
    let values =
        vec![mat(0), mat(1), mat(2), bias, other, Value::words([trans]), Value::words([finish]), keep(kept, accesses)];
    Call::blocks("product", c.row_count().div_ceil(SIDE) * c.cols().div_ceil(SIDE), values)
}
