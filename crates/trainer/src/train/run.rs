//! The run: data, plan, machine, ranks, files.

use std::{
    io::Write,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use data::Corpus;
use device::{
    Machine, Options, Tick,
    cuda::{self, CudaOptions, ProductChoices},
};

use super::{
    data_parallel::precision,
    detail::{Detail, planned_detail, traced_detail},
    eval::eval_windows,
    outputs::check_outputs,
    peak::product_peak,
    plan::{RunPlan, batches, plan_run},
    rank_loop::{Shared, run_rank},
    resident::resident_bytes,
    run_log::RunLog,
    stop::StopSource,
    trained::{Placement, RunEnd, Trained},
};
use crate::{Clock, Config, DeviceKind, RunSummary, StreamNames, TrainError, write_loss_curve, write_timeline};

/// Where a run leaves its files if nobody says: `runs/` and the configuration's name.
pub fn default_run_dir(config: &Path) -> PathBuf {
    Path::new("runs").join(config.file_stem().unwrap_or_else(|| "run".as_ref()))
}

/// What a run is given beside its configuration.
pub struct RunOptions {
    /// Folder for metrics, events and the loss curve; made if it does not exist.
    pub dir: PathBuf,
    /// Where progress goes if it is shown as lines.
    pub lines: Box<dyn Write + Send>,
    /// Who may end the run early.
    pub stop: StopSource,
    /// Steps to draw as a timeline, and where to.
    pub timeline: Option<TimelineConfig>,
    /// How much is told.
    pub detail: Detail,
}

impl RunOptions {
    /// Lines to nowhere, no end but the last step, no timeline, nothing in detail.
    pub fn new(dir: impl Into<PathBuf>) -> RunOptions {
        let lines = Box::new(std::io::sink());
        RunOptions { dir: dir.into(), lines, stop: StopSource::Never, timeline: None, detail: Detail::Brief }
    }
}

/// Steps to draw as a timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimelineConfig {
    /// The file.
    pub path: PathBuf,
    /// From 1, both ends included. Around them all ranks wait for each other.
    pub steps: RangeInclusive<u64>,
}

impl TimelineConfig {
    /// Two steps, after a first one that does what is done only once.
    pub const USUAL_STEPS: RangeInclusive<u64> = 2..=3;
}

/// Trains as `config` says. The files of the run are whole however it ends: at its last step, or before because
/// [`RunOptions::stop`] asked for it, which [`Trained::end`] tells.
///
/// # Errors
/// Data or settings that do not fit, before anything is trained; the root cause if a rank fails;
/// [`TrainError::Unwritten`] with what the run leaves, if only its loss curve or timeline could not be written.
pub fn train(config: &Config, options: RunOptions) -> Result<Trained, TrainError> {
    run(config, options).map_err(|error| error.name_limit(config.device.timeout_seconds))
}

