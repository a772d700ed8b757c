//! Which parameter lies where: flat buffers, cut into buckets, cut into shards. Pure arithmetic.

mod bucket_groups; // which buckets are published together
mod buffer; //        one buffer: starts, ends, padding
mod fragment; //      what a rank's shard holds of each parameter
mod grouping; //      which parameters share a buffer

use std::collections::HashMap;

use device::DType;
use pgroups::ParamClass;

pub use self::{
    bucket_groups::{BucketId, Joining},
    buffer::{Bucket, BufferPlan, Slot},
    fragment::Fragment,
    grouping::{BufferKey, GradType, Stored},
};
use crate::DdpError;

/// What a plan has to know of a parameter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlannedParam {
    /// Its name, unique in the model.
    pub name: String,
    /// Elements of this rank's part.
    pub numel: usize,
    /// Element type of the stored values.
    pub stored: Stored,
    /// Dense or of an expert: the two are reduced over different groups.
    pub class: ParamClass,
    /// Whether other pipeline stages hold a copy.
    pub copies: Copies,
    /// What it belongs to (a layer), for [`BucketSize::PerUnit`].
    pub unit: String,
}

/// Whether other pipeline stages hold a copy of a parameter.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Copies {
    /// No.
    #[default]
    None,
    /// Yes, as a tied embedding: its gradient is completed between stages, so under sharding it gets a bucket of its
    /// own.
    Shared,
}

/// When a bucket is closed. A parameter is never split.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BucketSize {
    /// Never: one bucket for a buffer.
    Unlimited,
    /// At [`default_bucket_numel`] elements.
    #[default]
    Default,
    /// Behind the parameter that brings it to this many elements or more.
    Numel(usize),
    /// Where [`PlannedParam::unit`] changes: usually a bucket per layer.
    PerUnit,
}

/// Whether ranks share the work of the optimizer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharding {
    /// Every rank steps every element: gradients are all-reduced.
    Off,
    /// A rank steps its shard of every bucket: gradients are reduce-scattered, values gathered.
    On {
        /// Shards of dense buckets: the size of their reduction group.
        dense: u32,
        /// Shards of experts' buckets.
        expert: u32,
    },
}

impl Sharding {
    /// Shards of a class's buckets; none without sharding.
    #[must_use]
    pub fn shards(self, class: ParamClass) -> Option<u32> {
        match (self, class) {
            (Sharding::Off, _) => None,
            (Sharding::On { dense, .. }, ParamClass::Dense) => Some(dense),
            (Sharding::On { expert, .. }, ParamClass::Expert) => Some(expert),
        }
    }
}

/// Whether bucket ends are padded so far that the switches reduce them at full speed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BusPadding {
    /// Multiples of lcm(shards, 128) elements.
    #[default]
    Off,
    /// Multiples of lcm(shards, 128, 65536) elements.
    On,
}

/// Settings of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlanConfig {
    /// When a bucket is closed.
    pub bucket_size: BucketSize,
    /// Whether ranks share the work of the optimizer.
    pub sharding: Sharding,
    /// Padding of bucket ends; none without sharding.
    pub bus_padding: BusPadding,
    /// Element type of the gradient buffers.
    pub grad: GradType,
    /// Which buckets are reduced and published together.
    pub joining: Joining,
}

impl Default for PlanConfig {
    /// Default bucket size, no sharding, f32 gradients, a group for each bucket.
    fn default() -> PlanConfig {
        PlanConfig {
            bucket_size: BucketSize::Default,
            sharding: Sharding::Off,
            bus_padding: BusPadding::Off,
            grad: GradType::F32,
            joining: Joining::Separate,
        }
    }
}

/// Elements of a bucket for `replicas`: max(40 M, 1 M x replicas), so that shards stay large enough to move well.
#[must_use]
pub fn default_bucket_numel(replicas: u32) -> usize {
    40_000_000.max(1_000_000 * replicas as usize)
}

/// Where every parameter of one rank lies.
///
/// Parameters of equal [`BufferKey`] share a buffer, last declared first, so that bucket 0 holds the end of the model
/// and fills first in backward; publications run from the last bucket down. Ranks with equal parameters and settings
/// have equal plans.
///
/// Source: Megatron-LM, `param_and_grad_buffer` and `optimizer.param_layout` (behaviour only).
#[derive(Clone, PartialEq, Debug)]
pub struct BucketPlan {
    config: PlanConfig,
    params: Vec<PlannedParam>,
    buffers: Vec<BufferPlan>,
    groups: Vec<Vec<BucketId>>,
    /// By parameter.
    homes: Vec<Home>,
}

/// Where one parameter lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Home {
    /// The buffer.
    pub(crate) buffer: usize,
    /// Its place among the buffer's slots.
    pub(crate) slot: usize,
    /// The bucket group.
    pub(crate) group: usize,
}

