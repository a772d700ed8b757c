//! A joint operation under way: sources are taken at once, destinations written member by member.

use std::sync::{Mutex, MutexGuard, OnceLock};

use super::past::Past;
use crate::{
    cpu,
    exchange::Piece,
    joint::{Arrival, pieces_of},
};

/// All members have come; each goes on when its own part is delivered.
pub(super) struct Exchanging {
    pub(super) arrivals: Vec<Arrival>,
    pieces: Vec<Piece>,
    /// Values by piece, then by source. `None` until taken, empty on `dry`.
    taken: Mutex<Option<Vec<Vec<Vec<u8>>>>>,
    /// In a search: what comes before the parts are delivered.
    pub(super) past: OnceLock<Past>,
}

impl Exchanging {
    pub(super) fn new(arrivals: Vec<Arrival>) -> Self {
        let pieces = pieces_of(&arrivals);
        Exchanging { arrivals, pieces, taken: Mutex::new(None), past: OnceLock::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Vec<Vec<Vec<u8>>>>> {
        self.taken.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    pub(super) fn is_taken(&self) -> bool {
        self.lock().is_some()
    }

    /// Reads all sources, unless that was done.
    pub(super) fn take(&self, computes: bool) {
        let mut taken = self.lock();
        if taken.is_none() {
            let values = |piece: &Piece| piece.sources.iter().map(|(_, view)| cpu::snapshot(view)).collect();
            let values = || self.pieces.iter().map(values).collect();
            // Refused only if an operation drops the last handle of this stream while it uses the same memory.
            *taken =
                Some(if computes { cpu::with_claims(&self.arrivals, values).unwrap_or_default() } else { Vec::new() });
        }
    }

    /// Writes what `member` receives.
    pub(super) fn deliver(&self, member: usize, computes: bool) {
        let taken = self.lock();
        let taken = taken.as_ref().expect("BUG: delivered before the sources were taken");
        let write = || {
            for (piece, sources) in self.pieces.iter().zip(taken) {
                for (_, dest) in piece.dests.iter().filter(|(m, _)| *m == member) {
                    cpu::deliver(piece, sources, dest);
                }
            }
        };
        if computes {
            cpu::with_claims(std::slice::from_ref(&self.arrivals[member]), write);
        }
    }
}
