//! Laws that hold for every layout.

use std::collections::BTreeSet;

use pgroups::{Axis, GlobalRank, GroupsPlan, Key, Layout, LayoutConfig, Needs, ParamClass, Standard, groups_report};
use proptest::prelude::*;

use crate::planning_support::{axis, lists};

/// Layouts whose grids agree: all axes, expert sizes that multiply to the dense ones, any order with `pp` last.
fn layouts() -> impl Strategy<Value = LayoutConfig> {
    let sizes = (1u32..4, 1u32..4, prop::collection::vec(1u32..3, 3), 1u32..4, 1u32..4);
    let order = Just(vec!["tp", "gtp", "cp", "ep", "dp"]).prop_shuffle();
    (sizes, order, any::<bool>(), 0u32..5).prop_map(|((tp, gtp, cp_levels, dp, pp), order, swap, offset)| {
        let cp: u32 = cp_levels.iter().product();
        let size = tp * gtp * cp * dp * pp;
        let (ep, egtp) = if swap { (gtp, tp) } else { (tp, gtp) };
        LayoutConfig {
            world_size: Some(size + offset + 2),
            part: pgroups::WorldPart::From { offset: GlobalRank(offset), ranks: Some(size) },
            tp,
            gtp,
            cp,
            cp_levels,
            ep,
            pp,
            expt_tp: Some(1),
            egtp,
            order: order.join("-") + "-pp",
            ..LayoutConfig::default()
        }
    })
}

fn covered(layout: &Layout) -> BTreeSet<u32> {
    let grid = layout.grid(ParamClass::Dense);
    (grid.offset().0..grid.offset().0 + grid.size()).collect()
}

