//! How often a part is run before it is captured.

use std::num::NonZeroU32;

/// Runs of a layer before its capture, the model's own warm-up included, that settle lazy set-up and tuned algorithms.
const SETTLED_AFTER: u64 = 10;

/// What else a warm-up is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum LocalWarmUp {
    /// Nothing: the configured number will do, 0 included.
    Plain,
    /// Parameters that only a recompute reads have to be seen once.
    FindsRecompute,
    /// Weights are gathered ahead: one run records the chain, the next one uses it.
    BuildsChain,
}

/// Runs of each part of each captured microbatch right before it is captured.
///
/// At least one, and with the `steps` of warm-up that the model has run, of `microbatches` each, at least ten a layer.
/// `captured` is the number of microbatches that are captured: each brings its own runs.
///
/// Source: Megatron-LM, `transformer/cuda_graphs.py`, `max(1, ceil((10 - steps * microbatches) / captured))`.
#[must_use]
pub fn warm_up_iterations(steps: u32, microbatches: u32, captured: NonZeroU32) -> u32 {
    let done = u64::from(steps) * u64::from(microbatches);
    let missing = SETTLED_AFTER.saturating_sub(done).div_ceil(u64::from(captured.get()));
    missing.max(1) as u32 // at most `SETTLED_AFTER`
}

/// Runs before the capture of a part that is captured by itself: `configured`, or as many as its purpose takes.
///
/// Source: Megatron-LM, `transformer/cuda_graphs.py`, `create_fwd_graph`.
#[must_use]
pub fn local_warm_up(configured: u32, purpose: LocalWarmUp) -> u32 {
    let least = match purpose {
        LocalWarmUp::Plain => 0,
        LocalWarmUp::FindsRecompute => 1,
        LocalWarmUp::BuildsChain => 2,
    };
    configured.max(least)
}
