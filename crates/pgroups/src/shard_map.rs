//! A placement on a grid: who holds which elements.

use std::{ops::Range, sync::Arc};

use crate::{
    axis::{Axis, join},
    grid::Grid,
    placement::{Cut, Placement, cut_dim},
    plan_error::PlanError,
    rank::GlobalRank,
};

/// A parameter laid on a grid. Every element has exactly one owner; the other holders are its replicas.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShardMap {
    grid: Arc<Grid>,
    global: Vec<usize>,
    local: Vec<usize>,
    fragments: Vec<usize>,
    cuts: Vec<CutStep>,
    free: Vec<FreeAxis>,
}

/// One cut: of each block of `block` elements `parts` pieces of `len`, a piece per coordinate of an axis.
#[derive(Clone, PartialEq, Eq, Debug)]
struct CutStep {
    dim: usize,
    parts: u32,
    stride: u32,
    block: usize,
    len: usize,
}

impl CutStep {
    fn new(cut: &Cut, size: usize, is_first: bool, grid: &Grid) -> Result<CutStep, PlanError> {
        let &Cut { dim, alignment, blocks, .. } = cut;
        if blocks != 1 && !is_first {
            return Err(PlanError::InnerBlocks { dim, axis: cut.axis.clone(), blocks });
        }
        if blocks == 0 || !size.is_multiple_of(blocks) {
            return Err(PlanError::UnevenBlocks { dim, rows: size, blocks });
        }
        let (parts, stride) = extent(grid, &cut.axis)?;
        let block = size / blocks;
        let (len, _) = cut_dim(dim, block, parts, alignment)?;
        Ok(CutStep { dim, parts, stride, block, len })
    }

    /// What piece `part` of each block has of `spans`, which are of what is cut.
    fn piece(&self, spans: &[Span], part: usize) -> Vec<Span> {
        let mut held = Vec::new();
        for span in spans {
            // A span of what an earlier cut left may lie in one block only: that is the whole of it.
            for block in span.local.start / self.block..span.local.end.div_ceil(self.block) {
                let first = block * self.block + part * self.len;
                let end = (first + self.len).min((block + 1) * self.block).min(span.local.end);
                let start = first.max(span.local.start);
                if start < end {
                    let global = span.global.start + (start - span.local.start);
                    let local = block * self.len + (start - first);
                    held.push(Span { global: global..global + (end - start), local: local..local + (end - start) });
                }
            }
        }
        held
    }
}

/// An axis that does not cut: its coordinates hold replicas.
#[derive(Clone, PartialEq, Eq, Debug)]
struct FreeAxis {
    axis: Axis,
    size: u32,
    stride: u32,
    /// The coordinates that hold the tensor; none: all.
    pinned: Option<Vec<u32>>,
}

impl FreeAxis {
    fn copies(&self) -> u32 {
        // A pin lists distinct coordinates of the axis, so no more than its size.
        self.pinned.as_ref().map_or(self.size, |at| at.len() as u32)
    }

    fn coordinate(&self, copy: u32) -> u32 {
        self.pinned.as_ref().map_or(copy, |at| at[copy as usize])
    }

    /// Which copy a rank holds; none if it holds none.
    fn copy_at(&self, local_rank: u32) -> Option<u32> {
        let coordinate = local_rank / self.stride % self.size;
        match &self.pinned {
            None => Some(coordinate),
            Some(at) => at.iter().zip(0..).find(|(c, _)| **c == coordinate).map(|(_, i)| i),
        }
    }
}

/// What one rank holds of a parameter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shard {
    /// Its place among the fragments along each dimension; of nested cuts the inner one varies fastest.
    pub chunk: Vec<usize>,
    /// The first element in the padded tensor that all shards, one behind the other, make: `chunk` x local shape. What
    /// checkpoints store. Where a dimension is cut block by block, this tensor has its elements in another order than
    /// the global one.
    pub offset: Vec<usize>,
    /// Its elements of the true global tensor along each dimension, in ascending order: one span, or one of each
    /// block; none where there is only padding. The rest of the local shape is padding.
    pub region: Vec<Vec<Span>>,
    /// Which copy it is.
    pub replica: Replica,
}

/// A run of indices along one dimension: in the global tensor, and where it lies in the shard. Of equal length.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Span {
    /// In the true global tensor.
    pub global: Range<usize>,
    /// In the local shape.
    pub local: Range<usize>,
}

/// Which copy of its elements a rank holds; all zero on the owner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Replica {
    /// Over `pp`.
    pub pipeline: u32,
    /// Over `tp` and `gtp` as far as they do not cut, `gtp` fastest.
    pub model: u32,
    /// Over every other axis.
    pub data: u32,
}

