//! What one rank knows of its sharded weights while passes run.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use device::{Device, Event, MemoryKind, Stream, View};
use pgroups::{ParamId, TensorParallel, Turn};

use crate::{
    Drain, GradIndex, GtpConfig, GtpError, PlannedGrad, WeightIndex,
    attached::{Arenas, Attached},
    omit::{Omitted, Record},
    plan::{GtpPlan, PassPlan, WeightPlan},
    run::{Mode, Part, Run},
    schedule::{PassKind, Schedule},
    weight::{Lane, Weight},
    why,
};

/// How often what was done, as it was submitted: what is captured counts neither then nor when it is replayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Gathers that were issued as planned.
    pub planned: u64,
    /// Gathers that nothing planned: of a pass without a plan, or one that has left it.
    pub on_demand: u64,
    /// Planned gathers that were issued again: what they had gathered was not there, or not the newest value.
    pub repaired: u64,
    /// Reduce-scatters.
    pub reduced: u64,
    /// Passes that left their plan.
    pub deviations: u64,
    /// Plans that were made while running.
    pub plans: u64,
}

/// All of a rank's sharded weights.
pub(crate) struct Core {
    pub(crate) device: Device,
    pub(crate) config: GtpConfig,
    pub(crate) weights: Vec<Weight>,
    pub(crate) by_param: HashMap<ParamId, WeightIndex>,
    /// By axis; none for an axis that cuts nothing.
    pub(crate) lanes: Vec<Option<Lane>>,
    pub(crate) tensor: Option<TensorParallel>,
    /// The first point of a pass that others join.
    pub(crate) fork: Event,
    pub(crate) omitted: Omitted,
    pub(crate) state: Mutex<State>,
}

pub(crate) struct State {
    pub(crate) plan: GtpPlan,
    attached: BTreeMap<PassKind, Arc<Attached>>,
    pub(crate) arenas: Arenas,
    /// By weight: memory of uses that nothing planned.
    pub(crate) spare: BTreeMap<WeightIndex, Spare>,
    pub(crate) run: Option<Run>,
    pub(crate) last: Last,
    pub(crate) counters: Counters,
    /// The events mark points of a capture, or nothing yet.
    pub(crate) captured: bool,
    /// Behind the last launch of a graph on each stream, by its number.
    pub(crate) launched: Vec<(u32, Event)>,
    /// What graphs wait for has been recorded.
    pub(crate) gated: bool,
}

/// Memory and events of a weight for uses and gradients that nothing planned.
#[derive(Default)]
pub(crate) struct Spare {
    pub(crate) value: Option<SpareSlot>,
    pub(crate) grad: Option<SpareSlot>,
}

#[derive(Clone)]
pub(crate) struct SpareSlot {
    pub(crate) view: View,
    /// Behind what fills it.
    pub(crate) filled: Event,
    /// Behind the last reader.
    pub(crate) read: Event,
}

/// Who used the slots last.
pub(crate) enum Last {
    /// Nobody, or somebody whom every event that a pass of any kind may wait for is behind.
    Marked,
    /// A pass of this plan, as it was submitted, from beginning to end.
    Eager(Arc<Attached>, Vec<Stream>),
    /// A pass that was left, or had no plan.
    Loose(Vec<Stream>),
    /// A graph. What follows may begin behind this event, or behind the launch without one.
    Graph(Option<Event>),
}

