//! What parts of a pipeline are counted by. All count from 0.

use std::fmt;

/// A model chunk of one stage. Interleaved pipelines give every stage several.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ChunkIndex(pub u32);

/// A captured layer of one chunk, counted inside the chunk.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LayerIndex(pub u32);

/// A microbatch of one step.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct MicrobatchIndex(pub u32);

impl ChunkIndex {
    /// As an index into a list of chunks.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl LayerIndex {
    /// As an index into a chunk's list of layers.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl MicrobatchIndex {
    /// As an index into a list of microbatches.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for ChunkIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chunk {}", self.0)
    }
}

impl fmt::Display for LayerIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {}", self.0)
    }
}

impl fmt::Display for MicrobatchIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "microbatch {}", self.0)
    }
}
