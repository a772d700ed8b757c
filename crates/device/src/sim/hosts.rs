//! The ranks' host threads: exactly one of them runs, and only until it blocks.

use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar},
};

use crate::{Asked, queue::Mark};

/// What a rank's thread is doing.
pub(super) enum Host {
    /// Expected, or free to go on, when its turn comes.
    Ready,
    Running,
    /// Until the mark is done.
    Blocked {
        mark: Arc<Mark>,
        what: String,
    },
}

/// All expected hosts. Whoever holds the turn runs; with no hosts, the calling thread drives the scheduler itself.
#[derive(Default)]
pub(super) struct Hosts {
    pub(super) by_rank: BTreeMap<u32, Host>,
    pub(super) turn: Option<u32>,
    /// By rank, of those that ever waited for their turn: to wake all of them for each would cost more than the steps.
    bells: BTreeMap<u32, Arc<Condvar>>,
}

impl Hosts {
    /// The lowest rank that could go on.
    fn next(&self) -> Option<u32> {
        let mut hosts = self.by_rank.iter();
        let next = hosts.find(|(_, host)| match host {
            Host::Ready => true,
            Host::Blocked { mark, .. } => mark.is_done(),
            Host::Running => false,
        });
        next.map(|(rank, _)| *rank)
    }

    /// What tells a rank that it has the turn.
    pub(super) fn bell(&mut self, rank: u32) -> Arc<Condvar> {
        self.bells.entry(rank).or_default().clone()
    }

    /// Wakes whoever has the turn. All, if that one's thread has not come: how long it stays away counts for everybody.
    pub(super) fn ring(&self) {
        match self.turn.filter(|_| self.absent().is_none()) {
            Some(rank) => self.bells.get(&rank).into_iter().for_each(|bell| bell.notify_all()),
            None => self.bells.values().for_each(|bell| bell.notify_all()),
        }
    }

    /// Whoever has the turn and has not taken it up.
    pub(super) fn absent(&self) -> Option<u32> {
        self.turn.filter(|rank| matches!(self.by_rank.get(rank), Some(Host::Ready)))
    }

    /// Some host could go on.
    pub(super) fn can_pass(&self) -> bool {
        self.next().is_some()
    }

    /// Gives the turn to the lowest rank that can use it; false if all wait for operations.
    pub(super) fn pass_turn(&mut self) -> bool {
        self.turn = self.next();
        self.turn.is_some()
    }

    /// What every blocked host waits for.
    pub(super) fn waiting(&self) -> Asked {
        let blocked = self.by_rank.iter().filter_map(|(rank, host)| match host {
            Host::Blocked { what, .. } => Some((*rank, format!("to wait for {what}"))),
            _ => None,
        });
        Asked(blocked.collect())
    }
}
