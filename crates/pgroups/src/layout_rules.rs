//! The rules of a layout. All are checked before anything is made, and every broken one is told.

use crate::{
    axis::{Axis, Order, ParamClass},
    grid::{Grid, product},
    layout::{Layout, LayoutConfig, WorldPart},
    plan_error::PlanError,
    views::{ViewName, Views},
    violation::{LayoutViolation, Nearest, Steps},
};

/// Megatron's order before `gtp` is put in its place, which differs between the two grids.
const BASE_ORDER: &str = "tp-cp-ep-dp-pp";

/// Names a layout uses itself.
const RESERVED: [&str; 6] = ["expt_tp", "egtp", "expt_dp", "instances", "offset", "ranks"];

pub(crate) fn check(config: &LayoutConfig) -> Result<Layout, PlanError> {
    let orders = Orders::parse(config)?;
    let mut violations = Vec::new();
    check_sizes_are_positive(config, &mut violations);
    check_own_axes(config, &mut violations);
    let extent = extent(config, &mut violations);
    let mut left = |class| extent.ranks.and_then(|ranks| replicas(config, class, ranks, &mut violations));
    let (dp, expt_dp) = (left(ParamClass::Dense), left(ParamClass::Expert));
    tell_the_dense_grid_alone(&mut violations);
    check_instances(config, dp, expt_dp, &mut violations);
    check_pp_last(config, &orders, dp, expt_dp, &mut violations);
    check_context_levels(config, &mut violations);
    let embedding_stages = config.embedding_stages.of(config.pp);
    let position_stages = config.position_stages.of(config.pp);
    check_stages("embedding_stages", &embedding_stages, config.pp, &mut violations);
    check_stages("position_stages", &position_stages, config.pp, &mut violations);

    let dense_sizes = dense_sizes(config, dp.unwrap_or(1));
    let dense_axes = orders.dense.sized(&dense_sizes, &mut violations);
    let expert_sizes = expert_sizes(config, expt_dp.unwrap_or(1));
    let expert_axes = orders.expert.sized(&expert_sizes, &mut violations);
    if !violations.is_empty() {
        return Err(PlanError::layout(violations));
    }

    let offset = config.part.offset();
    let dense = Grid::new(&dense_axes, offset, extent.world_size)?;
    let expert = Grid::new(&expert_axes, offset, extent.world_size)?;
    check_pipelines(&orders, &dense, &expert)?;
    let mut views = Views::new(dense, extent.world_size);
    views.register(ViewName::EXPERT, &expert_axes, &[Axis::PP])?;
    let mut view_names = vec![ViewName::DENSE, ViewName::EXPERT];
    for view in &config.views {
        views.register(view.name.clone(), &view.axes, &view.shared)?;
        view_names.push(view.name.clone());
    }
    Ok(Layout {
        world_size: extent.world_size,
        views,
        optimizer_instances: config.optimizer_instances,
        cp_levels: config.cp_levels.clone(),
        embedding_stages,
        position_stages,
        view_names,
    })
}

/// The orders of both grids, `gtp` in its place.
struct Orders {
    dense: Order,
    expert: Order,
}

impl Orders {
    fn parse(config: &LayoutConfig) -> Result<Orders, PlanError> {
        // The default names gtp, and an order that names gtp is left alone: taken literally it would put the
        // experts' shards where Megatron's default does not have them.
        let text = match config.order.as_str() {
            Order::DEFAULT => BASE_ORDER,
            other => other,
        };
        let dense = Order::parse(text)?;
        let expert = match &config.expert_order {
            Some(text) => Order::parse(text)?,
            None => dense.clone(),
        };
        let own: Vec<Axis> = config.own_axes.iter().map(|(a, _)| a.clone()).collect();
        Ok(Orders {
            dense: dense.with_shard_axis(ParamClass::Dense),
            expert: expert.without(&own).with_shard_axis(ParamClass::Expert),
        })
    }
}

fn dense_sizes(config: &LayoutConfig, dp: u32) -> Vec<(Axis, u32)> {
    let mut sizes = vec![
        (Axis::TP, config.tp),
        (Axis::PP, config.pp),
        (Axis::DP, dp),
        (Axis::EP, 1),
        (Axis::CP, config.cp),
        (Axis::GTP, config.gtp),
    ];
    sizes.extend(config.own_axes.iter().cloned());
    sizes
}

fn expert_sizes(config: &LayoutConfig, expt_dp: u32) -> Vec<(Axis, u32)> {
    vec![
        (Axis::TP, expt_tp(config)),
        (Axis::PP, config.pp),
        (Axis::DP, expt_dp),
        (Axis::EP, config.ep),
        (Axis::CP, 1),
        (Axis::GTP, config.egtp),
    ]
}

