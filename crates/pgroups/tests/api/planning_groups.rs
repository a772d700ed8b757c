//! Rank lists against reference values: grids and orders, views, derived groups.
//!
//! `rank_groups.jsonl` holds facts about Megatron-LM's `RankGenerator`, its weight-shard axis under our name `gtp`.

use pgroups::{Axis, GlobalRank, Grid, Key, Layout, LayoutConfig, Order, PlanError, Stages};
use serde_json::Value;

use crate::planning_support::{Lists, axis, config, groups, layout, lists, ranks, sized};

fn reference_cases() -> Vec<Value> {
    let lines = include_str!("rank_groups.jsonl").lines();
    lines.map(|l| serde_json::from_str(l).unwrap()).collect()
}

fn reference_grid(case: &Value) -> Grid {
    let order = Order::parse(case["order"].as_str().unwrap()).unwrap();
    let sizes = case["sizes"].as_array().unwrap().iter();
    let sizes: Vec<(Axis, u32)> = order.axes().iter().cloned().zip(sizes.map(|n| n.as_u64().unwrap() as u32)).collect();
    let world = case["world"].as_u64().unwrap() as u32;
    order.grid(&sizes, GlobalRank(0), world).unwrap()
}

fn as_lists(value: &Value) -> Lists {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn every_reference_case_has_the_reference_groups() {
    let mut compared = 0;
    for case in reference_cases() {
        let grid = reference_grid(&case);
        for (token, wanted) in case["groups"].as_object().unwrap() {
            let axes: Vec<Axis> = token.split('-').map(axis).collect();
            let got = lists(&grid.groups(&axes).unwrap());
            let name = format!("{} {token}", case["case"]);
            if wanted.is_array() {
                assert_eq!(got, as_lists(wanted), "{name}");
            } else {
                let count = wanted["count"].as_u64().unwrap() as usize;
                assert_eq!(got.len(), count, "{name}");
                assert_eq!(got[..3], as_lists(&wanted["first3"]), "{name}");
                let last: Vec<u32> = serde_json::from_value(wanted["last"].clone()).unwrap();
                assert_eq!(got[count - 1], last, "{name}");
            }
            compared += 1;
        }
    }
    assert_eq!(compared, 63, "no reference group was left out");
}

#[test]
fn a_ranks_own_group_is_the_listed_one_that_holds_it() {
    for case in reference_cases() {
        let grid = reference_grid(&case);
        for token in case["groups"].as_object().unwrap().keys() {
            let axes: Vec<Axis> = token.split('-').map(axis).collect();
            for (index, members) in grid.groups(&axes).unwrap().iter().enumerate() {
                for (position, &rank) in members.iter().enumerate() {
                    let own = grid.own_group(&axes, rank).unwrap().unwrap();
                    assert_eq!(own.members[..], members[..]);
                    assert_eq!((own.index as usize, own.position.index()), (index, position));
                }
            }
        }
    }
}

#[test]
fn the_shard_axis_goes_where_megatron_puts_it() {
    use pgroups::ParamClass::{Dense, Expert};
    let placed = |text: &str, class| {
        let order = Order::parse(text).unwrap();
        order.with_shard_axis(class).to_string()
    };
    assert_eq!(placed("tp-cp-ep-dp-pp", Dense), "tp-gtp-cp-ep-dp-pp");
    assert_eq!(placed("tp-cp-ep-dp-pp", Expert), "tp-cp-ep-gtp-dp-pp");
    assert_eq!(placed("tp-pp-dp", Dense), "tp-gtp-pp-dp");
    assert_eq!(placed("tp-pp-dp", Expert), "tp-gtp-pp-dp");
    assert_eq!(placed("cp-dp-pp", Dense), "gtp-cp-dp-pp");
    assert_eq!(placed("cp-dp-pp", Expert), "gtp-cp-dp-pp");
    assert_eq!(placed("dp-gtp-tp", Dense), "dp-gtp-tp");
    assert_eq!(placed("ep-dp-gtp", Expert), "ep-dp-gtp");
}

#[test]
fn a_layout_reaches_the_dense_and_expert_cases_by_itself() {
    let dense_and_expert = layout(16, "tp=2,pp=2,etp=1,ep=2,egtp=2");
    for case in reference_cases() {
        let name = case["case"].as_str().unwrap();
        let key: fn(Vec<Axis>) -> Key = match name {
            "E dense w16 tp2 pp2" => Key::over,
            "E expert w16 etp1 ep2 egtp2 pp2" => Key::expert_over,
            _ => continue,
        };
        for (token, wanted) in case["groups"].as_object().unwrap() {
            let axes = token.split('-').map(axis).collect();
            let got = groups(&dense_and_expert, key(axes));
            assert_eq!(got, as_lists(wanted), "{name} {token}");
        }
    }
}

#[test]
fn orders_that_miss_an_axis_above_one_are_refused_when_the_grid_is_made() {
    let refused = |order: &str, sizes: &[(&str, u32)], word: &str| {
        let order = Order::parse(order).unwrap();
        let error = order.grid(&sized(sizes), GlobalRank(0), 64).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(word), "{message}");
    };
    refused("tp-dp-pp", &[("tp", 2), ("cp", 2), ("dp", 2)], "cp = 2");
    refused("tp-pp-dp", &[("tp", 2), ("ep", 2), ("dp", 2)], "ep = 2");
    refused("tp-cp-ep-dp-pp", &[("cp", 2), ("ep", 2)], "cp = 2 and ep = 2 in one grid");
    // `tp` is inside `gtp` as a text, which once let this order pass.
    refused("gtp-dp-pp", &[("tp", 2), ("dp", 2)], "tp = 2");
}