impl BucketPlan {
    /// Lays `params` out, given in declared order, which is the order of use.
    ///
    /// # Errors
    /// [`DdpError::ParamTwice`], [`DdpError::EmptyParam`], [`DdpError::NoShards`], [`DdpError::OneByteBuffers`].
    pub fn new(params: Vec<PlannedParam>, config: PlanConfig) -> Result<BucketPlan, DdpError> {
        check(&params, config)?;
        let buffers: Vec<BufferPlan> = grouping::group(&params, config.grad)
            .into_iter()
            .map(|(key, members)| BufferPlan::new(key, &members, &params, &config))
            .collect();
        let groups = bucket_groups::join(&buffers, config.joining)?;
        let group_of: HashMap<BucketId, usize> =
            groups.iter().enumerate().flat_map(|(group, buckets)| buckets.iter().map(move |&id| (id, group))).collect();
        let mut homes = vec![Home { buffer: 0, slot: 0, group: 0 }; params.len()];
        for (buffer, plan) in buffers.iter().enumerate() {
            for (slot, s) in plan.slots().iter().enumerate() {
                let group = group_of[&BucketId { buffer, bucket: s.bucket }];
                homes[s.param] = Home { buffer, slot, group };
            }
        }
        Ok(BucketPlan { config, params, buffers, groups, homes })
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &PlanConfig {
        &self.config
    }

    /// The parameters, in declared order.
    #[must_use]
    pub fn params(&self) -> &[PlannedParam] {
        &self.params
    }

    /// The buffers, by first declared parameter.
    #[must_use]
    pub fn buffers(&self) -> &[BufferPlan] {
        &self.buffers
    }

    /// Buckets that are reduced and published together: classes by first buffer, then as the buckets lie.
    #[must_use]
    pub fn groups(&self) -> &[Vec<BucketId>] {
        &self.groups
    }

    /// A bucket.
    ///
    /// # Panics
    /// If the plan has no such bucket.
    #[must_use]
    pub fn bucket(&self, id: BucketId) -> &Bucket {
        &self.buffers[id.buffer].buckets()[id.bucket]
    }

    /// The slot of a parameter, by its place in the declared order.
    ///
    /// # Panics
    /// If there is no such parameter.
    #[must_use]
    pub fn slot(&self, param: usize) -> &Slot {
        let home = self.homes[param];
        &self.buffers[home.buffer].slots()[home.slot]
    }

    pub(crate) fn home(&self, param: usize) -> Home {
        self.homes[param]
    }

    /// Bucket groups in the order in which forward reads them first.
    #[must_use]
    pub fn first_read_order(&self) -> Vec<usize> {
        let first = |group: usize| {
            let params = self.groups[group].iter().flat_map(|&id| self.bucket(id).params.iter());
            params.min().copied().unwrap_or(usize::MAX)
        };
        let mut order: Vec<usize> = (0..self.groups.len()).collect();
        order.sort_by_key(|&group| first(group));
        order
    }

    /// Elements of all parameters, and of all buffers with their padding.
    #[must_use]
    pub fn numel(&self) -> (usize, usize) {
        (self.params.iter().map(|p| p.numel).sum(), self.buffers.iter().map(BufferPlan::numel).sum())
    }

    /// Whether another plan lays out the same parameters in the same places.
    ///
    /// # Errors
    /// [`DdpError::LayoutDiffers`] with the first parameter that differs, or the first buffer, and both readings.
    pub fn agrees_with(&self, other: &BucketPlan) -> Result<(), DdpError> {
        let differs = |what: String, ours: String, theirs: String| Err(DdpError::LayoutDiffers { what, ours, theirs });
        let describe = |p: Option<&PlannedParam>| p.map_or("nothing".to_owned(), |p| format!("{p:?}"));
        for i in 0..self.params.len().max(other.params.len()) {
            let (a, b) = (self.params.get(i), other.params.get(i));
            if a != b {
                return differs(format!("parameter {i}"), describe(a), describe(b));
            }
        }
        for i in 0..self.params.len() {
            if self.slot(i) != other.slot(i) {
                let (a, b) = (format!("{:?}", self.slot(i)), format!("{:?}", other.slot(i)));
                return differs(format!("place of '{}'", self.params[i].name), a, b);
            }
        }
        if self.config.sharding != other.config.sharding {
            let (a, b) = (format!("{:?}", self.config.sharding), format!("{:?}", other.config.sharding));
            return differs("sharding".into(), a, b);
        }
        for (i, (a, b)) in self.buffers.iter().zip(&other.buffers).enumerate() {
            if a != b {
                return differs(format!("buffer {i}"), format!("{:?}", a.key()), format!("{:?}", b.key()));
            }
        }
        Ok(())
    }
}

fn check(params: &[PlannedParam], config: PlanConfig) -> Result<(), DdpError> {
    let mut seen = HashMap::new();
    for (second, p) in params.iter().enumerate() {
        if p.numel == 0 {
            return Err(DdpError::EmptyParam { param: p.name.clone() });
        }
        if let Some(first) = seen.insert(&p.name, second) {
            return Err(DdpError::ParamTwice { param: p.name.clone(), first, second });
        }
        if config.sharding.shards(p.class) == Some(0) {
            return Err(DdpError::NoShards { class: p.class });
        }
    }
    Ok(())
}

impl From<DType> for Stored {
    fn from(dtype: DType) -> Stored {
        match dtype {
            DType::Bf16 => Stored::Bf16,
            DType::F32 | DType::I32 | DType::I16 => Stored::F32,
        }
    }
}
