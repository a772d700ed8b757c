//! Where a stage stands in its pipeline.

use pgroups::{Group, GroupRank};

use super::error::ScheduleError;

/// How many stages a pipeline has, and which of them this rank is.
///
/// It comes from the pipeline group that a model was given, never from the world: two models of different depth in
/// one process have two places, two orders of capture and two rules of reuse.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PipelinePlace {
    size: u32,
    index: GroupRank,
}

impl PipelinePlace {
    /// Stage `index` of `size`.
    ///
    /// # Errors
    /// [`ScheduleError::OutsidePipeline`] unless `index < size`.
    pub fn new(size: u32, index: GroupRank) -> Result<PipelinePlace, ScheduleError> {
        if index.0 < size {
            Ok(PipelinePlace { size, index })
        } else {
            Err(ScheduleError::OutsidePipeline { size, index })
        }
    }

    /// This rank's place in a pipeline group.
    #[must_use]
    pub fn of(pipeline: &Group) -> PipelinePlace {
        PipelinePlace { size: pipeline.size(), index: pipeline.place() }
    }

    /// Number of stages.
    #[must_use]
    pub fn size(self) -> u32 {
        self.size
    }

    /// This stage, `0..size`.
    #[must_use]
    pub fn index(self) -> GroupRank {
        self.index
    }

    /// Stages behind this one.
    #[must_use]
    pub fn stages_after(self) -> u32 {
        self.size - self.index.0 - 1
    }
}
