//! Written values become readable: gathers, and who starts them.

use std::sync::{Arc, Weak, atomic::Ordering};

use device::{Access, Event, Note, Stream, TraceAccess, View};
use pgroups::{After, Epochs, PgError, Publish, Quiet};

use crate::{
    Buffers, DdpError, Dispatch,
    core::{BucketGroup, BucketViews, Cause, Core, Counts, Publication, Record, StepState},
    gates::{Gates, lock},
    why,
};

/// Attached to every parameter of a bucket group.
///
/// It owns what readers look at, and holds the group itself weakly: a replaced [`Ddp`](crate::Ddp) is not kept alive
/// by its parameters.
pub(crate) struct Publisher {
    pub(crate) gates: Arc<Gates>,
    pub(crate) core: Weak<Core>,
    pub(crate) group: usize,
}

impl Publish for Publisher {
    fn epochs(&self) -> Epochs {
        self.gates.epochs()
    }

    fn issue(&self) -> Result<(), PgError> {
        if self.gates.is_quiet() {
            return Ok(());
        }
        // Without an owner nothing can be gathered; stale values are told by their epochs.
        let Some(core) = self.core.upgrade() else { return Ok(()) };
        Counts::add(&core.counts.lookups);
        core.first_read(self.group).map_err(|error| error.into_backend(&core.groups[self.group].name))
    }

    fn quiet(&self) -> Option<Quiet> {
        Some(self.gates.quiet.clone())
    }

    fn event(&self) -> &Event {
        &self.gates.published
    }

    fn done(&self, after: After<'_>) -> Result<(), PgError> {
        Ok(self.gates.releases.note(after)?)
    }
}

/// What a trace is told.
impl BucketGroup {
    /// A write, of this part of each bucket.
    fn wrote(&self, epoch: u64, part: impl Fn(&BucketViews) -> &View) -> Note {
        let regions = self.buckets.iter().map(|bucket| TraceAccess::from(&Access::write(part(bucket))));
        let publisher = self.gates.published.label();
        Note::Written { publisher, epoch, regions: regions.collect() }
    }

    /// The publication of a write that begins.
    fn issued(&self, epoch: u64, group: &str, by: &'static str) -> Note {
        let regions = self.buckets.iter().map(|bucket| TraceAccess::from(&Access::write(&bucket.values)));
        let publisher = self.gates.published.label();
        let group = group.to_owned().into();
        Note::Issued { publisher, epoch, group, by: by.into(), regions: regions.collect() }
    }
}

impl Core {
    /// Someone reads a group for the first time since it was written.
    fn first_read(&self, group: usize) -> Result<(), DdpError> {
        let mut state = lock(&self.state);
        state.resident(Buffers::Values)?;
        if state.owned > 0 {
            return Ok(());
        }
        let gates = &self.groups[group].gates;
        if gates.is_quiet() {
            return Ok(()); // another thread's read came first
        }
        if !gates.is_current() {
            self.publish(&mut state, group, Cause::Read)?;
        }
        if let (Dispatch::Chain, Some(next)) = (self.config.dispatch, self.groups[group].next) {
            if self.groups[next].gates.is_current() {
                // Read before its turn: the parameters were declared in another order than they are read.
                Counts::add(&self.counts.early);
                tracing::warn!(group = %self.groups[next].name, "ddp.publish_early");
            } else {
                self.publish(&mut state, next, Cause::Chain)?;
            }
        }
        gates.settle();
        Ok(())
    }

    /// Submits the publication of a group's last write, and everything that follows it.
    pub(crate) fn publish(&self, state: &mut StepState, group: usize, cause: Cause) -> Result<(), DdpError> {
        let this = &self.groups[group];
        let epochs = this.gates.epochs();
        if epochs.is_current() {
            return Err(DdpError::PublishedTwice { group: this.name.clone(), epoch: epochs.written });
        }
        let stream = &self.gather;
        let _span = tracing::debug_span!("ddp.publish_group", group = %this.name, ?cause).entered();
        stream.wait(&this.written, why::GATHER_AFTER_WRITE)?;
        // In a whole step the stream has joined the capture by that wait.
        if !stream.is_capturing() && stream.device().graphs().captures > 0 {
            return Err(DdpError::PublishInCapture { group: this.name.clone(), epoch: epochs.written });
        }
        let peers = self.peers(this.class);
        let over = if peers.sharded { peers.gather.name() } else { "" };
        stream.note(|| this.issued(epochs.written, over, cause.name()));
        if peers.sharded {
            let batch = peers.gather.batch();
            let batch = this.buckets.iter().fold(batch, |batch, b| batch.all_gather(&b.own_values, &b.values));
            batch.submit(stream)?;
        }
        if let Some(post) = &self.config.post_gather {
            this.buckets.iter().try_for_each(|bucket| post(stream, &bucket.values))?;
        }
        self.record(Record::Published, stream, &this.gates.published)?;
        this.gates.issue();
        Counts::add(&self.counts.publications);
        state.publications[group] = Some(Publication { epoch: epochs.written, cause });
        Ok(())
    }

