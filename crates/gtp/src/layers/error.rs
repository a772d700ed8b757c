//! What a layer refuses, one variant per cause.

use pgroups::PgError;
use thiserror::Error;

/// What a layer refuses.
///
/// Apart from [`GtpError`](crate::GtpError): layers know nothing of gathered weights, and whoever uses only layers
/// meets none of its causes.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The device: shapes that do not fit, a frame's plan that was left, a failed operation.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// The weights or the tensor group.
    #[error(transparent)]
    Groups(#[from] PgError),
    /// Rows that do not divide.
    #[error(
        "group '{group}': {rows} rows do not divide over its {size} members, as a sequence split needs it: \
         make sequences x tokens a multiple of {size}"
    )]
    UnevenRows {
        /// The tensor group.
        group: String,
        /// Rows of all tokens.
        rows: usize,
        /// Members.
        size: u32,
    },
    /// An activation that the product's kernel does not have alone.
    #[error(
        "the product with '{weight}' has no bias, and GELU is applied behind a bias only: give it one, or apply \
         ops::Gelu to the result"
    )]
    GeluWithoutBias {
        /// The weight.
        weight: String,
    },
    /// A vocabulary table that was cut in another way.
    #[error(
        "'{param}' has {have} rows here; {rows} rows over a tensor group of {size} leave {want} each: \
         cut the table over the group that the weights name"
    )]
    TableRows {
        /// The table.
        param: String,
        /// Rows handed out.
        have: usize,
        /// Rows of this rank's part.
        want: usize,
        /// Rows of the whole table.
        rows: usize,
        /// Members.
        size: u32,
    },
}
