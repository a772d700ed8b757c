//! What planning can refuse, one variant per cause.

use std::ops::Range;

use thiserror::Error;

use crate::{
    axis::Axis,
    keys::Key,
    plan::WhyEmpty,
    rank::GlobalRank,
    views::{ViewKey, ViewName},
    violation::{LayoutViolation, Steps, Violations},
};

/// What planning refuses: nothing has been created yet when it is told.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A layout that breaks rules; all of them are listed.
    #[error("layout refused: {violations}")]
    Layout {
        /// The broken rules.
        violations: Violations,
    },
    /// A name with characters that order strings, keys or layout texts use.
    #[error("'{name}' names {what}: wanted a lower-case letter, then lower-case letters, digits or '_'")]
    BadName {
        /// What it was to name.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// An axis twice in a list.
    #[error("axis '{axis}' is twice in {whose} '{list}': name it once")]
    DuplicateAxis {
        /// The axis.
        axis: Axis,
        /// The list.
        list: String,
        /// Whose list it is.
        whose: &'static str,
    },
    /// An axis of size 0.
    #[error("axis '{axis}' has size 0: a size is at least 1")]
    ZeroSize {
        /// The axis.
        axis: Axis,
    },
    /// More axes than a grid can have.
    #[error("{got} axes: a grid has at most {most}; leave out axes of size 1")]
    TooManyAxes {
        /// Axes asked for.
        got: usize,
        /// The limit.
        most: usize,
    },
    /// A grid that reaches beyond the world.
    #[error(
        "grid {sizes} has {size} ranks from rank {offset} on, the world has {world_size}: \
         at most {largest} ranks fit there"
    )]
    GridOutsideWorld {
        /// Axes with their sizes.
        sizes: String,
        /// Their product.
        size: u128,
        /// The first rank.
        offset: GlobalRank,
        /// Ranks in the world.
        world_size: u32,
        /// Ranks from the offset to the end of the world.
        largest: u32,
    },
    /// An axis that the grid does not have.
    #[error("axis '{axis}' is not on the grid '{known}' (names are compared whole)")]
    UnknownAxis {
        /// The axis.
        axis: Axis,
        /// The grid's axes.
        known: String,
    },
    /// A view name that is taken.
    #[error("view '{view}' is registered twice: take another name")]
    ViewTwice {
        /// The name.
        view: ViewName,
    },
    /// A view of another number of ranks.
    #[error("view '{view}' has {product} ranks, the base grid {base}: the products are equal")]
    ViewSize {
        /// The view.
        view: ViewName,
        /// The product of its sizes.
        product: u128,
        /// Ranks on the base grid.
        base: u32,
    },
    /// A view that was not registered.
    #[error("view '{view}' is not registered; there are {known}")]
    UnknownView {
        /// The view.
        view: ViewName,
        /// Known views.
        known: String,
    },
    /// A shared axis that one of the two grids lacks.
    #[error("view '{view}' shares axis '{axis}', which '{missing_in}' does not have")]
    SharedAxisMissing {
        /// The axis.
        axis: Axis,
        /// The view that declares it.
        view: ViewName,
        /// The grid without it.
        missing_in: ViewName,
    },
    /// A shared axis with other members in the view than in the base.
    #[error(
        "view '{view}' shares axis '{axis}', but its groups are {view_steps} and the base's {base_steps}: \
         they have to have the same members"
    )]
    SharedAxisDiffers {
        /// The axis.
        axis: Axis,
        /// The view.
        view: ViewName,
        /// How the base's groups step through the ranks.
        base_steps: Steps,
        /// How the view's groups do.
        view_steps: Steps,
    },
    /// A group created a second time.
    #[error("group '{key}' is created twice: keep the first, options could differ")]
    CreatedTwice {
        /// The group.
        key: ViewKey,
    },
    /// A group read before it was created.
    #[error("group '{key}' is read before it was created")]
    NotCreated {
        /// The group.
        key: ViewKey,
    },
    /// A key over no axes.
    #[error("a key over no axes of view '{view}': name at least one axis")]
    KeyWithoutAxes {
        /// The view.
        view: ViewName,
    },
    /// A level that the context hierarchy does not have.
    #[error("context level {level}: the layout's levels are 1..={}, with sizes {levels:?}", levels.len())]
    NoSuchLevel {
        /// The level asked for.
        level: u32,
        /// Level sizes.
        levels: Vec<u32>,
    },
    /// A slice size that does not cut the data-and-context group.
    #[error("slices of {size} of dp x cp: the layout allows {sizes:?}")]
    NoSuchDynamicSize {
        /// The size asked for.
        size: u32,
        /// Sizes that do.
        sizes: Vec<u32>,
    },
    /// A name that is neither standard nor declared.
    #[error("group '{key}' is unknown: it is no standard key and no members were given for it; known here: {known}")]
    UnknownKey {
        /// The key.
        key: Key,
        /// Keys of the plan.
        known: String,
    },
    /// A key supplied in two ways.
    #[error("group '{key}' is supplied twice: once with members or as none is enough")]
    SuppliedTwice {
        /// The key.
        key: Key,
    },
    /// A custom group without members.
    #[error("custom group '{key}', list {index}, has no members: leave the list out, or supply the key as none")]
    NoMembers {
        /// The key.
        key: Key,
        /// Which list.
        index: usize,
    },
    /// A rank twice under one key.
    #[error("custom group '{key}': rank {rank} is in lists {first} and {second}, and can be in one place of one only")]
    MemberTwice {
        /// The key.
        key: Key,
        /// The rank.
        rank: GlobalRank,
        /// The earlier list.
        first: usize,
        /// The later list.
        second: usize,
    },
    /// A rank that the world does not have.
    #[error("{what} is {rank}, the world's ranks are 0..{world_size}")]
    RankOutsideWorld {
        /// What the rank is.
        what: &'static str,
        /// The rank.
        rank: GlobalRank,
        /// Ranks in the world.
        world_size: u32,
    },
    /// A group that a component needs and nobody supplied.
    #[error("{needed_by} needs group '{key}', which was not supplied (supplied: {supplied}): add it to the needs")]
    MissingGroup {
        /// The group.
        key: Key,
        /// Who needs it.
        needed_by: &'static str,
        /// What was supplied.
        supplied: String,
    },
    /// Several groups that a component needs and nobody supplied.
    #[error("{needed_by} needs groups {keys}, which were not supplied (supplied: {supplied}): add them to the needs")]
    MissingGroups {
        /// The groups.
        keys: String,
        /// Who needs them.
        needed_by: &'static str,
        /// What was supplied.
        supplied: String,
    },
    /// A group that a component needs and that is empty here.
    #[error("{needed_by} on rank {rank} needs group '{key}', but {why}")]
    EmptyGroup {
        /// The group.
        key: Key,
        /// Who needs it.
        needed_by: &'static str,
        /// The rank.
        rank: GlobalRank,
        /// Why there is none.
        why: WhyEmpty,
    },
    /// Two ranks with different plans.
    #[error(
        "plans differ in line {line}: rank {rank} has '{ours}', rank {other} has '{theirs}': \
         layout and needs are to be the same on every rank"
    )]
    PlansDiffer {
        /// The first line that differs; 0 is the layout.
        line: usize,
        /// This rank.
        rank: GlobalRank,
        /// Its line.
        ours: String,
        /// The other rank.
        other: GlobalRank,
        /// Its line.
        theirs: String,
    },
    /// Two modules of one name.
    #[error("module '{name}' is named twice")]
    ModuleTwice {
        /// The name.
        name: String,
    },
    /// Two language modules.
    #[error("modules '{first}' and '{second}' are both the language module: at most one is")]
    TwoLanguageModules {
        /// The earlier one.
        first: String,
        /// The later one.
        second: String,
    },
    /// A module that does not exist.
    #[error("module '{name}' has no groups; there are {known}")]
    UnknownModule {
        /// The name.
        name: String,
        /// Names there are.
        known: String,
    },
    /// No language module where one is needed.
    #[error("no language module was designated among {known}")]
    NoLanguageModule {
        /// Names there are.
        known: String,
    },
    /// Weight shards that the tensor size does not divide.
    #[error("{shards} weight shards with tp = {tp}: shards are a multiple of tp; nearest: {nearest}")]
    WeightShards {
        /// Shards in all.
        shards: u32,
        /// Tensor size.
        tp: u32,
        /// The next multiple.
        nearest: u32,
    },
    /// A dimension without elements.
    #[error("dimension {dim} of the global shape is 0: a parameter has elements")]
    NoElements {
        /// The dimension.
        dim: usize,
    },
    /// A dimension that the tensor does not have.
    #[error("dimension {dim} of a tensor with {dims} dimensions")]
    NoSuchDim {
        /// The dimension.
        dim: usize,
        /// How many there are.
        dims: usize,
    },
    /// A dimension that does not divide and may not be padded.
    #[error(
        "dimension {dim} has {rows} elements over {parts} parts and alignment 0 allows no padding: \
         make it {padded}, or set an alignment"
    )]
    Uneven {
        /// The dimension.
        dim: usize,
        /// Its elements.
        rows: usize,
        /// Parts.
        parts: u32,
        /// The next number that divides.
        padded: usize,
    },
    /// A dimension that is not made of the equal blocks that its cut names.
    #[error(
        "dimension {dim} has {rows} elements, which are not {blocks} equal blocks of at least one: \
         make it a multiple of {}", .blocks.max(&1)
    )]
    UnevenBlocks {
        /// The dimension.
        dim: usize,
        /// Its elements.
        rows: usize,
        /// Blocks.
        blocks: usize,
    },
    /// Blocks in a cut of what another cut left.
    #[error(
        "axis '{axis}' cuts dimension {dim} in {blocks} blocks behind another cut of it: \
         only the first cut of a dimension sees its blocks, so put it there"
    )]
    InnerBlocks {
        /// The dimension.
        dim: usize,
        /// The axis.
        axis: Axis,
        /// Blocks.
        blocks: usize,
    },
    /// Padding beyond what memory can hold.
    #[error(
        "dimension {dim} with {rows} elements, padded to alignment {alignment} x {parts} parts, is too large: lower the alignment"
    )]
    PaddingOverflow {
        /// The dimension.
        dim: usize,
        /// Its elements.
        rows: usize,
        /// Parts.
        parts: u32,
        /// The alignment.
        alignment: usize,
    },
    /// An axis that cuts or pins twice.
    #[error("axis '{axis}' cuts or pins the parameter twice: a rank has one piece per axis")]
    AxisUsedTwice {
        /// The axis.
        axis: Axis,
    },
    /// A pin that names no, a repeated or an impossible coordinate.
    #[error("pinned to {at:?} of axis '{axis}': coordinates are distinct, at least one, and in 0..{size}")]
    BadPin {
        /// The axis.
        axis: Axis,
        /// The coordinates.
        at: Vec<u32>,
        /// The axis size.
        size: u32,
    },
    /// A fragment that cannot be.
    #[error("fragment {index} of {count} in dimension {dim}: the index is below the count, a dimension is cut once")]
    BadFragment {
        /// The dimension.
        dim: usize,
        /// Which fragment.
        index: usize,
        /// Out of how many.
        count: usize,
    },
    /// An index beyond the tensor.
    #[error("element {index:?} of a tensor of shape {shape:?}")]
    OutsideTensor {
        /// The index.
        index: Vec<usize>,
        /// The global shape.
        shape: Vec<usize>,
    },
    /// A rank that holds nothing of a parameter.
    #[error("rank {rank} holds nothing of the parameter: ask its shard map first")]
    NoShard {
        /// The rank.
        rank: GlobalRank,
    },
    /// A buffer of another size than the shard.
    #[error("rank {rank}: the buffer has {got} elements, the shard {wanted} (local shape, padding included)")]
    ShardNumel {
        /// The rank.
        rank: GlobalRank,
        /// Elements of the buffer.
        got: usize,
        /// Elements of the shard.
        wanted: usize,
    },
    /// A variable that the launcher did not set.
    #[error("environment variable {variable} is not set: wanted a whole number in {}..={}", allowed.start, allowed.end - 1)]
    VariableMissing {
        /// The variable.
        variable: &'static str,
        /// The allowed range.
        allowed: Range<u32>,
    },
    /// A variable that is no allowed number.
    #[error("environment variable {variable} is '{value}': wanted a whole number in {}..={}", allowed.start, allowed.end - 1)]
    VariableUnreadable {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The allowed range.
        allowed: Range<u32>,
    },
    /// A rank announced by two processes.
    #[error("rank {rank} is announced by {first} and by {second}: each process has a RANK of its own")]
    RankTwice {
        /// The rank.
        rank: GlobalRank,
        /// The earlier process.
        first: String,
        /// The later process.
        second: String,
    },
    /// Ranks that nobody announced.
    #[error("ranks {missing:?} of a world of {world_size} were announced by nobody: start a process for each")]
    RanksMissing {
        /// The ranks.
        missing: Vec<u32>,
        /// Ranks in the world.
        world_size: u32,
    },
    /// Two ranks on one device.
    #[error(
        "ranks {first} and {second} both use device {device} of host '{host}': \
         set LOCAL_RANK apart, or allow sharing explicitly"
    )]
    DeviceShared {
        /// The host.
        host: String,
        /// The device.
        device: u32,
        /// One rank.
        first: GlobalRank,
        /// The other rank.
        second: GlobalRank,
    },
}

impl PlanError {
    pub(crate) fn layout(violations: Vec<LayoutViolation>) -> PlanError {
        PlanError::Layout { violations: Violations(violations) }
    }
}
