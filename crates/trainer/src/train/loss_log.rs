//! Losses on their way to the host. The host runs ahead of the device by at most two steps.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use device::{Download, Error};

use super::{
    eval::Evaluator,
    phases::Timed,
    rank::RankRun,
    stop::{Asked, Signal},
};
use crate::{PhaseTimes, TrainError};

/// A step that was submitted.
struct Pending {
    results: Results,
    eval: Option<Download<f32>>,
    lr: f64,
}

/// `Coming -wait-> Here`.
enum Results {
    Coming(Box<Coming>),
    Here(Here),
}

/// What a step will have given.
struct Coming {
    loss: Download<f32>,
    grad_norm: Download<f32>,
    stop: Asked,
    phases: Timed,
}

/// What a step has given, evaluation left out.
#[derive(Clone, Copy)]
struct Here {
    loss: f32,
    grad_norm: f32,
    stop: Option<Signal>,
    phases: PhaseTimes,
    took: Duration,
}

impl Results {
    /// Waits for them; `since` is when the ones before were known.
    fn wait(self, since: &mut Instant) -> Result<Here, Error> {
        let (loss, grad_norm, stop, phases) = match self {
            Results::Here(here) => return Ok(here),
            Results::Coming(coming) => {
                let Coming { loss, grad_norm, stop, phases } = *coming;
                (loss.wait()?[0], grad_norm.wait()?[0], stop.wait()?, phases.wait()?)
            }
        };
        let took = since.elapsed();
        *since = Instant::now();
        Ok(Here { loss, grad_norm, stop, phases, took })
    }
}

/// A step whose loss is known.
pub(super) struct Known {
    pub(super) loss: f32,
    pub(super) grad_norm: f32,
    pub(super) lr: f64,
    /// Of the evaluation behind the step, if there was one.
    pub(super) eval_loss: Option<f32>,
    /// Some rank had been asked to end when this step was submitted. The same on all ranks.
    pub(super) stop: Option<Signal>,
    pub(super) phases: PhaseTimes,
    /// Since the results of the step before were known, or since the first step was submitted. What an evaluation
    /// behind this step takes is left out.
    pub(super) took: Duration,
}

/// Steps under way, oldest first.
pub(super) struct LossLog {
    pending: VecDeque<Pending>,
    since: Instant,
}

impl LossLog {
    /// Steps that may be under way when the next one is submitted.
    pub(super) const AHEAD: usize = 2;

    pub(super) fn start() -> LossLog {
        LossLog { pending: VecDeque::new(), since: Instant::now() }
    }

    /// Asks for the results of the step that was just submitted.
    pub(super) fn submitted(&mut self, rank: &RankRun, lr: f64) -> Result<(), TrainError> {
        let loss = rank.stream.download(&rank.loss)?;
        let grad_norm = rank.parallel.grad_norm()?;
        let stop = rank.stop.download(&rank.stream)?;
        let phases = rank.clock.download(rank.parallel.updates())?;
        let results = Results::Coming(Box::new(Coming { loss, grad_norm, stop, phases }));
        self.pending.push_back(Pending { results, eval: None, lr });
        Ok(())
    }

    /// Asks for the loss of the evaluation that was just submitted behind the last step.
    pub(super) fn evaluated(&mut self, rank: &RankRun, eval: &Evaluator) -> Result<(), Error> {
        let last = self.pending.back_mut().expect("BUG: an evaluation is behind a step");
        last.eval = Some(rank.stream.download(eval.loss())?);
        Ok(())
    }

    /// Waits for the results of all steps under way, which are still handed out one by one: what the host does next is
    /// no part of their time.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        for Pending { results, eval, lr } in std::mem::take(&mut self.pending) {
            let results = Results::Here(results.wait(&mut self.since)?);
            self.pending.push_back(Pending { results, eval, lr });
        }
        Ok(())
    }

    /// The oldest step's results, once too many are under way; waits for them then.
    pub(super) fn next(&mut self) -> Result<Option<Known>, Error> {
        if self.pending.len() < Self::AHEAD { Ok(None) } else { self.oldest() }
    }

    /// The oldest step's results, until none is left.
    pub(super) fn oldest(&mut self) -> Result<Option<Known>, Error> {
        let Some(Pending { results, eval, lr }) = self.pending.pop_front() else { return Ok(None) };
        let Here { loss, grad_norm, stop, phases, took } = results.wait(&mut self.since)?;
        let eval_loss = eval.map(|loss| Ok::<f32, Error>(loss.wait()?[0])).transpose()?;
        self.since = Instant::now();
        Ok(Some(Known { loss, grad_norm, lr, eval_loss, stop, phases, took }))
    }
}
