//! What a run writes while it goes on: metrics, events, progress.

use std::{io::Write, path::Path};

use super::{loss_log::Known, rank::gpt_plan};
use crate::{Config, EventFile, MetricsFile, Progress, ProgressConfig, StepMetrics, TrainError};

/// The files and the screen of a run.
pub(super) struct RunLog {
    pub(super) progress: Progress,
    pub(super) file: MetricsFile,
    pub(super) events: Option<EventFile>,
    pub(super) metrics: Vec<StepMetrics>,
    tokens_per_step: u64,
    /// Share of the peak that one token per second is.
    mfu_per_rate: f64,
}

impl RunLog {
    pub(super) fn start(
        config: &Config,
        dir: &Path,
        lines: Box<dyn Write + Send>,
        peak: Option<f64>,
    ) -> Result<RunLog, TrainError> {
        let shown =
            ProgressConfig { kind: config.log.progress, steps: config.train.steps, interval: config.log.interval };
        let flops_per_token = gpt_plan(config)?.flops_per_token();
        Ok(RunLog {
            progress: Progress::start(shown, lines),
            file: MetricsFile::create(dir)?,
            events: config.log.tensorboard.then(|| EventFile::create(dir)).transpose()?,
            metrics: Vec::new(),
            tokens_per_step: config.train.global_batch * config.model.seq_len as u64,
            mfu_per_rate: peak.map_or(f64::NAN, |peak| flops_per_token / peak),
        })
    }

    pub(super) fn step(&mut self, known: Known) -> Result<(), TrainError> {
        let step = self.metrics.len() as u64 + 1;
        let seconds = known.took.as_secs_f64();
        let tokens_per_s = self.tokens_per_step as f64 / seconds;
        let metrics = StepMetrics {
            step,
            loss: known.loss,
            lr: known.lr,
            grad_norm: known.grad_norm,
            tokens: step * self.tokens_per_step,
            tokens_per_s,
            mfu: tokens_per_s * self.mfu_per_rate,
            seconds,
            phases: known.phases,
            eval_loss: known.eval_loss,
        };
        let (loss, eval_loss, phases) = (metrics.loss, metrics.eval_loss, &metrics.phases);
        tracing::info!(step, loss, eval_loss, tokens_per_s, ?phases, "trainer.step_done");
        self.file.write(&metrics)?;
        if let Some(events) = &mut self.events {
            events.write(&metrics)?;
        }
        self.progress.step(&metrics);
        self.metrics.push(metrics);
        Ok(())
    }
}
