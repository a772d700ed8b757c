//! Vector clocks: how far along each chain of operations a point is ordered behind.

use std::rc::Rc;

/// An operation's place: chains are numbered over all ranks, ticks count along a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Epoch {
    pub(super) chain: u32,
    pub(super) tick: u32,
}

/// What a point of a chain is ordered behind: the point itself, and for every other chain the last tick.
///
/// Whoever knows `at` knows all that `seen` says: a chain's tick moves whenever its clock does.
#[derive(Clone, Debug)]
pub(super) struct Point {
    pub(super) at: Epoch,
    pub(super) seen: Rc<Vec<u32>>,
}

impl Point {
    pub(super) fn start(at: Epoch, chains: usize) -> Point {
        Point { at, seen: Rc::new(vec![0; chains]) }
    }

    /// What is at `epoch` comes before this point, or is it.
    pub(super) fn is_behind(&self, epoch: Epoch) -> bool {
        if epoch.chain == self.at.chain {
            return epoch.tick <= self.at.tick;
        }
        self.seen[epoch.chain as usize] >= epoch.tick
    }

    /// This point comes behind `other` too. True if that is news.
    pub(super) fn join(&mut self, other: &Point) -> bool {
        if self.is_behind(other.at) {
            return false;
        }
        self.absorb(other);
        true
    }

    /// As [`Point::join`], whatever is known of `other`.
    pub(super) fn absorb(&mut self, other: &Point) {
        let seen: &mut Vec<u32> = Rc::make_mut(&mut self.seen);
        absorb(seen, other);
    }
}

/// `seen` comes behind `other`.
pub(super) fn absorb(seen: &mut [u32], other: &Point) {
    seen.iter_mut().zip(other.seen.iter()).for_each(|(own, others)| *own = (*own).max(*others));
    let own = &mut seen[other.at.chain as usize];
    *own = (*own).max(other.at.tick);
}
