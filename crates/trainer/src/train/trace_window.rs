//! The steps of a run that are traced.

use std::ops::RangeInclusive;

use device::{Machine, Trace};

use super::rank::RankRun;
use crate::TrainError;

/// Traces some steps of all ranks. Tracing belongs to the machine, so all ranks meet, with nothing in flight, before it
/// begins and before it ends: what is recorded is whole steps, and the pipeline of steps is drained twice.
pub(super) struct TraceWindow {
    machine: Machine,
    is_first: bool,
    /// From 1, both ends included.
    steps: RangeInclusive<u64>,
    state: State,
}

enum State {
    Before,
    Tracing,
    Done(Option<Trace>),
}

impl TraceWindow {
    /// Around `steps`, or around nothing.
    pub(super) fn new(machine: &Machine, is_first: bool, steps: Option<RangeInclusive<u64>>) -> TraceWindow {
        let state = if steps.is_some() { State::Before } else { State::Done(None) };
        let steps = steps.unwrap_or(1..=0);
        TraceWindow { machine: machine.clone(), is_first, steps, state }
    }

    /// Before `step` is submitted; results of earlier steps that are under way have been waited for if this is true.
    pub(super) fn begins_before(&self, step: u64) -> bool {
        matches!(self.state, State::Before) && self.steps.contains(&step)
    }

    /// Whether it ends behind `step`.
    pub(super) fn ends_behind(&self, step: u64) -> bool {
        matches!(self.state, State::Tracing) && step >= *self.steps.end()
    }

    /// All ranks begin it before the same step.
    pub(super) fn begin(&mut self, run: &RankRun) -> Result<(), TrainError> {
        run.meet()?;
        if self.is_first {
            self.machine.trace_start();
        }
        self.state = State::Tracing;
        run.meet()
    }

    /// All ranks end it behind the same step. Does nothing if it has not begun or has ended.
    pub(super) fn end(&mut self, run: &RankRun) -> Result<(), TrainError> {
        if !matches!(self.state, State::Tracing) {
            return Ok(());
        }
        run.meet()?;
        self.state = State::Done(self.is_first.then(|| self.machine.trace_stop()));
        run.meet()
    }

    /// What was traced, on the first rank.
    pub(super) fn into_trace(self) -> Option<Trace> {
        match self.state {
            State::Done(trace) => trace,
            State::Before | State::Tracing => None,
        }
    }
}
