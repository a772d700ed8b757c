//! What a run is to do: read from TOML, derived where it is left open, checked as a whole.
//!
//! A [`Config`] exists only if every rule holds, so what takes one has nothing left to check.

mod batch; // global batch to microbatches
mod choices; // settings that are one of a few names
mod layout; // axes, sizes, order
mod nearest; // what the user may have meant
mod reader; // TOML values to settings
mod rules; // what must hold between settings, and what this version cannot do
mod schedule; // learning rate of a step
mod violation; // what is wrong, in one report

pub use self::{
    batch::{Indivisible, Microbatches},
    choices::{
        Arch, DeviceKind, Dispatch, LossNormalization, Number, ProgressKind, Recompute, ScheduleKind, TokenizerKind,
    },
    layout::LayoutConfig,
    schedule::Schedule,
    violation::{NoEffect, NotYet, Range, Report, Rule, Setting, SettingValue, Violation},
};
use crate::error::TrainError;
pub use device::GraphOrder;
pub use graphcap::{GateMode, GraphScope};
use reader::Reader;
use serde::{Serialize, Serializer};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// A checked configuration. Every size is set: what the file leaves open is derived.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The model.
    pub model: ModelConfig,
    /// Ranks over axes.
    pub layout: LayoutConfig,
    /// Length and batch.
    pub train: TrainConfig,
    /// AdamW.
    pub optimizer: OptimizerConfig,
    /// Gradient buckets.
    pub ddp: DdpConfig,
    /// Sharded weights.
    pub gtp: GtpConfig,
    /// Captured graphs.
    pub graph: GraphConfig,
    /// How numbers are stored.
    pub precision: PrecisionConfig,
    /// The text.
    pub data: DataConfig,
    /// What carries out the operations.
    pub device: DeviceConfig,
    /// What is shown.
    pub log: LogConfig,
}

/// `[model]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelConfig {
    /// Which blocks. Default gpt2.
    pub arch: Arch,
    /// Blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Attention heads; divides `dim`, into heads of even width for llama. Default: the count whose heads are nearest to
    /// 64 wide.
    pub heads: usize,
    /// Key-value heads; divides `heads`. Default `heads`.
    pub kv_heads: usize,
    /// Width of the hidden layer. Default `4 * dim` for gpt2, two thirds of it in multiples of 256 for llama.
    pub ffn_dim: usize,
    /// Different tokens. Default: those of the tokenizer.
    pub vocab: usize,
    /// Rows of the tables of tokens: those from `vocab` on are padding. Default `vocab`.
    pub vocab_rows: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Base of the rotary angles: larger for longer sequences; none for gpt2, which learns its positions. Default
    /// [`model::LlamaConfig::ROPE_BASE`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_base: Option<usize>,
    /// Whether the embedding is the output layer, too. Default true for gpt2, false for llama.
    pub tied: bool,
}

/// `[train]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TrainConfig {
    /// Optimizer steps.
    pub steps: u64,
    /// Sequences per step, over all data ranks.
    pub global_batch: u64,
    /// Sequences per data rank and microbatch. Default: the rank's whole share.
    pub micro_batch: u64,
    /// Of initial weights and sample order. Default 0.
    pub seed: u64,
    /// What is computed again in backward. Default none.
    pub recompute: Recompute,
    /// Steps from one evaluation to the next; the last step has one too; 0: never. Default 0.
    pub eval_interval: u64,
    /// Sequences per evaluation, spread over the eval split; 0: all there are. Default 0.
    pub eval_samples: u64,
    /// Steps from one comparison of replicas to the next; 0: never. Default 0.
    pub replica_check_interval: u64,
    /// What a gradient is divided by. Default mean.
    pub loss_normalization: LossNormalization,
}

/// `[optimizer]`
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OptimizerConfig {
    /// Peak learning rate. Default 3e-4.
    pub lr: f64,
    /// What linear, cosine and wsd end with; none for constant. Default `lr / 10`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_lr: Option<f64>,
    /// Steps of warm-up; may exceed the steps of the run. Default 0.
    pub warmup_steps: u64,
    /// How the learning rate goes on after warm-up. Default cosine.
    pub schedule: ScheduleKind,
    /// Steps of wsd's way down; none for the others. Default a fifth of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// Decay of matrices, decoupled from the gradient. Default 0.1.
    pub weight_decay: f64,
    /// Of the mean of gradients. Default 0.9.
    pub beta1: f64,
    /// Of the mean of squared gradients. Default 0.95.
    pub beta2: f64,
    /// Added to the root of the latter. Default 1e-8.
    pub eps: f64,
    /// Largest global gradient norm; 0: no clipping. Default 1.
    pub clip: f64,
    /// Whether every data rank owns a shard of the optimizer state only. Default false.
    pub distributed: bool,
}

