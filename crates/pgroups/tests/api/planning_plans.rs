//! What plans promise, a claim a test. The feature of docs/features.md is named above each.

use pgroups::{
    Axis, Consumer, Derived, GlobalRank, GroupsPlan, Key, Layout, LayoutConfig, ModuleRole, Modules, Needs, PlanError,
    PlanWarning, Planned, ViewConfig, ViewName, WhyEmpty,
};

use crate::planning_support::{axis, config, layout, plan, ranks, sized};

// PG-12
#[test]
fn absent_empty_and_unknown_are_different_answers() {
    let layout = layout(4, "tp=2");
    let needs = Needs { keys: vec![Key::TP], none: vec![Key::CP], ..Needs::default() };
    let plan = GroupsPlan::new(&layout, &needs, GlobalRank(3)).unwrap();
    assert_eq!(plan.supplied(&Key::DP), Ok(Planned::Absent));
    assert_eq!(plan.supplied(&Key::CP), Ok(Planned::Empty(WhyEmpty::SuppliedAsNone)));
    assert!(matches!(plan.supplied(&Key::TP), Ok(Planned::Member(own)) if own.position.0 == 1));
    let stranger = Key::named("ring").unwrap();
    assert!(matches!(plan.supplied(&stranger), Err(PlanError::UnknownKey { .. })));
    assert!(plan.supplied(&Key::over([axis("ring")])).is_err());

    let absent = plan.get(&Key::DP, "grad norm").unwrap_err().to_string();
    assert!(absent.contains("grad norm needs group 'dp'"), "{absent}");
    let empty = plan.get(&Key::CP, "attention").unwrap_err().to_string();
    assert!(empty.contains("attention on rank 3 needs group 'cp'"), "{empty}");
    let unknown = GroupsPlan::new(&layout, &Needs::keys([stranger]), GlobalRank(0)).unwrap_err();
    assert!(unknown.to_string().contains("'ring' is unknown"), "{unknown}");
    let outside = GroupsPlan::new(&layout, &needs, GlobalRank(4)).unwrap_err();
    assert!(outside.to_string().contains("0..4"), "{outside}");
}

// PG-12
#[test]
fn a_printed_plan_lists_only_the_groups_the_rank_is_in() {
    let layout = layout(12, "tp=2,pp=3");
    let needs = Needs { keys: vec![Key::EMBD, Key::DP, Key::TP], none: vec![Key::CP], ..Needs::default() };
    let text = |rank| GroupsPlan::new(&layout, &needs, GlobalRank(rank)).unwrap().to_string();
    assert_eq!(text(3), "rank 3: tp(2), dp(2), embd(2)");
    assert_eq!(text(6), "rank 6: tp(2), dp(2)");
}

// PG-13, fault B02
#[test]
fn what_the_layout_proves_is_derived_when_absent() {
    let layout = layout(2, "dp=2");
    let plan = plan(&layout, &[Key::TP, Key::PP, Key::DP, Key::CP], 1);
    for consumer in [Consumer::Ddp, Consumer::Optimizer] {
        let found = plan.resolve(consumer).unwrap();
        assert_eq!(found.of(&Key::DP), Some(&Derived::Supplied));
        assert_eq!(found.of(&Key::DP_CP), Some(&Derived::SameAs(Key::DP)));
        assert_eq!(found.of(&Key::EXPT_DP), Some(&Derived::SameAs(Key::DP)));
        assert_eq!(found.of(&Key::GTP), Some(&Derived::Single));
        assert_eq!(found.of(&Key::INTRA_DP_CP), Some(&Derived::SameAs(Key::DP)));
        assert_eq!(found.of(&Key::INTER_DP_CP), Some(&Derived::Empty));
        assert_eq!(found.warnings, []);
    }
}

// PG-13
#[test]
fn equal_members_are_seen_through_another_factorisation() {
    // tp | gtp | dp and pp together: the same steps as the view's a | gap | b.
    let ours = ViewName::new("ours").unwrap();
    let view = ViewConfig { name: ours.clone(), axes: sized(&[("a", 2), ("gap", 2), ("b", 6)]), shared: vec![] };
    let layout = Layout::new(&LayoutConfig { views: vec![view], ..config(24, "tp=2,gtp=2,dp=2,pp=3") }).unwrap();
    let over = |axes: [&str; 2]| Key::in_view(ours.clone(), axes.map(axis));
    let mine = Key::over([Axis::TP, Axis::DP, Axis::PP]);
    let plan = plan(&layout, std::slice::from_ref(&mine), 13);
    assert_eq!(plan.derive(&over(["a", "b"]), "test"), Ok(Derived::SameAs(mine)));
    assert!(plan.derive(&over(["gap", "b"]), "test").is_err());
}

