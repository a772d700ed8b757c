//! Generalized tensor parallelism: weights gathered just before use, and layers cut over a tensor group.
//!
//! Read `schedule`, `plan`, `gtp`, `pass`, in this order; [`layers`] stands by itself.
#![forbid(unsafe_code)]

pub mod layers; // products, embeddings and losses of which each rank of a tensor group computes a part
// Plans: arithmetic only.
mod config; //   which axes gather, and how far ahead
mod schedule; // what a pass uses, in order
mod slots; //    where buffers with known lifetimes lie
mod plan; //     when each use is gathered, and where to
// One rank.
mod gtp; //       the handle
mod pass; //      weights as a pass sees them
mod core; //      what it is made of
mod weight; //    a weight, and where it travels
mod attached; //  a plan with memory and events
mod run; //       a pass under way
mod gather; //    weights come and go
mod reduce; //    gradients become sums of shards
mod hand_over; // what graphs find and leave
mod error;
pub mod why; //  every synchronisation, by name

pub use self::{
    config::{Drain, GradScaling, GradSum, GtpConfig, ShardAxis},
    core::Counters,
    error::GtpError,
    gtp::Gtp,
    pass::Sharded,
    plan::{GtpPlan, PassPlan, PlannedGather, PlannedGrad, Slot, WeightPlan},
    schedule::{GatherIndex, Grad, GradIndex, PassKind, Schedule, Step, Use, UseIndex, WeightIndex},
    slots::{Lifetime, SlotPlan},
};

/// The README's snippets compile and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
