//! A schedule by layer.

use super::{
    error::ScheduleError,
    index::{ChunkIndex, LayerIndex, MicrobatchIndex},
    order::{CaptureOrder, OrderId},
    steps::{Direction, Schedule, Step},
};

/// Whether a backward and the forward behind it run one after the other or together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pairing {
    /// One after the other.
    Apart,
    /// Together: a layer of the forward, a layer of the backward, in turn, until both are done. Expert overlap.
    Together,
}

/// Whether a backward in one piece is captured in one piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WeightGrads {
    /// It is.
    Joined,
    /// Each layer's input gradients, then its weight gradients, are two graphs.
    Split,
}

/// One pass of one microbatch over one layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LayerStep {
    /// The chunk.
    pub chunk: ChunkIndex,
    /// The layer, counted inside the chunk.
    pub layer: LayerIndex,
    /// The microbatch.
    pub microbatch: MicrobatchIndex,
    /// Which pass.
    pub direction: Direction,
}

impl LayerStep {
    /// The layer whose sample inputs the step brings: a forward's own. A backward reads those of its forward.
    #[must_use]
    pub fn sample_inputs(&self) -> Option<(ChunkIndex, LayerIndex)> {
        (self.direction == Direction::Forward).then_some((self.chunk, self.layer))
    }
}

/// A schedule's steps by layer: forwards from the first layer of a chunk to its last, backwards from last to first.
///
/// Layers of all chunks count through: whoever captures by layer has as many units as there are layers, each run by
/// every microbatch of its chunk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerOrder {
    steps: Vec<LayerStep>,
    /// By chunk.
    layers: Vec<u32>,
    /// By chunk: layers of the chunks before it.
    first_unit: Vec<usize>,
    /// By chunk.
    microbatches: Vec<u32>,
}

impl LayerOrder {
    /// `layers` is the number of captured layers of each chunk; none is allowed.
    ///
    /// # Errors
    /// [`ScheduleError::ChunkCount`] unless there is one number a chunk.
    ///
    /// Source: Megatron-LM, `transformer/cuda_graphs.py`, `get_overlap_moe_expert_parallel_comm_order`.
    pub fn new(
        schedule: &Schedule,
        layers: &[u32],
        pairing: Pairing,
        weight_grads: WeightGrads,
    ) -> Result<LayerOrder, ScheduleError> {
        if layers.len() != schedule.chunks() {
            return Err(ScheduleError::ChunkCount { given: layers.len(), chunks: schedule.chunks() });
        }
        let over = |step: &Step| layer_passes(step, layers[step.chunk.index()], weight_grads);
        let mut steps = Vec::new();
        let mut rest = schedule.steps();
        while let Some((step, behind)) = rest.split_first() {
            rest = behind;
            match behind.first() {
                Some(forward) if pairing == Pairing::Together && run_together(step, forward) => {
                    rest = &behind[1..];
                    alternate(&mut steps, over(forward), over(step));
                }
                _ => steps.extend(over(step).into_iter().flatten()),
            }
        }
        let first_unit = first_units(layers);
        Ok(LayerOrder { steps, layers: layers.to_vec(), first_unit, microbatches: schedule.microbatches().to_vec() })
    }

    /// In the order they run.
    #[must_use]
    pub fn steps(&self) -> &[LayerStep] {
        &self.steps
    }

    /// Captured layers by chunk.
    #[must_use]
    pub fn layers(&self) -> &[u32] {
        &self.layers
    }

    /// Microbatches by chunk.
    #[must_use]
    pub fn microbatches(&self) -> &[u32] {
        &self.microbatches
    }

    /// Captured layers of all chunks.
    #[must_use]
    pub fn units(&self) -> usize {
        self.layers.iter().map(|&layers| layers as usize).sum()
    }

    /// The order of capture by layer, layers of all chunks counted through.
    #[must_use]
    pub fn order(&self) -> CaptureOrder {
        let number = |step: &LayerStep| self.first_unit[step.chunk.index()] + step.layer.index() + 1;
        CaptureOrder::new(self.steps.iter().map(|step| OrderId::new(number(step), step.direction)).collect())
    }
}

fn run_together(first: &Step, behind: &Step) -> bool {
    let brings_gradients = matches!(first.direction, Direction::Backward | Direction::BackwardInput);
    brings_gradients && behind.direction == Direction::Forward
}

/// The passes of a step over each of its layers, in the order of the layers' turns.
fn layer_passes(step: &Step, layers: u32, weight_grads: WeightGrads) -> Vec<Vec<LayerStep>> {
    let &Step { chunk, microbatch, direction } = step;
    let passes: &[Direction] = match (direction, weight_grads) {
        (Direction::Backward, WeightGrads::Split) => &[Direction::BackwardInput, Direction::BackwardWeight],
        _ => &[direction],
    };
    let turn = |layer: u32| {
        let pass = |&direction| LayerStep { chunk, layer: LayerIndex(layer), microbatch, direction };
        passes.iter().map(pass).collect()
    };
    match direction {
        Direction::Forward => (0..layers).map(turn).collect(),
        _ => (0..layers).rev().map(turn).collect(),
    }
}

/// A turn of the one, a turn of the other; what is left of the longer one at the end.
fn alternate(into: &mut Vec<LayerStep>, forward: Vec<Vec<LayerStep>>, backward: Vec<Vec<LayerStep>>) {
    let (mut forward, mut backward) = (forward.into_iter(), backward.into_iter());
    loop {
        let turns = (forward.next(), backward.next());
        if turns == (None, None) {
            return;
        }
        into.extend(turns.0.into_iter().chain(turns.1).flatten());
    }
}

fn first_units(layers: &[u32]) -> Vec<usize> {
    let next = |before: &mut usize, &layers: &u32| {
        let first = *before;
        *before += layers as usize;
        Some(first)
    };
    layers.iter().scan(0, next).collect()
}