// PG-13, fault B02
#[test]
fn what_the_layout_does_not_prove_is_an_error_with_the_group_and_who_needs_it() {
    let with_cp = layout(4, "cp=2");
    let short = plan(&with_cp, &[Key::TP, Key::PP, Key::DP, Key::CP], 0);
    let error = short.resolve(Consumer::Ddp).unwrap_err().to_string();
    assert!(error.contains("ddp needs groups dp_cp"), "{error}");
    let error = short.derive(&Key::DP_CP, "token counts").unwrap_err().to_string();
    assert!(error.contains("token counts needs group 'dp_cp'"), "{error}");

    let big = layout(16, "tp=2,pp=2,ep=2,etp=1");
    let short = plan(&big, &[Key::DP], 5);
    let error = short.resolve(Consumer::Optimizer).unwrap_err().to_string();
    assert!(error.contains("optimizer needs groups mp, tp_ep_pp"), "{error}");
    assert!(error.contains("(supplied: dp)"), "{error}");
    let error = short.resolve(Consumer::Ddp).unwrap_err().to_string();
    assert!(error.contains("ddp needs groups tp, pp, ep"), "{error}");
}

// PG-13
#[test]
fn missing_expert_replicas_become_this_rank_alone_with_a_warning() {
    let layout = layout(8, "tp=2,ep=2,etp=1");
    let keys = [Key::DP, Key::TP, Key::PP, Key::EP];
    for rank in 0..8 {
        let found = plan(&layout, &keys, rank).resolve(Consumer::Ddp);
        // dp and expt_dp both have four members here, but dp steps by 2 and so does expt_dp: the same ranks.
        assert_eq!(found.unwrap().of(&Key::EXPT_DP), Some(&Derived::SameAs(Key::DP)));
    }
    let layout = crate::planning_support::layout(8, "tp=2,ep=4,etp=1");
    for rank in 0..8 {
        let found = plan(&layout, &keys, rank).resolve(Consumer::Ddp).unwrap();
        assert_eq!(found.of(&Key::EXPT_DP), Some(&Derived::Single));
        let warning = PlanWarning::ExpertReplicasSingle { expt_dp: 2 };
        assert_eq!(found.warnings, [warning]);
    }
}

// PG-13
#[test]
fn several_instances_need_the_partial_groups_and_an_explicit_none_counts_as_supplied() {
    let layout = layout(8, "tp=2,instances=2");
    let keys = [Key::DP, Key::TP, Key::PP, Key::EP, Key::MP, Key::TP_EP_PP];
    let short = plan(&layout, &keys, 0);
    let error = short.resolve(Consumer::Optimizer).unwrap_err().to_string();
    assert!(error.contains("intra_dp_cp, inter_dp_cp, intra_expt_dp, inter_expt_dp"), "{error}");

    let needs = Needs {
        keys: keys.into_iter().chain([Key::INTRA_DP_CP, Key::INTER_DP_CP]).collect(),
        none: vec![Key::INTRA_EXPT_DP, Key::INTER_EXPT_DP],
        ..Needs::default()
    };
    let plan = GroupsPlan::new(&layout, &needs, GlobalRank(6)).unwrap();
    let found = plan.resolve(Consumer::Optimizer).unwrap();
    assert_eq!(found.of(&Key::INTRA_DP_CP), Some(&Derived::Supplied));
    assert_eq!(found.of(&Key::INTRA_EXPT_DP), Some(&Derived::Empty));
}

