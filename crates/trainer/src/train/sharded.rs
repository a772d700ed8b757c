//! Weights that are cut over tensor groups and over shards, as the configuration asks for it.

use ddp::{Completion, CompletionStage};
use device::Reduce;
use gtp::{Drain, GradSum, Gtp, GtpConfig, GtpPlan, ShardAxis};
use model::{GptPlan, ShardConfig};
use pgroups::{Axis, Key, Param, ParamClass, ParamSpec, ProcessGroups, Rank, Sequence, TensorParallel};

use crate::{Config, GraphScope, TrainError};

/// Groups that sharded and cut weights need.
pub(super) const KEYS: [Key; 2] = [Key::TP, Key::GTP];

/// How the model is laid on the configuration's layout.
pub(crate) fn shard_config(config: &Config) -> ShardConfig {
    ShardConfig {
        alignment: config.gtp.alignment.unwrap_or(1),
        sequence: match config.layout.sequence_parallel {
            Some(true) => Sequence::Split,
            Some(false) | None => Sequence::Whole,
        },
        // A sample is one sequence, so each must divide by itself.
        micro_batch: 1,
    }
}

/// The rank's sharded weights; with a plan they take no more memory than that.
pub(super) fn build(
    rank: &Rank,
    groups: &ProcessGroups,
    held: (&[Param], &[ParamSpec]),
    config: &Config,
    plan: Option<&GtpPlan>,
) -> Result<Gtp, TrainError> {
    let layout = config.ranks();
    let (all, settings) = (held.0.iter().zip(held.1), gtp_config(config));
    let gtp = match plan {
        None => Gtp::new(rank, &layout, groups, all, settings)?,
        Some(plan) => Gtp::planned(rank, &layout, groups, all, settings, plan)?,
    };
    if config.layout.tp == 1 {
        return Ok(gtp);
    }
    let group = groups.get(&Key::TP, "parallel layers")?.second("layers")?;
    Ok(gtp.over(TensorParallel::new(group, shard_config(config).sequence)))
}

/// Whether graphs run on two streams in turn: there are several in a pass, and reductions to end behind them.
pub(super) fn in_turn(config: &Config) -> bool {
    config.layout.gtp > 1 && matches!(config.graph.scope, GraphScope::Layer | GraphScope::Chunk)
}

fn gtp_config(config: &Config) -> GtpConfig {
    let own = &config.gtp;
    let axis = ShardAxis {
        look_ahead: own.look_ahead.unwrap_or(1),
        look_ahead_bytes: own.look_ahead_bytes,
        ..ShardAxis::new(ParamClass::Dense, Axis::GTP)
    };
    // Graphs of parts of a pass run on two streams in turn.
    let drain = if in_turn(config) { Drain::TwoStage } else { Drain::Whole };
    let sum = if own.f32_reduce == Some(true) { GradSum::F32 } else { GradSum::Collective };
    GtpConfig { axes: vec![axis], sum, drain, ..GtpConfig::default() }
}

/// Gradients that are not whole when the buckets are reduced.
pub(super) fn completions(groups: &ProcessGroups, plan: &GptPlan) -> Result<Vec<Completion>, TrainError> {
    let mut all = Vec::new();
    let mut add = |stage, params: Vec<String>, key: &Key, reduce| -> Result<(), TrainError> {
        if !params.is_empty() {
            let group = groups.get(key, "gradients of whole weights")?.second("completion")?;
            all.push(Completion { stage, params, group, reduce });
        }
        Ok(())
    };
    add(CompletionStage::SequenceParallel, plan.partial_over_tp(), &Key::TP, Reduce::Sum)?;
    add(CompletionStage::WeightShards, plan.whole_over_gtp(), &Key::GTP, Reduce::Avg)?;
    Ok(all)
}
