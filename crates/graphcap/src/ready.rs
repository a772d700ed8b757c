//! Whether a replay would find everything published, without the graph's lock.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

use pgroups::{Quiet, Watch};

/// What is looked at instead of a graph: as it was captured, then as it is after each change of its parameters. It
/// keeps flags of publishers and parameters, nobody's memory.
pub(crate) struct Ready {
    first: Known,
    deleted: AtomicBool,
}

/// Flags that were right until one of the watches sees something.
pub(crate) struct Known {
    pub(crate) watches: Vec<Watch>,
    /// By condition; none if some publisher has no flag and must be asked each time.
    pub(crate) quiet: Option<Vec<Quiet>>,
    newer: OnceLock<Box<Known>>,
}

impl Known {
    pub(crate) fn new(watches: Vec<Watch>, quiet: Option<Vec<Quiet>>) -> Known {
        Known { watches, quiet, newer: OnceLock::new() }
    }
}

impl Ready {
    pub(crate) fn new(first: Known) -> Ready {
        Ready { first, deleted: AtomicBool::new(false) }
    }

    /// Everything is published, and nothing has changed. False where that is not known.
    pub(crate) fn is_known(&self) -> bool {
        let known = self.newest();
        let quiet = known.quiet.as_ref().is_some_and(|quiet| quiet.iter().all(Quiet::get));
        quiet && !known.watches.iter().any(Watch::has_changed) && !self.deleted.load(Ordering::Acquire)
    }

    /// Parameters have changed, and the graph has followed. One caller at a time: who holds the graph's lock.
    pub(crate) fn follow(&self, newer: Known) {
        let set = self.newest().newer.set(Box::new(newer));
        debug_assert!(set.is_ok(), "BUG: two changes of a graph at once");
    }

    pub(crate) fn delete(&self) {
        self.deleted.store(true, Ordering::Release);
    }

    fn newest(&self) -> &Known {
        let mut known = &self.first;
        while let Some(newer) = known.newer.get() {
            known = newer;
        }
        known
    }
}
