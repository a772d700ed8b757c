//! Process groups without globals: grids, groups, collectives, parameters and where they lie.
//!
//! Planning comes first and needs no device: a [`Layout`] lays axes over ranks, a [`GroupsPlan`] says which groups
//! are made in which order and where one rank stands in them, a [`Placement`] says who holds which elements of a
//! parameter. What is planned here is checked; what is built from it has nothing left to check.
//!
//! Running needs a device: [`local`] runs ranks as threads, [`ProcessGroups`] builds a plan's groups, a [`Group`] has
//! the collectives. A [`ParamSet`] gives parameters memory; a [`Turn`] is how their values are read.
#![deny(unsafe_code)]

// Ranks and axes.
mod axis; //         names, and the order they are laid out in
mod grid; //         ranks on axes, and the groups of any subset
mod rank; //         place in the world, place in a group
mod registry; //     created once, read after creation
mod views; //        the same ranks on other axes
// Layouts.
mod layout; //       what a user asks for
mod layout_rules; // every rule, every broken one told
mod violation; //    what can be wrong, and the nearest that would do
// Groups.
mod derived; //      what stands in for a group that was not supplied
mod keys; //         what a group is asked for by
mod modules; //      a collection for each module
mod plan; //         creation order and own place
mod recipe; //       members by arithmetic
mod report; //       every standard group, to look at
// Running.
mod agreement; //    ranks compare plans before they build
mod batch; //        several collectives as one
mod collection; //   the groups of one rank
mod collectives; //  what a group does
mod group; //        members and communicators
mod local; //        ranks as threads
// Parameters.
mod init; //         values by seed, name and index
mod philox; //       random words by counter
mod placement; //    how a tensor lies on a grid
mod shard_map; //    who holds which elements
mod param; //        a parameter that has memory
mod param_set; //    all of a rank's, in one buffer
mod replicas; //     who holds the same elements, compared
mod publish; //      who makes values readable, who waits for gradients
mod turn; //         the only way to a value
mod tensor; //       ranks that compute one product together
mod weights; //      what a model's blocks see of all that
// Start and errors.
mod error;
mod plan_error;
mod world; //        what the launcher says

pub use self::{
    axis::{Axis, Order, ParamClass},
    batch::Batch,
    collection::{ProcessGroups, Supplied},
    derived::{Consumer, Derived, PlanWarning, Resolution},
    error::PgError,
    grid::{Grid, OwnGroup},
    group::Group,
    init::{Init, InitStream, Seed},
    keys::{Key, Standard},
    layout::{Layout, LayoutConfig, Stages, ViewConfig, WorldPart, weight_shards},
    local::{Rank, local},
    modules::{ModuleRole, Modules},
    param::{Address, Param, ParamId, Watch, WeakParam},
    param_set::{ParamSet, ParamTypes, Placed},
    philox::philox_4x32_10,
    placement::{Cut, Fragment, Fragments, ParamSpec, Pin, Placement, padded_cut},
    plan::{Fingerprint, GroupsPlan, Needs, PlanDump, Planned, PlannedKey, WhyEmpty},
    plan_error::PlanError,
    publish::{After, Epochs, HandOver, HostState, Landed, Publish, Quiet, Recorder},
    rank::{GlobalRank, GroupRank},
    registry::Registry,
    replicas::Replicas,
    report::{GroupsReport, groups_report},
    shard_map::{Replica, Shard, ShardMap, Span},
    tensor::{Sequence, TensorParallel},
    turn::{Pass, Turn},
    views::{ViewKey, ViewName, Views},
    violation::{LayoutViolation, Nearest, Steps, Violations},
    weights::{GradOut, Keep, Weights, Whole},
    world::{Attendee, DeviceSharing, World, check_attendance},
};

/// The page's snippets compile and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/pgroups.md")]
struct Page;

/// So do the README's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
