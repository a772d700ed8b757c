//! Memory that kernels and the library work in.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{CudaError, card::Card, memory::DeviceMemory};
use crate::Fresh;

/// Of one stream, or of one branch of a graph: operations that use it never run at the same time.
pub(super) struct Workspace {
    memory: DeviceMemory,
    bytes: usize,
}

impl Workspace {
    /// In front of what is used anew by each operation; keeps that aligned.
    const HEAD: usize = 256;

    /// With `bytes` to work in. The context is current.
    pub(super) fn new(card: &Arc<Card>, bytes: usize) -> Result<Workspace, CudaError> {
        let memory = DeviceMemory::about(card, Self::HEAD + bytes, Fresh::Zeroed)?;
        let memory = memory.ok_or(CudaError::NoWorkspace { card: card.ordinal, bytes })?;
        let one = 1.0f32.to_bits();
        // SAFETY: the first bytes of fresh memory, which nobody else knows.
        card.on_side(|stream| unsafe {
            ("cuMemsetD32Async", sys::cuMemsetD32Async(memory.address(), one, 1, stream.0))
        })?;
        Ok(Workspace { memory, bytes })
    }

    /// How much there is to work in.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where an f32 of 1 is.
    pub(super) fn one(&self) -> u64 {
        self.memory.address()
    }

    /// Where the rest is.
    pub(super) fn scratch(&self) -> u64 {
        self.memory.address() + Self::HEAD as u64
    }
}
