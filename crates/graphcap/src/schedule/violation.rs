//! What can be wrong with a pipeline's setup: each with the values, the rule, and the nearest setting that would do.

use std::{error::Error, fmt};

use thiserror::Error;

use super::scope::GraphScope;

/// One rule that a setup breaks.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ScheduleViolation {
    /// A step without work.
    #[error("microbatches = 0: a step has at least one; nearest: microbatches = 1")]
    NoMicrobatches,
    /// Interleaving what is in one piece.
    #[error("interleaved with {chunks} chunks a stage: interleaving takes at least 2; nearest: 2, or no interleaving")]
    TooFewChunks {
        /// Chunks of each stage.
        chunks: u32,
    },
    /// Interleaving without stages.
    #[error(
        "interleaved with {chunks} chunks and pp = 1: chunks take turns only between stages; \
         nearest: no interleaving, or pp = 2"
    )]
    InterleavedAlone {
        /// Chunks of each stage.
        chunks: u32,
    },
    /// A chunk's turn is over before its last stage has answered.
    #[error("microbatch group of {group} with pp = {pp}: a group is at least as long as the pipeline; nearest: {pp}")]
    GroupBelowStages {
        /// Microbatches in a chunk's turn.
        group: u32,
        /// Stages.
        pp: u32,
    },
    /// A turn longer than the step.
    #[error(
        "microbatch group of {group} with microbatches = {microbatches}: a group lies inside a step; nearest: {}",
        group_above_nearest(*group, *microbatches, *pp)
    )]
    GroupAboveMicrobatches {
        /// Microbatches in a chunk's turn.
        group: u32,
        /// Microbatches of a step.
        microbatches: u32,
        /// Stages.
        pp: u32,
    },
    /// The last turn of a step is too short to fill the pipeline.
    #[error(
        "microbatches = {microbatches} in groups of {group} leave a last group of {rest} with pp = {pp}: \
         the last group is whole, or at least as long as the pipeline; nearest: microbatches = {}",
        last_group_nearest(*microbatches, *rest, *pp)
    )]
    LastGroup {
        /// Microbatches of a step.
        microbatches: u32,
        /// Microbatches in a chunk's turn.
        group: u32,
        /// Microbatches in the last turn.
        rest: u32,
        /// Stages.
        pp: u32,
    },
    /// Forward and backward together in a pipeline of one chunk a stage.
    #[error(
        "expert overlap with pp = {pp} and one chunk a stage: a stage's forward and backward are independent only \
         when interleaved; nearest: 2 chunks a stage, or no expert overlap"
    )]
    OverlapWithoutChunks {
        /// Stages.
        pp: u32,
    },
    /// A graph that holds more than a stage runs in one go.
    #[error(
        "graph scope '{scope}' with pp = {pp}: a stage runs other microbatches between a forward and its backward; \
         nearest: '{}', or pp = 1",
        GraphScope::Chunk
    )]
    ScopeAcrossStages {
        /// What one graph would hold.
        scope: GraphScope,
        /// Stages.
        pp: u32,
    },
    /// A graph that holds one half of what runs together.
    #[error(
        "graph scope '{scope}' with expert overlap: layers of two microbatches take turns; nearest: '{}', \
         or no expert overlap",
        GraphScope::Layer
    )]
    ScopeAcrossOverlap {
        /// What one graph would hold.
        scope: GraphScope,
    },
}

fn group_above_nearest(group: u32, microbatches: u32, pp: u32) -> String {
    if microbatches >= pp {
        format!("a group of {microbatches}, or microbatches = {group}")
    } else {
        // No group is at least `pp` and at most this step.
        format!("microbatches = {}", group.max(pp))
    }
}

fn last_group_nearest(microbatches: u32, rest: u32, pp: u32) -> String {
    // A violation has at least one whole group, so the lower one is never 0.
    let (below, above) = (microbatches - rest, u64::from(microbatches - rest) + u64::from(pp));
    format!("{below} or {above}")
}

/// Every rule that a setup breaks, in the order they were checked; never empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScheduleViolations(Vec<ScheduleViolation>);

impl ScheduleViolations {
    pub(super) fn of(broken: Vec<ScheduleViolation>) -> Result<(), ScheduleViolations> {
        if broken.is_empty() { Ok(()) } else { Err(ScheduleViolations(broken)) }
    }

    /// The violations.
    #[must_use]
    pub fn list(&self) -> &[ScheduleViolation] {
        &self.0
    }
}

impl fmt::Display for ScheduleViolations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, violation) in self.0.iter().enumerate() {
            let gap = if i == 0 { "" } else { "; " };
            write!(f, "{gap}({}) {violation}", i + 1)?;
        }
        Ok(())
    }
}

impl Error for ScheduleViolations {}
