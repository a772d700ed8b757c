//! How parameters lie on a layout, and what of a model does not divide over it.

use device::{Stream, View};
use pgroups::{
    Axis, GradOut, Layout, Param, ParamClass, Pass, PgError, Placement, Sequence, TensorParallel, Weights, padded_cut,
};

use crate::{ConfigRule, ConfigViolation, GptConfig, ModelError, ModelParam};

/// How a model is laid on a layout, besides the layout's own sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShardConfig {
    /// Rows of matrices and tables, over the weight-shard axis, are padded to a multiple of this times the axis. 0: they
    /// have to divide.
    pub alignment: usize,
    /// What a rank of the tensor axis holds between parallel regions.
    pub sequence: Sequence,
    /// Sequences of a microbatch. Under a split its tokens have to divide over the tensor axis.
    pub micro_batch: usize,
}

/// Sizes of the axes that cut a model, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sharding {
    pub(crate) tp: u32,
    pub(crate) gtp: u32,
    pub(crate) config: ShardConfig,
}

/// Which dimension of a parameter the tensor axis cuts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TensorCut {
    None,
    /// The first, of a matrix `[out, in]` or its bias: every rank computes its columns of the result.
    Out {
        /// Equal blocks, each of which is cut.
        blocks: usize,
    },
    /// The second: every rank computes a part of the sum.
    In,
    /// The first, of a table with a row for each token, padded to as many on every rank.
    Vocab,
}

impl TensorCut {
    pub(crate) const OUT: TensorCut = TensorCut::Out { blocks: 1 };
}

impl Sharding {
    /// Nothing is cut.
    pub(crate) const WHOLE: Sharding =
        Sharding { tp: 1, gtp: 1, config: ShardConfig { alignment: 1, sequence: Sequence::Whole, micro_batch: 1 } };

    /// On a layout that cuts nothing, what cannot matter does not differ.
    pub(crate) fn of(layout: &Layout, config: ShardConfig) -> Sharding {
        let size = |axis: &Axis| layout.grid(ParamClass::Dense).axis_size(axis).unwrap_or(1);
        let (tp, gtp) = (size(&Axis::TP), size(&Axis::GTP));
        let ShardConfig { alignment, sequence, micro_batch } = config;
        let (sequence, micro_batch) = if tp > 1 { (sequence, micro_batch) } else { (Sequence::Whole, 1) };
        let alignment = if gtp > 1 { alignment } else { 1 };
        Sharding { tp, gtp, config: ShardConfig { alignment, sequence, micro_batch } }
    }

    pub(crate) fn placement(&self, shape: &[usize], cut: TensorCut) -> Placement {
        let whole = Placement::whole(shape);
        let cut = match cut {
            _ if self.tp == 1 => whole,
            TensorCut::None => whole,
            TensorCut::Out { blocks } => whole.cut_blocks(0, Axis::TP, 0, blocks),
            TensorCut::In => whole.cut(1, Axis::TP, 0),
            TensorCut::Vocab => whole.cut(0, Axis::TP, 1),
        };
        let gathered = self.gtp > 1 && shape.len() >= 2;
        if gathered { cut.cut(0, Axis::GTP, self.config.alignment) } else { cut }
    }

    /// Rows that do not divide over the weight-shard axis and may not be padded, each number of them once.
    pub(crate) fn uneven_rows(&self, params: &[ModelParam]) -> Vec<ConfigViolation> {
        let mut uneven: Vec<usize> = Vec::new();
        for param in params.iter().filter(|p| p.spec.placement.cuts.iter().any(|cut| cut.axis == Axis::GTP)) {
            let Placement { global, cuts, .. } = &param.spec.placement;
            let over_tp = cuts.iter().any(|cut| cut.axis == Axis::TP && cut.dim == 0);
            let rows = global[0].div_ceil(if over_tp { self.tp as usize } else { 1 });
            if padded_cut(rows, self.gtp, self.config.alignment).is_err() && !uneven.contains(&rows) {
                uneven.push(rows);
            }
        }
        let violation = |rows| ConfigViolation {
            setting: "alignment",
            value: self.config.alignment,
            rule: ConfigRule::PadsRows { rows, gtp: self.gtp },
        };
        uneven.into_iter().map(violation).collect()
    }
}

