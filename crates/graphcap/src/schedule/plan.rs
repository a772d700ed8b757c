//! Counts and order of a pipeline that was asked for: one forward, one backward in turn, interleaved or not.

use super::{
    error::ScheduleError,
    index::{ChunkIndex, MicrobatchIndex},
    setup::{ExpertOverlap, Interleaving, PassKind, PipelineSetup},
    steps::{Direction, Schedule, Step},
};

/// A setup that keeps all rules.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PipelinePlan(PipelineSetup);

/// How a stage's virtual microbatches (microbatches times chunks) are divided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counts {
    /// All of them.
    pub total: u64,
    /// Forwards before the first pair of a forward and a backward.
    pub warm_up: u64,
}

impl Counts {
    /// Pairs of a forward and a backward.
    #[must_use]
    pub fn remaining(self) -> u64 {
        self.total - self.warm_up
    }

    /// Every forward runs before the first backward.
    #[must_use]
    pub fn all_in_warm_up(self) -> bool {
        self.warm_up == self.total
    }
}

impl PipelinePlan {
    /// What a step runs.
    ///
    /// # Errors
    /// [`ScheduleError::Setup`] with every rule that the setup breaks.
    pub fn of_step(setup: PipelineSetup) -> Result<PipelinePlan, ScheduleError> {
        setup.check()?;
        Ok(PipelinePlan(setup))
    }

    /// What of a step is captured: with one stage its first microbatch, which all others replay; otherwise, or when
    /// two microbatches run together, every microbatch.
    ///
    /// # Errors
    /// [`ScheduleError::Setup`] with every rule that the setup breaks.
    pub fn for_capture(setup: PipelineSetup) -> Result<PipelinePlan, ScheduleError> {
        let plan = PipelinePlan::of_step(setup)?;
        let one_serves_all = setup.place.size() == 1 && setup.overlap == ExpertOverlap::Off;
        let microbatches = if one_serves_all { 1 } else { setup.microbatches };
        Ok(PipelinePlan(PipelineSetup { microbatches, ..plan.0 }))
    }

    /// What was asked for; for a capture, with the number of microbatches that are captured.
    #[must_use]
    pub fn setup(&self) -> &PipelineSetup {
        &self.0
    }

    /// How many virtual microbatches warm the pipeline up.
    ///
    /// With `s` stages behind this one, `s` of them; interleaved, `2s` and one group for every chunk but the last, and
    /// one more under expert overlap, so that what runs together is independent. A forward-only pass has nothing else.
    ///
    /// Source: Megatron-LM, `pipeline_parallel/schedules.py`, `get_pp_rank_microbatches`.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts_with(self.0.overlap)
    }

    fn counts_with(&self, overlap: ExpertOverlap) -> Counts {
        let setup = &self.0;
        let total = u64::from(setup.microbatches) * u64::from(setup.chunks());
        let behind = u64::from(setup.place.stages_after());
        let warm_up = match (setup.pass, setup.interleaving) {
            (PassKind::ForwardOnly, _) => total,
            (PassKind::Training, Interleaving::Off) => behind,
            (PassKind::Training, Interleaving::Chunks { chunks, .. }) => {
                let turns = u64::from(chunks - 1) * u64::from(setup.group_size());
                2 * behind + turns + u64::from(overlap == ExpertOverlap::On)
            }
        };
        Counts { total, warm_up: warm_up.min(total) }
    }

    /// Microbatch and chunk of every virtual microbatch, in the order of their forwards: a group of microbatches
    /// through the first chunk, the same through the next, then the next group. Backward runs them in the same order
    /// with the chunks reversed.
    ///
    /// Source: Megatron-LM, `pipeline_parallel/schedules.py`, `get_schedule_table`.
    #[must_use]
    pub fn table(&self) -> Vec<(MicrobatchIndex, ChunkIndex)> {
        let (microbatches, chunks) = (self.0.microbatches, self.0.chunks());
        let group = self.0.group_size() as usize;
        let turn = |first: u32| {
            let end = u64::from(first) + group as u64;
            let end = end.min(u64::from(microbatches)) as u32; // at most `microbatches`, a u32
            (0..chunks).flat_map(move |chunk| (first..end).map(move |mb| (MicrobatchIndex(mb), ChunkIndex(chunk))))
        };
        (0..microbatches).step_by(group).flat_map(turn).collect()
    }

    /// The steps in the order they run: the warm-up's forwards, then a forward and a backward in turn, then the
    /// backwards that are left.
    ///
    /// Under expert overlap the steps are those of a pipeline without it. [`Pairing::Together`](super::Pairing) merges
    /// each backward with the forward behind it, and with that every forward moves ahead of one more backward: this
    /// is the additional microbatch of [`counts`](PipelinePlan::counts).
    #[must_use]
    pub fn schedule(&self) -> Schedule {
        let table = self.table();
        let last = self.0.chunks() - 1;
        let forward = |&(microbatch, chunk): &(MicrobatchIndex, ChunkIndex)| Step {
            chunk,
            microbatch,
            direction: Direction::Forward,
        };
        let backward = |&(microbatch, chunk): &(MicrobatchIndex, ChunkIndex)| Step {
            chunk: ChunkIndex(last - chunk.0),
            microbatch,
            direction: Direction::Backward,
        };
        // The table has `total` entries in memory, so `warm_up` fits.
        let (warm_up, steady) = table.split_at(self.counts_with(ExpertOverlap::Off).warm_up as usize);
        let mut steps: Vec<Step> = warm_up.iter().map(forward).collect();
        if self.0.pass == PassKind::Training {
            steps.extend(steady.iter().zip(&table).flat_map(|(ahead, behind)| [forward(ahead), backward(behind)]));
            steps.extend(table[steady.len()..].iter().map(backward));
        }
        Schedule::new(steps).expect("BUG: a table runs everything once")
    }
}
