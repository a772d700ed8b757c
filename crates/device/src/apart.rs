//! Values on cache lines of their own.

use std::ops::Deref;

/// Shares its cache lines with nothing else: what other cores write beside it does not take it from this one, nor the
/// other way round. Two lines, because processors fetch pairs.
#[repr(align(128))]
pub(crate) struct Apart<T>(pub(crate) T);

impl<T> Deref for Apart<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}