#[test]
fn an_offset_shifts_every_group() {
    let order = Order::parse("tp-gtp-cp-ep-dp-pp").unwrap();
    let sizes = sized(&[("tp", 2), ("dp", 2)]);
    let grid = order.grid(&sizes, GlobalRank(4), 8).unwrap();
    let of = |name| lists(&grid.groups(&[axis(name)]).unwrap());
    assert_eq!(of("tp"), [[4, 5], [6, 7]]);
    assert_eq!(of("dp"), [[4, 6], [5, 7]]);
    assert!(grid.own_group(&[Axis::TP], GlobalRank(3)).unwrap().is_none());
    assert!(grid.own_group(&[Axis::TP], GlobalRank(8)).unwrap().is_none());
}

#[test]
fn stages_before_replicas_work_when_replicas_are_equal() {
    let layout =
        Layout::new(&LayoutConfig { order: "tp-ep-pp-dp".into(), ..config(8, "tp=2,pp=2,ep=2,etp=1") }).unwrap();
    let pp = [[0, 2], [1, 3], [4, 6], [5, 7]];
    assert_eq!(groups(&layout, Key::PP), pp);
    let expert = layout.grid(pgroups::ParamClass::Expert);
    assert_eq!(lists(&expert.groups(&[Axis::PP]).unwrap()), pp);
    assert_eq!(expert.axis_size(&Axis::DP), Some(2));
    assert_eq!(layout.size(pgroups::ParamClass::Dense, &Axis::DP), 2);
}

#[test]
fn a_grid_of_24_has_the_reference_groups() {
    let axes = sized(&[("tp", 2), ("cp", 3), ("dp", 4)]);
    let grid = Grid::new(&axes, GlobalRank(0), 24).unwrap();
    let of = |names: &[&str]| {
        let axes: Vec<Axis> = names.iter().map(|name| axis(name)).collect();
        lists(&grid.groups(&axes).unwrap())
    };
    let pairs: Lists = (0..12).map(|i| vec![2 * i, 2 * i + 1]).collect();
    assert_eq!(of(&["tp"]), pairs);
    let cp = [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11], [12, 14, 16], [13, 15, 17], [18, 20, 22], [19, 21, 23]];
    assert_eq!(of(&["cp"]), cp);
    let dp: Lists = (0..6).map(|i| vec![i, i + 6, i + 12, i + 18]).collect();
    assert_eq!(of(&["dp"]), dp);
    let sixes: Lists = (0..4).map(|i| (6 * i..6 * i + 6).collect()).collect();
    assert_eq!(of(&["tp", "cp"]), sixes);
    let by_two = |first: u32| -> Vec<u32> { (0..12).map(|i| first + 2 * i).collect() };
    assert_eq!(of(&["cp", "dp"]), [by_two(0), by_two(1)]);
    let tp_dp = [[0, 1, 6, 7, 12, 13, 18, 19], [2, 3, 8, 9, 14, 15, 20, 21], [4, 5, 10, 11, 16, 17, 22, 23]];
    assert_eq!(of(&["tp", "dp"]), tp_dp);
    assert_eq!(of(&["dp", "tp"]), tp_dp);

    let grid = Grid::new(&sized(&[("a", 2), ("b", 2)]), GlobalRank(8), 12).unwrap();
    let of = |name| lists(&grid.groups(&[axis(name)]).unwrap());
    assert_eq!((of("a"), of("b")), (vec![vec![8, 9], vec![10, 11]], vec![vec![8, 10], vec![9, 11]]));
}

#[test]
fn grids_beyond_the_world_are_refused_with_the_room_there_is() {
    let five = sized(&[("a", 5), ("b", 5)]);
    let error = Grid::new(&five, GlobalRank(0), 24).unwrap_err();
    assert!(matches!(error, PlanError::GridOutsideWorld { size: 25, largest: 24, .. }));
    let four_by_six = sized(&[("a", 4), ("b", 6)]);
    let error = Grid::new(&four_by_six, GlobalRank(4), 24).unwrap_err();
    assert!(matches!(error, PlanError::GridOutsideWorld { size: 24, largest: 20, .. }));
    // Sizes whose product does not fit any integer are no way around it.
    let huge: Vec<_> = ["a", "b", "c", "d", "e"].map(|n| (axis(n), u32::MAX)).into();
    assert!(Grid::new(&huge, GlobalRank(0), u32::MAX).is_err());
}

