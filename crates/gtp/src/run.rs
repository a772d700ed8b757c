//! A pass under way: where it is in its plan, what is gathered, what is open.

use std::{collections::BTreeMap, sync::Arc};

use device::{Event, Stream, View};
use pgroups::Pass;

use crate::{
    GradIndex, GtpError, UseIndex, WeightIndex,
    attached::Attached,
    core::Core,
    schedule::{GatherIndex, PassKind, Schedule, Step},
};

/// Whether the pass runs as planned.
pub(crate) enum Mode {
    Planned {
        attached: Arc<Attached>,
        at: Place,
    },
    /// It has no plan, or has left it: every use gathers for itself.
    OnDemand,
}

/// A place in a schedule: the next step, use and gradient.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Place {
    pub(crate) step: usize,
    pub(crate) used: usize,
    pub(crate) grad: usize,
}

impl Mode {
    pub(crate) fn planned(attached: Arc<Attached>) -> Mode {
        Mode::Planned { attached, at: Place::default() }
    }

    pub(crate) fn attached(&self) -> Option<&Arc<Attached>> {
        match self {
            Mode::Planned { attached, .. } => Some(attached),
            Mode::OnDemand => None,
        }
    }
}

/// How a call goes on.
pub(crate) enum Next {
    /// The use that the plan has here.
    Use(Arc<Attached>, UseIndex),
    /// The gradient that the plan has here.
    Grad(Arc<Attached>, GradIndex),
    /// Nothing more is to be looked up.
    Planned,
    OnDemand,
    /// As [`Next::OnDemand`], from here on.
    Left,
}

/// A use that has begun.
#[derive(Clone)]
pub(crate) struct OpenUse {
    pub(crate) weight: WeightIndex,
    /// The weight, as its user sees it.
    pub(crate) view: View,
    /// Behind the gather.
    pub(crate) gathered: Event,
    /// To be recorded behind the use.
    pub(crate) used: Event,
}

/// A gradient that may be written.
pub(crate) struct OpenGrad {
    pub(crate) weight: WeightIndex,
    /// Flat, padding included.
    pub(crate) view: View,
    pub(crate) written: Event,
    pub(crate) reduced: Event,
}

pub(crate) struct Run {
    pub(crate) kind: PassKind,
    pub(crate) mode: Mode,
    /// It is captured, not run.
    pub(crate) recorded: bool,
    /// Graphs have run the part so far.
    pub(crate) by_graphs: bool,
    /// Its slots may be used by the stream that computes and by the lanes.
    pub(crate) entered: bool,
    /// Whoever uses its slots, in the order of first uses.
    pub(crate) streams: Vec<Stream>,
    /// What it has done, where its plan does not tell.
    executed: Schedule,
    pub(crate) uses: Vec<OpenUse>,
    pub(crate) grads: Vec<OpenGrad>,
    /// What is gathered or under way, with the write that it is of.
    pub(crate) flights: BTreeMap<GatherIndex, u64>,
    /// Since the last part ended.
    part: Option<PartBegin>,
}

/// Where a captured part of a pass began.
struct PartBegin {
    from: Place,
    /// Lanes that have reduced, by axis.
    reduced: Vec<usize>,
    /// Gathers that it found.
    found: Vec<GatherIndex>,
}

/// A captured part of a pass.
pub(crate) struct Part {
    pub(crate) kind: PassKind,
    pub(crate) attached: Arc<Attached>,
    pub(crate) from: Place,
    pub(crate) to: Place,
    /// Gathers that it uses and does not issue.
    pub(crate) needs: Vec<GatherIndex>,
    /// Gathers that it issues or uses, and that are still to be used behind it.
    pub(crate) leaves: Vec<GatherIndex>,
    /// Gathers that it neither issues nor uses: there behind it if they were there before.
    pub(crate) passes_on: Vec<GatherIndex>,
    /// Lanes that reduce in it.
    pub(crate) reduced: Vec<usize>,
    /// Recorded by its graph behind its uses and gathers; none if whatever follows waits for all of it.
    pub(crate) drained: Option<Event>,
}

impl Run {
    pub(crate) fn new(kind: PassKind, mode: Mode, recorded: bool) -> Run {
        Run {
            kind,
            mode,
            recorded,
            by_graphs: false,
            entered: false,
            streams: Vec::new(),
            executed: Schedule::default(),
            uses: Vec::new(),
            grads: Vec::new(),
            flights: BTreeMap::new(),
            part: None,
        }
    }

    /// The pass as graphs have left it at `at`.
    pub(crate) fn by_graphs(
        kind: PassKind,
        attached: Arc<Attached>,
        at: Place,
        flights: BTreeMap<GatherIndex, u64>,
    ) -> Run {
        let mut run = Run::new(kind, Mode::Planned { attached, at }, false);
        (run.by_graphs, run.flights) = (true, flights);
        run
    }

