//! What a stage runs in which order.

use std::{collections::BTreeMap, fmt};

use super::{
    error::{ScheduleError, WhereStopped},
    index::{ChunkIndex, MicrobatchIndex},
    order::{CaptureOrder, OrderId},
};

/// One pass of one microbatch over one chunk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Step {
    /// The chunk.
    pub chunk: ChunkIndex,
    /// The microbatch.
    pub microbatch: MicrobatchIndex,
    /// Which pass.
    pub direction: Direction,
}

/// Which pass over a chunk or a layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// Forward.
    Forward,
    /// The whole backward.
    Backward,
    /// The part of backward that other stages wait for: gradients of inputs (dgrad).
    BackwardInput,
    /// The part that only the optimizer waits for: gradients of weights (wgrad). It still reads the inputs.
    BackwardWeight,
}

impl Direction {
    /// Nothing of the microbatch is left to run there.
    #[must_use]
    pub fn is_last(self) -> bool {
        matches!(self, Direction::Backward | Direction::BackwardWeight)
    }
}

/// The steps of one stage in the order they run. Every microbatch of every chunk runs forward, then, unless the whole
/// schedule is forward-only, backward: in one piece, or inputs first and weights later.
///
/// Plain data: a [`PipelinePlan`](super::PipelinePlan) makes the usual ones, a pipeline of the user's own is as good.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Schedule {
    steps: Vec<Step>,
    /// By chunk.
    microbatches: Vec<u32>,
    backwards: Backwards,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Backwards {
    None,
    All,
}

impl Schedule {
    /// Steps as given.
    ///
    /// # Errors
    /// [`ScheduleError::OutOfTurn`] for a step that is repeated or comes before what it needs,
    /// [`ScheduleError::Unfinished`] if some backwards run and others do not, [`ScheduleError::Gap`] if a chunk or a
    /// microbatch is left out.
    pub fn new(steps: Vec<Step>) -> Result<Schedule, ScheduleError> {
        let mut progress: BTreeMap<(ChunkIndex, MicrobatchIndex), WhereStopped> = BTreeMap::new();
        for (at, &step) in steps.iter().enumerate() {
            let reached = progress.entry((step.chunk, step.microbatch)).or_insert(WhereStopped::Nothing);
            let after = *reached;
            *reached = advance(after, step.direction).ok_or(ScheduleError::OutOfTurn { at, step, after })?;
        }
        let backwards = backwards(&progress)?;
        let microbatches = without_gaps(progress.keys().copied())?;
        Ok(Schedule { steps, microbatches, backwards })
    }

    /// In the order they run.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Number of chunks.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.microbatches.len()
    }

    /// Microbatches by chunk. Plans run as many in every chunk.
    #[must_use]
    pub fn microbatches(&self) -> &[u32] {
        &self.microbatches
    }

    /// Nothing runs backward.
    #[must_use]
    pub fn is_forward_only(&self) -> bool {
        self.backwards == Backwards::None
    }

    /// The order of capture by chunk.
    #[must_use]
    pub fn order(&self) -> CaptureOrder {
        let id = |step: &Step| OrderId::new(step.chunk.index() + 1, step.direction);
        CaptureOrder::new(self.steps.iter().map(id).collect())
    }
}

fn advance(from: WhereStopped, by: Direction) -> Option<WhereStopped> {
    match (from, by) {
        (WhereStopped::Nothing, Direction::Forward) => Some(WhereStopped::Forward),
        (WhereStopped::Forward, Direction::Backward) => Some(WhereStopped::Backward),
        (WhereStopped::Forward, Direction::BackwardInput) => Some(WhereStopped::BackwardInput),
        (WhereStopped::BackwardInput, Direction::BackwardWeight) => Some(WhereStopped::Backward),
        _ => None,
    }
}

fn backwards(progress: &BTreeMap<(ChunkIndex, MicrobatchIndex), WhereStopped>) -> Result<Backwards, ScheduleError> {
    if progress.values().all(|&reached| reached == WhereStopped::Forward) {
        return Ok(Backwards::None);
    }
    match progress.iter().find(|(_, reached)| **reached != WhereStopped::Backward) {
        None => Ok(Backwards::All),
        Some((&(chunk, microbatch), &after)) => Err(ScheduleError::Unfinished { chunk, microbatch, after }),
    }
}

/// Microbatches by chunk, of sorted keys.
fn without_gaps(keys: impl Iterator<Item = (ChunkIndex, MicrobatchIndex)>) -> Result<Vec<u32>, ScheduleError> {
    let mut counts: Vec<u32> = Vec::new();
    for (later_chunk, later) in keys {
        if later_chunk.index() == counts.len() {
            counts.push(0);
        }
        let gap = |chunk: usize, microbatch: u32| ScheduleError::Gap {
            chunk: ChunkIndex(chunk as u32), // at most `later_chunk`, a u32
            microbatch: MicrobatchIndex(microbatch),
            later_chunk,
            later,
        };
        let chunks = counts.len();
        let count = counts.get_mut(later_chunk.index()).ok_or_else(|| gap(chunks, 0))?;
        if later.0 != *count {
            return Err(gap(later_chunk.index(), *count));
        }
        *count += 1;
    }
    Ok(counts)
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Direction::Forward => "forward",
            Direction::Backward => "backward",
            Direction::BackwardInput => "backward-input",
            Direction::BackwardWeight => "backward-weight",
        })
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} on {}", self.direction, self.microbatch, self.chunk)
    }
}