#[test]
fn embedding_groups_are_the_ends_of_each_pipeline() {
    let of = |pp: u32, key| groups(&layout(8, &format!("tp=2,pp={pp}")), key);
    let singles: Lists = (0..8).map(|rank| vec![rank]).collect();
    assert_eq!(of(1, Key::EMBD), singles);
    assert_eq!(of(2, Key::EMBD), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    assert_eq!(of(2, Key::POS_EMBD), [[0], [1], [2], [3]]);
    assert_eq!(of(4, Key::EMBD), [[0, 6], [1, 7]]);
    assert_eq!(of(4, Key::POS_EMBD), [[0], [1]]);
}

#[test]
fn replaced_selectors_choose_other_stages() {
    let layout = Layout::new(&LayoutConfig {
        embedding_stages: Stages::At(vec![0, 2, 3]),
        position_stages: Stages::At(vec![1]),
        ..config(8, "tp=2,pp=4")
    })
    .unwrap();
    assert_eq!(groups(&layout, Key::EMBD), [[0, 4, 6], [1, 5, 7]]);
    assert_eq!(groups(&layout, Key::POS_EMBD), [[2], [3]]);
}

#[test]
fn partial_data_groups_are_slices_and_their_equal_places() {
    let eight = layout(8, "instances=2");
    assert_eq!(groups(&eight, Key::INTRA_DP_CP), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(groups(&eight, Key::INTER_DP_CP), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    assert_eq!(groups(&eight, Key::INTRA_EXPT_DP), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    // With tp the slices lie in each data group, and three instances take every second pair apart.
    let twelve = layout(12, "tp=2,instances=3");
    assert_eq!(groups(&twelve, Key::INTRA_DP_CP), [[0, 2], [4, 6], [8, 10], [1, 3], [5, 7], [9, 11]]);
    assert_eq!(groups(&twelve, Key::INTER_DP_CP), [[0, 4, 8], [2, 6, 10], [1, 5, 9], [3, 7, 11]]);
}

#[test]
fn an_optimizer_instance_lists_model_copy_after_model_copy() {
    let two = layout(8, "tp=2,instances=2");
    assert_eq!(groups(&two, Key::INTRA_DIST_OPT), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    let experts = layout(16, "tp=2,ep=2,pp=2,etp=1,instances=2");
    assert_eq!(groups(&experts, Key::INTRA_DIST_OPT), [[0, 1, 8, 9, 2, 3, 10, 11], [4, 5, 12, 13, 6, 7, 14, 15]]);
}

#[test]
fn hierarchical_context_groups_are_the_digits_of_the_position() {
    let levels = |levels: &[u32], level| {
        let cp = levels.iter().product();
        let layout =
            Layout::new(&LayoutConfig { cp_levels: levels.to_vec(), ..config(cp, &format!("cp={cp}")) }).unwrap();
        groups(&layout, Key::cp_level(level))
    };
    let pairs: Lists = (0..8).map(|i| vec![2 * i, 2 * i + 1]).collect();
    assert_eq!(levels(&[2, 2, 4], 1), pairs);
    let second = [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]];
    assert_eq!(levels(&[2, 2, 4], 2), second);
    let third = [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]];
    assert_eq!(levels(&[2, 2, 4], 3), third);
    assert_eq!(levels(&[4, 2], 1), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(levels(&[4, 2], 2), [[0, 4], [1, 5], [2, 6], [3, 7]]);
}

#[test]
fn dynamic_sizes_are_the_powers_of_two_below_the_group_that_divide_it() {
    let sizes = |dp: u32| layout(dp, "").dynamic_dp_cp_sizes();
    assert_eq!(sizes(2), Vec::<u32>::new());
    assert_eq!(sizes(4), [2]);
    assert_eq!(sizes(6), [2]);
    assert_eq!(sizes(8), [2, 4]);
    assert_eq!(sizes(16), [2, 4, 8]);
    // A last group of two under the name of four would be a lie.
    assert_eq!(sizes(10), [2]);
    let eight = layout(16, "tp=2,cp=2");
    assert_eq!(groups(&eight, Key::dynamic_dp_cp(4)), [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]]);
}

#[test]
fn data_of_their_own_is_at_every_shard_peer() {
    let layout = layout(8, "tp=2,gtp=2,dp=2");
    assert_eq!(groups(&layout, Key::DP_CP_GTP), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    assert_eq!(groups(&layout, Key::MP), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    let everyone = [[0, 1, 2, 3, 4, 5, 6, 7]];
    assert_eq!(groups(&layout, Key::TP_DP_CP), everyone);
    let odd = ranks(&[1, 3, 5, 7]);
    let plan = crate::planning_support::plan(&layout, &[Key::DP_CP_GTP], 5);
    let own = plan.get(&Key::DP_CP_GTP, "test").unwrap();
    assert_eq!((own.members[..].to_vec(), own.position.0, own.index), (odd, 2, 1));
}