impl Replica {
    /// Whether this copy is the owner's.
    #[must_use]
    pub fn is_owner(self) -> bool {
        (self.pipeline, self.model, self.data) == (0, 0, 0)
    }
}

impl Shard {
    /// Whether the rank owns its elements.
    #[must_use]
    pub fn is_owner(&self) -> bool {
        self.replica.is_owner()
    }

    /// The number of its elements, padding left out.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.region.iter().map(|spans| spans.iter().map(|span| span.global.len()).sum::<usize>()).product()
    }

    /// Calls `visit` with every contiguous run of its elements: global and local row-major indices, both ascending.
    pub fn each_run(&self, map: &ShardMap, mut visit: impl FnMut(Range<u64>, Range<usize>)) {
        self.runs_below(map, 0, (0, 0), &mut visit);
    }

    /// The runs of one row of the outer dimensions, whose global and local row-major index is `at`.
    fn runs_below(
        &self,
        map: &ShardMap,
        dim: usize,
        at: (u64, usize),
        visit: &mut impl FnMut(Range<u64>, Range<usize>),
    ) {
        let Some(spans) = self.region.get(dim) else { return visit(at.0..at.0 + 1, at.1..at.1 + 1) };
        let is_last = dim + 1 == self.region.len();
        let start = (at.0 * map.global[dim] as u64, at.1 * map.local[dim]);
        for span in spans {
            let (global, local) = (start.0 + span.global.start as u64, start.1 + span.local.start);
            let len = span.global.len();
            if is_last {
                visit(global..global + len as u64, local..local + len);
                continue;
            }
            (0..len).for_each(|step| self.runs_below(map, dim + 1, (global + step as u64, local + step), visit));
        }
    }
}

impl ShardMap {
    pub(crate) fn new(placement: &Placement, grid: &Arc<Grid>) -> Result<ShardMap, PlanError> {
        let dims = placement.global.len();
        if let Some(dim) = placement.global.iter().position(|&n| n == 0) {
            return Err(PlanError::NoElements { dim });
        }
        let mut map = ShardMap {
            grid: Arc::clone(grid),
            global: placement.global.clone(),
            local: placement.global.clone(),
            fragments: vec![1; dims],
            cuts: Vec::new(),
            free: Vec::new(),
        };
        check_axes(placement, grid)?;
        for cut in &placement.cuts {
            if cut.dim >= dims {
                return Err(PlanError::NoSuchDim { dim: cut.dim, dims });
            }
            let is_first = map.cuts.iter().all(|earlier| earlier.dim != cut.dim);
            let step = CutStep::new(cut, map.local[cut.dim], is_first, grid)?;
            map.local[cut.dim] = cut.blocks * step.len;
            map.fragments[cut.dim] *= step.parts as usize;
            map.cuts.push(step);
        }
        for (axis, size) in grid.axes() {
            if placement.cuts.iter().any(|cut| cut.axis == *axis) {
                continue;
            }
            let pin = placement.pins.iter().find(|pin| pin.axis == *axis);
            let (_, stride) = extent(grid, axis)?;
            map.free.push(FreeAxis { axis: axis.clone(), size, stride, pinned: pin.map(|pin| pin.at.clone()) });
        }
        Ok(map)
    }

    /// The global shape, without padding.
    #[must_use]
    pub fn global_shape(&self) -> &[usize] {
        &self.global
    }

    /// The shape that every holder has, padding included.
    #[must_use]
    pub fn local_shape(&self) -> &[usize] {
        &self.local
    }

    /// Fragments along each dimension.
    #[must_use]
    pub fn fragments(&self) -> &[usize] {
        &self.fragments
    }

    /// The global shape with all padding: fragments x local shape.
    #[must_use]
    pub fn padded_shape(&self) -> Vec<usize> {
        let dims = self.fragments.iter().zip(&self.local);
        dims.map(|(count, len)| count * len).collect()
    }

    /// Copies of every element, the owner's included.
    #[must_use]
    pub fn copies(&self) -> u32 {
        self.free.iter().map(FreeAxis::copies).product()
    }

