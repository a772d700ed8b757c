//! What can go wrong in this crate.

use std::{error::Error as StdError, fmt, sync::Arc};

use pgroups::{Address, Keep, PgError};
use thiserror::Error;

use crate::{Difference, Scope};

/// Failures of captures and replays.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum GraphError {
    /// A capture inside another.
    #[error(
        "graph '{graph}' on rank {rank}: a capture is open on this device, and its record goes on; end it before the \
         next begins"
    )]
    CaptureOpen {
        /// What was to be captured.
        graph: String,
        /// Rank.
        rank: u32,
    },
    /// What was to be captured failed by itself.
    #[error("graph '{graph}': what was to be captured failed; nothing is left of the capture")]
    Body {
        /// The graph.
        graph: String,
        /// Its error.
        #[source]
        source: Arc<dyn StdError + Send + Sync>,
    },
    /// A name given to two inputs.
    #[error("graph '{graph}': input '{input}' is declared twice: give each its own name")]
    InputTwice {
        /// The graph.
        graph: String,
        /// The input.
        input: String,
    },
    /// A replay with other arguments than the capture's.
    #[error("graph '{graph}' was captured with other arguments, and nothing was launched:{}", List(differences))]
    Arguments {
        /// The graph.
        graph: String,
        /// All of them.
        differences: Vec<Difference>,
    },
    /// Parameters that lie elsewhere, or belong to others, than when the graph was captured.
    #[error("graph '{graph}' is not valid any more, and nothing was launched; capture it again:{}", List(changes))]
    Invalid {
        /// The graph.
        graph: String,
        /// All of them.
        changes: Vec<Change>,
    },
    /// A replay of a graph that was deleted.
    #[error("graph '{graph}' was deleted: capture it again")]
    Deleted {
        /// The graph.
        graph: String,
    },
    /// A capture that needs what the scope cannot have.
    #[error("graph '{graph}' of scope {scope} has accounts of {accounts} backends: only whole steps keep accounts")]
    AccountsBelowStep {
        /// The graph.
        graph: String,
        /// Its scope.
        scope: Scope,
        /// Accounts given.
        accounts: usize,
    },
    /// Whoever keeps an account of captured steps is gone.
    #[error("graph '{graph}': whoever keeps the account of its steps is gone; delete the graph before its backend")]
    AccountGone {
        /// The graph.
        graph: String,
    },
    /// From the crate below.
    #[error(transparent)]
    Groups(Box<PgError>),
    /// From the device.
    #[error(transparent)]
    Device(Box<device::Error>),
}

/// What has changed about a parameter since a graph was captured.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Change {
    /// It was bound to other memory.
    Moved {
        /// Parameter.
        param: String,
        /// Where the graph reads and writes it.
        captured: Address,
        /// Where it is.
        now: Address,
    },
    /// Nobody holds it any more.
    Gone {
        /// Parameter.
        param: String,
    },
    /// It is published together with others than when the graph was captured.
    Regrouped {
        /// Parameter.
        param: String,
        /// Whom it shared its publisher with.
        with: String,
    },
    /// Its gradient is governed by others, or by other memory, than when the graph was captured.
    Governed {
        /// Parameter.
        param: String,
        /// What the graph does with what the gradient holds. None: it adds to what an earlier graph has put there.
        captured: Option<FirstUse>,
        /// What it would have to do.
        now: FirstUse,
    },
}

/// What the first use of a gradient in a pass does with what it finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FirstUse {
    /// As it likes: nobody waits for the gradient.
    Nobodys,
    /// Adds.
    Adds,
    /// Multiplies it by a flag on the device.
    Flag {
        /// Number of the flag's allocation on its rank.
        allocation: u32,
        /// Where it begins there.
        byte: usize,
    },
}

impl FirstUse {
    pub(crate) fn of(keep: &Keep) -> FirstUse {
        match keep {
            Keep::All => FirstUse::Adds,
            Keep::Times(flag) => FirstUse::Flag { allocation: flag.allocation_id(), byte: flag.region().start },
        }
    }
}

impl fmt::Display for FirstUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FirstUse::Nobodys => f.write_str("as its blocks like"),
            FirstUse::Adds => f.write_str("by adding"),
            FirstUse::Flag { allocation, byte } => write!(f, "by the flag in allocation {allocation} at byte {byte}"),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = |a: &Address| {
            let region = a.region;
            let bytes = region.rows * region.row_bytes;
            format!("allocation {} at byte {}, {bytes} bytes, bound {} times", a.allocation, region.start, a.generation)
        };
        match self {
            Change::Moved { param, captured, now } => {
                write!(f, "parameter '{param}' was in {}, and is in {}", place(captured), place(now))
            }
            Change::Gone { param } => write!(f, "parameter '{param}' is gone"),
            Change::Regrouped { param, with } => {
                write!(f, "parameter '{param}' is not published together with '{with}' any more")
            }
            Change::Governed { param, captured: Some(captured), now } => {
                write!(f, "the gradient of '{param}' was begun {captured}, and has to be begun {now}")
            }
            Change::Governed { param, captured: None, now } => {
                write!(f, "the gradient of '{param}' was added to, and has to be begun {now}")
            }
        }
    }
}

impl From<PgError> for GraphError {
    fn from(error: PgError) -> GraphError {
        GraphError::Groups(Box::new(error))
    }
}

impl From<device::Error> for GraphError {
    fn from(error: device::Error) -> GraphError {
        GraphError::Device(Box::new(error))
    }
}

/// One to a line.
struct List<'l, T>(&'l [T]);

impl<T: fmt::Display> fmt::Display for List<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|item| write!(f, "\n  {item}"))
    }
}
