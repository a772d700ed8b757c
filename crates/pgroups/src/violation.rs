//! What can be wrong with a layout: each with the values, the rule, and the nearest setting that would do.

use std::fmt;

use thiserror::Error;

use crate::axis::{Axis, ParamClass};

/// One way in which a layout breaks a rule.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum LayoutViolation {
    /// A size of zero.
    #[error("{field} = 0: a size is at least 1; nearest: {field} = 1")]
    ZeroSize {
        /// The field.
        field: String,
    },
    /// A word of a layout text that is not `name=number`.
    #[error("'{word}': wanted name=number with a number in 1..=4294967295; nearest: {nearest}")]
    BadWord {
        /// The word.
        word: String,
        /// A word that would do.
        nearest: String,
    },
    /// A field set twice.
    #[error("{field} is set to {first} and to {second}: set it once; nearest: {field}={second}")]
    SetTwice {
        /// The field.
        field: String,
        /// The earlier value.
        first: u32,
        /// The later value.
        second: u32,
    },
    /// A user's axis with the name of something else.
    #[error("axis '{axis}' has a name that the layout uses itself; nearest: my_{axis}")]
    ReservedAxis {
        /// The axis.
        axis: Axis,
    },
    /// An axis above 1 that the order does not name as a whole token.
    #[error(
        "{axis} = {size}, but order '{order}' has no token '{axis}' (tokens are compared whole): \
         an axis above 1 has a place in the order; nearest: order '{nearest}' or {axis} = 1"
    )]
    AxisNotInOrder {
        /// The axis.
        axis: Axis,
        /// Its size.
        size: u32,
        /// The order.
        order: String,
        /// An order that would do.
        nearest: String,
    },
    /// A token of the order that is no standard axis and has no size.
    #[error(
        "order '{order}' names '{token}', which has no size and is no standard axis; \
         nearest: order '{nearest}' or {token}=1"
    )]
    TokenWithoutSize {
        /// The token.
        token: Axis,
        /// The order.
        order: String,
        /// An order that would do.
        nearest: String,
    },
    /// Context and expert parallelism in one grid.
    #[error(
        "cp = {cp} and ep = {ep} in one grid: the dense grid holds cp, the expert grid ep; nearest: cp = 1 or ep = 1"
    )]
    ContextAndExpert {
        /// Context size.
        cp: u32,
        /// Expert size.
        ep: u32,
    },
    /// The layout's ranks lie partly outside the world.
    #[error(
        "ranks {offset}..{end} of a world of {world_size}: a layout lies inside the world; \
         nearest: {nearest} ranks from {offset} on"
    )]
    OutsideWorld {
        /// First rank.
        offset: u32,
        /// One past the last rank.
        end: u64,
        /// World size.
        world_size: u32,
        /// Ranks from `offset` to the end of the world.
        nearest: u32,
    },
    /// The model does not fit the ranks a whole number of times.
    #[error(
        "{ranks} ranks, but {class} {axes} take {product}: ranks divide by their product; \
         nearest: {nearest} ranks"
    )]
    Indivisible {
        /// Dense or expert.
        class: ParamClass,
        /// The axes with their sizes.
        axes: String,
        /// Their product.
        product: u128,
        /// Number of ranks.
        ranks: u32,
        /// Numbers of ranks that would do.
        nearest: Nearest,
    },
    /// A replica count that the other sizes contradict.
    #[error(
        "{field} = {given}, but {ranks} ranks / {class} {axes} = {quotient} replicas: \
         replicas are the quotient; nearest: {field} = {quotient}"
    )]
    Replicas {
        /// `dp` or `expt_dp`.
        field: &'static str,
        /// Dense or expert.
        class: ParamClass,
        /// What was asked for.
        given: u32,
        /// What the other sizes leave.
        quotient: u32,
        /// The other axes with their sizes.
        axes: String,
        /// Number of ranks.
        ranks: u32,
    },
    /// Weight sharding together with several optimizer instances.
    #[error(
        "{field} = {size} with {instances} optimizer instances: weight shards need one instance; \
         nearest: optimizer_instances = 1 or {field} = 1"
    )]
    ShardedInstances {
        /// `gtp` or `egtp`.
        field: &'static str,
        /// Its size.
        size: u32,
        /// Optimizer instances.
        instances: u32,
    },
    /// Replicas that do not divide into optimizer instances.
    #[error(
        "{what} = {replicas} replicas over {instances} optimizer instances: replicas divide by the instances; \
         nearest: optimizer_instances = {nearest}"
    )]
    Instances {
        /// `dp x cp` or `expt_dp`.
        what: &'static str,
        /// Number of replicas.
        replicas: u32,
        /// Optimizer instances.
        instances: u32,
        /// The next lower number of instances that divides.
        nearest: u32,
    },
    /// Replica counts that move the stages apart because `pp` is not slowest.
    #[error(
        "dp = {dp} and expt_dp = {expt_dp} with order '{order}' and pp = {pp}: they are equal unless pp comes last; \
         nearest: order '{nearest}'"
    )]
    ReplicasBeforeStages {
        /// Dense replicas.
        dp: u32,
        /// Expert replicas.
        expt_dp: u32,
        /// Stages.
        pp: u32,
        /// The order.
        order: String,
        /// An order that would do.
        nearest: String,
    },
    /// Dense and expert grids with different pipelines.
    #[error(
        "order '{dense}' makes pipelines {dense_steps}, expert order '{expert}' makes {expert_steps}: \
         both grids have the same pipelines; nearest: pp last in both orders"
    )]
    PipelinesDiffer {
        /// Dense order.
        dense: String,
        /// Expert order.
        expert: String,
        /// Dense pipelines.
        dense_steps: Steps,
        /// Expert pipelines.
        expert_steps: Steps,
    },
    /// Levels of a hierarchy that do not multiply to the context size.
    #[error(
        "cp_levels {levels:?} multiply to {product}, but cp = {cp}: the levels make up cp; nearest: cp = {product}"
    )]
    ContextLevels {
        /// The level sizes, innermost first.
        levels: Vec<u32>,
        /// Their product.
        product: u128,
        /// Context size.
        cp: u32,
    },
    /// A stage selector that names a stage that does not exist, or one twice, or none.
    #[error(
        "{field} {stages:?} with pp = {pp}: stages are distinct and in 0..{pp}, at least one; nearest: {nearest:?}"
    )]
    Stages {
        /// `embedding_stages` or `position_stages`.
        field: &'static str,
        /// The selected stages.
        stages: Vec<u32>,
        /// Number of stages.
        pp: u32,
        /// A selection that would do.
        nearest: Vec<u32>,
    },
}

