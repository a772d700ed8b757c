//! What a pipeline was asked for, and the rules it has to keep.

use super::{
    place::PipelinePlace,
    violation::{ScheduleViolation, ScheduleViolations},
};

/// One stage's part of a pipeline.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PipelineSetup {
    /// Where the stage stands.
    pub place: PipelinePlace,
    /// Microbatches of a step.
    pub microbatches: u32,
    /// Chunks of the stage.
    pub interleaving: Interleaving,
    /// Whether backward follows.
    pub pass: PassKind,
    /// Whether expert communication of one microbatch runs beside another's compute.
    pub overlap: ExpertOverlap,
}

/// How many chunks a stage has, and how it goes from one to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interleaving {
    /// One chunk: one forward, one backward in turn.
    Off,
    /// Several chunks.
    Chunks {
        /// Chunks of each stage, at least 2.
        chunks: u32,
        /// Microbatches that one chunk runs before the next chunk has its turn; none: as many as there are stages.
        group: Option<u32>,
    },
}

/// Whether a pass has a backward.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PassKind {
    /// Forward and backward.
    Training,
    /// Forward: evaluation, generation.
    ForwardOnly,
}

/// Whether a forward and a backward of different microbatches run together, layer by layer, so that the one's expert
/// communication hides behind the other's compute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExpertOverlap {
    /// One after the other.
    Off,
    /// Together. Costs one more microbatch of warm-up in an interleaved pipeline.
    On,
}

impl PipelineSetup {
    /// Chunks of the stage.
    #[must_use]
    pub fn chunks(&self) -> u32 {
        match self.interleaving {
            Interleaving::Off => 1,
            Interleaving::Chunks { chunks, .. } => chunks,
        }
    }

    /// Microbatches that one chunk runs before the next has its turn.
    #[must_use]
    pub fn group_size(&self) -> u32 {
        match self.interleaving {
            Interleaving::Chunks { group: Some(group), .. } => group,
            Interleaving::Chunks { group: None, .. } | Interleaving::Off => self.place.size(),
        }
    }

    /// Every rule that the setup breaks.
    ///
    /// # Errors
    /// All of them, each with the nearest setting that would do.
    pub fn check(&self) -> Result<(), ScheduleViolations> {
        ScheduleViolations::of(self.violations())
    }

    pub(super) fn violations(&self) -> Vec<ScheduleViolation> {
        let (pp, microbatches) = (self.place.size(), self.microbatches);
        let mut broken = Vec::new();
        if microbatches == 0 {
            broken.push(ScheduleViolation::NoMicrobatches);
        }
        match self.interleaving {
            Interleaving::Off => {
                if self.overlap == ExpertOverlap::On && pp > 1 {
                    broken.push(ScheduleViolation::OverlapWithoutChunks { pp });
                }
            }
            Interleaving::Chunks { chunks, .. } => {
                if chunks < 2 {
                    broken.push(ScheduleViolation::TooFewChunks { chunks });
                }
                if pp == 1 {
                    broken.push(ScheduleViolation::InterleavedAlone { chunks });
                } else if microbatches > 0 {
                    broken.extend(self.broken_group_rule());
                }
            }
        }
        broken
    }

    /// A group fills the pipeline, so that a chunk's last stage has answered before the chunk's next turn.
    fn broken_group_rule(&self) -> Option<ScheduleViolation> {
        let (pp, microbatches, group) = (self.place.size(), self.microbatches, self.group_size());
        if group < pp {
            return Some(ScheduleViolation::GroupBelowStages { group, pp });
        }
        if group > microbatches {
            return Some(ScheduleViolation::GroupAboveMicrobatches { group, microbatches, pp });
        }
        let rest = microbatches % group;
        (0 < rest && rest < pp).then_some(ScheduleViolation::LastGroup { microbatches, group, rest, pp })
    }
}