/// `[ddp]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DdpConfig {
    /// Elements per bucket. Default: the larger of 40 million and 1 million times dp.
    pub bucket_size: usize,
    /// Whether a bucket is reduced while backward goes on. Default true.
    pub overlap_grad_reduce: bool,
    /// Whether parameters are gathered while forward goes on. Default `optimizer.distributed`.
    pub overlap_param_gather: bool,
    /// When parameters are gathered. Default chain.
    pub dispatch: Dispatch,
}

/// `[gtp]`: nothing without shards of weights (`layout.gtp` above 1).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GtpConfig {
    /// Uses of weights that a weight is gathered ahead. Default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub look_ahead: Option<usize>,
    /// Bytes that may be gathered ahead at a time; none: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub look_ahead_bytes: Option<usize>,
    /// Rows of a weight are padded to a multiple of this times `layout.gtp`; 0: they must divide. Default 16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alignment: Option<usize>,
    /// Whether the shards' gradients travel in pieces that are added up in f32 by their owner. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub f32_reduce: Option<bool>,
}

/// `[graph]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GraphConfig {
    /// How much of a step is captured as one graph. Default none.
    #[serde(serialize_with = "as_text")]
    pub scope: GraphScope,
    /// Where graphs wait for parameters and gradients; none where there are no such graphs. Default in-graph.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "text_if_any")]
    pub gates: Option<GateMode>,
    /// What orders the operations inside a graph; none where there is no graph. Default accesses.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "order_if_any")]
    pub order: Option<GraphOrder>,
}

fn as_text<S: Serializer>(value: &GraphScope, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

fn text_if_any<S: Serializer>(value: &Option<GateMode>, to: S) -> Result<S::Ok, S::Error> {
    value.map(GateMode::name).serialize(to)
}

fn order_if_any<S: Serializer>(value: &Option<GraphOrder>, to: S) -> Result<S::Ok, S::Error> {
    value.map(GraphOrder::name).serialize(to)
}

impl GraphConfig {
    /// What is captured; none: nothing.
    pub fn scope(&self) -> Option<graphcap::Scope> {
        self.scope.captured()
    }

    /// Where graphs wait.
    pub fn gate_mode(&self) -> GateMode {
        self.gates.unwrap_or(GateMode::InGraph)
    }

    /// What orders the operations inside a graph.
    pub fn node_order(&self) -> GraphOrder {
        self.order.unwrap_or(GraphOrder::Accesses)
    }
}

/// `[precision]`; every default is f32.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PrecisionConfig {
    /// Parameters as forward and backward read them, and all activations with them.
    pub param: Number,
    /// Gradients as they are accumulated.
    pub grad: Number,
    /// Gradients as they travel.
    pub reduce: Number,
    /// Parameters as the optimizer updates them.
    pub master: Number,
    /// AdamW's two means.
    pub moments: Number,
}

/// `[data]`
#[derive(Clone, Debug, PartialEq)]
pub struct DataConfig {
    /// Where relative patterns start: the folder of the configuration file.
    pub base: PathBuf,
    /// Files, folders and globs, as written; none with random tokens.
    pub path: Vec<String>,
    /// So many random tokens in place of text, to measure speed and memory. Default: none, text is read.
    pub random_tokens: Option<usize>,
    /// Text to tokens. Default bytes.
    pub tokenizer: TokenizerKind,
    /// Weights of train, eval and test. Default "0.95,0.05".
    pub split: data::Split,
}

/// `[device]`
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceConfig {
    /// What carries out the operations. Default cpu.
    pub kind: DeviceKind,
    /// Worker threads of cpu; none: as many as the machine has cores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// Of the order in which sim carries out operations. Default 0.
    pub seed: u64,
    /// How long a rank waits for the others before it names them. Default 60.
    pub timeout_seconds: f64,
    /// Whether algorithms for products are chosen by their times on cards, which is done once for each shape and kind of
    /// card. Default true.
    pub measure_products: bool,
    /// Whether a card gives the same bits whenever it runs; false: gradients of attention may differ in the last ones, and
    /// are faster. The others always do. Default true.
    pub deterministic: bool,
}

/// `[log]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LogConfig {
    /// Steps from one line to the next; metrics have every step. Default 10.
    pub interval: u64,
    /// How progress is shown. Default auto.
    pub progress: ProgressKind,
    /// Tokens to generate when training has finished; 0: none, at most 100 000. Default 200, without text 0.
    pub sample_tokens: usize,
    /// Whether the run folder gets TensorBoard event files, too. Default true.
    pub tensorboard: bool,
}

