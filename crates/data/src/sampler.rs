//! Which samples make a global batch, and which of them a data rank gets.

use crate::{
    error::DataError,
    order::{SampleId, SampleOrder},
};

/// Place among the ranks that read distinct data, `0..data_ranks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DataRank(pub u32);

/// Number of ranks that read distinct data: dp times the weight-shard peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DataRanks(pub u32);

/// What decides which samples come when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplerConfig {
    /// Samples of the part.
    pub samples: u64,
    /// Sequences per step, over all data ranks.
    pub global_batch: u64,
    /// Of the order.
    pub seed: u64,
    /// Position to start at: 0, or [`Sampler::consumed`] of the run that is resumed.
    pub consumed: u64,
}

/// Deals out global batches, endlessly.
///
/// An epoch's last samples that fill no global batch are dropped, before anything is dealt to ranks: every rank gets
/// the same number of sequences, and which ones are dropped does not depend on the number of ranks. Dropped samples
/// count as consumed, so the consumed count is a position in the order, also for a run that goes on with another
/// global batch.
#[derive(Clone, Debug)]
pub struct Sampler {
    order: SampleOrder,
    global_batch: u64,
    consumed: u64,
}

impl Sampler {
    /// A sampler at `config.consumed`.
    ///
    /// # Errors
    /// [`DataError::NoBatch`]; [`DataError::BatchAboveSamples`] if an epoch has no whole batch (there would be no next
    /// one, ever).
    pub fn new(config: SamplerConfig) -> Result<Sampler, DataError> {
        let SamplerConfig { samples, global_batch, seed, consumed } = config;
        if global_batch == 0 {
            return Err(DataError::NoBatch);
        }
        if samples < global_batch {
            return Err(DataError::BatchAboveSamples { samples, global_batch });
        }
        Ok(Sampler { order: SampleOrder::new(samples, seed), global_batch, consumed })
    }

    /// Position in the order: samples dealt out or dropped so far.
    pub fn consumed(&self) -> u64 {
        self.consumed
    }

    /// The next global batch, over all data ranks.
    pub fn next_batch(&mut self) -> GlobalBatch {
        let samples = self.order.samples();
        let used = self.consumed % samples;
        if samples - used < self.global_batch {
            self.consumed += samples - used;
        }
        let first = self.consumed;
        self.consumed += self.global_batch;
        GlobalBatch {
            first,
            epoch: self.order.epoch(first),
            ids: (first..self.consumed).map(|position| self.order.at(position)).collect(),
        }
    }
}

/// The samples of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GlobalBatch {
    first: u64,
    epoch: u64,
    ids: Vec<SampleId>,
}

impl GlobalBatch {
    /// Position of the first sample in the order.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Epoch of all its samples, from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The samples of all data ranks, rank 0's first.
    pub fn ids(&self) -> &[SampleId] {
        &self.ids
    }

    /// The samples of one data rank, as many as of any other.
    ///
    /// # Errors
    /// [`DataError::NoSuchRank`]; [`DataError::Uneven`] if the batch is no multiple of the ranks.
    pub fn share(&self, rank: DataRank, ranks: DataRanks) -> Result<&[SampleId], DataError> {
        let (rank, ranks) = (u64::from(rank.0), u64::from(ranks.0));
        if rank >= ranks {
            return Err(DataError::NoSuchRank { rank, ranks });
        }
        let global_batch = self.ids.len() as u64;
        if !global_batch.is_multiple_of(ranks) {
            return Err(DataError::Uneven { global_batch, micro_batch: 1, ranks, multiple: ranks });
        }
        let share = self.ids.len() / ranks as usize;
        Ok(&self.ids[rank as usize * share..][..share])
    }
}
