//! Values that kernels refuse.

use thiserror::Error;

use super::IGNORE;

/// A value that a running kernel met and cannot use: the source of [`Error::Failed`](crate::Error::Failed).
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ValueError {
    /// A token id that the vocabulary does not have.
    #[error("id {id} at position {position} is outside the vocabulary 0..{vocab}")]
    Id {
        /// The id.
        id: i32,
        /// Its place among the ids.
        position: usize,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A target that the vocabulary does not have.
    #[error("target {id} at position {position} is outside the vocabulary 0..{vocab}; {IGNORE} is ignored")]
    Target {
        /// The target.
        id: i32,
        /// Its place among the targets.
        position: usize,
        /// Size of the vocabulary.
        vocab: usize,
    },
}
