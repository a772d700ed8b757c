//! Products without their memory: all that the choice of an algorithm may depend on.

use super::{Kernel, gemm::GemmSpec};
use crate::{Access, DType, Launch, Op, View, cpu::Storage};

/// A product as its sizes, types, and how its matrices lie in memory: two of one shape can be computed in the same way.
/// [`Machine::products`](crate::Machine::products) lists those of a dry run.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct GemmShape {
    pub(crate) spec: GemmSpec,
    /// By access of the operation.
    pub(crate) matrices: Vec<MatrixShape>,
}

/// A matrix whose rows may have gaps between them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct MatrixShape {
    pub(crate) dtype: DType,
    pub(crate) rows: u64,
    pub(crate) cols: u64,
    pub(crate) pitch: u64,
    /// Bytes that its address is a multiple of, as far as every driver aligns memory.
    pub(crate) align: u32,
}

impl GemmShape {
    /// None: `op` is no product.
    pub(crate) fn of(op: &Op) -> Option<GemmShape> {
        match &op.launch {
            Launch::Kernel(Kernel::Gemm(spec)) => {
                Some(GemmShape { spec: *spec, matrices: MatrixShape::all(&op.accesses) })
            }
            _ => None,
        }
    }
}

impl MatrixShape {
    /// Where every driver's memory begins.
    pub(crate) const ALIGN: usize = Storage::ALIGN;

    pub(crate) fn of(view: &View) -> MatrixShape {
        let [rows, cols, pitch] = [view.row_count(), view.cols(), view.pitch()].map(|size| size as u64);
        // A single row's pitch means nothing, and libraries want one that a row fits into.
        let pitch = if rows == 1 { cols } else { pitch.max(cols) };
        let align = 1 << view.region().start.trailing_zeros().min(Self::ALIGN.trailing_zeros());
        MatrixShape { dtype: view.dtype(), rows, cols, pitch, align }
    }

    pub(crate) fn all(accesses: &[Access]) -> Vec<MatrixShape> {
        accesses.iter().map(|access| MatrixShape::of(&access.view)).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows == 0 || self.cols == 0
    }
}
