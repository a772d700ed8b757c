//! Memory and work of a run, from one step of the very program on the driver that has no memory.

use std::{collections::BTreeMap, fmt, sync::Arc};

use data::{Batches, BatchesConfig, Corpus, DataRank, DataRanks, Part, Tokenizer};
use device::{FramePlan, Machine, MemoryKind, Trace, Work, ops::GemmShape};
use gtp::GtpPlan;
use pgroups::Rank;

use super::{
    data_parallel::ParallelSummary,
    eval::{Evaluator, eval_windows},
    rank::{Plans, RankRun, gpt_plan},
    table_rows::table_rows_hint,
    trace_window::TraceWindow,
};
use crate::{Config, StreamNames, TrainError};

/// What a run will take: bytes per rank by what they are for, and the work of a step.
#[derive(Clone, Debug)]
pub struct RunPlan {
    /// Ranks, all alike.
    pub ranks: u32,
    /// Parameters of the model.
    pub parameters: usize,
    /// Buffers of a training microbatch.
    pub train: Arc<FramePlan>,
    /// Buffers of a pass that predicts the next token.
    pub sample: Arc<FramePlan>,
    /// Buffers of a pass of an evaluation, if there are any.
    pub eval: Option<Arc<FramePlan>>,
    /// When sharded weights are gathered, and where to.
    pub gtp: Arc<GtpPlan>,
    /// Bytes of one rank, the arenas included.
    pub memory: BTreeMap<MemoryKind, usize>,
    /// Buckets and element types.
    pub parallel: ParallelSummary,
    /// What one rank submits in a step.
    pub work: Work,
    /// A setting that would make it faster, and why.
    pub hint: Option<String>,
    /// Products of all ranks and all kinds of pass, each shape once.
    pub products: Vec<GemmShape>,
}

impl RunPlan {
    /// Bytes of one rank.
    pub fn bytes_per_rank(&self) -> usize {
        self.memory.values().sum()
    }

    /// Bytes of all ranks.
    pub fn bytes(&self) -> usize {
        self.bytes_per_rank() * self.ranks as usize
    }

    #[cfg(test)]
    pub(super) fn buckets(&self) -> usize {
        self.parallel.buckets()
    }

    pub(super) fn plans(&self) -> Plans {
        Plans { train: self.train.clone(), sample: self.sample.clone(), eval: self.eval.clone(), gtp: self.gtp.clone() }
    }
}

/// Runs one step on the `dry` driver, on all ranks, and reads the plan off its trace. Needs no data.
///
/// # Errors
/// What the run itself would fail with, but for values.
pub fn plan_run(config: &Config) -> Result<RunPlan, TrainError> {
    Ok(dry_run(config)?.0)
}

/// As [`plan_run`], with the trace of the step and the names of its streams.
///
/// # Errors
/// As [`plan_run`].
pub fn dry_run(config: &Config) -> Result<(RunPlan, Trace, StreamNames), TrainError> {
    let _span = tracing::info_span!("trainer.plan_run").entered();
    let ranks = config.ranks().world_size();
    let machine = Machine::dry();
    let dry = pgroups::local(&machine, ranks, |rank| dry_rank(&rank, &machine, config))?;
    let names = StreamNames::new(dry.iter().map(|DryRank { run, .. }| run.stream.device().stream_names()));
    let DryRank { run, eval, gtp, mut memory, step, rest } = dry.into_iter().next().expect("BUG: a layout has a rank");
    let (step, rest) = step.zip(rest).expect("BUG: the first rank traces");
    let train = Arc::new(run.frame.plan(&step)?);
    let sample = Arc::new(run.sample_frame.plan(&rest)?);
    let eval = eval.map(|eval| Ok::<_, TrainError>(Arc::new(eval.frame.plan(&rest)?))).transpose()?;
    // The dry pass gave every buffer memory of its own. Kinds of pass take turns in one arena.
    let passes = [&train, &sample].into_iter().chain(&eval).map(|plan| plan.bytes()).max().unwrap_or(0);
    memory.insert(MemoryKind::Arena, passes + gtp.bytes());
    let parameters = gpt_plan(config)?.numel();
    let parallel = run.parallel.summary(config);
    let (gtp, work, products) = (Arc::new(gtp), step.work(0), machine.products());
    let hint = table_rows_hint(config);
    let plan = RunPlan { ranks, parameters, train, sample, eval, gtp, memory, parallel, work, hint, products };
    Ok((plan, step, names))
}