impl Config {
    /// Reads a file, puts `overrides` (`section.key=value`) over it, derives what is open and checks the whole.
    ///
    /// # Errors
    /// [`TrainError::ReadConfig`], [`TrainError::ConfigSyntax`]; [`TrainError::Config`] with every violation.
    pub fn load<S: AsRef<str>>(path: &Path, overrides: &[S]) -> Result<Config, TrainError> {
        let unreadable = |source| TrainError::ReadConfig { path: path.to_owned(), source };
        let text = fs::read_to_string(path).map_err(unreadable)?;
        let whole = fs::canonicalize(path).map_err(unreadable)?;
        let base = whole.parent().unwrap_or(Path::new("/"));
        Config::parse(&text, path, base, overrides)
    }

    /// The same from text; `path` is for messages, `base` is where relative data paths start.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse<S: AsRef<str>>(text: &str, path: &Path, base: &Path, overrides: &[S]) -> Result<Config, TrainError> {
        let table = text
            .parse()
            .map_err(|source| TrainError::ConfigSyntax { path: path.to_owned(), source: Box::new(source) })?;
        let mut reader = Reader::new(table);
        for text in overrides {
            reader.set(text.as_ref());
        }
        let given = reader.clone();
        let accepts = |proposal: &Setting| {
            let (_, violations) = read_and_check(given.with(proposal), base, &|_| false);
            !violations.iter().any(|violation| violation.names(&proposal.key))
        };
        let (config, violations) = read_and_check(reader, base, &accepts);
        if violations.is_empty() {
            return Ok(config);
        }
        Err(Report { path: Some(path.to_owned()), violations }.into())
    }

    /// Every setting, derived ones too, as TOML that reads back as this configuration from any folder.
    pub fn to_toml(&self) -> String {
        #[derive(Serialize)]
        struct Written<'a> {
            model: &'a ModelConfig,
            layout: &'a LayoutConfig,
            train: &'a TrainConfig,
            optimizer: &'a OptimizerConfig,
            ddp: &'a DdpConfig,
            gtp: &'a GtpConfig,
            graph: &'a GraphConfig,
            precision: &'a PrecisionConfig,
            data: toml::Table,
            device: &'a DeviceConfig,
            log: &'a LogConfig,
        }
        let mut data = toml::Table::new();
        let whole = |pattern: &String| self.data.base.join(pattern).to_string_lossy().into_owned();
        match self.data.random_tokens {
            Some(tokens) => drop(data.insert("random_tokens".to_owned(), (tokens as i64).into())),
            None => {
                data.insert("path".to_owned(), self.data.path.iter().map(whole).collect::<Vec<_>>().into());
                data.insert("tokenizer".to_owned(), self.data.tokenizer.to_string().into());
            }
        }
        data.insert("split".to_owned(), self.data.split.to_string().into());
        let Config { model, layout, train, optimizer, ddp, gtp, graph, precision, device, log, .. } = self;
        toml::to_string(&Written { model, layout, train, optimizer, ddp, gtp, graph, precision, data, device, log })
            .expect("BUG: settings are plain TOML values")
    }

    /// Microbatches per data rank and step.
    pub fn microbatches(&self) -> u64 {
        self.train.global_batch / (self.train.micro_batch * self.layout.data_ranks())
    }

    /// Which ranks lie where.
    pub fn ranks(&self) -> pgroups::Layout {
        self.layout.plan().expect("BUG: the layout was planned when the configuration was checked")
    }

    /// The learning rate of every step.
    pub fn schedule(&self) -> Schedule {
        let OptimizerConfig { lr, min_lr, warmup_steps, schedule: kind, decay_steps, .. } = self.optimizer;
        let (min_lr, decay_steps) = (min_lr.unwrap_or(lr), decay_steps.unwrap_or(0));
        Schedule { kind, lr, min_lr, warmup_steps, decay_steps, steps: self.train.steps }
    }
}

/// Reads everything and checks the whole. Whether a proposal would be taken says `accepts`.
fn read_and_check(mut reader: Reader, base: &Path, accepts: &dyn Fn(&Setting) -> bool) -> (Config, Vec<Violation>) {
    let config = rules::read(&mut reader, base);
    let between = rules::between_settings(&config, &reader);
    reader.check(between);
    reader.check(rules::not_yet(&config));
    (config, reader.finish(accepts))
}

impl DataConfig {
    /// The text as the data crate reads it.
    pub fn source(&self) -> data::Source<'_> {
        let TokenizerKind::Bytes = self.tokenizer;
        data::Source {
            base: &self.base,
            patterns: &self.path,
            tokenizer: data::Tokenizer::Bytes,
            split: self.split.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
