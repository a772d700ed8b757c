//! Losses on their way to the host. The host runs ahead of the device by at most two steps.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use device::{Download, Error};

use super::rank::RankRun;

/// A step that was submitted and whose loss is not known yet.
struct Pending {
    loss: Download<f32>,
    grad_norm: Download<f32>,
    lr: f64,
}

/// A step whose loss is known.
pub(super) struct Known {
    pub(super) loss: f32,
    pub(super) grad_norm: f32,
    pub(super) lr: f64,
    /// Since the loss of the step before was known, or since the first step was submitted.
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
    pub(super) fn submitted(&mut self, rank: &RankRun, lr: f64) -> Result<(), Error> {
        let loss = rank.stream.download(&rank.loss)?;
        let grad_norm = rank.stream.download(rank.adam.grad_norm())?;
        self.pending.push_back(Pending { loss, grad_norm, lr });
        Ok(())
    }

    /// The oldest step's results, once too many are under way; waits for them then.
    pub(super) fn next(&mut self) -> Result<Option<Known>, Error> {
        if self.pending.len() < Self::AHEAD { Ok(None) } else { self.oldest() }
    }

    /// The oldest step's results, until none is left.
    pub(super) fn oldest(&mut self) -> Result<Option<Known>, Error> {
        let Some(Pending { loss, grad_norm, lr }) = self.pending.pop_front() else { return Ok(None) };
        let (loss, grad_norm) = (loss.wait()?[0], grad_norm.wait()?[0]);
        let now = Instant::now();
        let took = now - std::mem::replace(&mut self.since, now);
        Ok(Some(Known { loss, grad_norm, lr, took }))
    }
}
