//! Building collections, and what they answer. The feature of docs/features.md or the fault is named above each.

use device::{DType, Machine, Reduce, TraceEvent};
use pgroups::{
    GlobalRank, Group, GroupsPlan, Key, Layout, LayoutConfig, ModuleRole, Modules, Needs, PgError, PlanError,
    ProcessGroups, Rank, Supplied, WhyEmpty, local,
};

use crate::planning_support::layout;
use crate::running_support::*;

fn members(group: &Group) -> Vec<u32> {
    group.members().iter().map(|rank| rank.0).collect()
}

/// Ranks 0, 2 and 1, 3 are tensor peers.
fn crossed() -> Layout {
    let config = LayoutConfig { order: "dp-tp".into(), ..LayoutConfig::parse("tp=2,dp=2").unwrap() };
    Layout::new(&config).unwrap()
}

/// Keeps this rank's part of `whole`, then gathers all parts again: the identity, if both use one group.
fn scatter_and_gather(group: &Group, rank: &Rank, whole: &[f32]) -> Result<Vec<f32>, PgError> {
    let stream = rank.device.stream("compute")?;
    let k = whole.len() / group.size() as usize;
    let source = put(&stream, "whole", whole.to_vec());
    let dest = alloc(&rank.device, "again", whole.len(), DType::F32);
    let own = source.flat(group.place().index() * k..(group.place().index() + 1) * k)?;
    group.all_gather(&stream, &own, &dest)?;
    Ok(get(&stream, &dest)?)
}

// B01
#[test]
fn two_collections_of_other_layouts_never_use_each_others_groups() {
    for machine in machines() {
        local(&machine, 4, |rank| {
            let needs = Needs::keys([Key::TP, Key::DP]);
            let a = ProcessGroups::build(&rank, &layout(4, "tp=2,dp=2"), &needs)?;
            let b = ProcessGroups::build(&rank, &crossed(), &needs)?;
            let tp = |groups: &ProcessGroups| groups.get(&Key::TP, "linear").cloned();
            let (a, b) = (tp(&a)?, tp(&b)?);
            let peers = |lists: [[u32; 2]; 2]| lists.into_iter().find(|list| list.contains(&rank.global.0)).unwrap();
            assert_eq!(members(&a), peers([[0, 1], [2, 3]]));
            assert_eq!(members(&b), peers([[0, 2], [1, 3]]));
            let whole = |group: &Group| -> Vec<f32> {
                let base = group.members()[0].0 as f32 * 10.0;
                (0..4).map(|i| base + i as f32).collect()
            };
            for group in [&b, &a, &a, &b, &a, &b, &b] {
                assert_eq!(scatter_and_gather(group, &rank, &whole(group))?, whole(group));
            }
            Ok::<_, PgError>(())
        })
        .unwrap();
    }
}

// B02
#[test]
fn a_group_nobody_supplied_is_derived_only_where_the_layout_proves_it() {
    let machine = cpu(2);
    let grads = local(&machine, 2, |rank| {
        let needs = Needs::keys([Key::TP, Key::PP, Key::DP, Key::CP]);
        let groups = ProcessGroups::build(&rank, &layout(2, "dp=2"), &needs)?;
        assert!(matches!(groups.supplied(&Key::DP_CP)?, Supplied::Absent));
        let dp_cp = groups.derived(&Key::DP_CP, "ddp")?.expect("not empty");
        assert!(dp_cp.is(groups.get(&Key::DP, "ddp")?));
        let gtp = groups.derived(&Key::GTP, "ddp")?.expect("not empty");
        assert!(gtp.size() == 1 && gtp.is(groups.single()));
        let stream = rank.device.stream("compute")?;
        let grad = put(&stream, "main_grad", vec![[1f32, 3.0][rank.global.0 as usize]]);
        dp_cp.all_reduce(&stream, &grad, Reduce::Avg)?;
        gtp.all_reduce(&stream, &grad, Reduce::Sum)?;
        Ok::<_, PgError>(get::<f32>(&stream, &grad)?)
    });
    assert_eq!(grads.unwrap(), [[2.0], [2.0]]);
    let error = local(&machine, 4, |rank| {
        let needs = Needs::keys([Key::TP, Key::PP, Key::DP, Key::CP]);
        let groups = ProcessGroups::build(&rank, &layout(4, "cp=2,dp=2"), &needs)?;
        groups.derived(&Key::DP_CP, "ddp")?;
        Ok::<_, PgError>(())
    });
    let error = error.unwrap_err();
    let missing = error.cause::<PlanError>();
    assert!(matches!(missing, Some(PlanError::MissingGroup { needed_by: "ddp", .. })), "{}", error.chain());
    assert!(error.chain().contains("ddp needs group 'dp_cp'"), "{}", error.chain());
}