proptest! {
    #[test]
    fn every_covered_rank_is_in_exactly_one_group_of_every_key(config in layouts()) {
        let layout = Layout::new(&config).unwrap();
        for (key, groups) in groups_report(&layout).unwrap().iter() {
            let mut seen = BTreeSet::new();
            for rank in lists(groups).concat() {
                prop_assert!(seen.insert(rank), "{key}: rank {rank} twice");
            }
            if ![Key::EMBD, Key::POS_EMBD].contains(key) {
                prop_assert_eq!(&seen, &covered(&layout), "{}", key);
            }
        }
    }

    #[test]
    fn groups_come_by_smallest_rank_and_members_ascend(config in layouts()) {
        let layout = Layout::new(&config).unwrap();
        let report = groups_report(&layout).unwrap();
        for standard in Standard::all(&layout) {
            // Joined and cut groups follow the order of the groups they come from.
            if matches!(standard, Standard::IntraDistOpt | Standard::IntraDpCp | Standard::InterDpCp
                | Standard::IntraExptDp | Standard::InterExptDp | Standard::DynamicDpCp { .. }
                    | Standard::HierarchicalCp { .. }) {
                continue;
            }
            let groups = lists(report.get(&standard.into()).unwrap());
            prop_assert!(groups.is_sorted_by_key(|group| group[0]), "{standard}");
            let ascends = |group: &Vec<u32>| group.is_sorted();
            prop_assert!(groups.iter().all(ascends), "{standard}");
        }
    }

    #[test]
    fn the_arithmetic_finds_the_same_group_as_the_list(config in layouts(), pick in any::<prop::sample::Index>()) {
        let layout = Layout::new(&config).unwrap();
        let keys = Standard::all(&layout).into_iter().map(Key::from);
        let rank = GlobalRank(pick.index(layout.world_size() as usize) as u32);
        let plan = GroupsPlan::new(&layout, &Needs::keys(keys), rank).unwrap();
        let report = groups_report(&layout).unwrap();
        for entry in plan.entries() {
            let groups = report.get(entry.key()).unwrap();
            let listed = groups.iter().position(|members| members.contains(&rank));
            prop_assert_eq!(entry.own().map(|own| own.index as usize), listed, "{}", entry.key());
            if let Some(own) = entry.own() {
                prop_assert_eq!(&own.members[..], &groups[own.index as usize][..]);
                prop_assert_eq!(own.members[own.position.index()], rank);
            }
        }
    }

    #[test]
    fn members_differ_only_along_the_groups_axes(config in layouts()) {
        let layout = Layout::new(&config).unwrap();
        let report = groups_report(&layout).unwrap();
        let rows: [(Key, ParamClass, Vec<Axis>); 3] = [
            (Key::DP_CP_GTP, ParamClass::Dense, vec![Axis::GTP, Axis::CP, Axis::DP]),
            (Key::MP, ParamClass::Dense, vec![Axis::TP, Axis::GTP, Axis::PP]),
            (Key::TP_EP_PP, ParamClass::Expert, vec![Axis::TP, Axis::EP, Axis::GTP, Axis::PP]),
        ];
        for (key, class, axes) in rows {
            let grid = layout.grid(class);
            for group in report.get(&key).unwrap() {
                for (fixed, _) in grid.axes().filter(|(a, _)| !axes.contains(a)) {
                    let at = |rank: &GlobalRank| grid.coordinate(*rank, fixed);
                    prop_assert!(group.iter().all(|rank| at(rank) == at(&group[0])));
                }
            }
        }
    }

    #[test]
    fn a_shard_axis_of_one_changes_no_group(
        (tp, cp, dp, pp) in (1u32..4, 1u32..4, 1u32..5, 1u32..4),
        order in Just(vec!["tp", "cp", "ep", "dp"]).prop_shuffle(),
    ) {
        let base = LayoutConfig { tp, cp, dp: Some(dp), pp, order: order.join("-") + "-pp", ..LayoutConfig::default() };
        let with_gtp = |place: usize| {
            let mut order = order.clone();
            order.insert(place, "gtp");
            LayoutConfig { order: order.join("-") + "-pp", ..base.clone() }
        };
        let report = |config: &LayoutConfig| groups_report(&Layout::new(config).unwrap()).unwrap();
        let plain = report(&base);
        for place in 0..=order.len() {
            let with_gtp = report(&with_gtp(place));
            prop_assert_eq!(&with_gtp, &plain);
        }
        prop_assert_eq!(plain.get(&Key::DP_CP_GTP), plain.get(&Key::DP_CP));
        prop_assert!(plain.get(&Key::GTP).unwrap().iter().all(|group| group.len() == 1));
    }

    #[test]
    fn grids_of_own_axes_partition_their_ranks_for_every_subset(
        sizes in prop::collection::vec(1u32..4, 1..5), offset in 0u32..7, subset in any::<u8>(),
    ) {
        let named = sizes.iter().zip("abcd".chars()).map(|(&n, c)| (axis(&c.to_string()), n));
        let axes: Vec<(Axis, u32)> = named.collect();
        let size: u32 = sizes.iter().product();
        let grid = pgroups::Grid::new(&axes, GlobalRank(offset), offset + size).unwrap();
        let chosen = axes.iter().enumerate().filter(|(i, _)| subset >> i & 1 == 1);
        let chosen: Vec<Axis> = chosen.map(|(_, (axis, _))| axis.clone()).rev().collect();
        let mut ranks = lists(&grid.groups(&chosen).unwrap()).concat();
        ranks.sort_unstable();
        prop_assert_eq!(ranks, (offset..offset + size).collect::<Vec<u32>>());
    }

    #[test]
    fn refused_layouts_name_worlds_that_would_do(
        (tp, gtp, pp) in (1u32..6, 1u32..4, 1u32..4), world in 1u32..200,
    ) {
        let config = |world| LayoutConfig { world_size: Some(world), tp, gtp, pp, expt_tp: Some(tp), egtp: gtp, ..LayoutConfig::default() };
        if let Err(pgroups::PlanError::Layout { violations }) = Layout::new(&config(world)) {
            for violation in violations.0 {
                let pgroups::LayoutViolation::Indivisible { nearest, .. } = violation else {
                    return Err(TestCaseError::fail(violation.to_string()));
                };
                for world in [nearest.below, nearest.above].into_iter().flatten() {
                    prop_assert!(Layout::new(&config(world)).is_ok(), "{world}");
                }
            }
        } else {
            prop_assert_eq!(world % (tp * gtp * pp), 0);
        }
    }
}
