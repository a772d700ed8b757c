//! Why a command of the trainer ends without its result.

use crate::{config::Report, train::Trained};
use std::{error::Error as StdError, io, path::PathBuf, sync::Arc};

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
    #[error("configuration '{path}' is not valid TOML")]
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
    /// A run has trained to its end, and a picture of it cannot be written.
    #[error("training has ended, and not all of its files could be written")]
    Unwritten {
        /// What it leaves all the same.
        trained: Box<Trained>,
        /// The first file that could not be written.
        #[source]
        source: Box<TrainError>,
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
    /// The environment is not as CUDA must find it.
    #[error("device.kind = \"cuda\" cannot be prepared")]
    Prepare {
        /// What is missing.
        #[source]
        source: device::cuda::CudaError,
    },
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
    /// Nothing moved for as long as the configuration says.
    #[error(
        "nothing completed for device.timeout_seconds = {seconds}: raise it if single operations take as long; if a rank \
         is missing, what follows says where"
    )]
    NothingMoved {
        /// The limit.
        seconds: f64,
        /// Who waited for what, and what is pending.
        #[source]
        source: Box<TrainError>,
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
    /// `verify` was given seeds for a driver that draws no orders.
    #[error("seeds are of orders that sim draws, and dry runs no order: leave out --on dry, or the seeds")]
    SeedsOnDry,
    /// A wait that was to be taken away does not occur.
    #[error("no wait is named '{wait}' in these steps; there are: {}", waits.join(", "))]
    NothingDropped {
        /// The name.
        wait: String,
        /// Names that occur.
        waits: Vec<String>,
    },
    /// A trace file cannot be opened.
    #[error("cannot read trace '{path}'")]
    OpenTrace {
        /// The file.
        path: PathBuf,
        /// What the operating system says.
        #[source]
        source: io::Error,
    },
    /// A file is no trace, or only a part of one.
    #[error("cannot check trace '{path}'")]
    Trace {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: graphcap::verify::TraceError,
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

impl TrainError {
    /// With the name of the setting, if this is about its limit.
    pub(crate) fn name_limit(self, seconds: f64) -> TrainError {
        let first: &(dyn StdError + 'static) = match &self {
            TrainError::Device(error) => error,
            TrainError::Group(error) => error,
            TrainError::Ddp(error) => error,
            TrainError::Graph(error) => error,
            TrainError::Model(error) => error,
            other => other,
        };
        if is_timeout(first) { TrainError::NothingMoved { seconds, source: Box::new(self) } } else { self }
    }
}

/// A wait that was given up is among an error's causes.
fn is_timeout(error: &(dyn StdError + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let error = error.downcast_ref::<Arc<dyn StdError + Send + Sync>>().map_or(error, |shared| &**shared);
        if matches!(error.downcast_ref(), Some(device::Error::Timeout { .. })) {
            return true;
        }
        // A transparent error stands in for the one inside.
        if let Some(TrainError::Device(device::Error::Timeout { .. })) = error.downcast_ref() {
            return true;
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_named_whoever_gives_up_and_nothing_else_is() {
        let (what, after) = ("stream 'main'".to_owned(), std::time::Duration::from_millis(1));
        let over =
            || device::Error::Timeout { rank: 1, what: what.clone(), after, pending: device::Pending::default() };
        let of_rank = |error: TrainError| {
            TrainError::Group(pgroups::PgError::RankFailed { rank: pgroups::GlobalRank(1), source: Arc::new(error) })
        };
        for error in [TrainError::Device(over()), of_rank(TrainError::Device(over()))] {
            let text = error.name_limit(0.25).to_string();
            assert!(text.contains("device.timeout_seconds = 0.25: raise it"), "{text}");
        }
        let other = of_rank(TrainError::DryHasNoLosses).name_limit(0.25);
        assert!(matches!(other, TrainError::Group(_)), "{other}");
    }
}
