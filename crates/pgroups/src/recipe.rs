//! How the groups of one key come from a grid, by arithmetic.

use std::sync::Arc;

use crate::{
    grid::{AxisMask, Grid, OwnGroup},
    rank::{GlobalRank, GroupRank},
};

/// The groups of an axis set, and what is chosen of them. Anything about one rank costs O(its group's size).
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Recipe {
    grid: Arc<Grid>,
    mask: AxisMask,
    select: Select,
}

/// What is chosen of the groups of an axis set ("base groups").
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Select {
    /// Each base group as it is.
    All,
    /// Positions that differ only in the digit worth `stride`, which counts to `size`: a slice for stride 1,
    /// every stride-th position otherwise.
    Digit { stride: u32, size: u32 },
    /// The members at these positions; the others are in no group.
    At(Vec<u32>),
    /// So many consecutive base groups, one behind the other.
    Joined(u32),
}

/// What makes the groups, free of how they were asked for: equal signatures, equal groups.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Signature {
    steps: Vec<(u32, u32)>,
    select: Select,
}

impl Recipe {
    pub(crate) fn new(grid: &Arc<Grid>, mask: AxisMask, select: Select) -> Recipe {
        let whole = grid.group_size(mask);
        let select = match select {
            Select::Digit { stride: 1, size } if size == whole => Select::All,
            Select::Joined(1) => Select::All,
            Select::At(stages) if whole == 1 && stages == [0] => Select::All,
            other => other,
        };
        Recipe { grid: Arc::clone(grid), mask, select }
    }

    pub(crate) fn group_size(&self) -> u32 {
        let base = self.grid.group_size(self.mask);
        match &self.select {
            Select::All => base,
            Select::Digit { size, .. } => *size,
            Select::At(positions) => positions.len() as u32, // distinct stages of a u32-sized pipeline
            Select::Joined(count) => base * count,
        }
    }

    pub(crate) fn group_count(&self) -> u32 {
        let bases = self.grid.group_count(self.mask);
        match &self.select {
            Select::All | Select::At(_) => bases,
            Select::Digit { size, .. } => bases * (self.grid.group_size(self.mask) / size),
            Select::Joined(count) => bases / count,
        }
    }

    /// The members of one group, in group order.
    pub(crate) fn members(&self, index: u32) -> Vec<GlobalRank> {
        let at = |base, position| self.grid.rank_at(self.mask, base, position);
        match &self.select {
            Select::All => self.grid.members(self.mask, index),
            Select::Digit { stride, size } => {
                let per_base = self.grid.group_size(self.mask) / size;
                let (base, sub) = (index / per_base, index % per_base);
                let first = sub / stride * (stride * size) + sub % stride;
                let positions = (0..*size).map(|digit| first + digit * stride);
                positions.map(|position| at(base, position)).collect()
            }
            Select::At(positions) => positions.iter().map(|&p| at(index, p)).collect(),
            Select::Joined(count) => {
                (index * count..(index + 1) * count).flat_map(|base| self.grid.members(self.mask, base)).collect()
            }
        }
    }

    /// The group that a rank is in; none if it is outside the grid or not chosen.
    pub(crate) fn own(&self, rank: GlobalRank) -> Option<OwnGroup> {
        let (index, position) = self.place(rank)?;
        Some(OwnGroup { index, members: self.members(index).into(), position: GroupRank(position) })
    }

    fn place(&self, rank: GlobalRank) -> Option<(u32, u32)> {
        let (base, position) = self.grid.place(self.mask, rank)?;
        let whole = self.grid.group_size(self.mask);
        match &self.select {
            Select::All => Some((base, position)),
            Select::Digit { stride, size } => {
                let sub = position / (stride * size) * stride + position % stride;
                Some((base * (whole / size) + sub, position / stride % size))
            }
            Select::At(positions) => {
                let place = positions.iter().position(|&p| p == position)?;
                Some((base, place as u32))
            }
            Select::Joined(count) => Some((base / count, base % count * whole + position)),
        }
    }

    pub(crate) fn signature(&self) -> Signature {
        let steps = self.grid.steps(self.mask);
        match (&self.select, steps.as_slice()) {
            // A digit of evenly spaced ranks is evenly spaced itself.
            (Select::Digit { size: 1, .. }, _) => Signature { steps: Vec::new(), select: Select::All },
            (Select::Digit { stride, size }, [(step, _)]) => {
                Signature { steps: vec![(step * stride, *size)], select: Select::All }
            }
            _ => Signature { steps, select: self.select.clone() },
        }
    }

    /// `4 groups of 2, steps [(1, 2)], all`: the line of a dump.
    pub(crate) fn describe(&self) -> String {
        let Signature { steps, select } = self.signature();
        format!(
            "{} groups of {} from rank {}, steps {steps:?}, {select:?}",
            self.group_count(),
            self.group_size(),
            self.grid.offset()
        )
    }
}
