//! The steps of a run that are traced.

use std::ops::RangeInclusive;

use device::{Machine, Trace, TraceEvent};

use super::rank::RankRun;
use crate::TrainError;

/// Traces some steps of all ranks. Tracing belongs to the machine, so all ranks meet, with nothing in flight, before it
/// begins and before it ends: what is recorded is whole steps, and the pipeline of steps is drained twice.
pub(super) struct TraceWindow {
    machine: Machine,
    /// The first rank begins and ends the recording, for all.
    is_first: bool,
    state: State,
}

/// `Before -begin-> Tracing -end-> Done`.
enum State {
    /// Steps from 1, both ends included.
    Before(RangeInclusive<u64>),
    Tracing {
        last: u64,
    },
    /// With a trace on the first rank, if there was something to trace.
    Done(Option<Trace>),
}

impl TraceWindow {
    /// Around `steps`, or around nothing.
    pub(super) fn new(machine: &Machine, is_first: bool, steps: Option<RangeInclusive<u64>>) -> TraceWindow {
        TraceWindow { machine: machine.clone(), is_first, state: steps.map_or(State::Done(None), State::Before) }
    }

    /// Whether it begins before `step`. The caller then waits for all earlier steps and calls [`TraceWindow::begin`].
    pub(super) fn begins_before(&self, step: u64) -> bool {
        matches!(&self.state, State::Before(steps) if steps.contains(&step))
    }

    /// Whether it ends behind `step`. The caller then waits for that step and calls [`TraceWindow::end`].
    pub(super) fn ends_behind(&self, step: u64) -> bool {
        matches!(self.state, State::Tracing { last } if step >= last)
    }

    /// All ranks begin it before the same step.
    pub(super) fn begin(&mut self, run: &RankRun) -> Result<(), TrainError> {
        let State::Before(steps) = &self.state else { return Ok(()) };
        let last = *steps.end();
        run.meet()?;
        if self.is_first {
            self.machine.trace_start();
        }
        self.state = State::Tracing { last };
        run.meet()
    }

    /// All ranks end it behind the same step. Does nothing if it has not begun or has ended.
    pub(super) fn end(&mut self, run: &RankRun) -> Result<(), TrainError> {
        if !matches!(self.state, State::Tracing { .. }) {
            return Ok(());
        }
        run.meet()?;
        let group = run.stop.everyone().name();
        self.state = State::Done(self.is_first.then(|| without_meetings(self.machine.trace_stop(), group)));
        run.meet()
    }

    /// What was traced, on the first rank.
    pub(super) fn into_trace(self) -> Option<Trace> {
        match self.state {
            State::Done(trace) => trace,
            State::Before(_) | State::Tracing { .. } => None,
        }
    }
}

/// The meetings at both ends are no part of what was to be traced.
fn without_meetings(mut trace: Trace, of: &str) -> Trace {
    let meeting =
        |event: &TraceEvent| matches!(event, TraceEvent::Joint { group, what, .. } if group == of && what == "barrier");
    trace.events.retain(|event| !meeting(event));
    trace
}