// PG-12, PG-14
#[test]
fn absent_empty_unknown_and_supplied_are_four_answers() {
    let machine = Machine::sim(1);
    local(&machine, 4, |rank| {
        let mine = Key::named("mine")?;
        let custom = vec![(Key::GTP, vec![vec![GlobalRank(3), GlobalRank(1)]])];
        let needs = Needs { keys: vec![Key::DP], custom, none: vec![Key::EP] };
        let groups = ProcessGroups::build(&rank, &layout(4, "tp=2,dp=2"), &needs)?;
        assert!(matches!(groups.supplied(&Key::TP)?, Supplied::Absent));
        assert!(matches!(groups.supplied(&Key::EP)?, Supplied::Empty(WhyEmpty::SuppliedAsNone)));
        assert!(groups.derived(&Key::EP, "moe")?.is_none());
        let unknown = groups.supplied(&mine).unwrap_err();
        assert!(matches!(unknown, PgError::Plan(PlanError::UnknownKey { .. })), "{unknown}");
        let missing = groups.get(&Key::TP, "linear").unwrap_err().to_string();
        assert!(missing.contains("linear needs group 'tp'") && missing.contains("dp"), "{missing}");
        let empty = groups.get(&Key::EP, "moe").unwrap_err();
        assert!(matches!(empty, PgError::Plan(PlanError::EmptyGroup { needed_by: "moe", .. })), "{empty}");
        // A custom list stands in place of the layout's groups, also for ranks that are not in it.
        if rank.global.0 % 2 == 1 {
            let gtp = groups.get(&Key::GTP, "linear")?;
            assert_eq!((members(gtp), gtp.place().0), (vec![3, 1], u32::from(rank.global.0 == 1)));
            assert_eq!(gtp.place_of(GlobalRank(1)).map(|place| gtp.member(place)), Some(Some(GlobalRank(1))));
            assert_eq!((gtp.place_of(GlobalRank(0)), gtp.member(pgroups::GroupRank(2))), (None, None));
        } else {
            assert!(matches!(groups.supplied(&Key::GTP)?, Supplied::Empty(WhyEmpty::NotAMember)));
            assert!(groups.derived(&Key::GTP, "linear")?.is_none());
        }
        Ok::<_, PgError>(())
    })
    .unwrap();
}

// PG-12
#[test]
fn debug_text_lists_live_groups_with_their_sizes() {
    let texts = local(&Machine::sim(1), 8, |rank| {
        let needs = Needs { none: vec![Key::EP], ..Needs::keys([Key::TP, Key::DP_CP_GTP, Key::EMBD]) };
        let groups = ProcessGroups::build(&rank, &layout(8, "tp=2,dp=2,pp=2"), &needs)?;
        let tp = format!("{:?}", groups.get(&Key::TP, "test")?);
        Ok::<_, PgError>((format!("{groups:?}"), tp))
    });
    let (groups, tp) = &texts.unwrap()[5];
    assert_eq!(groups, "ProcessGroups(rank 5: tp(2), dp_cp_gtp(2), embd(2))");
    assert_eq!(tp, "tp[2]@0..8#0 [4, 5], place 1");
}

