//! What can go wrong with schedules.

use std::fmt;

use pgroups::GroupRank;
use thiserror::Error;

use super::{
    index::{ChunkIndex, MicrobatchIndex},
    steps::Step,
    violation::ScheduleViolations,
};

/// Failures of schedules and of what is planned from them.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A stage beyond the last.
    #[error("stage {index} of a pipeline of {size}: stages count from 0 and lie below the pipeline's size")]
    OutsidePipeline {
        /// Stages.
        size: u32,
        /// The stage.
        index: GroupRank,
    },
    /// A setup that breaks rules.
    #[error("the pipeline cannot be scheduled")]
    Setup {
        /// All of them.
        #[from]
        source: ScheduleViolations,
    },
    /// A word that names no scope.
    #[error("graph scope '{text}': one of 'none', 'layer', 'chunk', 'microbatch', 'step'")]
    UnknownScope {
        /// The word.
        text: String,
    },
    /// A step at a moment when it cannot run.
    #[error(
        "step {at}, {step}, comes after {after}: each microbatch of a chunk runs forward, then either backward, or \
         backward-input and later backward-weight, each once"
    )]
    OutOfTurn {
        /// Its place in the schedule.
        at: usize,
        /// The step.
        step: Step,
        /// How far that microbatch of that chunk had come.
        after: WhereStopped,
    },
    /// A schedule that runs some backwards, but not all.
    #[error("{microbatch} of {chunk} ends after {after}: a schedule runs every backward, or none")]
    Unfinished {
        /// The chunk.
        chunk: ChunkIndex,
        /// The microbatch.
        microbatch: MicrobatchIndex,
        /// How far it comes.
        after: WhereStopped,
    },
    /// A schedule that leaves out a number.
    #[error("{microbatch} of {chunk} never runs, but {later} of {later_chunk} does: both count from 0 without gaps")]
    Gap {
        /// The chunk.
        chunk: ChunkIndex,
        /// The microbatch.
        microbatch: MicrobatchIndex,
        /// A chunk that runs.
        later_chunk: ChunkIndex,
        /// A microbatch of it that runs.
        later: MicrobatchIndex,
    },
    /// Numbers of layers for another number of chunks.
    #[error("layers are given for {given} chunks, the schedule has {chunks}: give one list entry a chunk")]
    ChunkCount {
        /// Entries that were given.
        given: usize,
        /// Chunks of the schedule.
        chunks: usize,
    },
    /// Signatures for another number of layers.
    #[error("{chunk} has {layers} layers and {given} signatures: give one a layer")]
    SignatureCount {
        /// The chunk.
        chunk: ChunkIndex,
        /// Layers of the chunk.
        layers: usize,
        /// Signatures that were given.
        given: usize,
    },
}

/// How far a microbatch of a chunk has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WhereStopped {
    /// It has not run.
    Nothing,
    /// Forward is done.
    Forward,
    /// Forward and backward-input are done.
    BackwardInput,
    /// All is done.
    Backward,
}

impl fmt::Display for WhereStopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WhereStopped::Nothing => "nothing",
            WhereStopped::Forward => "its forward",
            WhereStopped::BackwardInput => "its backward-input",
            WhereStopped::Backward => "its backward",
        })
    }
}
