//! Ranks that compute the layers of a model together, as the layers see them.

use crate::group::Group;

/// The tensor group that a model's layers are cut over, and what lies between them.
#[derive(Clone, Debug)]
pub struct TensorParallel {
    group: Group,
    sequence: Sequence,
}

/// What a rank of a tensor group holds of the activations between parallel regions: residual stream, norms, embeddings.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Sequence {
    /// All of it, the same on every member.
    #[default]
    Whole,
    /// Sequence parallelism: of the tokens of all sequences, one after the other, the member at place `p` of `n` has
    /// the `p`-th of `n` equal parts. Gradients of weights used there are sums over the group.
    Split,
}

impl TensorParallel {
    /// Over `group`, on a communicator that nobody else uses.
    #[must_use]
    pub fn new(group: Group, sequence: Sequence) -> TensorParallel {
        TensorParallel { group, sequence }
    }

    /// The group.
    #[must_use]
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// What lies between the parallel regions.
    #[must_use]
    pub fn sequence(&self) -> Sequence {
        self.sequence
    }
}
