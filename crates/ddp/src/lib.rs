//! Data parallelism: gradients reduced over replicas bucket by bucket, the optimizer step, values published.
//!
//! Read `plan` first, then `ddp`, `reduction`, `publication`, `optimizer`.
#![forbid(unsafe_code)]

// Plans: arithmetic only.
mod plan; //        which parameter lies in which bucket, and in whose shard
mod scaling; //     each gradient is scaled once
mod readiness; //   when a bucket is complete
// One rank.
mod config; //      settings
mod buffers; //     memory as planned
mod ddp; //         the handle
mod attach; //      how it is built
mod core; //        what it is made of
mod gates; //       what streams wait for
mod reduction; //   gradients land, buckets are reduced
mod completion; //  what follows the buckets
mod publication; // written values become readable
mod offload; //     buffers leave the device and come back
mod account; //     what captured steps leave on the host
mod agree; //       ranks compare their parameters
mod ledger; //      publications of a traced run
pub mod why;
mod optimizer; //   AdamW on shards, one decision for all ranks
mod error;

pub use self::buffers::{DeclaredParam, ParamBuffers, Training};
pub use self::completion::{Completion, CompletionStage};
pub use self::config::{Accumulation, ChunkPlace, DdpConfig, Dispatch, GradOverlap, PostGather, Precision, Unfilled};
#[doc(hidden)]
pub use self::core::Record;
pub use self::core::{Cause, Publication};
pub use self::ddp::{BucketMemory, Counters, Ddp, Loaded, NoSync, OwnSchedule};
pub use self::error::{DdpError, Unready};
pub use self::ledger::{Issuance, Ledger, LedgerEntry, Waiting};
pub use self::offload::{Buffers, Offloaded};
pub use self::optimizer::{
    AdamConfig, CountZeros, GradCheck, LossScale, LossScaleConfig, NormKind, Optimizer, OptimizerConfig, ParamGroup,
    StateViews, StepOutcome,
};
pub use self::plan::{
    Bucket, BucketId, BucketPlan, BucketSize, BufferKey, BufferPlan, BusPadding, Copies, Fragment, GradType, Joining,
    PlanConfig, PlannedParam, Sharding, Slot, Stored, default_bucket_numel,
};
pub use self::scaling::{ClassScaling, Replication, Scaling};

/// The page's snippets compile and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/ddp.md")]
struct Page;

/// So do the README's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