// PG-14
#[test]
fn a_supplied_shard_group_wins_also_when_it_is_custom_or_none() {
    let layout = layout(8, "gtp=2");
    let derive = |needs: Needs| {
        let plan = GroupsPlan::new(&layout, &needs, GlobalRank(3)).unwrap();
        let derived = plan.derive(&Key::GTP, "linear");
        let members = plan.get(&Key::GTP, "linear").map(|own| own.members.to_vec());
        (derived, members.ok())
    };
    let (derived, members) = derive(Needs::keys([Key::GTP]));
    assert_eq!((derived, members), (Ok(Derived::Supplied), Some(ranks(&[2, 3]))));
    let custom = Needs {
        keys: vec![Key::GTP],
        custom: vec![(Key::GTP, vec![ranks(&[5, 3, 0]), ranks(&[7, 1])])],
        ..Needs::default()
    };
    let (derived, members) = derive(custom);
    assert_eq!((derived, members), (Ok(Derived::Supplied), Some(ranks(&[5, 3, 0]))));
    let none = Needs { none: vec![Key::GTP], ..Needs::default() };
    assert_eq!(derive(none), (Ok(Derived::Empty), None));
    // Absent, while the layout shards weights: going on alone would compute with half a weight.
    let (derived, _) = derive(Needs::default());
    assert!(matches!(derived, Err(PlanError::MissingGroup { .. })), "{derived:?}");
}

// PG-14: groups of the user's own
#[test]
fn own_groups_may_be_permuted_and_have_gaps_but_hold_a_rank_once() {
    let layout = layout(8, "");
    let ring = Key::named("ring").unwrap();
    let with = |lists: &[&[u32]], rank| {
        let needs =
            Needs { custom: vec![(ring.clone(), lists.iter().map(|l| ranks(l)).collect())], ..Needs::default() };
        GroupsPlan::new(&layout, &needs, GlobalRank(rank))
    };
    let lists: [&[u32]; 2] = [&[6, 0, 3], &[5, 2]];
    let own = |rank| {
        let plan = with(&lists, rank).unwrap();
        let own = plan.get(&ring, "test").ok()?;
        Some((own.index, own.position.0, own.size()))
    };
    assert_eq!(own(0), Some((0, 1, 3)));
    assert_eq!(own(5), Some((1, 0, 2)));
    assert_eq!(own(1), None);
    let error = |lists: &[&[u32]]| with(lists, 0).unwrap_err();
    let twice = error(&[&[1, 2], &[3, 1]]);
    assert!(twice.to_string().contains("rank 1 is in lists 0 and 1"), "{twice}");
    assert!(matches!(error(&[&[1, 1]]), PlanError::MemberTwice { .. }));
    assert!(matches!(error(&[&[1], &[]]), PlanError::NoMembers { index: 1, .. }));
    assert!(matches!(error(&[&[1, 8]]), PlanError::RankOutsideWorld { .. }));
    let needs = Needs { custom: vec![(ring.clone(), vec![ranks(&[1])])], none: vec![ring.clone()], ..Needs::default() };
    let contradiction = GroupsPlan::new(&layout, &needs, GlobalRank(0)).unwrap_err();
    assert!(matches!(contradiction, PlanError::SuppliedTwice { .. }));
}

// PG-15
#[test]
fn several_modules_have_collections_by_name_and_at_most_one_is_the_language_module() {
    let vision = plan(&layout(8, "dp=2,tp=4"), &[Key::TP], 0);
    let text = plan(&layout(8, "tp=2,pp=4"), &[Key::TP, Key::PP], 0);
    let of = |roles: [(&str, ModuleRole); 2]| {
        let plans = [vision.clone(), text.clone()];
        let named = roles.into_iter().zip(plans);
        Modules::new(named.map(|((name, role), plan)| (name.to_owned(), role, plan)))
    };
    use ModuleRole::{Language, Other};
    let modules = of([("vision", Other), ("text", Language)]).unwrap();
    assert_eq!((modules.len(), modules.is_empty()), (2, false));
    assert_eq!(modules.get("vision").unwrap().get(&Key::TP, "t").unwrap().size(), 4);
    assert_eq!(modules.language().unwrap().0, "text");
    let names: Vec<&str> = modules.iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["vision", "text"]);
    let missing = modules.get("audio").unwrap_err().to_string();
    assert!(missing.contains("vision, text"), "{missing}");
    let two = of([("vision", Language), ("text", Language)]).unwrap_err();
    assert!(two.to_string().contains("'vision' and 'text'"), "{two}");
    let same = of([("text", Other), ("text", Language)]).unwrap_err();
    assert!(matches!(same, PlanError::ModuleTwice { .. }));
    let no_language = of([("vision", Other), ("text", Other)]).unwrap();
    assert!(matches!(no_language.language(), Err(PlanError::NoLanguageModule { .. })));
}

