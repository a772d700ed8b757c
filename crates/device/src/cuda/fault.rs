//! What kernels tell the host: which operation has begun, and which value one could not use.

use std::sync::Arc;

use super::{CudaError, card::Card, memory::PinnedBlock};

/// Words that the kernels of one stream, or of one graph, write: 0 the operation that began last, 2 the operation that
/// refused a value, 3 its position and the value.
pub(super) struct Post {
    block: PinnedBlock,
}

/// A value that a kernel refused.
pub(super) struct Refused {
    pub(super) operation: u64,
    pub(super) position: usize,
    pub(super) value: i32,
}

impl Post {
    /// The context is current.
    pub(super) fn new(card: &Arc<Card>) -> Result<Post, CudaError> {
        let block = PinnedBlock::new(card, 4 * size_of::<u64>())?;
        // SAFETY: the block is larger than four words, and the card does not know it yet.
        unsafe { block.host().cast::<[u64; 4]>().write([0; 4]) };
        Ok(Post { block })
    }

    pub(super) fn card(&self) -> u64 {
        self.block.card()
    }

    fn word(&self, index: usize) -> u64 {
        // SAFETY: one of the four words, aligned; volatile because the card writes it.
        unsafe { self.block.host().cast::<u64>().add(index).read_volatile() }
    }

    /// The operation that began last, from 1; 0 if none has.
    pub(super) fn begun(&self) -> u64 {
        self.word(0)
    }

    pub(super) fn refused(&self) -> Option<Refused> {
        let operation = self.word(2);
        let detail = self.word(3);
        (operation != 0).then_some(Refused {
            operation,
            position: (detail >> 32) as usize,
            value: detail as u32 as i32,
        })
    }
}
