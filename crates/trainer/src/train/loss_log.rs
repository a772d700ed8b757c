//! Losses on their way to the host. The host runs ahead of the device by at most two steps.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use device::{Download, Error};

use super::{
    eval::Evaluator,
    rank::RankRun,
    stop::{Asked, Signal},
};
use crate::TrainError;

/// A step that was submitted and whose loss is not known yet.
struct Pending {
    loss: Download<f32>,
    grad_norm: Download<f32>,
    stop: Asked,
    eval: Option<Download<f32>>,
    lr: f64,
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
    const AHEAD: usize = 2;

    pub(super) fn start() -> LossLog {
        LossLog { pending: VecDeque::new(), since: Instant::now() }
    }

    /// Asks for the results of the step that was just submitted.
    pub(super) fn submitted(&mut self, rank: &RankRun, lr: f64) -> Result<(), TrainError> {
        let loss = rank.stream.download(&rank.loss)?;
        let grad_norm = rank.parallel.grad_norm()?;
        let stop = rank.stop.download(&rank.stream)?;
        self.pending.push_back(Pending { loss, grad_norm, stop, eval: None, lr });
        Ok(())
    }

    /// Asks for the loss of the evaluation that was just submitted behind the last step.
    pub(super) fn evaluated(&mut self, rank: &RankRun, eval: &Evaluator) -> Result<(), Error> {
        let last = self.pending.back_mut().expect("BUG: an evaluation is behind a step");
        last.eval = Some(rank.stream.download(eval.loss())?);
        Ok(())
    }

    /// The oldest step's results, once too many are under way; waits for them then.
    pub(super) fn next(&mut self) -> Result<Option<Known>, Error> {
        if self.pending.len() < Self::AHEAD { Ok(None) } else { self.oldest() }
    }

    /// The oldest step's results, until none is left.
    pub(super) fn oldest(&mut self) -> Result<Option<Known>, Error> {
        let Some(Pending { loss, grad_norm, stop, eval, lr }) = self.pending.pop_front() else { return Ok(None) };
        let (loss, grad_norm, stop) = (loss.wait()?[0], grad_norm.wait()?[0], stop.wait()?);
        let took = self.since.elapsed();
        let eval_loss = eval.map(|loss| Ok::<f32, Error>(loss.wait()?[0])).transpose()?;
        self.since = Instant::now();
        Ok(Some(Known { loss, grad_norm, lr, eval_loss, stop, took }))
    }
}