fn run(config: &Config, options: RunOptions) -> Result<Trained, TrainError> {
    let corpus = load(config)?;
    // Too little data is told before anything else is made.
    batches(config, &corpus, 0)?;
    let eval = eval_windows(config, &corpus)?;
    let RunOptions { dir, lines, stop, timeline, detail } = options;
    if let Some(TimelineConfig { steps, .. }) = timeline.as_ref().filter(|t| *t.steps.start() > config.train.steps) {
        return Err(TrainError::TimelineBehindEnd { first: *steps.start(), steps: config.train.steps });
    }
    let plan = plan_run(config)?;
    check_outputs(&dir, timeline.as_ref())?;
    // What the measurement of the peak leaves to the allocator is used again below.
    let before = resident_bytes();
    let cards = cards(config)?;
    let parts = cards.len().max(1) as f64;
    let machine = machine(config, &dir, cards)?;
    let peak = product_peak(&machine, 0, precision(config).param)?.map(|peak| peak * parts);
    let chosen = measure_products(config, &machine, &plan)?;
    let mut log = RunLog::start(config, &dir, lines, peak)?;
    log.progress.note(&tell_corpus(&corpus));
    log.progress.note(plan.to_string().trim_end());
    if let Some(chosen) = chosen {
        log.progress.note(&chosen.to_string());
    }
    if detail == Detail::Full {
        log.progress.note(planned_detail(config, &plan)?.trim_end());
    }
    let metrics_file = log.file.path().to_owned();
    let event_file = log.events.as_ref().map(|events| events.path().to_owned());
    let traced = timeline.as_ref().map(|timeline| timeline.steps.clone());
    let shared = Shared {
        config,
        machine: &machine,
        corpus: &corpus,
        plans: plan.plans(),
        eval,
        stop,
        traced,
        log: Mutex::new(log),
    };
    let mut ended = pgroups::local(&machine, config.ranks().world_size(), |rank| run_rank(&rank, &shared))?;
    let log = shared.log.into_inner().unwrap_or_else(|poison| poison.into_inner());
    log.progress.finish();
    let summary = RunSummary::of(&log.metrics).expect("BUG: a run has a step");
    let title = dir.file_name().map_or_else(|| "loss".into(), |name| name.to_string_lossy().into_owned());
    let curve = write_loss_curve(&dir, &title, &log.metrics);
    let steps_by_rank = ended.iter().map(|rank| rank.steps).collect();
    let names = StreamNames::new(ended.iter().map(|rank| rank.streams.clone()));
    let first = ended.first_mut().expect("BUG: a layout has a rank");
    let trace = first.trace.take();
    let detail = trace.as_ref().filter(|_| detail == Detail::Full);
    let detail = detail.map(|trace| traced_detail(trace, &plan, Tick::of(&machine))).transpose()?;
    let timeline = timeline.zip(trace).map(|(timeline, trace)| {
        write_timeline(&timeline.path, &trace, Clock::of(&machine), &names).map(|()| timeline.path)
    });
    // What was computed is not lost with a picture of it.
    let (curve, timeline, unwritten) = match (curve, timeline.transpose()) {
        (Ok(curve), Ok(timeline)) => (Some(curve), timeline, None),
        (Ok(curve), Err(error)) => (Some(curve), None, Some(error)),
        (Err(error), timeline) => (None, timeline.unwrap_or(None), Some(error)),
    };
    let trained = Trained {
        end: first.stopped.map_or(RunEnd::Finished, RunEnd::Stopped),
        steps_by_rank,
        metrics: log.metrics,
        summary,
        placement: Placement::of(config),
        sample: first.sample.take(),
        plan,
        resident_growth: first.resident.zip(before).map(|(now, before)| now.saturating_sub(before)),
        curve,
        metrics_file,
        event_file,
        timeline,
        detail,
    };
    match unwritten {
        None => Ok(trained),
        Some(source) => Err(TrainError::Unwritten { trained: Box::new(trained), source: Box::new(source) }),
    }
}

/// What the run reads.
fn tell_corpus(corpus: &Corpus) -> String {
    let tokens = corpus.tokens();
    match corpus.files().len() {
        0 => format!("{tokens} random tokens"),
        1 => format!("{tokens} tokens from 1 file"),
        files => format!("{tokens} tokens from {files} files"),
    }
}

/// Before ranks have their devices: times are those of a card that does nothing else.
fn measure_products(config: &Config, machine: &Machine, plan: &RunPlan) -> Result<Option<ProductChoices>, TrainError> {
    if !config.device.measure_products {
        return Ok(None);
    }
    let _span = tracing::info_span!("trainer.measure_products").entered();
    Ok(machine.measure_products(&plan.products)?)
}

fn load(config: &Config) -> Result<Corpus, TrainError> {
    let _span = tracing::info_span!("trainer.load_data").entered();
    let (data, model) = (&config.data, &config.model);
    Ok(match data.random_tokens {
        Some(tokens) => Corpus::random(tokens, model.vocab, config.train.seed, data.split.clone())?,
        None => Corpus::load(&data.source())?,
    })
}

/// Folder of kernels that were compiled for a card.
const KERNELS: &str = ".kernels";

/// A card for each rank, as far as the host has them; none where the ranks are not on cards.
fn cards(config: &Config) -> Result<Vec<u32>, TrainError> {
    if config.device.kind != DeviceKind::Cuda {
        return Ok(Vec::new());
    }
    let what = || "the cards of this host cannot be counted".to_owned();
    let have = cuda::count_cards().map_err(|source| device::Error::Cuda { what: what(), source })?;
    Ok((0..have.clamp(1, config.ranks().world_size())).collect())
}

/// The machine that a configuration asks for. A card's compiled kernels, and algorithms that were measured, are kept
/// beside the folders of runs.
fn machine(config: &Config, dir: &Path, cards: Vec<u32>) -> Result<Machine, TrainError> {
    let device = &config.device;
    let options = Options {
        timeout: Duration::try_from_secs_f64(device.timeout_seconds).unwrap_or(Duration::MAX),
        ..Options::default()
    };
    Ok(match device.kind {
        DeviceKind::Cpu => Machine::cpu_with(Placement::of(config).workers, options)?,
        DeviceKind::Sim => Machine::sim_with(device.seed, options),
        DeviceKind::Dry => return Err(TrainError::DryHasNoLosses),
        DeviceKind::Cuda => {
            let kernel_cache = dir.parent().map(|runs| runs.join(KERNELS));
            let deterministic = device.deterministic;
            Machine::cuda_with(CudaOptions { cards, kernel_cache, deterministic, ..CudaOptions::default() }, options)?
        }
    })
}
