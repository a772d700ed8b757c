//! The handle of one rank's data parallelism.

use std::{ops::Deref, sync::Arc};

use device::{Stream, View};
use pgroups::{Group, HostState, ParamClass, ProcessGroups};

use crate::{
    BucketPlan, Buffers, Completion, DdpConfig, DdpError, ParamBuffers, Publication, Record, Scaling, attach::build,
    completion::Planned, core::Core, gates::lock, why,
};

/// Data parallelism of one rank: gradients of replicas reduced bucket by bucket, values published bucket by bucket.
///
/// A step: [`begin_microbatch`](Ddp::begin_microbatch), forward and backward with [`Whole`](pgroups::Whole) weights or
/// others that ask through a [`Turn`](pgroups::Turn), [`end_microbatch`](Ddp::end_microbatch), again for each
/// microbatch, all but the last inside [`no_sync`](Ddp::no_sync); then [`finish_grads`](Ddp::finish_grads) and the
/// optimizer's step. Nothing here waits for the device but [`attach`](Ddp::attach) and [`offload`](Ddp::offload). All
/// ranks of a reduction group do the same in the same order.
pub struct Ddp {
    core: Arc<Core>,
    completions: Vec<Planned>,
}

/// How much has happened, and what had to be asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Bucket groups reduced.
    pub reductions: u64,
    /// Bucket groups published.
    pub publications: u64,
    /// Reads that had to ask the owner; all others cost one load.
    pub lookups: u64,
    /// Publications that a chain found done before their turn.
    pub early: u64,
}

/// What a load has written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loaded {
    /// Every rank has written all values: they are published.
    Whole,
    /// Every rank has written its own shards: they have to be gathered.
    Shards,
}

/// One bucket, for whoever writes its values or looks at its gradients.
#[derive(Clone, Debug)]
pub struct BucketMemory {
    /// All values, `[numel]`.
    pub values: View,
    /// All gradients, `[numel]`.
    pub grads: View,
    /// What this rank steps of the values.
    pub own_values: View,
    /// What is reduced here of the gradients.
    pub own_grads: View,
}

impl Ddp {
    /// Attaches publishers and sinks to the trained parameters of `buffers`, instead of whatever was attached, and
    /// opens the gates: initial values count as published, gradients as free, behind what was submitted to `stream`.
    ///
    /// The host waits until all replicas have compared their parameters. `groups` has the replicas ([`Key::DP_CP`],
    /// [`Key::EXPT_DP`] with experts), [`Key::DP_CP_GTP`] under [`Scaling::PerToken`] and [`Key::GTP`] with weight
    /// shards, or what they derive from. Communicators are opened here, on all ranks.
    ///
    /// # Errors
    /// [`DdpError::ShardCount`] if the plan is for other groups; [`DdpError::ParamsDiffer`];
    /// [`DdpError::AveragingShards`]; [`DdpError::F32Accumulation`]; a missing group's; the device's.
    ///
    /// [`Key::DP_CP`]: pgroups::Key::DP_CP
    /// [`Key::EXPT_DP`]: pgroups::Key::EXPT_DP
    /// [`Key::DP_CP_GTP`]: pgroups::Key::DP_CP_GTP
    /// [`Key::GTP`]: pgroups::Key::GTP
    pub fn attach(
        buffers: &ParamBuffers,
        groups: &ProcessGroups,
        config: DdpConfig,
        stream: &Stream,
    ) -> Result<Ddp, DdpError> {
        Ok(Ddp { core: build(buffers, groups, config, stream)?, completions: Vec::new() })
    }

    /// Adds what completes gradients at the end of each step.
    ///
    /// # Errors
    /// [`DdpError::NoSuchParam`]; [`DdpError::OtherShard`] if members own different shards of the buckets.
    pub fn completing(mut self, completions: &[Completion]) -> Result<Ddp, DdpError> {
        self.completions = self.core.plan_completions(completions)?;
        Ok(self)
    }

    /// Begins a microbatch: sets the flag by which the step's first contributions overwrite, on `stream`.
    ///
    /// # Errors
    /// [`DdpError::MicrobatchOpen`]; the device's.
    pub fn begin_microbatch(&self, stream: &Stream) -> Result<(), DdpError> {
        self.core.begin_microbatch(stream)
    }

