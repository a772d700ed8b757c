//! Graphs that are captured once and replayed only when everything they read is ready, and a verifier that proves
//! traces free of races.
//!
//! Read `scope`, `capture`, `recording`, `links`, `graph`, in this order; then `schedule` and `runners` for pipelines.
//! [`verify`] stands by itself.
#![forbid(unsafe_code)]

// Captures.
mod scope; //     how much of a step a graph holds, and where it waits
mod capture; //   sets of graphs, and the scope that is handed down
mod recording; // what a capture takes down
mod accounts; //  what is on the host around a captured step
mod cost; //      what captures have taken
// Replays.
mod graph; //     check, issue, copy in, launch, apply
mod warm_up; //   launches that leave nothing behind
mod inputs; //    what a replay is given
mod links; //     parameters, publishers and sinks of a graph
mod ready; //     a look at what is published
mod audit; //     what is left of deleted graphs
// Pipelines.
mod schedule; //  what a stage runs in which order, and what of it is captured
mod runners; //   which captured graph serves which call
// Proofs.
pub mod verify; // what a trace proves, and what it lacks
mod error;
pub mod why; //    every synchronisation, by name

pub use self::{
    audit::Survivor,
    capture::{CaptureScope, GraphConfig, GraphSet},
    cost::CaptureCost,
    error::{Change, FirstUse, GraphError},
    graph::Graph,
    inputs::{Difference, Given},
    runners::{
        CacheKey, CallName, Creation, ForwardCall, GradMode, GraphUnit, OpenCall, OutOfTurn, Recorded, RunnerError,
        RunnerIndex, Runners, Sharing, Unfit, WhyUnfit,
    },
    schedule::{
        CaptureOrder, ChunkIndex, Counts, Direction, ExpertOverlap, GraphScope, Interleaving, LayerIndex, LayerOrder,
        LayerStep, LocalWarmUp, MicrobatchIndex, OrderId, Pairing, PassKind, PipelinePlace, PipelinePlan,
        PipelineSetup, Schedule, ScheduleError, ScheduleViolation, ScheduleViolations, SlotEntry, SlotIndex, SlotPlan,
        Step, WeightGrads, WhereStopped, local_warm_up, warm_up_iterations,
    },
    scope::{GateMode, Scope},
};

/// The page's snippets compile and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/graphcap.md")]
struct Page;

/// The README's snippets compile and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
