//! Which of the library's algorithms compute in f32 what is f32.
//!
//! Compute type `32F` says how sums are kept, and not that factors keep their bits: newer libraries have algorithms that
//! cut f32 factors into parts for tensor cores. Those differ from plain f32 by shape and by library, so none takes part.

use cudarc::cublaslt::sys;

use super::{CudaError, blaslt::check, product::ProductShape};
use crate::DType;

/// Flags of the library's header: tensor cores of any kind, and factors that are taken as something narrower than f32.
const TENSOR_CORES: u64 = 0xfe;
const NARROW_FACTORS: u64 = 0x7 << 16;

/// What an algorithm for `shape` may be, as a mask of such flags.
pub(super) fn allowed(shape: &ProductShape) -> u64 {
    let is_f32 = shape.a.dtype == DType::F32 || shape.b.dtype == DType::F32;
    if is_f32 { !(TENSOR_CORES | NARROW_FACTORS) } else { u64::MAX }
}

/// Whether `algorithm` is one of those, by what the library says of it.
pub(super) fn is_allowed(shape: &ProductShape, algorithm: &sys::cublasLtMatmulAlgo_t) -> Result<bool, CudaError> {
    let (mut flags, mut written) = (0u64, 0);
    let which = sys::cublasLtMatmulAlgoCapAttributes_t::CUBLASLT_ALGO_CAP_NUMERICAL_IMPL_FLAGS;
    // SAFETY: the algorithm was filled or checked by the library; writes one word of 64 bits.
    let code = unsafe {
        sys::cublasLtMatmulAlgoCapGetAttribute(
            algorithm,
            which,
            (&raw mut flags).cast(),
            size_of::<u64>(),
            &mut written,
        )
    };
    check("cublasLtMatmulAlgoCapGetAttribute", code)?;
    Ok(flags & !allowed(shape) == 0)
}