impl Core {
    pub(crate) fn new(
        device: &Device,
        config: GtpConfig,
        weights: Vec<Weight>,
        lanes: Vec<Option<Lane>>,
        plan: Option<GtpPlan>,
    ) -> Result<Core, GtpError> {
        let known: Vec<WeightPlan> = weights.iter().map(Weight::plan).collect();
        let plan = plan.unwrap_or_else(|| GtpPlan { weights: known.clone(), ..GtpPlan::default() });
        let differs = (0..known.len().max(plan.weights.len())).find(|i| known.get(*i) != plan.weights.get(*i));
        if let Some(at) = differs {
            let tell = |list: &[WeightPlan]| list.get(at).map_or("none".to_owned(), |weight| format!("{weight:?}"));
            return Err(GtpError::PlanOfOthers { at, planned: tell(&plan.weights), have: tell(&known) });
        }
        let by_param = weights.iter().enumerate().map(|(i, w)| (w.param.id(), WeightIndex(i))).collect();
        let mut state = State {
            captured: true,
            launched: Vec::new(),
            gated: false,
            plan: GtpPlan::default(),
            attached: BTreeMap::new(),
            arenas: Arenas::default(),
            spare: BTreeMap::new(),
            run: None,
            last: Last::Marked,
            counters: Counters::default(),
        };
        state.arenas.grow(device, &plan)?;
        for pass in plan.passes.values() {
            let attached = Attached::new(device, pass, &weights, &state.arenas)?;
            state.attached.insert(pass.kind(), Arc::new(attached));
        }
        let arrivals = lanes.iter().flatten().map(|lane| lane.arrivals.numel()).sum();
        state.plan = GtpPlan { arrivals, ..plan };
        let fork = device.event("gtp.fork");
        let (device, state) = (device.clone(), Mutex::new(state));
        Ok(Core { device, config, weights, by_param, lanes, tensor: None, fork, omitted: Omitted::default(), state })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn lane(&self, weight: &Weight) -> &Lane {
        self.lanes[weight.lane].as_ref().expect("BUG: a weight of an axis that cuts nothing")
    }

    pub(crate) fn open_lanes(&self) -> impl Iterator<Item = &Lane> {
        self.lanes.iter().flatten()
    }

    /// A pass begins.
    pub(crate) fn begin(&self, kind: PassKind, recorded: bool) -> Result<(), GtpError> {
        if self.weights.is_empty() {
            return Ok(());
        }
        let mut state = self.lock();
        self.settle(&mut state)?;
        let mode = match state.attached.get(&kind) {
            Some(attached) => Mode::planned(attached.clone()),
            None if recorded => return Err(GtpError::NotPlanned { kind }),
            None => Mode::OnDemand,
        };
        state.run = Some(Run::new(kind, mode, recorded));
        Ok(())
    }

    /// Takes up what the last pass has shown, if it is not what its plan says.
    pub(crate) fn settle(&self, state: &mut State) -> Result<(), GtpError> {
        let Some(run) = state.run.take() else { return Ok(()) };
        let over = run.is_over();
        if run.is_submitted() && !over {
            state.last = Last::Loose(run.streams.clone());
        }
        // A capture that failed half way leaves nothing.
        if run.recorded {
            return Ok(());
        }
        // Told once: who comes next finds everything closed.
        run.check_closed(self)?;
        // Graphs may be replayed in any order.
        if run.by_graphs || over {
            return Ok(());
        }
        if matches!(run.mode, Mode::Planned { .. }) {
            tracing::warn!(pass = %run.kind, done = run.done(), steps = run.steps(), "gtp.leave_plan");
            state.counters.deviations += 1;
        }
        let executed = run.executed();
        self.adopt(state, run.kind, executed)
    }

    /// Plans a kind of pass anew.
    fn adopt(&self, state: &mut State, kind: PassKind, schedule: Schedule) -> Result<(), GtpError> {
        let _span = tracing::debug_span!("gtp.plan_pass", pass = %kind, steps = schedule.steps().len()).entered();
        let plan = Arc::new(PassPlan::new(kind, schedule, &state.plan.weights, &self.config));
        state.plan.passes.insert(kind, plan.clone());
        state.arenas.grow(&self.device, &state.plan)?;
        let attached = Attached::new(&self.device, &plan, &self.weights, &state.arenas)?;
        state.attached.insert(kind, Arc::new(attached));
        state.counters.plans += 1;
        state.gated = false;
        state.spare.clear();
        Ok(())
    }

    /// Makes the slots of the pass that begins usable by `compute` and by the lanes, unless they are.
    pub(crate) fn enter(&self, state: &mut State, turn: &Turn<'_>, compute: &Stream) -> Result<(), GtpError> {
        let Some(run) = &mut state.run else { return Err(GtpError::NoPass) };
        if run.recorded != turn.is_recorded() {
            let tell = |recorded: bool| if recorded { "captured" } else { "submitted" };
            let (kind, under_way, next) = (run.kind, tell(run.recorded), tell(turn.is_recorded()));
            return Err(GtpError::HalfCaptured { kind, under_way, next });
        }
        run.uses_slots(compute);
        if std::mem::replace(&mut run.entered, true) {
            return Ok(());
        }
        if run.recorded {
            // Also if the capture fails.
            state.captured = true;
            return self.mark_all(state, compute);
        }
        match (&state.last, run.mode.attached()) {
            (Last::Marked, _) if !state.captured => return self.begin_unpublished(compute),
            // Everybody waits for the events of the pass before.
            (Last::Eager(before, on), Some(own))
                if !state.captured && Arc::ptr_eq(before, own) && on[0].index() == compute.index() =>
            {
                // Nobody has waited for those of the pass before yet.
                on.iter().for_each(|on| run.uses_slots(on));
                return self.begin_unpublished(compute);
            }
            (Last::Graph(_), _) => state.behind_graphs(compute, why::EAGER_AFTER_GRAPH)?,
            _ => {}
        }
        self.join(state, compute)?;
        state.captured = false;
        self.mark_all(state, compute)
    }

    /// A weight that nobody publishes is written by whoever uses it, where it is used: gathers of this pass are behind
    /// what `compute` did before it.
    fn begin_unpublished(&self, compute: &Stream) -> Result<(), GtpError> {
        let own = |axis: usize| self.weights.iter().any(|w| w.lane == axis && w.param.publisher().is_none());
        let lanes = self.lanes.iter().enumerate().filter(|(axis, _)| own(*axis));
        for lane in lanes.filter_map(|(_, lane)| lane.as_ref()) {
            self.omitted.record(Record::Fork, compute, &self.fork)?;
            lane.gather.wait(&self.fork, why::BEGIN_AFTER_WORK)?;
        }
        Ok(())
    }

    /// Orders `stream` behind everything under way in the lanes, and behind the streams that have used slots since.
    pub(crate) fn join(&self, state: &State, stream: &Stream) -> Result<(), GtpError> {
        self.join_lanes(stream)?;
        let last: &[Stream] = match &state.last {
            Last::Eager(_, on) | Last::Loose(on) => on,
            Last::Marked | Last::Graph(_) => &[],
        };
        let now: &[Stream] = state.run.as_ref().filter(|run| run.is_submitted()).map_or(&[], |run| &run.streams);
        for on in last.iter().chain(now).filter(|on| on.index() != stream.index()) {
            self.omitted.record(Record::Tails, on, &self.fork)?;
            stream.wait(&self.fork, why::END_AFTER_LANES)?;
        }
        Ok(())
    }

    fn join_lanes(&self, stream: &Stream) -> Result<(), GtpError> {
        for lane in self.open_lanes() {
            for (on, tail) in [(&lane.gather, &lane.gather_tail), (&lane.reduce, &lane.reduce_tail)] {
                self.omitted.record(Record::Tails, on, tail)?;
                stream.wait(tail, why::END_AFTER_LANES)?;
            }
        }
        Ok(())
    }

    /// Records every event that a pass may wait for behind `compute`, and orders the lanes behind it.
    pub(crate) fn mark_all(&self, state: &State, compute: &Stream) -> Result<(), GtpError> {
        let spares = state.spare.values().flat_map(|spare| [&spare.value, &spare.grad]).flatten();
        let spares = spares.flat_map(|slot| [&slot.filled, &slot.read]);
        let planned = state.attached.values().flat_map(|attached| attached.events());
        planned.chain(spares).try_for_each(|event| compute.record(event))?;
        self.omitted.record(Record::Fork, compute, &self.fork)?;
        for lane in self.open_lanes() {
            lane.gather.wait(&self.fork, why::BEGIN_AFTER_WORK)?;
            lane.reduce.wait(&self.fork, why::BEGIN_AFTER_WORK)?;
        }
        Ok(())
    }

    /// Memory for an unplanned use or gradient of a weight, recorded behind `compute`.
    pub(crate) fn spare_slot(
        &self,
        weight: WeightIndex,
        what: &str,
        dtype: device::DType,
        compute: &Stream,
    ) -> Result<SpareSlot, GtpError> {
        let known = &self.weights[weight.0];
        let name = format!("gtp.{what}.{}", known.param.name());
        let view = self.device.alloc(&name, &[known.numel()], dtype, MemoryKind::Arena)?;
        let event = |what: &str| self.device.event(&format!("{name}.{what}"));
        let slot = SpareSlot { view, filled: event("filled"), read: event("read") };
        compute.record(&slot.filled)?;
        compute.record(&slot.read)?;
        Ok(slot)
    }

    /// The newest value of a weight that somebody has written.
    pub(crate) fn written(&self, weight: &Weight) -> u64 {
        weight.param.publisher().map_or(0, |publisher| publisher.epochs().written)
    }

    /// The pass under way has come to its end, or a part of it has. `compute`: where it used sharded weights, if it did.
    pub(crate) fn leave(self: &Arc<Self>, turn: &mut Turn<'_>, compute: Option<&Stream>) -> Result<(), GtpError> {
        let mut state = self.lock();
        let Some(run) = &mut state.run else { return Ok(()) };
        run.check_closed(self)?;
        let Some(compute) = compute.filter(|_| run.recorded) else { return Ok(()) };
        run.entered = false;
        let (mut part, over, gates) = (run.end_part(), run.is_over(), self.has_gates(run));
        match part.as_mut().filter(|_| gates) {
            Some(part) => self.drain(part, compute)?,
            None => self.join_lanes(compute)?,
        }
        if over {
            state.run = None;
        }
        part.map_or(Ok(()), |part| Ok(turn.hand_over(part.of(self))?))
    }

    /// Graphs of this pass tell each other what is done: what is being captured is to drain in two stages.
    pub(crate) fn has_gates(&self, run: &Run) -> bool {
        run.recorded && self.config.drain == Drain::TwoStage
    }

    /// Ends a captured part in two stages: its uses and gathers, then its reductions, gradient by gradient as far as
    /// others wait for them.
    fn drain(&self, part: &mut Part, compute: &Stream) -> Result<(), GtpError> {
        for lane in self.open_lanes() {
            self.omitted.record(Record::Tails, &lane.gather, &lane.gather_tail)?;
            compute.wait(&lane.gather_tail, why::END_AFTER_LANES)?;
        }
        let drained = self.device.event(&format!("gtp.drained.{}.{}", part.kind, part.to.step));
        self.omitted.record_external(Record::Drained, compute, &drained)?;
        part.drained = Some(drained);
        let (own, plan) = (part.from.grad..part.to.grad, &part.attached.plan);
        for grad in own.clone() {
            let waits = |(later, planned): (usize, &PlannedGrad)| {
                planned.after.contains(&GradIndex(grad)) && (later <= grad || !own.contains(&later))
            };
            if plan.grads().iter().enumerate().any(waits) {
                let slot = &part.attached.grads[grad];
                compute.wait(&slot.reduced, why::END_AFTER_LANES)?;
                self.omitted.record_external(Record::Gates, compute, &slot.gate)?;
            }
        }
        for lane in self.open_lanes() {
            lane.reduce.record(&lane.reduce_tail)?;
            compute.wait(&lane.reduce_tail, why::END_AFTER_LANES)?;
        }
        for axis in &part.reduced {
            let lane = self.lanes[*axis].as_ref().expect("BUG: a lane that reduces is open");
            self.omitted.record_external(Record::Gates, compute, &lane.reduce_gate)?;
        }
        Ok(())
    }

    /// Records once what graphs wait for, so that the first one waits for nothing that never was.
    pub(crate) fn open_gates(&self, state: &mut State, stream: &Stream) -> Result<(), GtpError> {
        if self.config.drain == Drain::Whole || std::mem::replace(&mut state.gated, true) {
            return Ok(());
        }
        let grads = state.attached.values().flat_map(|attached| &attached.grads).map(|slot| &slot.gate);
        let lanes = self.open_lanes().map(|lane| &lane.reduce_gate);
        Ok(grads.chain(lanes).filter(|gate| gate.generation() == 0).try_for_each(|gate| stream.record(gate))?)
    }
}

impl State {
    /// Orders `stream` behind every launch so far.
    pub(crate) fn behind_graphs(&self, stream: &Stream, why: device::Why) -> Result<(), GtpError> {
        Ok(self.launched.iter().try_for_each(|(_, event)| stream.wait(event, why))?)
    }
}
