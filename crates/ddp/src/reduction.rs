//! Gradients land, buckets are reduced.

use std::{ops::Range, sync::Weak};

use device::{
    Access, DType, Note, Stream, TraceAccess, View,
    ops::{Axpy, Cast, Factor, Fill, Scale},
};
use pgroups::{After, Keep, Landed, Param, PgError};

use crate::{
    Accumulation, Buffers, DdpError, GradOverlap, Unfilled,
    core::{BucketGroup, BucketViews, Core, Counts, Phase, Record, Staging, StepState},
    error::Unready,
    gates::lock,
    why,
};

/// Attached to every parameter; holds its owner weakly, as [`Publisher`](crate::publication::Publisher) does.
pub(crate) struct Sink {
    pub(crate) core: Weak<Core>,
    pub(crate) param: usize,
    /// The flag of [`Ddp::keep`](crate::Ddp::keep).
    pub(crate) keep: View,
}

impl Landed for Sink {
    fn open(&self, param: &Param, stream: &Stream) -> Result<Keep, PgError> {
        let Some(core) = self.core.upgrade() else { return Ok(Keep::All) };
        let first = core.open_grad(self.param, stream).map_err(|error| error.into_backend(param.name()))?;
        Ok(if first { self.first_use() } else { Keep::All })
    }

    fn first_use(&self) -> Keep {
        Keep::Times(self.keep.clone())
    }

    fn landed(&self, param: &Param, after: After<'_>) -> Result<(), PgError> {
        let Some(core) = self.core.upgrade() else { return Ok(()) };
        core.land(self.param, after).map_err(|error| error.into_backend(param.name()))
    }
}

impl Core {
    fn land(&self, param: usize, after: After<'_>) -> Result<(), DdpError> {
        let mut state = lock(&self.state);
        if state.phase != Phase::Microbatch {
            return Err(DdpError::NoMicrobatch { param: self.params[param].name().to_owned() });
        }
        // Whoever has not asked may have written over what the last step still reads.
        if state.opened[param] != state.microbatch {
            return Err(DdpError::NotOpened { param: self.params[param].name().to_owned() });
        }
        let group = self.group_of(param);
        if self.records(Record::Landed) {
            group.landed.note(after)?;
        }
        state.used[param] += 1;
        if state.paused > 0 {
            return Ok(());
        }
        if !state.readiness.land(param) {
            let (param, group) = (self.params[param].name().to_owned(), group.name.clone());
            return Err(DdpError::LandedAfterReduce { param, group });
        }
        self.reduce_ready(&mut state)
    }

    fn reduce_ready(&self, state: &mut StepState) -> Result<(), DdpError> {
        if self.config.overlap == GradOverlap::AtFinish {
            return Ok(());
        }
        let StepState { readiness, used, microbatch, phase, .. } = state;
        // In the first microbatch what is never used still holds the last step's gradient until the pass ends.
        let first = *microbatch == 1 && *phase == Phase::Microbatch;
        let ready = readiness.take_ready(|members| first && members.iter().any(|&param| used[param] == 0));
        self.reduce_groups(ready)
    }

    /// Makes the gradient buffer of a parameter writable by `stream`. True for its first contribution of the
    /// microbatch.
    fn open_grad(&self, param: usize, stream: &Stream) -> Result<bool, DdpError> {
        let first = {
            let mut state = lock(&self.state);
            if state.phase != Phase::Microbatch {
                return Err(DdpError::NoMicrobatch { param: self.params[param].name().to_owned() });
            }
            let microbatch = state.microbatch;
            std::mem::replace(&mut state.opened[param], microbatch) != microbatch
        };
        self.write_grads(self.group_of(param), stream)?;
        stream.wait(&self.keep_set, why::GRAD_AFTER_FLAG)?;
        Ok(first)
    }

    pub(crate) fn write_grads(&self, group: &BucketGroup, stream: &Stream) -> Result<(), DdpError> {
        group.free.wait(stream, why::GRAD_AFTER_FREE)?;
        stream.wait(&self.finished, why::GRAD_AFTER_FREE)?;
        Ok(group.landed.wait(stream, why::GRAD_AFTER_LANDED)?)
    }

    pub(crate) fn begin_microbatch(&self, stream: &Stream) -> Result<(), DdpError> {
        let mut state = lock(&self.state);
        state.resident(Buffers::All)?;
        match state.phase {
            Phase::Microbatch => return Err(DdpError::MicrobatchOpen { microbatch: state.microbatch }),
            Phase::Between => {}
            Phase::Idle => {
                state.microbatch = 0;
                state.used.fill(0);
                state.opened.fill(0);
            }
        }
        state.phase = Phase::Microbatch;
        state.microbatch += 1;
        stream.note(|| Note::Microbatch(u64::from(state.microbatch)));
        let value = match state.microbatch {
            1 => 0.0,
            2 => 1.0,
            _ => return Ok(()), // set already
        };
        for group in &self.groups {
            // Graphs of the last step read the flag, too, and only its reductions have waited for them.
            group.landed.wait_for_settled(stream, &group.reduced, why::FLAG_AFTER_LANDED)?;
        }
        // Nobody need have contributed since, on whatever stream it was set.
        stream.wait(&self.keep_set, why::FLAG_AFTER_LANDED)?;
        stream.launch(Fill { y: &self.keep, value }.op("ddp.keep")?)?;
        self.record(Record::KeepSet, stream, &self.keep_set)
    }

