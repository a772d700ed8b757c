//! What is left when graphs are deleted, and who holds it.

use std::fmt;

/// Something of a deleted graph that is still there.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Survivor {
    /// Handles of a graph. They hold nothing, and their replays are refused.
    Handles {
        /// The graph.
        graph: String,
        /// How many.
        handles: usize,
    },
    /// Graphs of the device that nobody of this set accounts for: captured elsewhere, or taken out of a
    /// [`Graph`](crate::Graph).
    Captured {
        /// Rank of the device.
        rank: u32,
        /// How many more than before.
        graphs: usize,
    },
    /// Executables of the device that run, or that someone else could launch.
    Executables {
        /// Rank of the device.
        rank: u32,
        /// How many more than before.
        executables: usize,
    },
}

impl fmt::Display for Survivor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Survivor::Handles { graph, handles } => {
                write!(f, "graph '{graph}': {handles} handles, held by whoever captured or replays it")
            }
            Survivor::Captured { rank, graphs } => {
                write!(f, "rank {rank}: {graphs} captured graphs, held by whoever asked a graph for what it captured")
            }
            Survivor::Executables { rank, executables } => {
                write!(f, "rank {rank}: {executables} executables, held by launches that run or wait to run")
            }
        }
    }
}
