//! What models run on.

use std::time::Duration;

use device::{Fresh, Machine, Options, cuda::CudaOptions};

/// Memory that holds NaN until it is written.
fn poisoned() -> Options {
    Options { timeout: Duration::from_secs(20), fresh: Fresh::Poisoned }
}

/// The first card, if the tests were built for one.
pub(crate) fn cards() -> Vec<Machine> {
    crate::cards::cards(CudaOptions::default(), poisoned())
}

/// Two workers, and the first card.
pub(crate) fn machines() -> Vec<Machine> {
    [Machine::cpu_with(2, poisoned()).unwrap()].into_iter().chain(cards()).collect()
}