    pub(crate) fn end_microbatch(&self, stream: &Stream) -> Result<(), DdpError> {
        let mut state = lock(&self.state);
        if state.phase != Phase::Microbatch {
            return Err(DdpError::NoMicrobatch { param: "(end of a microbatch)".to_owned() });
        }
        state.phase = Phase::Between;
        if state.microbatch == 1 {
            for param in (0..self.params.len()).filter(|&param| state.used[param] == 0) {
                let group = self.group_of(param);
                self.write_grads(group, stream)?;
                stream.launch(Fill { y: &self.params[param].main_grad(), value: 0.0 }.op("ddp.unused")?)?;
                if self.records(Record::Landed) {
                    group.landed.note(After::Stream(stream))?;
                }
            }
        }
        if state.paused > 0 { Ok(()) } else { self.reduce_ready(&mut state) }
    }

    /// Sets all gradients to zero and forgets what has landed.
    pub(crate) fn zero_grads(&self, stream: &Stream) -> Result<(), DdpError> {
        let mut state = lock(&self.state);
        state.resident(Buffers::Grads)?;
        state.phase = Phase::Idle;
        state.readiness.reset();
        for group in &self.groups {
            self.write_grads(group, stream)?;
            stream.wait(&group.reduced, why::GRAD_AFTER_FREE)?;
            for bucket in &group.buckets {
                stream.launch(Fill { y: &bucket.grads, value: 0.0 }.op("ddp.zero")?)?;
            }
            self.freed(group, stream)?;
        }
        Ok(())
    }

    /// The gradients of a group have been read, or overwritten, by what was submitted to `stream`.
    pub(crate) fn freed(&self, group: &BucketGroup, stream: &Stream) -> Result<(), DdpError> {
        if self.records(Record::Free) {
            group.free.note(After::Stream(stream))?;
        }
        Ok(())
    }

    /// Submits what has not been reduced. True if there was a step to finish.
    pub(crate) fn finish(&self) -> Result<bool, DdpError> {
        let mut state = lock(&self.state);
        match state.phase {
            Phase::Idle => return Ok(false),
            Phase::Microbatch => return Err(DdpError::MicrobatchOpen { microbatch: state.microbatch }),
            Phase::Between => {}
        }
        if state.paused > 0 {
            return Err(DdpError::StillPaused);
        }
        let missing = state.readiness.missing(&state.used);
        if self.config.unfilled == Unfilled::Refuse && !missing.is_empty() {
            let unready = missing.iter().map(|m| Unready {
                group: self.groups[self.reduce_order[m.group]].name.clone(),
                ready: m.ready,
                total: m.total,
                first: self.params[m.first].name().to_owned(),
            });
            return Err(DdpError::Unfilled { groups: unready.collect() });
        }
        let rest = state.readiness.finish();
        self.reduce_groups(rest)?;
        state.phase = Phase::Idle;
        Ok(true)
    }

    fn reduce_groups(&self, groups: Range<usize>) -> Result<(), DdpError> {
        self.reduce_order[groups].iter().try_for_each(|&group| self.reduce_group(&self.groups[group]))
    }

    fn reduce_group(&self, group: &BucketGroup) -> Result<(), DdpError> {
        let _span = tracing::debug_span!("ddp.reduce_group", group = %group.name).entered();
        let (stream, peers) = (&self.reduce, self.peers(group.class));
        group.landed.settle(stream, why::REDUCE_AFTER_LANDED)?;
        stream.note(|| Note::Reduced {
            bucket: group.name.clone().into(),
            group: peers.reduce.name().to_owned().into(),
            regions: group.buckets.iter().map(|bucket| TraceAccess::from(&Access::update(&bucket.grads))).collect(),
        });
        if peers.scaling.pre != 1.0 {
            let factor = Factor::Const(peers.scaling.pre as f32);
            for BucketViews { grads, .. } in &group.buckets {
                stream.launch(Scale { x: grads, factor, y: grads }.op("ddp.pre_scale")?)?;
            }
        }
        match (self.config.accumulation, &self.staging) {
            (Accumulation::F32, Some(staging)) => {
                group.buckets.iter().try_for_each(|bucket| self.reduce_in_f32(bucket, group, staging))?;
            }
            _ => {
                let op = peers.scaling.reduce;
                let batch = group.buckets.iter().fold(peers.reduce.batch(), |batch, b| match peers.sharded {
                    true => batch.reduce_scatter(&b.grads, &b.own_grads, op),
                    false => batch.all_reduce(&b.grads, op),
                });
                batch.submit(stream)?;
            }
        }
        Counts::add(&self.counts.reductions);
        self.record(Record::Reduced, stream, &group.reduced)
    }

    /// Pieces travel as they are, their owner adds them up in f32 and rounds once. One stream, so one staging buffer:
    /// a bucket's pieces come when the one before it is done.
    fn reduce_in_f32(&self, bucket: &BucketViews, group: &BucketGroup, staging: &Staging) -> Result<(), DdpError> {
        let (stream, peers) = (&self.reduce, self.peers(group.class));
        let (numel, piece) = (bucket.grads.numel(), bucket.own_grads.numel());
        if bucket.grads.dtype() == DType::F32 {
            // Sums in f32 are what the collective does.
            return Ok(peers.reduce.reduce_scatter(stream, &bucket.grads, &bucket.own_grads, peers.scaling.reduce)?);
        }
        let (pieces, sum) = (staging.pieces.flat(0..numel)?, staging.sum.flat(0..piece)?);
        peers.reduce.all_to_all(stream, &bucket.grads, &pieces)?;
        let part = |i: usize| pieces.flat(i * piece..(i + 1) * piece);
        stream.launch(Cast { x: &part(0)?, y: &sum }.op("ddp.f32_sum")?)?;
        for i in 1..numel / piece {
            stream.launch(Axpy { alpha: Factor::Const(1.0), x: &part(i)?, y: &sum }.op("ddp.f32_sum")?)?;
        }
        Ok(stream.launch(Cast { x: &sum, y: &bucket.own_grads }.op("ddp.f32_sum")?)?)
    }
}
