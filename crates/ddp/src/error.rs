//! What can go wrong in this crate.

use std::fmt;

use pgroups::{GlobalRank, ParamClass, PgError};
use thiserror::Error;

use crate::{Buffers, Stored};

/// Failures of plans, of the reduction, of the publication and of the optimizer.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum DdpError {
    /// Two parameters of one name.
    #[error("parameter '{param}' is declared twice, at {first} and {second}: names are unique in a model")]
    ParamTwice {
        /// The name.
        param: String,
        /// Place of the first.
        first: usize,
        /// Place of the second.
        second: usize,
    },
    /// A parameter without elements.
    #[error("parameter '{param}' has no elements: leave it out of the plan")]
    EmptyParam {
        /// Its name.
        param: String,
    },
    /// Sharding over no rank.
    #[error("{class} buckets are cut into 0 shards: give the size of their reduction group, or turn sharding off")]
    NoShards {
        /// The class.
        class: ParamClass,
    },
    /// The rule by which buckets of other buffers join a one-byte buffer's last bucket takes one such buffer.
    #[error(
        "{count} one-byte buffers of {class} parameters: give quantised weights one gradient type, so they share one"
    )]
    OneByteBuffers {
        /// The class.
        class: ParamClass,
        /// How many.
        count: usize,
    },
    /// A plan for an element type without memory.
    #[error("values of type {stored:?} can be planned but not allocated: no device has the type")]
    NotStorable {
        /// The type.
        stored: Stored,
    },
    /// A plan that was made for another model.
    #[error("the bucket plan does not fit: {what} is {theirs} in the plan, {ours} in the model; plan this model")]
    LayoutDiffers {
        /// What differs first.
        what: String,
        /// In the model.
        ours: String,
        /// In the plan.
        theirs: String,
    },
    /// A plan that was made for another number of ranks.
    #[error(
        "buckets of {class} parameters are cut into {planned} shards, group '{group}' has {size} members: plan for {size}"
    )]
    ShardCount {
        /// The class.
        class: ParamClass,
        /// Shards in the plan.
        planned: u32,
        /// The reduction group.
        group: String,
        /// Its members.
        size: u32,
    },
    /// Averages over the replicas do not know the weight shards.
    #[error(
        "averaging collectives with weights in {weight_shards} shards: choose the mean by pre-scale, which counts both"
    )]
    AveragingShards {
        /// Shards of one weight.
        weight_shards: u32,
    },
    /// f32 accumulation sums pieces at their owner.
    #[error("f32 accumulation {rule}")]
    F32Accumulation {
        /// What it needs.
        rule: &'static str,
    },
    /// Members of a reduction group that declare different parameters. Nothing was moved.
    #[error(
        "group '{group}': parameter {index} is '{ours}' on rank {rank}, '{theirs}' on rank {other}: declare the same on all"
    )]
    ParamsDiffer {
        /// The group.
        group: String,
        /// Place in the declared order.
        index: usize,
        /// This rank.
        rank: GlobalRank,
        /// Its parameter: name, global sizes, element type, whether it is trained.
        ours: String,
        /// The first rank that differs from it.
        other: GlobalRank,
        /// Its parameter.
        theirs: String,
    },
    /// Members of a reduction group with different settings. Nothing was moved.
    #[error("group '{group}': settings are [{ours}] on rank {rank}, [{theirs}] on rank {other}: give the same on all")]
    SettingsDiffer {
        /// The group.
        group: String,
        /// This rank.
        rank: GlobalRank,
        /// Its settings.
        ours: String,
        /// The first rank that differs from it.
        other: GlobalRank,
        /// Its settings.
        theirs: String,
    },
    /// A name that no trained parameter of this rank has.
    #[error("no trained parameter '{param}' on this rank")]
    NoSuchParam {
        /// The name.
        param: String,
    },
    /// A completion over ranks that own different shards of a bucket.
    #[error(
        "gradients cannot be completed over '{group}': rank {rank} is at place {place} of its replicas and owns that shard \
         of every bucket, rank {other} is at place {other_place}: list replicas so that members of other groups stand at \
         equal places"
    )]
    OtherShard {
        /// The completion's group.
        group: String,
        /// This rank.
        rank: GlobalRank,
        /// Its place.
        place: u32,
        /// A member with another shard.
        other: GlobalRank,
        /// Its place.
        other_place: u32,
    },
    /// A gradient, or the end of a microbatch, outside of any.
    #[error("gradient of '{param}' outside a microbatch: call begin_microbatch first, and finish only behind the last")]
    NoMicrobatch {
        /// The parameter.
        param: String,
    },
    /// A microbatch inside another, or the end of a step inside one.
    #[error("microbatch {microbatch} has not ended: call end_microbatch first")]
    MicrobatchOpen {
        /// Its number in the step, from 1.
        microbatch: u32,
    },
    /// The end of a step inside a guard that says there is more to come.
    #[error("the step ends inside no_sync: drop the guard before the last microbatch")]
    StillPaused,
    /// A gradient that was written without asking whether its buffer was free.
    #[error(
        "gradient of '{param}' was written before its buffer was opened: call Turn::open, or Landed::open, before each \
         contribution; the last step may still be reading there"
    )]
    NotOpened {
        /// The parameter.
        param: String,
    },
    /// A gradient that would stay on this rank.
    #[error(
        "gradient of '{param}' landed behind the reduction of {group}: it has more uses in this step than in the last"
    )]
    LandedAfterReduce {
        /// The parameter.
        param: String,
        /// Its bucket group.
        group: String,
    },
    /// Buckets of which gradients are missing at the end of a step. Nothing more was reduced.
    #[error("the step ends with gradients missing in {}", List(.groups))]
    Unfilled {
        /// Every such bucket group.
        groups: Vec<Unready>,
    },
    /// A publication while a graph is captured that it is no part of.
    #[error(
        "{group}: epoch {epoch} would be published while a graph is captured that holds no publications: publish before \
         the capture, or after it"
    )]
    PublishInCapture {
        /// The bucket group.
        group: String,
        /// The write.
        epoch: u64,
    },
    /// A publication of an epoch that is published.
    #[error("{group}: epoch {epoch} is published already, or being published")]
    PublishedTwice {
        /// The bucket group.
        group: String,
        /// The epoch.
        epoch: u64,
    },
    /// Values that were read and that nobody has published, as a trace tells.
    #[error(
        "{group}, rank {rank}: write {epoch} was read {reads} times and never published: read through a turn, or publish \
         before"
    )]
    NeverPublished {
        /// The bucket group.
        group: String,
        /// The rank.
        rank: u32,
        /// The write.
        epoch: u64,
        /// Its reads.
        reads: u64,
    },
    /// Values that were published more than once, as a trace tells.
    #[error("{group}, rank {rank}: write {epoch} was published {times} times ({by}): one of them is too many")]
    PublishedAgain {
        /// The bucket group.
        group: String,
        /// The rank.
        rank: u32,
        /// The write.
        epoch: u64,
        /// How often.
        times: usize,
        /// By whom.
        by: String,
    },
    /// A bucket group that the plan does not have.
    #[error("bucket group {group}: the plan has {groups}")]
    NoBucketGroup {
        /// Its place.
        group: usize,
        /// Groups there are.
        groups: usize,
    },
    /// A write over a publication that nobody has read or waited for. Nothing has changed.
    #[error("{group}: a publication is in flight; wait for it with Ddp::publish before loading")]
    PublicationInFlight {
        /// The bucket group.
        group: String,
    },
    /// Buffers that would leave the device within a step.
    #[error(
        "{what} are offloaded between two steps: finish this one's gradients first, or give them up with zero_grads"
    )]
    OffloadInStep {
        /// The buffers.
        what: Buffers,
    },
    /// A use of buffers that are in host memory. Nothing was submitted.
    #[error("the {what} are offloaded, and their memory is lent: restore them first (Offloaded::restore)")]
    Offloaded {
        /// The buffers.
        what: Buffers,
    },
    /// A division by tokens that scaling does not ask for, or the other way round.
    #[error("scaling {scaling} {rule}")]
    Tokens {
        /// The setting.
        scaling: &'static str,
        /// What it needs.
        rule: &'static str,
    },
    /// A setting of the optimizer is outside its range.
    #[error("optimizer setting {setting} is {value}; {rule}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: f64,
        /// What must hold.
        rule: &'static str,
    },
    /// A parameter in a group that does not exist.
    #[error("parameter '{param}' is in optimizer group {group}, there are {groups}")]
    NoSuchGroup {
        /// The parameter.
        param: String,
        /// Its group.
        group: usize,
        /// Groups there are.
        groups: usize,
    },
    /// Learning rates for another number of groups.
    #[error("{got} learning rates for {want} optimizer groups: one for each, in their order")]
    Rates {
        /// Rates given.
        got: usize,
        /// Groups.
        want: usize,
    },
    /// Optimizers that cannot step as one.
    #[error("optimizers {first} and {second} of a chain differ in {what}: give them the same")]
    ChainDiffers {
        /// Place of the first.
        first: usize,
        /// Place of the second.
        second: usize,
        /// The setting.
        what: &'static str,
    },
    /// A chain of nothing.
    #[error("a chain of no optimizers: give at least one")]
    EmptyChain,
    /// The device refused or failed.
    // Not transparent, which would hide it from whoever looks for the cause of a rank's failure.
    #[error("the device refused or failed under data parallelism")]
    Device(#[from] device::Error),
    /// A group refused or failed.
    #[error("a group refused or failed under data parallelism")]
    Group(#[source] Box<PgError>),
}

impl From<PgError> for DdpError {
    fn from(error: PgError) -> DdpError {
        match error {
            PgError::Device(error) => DdpError::Device(error),
            error => DdpError::Group(Box::new(error)),
        }
    }
}

/// A bucket group that did not fill.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unready {
    /// Its name.
    pub group: String,
    /// Parameters whose gradients have all landed.
    pub ready: usize,
    /// Its parameters.
    pub total: usize,
    /// The first that is missing.
    pub first: String,
}

impl fmt::Display for Unready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}/{} parameters ready, '{}' is not)", self.group, self.ready, self.total, self.first)
    }
}

struct List<'a>(&'a [Unready]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, unready) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{unready}")?;
        }
        Ok(())
    }
}

impl DdpError {
    /// As the error of a publisher or a sink; what is one already stays as it is.
    pub(crate) fn into_backend(self, of: &str) -> PgError {
        match self {
            DdpError::Group(error) => *error,
            DdpError::Device(error) => PgError::Device(error),
            own => PgError::backend("ddp", of, own),
        }
    }
}
