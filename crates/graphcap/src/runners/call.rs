//! Who calls, and what for.

use std::fmt;

use crate::schedule::{ChunkIndex, LayerIndex, MicrobatchIndex};

/// What of a model one graph holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum GraphUnit {
    /// A layer.
    Layer {
        /// Its chunk.
        chunk: ChunkIndex,
        /// Counted inside the chunk.
        layer: LayerIndex,
    },
    /// A chunk.
    Chunk(ChunkIndex),
    /// Everything.
    Model,
}

/// Whether a call wants gradients, or a runner can bring them. What can bring them also serves who wants none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum GradMode {
    /// No backward follows: evaluation, generation.
    Off,
    /// A backward follows.
    On,
}

/// A name that a caller gives to one of its kinds of call, such as a batch size while generating. Calls of one name
/// go to one runner, without a search.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CacheKey(pub u64);

/// A forward that wants a runner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ForwardCall<S> {
    /// What is run.
    pub unit: GraphUnit,
    /// For which microbatch.
    pub microbatch: MicrobatchIndex,
    /// What the inputs look like.
    pub signature: S,
    /// Whether a backward follows.
    pub grad: GradMode,
    /// The call's kind, if it has a name.
    pub key: Option<CacheKey>,
}

/// A runner of a [`Runners`](super::Runners).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RunnerIndex(pub usize);

/// One call, as messages name it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallName {
    /// Passes that ended before it.
    pub pass: u64,
    /// Its microbatch.
    pub microbatch: MicrobatchIndex,
}

impl fmt::Display for GraphUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GraphUnit::Layer { chunk, layer } => write!(f, "{layer} of {chunk}"),
            GraphUnit::Chunk(chunk) => chunk.fmt(f),
            GraphUnit::Model => f.write_str("the model"),
        }
    }
}

impl fmt::Display for GradMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GradMode::Off => "without gradients",
            GradMode::On => "with gradients",
        })
    }
}

impl fmt::Display for RunnerIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "runner {}", self.0)
    }
}

impl fmt::Display for CallName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of pass {}", self.microbatch, self.pass)
    }
}