/// What a rank of a dry run leaves; traces on the first rank only.
struct DryRank {
    run: RankRun,
    eval: Option<Evaluator>,
    gtp: GtpPlan,
    memory: BTreeMap<MemoryKind, usize>,
    step: Option<Trace>,
    /// An evaluation, if the configuration asks for some, and a token of a sample.
    rest: Option<Trace>,
}

fn dry_rank(rank: &Rank, machine: &Machine, config: &Config) -> Result<DryRank, TrainError> {
    let mut run = RankRun::build(rank, config, None)?;
    let windows = eval_windows(config, &eval_corpus(config, 1)?)?;
    let mut eval = windows.map(|w| Evaluator::open(&run, rank, config, w, None)).transpose()?;
    let window = || TraceWindow::new(machine, rank.global.0 == 0, Some(1..=1));

    let mut of_step = window();
    of_step.begin(&run)?;
    // One microbatch stands for all: a plan has to fit where a batch need not.
    let tokens = vec![0; config.train.micro_batch as usize * config.model.seq_len];
    let part = data::Microbatch { inputs: &tokens, targets: &tokens };
    run.stop.submit(&run.stream, None)?;
    run.step(&vec![part; config.microbatches() as usize], 0.0)?;
    of_step.end(&run)?;

    let mut of_rest = window();
    of_rest.begin(&run)?;
    if let Some(eval) = &mut eval {
        eval.submit(&mut run, |_| Ok(None))?;
    }
    run.parallel.publish(&run.stream)?;
    run.next_logits(&vec![0; config.model.seq_len], 0)?;
    of_rest.end(&run)?;
    let memory = rank.device.memory_by_kind();
    let gtp = run.gtp.plan()?;
    Ok(DryRank { run, eval, gtp, memory, step: of_step.into_trace(), rest: of_rest.into_trace() })
}

/// Text for so many sequences of an evaluation, if there are any; what is in it does not matter to a plan or a trace.
pub(super) fn eval_corpus(config: &Config, samples: usize) -> Result<Corpus, TrainError> {
    let needed = if config.train.eval_interval > 0 { config.model.seq_len * samples + 1 } else { 0 };
    Ok(Corpus::from_text(&"a".repeat(needed), Tokenizer::Bytes, "0,1".parse()?))
}

/// Text for one step and one pass of an evaluation on every rank.
#[cfg(test)]
pub(super) fn any_corpus(config: &Config) -> Result<Corpus, TrainError> {
    let needed = config.model.seq_len * (config.train.global_batch as usize + 1) + 1;
    let split = if config.train.eval_interval > 0 { "1,1" } else { "1,0" };
    Ok(Corpus::from_text(&"a".repeat(2 * needed), Tokenizer::Bytes, split.parse()?))
}

/// The batches of data rank `rank`, from the start.
pub(super) fn batches(config: &Config, corpus: &Corpus, rank: u32) -> Result<Batches, TrainError> {
    let windows = corpus.windows(Part::Train, config.model.seq_len)?;
    Ok(Batches::new(
        windows,
        BatchesConfig {
            global_batch: config.train.global_batch,
            micro_batch: config.train.micro_batch,
            rank: DataRank(rank),
            ranks: DataRanks(config.layout.dp * config.layout.gtp),
            seed: config.train.seed,
            consumed: 0,
        },
    )?)
}

impl fmt::Display for RunPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        let ranks = self.ranks;
        let s = if ranks == 1 { "" } else { "s" };
        writeln!(f, "{} parameters on {ranks} rank{s}, {:.1} MiB each:", self.parameters, mib(self.bytes_per_rank()))?;
        for (kind, bytes) in &self.memory {
            // A small model's parts are less than a hundredth of a MiB.
            let (size, unit) = if *bytes < 1 << 20 { (*bytes as f64 / 1024.0, "KiB") } else { (mib(*bytes), "MiB") };
            writeln!(f, "  {:<10} {size:>10.2} {unit}", format!("{kind:?}").to_lowercase())?;
        }
        writeln!(f, "  {}", self.train)?;
        writeln!(f, "  {}", self.sample)?;
        if let Some(eval) = &self.eval {
            writeln!(f, "  {eval}")?;
        }
        if !self.gtp.weights().is_empty() {
            writeln!(f, "  {}", self.gtp.summary())?;
        }
        writeln!(f, "{}", self.parallel)?;
        let Work { operations, flops, .. } = self.work;
        writeln!(f, "a step of one rank: {operations} operations, {:.3} GFLOP", flops as f64 / 1e9)?;
        self.hint.as_ref().map_or(Ok(()), |hint| writeln!(f, "hint: {hint}"))
    }
}
