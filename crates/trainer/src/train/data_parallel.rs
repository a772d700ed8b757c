//! Data parallelism as the configuration asks for it: buckets, the optimizer, who publishes when.

use std::{collections::HashSet, fmt, sync::Arc};

use ddp::{
    AdamConfig, BucketPlan, BucketSize, Ddp, DdpConfig, DeclaredParam, GradOverlap, Optimizer, OptimizerConfig,
    ParamBuffers, ParamGroup, PlanConfig, Precision, Scaling, Sharding,
};
use device::{DType, Download, Stream};
use model::{Decay, GptPlan};
use pgroups::{HostState, ProcessGroups, Rank, Seed};

use super::sharded::completions;
use crate::{Config, Dispatch, Number, TrainError};

/// Parameters, their gradients and the optimizer of one rank.
pub(super) struct DataParallel {
    pub(super) buffers: ParamBuffers,
    ddp: Ddp,
    optimizer: Optimizer,
    /// Updates run here, so that a bucket's may run beside another one's backward.
    updates: Stream,
}

/// The place of a microbatch in its step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// Others of the step follow: gradients add up.
    Inner,
    /// Its gradients complete the step's.
    Last,
}

impl DataParallel {
    /// Allocates, fills and attaches; `compute` is where forward and backward run.
    pub(super) fn build(
        rank: &Rank,
        groups: &ProcessGroups,
        plan: &GptPlan,
        config: &Config,
        compute: &Stream,
    ) -> Result<DataParallel, TrainError> {
        let completions = completions(groups, plan)?;
        let stored = precision(config).param;
        let declared: Vec<_> = plan.specs().into_iter().map(|spec| DeclaredParam::new(spec, stored)).collect();
        let buffers = ParamBuffers::allocate(rank, &config.ranks(), &declared, plan_config(config))?;
        buffers.fill(compute, Seed(config.train.seed))?;
        let ddp = Ddp::attach(&buffers, groups, ddp_config(config), compute)?;
        let ddp = if completions.is_empty() { ddp } else { ddp.completing(&completions)? };
        let plain: HashSet<_> =
            plan.params().iter().filter(|p| p.decay != Decay::Applied).map(|p| p.spec.name.as_str()).collect();
        let group_of = |name: &str| usize::from(plain.contains(name));
        let optimizer = Optimizer::new(&ddp, groups, optimizer_config(config), group_of, compute)?;
        Ok(DataParallel { buffers, ddp, optimizer, updates: rank.device.stream("optimizer")? })
    }

    /// Submits a microbatch: `run` submits its passes.
    pub(super) fn microbatch(
        &self,
        stream: &Stream,
        place: Place,
        run: impl FnOnce() -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let _adding_up = (place == Place::Inner).then(|| self.ddp.no_sync());
        self.ddp.begin_microbatch(stream)?;
        run()?;
        Ok(self.ddp.end_microbatch(stream)?)
    }

    /// Sets the learning rate of the next step. Decayed and plain parameters follow one schedule.
    pub(super) fn set_rate(&self, lr: f32) -> Result<(), TrainError> {
        Ok(self.optimizer.set_rates(&self.updates, &[lr, lr])?)
    }

    /// Submits what follows the last microbatch: what is not reduced yet, the update, publications that are its part.
    pub(super) fn step(&mut self) -> Result<(), TrainError> {
        self.ddp.finish_grads()?;
        Ok(self.optimizer.step_at_rates(&self.updates)?)
    }

    /// What graphs of whole steps must keep in order on the host.
    pub(super) fn accounts(&self) -> Vec<Arc<dyn HostState>> {
        vec![self.ddp.account(), self.optimizer.account()]
    }

    /// Makes all values readable by what is submitted to `stream`. All ranks call it before one of them reads values
    /// by itself: what is sharded takes all of them to publish.
    pub(super) fn publish(&self, stream: &Stream) -> Result<(), TrainError> {
        Ok(self.ddp.publish(stream)?)
    }

    /// Where updates run.
    pub(super) fn updates(&self) -> &Stream {
        &self.updates
    }

    /// Asks for the norm of the last step's gradients, before clipping; 0 if nothing was clipped or checked.
    pub(super) fn grad_norm(&self) -> Result<Download<f32>, TrainError> {
        self.optimizer.read_state(&self.updates)?;
        Ok(self.updates.download(self.optimizer.grad_norm())?)
    }