// PG-15
#[test]
fn modules_of_one_pipeline_have_collections_of_their_own() {
    local(&cpu(2), 6, |rank| {
        let needs = Needs::keys([Key::DP]);
        let build = |text| ProcessGroups::build(&rank, &layout(6, text), &needs);
        let modules = Modules::new([
            ("vision".to_owned(), ModuleRole::Other, build("dp=2,offset=0,ranks=2")?),
            ("language".to_owned(), ModuleRole::Language, build("dp=4,offset=2")?),
        ])?;
        let mine = if rank.global.0 < 2 { "vision" } else { "language" };
        for (name, groups) in modules.iter() {
            assert_eq!(matches!(groups.supplied(&Key::DP)?, Supplied::Group(_)), name == mine);
        }
        let group = modules.get(mine)?.get(&Key::DP, "ddp")?;
        let stream = rank.device.stream("compute")?;
        let one = put(&stream, "one", vec![1f32]);
        group.all_reduce(&stream, &one, Reduce::Sum)?;
        assert_eq!(get::<f32>(&stream, &one)?, [if mine == "vision" { 2.0 } else { 4.0 }]);
        Ok::<_, PgError>(())
    })
    .unwrap();
}

// PG-16
#[test]
fn ranks_with_other_needs_are_told_before_any_group_is_made() {
    for machine in [cpu(1), cpu(2), Machine::sim(1), Machine::sim(2)] {
        machine.trace_start();
        let error = local(&machine, 4, |rank| {
            let keys = if rank.global.0 == 2 { vec![Key::TP, Key::MP] } else { vec![Key::TP, Key::DP] };
            ProcessGroups::build(&rank, &layout(4, "tp=2,dp=2"), &Needs::keys(keys)).map(|_| ())
        });
        let error = error.unwrap_err();
        let told = error.cause::<PgError>().and_then(|_| std::error::Error::source(&error));
        assert!(told.is_some());
        let text = error.chain();
        assert!(
            text.contains("ranks 0 and 2 plan different groups, with the keys [tp, dp] and [tp, mp]: give every"),
            "{text}"
        );
        assert!(matches!(error.cause(), Some(PlanError::PlansDiffer { line: 2, .. })), "{text}");
        let trace = machine.trace_stop();
        let joints = trace.events.iter().filter_map(|event| match event {
            TraceEvent::Joint { group, .. } => Some(group.as_str()),
            _ => None,
        });
        assert!(joints.clone().count() > 0 && joints.clone().all(|group| group == "build@0..4#0"));
    }
}

// PG-16
#[test]
fn ranks_with_other_layouts_are_told_where_they_differ() {
    for machine in [cpu(2), Machine::sim(1)] {
        let error = local(&machine, 4, |rank| {
            let layout = if rank.global.0 == 3 { crossed() } else { layout(4, "tp=2,dp=2") };
            ProcessGroups::build(&rank, &layout, &Needs::keys([Key::TP])).map(|_| ())
        });
        let text = error.unwrap_err().chain();
        for part in ["ranks 0 and 3", "line 0", "dense=tp2-gtp1-cp1-ep1-dp2", "the same layout and the same needs"] {
            assert!(text.contains(part), "no '{part}' in {text}");
        }
        let error = local(&machine, 2, |rank| {
            ProcessGroups::build(&rank, &layout(4, "tp=2,dp=2"), &Needs::keys([Key::TP])).map(|_| ())
        });
        let text = error.unwrap_err().chain();
        assert!(text.contains("the layout is for a world of 4 ranks, 2 run"), "{text}");
    }
}

#[test]
fn the_same_collection_can_be_built_again_and_again() {
    for machine in [cpu(2), Machine::sim(1), Machine::dry()] {
        local(&machine, 2, |rank| {
            let stream = rank.device.stream("compute")?;
            let data = alloc(&rank.device, "data", 3, DType::F32);
            let mut kept = Vec::new();
            for build in 0..5 {
                let groups = ProcessGroups::build(&rank, &flat(2), &Needs::keys([Key::DP]))?;
                let dp = groups.get(&Key::DP, "test")?.clone();
                assert_eq!(dp.name(), format!("dp[0]@0..2#{build}"));
                // Those of earlier builds are still their own.
                kept.push(dp);
                kept.iter().try_for_each(|group| group.all_reduce(&stream, &data, Reduce::Sum))?;
            }
            Ok::<_, PgError>(stream.synchronize()?)
        })
        .unwrap();
    }
}

