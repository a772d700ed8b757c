//! What holds the bytes of an allocation.

use crate::{cpu::Storage, cuda::DeviceMemory};

/// Memory of the host, or of a card.
pub(crate) enum Backing {
    Host(Storage),
    Card(DeviceMemory),
}

impl Backing {
    /// The first byte, for code that runs on the host.
    pub(crate) fn host(&self) -> *mut u8 {
        match self {
            Backing::Host(storage) => storage.base(),
            Backing::Card(_) => unreachable!("BUG: the host reaches for memory of a card"),
        }
    }
}
