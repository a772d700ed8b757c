//! The tensors of a rank's share.

use crate::{
    corpus::Windows,
    error::DataError,
    sampler::{DataRank, DataRanks, Sampler, SamplerConfig},
};

/// How samples are dealt out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchesConfig {
    /// Sequences per step, over all data ranks.
    pub global_batch: u64,
    /// Sequences per data rank and microbatch.
    pub micro_batch: u64,
    /// Whose share.
    pub rank: DataRank,
    /// Over how many.
    pub ranks: DataRanks,
    /// Of the order.
    pub seed: u64,
    /// Position to start at: 0, or [`Batches::consumed`] of the run that is resumed.
    pub consumed: u64,
}

/// One data rank's batches, endlessly.
#[derive(Clone, Debug)]
pub struct Batches {
    windows: Windows,
    sampler: Sampler,
    config: BatchesConfig,
}

impl Batches {
    /// Batches of `windows` from position `config.consumed` on.
    ///
    /// # Errors
    /// [`DataError::NoBatch`], [`DataError::NoSuchRank`]; [`DataError::Uneven`] if the global batch is not a multiple
    /// of `micro_batch * ranks`; [`DataError::TooFewSamples`] if the windows do not fill one global batch.
    pub fn new(windows: Windows, config: BatchesConfig) -> Result<Batches, DataError> {
        let BatchesConfig { global_batch, micro_batch, rank, ranks, seed, consumed } = config;
        if global_batch == 0 || micro_batch == 0 {
            return Err(DataError::NoBatch);
        }
        if rank.0 >= ranks.0 {
            return Err(DataError::NoSuchRank { rank: rank.0.into(), ranks: ranks.0.into() });
        }
        let multiple = micro_batch.saturating_mul(ranks.0.into());
        if !global_batch.is_multiple_of(multiple) {
            return Err(DataError::Uneven { global_batch, micro_batch, ranks: ranks.0.into(), multiple });
        }
        windows.must_fill(global_batch)?;
        let sampler = Sampler::new(SamplerConfig { samples: windows.samples(), global_batch, seed, consumed })?;
        Ok(Batches { windows, sampler, config })
    }

    /// Position in the order, the same on every data rank.
    pub fn consumed(&self) -> u64 {
        self.sampler.consumed()
    }

    /// Microbatches per step: `global_batch / (micro_batch * ranks)`.
    pub fn microbatches(&self) -> usize {
        let BatchesConfig { global_batch, micro_batch, ranks, .. } = self.config;
        (global_batch / (micro_batch * u64::from(ranks.0))) as usize
    }

    /// This rank's share of the next global batch.
    ///
    /// # Errors
    /// None in practice: what could go wrong was refused by [`Batches::new`].
    pub fn next_batch(&mut self) -> Result<Batch, DataError> {
        let global = self.sampler.next_batch();
        let ids = global.share(self.config.rank, self.config.ranks)?;
        let seq_len = self.windows.seq_len();
        let mut inputs = Vec::with_capacity(ids.len() * seq_len);
        let mut targets = Vec::with_capacity(ids.len() * seq_len);
        for &id in ids {
            inputs.extend(self.windows.window(id)?.take(seq_len));
            targets.extend(self.windows.window(id)?.skip(1));
        }
        let micro_numel = self.config.micro_batch as usize * seq_len;
        Ok(Batch { inputs, targets, micro_numel, epoch: global.epoch() })
    }
}

/// One data rank's sequences of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    inputs: Vec<i32>,
    targets: Vec<i32>,
    micro_numel: usize,
    epoch: u64,
}

/// The sequences of one microbatch, `[micro_batch, seq_len]` each, one sequence after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Microbatch<'a> {
    /// Token ids that the model reads.
    pub inputs: &'a [i32],
    /// Token ids that it is to predict: at each place, the token that follows the input there.
    pub targets: &'a [i32],
}

impl Batch {
    /// The microbatches, in the order in which they are to be run.
    pub fn microbatches(&self) -> impl ExactSizeIterator<Item = Microbatch<'_>> {
        let inputs = self.inputs.chunks_exact(self.micro_numel);
        inputs.zip(self.targets.chunks_exact(self.micro_numel)).map(|(inputs, targets)| Microbatch { inputs, targets })
    }

    /// Epoch of all its samples, from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}
