//! Each gradient is scaled exactly once: by whom, and by how much.

use device::Reduce;
use pgroups::ParamClass;

use crate::DdpError;

/// What a step's gradient is the mean of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Scaling {
    /// Of the replicas' gradients: each is multiplied by one over the number of dense replicas, then summed.
    #[default]
    Mean,
    /// As `Mean`, by collectives that average. Experts' gradients are first multiplied by expert replicas over dense
    /// replicas. Not with weight shards.
    Averaging,
    /// Of all valid tokens: gradients are sums, divided once at the end by the number of tokens.
    PerToken,
}

/// How many ranks stand behind a gradient.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Replication {
    /// Replicas of dense weights: the size of the dense reduction group.
    pub dense: u32,
    /// Replicas of experts' weights.
    pub expert: u32,
    /// Shards that one weight is cut into over the weight-shard axis, whose owner reduces over it.
    pub weight_shards: u32,
}

/// What happens to the gradients of a class.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ClassScaling {
    /// Multiplied in before the reduction.
    pub pre: f64,
    /// The reduction over the replicas.
    pub reduce: Reduce,
    /// What the reduction over the weight-shard axis multiplies in; not done by this crate.
    pub shard: f64,
    /// What a gradient is multiplied by in all, over replicas and weight shards; 1 under [`Scaling::PerToken`], whose
    /// division by the tokens comes last.
    pub net: f64,
}

impl Scaling {
    /// What happens to the gradients of `class`.
    ///
    /// # Errors
    /// [`DdpError::AveragingShards`]: averages over the replicas do not know the weight shards.
    pub fn of(self, class: ParamClass, ranks: Replication) -> Result<ClassScaling, DdpError> {
        let [dense, expert, shards] = [ranks.dense, ranks.expert, ranks.weight_shards].map(f64::from);
        let replicas = if class == ParamClass::Dense { dense } else { expert };
        let scaling = match self {
            Scaling::Mean => {
                ClassScaling { pre: 1.0 / dense, reduce: Reduce::Sum, shard: 1.0 / shards, net: 1.0 / (dense * shards) }
            }
            Scaling::PerToken => ClassScaling { pre: 1.0, reduce: Reduce::Sum, shard: 1.0, net: 1.0 },
            Scaling::Averaging if ranks.weight_shards > 1 => {
                return Err(DdpError::AveragingShards { weight_shards: ranks.weight_shards });
            }
            Scaling::Averaging => {
                ClassScaling { pre: replicas / dense, reduce: Reduce::Avg, shard: 1.0, net: 1.0 / dense }
            }
        };
        // One owner of each factor: what the parts multiply in is the whole.
        let by_reduction = if scaling.reduce == Reduce::Avg { 1.0 / replicas } else { 1.0 };
        let product = scaling.pre * by_reduction * scaling.shard;
        assert!((product - scaling.net).abs() <= 1e-12 * scaling.net, "BUG: {self:?} scales by {product}");
        Ok(scaling)
    }
}
