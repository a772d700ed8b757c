//! Ranks on named axes, and the groups of any subset of the axes, by arithmetic.

use std::sync::Arc;

use crate::{
    axis::{Axis, join, refuse_repeats},
    plan_error::PlanError,
    rank::{GlobalRank, GroupRank},
};

/// Axis subsets are bit masks, so a grid has at most this many axes.
const MAX_AXES: usize = 64;

/// Ranks `offset..offset + size` laid out on named axes, the first axis fastest.
///
/// The groups of a set of axes are the ranks that differ only along it. Groups come by smallest rank, members in
/// layout order, whatever order the axes were asked in. One rank's own group costs O(group size), whatever the
/// size of the grid.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grid {
    axes: Vec<GridAxis>,
    offset: u32,
    size: u32,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct GridAxis {
    axis: Axis,
    size: u32,
    stride: u32,
}

/// A set of one grid's axes, checked against it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AxisMask(u64);

/// The group that one rank is in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OwnGroup {
    /// Which of the groups of the same key it is, by smallest rank from 0.
    pub index: u32,
    /// All members, in group order.
    pub members: Arc<[GlobalRank]>,
    /// The rank's own place in `members`.
    pub position: GroupRank,
}

impl OwnGroup {
    /// Number of members.
    #[must_use]
    pub fn size(&self) -> u32 {
        // A member list never holds more ranks than a world, which is counted in u32.
        self.members.len() as u32
    }
}

impl Grid {
    /// Lays `axes` (name, size), fastest first, over ranks from `offset` on, in a world of `world_size` ranks.
    ///
    /// # Errors
    /// [`PlanError::DuplicateAxis`], [`PlanError::ZeroSize`], [`PlanError::TooManyAxes`], and
    /// [`PlanError::GridOutsideWorld`] if `offset` plus the product of the sizes is above `world_size`.
    pub fn new(axes: &[(Axis, u32)], offset: GlobalRank, world_size: u32) -> Result<Grid, PlanError> {
        let names: Vec<Axis> = axes.iter().map(|(axis, _)| axis.clone()).collect();
        refuse_repeats(&names, "the grid")?;
        if axes.len() > MAX_AXES {
            return Err(PlanError::TooManyAxes { got: axes.len(), most: MAX_AXES });
        }
        if let Some((axis, _)) = axes.iter().find(|(_, size)| *size == 0) {
            return Err(PlanError::ZeroSize { axis: axis.clone() });
        }
        let size = product(axes.iter().map(|&(_, size)| size));
        if u128::from(offset.0) + size > u128::from(world_size) {
            return Err(PlanError::GridOutsideWorld {
                sizes: describe(axes),
                size,
                offset,
                world_size,
                largest: world_size.saturating_sub(offset.0),
            });
        }
        let mut stride = 1;
        let laid_out = axes
            .iter()
            .map(|(axis, size)| {
                let laid = GridAxis { axis: axis.clone(), size: *size, stride };
                stride *= size;
                laid
            })
            .collect();
        Ok(Grid { axes: laid_out, offset: offset.0, size: stride })
    }

    /// Number of ranks on the grid.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// The first rank on the grid.
    #[must_use]
    pub fn offset(&self) -> GlobalRank {
        GlobalRank(self.offset)
    }

    /// Axes with their sizes, fastest first.
    pub fn axes(&self) -> impl ExactSizeIterator<Item = (&Axis, u32)> {
        self.axes.iter().map(|a| (&a.axis, a.size))
    }

    /// The size of an axis; none if the grid does not have it.
    #[must_use]
    pub fn axis_size(&self, axis: &Axis) -> Option<u32> {
        self.find(axis).map(|a| a.size)
    }

    /// Whether a rank lies on the grid.
    #[must_use]
    pub fn contains(&self, rank: GlobalRank) -> bool {
        self.local(rank).is_some()
    }

    /// A rank's coordinate along an axis; none if the rank is outside or the axis is not on the grid.
    #[must_use]
    pub fn coordinate(&self, rank: GlobalRank, axis: &Axis) -> Option<u32> {
        let local = self.local(rank)?;
        self.find(axis).map(|a| local / a.stride % a.size)
    }

    /// All groups of a set of axes, by smallest rank.
    ///
    /// # Errors
    /// [`PlanError::UnknownAxis`] or [`PlanError::DuplicateAxis`].
    pub fn groups(&self, axes: &[Axis]) -> Result<Vec<Vec<GlobalRank>>, PlanError> {
        let mask = self.mask(axes)?;
        Ok((0..self.group_count(mask)).map(|index| self.members(mask, index)).collect())
    }

    /// The group of a set of axes that `rank` is in; none if the rank is not on the grid.
    ///
    /// Costs O(group size): no other group is looked at.
    ///
    /// # Errors
    /// As [`Grid::groups`].
    pub fn own_group(&self, axes: &[Axis], rank: GlobalRank) -> Result<Option<OwnGroup>, PlanError> {
        let mask = self.mask(axes)?;
        Ok(self.place(mask, rank).map(|(index, position)| OwnGroup {
            index,
            members: self.members(mask, index).into(),
            position: GroupRank(position),
        }))
    }

