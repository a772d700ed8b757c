//! The run: data, ranks, metrics, a sample at the end.

use std::{
    fmt, fs,
    io::Write,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use data::Corpus;
use device::{Machine, Options};

use super::{
    loss_log::{Known, LossLog},
    peak::product_peak,
    plan::{RunPlan, batches, plan_run},
    rank::{RankRun, gpt_plan},
    resident::resident_bytes,
    writer::write_sample,
};
use crate::{
    Config, DeviceKind, MetricsFile, Progress, ProgressConfig, RunSummary, StepMetrics, TrainError, write_loss_curve,
};

/// What a finished run leaves.
#[derive(Clone, Debug)]
pub struct Trained {
    /// Every step.
    pub metrics: Vec<StepMetrics>,
    /// The run in a few numbers.
    pub summary: RunSummary,
    /// Text from the trained model, if the configuration asks for some.
    pub sample: Option<String>,
    /// What was planned.
    pub plan: RunPlan,
    /// Bytes by which the process grew from before the ranks were made until the last step; none where the system
    /// does not tell.
    pub resident_growth: Option<usize>,
    /// The loss curve.
    pub curve: PathBuf,
    /// The metrics.
    pub metrics_file: PathBuf,
}

/// Where a run leaves its files if nobody says: `runs/` and the configuration's name.
pub fn default_run_dir(config: &Path) -> PathBuf {
    Path::new("runs").join(config.file_stem().unwrap_or_else(|| "run".as_ref()))
}

/// Trains as `config` says; metrics and the loss curve go to `dir`, progress to `lines` or a bar.
///
/// # Errors
/// Data or settings that do not fit, before anything is trained; the root cause if a rank fails.
pub fn train(config: &Config, dir: &Path, lines: Box<dyn Write + Send>) -> Result<Trained, TrainError> {
    let corpus = Corpus::load(&config.data.source())?;
    // Too little data is told before anything else is made.
    batches(config, &corpus, 0)?;
    let plan = plan_run(config)?;
    // What the measurement of the peak leaves to the allocator is used again below.
    let before = resident_bytes();
    let machine = machine(config)?;
    let peak = product_peak(&machine, 0)?;
    fs::create_dir_all(dir).map_err(|source| TrainError::Write { path: dir.to_owned(), source })?;
    let mut log = RunLog::start(config, dir, lines, peak)?;
    log.progress.note(&format!("{} tokens from {} files", corpus.tokens(), corpus.files().len()));
    log.progress.note(plan.to_string().trim_end());
    let metrics_file = log.file.path().to_owned();
    // Rank 0 writes; the lock only lends the log to its thread.
    let log = Mutex::new(log);
    let ended = pgroups::local(&machine, config.layout.dp, |rank| -> Result<_, TrainError> {
        let mut run = RankRun::build(&rank, config, Some(&plan.plans()))?;
        let is_writer = rank.global.0 == 0;
        let mut batches = batches(config, &corpus, rank.global.0)?;
        let mut losses = LossLog::start();
        for step in 0..config.train.steps {
            let lr = config.schedule().lr(step);
            run.step(&batches.next_batch()?, lr as f32)?;
            losses.submitted(&run, lr)?;
            if let Some(known) = losses.next()?.filter(|_| is_writer) {
                lend(&log).step(known)?;
            }
        }
        while let Some(known) = losses.oldest()? {
            if is_writer {
                lend(&log).step(known)?;
            }
        }
        let now = resident_bytes();
        // Nobody gives memory back before rank 0 has looked.
        run.meet()?;
        if !is_writer {
            return Ok((None, None));
        }
        let grown = now.zip(before).map(|(now, before)| now.saturating_sub(before));
        let wanted = config.log.sample_tokens > 0;
        let sample = wanted.then(|| write_sample(&mut run, config, corpus.tokenizer())).transpose()?;
        Ok((sample, grown))
    })?;
    let log = log.into_inner().unwrap_or_else(|poison| poison.into_inner());
    log.progress.finish();
    let (sample, resident_growth) = ended.into_iter().next().expect("BUG: a layout has a rank");
    let summary = RunSummary::of(&log.metrics).expect("BUG: a run has a step");
    let title = dir.file_name().map_or_else(|| "loss".into(), |name| name.to_string_lossy().into_owned());
    let curve = write_loss_curve(dir, &title, &log.metrics)?;
    Ok(Trained { metrics: log.metrics, summary, sample, plan, resident_growth, curve, metrics_file })
}

fn lend(log: &Mutex<RunLog>) -> std::sync::MutexGuard<'_, RunLog> {
    log.lock().unwrap_or_else(|poison| poison.into_inner())
}

/// The machine that a configuration asks for.
fn machine(config: &Config) -> Result<Machine, TrainError> {
    let device = &config.device;
    let options = Options { timeout: Duration::from_secs_f64(device.timeout_seconds), ..Options::default() };
    Ok(match device.kind {
        DeviceKind::Cpu => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            Machine::cpu_with(device.threads.map_or(cores, |n| n as usize), options)?
        }
        DeviceKind::Sim => Machine::sim_with(device.seed, options),
        DeviceKind::Dry => return Err(TrainError::DryHasNoLosses),
    })
}

/// What the run writes while it goes on.
struct RunLog {
    progress: Progress,
    file: MetricsFile,
    metrics: Vec<StepMetrics>,
    tokens_per_step: u64,
    /// Share of the peak that one token per second is.
    mfu_per_rate: f64,
}

impl RunLog {
    fn start(
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
            metrics: Vec::new(),
            tokens_per_step: config.train.global_batch * config.model.seq_len as u64,
            mfu_per_rate: peak.map_or(f64::NAN, |peak| flops_per_token / peak),
        })
    }

    fn step(&mut self, known: Known) -> Result<(), TrainError> {
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
        };
        self.file.write(&metrics)?;
        self.progress.step(&metrics);
        self.metrics.push(metrics);
        Ok(())
    }
}

impl fmt::Display for Trained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.summary)?;
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        write!(f, "memory: {:.1} MiB planned", mib(self.plan.bytes()))?;
        match self.resident_growth {
            Some(bytes) => writeln!(f, ", {:.1} MiB grown", mib(bytes))?,
            None => writeln!(f)?,
        }
        writeln!(f, "metrics: {}\nloss curve: {}", self.metrics_file.display(), self.curve.display())?;
        match &self.sample {
            Some(text) => writeln!(f, "sample:\n{text}"),
            None => Ok(()),
        }
    }
}