#[test]
fn a_plan_is_built_by_the_rank_it_was_made_for() {
    let error = local(&cpu(1), 2, |rank| {
        let plan = GroupsPlan::new(&flat(2), &Needs::keys([Key::DP]), GlobalRank(0))?;
        ProcessGroups::from_plan(&rank, plan).map(|_| ())
    });
    let text = error.unwrap_err().chain();
    assert!(text.contains("rank 1 builds the groups of rank 0"), "{text}");
}

/// What one rank of a step submits: gathers, reductions, an exchange.
fn step(groups: &ProcessGroups, rank: &Rank) -> Result<(), PgError> {
    let stream = rank.device.stream("compute")?;
    let tp = groups.get(&Key::TP, "linear")?;
    let n = tp.size() as usize;
    let full = alloc(&rank.device, "full", 6 * n, DType::F32);
    let shard = full.flat(tp.place().index() * 6..(tp.place().index() + 1) * 6)?;
    let apart = alloc(&rank.device, "apart", 6, DType::F32);
    tp.all_gather(&stream, &shard, &full)?;
    tp.reduce_scatter(&stream, &full, &shard, Reduce::Sum)?;
    tp.reduce_scatter(&stream, &full, &apart, Reduce::Avg)?;
    tp.batch()
        .all_gather(&apart, &full)
        .broadcast(&alloc(&rank.device, "w", 2, DType::Bf16), pgroups::GroupRank(0))
        .submit(&stream)?;
    let dp = groups.get(&Key::DP, "ddp")?.second("grads")?;
    dp.all_reduce(&stream, &full, Reduce::Avg)?;
    dp.barrier(&stream)?;
    Ok(stream.synchronize()?)
}

/// Bytes read and written, by allocation: what an order of operations is planned from.
fn touched(machine: &Machine, rank: u32) -> Vec<(String, String, usize, usize)> {
    let trace = machine.trace_stop();
    let mut out = Vec::new();
    for event in &trace.events {
        let (name, accesses) = match event {
            TraceEvent::Op { rank: r, name, accesses, .. } if *r == rank => (name.to_string(), accesses),
            TraceEvent::Joint { rank: r, what, accesses, group, .. } if *r == rank && !group.starts_with("build") => {
                (what.split([' ', '(']).next().unwrap().to_owned(), accesses)
            }
            _ => continue,
        };
        let bytes = |writes: bool| {
            let touching = accesses.iter().filter(|a| match a.mode {
                device::Mode::Update => true,
                mode => mode.writes() == writes,
            });
            // In place, a call declares its own part twice: once as such, once as part of the whole.
            let mut spans: Vec<(u32, usize, usize)> =
                touching.map(|a| (a.allocation, a.region.start, a.region.end())).collect();
            spans.sort_unstable();
            let mut sum = 0;
            let mut end = (u32::MAX, 0);
            for (allocation, start, stop) in spans {
                let start = if end.0 == allocation { start.max(end.1) } else { start };
                sum += stop.saturating_sub(start);
                end = (allocation, stop.max(if end.0 == allocation { end.1 } else { 0 }));
            }
            sum
        };
        out.push((name, accesses.first().map_or_else(String::new, |a| a.label.to_string()), bytes(false), bytes(true)));
    }
    out
}

