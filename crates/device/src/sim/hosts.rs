//! The ranks' host threads: exactly one of them runs, and only until it blocks.

use std::{collections::BTreeMap, sync::Arc};

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