/// The settings on both sides of one that does not fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Nearest {
    /// The next lower one; none if there is none above zero.
    pub below: Option<u32>,
    /// The next higher one; none if it is above what a world can hold.
    pub above: Option<u32>,
}

impl Nearest {
    /// The multiples of `unit` around `value`.
    pub(crate) fn multiples(unit: u128, value: u32) -> Nearest {
        let fits = |n: u128| u32::try_from(n).ok().filter(|&n| n > 0);
        let below = u128::from(value) / unit * unit;
        Nearest { below: fits(below), above: fits(below + unit) }
    }
}

impl fmt::Display for Nearest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.below, self.above) {
            (Some(below), Some(above)) => write!(f, "{below} or {above}"),
            (Some(only), None) | (None, Some(only)) => write!(f, "{only}"),
            (None, None) => f.write_str("smaller sizes, since no world holds as many"),
        }
    }
}

/// How a group steps through the ranks: `(4 ranks, stride 2)`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Steps(pub(crate) Vec<(u32, u32)>);

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("(1 rank)");
        }
        for (i, (stride, size)) in self.0.iter().enumerate() {
            let gap = if i == 0 { "" } else { " x " };
            write!(f, "{gap}({size} ranks, stride {stride})")?;
        }
        Ok(())
    }
}

/// Every rule a layout breaks, in the order they were checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violations(pub Vec<LayoutViolation>);

impl fmt::Display for Violations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, violation) in self.0.iter().enumerate() {
            let gap = if i == 0 { "" } else { "; " };
            write!(f, "{gap}({}) {violation}", i + 1)?;
        }
        Ok(())
    }
}
