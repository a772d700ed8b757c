//! The loop of one rank: the same program on every rank.

use std::{
    collections::VecDeque,
    ops::RangeInclusive,
    sync::{Mutex, MutexGuard},
};

use data::{Batches, Corpus, Windows};
use device::{Machine, Note, Trace};
use pgroups::{Rank, Replicas};

use super::{
    eval::Evaluator,
    loss_log::{Known, LossLog},
    plan::batches,
    rank::{Plans, RankRun, data_place, gpt_plan},
    resident::resident_bytes,
    run_log::RunLog,
    stop::{Asked, Signal, StopSource},
    trace_window::TraceWindow,
    writer::write_sample,
};
use crate::{Config, TrainError};

/// What all ranks of a run are given.
pub(super) struct Shared<'a> {
    pub(super) config: &'a Config,
    pub(super) machine: &'a Machine,
    pub(super) corpus: &'a Corpus,
    pub(super) plans: Plans,
    pub(super) eval: Option<Windows>,
    pub(super) stop: StopSource,
    pub(super) traced: Option<RangeInclusive<u64>>,
    /// Rank 0 writes; the lock only lends the log to its thread.
    pub(super) log: Mutex<RunLog>,
}

/// What one rank leaves.
pub(super) struct Ended {
    /// Steps that it has done.
    pub(super) steps: u64,
    /// Why it ended before the last step.
    pub(super) stopped: Option<Signal>,
    /// Text from the trained model; of rank 0, if the configuration asks for some and training finished.
    pub(super) sample: Option<String>,
    /// Of rank 0, if steps were traced.
    pub(super) trace: Option<Trace>,
    /// Bytes of the process at the end; of rank 0, where the system tells.
    pub(super) resident: Option<usize>,
    /// Names of its streams, by number.
    pub(super) streams: Vec<String>,
}

/// Builds the rank's part and trains.
pub(super) fn run_rank(rank: &Rank, shared: &Shared<'_>) -> Result<Ended, TrainError> {
    let config = shared.config;
    let run = {
        let _span = tracing::info_span!("trainer.build_rank", rank = rank.global.0).entered();
        RankRun::build(rank, config, Some(&shared.plans))?
    };
    let eval = shared.eval.clone();
    let eval = eval.map(|w| Evaluator::open(&run, rank, config, w, shared.plans.eval.as_ref())).transpose()?;
    let is_writer = rank.global.0 == 0;
    let window = TraceWindow::new(shared.machine, is_writer, shared.traced.clone());
    let replicas = Replicas::new(&config.ranks(), &gpt_plan(config)?.specs())?;
    let losses = LossLog::start();
    let mut state = RankLoop { is_writer, run, eval, replicas, losses, window, shared, steps: 0, stop: None };
    let _span = tracing::info_span!("trainer.run_steps", rank = rank.global.0).entered();
    let place = data_place(&state.run.groups)?;
    state.train(rank.global.0, batches(config, shared.corpus, place)?)?;
    state.end()
}

struct RankLoop<'a> {
    is_writer: bool,
    run: RankRun,
    eval: Option<Evaluator>,
    replicas: Replicas,
    losses: LossLog,
    window: TraceWindow,
    shared: &'a Shared<'a>,
    /// Steps whose results are known.
    steps: u64,
    /// What some rank had been asked when one of those, or a pass of an evaluation, was submitted.
    stop: Option<Signal>,
}