impl GptConfig {
    /// What does not divide over the tensor axis.
    pub(crate) fn uneven_over(&self, on: &Sharding) -> Vec<ConfigViolation> {
        let mut found = Vec::new();
        let tp = on.tp as usize;
        // A size of 0 has been told already, and divides by anything.
        let fits = |heads: usize| self.dim.is_multiple_of(heads) && heads.is_multiple_of(self.kv_heads());
        let own_kv = self.kv_heads() != self.heads;
        let whole = |kv: usize| self.heads.is_multiple_of(kv);
        let alone = |heads: usize| self.dim.is_multiple_of(heads);
        let any = |_: usize| true;
        let mut over_tp = |setting, value: usize, valid: &dyn Fn(usize) -> bool| {
            if value > 0 && !value.is_multiple_of(tp) {
                let nearest = nearest_multiple(value, tp, valid);
                let nearest_tp = nearest_common_divisor(tp, [self.heads, self.kv_heads(), self.ffn_dim]);
                let rule = ConfigRule::DividesOver { tp: on.tp, nearest, nearest_tp };
                found.push(ConfigViolation { setting, value, rule });
            }
        };
        if own_kv {
            over_tp("heads", self.heads, &fits);
            over_tp("kv_heads", self.kv_heads(), &whole);
        } else {
            over_tp("heads", self.heads, &alone);
        }
        over_tp("ffn_dim", self.ffn_dim, &any);
        let batch = on.config.micro_batch;
        if on.config.sequence == Sequence::Split && !(batch * self.seq_len).is_multiple_of(tp) {
            let rule = ConfigRule::SplitsTokens { seq_len: self.seq_len, tp: on.tp };
            found.push(ConfigViolation { setting: "micro_batch", value: batch, rule });
        }
        found
    }
}

/// The multiple of `step` nearest to `wish` that is valid, the smaller of two; none up to twice the wish and a step.
fn nearest_multiple(wish: usize, step: usize, valid: &dyn Fn(usize) -> bool) -> Option<usize> {
    let multiples = (step..=2 * wish + step).step_by(step).filter(|&n| valid(n));
    multiples.min_by_key(|&n| (n.abs_diff(wish), n))
}

/// The number nearest to `wish`, and below it, that divides all of `sizes`.
fn nearest_common_divisor(wish: usize, sizes: [usize; 3]) -> usize {
    (1..=wish).rev().find(|n| sizes.iter().all(|size| size.is_multiple_of(*n))).unwrap_or(1)
}

/// The tensor group that a model was planned for: its weights must come over one like it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Split {
    pub(crate) tp: u32,
    pub(crate) sequence: Sequence,
}

impl Split {
    /// Ranks that share each layer.
    pub(crate) fn ranks(self) -> usize {
        self.tp as usize
    }

    /// # Errors
    /// [`ModelError::TensorSize`], [`ModelError::SequenceSplit`].
    pub(crate) fn check(self, w: &dyn Weights) -> Result<(), ModelError> {
        let tensor = w.tensor();
        let given = tensor.map_or(1, |tensor| tensor.group().size());
        if given != self.tp {
            return Err(ModelError::TensorSize { planned: self.tp, given });
        }
        match tensor.map(TensorParallel::sequence) {
            Some(given) if self.tp > 1 && given != self.sequence => {
                Err(ModelError::SequenceSplit { planned: self.sequence, given })
            }
            _ => Ok(()),
        }
    }
}

/// The same weights for activations of which every rank has all rows, whatever the layout does elsewhere.
pub(crate) struct WithWholeRows<'w> {
    weights: &'w mut dyn Weights,
    tensor: Option<TensorParallel>,
}

impl<'w> WithWholeRows<'w> {
    pub(crate) fn new(weights: &'w mut dyn Weights) -> WithWholeRows<'w> {
        let tensor = weights.tensor().map(|tensor| TensorParallel::new(tensor.group().clone(), Sequence::Whole));
        WithWholeRows { weights, tensor }
    }
}

impl Weights for WithWholeRows<'_> {
    fn take(&mut self, param: &Param, stream: &Stream) -> Result<View, PgError> {
        self.weights.take(param, stream)
    }

    fn give_back(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        self.weights.give_back(param, stream)
    }

    fn grad(&mut self, param: &Param, stream: &Stream) -> Result<GradOut, PgError> {
        self.weights.grad(param, stream)
    }

    fn grad_done(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        self.weights.grad_done(param, stream)
    }

    fn enter(&mut self, pass: Pass) -> Pass {
        self.weights.enter(pass)
    }

    fn tensor(&self) -> Option<&TensorParallel> {
        self.tensor.as_ref()
    }
}
