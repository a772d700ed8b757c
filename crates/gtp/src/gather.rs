//! Weights come and go: gathers ahead of their uses, on demand where nothing is planned.

use std::sync::Arc;

use device::{Access, Event, Note, Stream, TraceAccess, View};
use pgroups::{Group, Pass, Turn};

use crate::{
    GtpError, UseIndex, WeightIndex,
    attached::Attached,
    core::{Core, Spare, State},
    omit::Record,
    run::{Next, OpenUse, Run},
    schedule::{GatherIndex, Step},
    weight::Weight,
    why,
};

/// Where a gather goes, and who had the place before.
struct Into<'a> {
    slot: &'a View,
    after: Vec<&'a Event>,
    gathered: &'a Event,
}

impl Core {
    /// A use of a weight begins on `stream`.
    pub(crate) fn take(&self, weight: WeightIndex, turn: &mut Turn<'_>, stream: &Stream) -> Result<View, GtpError> {
        let mut state = self.lock();
        self.enter(&mut state, turn, stream)?;
        let step = Step::Take(weight, turn.pass());
        let next = open_run(&mut state)?.advance(step, self)?;
        let open = match next {
            Next::Use(attached, taken) => {
                for gather in attached.plan.issues(taken) {
                    self.issue(&mut state, &attached, *gather, turn)?;
                }
                self.check_flight(&mut state, &attached, taken, turn, stream)?;
                let slot = &attached.gathers[attached.plan.gather_of(taken).0];
                stream.wait(&slot.gathered, why::USE_AFTER_GATHER)?;
                let view = self.weights[weight.0].logical(&slot.view)?;
                self.note_use(&self.weights[weight.0], &slot.view, stream);
                OpenUse { weight, view, gathered: slot.gathered.clone(), used: slot.used.clone() }
            }
            Next::Left => {
                self.left(&mut state);
                self.take_on_demand(&mut state, weight, turn, stream)?
            }
            _ => self.take_on_demand(&mut state, weight, turn, stream)?,
        };
        let view = open.view.clone();
        open_run(&mut state)?.uses.push(open);
        Ok(view)
    }

    /// The use ends with what was submitted to `stream` so far.
    pub(crate) fn give_back(&self, weight: WeightIndex, stream: &Stream) -> Result<(), GtpError> {
        let mut state = self.lock();
        let run = open_run(&mut state)?;
        let open = run.uses.iter().rposition(|open| open.weight == weight);
        let open = open.ok_or_else(|| self.not_open(weight, "is given back"))?;
        let OpenUse { used, .. } = run.uses.remove(open);
        if run.streams.len() > 1 {
            // Another use may have ended on another stream: who waits for this one waits for both.
            stream.wait(&used, why::GATHER_AFTER_USE)?;
        }
        self.omitted.record(Record::Used, stream, &used)?;
        if let Next::Left = run.advance(Step::GiveBack(weight), self)? {
            self.left(&mut state);
        }
        self.over(&mut state);
        Ok(())
    }

    /// Issues a planned gather.
    fn issue(
        &self,
        state: &mut State,
        attached: &Attached,
        gather: GatherIndex,
        turn: &mut Turn<'_>,
    ) -> Result<(), GtpError> {
        if !self.omitted.does(Record::Gather) {
            let written = self.written(self.gathered_by(attached, gather));
            open_run(state)?.issued(gather, written);
            return Ok(());
        }
        let plan = &attached.plan;
        let first = plan.schedule().uses()[plan.gathers()[gather.0].uses[0].0];
        let weight = &self.weights[first.weight.0];
        let lane = self.lane(weight);
        let slot = &attached.gathers[gather.0];
        let after = plan.gathers()[gather.0].after.iter().map(|before| &attached.gathers[before.0].used);
        let into = Into { slot: &slot.view, after: after.collect(), gathered: &slot.gathered };
        self.gather(weight, &lane.planned, &lane.gather, &into, (turn, first.pass))?;
        state.counters.planned += u64::from(!turn.is_recorded());
        let written = self.written(weight);
        open_run(state)?.issued(gather, written);
        Ok(())
    }

    /// The weight that a planned gather makes whole.
    pub(crate) fn gathered_by(&self, attached: &Attached, gather: GatherIndex) -> &Weight {
        let first = attached.plan.gathers()[gather.0].uses[0];
        &self.weights[attached.plan.schedule().uses()[first.0].weight.0]
    }

    /// What a planned use finds is gathered for it, of the newest write; otherwise it is gathered again.
    fn check_flight(
        &self,
        state: &mut State,
        attached: &Attached,
        taken: UseIndex,
        turn: &mut Turn<'_>,
        stream: &Stream,
    ) -> Result<(), GtpError> {
        let gather = attached.plan.gather_of(taken);
        let weight = &self.weights[attached.plan.schedule().uses()[taken.0].weight.0];
        let written = self.written(weight);
        if open_run(state)?.flights.get(&gather) == Some(&written) {
            return Ok(());
        }
        let before = attached.plan.gathers()[gather.0].after.iter().map(|before| &attached.gathers[before.0].used);
        let own = &attached.gathers[gather.0].gathered;
        before.chain([own]).try_for_each(|event| stream.wait(event, why::GATHER_AFTER_USE))?;
        self.repair(state, attached, taken, turn, stream)
    }

