//! What one rank's data parallelism is made of: bucket groups with their views, gates, communicators and streams.

use std::sync::{
    Mutex,
    atomic::{AtomicU8, AtomicU64, Ordering},
};

use device::{Event, Stream, View};
use pgroups::{Group, Param, ParamClass, Replica};

use crate::{
    BucketPlan, Buffers, DdpConfig, DdpError,
    gates::{Crowd, Gates},
    plan::BucketId,
    readiness::Readiness,
    scaling::ClassScaling,
};

/// Shared by the handle, and held weakly by publishers and sinks.
pub(crate) struct Core {
    pub(crate) plan: BucketPlan,
    pub(crate) config: DdpConfig,
    pub(crate) params: Vec<Param>,
    /// By parameter: which copy this rank holds.
    pub(crate) replicas: Vec<Replica>,
    /// By rank of the world: its place among its replicas; none where the layout proves that peers have equal ones.
    pub(crate) places: Vec<Option<u32>>,
    pub(crate) groups: Vec<BucketGroup>,
    pub(crate) first_read: Vec<usize>,
    /// Groups as they are reduced: readiness counts by place in it.
    pub(crate) reduce_order: Vec<usize>,
    pub(crate) dense: Peers,
    pub(crate) expert: Option<Peers>,
    pub(crate) tokens: Tokens,
    /// Reductions, in order.
    pub(crate) reduce: Stream,
    /// Publications, in order.
    pub(crate) gather: Stream,
    /// f32 `[1]`: 0 in the first microbatch of a step, then 1.
    pub(crate) keep: View,
    pub(crate) keep_set: Event,
    /// Behind the last thing that a step does to its gradients.
    pub(crate) finished: Event,
    pub(crate) staging: Option<Staging>,
    pub(crate) state: Mutex<StepState>,
    pub(crate) counts: Counts,
    pub(crate) omitted: AtomicU8,
}

/// Buckets that are reduced and published together.
pub(crate) struct BucketGroup {
    pub(crate) name: String,
    pub(crate) class: ParamClass,
    pub(crate) buckets: Vec<BucketViews>,
    /// The group whose first read follows this one's.
    pub(crate) next: Option<usize>,
    pub(crate) gates: std::sync::Arc<Gates>,
    /// Behind the last write to this rank's shards.
    pub(crate) written: Event,
    /// Streams that have contributed to the gradients.
    pub(crate) landed: Crowd,
    /// Behind the last reduction.
    pub(crate) reduced: Event,
    /// Streams that have read the reduced gradients, or set them to zero.
    pub(crate) free: Crowd,
}

/// The memory of one bucket.
#[derive(Clone)]
pub(crate) struct BucketViews {
    pub(crate) id: BucketId,
    pub(crate) values: View,
    pub(crate) grads: View,
    /// What this rank steps: its shard, or all.
    pub(crate) own_values: View,
    pub(crate) own_grads: View,
}

/// The replicas of a class, on communicators that share nothing.
pub(crate) struct Peers {
    pub(crate) reduce: Group,
    pub(crate) gather: Group,
    pub(crate) norm: Group,
    pub(crate) sharded: bool,
    pub(crate) scaling: ClassScaling,
}

/// What the division by the number of tokens needs.
pub(crate) struct Tokens {
    /// Everyone who sees data of their own.
    pub(crate) group: Option<Group>,
    /// f32 `[1]`: tokens of all.
    pub(crate) total: View,
    /// f32 `[1]`: one over them.
    pub(crate) factor: View,
    pub(crate) counted: Event,
}

/// Room for a bucket's pieces from all ranks and for their sum.
pub(crate) struct Staging {
    /// By gradient type of the buffers, as they come: pieces of the largest bucket.
    pub(crate) pieces: View,
    /// f32: one piece.
    pub(crate) sum: View,
}

/// Where the host is in a step.
pub(crate) struct StepState {
    pub(crate) readiness: Readiness,
    pub(crate) phase: Phase,
    /// Microbatches begun in this step.
    pub(crate) microbatch: u32,
    /// Guards that say that this is not the last microbatch.
    pub(crate) paused: u32,
    /// What is offloaded.
    pub(crate) away: Option<Buffers>,
    /// Guards whose holder dispatches publications.
    pub(crate) owned: u32,
    /// By parameter: landings in this step.
    pub(crate) used: Vec<u32>,
    /// By parameter: the microbatch that has asked for its gradient last.
    pub(crate) opened: Vec<u32>,
    /// By group: its last publication.
    pub(crate) publications: Vec<Option<Publication>>,
}

/// Table: `Idle -begin-> Microbatch -end-> Between -begin-> Microbatch`, `Between -finish-> Idle`; zeroing gradients
/// leads to `Idle` from anywhere. `finish` in `Idle` has nothing to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Idle,
    Microbatch,
    Between,
}

/// One publication of a bucket group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Publication {
    /// The write that it published.
    pub epoch: u64,
    /// Who started it.
    pub cause: Cause,
}

/// Who started a publication.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// The first reader of the group.
    Read,
    /// The first reader of the group before it.
    Chain,
    /// The optimizer, behind its write.
    Optimizer,
    /// Whoever asked for all values.
    Forced,
}

impl Cause {
    /// In traces.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Cause::Read => "read",
            Cause::Chain => "chain",
            Cause::Optimizer => "optimizer",
            Cause::Forced => "forced",
        }
    }
}

#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) reductions: AtomicU64,
    pub(crate) publications: AtomicU64,
    pub(crate) lookups: AtomicU64,
    pub(crate) early: AtomicU64,
}

impl Counts {
    pub(crate) fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// A record that a mutation test leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[doc(hidden)]
pub enum Record {
    Landed,
    Reduced,
    Written,
    Published,
    Free,
    KeepSet,
    Finished,
}

impl Core {
    pub(crate) fn records(&self, record: Record) -> bool {
        self.omitted.load(Ordering::Relaxed) & (1 << record as u8) == 0
    }

    pub(crate) fn omit(&self, record: Record) {
        self.omitted.fetch_or(1 << record as u8, Ordering::Relaxed);
    }

    pub(crate) fn record(&self, record: Record, stream: &Stream, event: &Event) -> Result<(), DdpError> {
        if self.records(record) {
            stream.record(event)?;
        }
        Ok(())
    }

    pub(crate) fn peers(&self, class: ParamClass) -> &Peers {
        match (class, &self.expert) {
            (ParamClass::Expert, Some(expert)) => expert,
            _ => &self.dense,
        }
    }

    pub(crate) fn group_of(&self, param: usize) -> &BucketGroup {
        &self.groups[self.plan.home(param).group]
    }
}
