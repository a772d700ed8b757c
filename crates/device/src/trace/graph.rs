//! Launched graphs in a trace: the nodes once, and for each launch what it was bound to.

use std::{fmt, sync::Arc};

use super::{Position, TraceAccess, WaitOutcome, accesses_to};
use crate::Label;

/// The nodes of an executable graph. Shared by all its launches.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceGraph {
    /// Number of the executable on its device.
    pub id: u64,
    /// Name.
    pub name: Label,
    /// In an order in which they may run one after the other.
    pub nodes: Vec<TraceNode>,
}

/// One node.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceNode {
    /// Earlier nodes that it is ordered directly behind.
    pub behind: Vec<u32>,
    /// The stream that it was captured on, by number on its device.
    pub lane: u32,
    /// Waits among captured streams that led to `behind`, or would have if nothing had taken them away.
    pub waits: Vec<NodeWait>,
    /// What it does.
    pub what: TraceNodeKind,
}

/// A wait inside a captured graph.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeWait {
    /// Name of the synchronisation.
    pub why: Label,
    /// Node that it orders behind.
    pub node: u32,
    /// Whether it holds.
    pub outcome: WaitOutcome,
}

/// What a node does.
#[derive(Clone, Debug, PartialEq)]
pub enum TraceNodeKind {
    /// An operation.
    Op {
        /// Operation.
        name: Label,
        /// Place in the model.
        site: Label,
        /// Floating-point operations; 0 for a user's own operation.
        flops: u64,
        /// Declared accesses.
        accesses: Vec<TraceAccess>,
    },
    /// A member's call of a joint operation.
    Joint {
        /// Group.
        group: Label,
        /// Position among this graph's calls of that group.
        position: u64,
        /// What is asked.
        what: Label,
        /// Place in the model.
        site: Label,
        /// Declared accesses.
        accesses: Vec<TraceAccess>,
    },
    /// Waits for an event from outside: an in-gate.
    Wait {
        /// Name of the synchronisation.
        why: Label,
        /// Event.
        event: Label,
    },
    /// Records an event for others outside: an out-gate.
    Record {
        /// Event.
        event: Label,
    },
}

/// An external node in one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundGate {
    /// The node.
    pub node: u32,
    /// Which record of the event, from 1: the one that a wait is bound to, or that a record makes.
    pub generation: u64,
    /// Where that record is. `None` for a record node, which is there itself, and for a wait that nothing answers.
    pub on: Option<Position>,
    /// Whether a wait holds; `Enforced` for a record.
    pub outcome: WaitOutcome,
}

/// The joint operations of one group in one launch.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchGroup {
    /// Group.
    pub group: Label,
    /// Ranks, in the order of the group.
    pub members: Arc<[u32]>,
    /// Position of this launch's block of calls in the group's sequence.
    pub group_seq: u64,
}

impl fmt::Display for TraceGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, node) in self.nodes.iter().enumerate() {
            let line = if i == 0 { "" } else { "\n" };
            write!(f, "{line}node {}#{}.{i} lane {} behind {:?} ", self.name, self.id, node.lane, node.behind)?;
            match &node.what {
                TraceNodeKind::Op { name, site, flops, accesses } => {
                    write!(f, "op {name}@{site} flops={flops}")?;
                    accesses_to(f, accesses)?;
                }
                TraceNodeKind::Joint { group, position, what, site, accesses } => {
                    write!(f, "joint {group}+{position} {what}@{site}")?;
                    accesses_to(f, accesses)?;
                }
                TraceNodeKind::Wait { why, event } => write!(f, "wait {event} {why}")?,
                TraceNodeKind::Record { event } => write!(f, "record {event}")?,
            }
            for wait in &node.waits {
                write!(f, " ({} on {} {:?})", wait.why, wait.node, wait.outcome)?;
            }
        }
        Ok(())
    }
}
