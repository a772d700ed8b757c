//! How many microbatches make a global batch.

use super::nearest::nearest_multiples;
use crate::error::TrainError;

/// What to do with a global batch that is no multiple of one microbatch on every data rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indivisible {
    /// It is an error.
    Refused,
    /// The running batch is the next smaller multiple; the caller reports it.
    RoundedDown,
}

/// The microbatches of a step.
///
/// Source: the rule of Megatron-LM's constant microbatch calculator; data ranks include weight-shard peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Microbatches {
    /// Microbatches per data rank and step.
    pub count: u64,
    /// Sequences per step as configured.
    pub global_batch: u64,
    /// Sequences per step as run: `count * micro_batch * data_ranks`.
    pub running_batch: u64,
}

impl Microbatches {
    /// Divides `global_batch` sequences over `data_ranks` (dp * gtp), `micro_batch` sequences at a time.
    ///
    /// # Errors
    /// [`TrainError::Microbatches`] with the nearest valid global batches, if the division leaves a rest that is not
    /// allowed, or no microbatch at all.
    pub fn new(
        global_batch: u64,
        micro_batch: u64,
        data_ranks: u64,
        indivisible: Indivisible,
    ) -> Result<Microbatches, TrainError> {
        let step = micro_batch.saturating_mul(data_ranks);
        let count = global_batch.checked_div(step).unwrap_or(0);
        let rest = global_batch.checked_rem(step).unwrap_or(0);
        if count == 0 || rest > 0 && indivisible == Indivisible::Refused {
            let nearest = nearest_multiples(step.max(1), global_batch);
            return Err(TrainError::Microbatches { global_batch, micro_batch, data_ranks, nearest });
        }
        Ok(Microbatches { count, global_batch, running_batch: count * step })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(global: u64, micro: u64, dp: u64, indivisible: Indivisible) -> Option<(u64, u64, u64)> {
        let m = Microbatches::new(global, micro, dp, indivisible).ok()?;
        Some((m.count, m.global_batch, m.running_batch))
    }

    #[test]
    fn counts_agree_with_the_constant_calculator_that_was_run_upstream() {
        use Indivisible::{Refused, RoundedDown};
        assert_eq!(count(64, 2, 4, Refused), Some((8, 64, 64)));
        assert_eq!(count(65, 2, 4, Refused), None);
        assert_eq!(count(65, 2, 4, RoundedDown), Some((8, 65, 64)));
        assert_eq!(count(8, 2, 4, Refused), Some((1, 8, 8)));
        assert_eq!(count(7, 2, 4, RoundedDown), None);
        assert_eq!(count(32, 1, 8, Refused), Some((4, 32, 32)));
    }

    #[test]
    fn what_cannot_be_divided_is_told_with_the_nearest_batches_that_can() {
        let error =
            |global, micro, dp| Microbatches::new(global, micro, dp, Indivisible::Refused).unwrap_err().to_string();
        assert_eq!(
            error(65, 2, 4),
            "a global batch of 65 sequences is no multiple of micro_batch * data ranks = 2 * 4; nearest: 64 or 72"
        );
        assert!(error(7, 2, 4).ends_with("nearest: 8"));
        assert!(error(0, 1, 1).ends_with("nearest: 1"));
        // Products beyond 64 bits and sizes of 0 are refused, not wrapped.
        assert!(error(8, u64::MAX, 2).contains("no multiple"));
        assert!(error(8, 0, 2).contains("no multiple"));
    }
}
