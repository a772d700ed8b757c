//! What can go wrong in this crate.

use std::ops::Range;

use thiserror::Error;

/// Failures of the reduction and of the optimizer.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DdpError {
    /// A setting of the optimizer is outside its range.
    #[error("optimizer setting {setting} is {value}; {rule}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: f64,
        /// What must hold.
        rule: &'static str,
    },
    /// Ranges with a weight decay of their own must cover the buffer in order, each element once.
    #[error("decay range {range:?} does not begin where the one before it ends ({expected}), or ends past {numel}")]
    DecayRange {
        /// The range that does not fit.
        range: Range<usize>,
        /// Where it should begin.
        expected: usize,
        /// Elements of the buffer.
        numel: usize,
    },
    /// The device refused or failed.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// A group refused or failed.
    #[error(transparent)]
    Group(#[from] pgroups::PgError),
}
