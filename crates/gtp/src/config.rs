//! Settings of sharded weights.

use std::num::NonZeroUsize;

use pgroups::{Axis, Key, ParamClass};

/// What the reduce-scatter of a weight gradient gives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GradScaling {
    /// The mean over the peers: each scales by one over their number before the sum.
    #[default]
    Mean,
    /// The sum; whoever divides by tokens does it at the end of the step.
    Sum,
}

/// How the peers' gradients are added up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GradSum {
    /// By the collective, in the gradient's type.
    #[default]
    Collective,
    /// In f32: pieces travel in the gradient's type and are added up by their owner. Two peers add once either way, so
    /// there the collective does it.
    F32,
}

/// Weights that are cut over one axis, and how far ahead of their use they are gathered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShardAxis {
    /// Which parameters: those of a class lie on the class's grid.
    pub class: ParamClass,
    /// The axis.
    pub axis: Axis,
    /// Uses of the axis's weights that a gather is issued ahead. 0: every gather is in the open.
    pub look_ahead: usize,
    /// Bytes that may be gathered ahead at a time; none: no limit. A weight that is larger alone is gathered in the
    /// open.
    pub look_ahead_bytes: Option<usize>,
}

impl ShardAxis {
    /// The weight-shard axis of a class, one use ahead.
    #[must_use]
    pub fn new(class: ParamClass, axis: Axis) -> ShardAxis {
        ShardAxis { class, axis, look_ahead: 1, look_ahead_bytes: None }
    }

    /// The group that holds the shards of one weight.
    #[must_use]
    pub fn key(&self) -> Key {
        match self.class {
            ParamClass::Dense => Key::over([self.axis.clone()]),
            ParamClass::Expert => Key::expert_over([self.axis.clone()]),
        }
    }
}

/// When the graph behind a captured part of a pass may begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Drain {
    /// Behind all of it.
    #[default]
    Whole,
    /// Behind its uses and gathers: its reductions end while the next graph runs. For graphs that are replayed on two
    /// streams in turn, because what follows a launch on its own stream follows all of it.
    TwoStage,
}

/// Settings of a [`Gtp`](crate::Gtp).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GtpConfig {
    /// Axes that cut weights. A weight is cut over one of them at most, innermost.
    pub axes: Vec<ShardAxis>,
    /// What a reduced gradient is.
    pub scaling: GradScaling,
    /// How it is added up.
    pub sum: GradSum,
    /// Weight gradients that may be under way to their peers while the next one is computed, at least one: the slots of
    /// the ring.
    pub grads_behind: NonZeroUsize,
    /// What the next graph waits for.
    pub drain: Drain,
}

impl Default for GtpConfig {
    /// The weight-shard axis of both classes, one use ahead; means; collective sums; one gradient behind; graphs end whole.
    fn default() -> GtpConfig {
        GtpConfig {
            axes: vec![ShardAxis::new(ParamClass::Dense, Axis::GTP), ShardAxis::new(ParamClass::Expert, Axis::GTP)],
            scaling: GradScaling::Mean,
            sum: GradSum::Collective,
            grads_behind: NonZeroUsize::MIN,
            drain: Drain::Whole,
        }
    }
}