impl RankLoop<'_> {
    /// Submits steps until the last one, or until it is known that some rank was asked to end. That is known on all
    /// ranks behind the same step: they read the same numbers, at the same points of the same program.
    fn train(&mut self, rank: u32, mut batches: Batches) -> Result<(), TrainError> {
        let steps = self.shared.config.train.steps;
        for step in 1..=steps {
            if self.window.begins_before(step) {
                self.drain()?;
                if self.stop.is_none() {
                    self.window.begin(&self.run)?;
                }
            }
            if self.stop.is_some() {
                break;
            }
            if step == 2 {
                self.capture()?;
            }
            self.submit(rank, step, &mut batches)?;
            self.evaluate(rank, step)?;
            self.compare_replicas(step)?;
            if self.window.ends_behind(step) {
                self.drain()?;
                self.window.end(&self.run)?;
            }
            if let Some(known) = self.losses.next()? {
                self.take(known)?;
            }
        }
        self.drain()?;
        self.window.end(&self.run)
    }

    /// Captures what the configuration asks for, and tells what that took on this rank.
    fn capture(&mut self) -> Result<(), TrainError> {
        let config = self.shared.config;
        self.run.capture(config)?;
        if let Some(eval) = &mut self.eval {
            eval.capture(&mut self.run, config)?;
        }
        let evaluation = self.eval.as_ref().and_then(Evaluator::capture_cost);
        let costs = [("training", self.run.capture_cost()), ("evaluation", evaluation)];
        for (what, cost) in costs.into_iter().filter(|_| self.is_writer) {
            if let Some(cost) = cost {
                lend(&self.shared.log).progress.note(&format!("{what}, each rank: {cost}"));
            }
        }
        Ok(())
    }

    fn submit(&mut self, rank: u32, step: u64, batches: &mut Batches) -> Result<(), TrainError> {
        let config = self.shared.config;
        let lr = config.schedule().lr(step - 1);
        let batch = batches.next_batch()?;
        let parts: Vec<_> = batch.microbatches().collect();
        self.run.stream.device().note(|| Note::Step(step));
        self.run.stop.submit(&self.run.stream, self.shared.stop.asked(rank, step))?;
        self.run.step(&parts, lr as f32)?;
        self.losses.submitted(&self.run, lr)
    }

    /// Evaluates behind a step that is due. The stop bit goes round before each pass, too, so that a long evaluation is
    /// no reason to wait; what it finds is read as late as a step's is, on all ranks before the same pass.
    fn evaluate(&mut self, rank: u32, step: u64) -> Result<(), TrainError> {
        let train = &self.shared.config.train;
        let due = step.is_multiple_of(train.eval_interval) || step == train.steps;
        let Some(eval) = self.eval.as_mut().filter(|_| due) else { return Ok(()) };
        // Below the host keeps up with the passes, which are not to count as the step's time.
        self.losses.settle()?;
        let (run, source) = (&mut self.run, &self.shared.stop);
        let mut under_way = VecDeque::new();
        let stopped = eval.submit(run, |run| {
            run.stop.submit(&run.stream, source.asked_in_evaluation(rank, step))?;
            under_way.push_back(run.stop.download(&run.stream)?);
            let known = if under_way.len() > LossLog::AHEAD { under_way.pop_front() } else { None };
            Ok(known.map(|asked: Asked| asked.wait()).transpose()?.flatten())
        })?;
        match stopped {
            Some(_) => self.stop = self.stop.or(stopped),
            None => self.losses.evaluated(&self.run, eval)?,
        }
        Ok(())
    }

    /// Compares parameters over their replicas behind a step that is due.
    fn compare_replicas(&mut self, step: u64) -> Result<(), TrainError> {
        if step.is_multiple_of(self.shared.config.train.replica_check_interval) {
            self.losses.settle()?;
            self.run.compare_replicas(&self.replicas)?;
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<(), TrainError> {
        while let Some(known) = self.losses.oldest()? {
            self.take(known)?;
        }
        Ok(())
    }

    fn take(&mut self, known: Known) -> Result<(), TrainError> {
        self.steps += 1;
        self.stop = self.stop.or(known.stop);
        let (loss, grad_norm, step) = (known.loss, known.grad_norm, self.steps);
        if self.is_writer {
            lend(&self.shared.log).step(known)?;
        }
        if loss.is_finite() {
            return Ok(());
        }
        // The loss is that of the global batch, so every rank comes here, and none leaves before it is written.
        self.run.meet()?;
        Err(TrainError::Diverged { step, loss, grad_norm })
    }

    fn end(mut self) -> Result<Ended, TrainError> {
        let config = self.shared.config;
        let stopped = self.stop.filter(|_| self.steps < config.train.steps);
        tracing::info!(steps = self.steps, stopped = stopped.map(Signal::number), "trainer.end_rank");
        // The sample is one rank's alone, unless it takes others to compute with its weights.
        let cut = config.layout.tp * config.layout.gtp > 1;
        let wanted = (self.is_writer || cut) && stopped.is_none() && config.log.sample_tokens > 0;
        self.run.parallel.publish(&self.run.stream)?;
        // While all ranks still have what they own, and before the sample: it is not what the run took.
        self.run.meet()?;
        let resident = if self.is_writer { resident_bytes() } else { None };
        self.run.meet()?;
        let tokenizer = self.shared.corpus.tokenizer();
        let sample = wanted.then(|| write_sample(&mut self.run, config, tokenizer)).transpose()?;
        let streams = self.run.stream.device().stream_names();
        Ok(Ended { steps: self.steps, stopped, sample, trace: self.window.into_trace(), resident, streams })
    }
}

fn lend(log: &Mutex<RunLog>) -> MutexGuard<'_, RunLog> {
    log.lock().unwrap_or_else(|poison| poison.into_inner())
}