    /// Memory of all buckets, in the plan's order of bucket groups.
    #[cfg(test)]
    pub(super) fn buckets(&self) -> impl Iterator<Item = ddp::BucketMemory> {
        self.ddp.buckets()
    }

    /// This rank's place among the replicas: which shard of every bucket is its own.
    #[cfg(test)]
    pub(super) fn replica_place(&self) -> pgroups::GroupRank {
        self.ddp.replicas(pgroups::ParamClass::Dense).place()
    }

    /// Makes the reduced gradients readable by what is submitted to `stream`.
    #[cfg(test)]
    pub(super) fn read_grads(&self, stream: &Stream) -> Result<(), TrainError> {
        Ok(self.ddp.read_grads(stream)?)
    }

    /// How the run keeps and moves its numbers, for the user to see.
    pub(super) fn summary(&self, config: &Config) -> ParallelSummary {
        ParallelSummary::of(self.buffers.plan(), config)
    }
}

/// Activations have the type of the parameters; everything else is f32.
pub(super) fn precision(config: &Config) -> Precision {
    let param = match config.precision.param {
        Number::F32 => DType::F32,
        Number::Bf16 => DType::Bf16,
    };
    Precision { param, ..Precision::default() }
}

fn plan_config(config: &Config) -> PlanConfig {
    let sharding = if config.optimizer.distributed {
        Sharding::On { dense: config.layout.dp * config.layout.cp, expert: 1 }
    } else {
        Sharding::Off
    };
    PlanConfig { bucket_size: BucketSize::Numel(config.ddp.bucket_size), sharding, ..PlanConfig::default() }
}

fn ddp_config(config: &Config) -> DdpConfig {
    DdpConfig {
        // Averages over replicas do not know the weight shards.
        scaling: if config.layout.gtp > 1 { Scaling::Mean } else { Scaling::Averaging },
        overlap: if config.ddp.overlap_grad_reduce { GradOverlap::Overlapped } else { GradOverlap::AtFinish },
        dispatch: match config.ddp.dispatch {
            _ if !config.ddp.overlap_param_gather => ddp::Dispatch::AtStep,
            Dispatch::Chain => ddp::Dispatch::Chain,
            Dispatch::Aligned => ddp::Dispatch::Aligned,
            Dispatch::WithOptimizer => ddp::Dispatch::WithOptimizer,
        },
        ..DdpConfig::default()
    }
}

fn optimizer_config(config: &Config) -> OptimizerConfig {
    let o = &config.optimizer;
    let min_lr = o.min_lr.unwrap_or(o.lr);
    let group = |name: &str, weight_decay| ParamGroup { name: name.to_owned(), weight_decay, max_lr: o.lr, min_lr };
    OptimizerConfig {
        adam: AdamConfig { beta1: o.beta1, beta2: o.beta2, eps: o.eps, clip: o.clip },
        groups: vec![group("decayed", o.weight_decay), group("plain", 0.0)],
        ..OptimizerConfig::default()
    }
}

/// Buckets and element types of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParallelSummary {
    buckets: usize,
    largest: usize,
    reduction: &'static str,
    optimizer: String,
    precision: Precision,
}

impl ParallelSummary {
    #[cfg(test)]
    pub(super) fn buckets(&self) -> usize {
        self.buckets
    }

    fn of(plan: &BucketPlan, config: &Config) -> ParallelSummary {
        let ranges = plan.buffers().iter().flat_map(|buffer| buffer.buckets()).map(|bucket| bucket.range.len());
        let sharded = plan.buffers().iter().find_map(|buffer| buffer.shards());
        let dispatch = if config.ddp.overlap_param_gather { config.ddp.dispatch.to_string() } else { "at-step".into() };
        ParallelSummary {
            buckets: ranges.clone().count(),
            largest: ranges.max().unwrap_or(0),
            reduction: if config.ddp.overlap_grad_reduce { "beside backward" } else { "behind the last backward" },
            optimizer: match sharded {
                Some(shards) => format!("optimizer in {shards} shards, parameters gathered {dispatch}"),
                None => "optimizer on every rank".to_owned(),
            },
            precision: precision(config),
        }
    }
}

impl fmt::Display for ParallelSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ParallelSummary { buckets, largest, reduction, optimizer, precision } = self;
        let s = if *buckets == 1 { "" } else { "s" };
        writeln!(f, "{buckets} bucket{s} of up to {largest} elements, reduced {reduction}; {optimizer}")?;
        write!(f, "{precision}")
    }
}