    /// What a rank holds; none if it is outside the grid or at a coordinate that holds nothing.
    #[must_use]
    pub fn shard(&self, rank: GlobalRank) -> Option<Shard> {
        if !self.grid.contains(rank) {
            return None;
        }
        let local_rank = rank.0 - self.grid.offset().0;
        let replica = self.replica(local_rank)?;
        let mut chunk = vec![0; self.global.len()];
        let whole = self.global.iter().map(|&n| vec![Span { global: 0..n, local: 0..n }]);
        let mut region: Vec<Vec<Span>> = whole.collect();
        for cut in &self.cuts {
            let part = (local_rank / cut.stride % cut.parts) as usize;
            chunk[cut.dim] = chunk[cut.dim] * cut.parts as usize + part;
            region[cut.dim] = cut.piece(&region[cut.dim], part);
        }
        let offset = chunk.iter().zip(&self.local).map(|(c, len)| c * len);
        Some(Shard { offset: offset.collect(), region, chunk, replica })
    }

    /// The one owner of an element.
    ///
    /// # Errors
    /// [`PlanError::OutsideTensor`].
    pub fn owner(&self, index: &[usize]) -> Result<GlobalRank, PlanError> {
        let first = self.first_holder(index)?;
        let pinned = self.free.iter().map(|a| a.coordinate(0) * a.stride);
        Ok(GlobalRank(first + pinned.sum::<u32>()))
    }

    /// Every rank that holds an element, the owner first.
    ///
    /// # Errors
    /// [`PlanError::OutsideTensor`].
    pub fn holders(&self, index: &[usize]) -> Result<Vec<GlobalRank>, PlanError> {
        let mut holders = vec![GlobalRank(self.first_holder(index)?)];
        for axis in &self.free {
            let steps = 0..axis.copies();
            let shifts = steps.map(|copy| axis.coordinate(copy) * axis.stride);
            holders = shifts.flat_map(|shift| holders.iter().map(move |rank| GlobalRank(rank.0 + shift))).collect();
        }
        Ok(holders)
    }

    /// The holder with coordinate 0 on every axis that does not cut.
    fn first_holder(&self, index: &[usize]) -> Result<u32, PlanError> {
        let inside = index.iter().zip(&self.global).all(|(i, n)| i < n);
        if index.len() != self.global.len() || !inside {
            return Err(PlanError::OutsideTensor { index: index.to_vec(), shape: self.global.clone() });
        }
        let mut rest = index.to_vec();
        let mut rank = self.grid.offset().0;
        for cut in &self.cuts {
            let (block, within) = (rest[cut.dim] / cut.block, rest[cut.dim] % cut.block);
            // Inside the block, so below `parts`, which is a u32.
            rank += (within / cut.len) as u32 * cut.stride;
            rest[cut.dim] = block * cut.len + within % cut.len;
        }
        Ok(rank)
    }

    fn replica(&self, local_rank: u32) -> Option<Replica> {
        let mut replica = Replica { pipeline: 0, model: 0, data: 0 };
        let mut data_unit = 1;
        for axis in &self.free {
            let copy = axis.copy_at(local_rank)?;
            if axis.axis == Axis::PP {
                replica.pipeline = copy;
            } else if axis.axis != Axis::TP && axis.axis != Axis::GTP {
                replica.data += copy * data_unit;
                data_unit *= axis.copies();
            }
        }
        for name in [Axis::TP, Axis::GTP] {
            if let Some(axis) = self.free.iter().find(|a| a.axis == name) {
                replica.model = replica.model * axis.copies() + axis.copy_at(local_rank)?;
            }
        }
        Some(replica)
    }
}

fn extent(grid: &Grid, axis: &Axis) -> Result<(u32, u32), PlanError> {
    let found = grid.axis_size(axis).zip(grid.axis_stride(axis));
    found.ok_or_else(|| PlanError::UnknownAxis {
        axis: axis.clone(),
        known: join(grid.axes().map(|(axis, _)| axis), "-"),
    })
}

/// An axis cuts once or pins once: twice would give one rank two different pieces.
fn check_axes(placement: &Placement, grid: &Grid) -> Result<(), PlanError> {
    let cut = placement.cuts.iter().map(|cut| &cut.axis);
    let axes: Vec<&Axis> = cut.chain(placement.pins.iter().map(|p| &p.axis)).collect();
    for (i, axis) in axes.iter().enumerate() {
        if axes[..i].contains(axis) {
            return Err(PlanError::AxisUsedTwice { axis: (*axis).clone() });
        }
    }
    for pin in &placement.pins {
        let (size, _) = extent(grid, &pin.axis)?;
        let distinct = pin.at.iter().enumerate().all(|(i, c)| !pin.at[..i].contains(c));
        if pin.at.is_empty() || !distinct || pin.at.iter().any(|&c| c >= size) {
            return Err(PlanError::BadPin { axis: pin.axis.clone(), at: pin.at.clone(), size });
        }
    }
    Ok(())
}