    /// Gathers for a use whose planned gather is not there, on a stream that is behind everybody who had the slot. In
    /// the pass of that use: backward asks for no publication, also where it shares the gather with forward.
    pub(crate) fn repair(
        &self,
        state: &mut State,
        attached: &Attached,
        taken: UseIndex,
        turn: &mut Turn<'_>,
        stream: &Stream,
    ) -> Result<(), GtpError> {
        if !self.omitted.does(Record::Repair) {
            return Ok(());
        }
        let (gather, taken) = (attached.plan.gather_of(taken), attached.plan.schedule().uses()[taken.0]);
        let weight = &self.weights[taken.weight.0];
        let slot = &attached.gathers[gather.0];
        let into = Into { slot: &slot.view, after: Vec::new(), gathered: &slot.gathered };
        self.gather(weight, &self.lane(weight).on_demand, stream, &into, (turn, taken.pass))?;
        state.counters.repaired += 1;
        let written = self.written(weight);
        if let Some(run) = &mut state.run {
            run.flights.insert(gather, written);
        }
        Ok(())
    }

    /// Gathers into the weight's own spare memory, unless it is in use there.
    fn take_on_demand(
        &self,
        state: &mut State,
        weight: WeightIndex,
        turn: &mut Turn<'_>,
        stream: &Stream,
    ) -> Result<OpenUse, GtpError> {
        if let Some(open) = open_run(state)?.uses.iter().find(|open| open.weight == weight) {
            stream.wait(&open.gathered, why::USE_AFTER_GATHER)?;
            return Ok(open.clone());
        }
        let known = &self.weights[weight.0];
        let spare: &mut Spare = state.spare.entry(weight).or_default();
        if spare.value.is_none() {
            spare.value = Some(self.spare_slot(weight, "value", known.param.dtype(), stream)?);
        }
        let slot = spare.value.clone().expect("BUG: just made");
        let lane = self.lane(known);
        let into = Into { slot: &slot.view, after: vec![&slot.read], gathered: &slot.filled };
        let pass = turn.pass();
        self.gather(known, &lane.on_demand, &lane.gather, &into, (turn, pass))?;
        state.counters.on_demand += 1;
        stream.wait(&slot.filled, why::USE_AFTER_GATHER)?;
        self.note_use(known, &slot.view, stream);
        Ok(OpenUse { weight, view: known.logical(&slot.view)?, gathered: slot.filled, used: slot.read })
    }

    /// Makes the newest value of the shard readable, gathers it, and tells that the read has ended: whoever gathers is
    /// the reader, so the shard may be written long before the weight is used.
    fn gather(
        &self,
        weight: &Weight,
        group: &Group,
        on: &Stream,
        into: &Into<'_>,
        (turn, pass): (&mut Turn<'_>, Pass),
    ) -> Result<(), GtpError> {
        into.after.iter().try_for_each(|event| on.wait(event, why::GATHER_AFTER_USE))?;
        // Without being asked for, a value is read as backward reads it.
        let back = turn.enter(if self.omitted.does(Record::Ready) { pass } else { Pass::Backward });
        let shard = turn.read(&weight.param, on);
        turn.enter(back);
        let shard = shard?;
        self.note_gather(weight, into.slot, on);
        group.all_gather(on, &shard.flat(0..shard.numel())?, into.slot)?;
        if self.omitted.does(Record::Release) {
            turn.done(&weight.param, on)?;
        }
        self.omitted.record(Record::Gathered, on, into.gathered)
    }

    /// For whoever checks a trace.
    pub(crate) fn note_gather(&self, weight: &Weight, slot: &View, on: &Stream) {
        on.note(|| Note::Gathered {
            param: weight.param.name().to_owned().into(),
            epoch: self.written(weight),
            regions: vec![TraceAccess::from(&Access::write(slot))],
        });
    }

    /// As [`Core::note_gather`].
    pub(crate) fn note_use(&self, weight: &Weight, slot: &View, on: &Stream) {
        on.note(|| Note::Used {
            param: weight.param.name().to_owned().into(),
            epoch: self.written(weight),
            regions: vec![TraceAccess::from(&Access::read(slot))],
        });
    }

    /// The pass has left its plan.
    pub(crate) fn left(&self, state: &mut State) {
        if let Some(run) = &mut state.run {
            tracing::warn!(pass = %run.kind, done = run.done(), "gtp.leave_plan");
        }
        state.counters.deviations += 1;
    }

    /// A pass that runs as it is submitted has done all that its plan has. It may still go on, and leave it then.
    pub(crate) fn over(&self, state: &mut State) {
        let over = |run: &&mut Run| !run.recorded && run.is_over() && run.uses.is_empty() && run.grads.is_empty();
        if let Some(run) = state.run.as_mut().filter(over) {
            let attached: Arc<Attached> = run.mode.attached().expect("BUG: only plans are over").clone();
            state.last = crate::core::Last::Eager(attached, run.streams.clone());
        }
    }

    pub(crate) fn not_open(&self, weight: WeightIndex, what: &'static str) -> GtpError {
        GtpError::NotOpen { param: self.weights[weight.0].param.name().to_owned(), what }
    }
}

pub(crate) fn open_run(state: &mut State) -> Result<&mut Run, GtpError> {
    state.run.as_mut().ok_or(GtpError::NoPass)
}
