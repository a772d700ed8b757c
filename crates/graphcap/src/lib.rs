//! Graphs that are captured once and replayed only when everything they read is ready.
//!
//! Read `scope`, `capture`, `recording`, `links`, `graph`, in this order.
#![forbid(unsafe_code)]

// Captures.
mod scope; //     how much of a step a graph holds, and where it waits
mod capture; //   sets of graphs, and the scope that is handed down
mod recording; // what a capture takes down
mod accounts; //  what is on the host around a captured step
// Replays.
mod graph; //     check, issue, copy in, launch, apply
mod inputs; //    what a replay is given
mod links; //     parameters, publishers and sinks of a graph
mod audit; //     what is left of deleted graphs
mod error;
pub mod why;

pub use self::{
    audit::Survivor,
    capture::{CaptureScope, GraphConfig, GraphSet},
    error::{Change, GraphError},
    graph::Graph,
    inputs::{Difference, Given},
    scope::{GateMode, Scope},
};