    /// f32 `[1]` on the device: 0 in the first microbatch of a step, then 1. A parameter's first contribution of a
    /// microbatch multiplies what is in its gradient by it; a captured pass bakes its address in.
    #[must_use]
    pub fn keep(&self) -> &View {
        &self.core.keep
    }

    /// Ends a microbatch: behind the step's first, parameters that it did not use are set to zero on `stream`.
    ///
    /// # Errors
    /// [`DdpError::NoMicrobatch`]; the device's.
    pub fn end_microbatch(&self, stream: &Stream) -> Result<(), DdpError> {
        self.core.end_microbatch(stream)
    }

    /// Until the guard is dropped, microbatches add up and nothing is reduced: dense and expert buckets alike.
    #[must_use = "reductions are off while the guard lives"]
    pub fn no_sync(&self) -> NoSync<'_> {
        lock(&self.core.state).paused += 1;
        NoSync(self)
    }

    /// Ends a step's gradients: reduces what is not, then completes. Again in the same step: nothing.
    ///
    /// Nothing waits; the optimizer orders its stream itself, and [`read_grads`](Ddp::read_grads) that of others.
    ///
    /// # Errors
    /// [`DdpError::Unfilled`] with every bucket of which gradients are missing; [`DdpError::MicrobatchOpen`];
    /// [`DdpError::StillPaused`]; [`DdpError::Tokens`] under [`Scaling::PerToken`].
    pub fn finish_grads(&self) -> Result<(), DdpError> {
        if self.core.config.scaling == Scaling::PerToken {
            return Err(DdpError::Tokens { scaling: "per token", rule: "needs their number: finish_grads_per_token" });
        }
        if self.core.finish()? { self.core.complete(&self.completions, None) } else { Ok(()) }
    }

    /// As [`finish_grads`](Ddp::finish_grads), and divides by the tokens of all ranks. `tokens` is f32 `[1]`: valid
    /// tokens of this rank in this step, counted by what was submitted to `stream`.
    ///
    /// # Errors
    /// As [`finish_grads`](Ddp::finish_grads); [`DdpError::Tokens`] under other scalings.
    pub fn finish_grads_per_token(&self, stream: &Stream, tokens: &View) -> Result<(), DdpError> {
        if self.core.config.scaling != Scaling::PerToken {
            return Err(DdpError::Tokens { scaling: "over ranks", rule: "divides by no tokens: call finish_grads" });
        }
        if self.core.finish()? { self.core.complete(&self.completions, Some((stream, tokens))) } else { Ok(()) }
    }

    /// Makes the reduced gradients readable by what is submitted to `stream`, until [`done_grads`](Ddp::done_grads).
    /// With sharding, only this rank's shards hold them.
    ///
    /// # Errors
    /// [`DdpError::Offloaded`]; the device's.
    pub fn read_grads(&self, stream: &Stream) -> Result<(), DdpError> {
        self.core.resident(Buffers::Grads)?;
        Ok(stream.wait(&self.core.finished, why::READ_GRADS_AFTER_REDUCE)?)
    }

    /// What was submitted to `stream` so far has read the gradients: the next step's may overwrite them behind that.
    ///
    /// # Errors
    /// The device's.
    pub fn done_grads(&self, stream: &Stream) -> Result<(), DdpError> {
        self.core.groups.iter().try_for_each(|group| self.core.freed(group, stream))
    }

    /// Sets all gradients to zero and forgets what has landed, so that a step can be begun again.
    ///
    /// # Errors
    /// The device's.
    pub fn zero_grads(&self, stream: &Stream) -> Result<(), DdpError> {
        self.core.zero_grads(stream)
    }

    /// Publishes every bucket that is not, in the order of first reads, also while someone owns the schedule, and
    /// orders `stream` behind all publications. One that is in flight is waited for, not repeated.
    ///
    /// # Errors
    /// Those of the groups.
    pub fn publish(&self, stream: &Stream) -> Result<(), DdpError> {
        self.core.publish_all(Some(stream))
    }

    /// As [`publish`](Ddp::publish), and no stream waits.
    ///
    /// # Errors
    /// Those of the groups.
    pub fn dispatch(&self) -> Result<(), DdpError> {
        self.core.publish_all(None)
    }

    /// Starts the publication of one bucket group, by its place in the [plan](BucketPlan::groups).
    ///
    /// # Errors
    /// [`DdpError::PublishedTwice`] if its last write is published, or being published; [`DdpError::NoBucketGroup`];
    /// those of the groups.
    pub fn dispatch_group(&self, group: usize) -> Result<(), DdpError> {
        self.core.publish_one(group)
    }

    /// Until the guard is dropped, its holder dispatches publications: reads and steps start none, and a read of a
    /// value that is not published is an error ([`pgroups::PgError::Stale`]). What is in flight is waited for.
    #[must_use = "reads publish nothing while the guard lives"]
    pub fn own_schedule(&self) -> OwnSchedule<'_> {
        lock(&self.core.state).owned += 1;
        OwnSchedule(self)
    }

    /// Writes values: `write` is called for each bucket, on a stream that is behind all reads. An optimizer has to be
    /// told ([`Optimizer::refresh_masters`](crate::Optimizer::refresh_masters)).
    ///
    /// # Errors
    /// [`DdpError::PublicationInFlight`] if a publication was neither read nor waited for, and nothing has changed
    /// then; those of `write`.
    pub fn load(
        &self,
        stream: &Stream,
        loaded: Loaded,
        mut write: impl FnMut(&BucketMemory) -> Result<(), DdpError>,
    ) -> Result<(), DdpError> {
        self.core.resident(Buffers::Values)?;
        if let Some(group) = self.core.unread() {
            return Err(DdpError::PublicationInFlight { group: group.to_owned() });
        }
        for (i, group) in self.core.groups.iter().enumerate() {
            group.gates.open_for_write(&group.written, stream)?;
            for bucket in &group.buckets {
                write(&BucketMemory::of(bucket))?;
            }
            match loaded {
                Loaded::Whole => self.core.wrote_whole(i, stream)?,
                Loaded::Shards => self.core.wrote(i, stream)?,
            }
        }
        Ok(())
    }

    /// The bucket plan.
    #[must_use]
    pub fn plan(&self) -> &BucketPlan {
        &self.core.plan
    }

    /// Memory of all buckets, group by group.
    pub fn buckets(&self) -> impl Iterator<Item = BucketMemory> {
        self.core.groups.iter().flat_map(|group| &group.buckets).map(BucketMemory::of)
    }

    /// The replicas of a class, on the communicator of the reductions.
    #[must_use]
    pub fn replicas(&self, class: ParamClass) -> &Group {
        &self.core.peers(class).reduce
    }

    /// What has happened since it was attached.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let counts = &self.core.counts;
        Counters {
            reductions: Core::count(&counts.reductions),
            publications: Core::count(&counts.publications),
            lookups: Core::count(&counts.lookups),
            early: Core::count(&counts.early),
        }
    }

    /// The last publication of each bucket group; none before the first.
    #[must_use]
    pub fn publications(&self) -> Vec<Option<Publication>> {
        lock(&self.core.state).publications.clone()
    }

    /// For mutation tests: records of this kind are left out from now on.
    #[doc(hidden)]
    pub fn omit(&self, record: Record) {
        self.core.omit(record);
    }

    pub(crate) fn completes(&self) -> bool {
        !self.completions.is_empty()
    }

    /// What graphs of whole steps need: the host's account of reductions and publications.
    #[must_use]
    pub fn account(&self) -> Arc<dyn HostState> {
        self.core.clone()
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }
}

impl BucketMemory {
    fn of(bucket: &crate::core::BucketViews) -> BucketMemory {
        BucketMemory {
            values: bucket.values.clone(),
            grads: bucket.grads.clone(),
            own_values: bucket.own_values.clone(),
            own_grads: bucket.own_grads.clone(),
        }
    }
}

/// Microbatches add up while it lives; see [`Ddp::no_sync`]. It is the [`Ddp`] meanwhile.
pub struct NoSync<'d>(&'d Ddp);

impl Deref for NoSync<'_> {
    type Target = Ddp;

    fn deref(&self) -> &Ddp {
        self.0
    }
}

impl Drop for NoSync<'_> {
    fn drop(&mut self) {
        lock(&self.0.core.state).paused -= 1;
    }
}

/// Its holder dispatches publications; see [`Ddp::own_schedule`].
pub struct OwnSchedule<'d>(&'d Ddp);

impl Drop for OwnSchedule<'_> {
    fn drop(&mut self) {
        lock(&self.0.core.state).owned -= 1;
    }
}