#[test]
fn one_rank_of_sixty_four_is_planned_alone() {
    let layout = layout(64, "tp=8,gtp=2,dp=4");
    let machine = Machine::dry();
    let rank = Rank::alone(&machine, GlobalRank(37), 64).unwrap();
    let plan = GroupsPlan::new(&layout, &Needs::keys([Key::TP, Key::DP, Key::DP_CP_GTP]), rank.global).unwrap();
    let groups = ProcessGroups::planned(&rank, plan).unwrap();
    assert_eq!(format!("{groups:?}"), "ProcessGroups(rank 37: tp(8), dp(4), dp_cp_gtp(8))");
    machine.trace_start();
    step(&groups, &rank).unwrap();
    let seen = touched(&machine, 37);
    let kinds: Vec<&str> = seen.iter().map(|(name, ..)| name.as_str()).collect();
    let want = ["all_gather", "reduce_scatter", "reduce_scatter", "all_gather", "broadcast", "all_reduce", "barrier"];
    assert_eq!(kinds, want);
    // In place, 24 bytes of 192 are this rank's own; it is tp place 5.
    assert_eq!((seen[0].2, seen[0].3), (24, 192));
    assert_eq!((seen[1].2, seen[1].3), (192, 24));
    assert_eq!((seen[2].2, seen[2].3), (192, 24));
}

#[test]
fn a_planned_rank_touches_what_a_meeting_one_touches() {
    let layout = layout(4, "tp=2,dp=2");
    let needs = Needs::keys([Key::TP, Key::DP]);
    let met = Machine::dry();
    met.trace_start();
    local(&met, 4, |rank| step(&ProcessGroups::build(&rank, &layout, &needs)?, &rank)).unwrap();
    let met = touched(&met, 2);
    let alone = Machine::dry();
    let rank = Rank::alone(&alone, GlobalRank(2), 4).unwrap();
    let plan = GroupsPlan::new(&layout, &needs, rank.global).unwrap();
    let groups = ProcessGroups::planned(&rank, plan).unwrap();
    alone.trace_start();
    step(&groups, &rank).unwrap();
    let alone = touched(&alone, 2);
    let bytes = |seen: &[(String, String, usize, usize)]| -> Vec<(usize, usize)> {
        seen.iter().filter(|s| s.0 != "upload" && s.0 != "download").map(|s| (s.2, s.3)).collect()
    };
    let mut alone = bytes(&alone);
    // A batch is one call when it meets, and one operation a call when it is planned.
    let broadcast = alone.remove(4);
    alone[3] = (alone[3].0 + broadcast.0, alone[3].1 + broadcast.1);
    assert_eq!(alone, bytes(&met));
}

#[test]
fn groups_that_meet_nobody_are_refused_where_values_are_computed() {
    let machine = Machine::sim(1);
    let rank = Rank::alone(&machine, GlobalRank(0), 2).unwrap();
    let plan = GroupsPlan::new(&flat(2), &Needs::keys([Key::DP]), rank.global).unwrap();
    let error = ProcessGroups::planned(&rank, plan).unwrap_err();
    assert!(matches!(error, PgError::PlannedComputes { driver: "sim" }), "{error}");
}

#[test]
fn planned_groups_refuse_what_real_ones_refuse() {
    let machine = Machine::dry();
    let rank = Rank::alone(&machine, GlobalRank(1), 4).unwrap();
    let plan = GroupsPlan::new(&flat(4), &Needs::keys([Key::DP]), rank.global).unwrap();
    let groups = ProcessGroups::planned(&rank, plan).unwrap();
    let dp = groups.get(&Key::DP, "test").unwrap();
    let stream = rank.device.stream("compute").unwrap();
    let full = alloc(&rank.device, "full", 16, DType::F32);
    let elsewhere = full.flat(0..4).unwrap();
    for error in [
        dp.all_gather(&stream, &alloc(&rank.device, "s", 3, DType::F32), &full).unwrap_err(),
        dp.all_gather(&stream, &elsewhere, &full).unwrap_err(),
        dp.reduce_scatter(&stream, &full, &alloc(&rank.device, "s", 4, DType::Bf16), Reduce::Sum).unwrap_err(),
        dp.batch().all_reduce(&full, Reduce::Sum).all_reduce(&elsewhere, Reduce::Sum).submit(&stream).unwrap_err(),
    ] {
        assert!(matches!(error, PgError::Refused { size: 4, .. }), "{}", error.chain());
    }
    dp.send(&stream, &full, pgroups::GroupRank(3)).unwrap();
    dp.recv(&stream, &full, pgroups::GroupRank(0)).unwrap();
    stream.synchronize().unwrap();
}
