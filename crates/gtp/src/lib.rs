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
mod error;
pub mod why; //  every synchronisation, by name

pub use self::{
    config::{GradScaling, GradSum, GtpConfig, ShardAxis},
    error::GtpError,
    plan::{GtpPlan, PassPlan, PlannedGather, PlannedGrad, Slot, WeightPlan},
    schedule::{GatherIndex, Grad, GradIndex, PassKind, Schedule, Step, Use, UseIndex, WeightIndex},
    slots::{Lifetime, SlotPlan},
};
