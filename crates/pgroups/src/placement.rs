//! How a parameter's global tensor lies on a grid.

use std::sync::Arc;

use crate::{
    axis::{Axis, ParamClass},
    grid::Grid,
    init::{Init, InitStream, Seed},
    layout::Layout,
    plan_error::PlanError,
    shard_map::ShardMap,
};

/// A parameter before it has memory: everything but its dtype, which the buffer that holds it decides.
#[derive(Clone, PartialEq, Debug)]
pub struct ParamSpec {
    /// Its name: unique in the model, and part of what its initial values are drawn from.
    pub name: String,
    /// Which grid it lies on.
    pub class: ParamClass,
    /// How it lies there.
    pub placement: Placement,
    /// Its initial values.
    pub init: Init,
}

impl ParamSpec {
    /// Lays the parameter on its class's grid.
    ///
    /// # Errors
    /// Those of [`Placement::on`].
    pub fn shard_map(&self, layout: &Layout) -> Result<ShardMap, PlanError> {
        self.placement.on(layout.grid(self.class))
    }

    /// Its initial values under a seed.
    #[must_use]
    pub fn init_stream(&self, seed: Seed) -> InitStream {
        InitStream::new(seed, &self.name, self.init)
    }
}

/// How a global tensor lies on a grid: the axes that cut it, outer first, and where it is at all.
///
/// An axis that neither cuts nor pins holds replicas.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    /// The global shape, in elements.
    pub global: Vec<usize>,
    /// Outer cuts first: each cuts what the ones before it left of its dimension.
    pub cuts: Vec<Cut>,
    /// Axes of which only some coordinates hold the tensor, such as one pipeline stage.
    pub pins: Vec<Pin>,
}

/// One dimension cut over one axis.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cut {
    /// The dimension.
    pub dim: usize,
    /// The axis.
    pub axis: Axis,
    /// Elements: each block is padded to a multiple of alignment x axis size. 0: it has to divide exactly.
    pub alignment: usize,
    /// Equal blocks that the dimension is made of, such as 3 for queries, keys and values in one weight. Each is cut
    /// for itself, and a shard has its part of every block, one behind the other. More than 1 only in the first cut of
    /// a dimension.
    pub blocks: usize,
}

/// The coordinates of one axis that hold the tensor; the first of them owns it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pin {
    /// The axis.
    pub axis: Axis,
    /// The coordinates.
    pub at: Vec<u32>,
}

impl Placement {
    /// A tensor that every rank holds whole.
    #[must_use]
    pub fn whole(global: impl Into<Vec<usize>>) -> Placement {
        Placement { global: global.into(), cuts: Vec::new(), pins: Vec::new() }
    }

    /// Adds an inner cut.
    #[must_use]
    pub fn cut(self, dim: usize, axis: Axis, alignment: usize) -> Placement {
        self.cut_blocks(dim, axis, alignment, 1)
    }

    /// Adds a cut of each of a dimension's equal blocks, for the first cut of that dimension.
    #[must_use]
    pub fn cut_blocks(mut self, dim: usize, axis: Axis, alignment: usize, blocks: usize) -> Placement {
        self.cuts.push(Cut { dim, axis, alignment, blocks });
        self
    }

    /// Restricts the tensor to some coordinates of an axis.
    #[must_use]
    pub fn pin(mut self, axis: Axis, at: impl Into<Vec<u32>>) -> Placement {
        self.pins.push(Pin { axis, at: at.into() });
        self
    }

    /// Lays the tensor on a grid.
    ///
    /// # Errors
    /// [`PlanError::NoElements`] for a dimension of 0; [`PlanError::UnknownAxis`]; [`PlanError::AxisUsedTwice`];
    /// [`PlanError::NoSuchDim`]; [`PlanError::Uneven`] for alignment 0 and a dimension that does not divide;
    /// [`PlanError::UnevenBlocks`]; [`PlanError::InnerBlocks`]; [`PlanError::PaddingOverflow`]; [`PlanError::BadPin`].
    pub fn on(&self, grid: &Arc<Grid>) -> Result<ShardMap, PlanError> {
        ShardMap::new(self, grid)
    }
}

/// Pads `rows` to a multiple of `alignment x parts` and cuts it: rows per part, and rows of padding in all.
///
/// # Errors
/// [`PlanError::Uneven`] for alignment 0 and rows that do not divide, [`PlanError::PaddingOverflow`].
pub fn padded_cut(rows: usize, parts: u32, alignment: usize) -> Result<(usize, usize), PlanError> {
    cut_dim(0, rows, parts, alignment)
}

pub(crate) fn cut_dim(dim: usize, rows: usize, parts: u32, alignment: usize) -> Result<(usize, usize), PlanError> {
    let count = parts as usize;
    if alignment == 0 {
        if !rows.is_multiple_of(count) {
            return Err(PlanError::Uneven { dim, rows, parts, padded: rows.next_multiple_of(count) });
        }
        return Ok((rows / count, 0));
    }
    let unit = alignment.checked_mul(count);
    let padded = unit.and_then(|unit| rows.checked_next_multiple_of(unit));
    let padded = padded.ok_or(PlanError::PaddingOverflow { dim, rows, parts, alignment })?;
    Ok((padded / count, padded - rows))
}

/// Where one fragment of a tensor lies, when a dimension is said to be fragment `index` of `count`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fragment {
    /// The dimension.
    pub dim: usize,
    /// Which fragment, from 0.
    pub index: usize,
    /// Out of how many.
    pub count: usize,
}

/// A local shape set into the global one by fragments.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fragments {
    /// The global shape, padding included.
    pub global: Vec<usize>,
    /// The local tensor's first element.
    pub offset: Vec<usize>,
    /// Fragments along each dimension.
    pub counts: Vec<usize>,
}

impl Fragments {
    /// Sets `local` into the tensor whose dimensions the fragments cut; others are whole.
    ///
    /// # Errors
    /// [`PlanError::NoSuchDim`], [`PlanError::BadFragment`] unless index < count, also for the same dimension twice.
    ///
    /// Source: Megatron-LM, `dist_checkpointing.ShardedTensor.from_rank_offsets` (behaviour only).
    pub fn new(local: &[usize], fragments: &[Fragment]) -> Result<Fragments, PlanError> {
        let mut placed =
            Fragments { global: local.to_vec(), offset: vec![0; local.len()], counts: vec![1; local.len()] };
        for (i, fragment) in fragments.iter().enumerate() {
            let Fragment { dim, index, count } = *fragment;
            if dim >= local.len() {
                return Err(PlanError::NoSuchDim { dim, dims: local.len() });
            }
            let repeated = fragments[..i].iter().any(|earlier| earlier.dim == dim);
            if index >= count || repeated {
                return Err(PlanError::BadFragment { dim, index, count });
            }
            placed.global[dim] = local[dim] * count;
            placed.offset[dim] = local[dim] * index;
            placed.counts[dim] = count;
        }
        Ok(placed)
    }
}