    /// Checks a set of axes against the grid.
    pub(crate) fn mask(&self, axes: &[Axis]) -> Result<AxisMask, PlanError> {
        refuse_repeats(axes, "the requested group")?;
        let mut mask = 0;
        for axis in axes {
            let place = self.axes.iter().position(|a| a.axis == *axis);
            let place = place.ok_or_else(|| PlanError::UnknownAxis {
                axis: axis.clone(),
                known: join(self.axes.iter().map(|a| &a.axis), "-"),
            })?;
            mask |= 1 << place;
        }
        Ok(AxisMask(mask))
    }

    /// Members per group of a set of axes.
    pub(crate) fn group_size(&self, mask: AxisMask) -> u32 {
        self.inside(mask).map(|a| a.size).product()
    }

    pub(crate) fn group_count(&self, mask: AxisMask) -> u32 {
        self.size / self.group_size(mask)
    }

    /// Which group a rank is in, and its position there.
    pub(crate) fn place(&self, mask: AxisMask, rank: GlobalRank) -> Option<(u32, u32)> {
        let local = self.local(rank)?;
        let (mut index, mut index_unit) = (0, 1);
        let (mut position, mut position_unit) = (0, 1);
        for (i, a) in self.axes.iter().enumerate() {
            let coordinate = local / a.stride % a.size;
            if mask.has(i) {
                position += coordinate * position_unit;
                position_unit *= a.size;
            } else {
                index += coordinate * index_unit;
                index_unit *= a.size;
            }
        }
        Some((index, position))
    }

    /// The rank at one position of one group.
    pub(crate) fn rank_at(&self, mask: AxisMask, mut index: u32, mut position: u32) -> GlobalRank {
        let mut rank = self.offset;
        for (i, a) in self.axes.iter().enumerate() {
            let digits = if mask.has(i) { &mut position } else { &mut index };
            rank += *digits % a.size * a.stride;
            *digits /= a.size;
        }
        GlobalRank(rank)
    }

    /// All members of one group, in layout order.
    pub(crate) fn members(&self, mask: AxisMask, index: u32) -> Vec<GlobalRank> {
        let first = self.rank_at(mask, index, 0);
        let mut members = vec![first; self.group_size(mask) as usize];
        let mut laid = 1;
        // Slower axes repeat what the faster ones have laid down: additions only, no division per member.
        for a in self.inside(mask) {
            let (done, rest) = members.split_at_mut(laid);
            let copies = rest.chunks_exact_mut(laid).take(a.size as usize - 1);
            for (shift, copy) in (1..).map(|step| step * a.stride).zip(copies) {
                for (to, from) in copy.iter_mut().zip(&*done) {
                    *to = GlobalRank(from.0 + shift);
                }
            }
            laid *= a.size as usize;
        }
        members
    }

    /// The (stride, size) steps that make a set of axes' groups, joined where one continues the other.
    ///
    /// Two grids over the same ranks have equal groups for two sets exactly if these are equal.
    pub(crate) fn steps(&self, mask: AxisMask) -> Vec<(u32, u32)> {
        let mut steps: Vec<(u32, u32)> = Vec::new();
        for a in self.inside(mask).filter(|a| a.size > 1) {
            match steps.last_mut() {
                Some((stride, size)) if *stride * *size == a.stride => *size *= a.size,
                _ => steps.push((a.stride, a.size)),
            }
        }
        steps
    }

    /// A rank's distance along one axis, for placements that address ranks by coordinates.
    pub(crate) fn axis_stride(&self, axis: &Axis) -> Option<u32> {
        self.find(axis).map(|a| a.stride)
    }

    /// `tp2-gtp1-dp4`, for messages and dumps.
    pub(crate) fn describe(&self) -> String {
        let axes: Vec<(Axis, u32)> = self.axes().map(|(axis, n)| (axis.clone(), n)).collect();
        describe(&axes)
    }

    fn find(&self, axis: &Axis) -> Option<&GridAxis> {
        self.axes.iter().find(|a| a.axis == *axis)
    }

    fn inside(&self, mask: AxisMask) -> impl Iterator<Item = &GridAxis> {
        let axes = self.axes.iter().enumerate();
        axes.filter(move |(i, _)| mask.has(*i)).map(|(_, a)| a)
    }

    fn local(&self, rank: GlobalRank) -> Option<u32> {
        let local = rank.0.checked_sub(self.offset)?;
        (local < self.size).then_some(local)
    }
}

impl AxisMask {
    fn has(self, axis: usize) -> bool {
        self.0 >> axis & 1 == 1
    }
}

/// Sizes multiplied without overflow: a product that saturates is far above any world.
pub(crate) fn product(sizes: impl IntoIterator<Item = u32>) -> u128 {
    let sizes = sizes.into_iter();
    sizes.fold(1, |product, size| product.saturating_mul(u128::from(size)))
}

fn describe(axes: &[(Axis, u32)]) -> String {
    let parts: Vec<String> = axes.iter().map(|(axis, n)| format!("{axis}{n}")).collect();
    parts.join("-")
}