    /// Goes on with `step`, as planned or not.
    ///
    /// # Errors
    /// [`GtpError::LeavesPlan`] in a capture.
    pub(crate) fn advance(&mut self, step: Step, core: &Core) -> Result<Next, GtpError> {
        let Mode::Planned { attached, at } = &mut self.mode else {
            self.executed.push(step);
            return Ok(Next::OnDemand);
        };
        let schedule = attached.plan.schedule();
        let planned = schedule.steps().get(at.step);
        if planned == Some(&step) {
            self.part.get_or_insert_with(|| PartBegin {
                from: *at,
                reduced: Vec::new(),
                found: self.flights.keys().copied().collect(),
            });
            at.step += 1;
            return Ok(match step {
                Step::Take(..) => {
                    at.used += 1;
                    Next::Use(attached.clone(), UseIndex(at.used - 1))
                }
                Step::Grad(_) => {
                    at.grad += 1;
                    Next::Grad(attached.clone(), GradIndex(at.grad - 1))
                }
                Step::GiveBack(_) | Step::GradDone(_) => Next::Planned,
            });
        }
        if self.recorded {
            let tell = |step: &Step| tell(step, core);
            let planned = planned.map_or("its end".to_owned(), tell);
            return Err(GtpError::LeavesPlan { kind: self.kind, found: tell(&step), planned });
        }
        self.executed = schedule.prefix(at.step);
        self.executed.push(step);
        self.mode = Mode::OnDemand;
        Ok(Next::Left)
    }

    /// Steps so far, and planned ones in all.
    pub(crate) fn done(&self) -> usize {
        match &self.mode {
            Mode::Planned { at, .. } => at.step,
            Mode::OnDemand => self.executed.steps().len(),
        }
    }

    pub(crate) fn steps(&self) -> usize {
        match &self.mode {
            Mode::Planned { attached, .. } => attached.plan.schedule().steps().len(),
            Mode::OnDemand => self.executed.steps().len(),
        }
    }

    /// Part of it was submitted, to be run.
    pub(crate) fn is_submitted(&self) -> bool {
        self.entered && !self.recorded
    }

    /// It has done everything that its plan has.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.mode, Mode::Planned { .. }) && self.done() == self.steps()
    }

    /// Everything that it has done.
    pub(crate) fn executed(&self) -> Schedule {
        match &self.mode {
            Mode::Planned { attached, at } => attached.plan.schedule().prefix(at.step),
            Mode::OnDemand => self.executed.clone(),
        }
    }

    /// # Errors
    /// [`GtpError::StillOpen`].
    pub(crate) fn check_closed(&self, core: &Core) -> Result<(), GtpError> {
        let name = |weight: WeightIndex| core.weights[weight.0].param.name().to_owned();
        let use_ = self.uses.first().map(|open| ("a use", open.weight));
        let open = use_.or_else(|| self.grads.first().map(|open| ("a gradient", open.weight)));
        open.map_or(Ok(()), |(what, weight)| Err(GtpError::StillOpen { kind: self.kind, what, param: name(weight) }))
    }

    /// What has been captured since the last part ended; nothing if no step was.
    pub(crate) fn end_part(&mut self) -> Option<Part> {
        let PartBegin { from, reduced, found } = self.part.take()?;
        let Mode::Planned { attached, at } = &self.mode else { return None };
        let plan = &attached.plan;
        let used = (from.used..at.used).map(|u| plan.gather_of(UseIndex(u)));
        let mut needs: Vec<GatherIndex> = used.filter(|gather| found.contains(gather)).collect();
        needs.sort_unstable();
        needs.dedup();
        let still = |gather: &GatherIndex| plan.gathers()[gather.0].uses.iter().any(|u| u.0 >= at.used);
        let only_found = |gather: &GatherIndex| found.contains(gather) && !needs.contains(gather);
        let (passes_on, leaves) = self.flights.keys().copied().filter(still).partition(only_found);
        let (kind, attached) = (self.kind, attached.clone());
        Some(Part { kind, attached, from, to: *at, needs, leaves, passes_on, reduced, drained: None })
    }

    /// Whether a gradient of the plan is of the captured part under way.
    pub(crate) fn is_of_part(&self, grad: GradIndex) -> bool {
        let (Some(part), Mode::Planned { at, .. }) = (&self.part, &self.mode) else { return false };
        (part.from.grad..at.grad).contains(&grad.0)
    }

    /// Whether the lane of an axis reduces for the first time in the captured part under way.
    pub(crate) fn reduces_first(&mut self, axis: usize) -> bool {
        let Some(part) = &mut self.part else { return false };
        let first = !part.reduced.contains(&axis);
        part.reduced.extend(first.then_some(axis));
        first
    }
}

fn tell(step: &Step, core: &Core) -> String {
    let name = |weight: &WeightIndex| core.weights[weight.0].param.name();
    match step {
        Step::Take(weight, pass) => {
            let pass = match pass {
                Pass::Forward => "in forward",
                Pass::Backward => "in backward",
                Pass::Recompute => "in recompute",
            };
            format!("takes '{}' {pass}", name(weight))
        }
        Step::GiveBack(weight) => format!("gives '{}' back", name(weight)),
        Step::Grad(weight) => format!("asks for the gradient of '{}'", name(weight)),
        Step::GradDone(weight) => format!("has the gradient of '{}' done", name(weight)),
    }
}