fn expt_tp(config: &LayoutConfig) -> u32 {
    config.expt_tp.unwrap_or(config.tp)
}

/// The axes of one copy of the model, with the names that the configuration gives them.
fn model_axes(config: &LayoutConfig, class: ParamClass) -> Vec<(&str, u32)> {
    match class {
        ParamClass::Dense => {
            let mut axes = vec![("tp", config.tp), ("gtp", config.gtp), ("cp", config.cp), ("pp", config.pp)];
            axes.extend(config.own_axes.iter().map(|(a, n)| (a.name(), *n)));
            axes
        }
        ParamClass::Expert => {
            vec![("expt_tp", expt_tp(config)), ("ep", config.ep), ("egtp", config.egtp), ("pp", config.pp)]
        }
    }
}

/// A size of zero is told once, by its own rule; the others go on as if it were one.
fn model_size(axes: &[(&str, u32)]) -> u128 {
    product(axes.iter().map(|&(_, n)| n.max(1)))
}

fn check_sizes_are_positive(config: &LayoutConfig, violations: &mut Vec<LayoutViolation>) {
    let mut fields = model_axes(config, ParamClass::Dense);
    fields.extend([("ep", config.ep), ("egtp", config.egtp), ("optimizer_instances", config.optimizer_instances)]);
    let optional = [
        ("world_size", config.world_size),
        ("dp", config.dp),
        ("expt_tp", config.expt_tp),
        ("expt_dp", config.expt_dp),
    ];
    fields.extend(optional.iter().filter_map(|&(f, n)| n.map(|n| (f, n))));
    fields.extend(config.cp_levels.iter().map(|&n| ("cp_levels", n)));
    if let WorldPart::From { ranks: Some(ranks), .. } = config.part {
        fields.push(("ranks", ranks));
    }
    let zeros = fields.iter().filter(|(_, n)| *n == 0);
    violations.extend(zeros.map(|(field, _)| LayoutViolation::ZeroSize { field: (*field).to_owned() }));
}

fn check_own_axes(config: &LayoutConfig, violations: &mut Vec<LayoutViolation>) {
    for (i, (axis, size)) in config.own_axes.iter().enumerate() {
        if axis.standard_position().is_some() || RESERVED.contains(&axis.name()) {
            violations.push(LayoutViolation::ReservedAxis { axis: axis.clone() });
        }
        if let Some((_, first)) = config.own_axes[..i].iter().find(|(a, _)| a == axis) {
            violations.push(LayoutViolation::SetTwice { field: axis.to_string(), first: *first, second: *size });
        }
    }
}

struct Extent {
    world_size: u32,
    /// None if no world holds as many, which is told.
    ranks: Option<u32>,
}

/// How many ranks the layout covers, out of how many.
fn extent(config: &LayoutConfig, violations: &mut Vec<LayoutViolation>) -> Extent {
    let offset = config.part.offset().0;
    let model = model_size(&model_axes(config, ParamClass::Dense));
    let taken = model.saturating_mul(u128::from(config.dp.unwrap_or(1).max(1)));
    let ranks = match (config.part, config.world_size) {
        (WorldPart::From { ranks: Some(ranks), .. }, _) => u128::from(ranks),
        (WorldPart::Whole, Some(world_size)) => u128::from(world_size),
        (WorldPart::From { .. }, Some(world_size)) if config.dp.is_none() => {
            u128::from(world_size.saturating_sub(offset))
        }
        _ => taken,
    };
    let end = ranks.saturating_add(u128::from(offset));
    let largest = config.world_size.unwrap_or(u32::MAX);
    if end > u128::from(largest) || ranks == 0 {
        violations.push(LayoutViolation::OutsideWorld {
            offset,
            end: u64::try_from(end).unwrap_or(u64::MAX),
            world_size: largest,
            nearest: largest.saturating_sub(offset),
        });
    }
    let clamp = |n: u128| u32::try_from(n).unwrap_or(u32::MAX);
    Extent { world_size: config.world_size.unwrap_or(clamp(end)), ranks: u32::try_from(ranks).ok() }
}

