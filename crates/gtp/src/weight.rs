//! A sharded weight, and the communicators and streams of its axis.

use device::{DType, Device, Event, MemoryKind, Stream, View};
use pgroups::{Axis, Group, Layout, Param, ParamSpec, PgError, ProcessGroups};

use crate::{GradScaling, GradSum, GtpConfig, GtpError, ShardAxis, plan::WeightPlan};

/// A weight of which this rank holds a shard.
pub(crate) struct Weight {
    pub(crate) param: Param,
    /// Which of the lanes.
    pub(crate) lane: usize,
    /// Sizes when gathered: the tensor group's part of the global tensor, without padding.
    pub(crate) logical: Vec<usize>,
    /// Rows when gathered, padding included.
    pub(crate) padded_rows: usize,
    /// Elements of a row.
    pub(crate) row: usize,
}

impl Weight {
    /// The weight if one of the axes cuts it on this rank's grid.
    pub(crate) fn new(
        param: &Param,
        spec: &ParamSpec,
        layout: &Layout,
        config: &GtpConfig,
    ) -> Result<Option<Weight>, GtpError> {
        let grid = layout.grid(spec.class);
        let cuts = &spec.placement.cuts;
        let gathers = |axis: &Axis| {
            let own = |a: &ShardAxis| a.class == spec.class && a.axis == *axis;
            config.axes.iter().position(own).filter(|_| layout.size(spec.class, axis) > 1)
        };
        let mut found = cuts.iter().enumerate().filter_map(|(at, cut)| Some((at, cut, gathers(&cut.axis)?)));
        let Some((at, cut, lane)) = found.next() else { return Ok(None) };
        let name = || param.name().to_owned();
        if let Some((_, second, _)) = found.next() {
            let (first, second) = (cut.axis.to_string(), second.axis.to_string());
            return Err(GtpError::CutTwice { param: name(), first, second });
        }
        if cut.dim != 0 || at + 1 != cuts.len() {
            let (axis, cut, cuts) = (cut.axis.to_string(), at + 1, cuts.len());
            return Err(GtpError::NotInnermost { param: name(), axis, dim: spec.placement.cuts[at].dim, cut, cuts });
        }
        let mut whole = spec.placement.clone();
        whole.cuts.pop();
        let logical = whole.on(grid)?.local_shape().to_vec();
        let shard = spec.placement.on(grid)?.local_shape().to_vec();
        if shard != param.shape().dims() {
            return Err(GtpError::ShardShape { param: name(), have: param.shape().dims().to_vec(), want: shard });
        }
        if param.main_grad().dtype() != DType::F32 {
            return Err(GtpError::GradType { param: name(), dtype: param.main_grad().dtype() });
        }
        let size = layout.size(spec.class, &config.axes[lane].axis) as usize;
        let row = logical[1..].iter().product();
        Ok(Some(Weight { param: param.clone(), lane, padded_rows: shard[0] * size, row, logical }))
    }

    /// Elements when gathered, padding included.
    pub(crate) fn numel(&self) -> usize {
        self.padded_rows * self.row
    }

    /// What of `slot`, which holds the gathered weight, is the weight.
    pub(crate) fn logical(&self, slot: &View) -> Result<View, device::Error> {
        slot.flat(0..self.logical.iter().product())?.reshape(&self.logical)
    }

    /// What of `slot` is padding; none without any.
    pub(crate) fn padding(&self, slot: &View) -> Result<Option<View>, device::Error> {
        let (numel, padded) = (self.logical.iter().product(), self.numel());
        if numel == padded { Ok(None) } else { slot.flat(numel..padded).map(Some) }
    }

    pub(crate) fn plan(&self) -> WeightPlan {
        WeightPlan {
            name: self.param.name().to_owned(),
            axis: self.lane,
            numel: self.numel(),
            shards: self.numel() / self.param.numel(),
            value: self.param.dtype(),
            grad: self.param.main_grad().dtype(),
        }
    }
}

/// Where the weights of one axis travel.
pub(crate) struct Lane {
    pub(crate) gather: Stream,
    pub(crate) reduce: Stream,
    /// Gathers that are planned.
    pub(crate) planned: Group,
    /// Gathers that are not.
    pub(crate) on_demand: Group,
    pub(crate) reduced: Group,
    /// What a gradient is multiplied with before it is summed.
    pub(crate) factor: Option<f32>,
    pub(crate) sum: GradSum,
    /// f32: where reductions arrive: one shard, or everybody's pieces of it.
    pub(crate) arrivals: View,
    pub(crate) gather_tail: Event,
    pub(crate) reduce_tail: Event,
    /// As `reduce_tail`, told by graphs to each other.
    pub(crate) reduce_gate: Event,
}

impl Lane {
    /// Of the axis at `at`, for weights whose shards have up to `shard` elements.
    pub(crate) fn open(
        device: &Device,
        groups: &ProcessGroups,
        config: &GtpConfig,
        at: usize,
        shard: usize,
    ) -> Result<Lane, GtpError> {
        let axis = &config.axes[at];
        let group = groups.get(&axis.key(), "sharded weights")?;
        check_place(groups.plan().layout(), group, axis)?;
        let size = group.size();
        let sum = if size > 2 { config.sum } else { GradSum::Collective };
        let pieces = if sum == GradSum::F32 { size as usize } else { 1 };
        let name = |what: &str| match at {
            0 => format!("gtp.{what}"),
            _ => format!("gtp.{what}.{}", axis.axis),
        };
        Ok(Lane {
            gather: device.stream(&name("gather"))?,
            reduce: device.stream(&name("reduce"))?,
            planned: second(group, "gtp_gather")?,
            on_demand: second(group, "gtp_on_demand")?,
            reduced: second(group, "gtp_reduce")?,
            factor: (config.scaling == GradScaling::Mean).then(|| 1.0 / size as f32),
            sum,
            arrivals: device.alloc(&name("arrivals"), &[shard * pieces], DType::F32, MemoryKind::Arena)?,
            gather_tail: device.event(&name("gather_tail")),
            reduce_tail: device.event(&name("reduce_tail")),
            reduce_gate: device.event(&name("reduce_gate")),
        })
    }
}

/// What a gather puts at a member's place has to be what the layout cuts there.
fn check_place(layout: &Layout, group: &Group, axis: &ShardAxis) -> Result<(), GtpError> {
    let (rank, place) = (group.rank(), group.place().0);
    match layout.grid(axis.class).coordinate(rank, &axis.axis) {
        Some(coordinate) if coordinate != place => {
            let (group, axis) = (group.name().to_owned(), axis.axis.to_string());
            Err(GtpError::OutOfPlace { group, rank: rank.0, place, axis, coordinate })
        }
        _ => Ok(()),
    }
}

/// A communicator of its own. A model that is built again opens another, the same on all ranks.
fn second(group: &Group, label: &str) -> Result<Group, GtpError> {
    let mut asked = label.to_owned();
    for again in 1u32.. {
        match group.second(&asked) {
            Err(PgError::SecondTwice { .. }) => asked = format!("{label}_{again}"),
            done => return Ok(done?),
        }
    }
    unreachable!("BUG: more communicators than numbers")
}
