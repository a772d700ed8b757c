//! What one pipeline stage runs in which order, and what of it is captured.
//!
//! Everything here is arithmetic over plain data: no device, no group, no rank of its own. A stage says where it
//! stands ([`PipelinePlace`], from the pipeline group that it was given) and what it was asked for
//! ([`PipelineSetup`]); [`PipelinePlan`] checks that once and lays it out; a [`Schedule`] is the list of steps, whether
//! it came from a plan or from a user's own pipeline. From a schedule follow the order of capture
//! ([`CaptureOrder`], by chunk or, through [`LayerOrder`], by layer) and the memory of sample inputs ([`SlotPlan`]).

mod index; //     chunks, layers, microbatches
mod place; //     where a stage stands
mod setup; //     what a pipeline was asked for
mod violation; // what can be wrong with it
mod scope; //     how much one graph may hold
mod plan; //      counts and table of a setup
mod steps; //     what runs in which order
mod order; //     the same as numbers
mod layers; //    the same by layer
mod slots; //     memory of sample inputs
mod warm_up; //   runs before a capture
mod error;

pub use self::{
    error::{ScheduleError, WhereStopped},
    index::{ChunkIndex, LayerIndex, MicrobatchIndex},
    layers::{LayerOrder, LayerStep, Pairing, WeightGrads},
    order::{CaptureOrder, OrderId},
    place::PipelinePlace,
    plan::{Counts, PipelinePlan},
    scope::GraphScope,
    setup::{ExpertOverlap, Interleaving, PassKind, PipelineSetup},
    slots::{SlotEntry, SlotIndex, SlotPlan},
    steps::{Direction, Schedule, Step},
    violation::{ScheduleViolation, ScheduleViolations},
    warm_up::{LocalWarmUp, local_warm_up, warm_up_iterations},
};
