//! Why a command of the trainer ends without its result.

use crate::config::Report;
use std::{io, path::PathBuf};

/// Why a command of the trainer ends without its result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// The configuration file cannot be read.
    #[error("cannot read configuration '{path}'")]
    ReadConfig {
        /// The file.
        path: PathBuf,
        /// What the operating system says.
        #[source]
        source: io::Error,
    },
    /// The configuration is no TOML.
    #[error("configuration '{path}' is not valid TOML; text values need quotes, as in arch = \"gpt2\"")]
    ConfigSyntax {
        /// The file.
        path: PathBuf,
        /// What the parser says, with the line.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// Settings that cannot be used: all of them.
    #[error(transparent)]
    Config(#[from] Report),
    /// The text cannot be read, cut or dealt out.
    #[error(transparent)]
    Data(#[from] data::DataError),
    /// Sharded weights.
    #[error(transparent)]
    Gtp(#[from] gtp::GtpError),
    /// A layout that breaks rules.
    #[error(transparent)]
    Plan(#[from] pgroups::PlanError),
    /// A global batch that cannot be divided.
    #[error(
        "a global batch of {global_batch} sequences is no multiple of micro_batch * data ranks = {micro_batch} * \
         {data_ranks}; nearest: {}",
        nearest.iter().map(u64::to_string).collect::<Vec<_>>().join(" or ")
    )]
    Microbatches {
        /// Sequences per step.
        global_batch: u64,
        /// Sequences per rank and microbatch.
        micro_batch: u64,
        /// Ranks that read distinct data.
        data_ranks: u64,
        /// Global batches that can be divided.
        nearest: Vec<u64>,
    },
    /// A file of the run folder cannot be written.
    #[error("cannot write '{path}'")]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system says.
        #[source]
        source: io::Error,
    },
    /// Two runs in one folder at once.
    #[error("'{path}' is being written by another run: give each run a folder of its own with --run-dir")]
    FolderInUse {
        /// The file that both would write.
        path: PathBuf,
    },
    /// A result cannot be printed.
    #[error("cannot print the result")]
    Print {
        /// What the operating system says.
        #[source]
        source: io::Error,
    },
    /// The loss is not a number any more.
    #[error(
        "step {step}: the loss is {loss} and the gradient norm {grad_norm}; training cannot go on. A lower \
         optimizer.lr or a longer optimizer.warmup_steps may help"
    )]
    Diverged {
        /// The step, from 1.
        step: u64,
        /// Its loss.
        loss: f32,
        /// Its gradient norm.
        grad_norm: f32,
    },
    /// A launcher started several processes.
    #[error(
        "WORLD_SIZE is {world_size}: this build has only the local transport, whose ranks are threads of one \
         process; start one process and set layout.dp"
    )]
    SeveralProcesses {
        /// Processes, as the launcher says.
        world_size: u32,
    },
    /// A run was asked for on the driver that has no values.
    #[error("device.kind = \"dry\" has no values to train with; `trainer plan` shows what it finds")]
    DryHasNoLosses,
    /// A timeline of steps that the run does not have.
    #[error(
        "the timeline begins with step {first}, but the run ends with step {steps}: give --timeline-steps below it"
    )]
    TimelineBehindEnd {
        /// First step to draw.
        first: u64,
        /// Steps of the run.
        steps: u64,
    },
    /// The process cannot listen for signals.
    #[error("cannot listen for Ctrl-C and SIGTERM")]
    Signals {
        /// What the operating system says.
        #[source]
        source: io::Error,
    },
    /// A device refused or failed.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// A group, or a rank of the run, failed.
    #[error(transparent)]
    Group(#[from] pgroups::PgError),
    /// The optimizer or the reduction refused or failed.
    #[error(transparent)]
    Ddp(#[from] ddp::DdpError),
    /// A wait that was to be taken away does not occur.
    #[error("no wait is named '{wait}' in these steps; there are: {}", waits.join(", "))]
    NothingDropped {
        /// The name.
        wait: String,
        /// Names that occur.
        waits: Vec<String>,
    },
    /// From the crate below.
    #[error(transparent)]
    Graph(#[from] graphcap::GraphError),
    /// The model refused or failed.
    #[error(transparent)]
    Model(#[from] model::ModelError),
    /// Sizes that no model has.
    #[error(transparent)]
    ModelSizes(#[from] model::ConfigViolations),
    /// Metrics cannot be read back.
    #[error("cannot read metrics '{path}'")]
    ReadMetrics {
        /// The file.
        path: PathBuf,
        /// What the operating system says.
        #[source]
        source: io::Error,
    },
    /// A line of metrics that is none.
    #[error("line {line} of '{path}' is no metrics object; a run that was killed may have left its last line cut")]
    MetricsLine {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What the parser says.
        #[source]
        source: serde_json::Error,
    },
}
