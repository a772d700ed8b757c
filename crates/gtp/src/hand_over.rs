//! What graphs of a pass find and leave, and the account that captured steps keep in order.

use std::{
    any::Any,
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use device::Stream;
use pgroups::{HandOver, HostState, PgError, Turn};

use crate::{
    GtpError,
    attached::Attached,
    core::{Core, Counters, Last, State},
    omit::Record,
    run::{Mode, Part, Place, Run},
    schedule::{GatherIndex, PassKind},
    why,
};

/// A captured part of a pass, as its graph keeps it.
struct Captured {
    core: Weak<Core>,
    part: Part,
}

impl Part {
    pub(crate) fn of(self, core: &Arc<Core>) -> Arc<dyn HandOver> {
        Arc::new(Captured { core: Arc::downgrade(core), part: self })
    }
}

/// The error of a hand-over, which no parameter is to blame for.
fn refused(kind: PassKind, error: GtpError) -> PgError {
    match error {
        GtpError::Groups(error) => error,
        GtpError::Device(error) => error.into(),
        error => PgError::backend("gtp", &format!("(pass '{kind}')"), error),
    }
}

impl HandOver for Captured {
    fn prepare(&self, stream: &Stream) -> Result<(), PgError> {
        let Some(core) = self.core.upgrade() else { return Ok(()) };
        core.prepare(&self.part, stream).map_err(|error| refused(self.part.kind, error))
    }

    fn apply(&self, stream: &Stream) -> Result<(), PgError> {
        let Some(core) = self.core.upgrade() else { return Ok(()) };
        core.apply(&self.part, stream).map_err(|error| refused(self.part.kind, error))
    }
}

impl Core {
    /// Ahead of a launch: everything under way in the slots is behind it, and what it needs is gathered.
    fn prepare(&self, part: &Part, stream: &Stream) -> Result<(), GtpError> {
        let mut state = self.lock();
        if part.from == Place::default() || !self.is_of(&state, &part.attached) {
            self.settle(&mut state)?;
        }
        let submitted = state.run.as_ref().is_some_and(Run::is_submitted);
        match &state.last {
            Last::Graph(Some(drained)) => stream.wait(drained, why::GRAPH_AFTER_GRAPH)?,
            Last::Graph(None) => state.behind_graphs(stream, why::GRAPH_AFTER_GRAPH)?,
            Last::Marked | Last::Eager(..) | Last::Loose(_) => {}
        }
        // The part of the pass in front of this graph was submitted, or the whole pass before.
        if submitted || !matches!(state.last, Last::Graph(_)) {
            self.join(&state, stream)?;
        }
        self.open_gates(&mut state, stream)?;
        let plan = &part.attached.plan;
        for gather in &part.needs {
            let own = plan.gathers()[gather.0].uses.iter().find(|taken| taken.0 >= part.from.used);
            let own = *own.expect("BUG: a part uses what it needs");
            let weight = &self.weights[plan.schedule().uses()[own.0].weight.0];
            let there = state.run.as_ref().and_then(|run| run.there(*gather));
            if there != Some(self.written(weight)) {
                let mut turn = Turn::eager(pgroups::Pass::Forward);
                self.repair(&mut state, &part.attached, own, &mut turn, stream)?;
            }
        }
        // That a graph gathers ahead of its own uses is shown by the order of its nodes.
        for gather in &part.needs {
            let (weight, slot) = (self.gathered_by(&part.attached, *gather), &part.attached.gathers[gather.0]);
            self.note_use(weight, &slot.view, stream);
        }
        for gather in &part.issued {
            let (weight, slot) = (self.gathered_by(&part.attached, *gather), &part.attached.gathers[gather.0]);
            self.note_gather(weight, &slot.view, stream);
        }
        Ok(())
    }

    /// The pass under way runs by this plan.
    fn is_of(&self, state: &State, attached: &Arc<Attached>) -> bool {
        let mode = state.run.as_ref().map(|run| &run.mode);
        matches!(mode, Some(Mode::Planned { attached: own, .. }) if Arc::ptr_eq(own, attached))
    }

    /// Behind a launch: where the pass is now, and what is gathered.
    fn apply(&self, part: &Part, stream: &Stream) -> Result<(), GtpError> {
        let mut state = self.lock();
        let known = state.launched.iter().position(|(on, _)| *on == stream.index());
        let known = known.unwrap_or_else(|| {
            let event = self.device.event(&format!("gtp.launched.{}", stream.name()));
            state.launched.push((stream.index(), event));
            state.launched.len() - 1
        });
        self.omitted.record(Record::Launched, stream, &state.launched[known].1)?;
        let plan = &part.attached.plan;
        let before = state.run.take();
        // Of the write that was the last one ahead of the launch, where what it needs was made sure of.
        let own = |gather: &GatherIndex| (*gather, self.written(self.gathered_by(&part.attached, *gather)));
        let passed_on = |gather: &GatherIndex| Some((*gather, before.as_ref()?.there(*gather)?));
        let passed_on = part.passes_on.iter().filter_map(passed_on);
        let flights: BTreeMap<GatherIndex, u64> = part.leaves.iter().map(own).chain(passed_on).collect();
        if part.to.step < plan.schedule().steps().len() {
            state.run = Some(Run::by_graphs(part.kind, part.attached.clone(), part.to, flights));
        }
        state.last = Last::Graph(part.drained.clone());
        Ok(())
    }
}

/// Where passes were when a capture began.
struct Saved {
    counters: Counters,
}

/// Passes begin and end inside a step, so all that a captured step leaves is a point that everybody is behind.
impl HostState for Core {
    fn save(&self) -> Box<dyn Any + Send + Sync> {
        Box::new(Saved { counters: self.lock().counters })
    }

    fn restore(&self, saved: &(dyn Any + Send + Sync)) {
        let saved: &Saved = saved.downcast_ref().expect("BUG: an account is given what it gave");
        let mut state = self.lock();
        (state.counters, state.run) = (saved.counters, None);
    }

    fn begin_step(&self) {}

    fn since(&self, _: &(dyn Any + Send + Sync)) -> Box<dyn Any + Send + Sync> {
        Box::new(())
    }

    fn announce(&self, _: &(dyn Any + Send + Sync), _: &Stream) {}

    fn add(&self, _: &(dyn Any + Send + Sync), _: &Stream) {}

    fn join(&self, stream: &Stream) -> Result<(), PgError> {
        let state = self.lock();
        let behind = state.behind_graphs(stream, why::GRAPH_AFTER_GRAPH);
        behind.and_then(|()| Core::join(self, &state, stream)).map_err(|error| refused(PassKind("step"), error))
    }

    fn mark(&self, stream: &Stream) -> Result<(), PgError> {
        let mut state = self.lock();
        self.mark_all(&state, stream).map_err(|error| refused(PassKind("step"), error))?;
        (state.last, state.captured) = (Last::Marked, false);
        Ok(())
    }
}