/// The replicas that the other sizes leave; none if they do not fit, which is told.
fn replicas(
    config: &LayoutConfig,
    class: ParamClass,
    ranks: u32,
    violations: &mut Vec<LayoutViolation>,
) -> Option<u32> {
    let axes = model_axes(config, class);
    let product = model_size(&axes);
    let named: Vec<String> = axes.iter().map(|(name, n)| format!("{name}={n}")).collect();
    let axes = named.join(" x ");
    if u128::from(ranks) % product != 0 || ranks == 0 {
        violations.push(LayoutViolation::Indivisible {
            class,
            axes,
            product,
            ranks,
            nearest: Nearest::multiples(product, ranks),
        });
        return None;
    }
    let quotient = (u128::from(ranks) / product) as u32; // at most `ranks`
    let (field, given) = match class {
        ParamClass::Dense => ("dp", config.dp),
        ParamClass::Expert => ("expt_dp", config.expt_dp),
    };
    if let Some(given) = given.filter(|&given| given != quotient && given != 0) {
        violations.push(LayoutViolation::Replicas { field, class, given, quotient, axes, ranks });
    }
    Some(quotient)
}

/// Ranks that divide by the dense product divide by an expert product that is part of it: one mistake is told once.
fn tell_the_dense_grid_alone(violations: &mut Vec<LayoutViolation>) {
    let dense = violations.iter().find_map(|violation| match violation {
        LayoutViolation::Indivisible { class: ParamClass::Dense, product, .. } => Some(*product),
        _ => None,
    });
    let Some(dense) = dense else { return };
    violations.retain(|violation| {
        !matches!(violation, LayoutViolation::Indivisible { class: ParamClass::Expert, product, .. }
            if dense.is_multiple_of(*product))
    });
}

fn check_instances(
    config: &LayoutConfig,
    dp: Option<u32>,
    expt_dp: Option<u32>,
    violations: &mut Vec<LayoutViolation>,
) {
    let instances = config.optimizer_instances;
    if instances <= 1 {
        return;
    }
    for (field, size) in [("gtp", config.gtp), ("egtp", config.egtp)] {
        if size > 1 {
            violations.push(LayoutViolation::ShardedInstances { field, size, instances });
        }
    }
    let dp_cp = dp.map(|dp| dp.saturating_mul(config.cp));
    for (what, replicas) in [("dp x cp", dp_cp), ("expt_dp", expt_dp)] {
        let Some(replicas) = replicas else { continue };
        if !replicas.is_multiple_of(instances) {
            let lower = (1..=instances).rev().find(|n| replicas.is_multiple_of(*n));
            violations.push(LayoutViolation::Instances { what, replicas, instances, nearest: lower.unwrap_or(1) });
        }
    }
}

fn check_pp_last(
    config: &LayoutConfig,
    orders: &Orders,
    dp: Option<u32>,
    expt_dp: Option<u32>,
    violations: &mut Vec<LayoutViolation>,
) {
    let (Some(dp), Some(expt_dp)) = (dp, expt_dp) else {
        return;
    };
    let last = |order: &Order| order.axes().last() == Some(&Axis::PP);
    let named = orders.dense.names(&Axis::PP) && orders.expert.names(&Axis::PP);
    if config.pp > 1 && named && dp != expt_dp && !(last(&orders.dense) && last(&orders.expert)) {
        violations.push(LayoutViolation::ReplicasBeforeStages {
            dp,
            expt_dp,
            pp: config.pp,
            order: orders.dense.to_string(),
            nearest: format!("{}-pp", orders.dense.without(&[Axis::PP])),
        });
    }
}

fn check_context_levels(config: &LayoutConfig, violations: &mut Vec<LayoutViolation>) {
    let product = product(config.cp_levels.iter().copied());
    if !config.cp_levels.is_empty() && product != u128::from(config.cp) {
        violations.push(LayoutViolation::ContextLevels { levels: config.cp_levels.clone(), product, cp: config.cp });
    }
}

fn check_stages(field: &'static str, stages: &[u32], pp: u32, violations: &mut Vec<LayoutViolation>) {
    let mut nearest: Vec<u32> = Vec::new();
    for &stage in stages {
        if stage < pp && !nearest.contains(&stage) {
            nearest.push(stage);
        }
    }
    if stages.is_empty() || nearest.len() != stages.len() {
        if nearest.is_empty() {
            nearest.push(0);
        }
        violations.push(LayoutViolation::Stages { field, stages: stages.to_vec(), pp, nearest });
    }
}

/// The stages of both grids are the same ranks, or an expert would sit on another stage than its layer.
fn check_pipelines(orders: &Orders, dense: &Grid, expert: &Grid) -> Result<(), PlanError> {
    let dense_steps = dense.steps(dense.mask(&[Axis::PP])?);
    let expert_steps = expert.steps(expert.mask(&[Axis::PP])?);
    if dense_steps == expert_steps {
        return Ok(());
    }
    Err(PlanError::layout(vec![LayoutViolation::PipelinesDiffer {
        dense: orders.dense.to_string(),
        expert: orders.expert.to_string(),
        dense_steps: Steps(dense_steps),
        expert_steps: Steps(expert_steps),
    }]))
}
