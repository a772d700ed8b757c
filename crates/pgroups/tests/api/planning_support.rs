//! Short forms for planning tests.

use pgroups::{Axis, GlobalRank, GroupsPlan, Key, Layout, LayoutConfig, Needs, PlanError};

pub(crate) type Lists = Vec<Vec<u32>>;

pub(crate) fn axis(name: &str) -> Axis {
    Axis::new(name).unwrap()
}

pub(crate) fn sized(axes: &[(&str, u32)]) -> Vec<(Axis, u32)> {
    axes.iter().map(|&(name, n)| (axis(name), n)).collect()
}

pub(crate) fn lists(groups: &[Vec<GlobalRank>]) -> Lists {
    let plain = |group: &Vec<GlobalRank>| group.iter().map(|rank| rank.0).collect();
    groups.iter().map(plain).collect()
}

pub(crate) fn ranks(list: &[u32]) -> Vec<GlobalRank> {
    list.iter().map(|&rank| GlobalRank(rank)).collect()
}

/// A layout from `tp=2,dp=2` in a world of `world` ranks.
pub(crate) fn layout(world: u32, text: &str) -> Layout {
    try_layout(world, text).unwrap()
}

pub(crate) fn try_layout(world: u32, text: &str) -> Result<Layout, PlanError> {
    Layout::new(&config(world, text))
}

pub(crate) fn config(world: u32, text: &str) -> LayoutConfig {
    LayoutConfig { world_size: Some(world), ..LayoutConfig::parse(text).unwrap() }
}

pub(crate) fn plan(layout: &Layout, keys: &[Key], rank: u32) -> GroupsPlan {
    GroupsPlan::new(layout, &Needs::keys(keys.iter().cloned()), GlobalRank(rank)).unwrap()
}

/// All groups of one key, as the plan creates them.
pub(crate) fn groups(layout: &Layout, key: Key) -> Lists {
    let plan = plan(layout, std::slice::from_ref(&key), 0);
    let made = plan.creation_order().map(|(_, _, members)| members);
    lists(&made.collect::<Vec<_>>())
}
