//! The runners of one part of a model.

use std::collections::BTreeMap;

use pgroups::Group;

use super::call::{CacheKey, GradMode, RunnerIndex};
use crate::schedule::{MicrobatchIndex, PipelinePlace};

/// Whether microbatches share runners.
///
/// Source: Megatron-LM, `transformer/cuda_graphs.py`, `CudaGraphManager`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// The next microbatch takes a runner that the last one has left: the pipeline has one stage.
    AcrossMicrobatches,
    /// Every microbatch has its own, in strict turn: the pipeline has this many stages.
    PerMicrobatch {
        /// Pipeline stages.
        stages: u32,
    },
}

impl Sharing {
    /// What a pipeline of this size allows.
    #[must_use]
    pub fn at(place: PipelinePlace) -> Sharing {
        match place.size() {
            1 => Sharing::AcrossMicrobatches,
            stages => Sharing::PerMicrobatch { stages },
        }
    }

    /// What the pipeline group that a model was given allows.
    #[must_use]
    pub fn of(pipeline: &Group) -> Sharing {
        Sharing::at(PipelinePlace::of(pipeline))
    }
}

/// The runners of one part, by how they are found.
#[derive(Default, Debug)]
pub(super) struct Pool {
    /// In the order of making; shared.
    pub(super) shared: Vec<RunnerIndex>,
    /// By the name of their calls; shared.
    pub(super) keyed: BTreeMap<CacheKey, RunnerIndex>,
    /// One a microbatch, of calls without and with gradients.
    rings: [Ring; 2],
}

/// Runners in the order in which their microbatches have their turn.
#[derive(Default, Debug)]
pub(super) struct Ring {
    pub(super) runners: Vec<(MicrobatchIndex, RunnerIndex)>,
    /// Calls of this pass, less whole rounds once the number of runners is known.
    pub(super) turn: usize,
}

impl Pool {
    pub(super) fn ring(&mut self, grad: GradMode) -> &mut Ring {
        match grad {
            GradMode::Off => &mut self.rings[0],
            GradMode::On => &mut self.rings[1],
        }
    }
}

impl Ring {
    /// Begins again, and says how many turns of an unfinished round were taken.
    pub(super) fn end_pass(&mut self) -> Option<usize> {
        let done = std::mem::take(&mut self.turn);
        (done != 0 && done != self.runners.len()).then_some(done)
    }
}