    /// Publishes every group that is not, and orders `stream` behind all of them.
    pub(crate) fn publish_all(&self, stream: Option<&Stream>) -> Result<(), DdpError> {
        let mut state = lock(&self.state);
        state.resident(Buffers::Values)?;
        for &group in &self.first_read {
            let gates = &self.groups[group].gates;
            if !gates.is_current() {
                self.publish(&mut state, group, Cause::Forced)?;
            }
        }
        drop(state);
        let Some(stream) = stream else { return Ok(()) };
        for group in &self.groups {
            stream.wait(&group.gates.published, why::READ_AFTER_PUBLISH)?;
            group.gates.settle();
        }
        Ok(())
    }

    pub(crate) fn publish_one(&self, group: usize) -> Result<(), DdpError> {
        let groups = self.groups.len();
        if group >= groups {
            return Err(DdpError::NoBucketGroup { group, groups });
        }
        let mut state = lock(&self.state);
        state.resident(Buffers::Values)?;
        self.publish(&mut state, group, Cause::Forced)
    }

    /// What was submitted to `stream` so far has written this rank's shards of a group.
    pub(crate) fn wrote(&self, group: usize, stream: &Stream) -> Result<(), DdpError> {
        let this = &self.groups[group];
        self.record(Record::Written, stream, &this.written)?;
        this.gates.write();
        stream.note(|| this.wrote(this.gates.epochs().written, |bucket| &bucket.own_values));
        match self.config.dispatch {
            Dispatch::Chain | Dispatch::Aligned => Ok(()),
            Dispatch::WithOptimizer | Dispatch::AtStep => {
                let mut state = lock(&self.state);
                // Whoever has taken over the schedule publishes by hand.
                if state.owned == 0 {
                    self.publish(&mut state, group, Cause::Optimizer)?;
                    this.gates.settle();
                }
                Ok(())
            }
        }
    }

    /// Tells a trace that a captured step has written a group's values, or is about to.
    pub(crate) fn note_written(&self, group: usize, epoch: u64, stream: &Stream) {
        stream.note(|| self.groups[group].wrote(epoch, |bucket| &bucket.own_values));
    }

    /// Tells a trace that a captured step is about to publish a write of a group.
    pub(crate) fn note_issued(&self, group: usize, epoch: u64, stream: &Stream) {
        let this = &self.groups[group];
        let peers = self.peers(this.class);
        let over = if peers.sharded { peers.gather.name() } else { "" };
        stream.note(|| this.issued(epoch, over, "graph"));
    }

    /// Values were written whole, on every rank: there is nothing to gather.
    pub(crate) fn wrote_whole(&self, group: usize, stream: &Stream) -> Result<(), DdpError> {
        let this = &self.groups[group];
        self.record(Record::Written, stream, &this.written)?;
        this.gates.write();
        stream.note(|| this.wrote(this.gates.epochs().written, |bucket| &bucket.values));
        stream.note(|| this.issued(this.gates.epochs().written, "", "load"));
        if let Some(post) = &self.config.post_gather {
            this.buckets.iter().try_for_each(|bucket| post(stream, &bucket.values))?;
        }
        self.readable(group, stream)
    }

    /// Values were restored as they had been read: what follows a write was done then.
    pub(crate) fn restored(&self, group: usize, stream: &Stream) -> Result<(), DdpError> {
        self.record(Record::Written, stream, &self.groups[group].written)?;
        self.groups[group].gates.write();
        self.readable(group, stream)
    }

    fn readable(&self, group: usize, stream: &Stream) -> Result<(), DdpError> {
        let gates = &self.groups[group].gates;
        self.record(Record::Published, stream, &gates.published)?;
        gates.issue();
        gates.settle();
        Ok(())
    }

    /// A publication that nobody has read yet; none if there is no such group.
    pub(crate) fn unread(&self) -> Option<&str> {
        let unread = |gates: &Gates| gates.is_current() && !gates.is_quiet();
        self.groups.iter().find(|group| unread(&group.gates)).map(|group| group.name.as_str())
    }

    pub(crate) fn count(counter: &std::sync::atomic::AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }
}
