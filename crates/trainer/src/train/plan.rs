//! Memory and work of a run, from one step of the very program on the driver that has no memory.

use std::{collections::BTreeMap, fmt, sync::Arc};

use data::{Batches, BatchesConfig, Corpus, DataRank, DataRanks, Part, Tokenizer};
use device::{FramePlan, Machine, MemoryKind, Trace, Work};

use super::{
    eval::{Evaluator, eval_windows},
    rank::{Plans, RankRun, gpt_plan},
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
    /// Bytes of one rank, the arenas included.
    pub memory: BTreeMap<MemoryKind, usize>,
    /// What one rank submits in a step, once to predict a token, and in a pass of an evaluation.
    pub work: Work,
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

    pub(super) fn plans(&self) -> Plans {
        Plans { train: self.train.clone(), sample: self.sample.clone(), eval: self.eval.clone() }
    }
}

/// Runs one step on the `dry` driver, on all ranks, and reads the plan off its trace. Needs no data.
///
/// # Errors
/// What the run itself would fail with, but for values.
pub fn plan_run(config: &Config) -> Result<RunPlan, TrainError> {
    Ok(dry_run(config)?.0)
}

/// As [`plan_run`], with the trace that the plan was read off and the names of its streams.
///
/// # Errors
/// As [`plan_run`].
pub fn dry_run(config: &Config) -> Result<(RunPlan, Trace, StreamNames), TrainError> {
    let _span = tracing::info_span!("trainer.plan_run").entered();
    let ranks = config.ranks().world_size();
    let machine = Machine::dry();
    let corpus = any_corpus(config)?;
    machine.trace_start();
    let dry = pgroups::local(&machine, ranks, |rank| -> Result<_, TrainError> {
        let mut run = RankRun::build(&rank, config, None)?;
        let batch = batches(config, &corpus, rank.global.0)?.next_batch()?;
        run.stop.submit(&run.stream, None)?;
        run.step(&batch.microbatches().collect::<Vec<_>>(), 0.0)?;
        let windows = eval_windows(config, &corpus)?;
        let mut eval = windows.map(|w| Evaluator::open(&run, &rank, config, w, None)).transpose()?;
        if let Some(eval) = &mut eval {
            eval.submit(&run)?;
        }
        run.next_logits(&vec![0; config.model.seq_len], 0)?;
        rank.device.synchronize()?;
        Ok((run, eval, rank.device.memory_by_kind()))
    })?;
    let trace = machine.trace_stop();
    let names = StreamNames::new(dry.iter().map(|(run, ..)| vec![(run.stream.index(), run.stream.name().to_owned())]));
    let (run, eval, mut memory) = dry.into_iter().next().expect("BUG: a layout has a rank");
    let train = Arc::new(run.frame.plan(&trace)?);
    let sample = Arc::new(run.sample_frame.plan(&trace)?);
    let eval = eval.map(|eval| Ok::<_, TrainError>(Arc::new(eval.frame.plan(&trace)?))).transpose()?;
    // The dry pass gave every buffer memory of its own.
    let arenas = train.bytes() + sample.bytes() + eval.as_ref().map_or(0, |eval| eval.bytes());
    memory.insert(MemoryKind::Arena, arenas);
    let parameters = gpt_plan(config)?.numel();
    Ok((RunPlan { ranks, parameters, train, sample, eval, memory, work: trace.work(0) }, trace, names))
}

/// Text for one step and one pass of an evaluation on every rank; what is in it does not matter to a plan.
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
            ranks: DataRanks(config.layout.dp),
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
            writeln!(f, "  {:<10} {:>10.2} MiB", format!("{kind:?}").to_lowercase(), mib(*bytes))?;
        }
        writeln!(f, "  {}", self.train)?;
        writeln!(f, "  {}", self.sample)?;
        if let Some(eval) = &self.eval {
            writeln!(f, "  {eval}")?;
        }
        let Work { operations, flops, .. } = self.work;
        writeln!(f, "a step of one rank: {operations} operations, {:.3} GFLOP", flops as f64 / 1e9)
    }
}