// PG-16
#[test]
fn every_rank_creates_the_same_groups_in_the_same_order() {
    let layout = layout(16, "tp=2,gtp=2,pp=2,etp=1,ep=2");
    let keys = [Key::EMBD, Key::EXPT_DP, Key::DP_CP_GTP, Key::TP, Key::MP, Key::GTP];
    let ring = (Key::named("ring").unwrap(), vec![ranks(&[9, 2]), ranks(&[0])]);
    let of = |rank: u32, keys: Vec<Key>| {
        let needs = Needs { keys, custom: vec![ring.clone()], ..Needs::default() };
        GroupsPlan::new(&layout, &needs, GlobalRank(rank)).unwrap()
    };
    let first = of(0, keys.to_vec());
    let order: Vec<_> = first.creation_order().collect();
    for rank in 1..16u32 {
        // Needs in another order, some twice: the plan is the same.
        let mut shuffled = keys.to_vec();
        shuffled.rotate_left(rank as usize % keys.len());
        shuffled.push(Key::TP);
        let other = of(rank, shuffled);
        assert_eq!(other.creation_order().collect::<Vec<_>>(), order);
        assert_eq!(other.fingerprint(), first.fingerprint());
        assert_eq!(first.dump().agrees_with(&other.dump()), Ok(()));
        assert_eq!(other.dump().lines.len(), 1 + 7);
    }
}

// PG-16
#[test]
fn plans_that_differ_are_told_apart_by_their_first_differing_line() {
    let layout_a = layout(8, "tp=2,dp=4");
    let layout_b = layout(8, "tp=4,dp=2");
    let a = plan(&layout_a, &[Key::TP, Key::DP], 0);
    let b = plan(&layout_b, &[Key::TP, Key::DP], 1);
    let c = plan(&layout_a, &[Key::TP, Key::PP], 2);
    let d = plan(&layout_a, &[Key::TP, Key::DP, Key::PP], 3);
    let prints = [&a, &b, &c, &d].map(|p| p.fingerprint());
    for (i, one) in prints.iter().enumerate() {
        assert!(!prints[i + 1..].contains(one), "{prints:?}");
    }
    let error = a.dump().agrees_with(&b.dump()).unwrap_err();
    assert!(matches!(&error, PlanError::PlansDiffer { line: 0, ours, .. } if ours.contains("tp2")), "{error}");
    let error = a.dump().agrees_with(&c.dump()).unwrap_err();
    assert!(matches!(&error, PlanError::PlansDiffer { line: 2, other: GlobalRank(2), .. }), "{error}");
    let error = a.dump().agrees_with(&d.dump()).unwrap_err();
    assert!(matches!(&error, PlanError::PlansDiffer { line: 3, ours, .. } if ours == "(nothing)"), "{error}");
}

// 100,000 ranks and more: what other ranks do is arithmetic, never a list.
#[test]
fn own_groups_in_a_world_of_a_billion_ranks_cost_their_own_size() {
    // Listing all groups of any key here would take gigabytes, so this ends only if nobody does.
    let world = 1 << 30;
    let layout = layout(world, "tp=16,gtp=16,cp=16,dp=16,pp=16384");
    let keys = [Key::TP, Key::GTP, Key::CP, Key::DP, Key::DP_CP, Key::DP_CP_GTP, Key::EMBD, Key::PP];
    let rank = 0x2345_6789;
    let plan = plan(&layout, &keys, rank);
    let mut listed = 0;
    for entry in plan.entries() {
        let own = entry.own().map_or(0, |own| own.members.len());
        listed += own;
        if let Some(own) = entry.own() {
            assert_eq!(own.members[own.position.index()], GlobalRank(rank));
        }
    }
    assert_eq!(listed, 4 * 16 + 256 + 4096 + 16384, "not one member more, and no embedding stage");
    let tp = plan.get(&Key::TP, "test").unwrap();
    assert_eq!((tp.index, tp.position.0), (rank / 16, rank % 16));
}
