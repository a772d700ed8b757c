//! Names of synchronisations.

use std::fmt;

/// Names one synchronisation (`ddp.read_after_publish`): findings print it, mutation tests drop it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Why(pub &'static str);

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}
