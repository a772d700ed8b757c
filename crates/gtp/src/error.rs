//! What can go wrong, one variant per cause.

use device::DType;
use pgroups::{PgError, PlanError};
use thiserror::Error;

use crate::schedule::PassKind;

/// Everything this crate refuses.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum GtpError {
    /// Groups, parameters or collectives.
    #[error(transparent)]
    Groups(#[from] PgError),
    /// The device.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// A layout or a placement.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A weight that several configured axes cut.
    #[error(
        "weight '{param}' is cut over {first} and over {second}, both of which gather: cut a weight over one of them"
    )]
    CutTwice {
        /// The weight.
        param: String,
        /// One axis.
        first: String,
        /// The other.
        second: String,
    },
    /// A gathering axis that cuts another dimension than the first, or cuts before another axis does.
    #[error(
        "weight '{param}' is cut over {axis} on dimension {dim} by cut {cut} of {cuts}: the axis that gathers cuts \
         dimension 0, last"
    )]
    NotInnermost {
        /// The weight.
        param: String,
        /// The axis.
        axis: String,
        /// Its dimension.
        dim: usize,
        /// Which cut, from 1.
        cut: usize,
        /// How many.
        cuts: usize,
    },
    /// A group of shards that holds them in another order than the layout.
    #[error(
        "group '{group}' has rank {rank} at place {place}, the layout has it at {coordinate} along {axis}, where its \
         shards are cut: members go in the layout's order"
    )]
    OutOfPlace {
        /// The group.
        group: String,
        /// The rank.
        rank: u32,
        /// Its place in the group.
        place: u32,
        /// The axis.
        axis: String,
        /// Its coordinate along the axis.
        coordinate: u32,
    },
    /// A parameter whose memory does not have the size of its shard.
    #[error("weight '{param}' has {have:?} elements along its dimensions, its placement gives this rank {want:?}")]
    ShardShape {
        /// The weight.
        param: String,
        /// Its memory.
        have: Vec<usize>,
        /// Its placement.
        want: Vec<usize>,
    },
    /// A gradient that is not summed in f32.
    #[error("weight '{param}' has a gradient buffer of {dtype}: gradients of sharded weights are summed in f32")]
    GradType {
        /// The weight.
        param: String,
        /// Its gradient's element type.
        dtype: DType,
    },
    /// A plan that was made for other weights.
    #[error(
        "the plan knows weight {at} as {planned}, it is {have}: make the plan with the same model, layout and settings"
    )]
    PlanOfOthers {
        /// Number of the first weight that differs.
        at: usize,
        /// In the plan.
        planned: String,
        /// Here.
        have: String,
    },
    /// A capture of a kind of pass that has no plan yet.
    #[error("pass '{kind}' cannot be captured before it is planned: run one as it is submitted, or build with a plan")]
    NotPlanned {
        /// The kind of pass.
        kind: PassKind,
    },
    /// A captured pass that does something else than its plan says.
    #[error(
        "captured pass '{kind}' {found} where its plan has {planned}: what is captured runs as planned; run it once as \
         it is submitted to plan it anew"
    )]
    LeavesPlan {
        /// The kind of pass.
        kind: PassKind,
        /// What it does.
        found: String,
        /// What was planned.
        planned: String,
    },
    /// A pass of which one part is captured and another one is not.
    #[error(
        "pass '{kind}' is {under_way}, and its next part is {next}: capture every part of a pass, from `Gtp::pass` on; \
         graphs of some and submitted others may then take turns"
    )]
    HalfCaptured {
        /// The kind of pass.
        kind: PassKind,
        /// What is done with it so far: `captured` or `submitted`.
        under_way: &'static str,
        /// What is done with the part that follows.
        next: &'static str,
    },
    /// A pass that is gone on with and was not begun.
    #[error("no pass is under way: begin one with `Gtp::pass`")]
    NoPass,
    /// A weight that was not given back, or a gradient that was not done, at the end of a part of a pass.
    #[error("pass '{kind}' ends with {what} of '{param}' still open")]
    StillOpen {
        /// The kind of pass.
        kind: PassKind,
        /// `a use` or `a gradient`.
        what: &'static str,
        /// The weight.
        param: String,
    },
    /// A gradient that is asked for while the last one of the weight is still being written.
    #[error("'{param}' has a gradient that is not done: say that it is before the next one is asked for")]
    GradOpen {
        /// The weight.
        param: String,
    },
    /// A weight that is given back, or whose gradient is done, without having been asked for.
    #[error("'{param}' {what} without having been asked for")]
    NotOpen {
        /// The weight.
        param: String,
        /// `is given back` or `has its gradient done`.
        what: &'static str,
    },
}
