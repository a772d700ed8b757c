//! What grids, layouts, views and the registry promise, a claim a test. The feature of docs/features.md is named above each.

use std::cell::Cell;

use pgroups::{
    Axis, GlobalRank, Grid, Key, Layout, LayoutConfig, LayoutViolation, Order, ParamClass, PlanError, Planned,
    Registry, Stages, ViewConfig, ViewName, Views, WhyEmpty, WorldPart, groups_report, weight_shards,
};

use crate::planning_support::{axis, config, groups, layout, lists, plan, sized, try_layout};

fn violations(error: PlanError) -> Vec<LayoutViolation> {
    match error {
        PlanError::Layout { violations } => violations.0,
        other => panic!("expected a layout error, got: {other}"),
    }
}

// PG-01
#[test]
fn member_order_follows_the_layout_never_the_request() {
    let layout = layout(16, "tp=2,gtp=2,cp=2,dp=2");
    let one = groups(&layout, Key::over([Axis::DP, Axis::CP, Axis::TP]));
    let other = groups(&layout, Key::over([Axis::TP, Axis::DP, Axis::CP]));
    assert_eq!(one, other);
    assert_eq!(one[0], [0, 1, 4, 5, 8, 9, 12, 13]);
    assert_eq!(Key::over([Axis::CP, Axis::DP]), Key::DP_CP);
    assert_eq!(Key::over([Axis::PP, Axis::TP, Axis::GTP]), Key::MP);
    assert_eq!(Key::expert_over([Axis::DP]), Key::EXPT_DP);
    assert_eq!(Key::expert_over([Axis::PP]), Key::PP);
}

// PG-01
#[test]
fn axes_left_out_of_the_order_are_appended_at_size_one_and_refused_above() {
    let order = Order::parse("tp-pp-dp").unwrap();
    let sizes = sized(&[("tp", 2), ("pp", 2), ("dp", 2), ("ep", 1), ("cp", 1)]);
    let grid = order.grid(&sizes, GlobalRank(0), 8).unwrap();
    let laid_out: Vec<&str> = grid.axes().map(|(axis, _)| axis.name()).collect();
    assert_eq!(laid_out, ["tp", "pp", "dp", "ep", "cp"]);

    let config = LayoutConfig { order: "tp-dp-pp".into(), ..config(8, "tp=2,cp=2") };
    let told = violations(Layout::new(&config).unwrap_err());
    assert!(
        matches!(&told[..], [LayoutViolation::AxisNotInOrder { axis, size: 2, nearest, .. }]
            if *axis == Axis::CP && nearest == "tp-gtp-cp-dp-pp"),
        "{told:?}"
    );
}

// PG-02
#[test]
fn tp_is_not_found_inside_gtp() {
    let config = LayoutConfig { order: "gtp-dp-pp".into(), ..config(4, "tp=2") };
    let error = Layout::new(&config).unwrap_err();
    assert!(error.to_string().contains("no token 'tp'"), "{error}");
    let grid = Grid::new(&sized(&[("gtp", 2), ("dp", 2)]), GlobalRank(0), 4).unwrap();
    let error = grid.groups(&[Axis::TP]).unwrap_err();
    assert!(matches!(error, PlanError::UnknownAxis { .. }), "{error}");
}

// PG-02
#[test]
fn orders_with_unknown_repeated_or_malformed_tokens_are_refused() {
    let with_order = |order: &str| Layout::new(&LayoutConfig { order: order.into(), ..config(4, "tp=2") });
    let told = violations(with_order("tp-node-dp").unwrap_err());
    assert!(
        matches!(&told[..], [LayoutViolation::TokenWithoutSize { token, nearest, .. }, ..]
            if token.name() == "node" && nearest == "tp-gtp-dp"),
        "{told:?}"
    );
    let twice = with_order("tp-dp-tp").unwrap_err();
    assert!(matches!(twice, PlanError::DuplicateAxis { .. }), "{twice}");
    for malformed in ["tp--dp", "", "TP-dp", "tp-dp ", "2d-tp"] {
        let error = with_order(malformed).unwrap_err();
        assert!(matches!(error, PlanError::BadName { .. }), "{malformed}: {error}");
    }
}

// PG-03
#[test]
fn the_written_out_default_order_is_the_default() {
    let text = "tp=2,pp=2,etp=1,ep=2,egtp=2";
    let written = LayoutConfig { order: Order::DEFAULT.into(), ..config(16, text) };
    let short = LayoutConfig { order: "tp-cp-ep-dp-pp".into(), ..config(16, text) };
    let report = |config: &LayoutConfig| groups_report(&Layout::new(config).unwrap()).unwrap();
    assert_eq!(report(&written), report(&short));
    // An order of one's own that names gtp is taken at its word, in both grids.
    let own = LayoutConfig { order: "gtp-tp-cp-ep-dp-pp".into(), ..config(16, text) };
    let own = Layout::new(&own).unwrap();
    assert_eq!(groups(&own, Key::EGTP)[0], [0, 1]);
    // And the expert grid may have an order to itself.
    let apart = LayoutConfig { expert_order: Some("gtp-tp-ep-dp-pp".into()), ..config(16, text) };
    let apart = Layout::new(&apart).unwrap();
    assert_eq!(groups(&apart, Key::EGTP)[0], [0, 1]);
    assert_eq!(groups(&apart, Key::TP)[0], [0, 1]);
}

// PG-04
#[test]
fn ranks_outside_a_sub_world_are_members_of_nothing() {
    let layout = layout(16, "tp=2,dp=2,offset=4");
    assert_eq!(groups(&layout, Key::TP), [[4, 5], [6, 7]]);
    assert_eq!(groups(&layout, Key::DP), [[4, 6], [5, 7]]);
    for outside in [0, 3, 8, 15] {
        let plan = plan(&layout, &[Key::TP, Key::DP, Key::EMBD], outside);
        for entry in plan.entries() {
            assert_eq!(entry.own(), None, "rank {outside} in {}", entry.key());
        }
        let held = plan.supplied(&Key::TP).unwrap();
        assert_eq!(held, Planned::Empty(WhyEmpty::NotAMember));
    }
    let rest = try_layout(16, "tp=2,offset=4").unwrap();
    assert_eq!(rest.size(ParamClass::Dense, &Axis::DP), 6);
}

// PG-04
#[test]
fn an_offset_that_leaves_the_world_or_is_negative_is_refused() {
    let told = violations(try_layout(16, "tp=2,dp=2,offset=13").unwrap_err());
    assert!(
        matches!(told[..], [LayoutViolation::OutsideWorld { offset: 13, end: 17, world_size: 16, nearest: 3 }]),
        "{told:?}"
    );
    let told = violations(LayoutConfig::parse("tp=2,offset=-1").unwrap_err());
    assert!(
        matches!(&told[..], [LayoutViolation::BadWord { word, nearest }]
            if word == "offset=-1" && nearest == "offset=0"),
        "{told:?}"
    );
}

// PG-05
#[test]
fn replicas_are_what_both_models_leave() {
    let layout = layout(48, "tp=2,gtp=2,cp=3,etp=1,ep=4,egtp=3,pp=2");
    assert_eq!(layout.size(ParamClass::Dense, &Axis::DP), 2);
    assert_eq!(layout.size(ParamClass::Expert, &Axis::DP), 2);
    // The experts' tensor size is the dense one unless it is given.
    let same = try_layout(48, "tp=2,ep=4,pp=2").unwrap();
    assert_eq!(same.size(ParamClass::Expert, &Axis::TP), 2);
    assert_eq!(same.size(ParamClass::Expert, &Axis::DP), 3);
    // No world size: as many ranks as the sizes take.
    let config = LayoutConfig::parse("tp=2,gtp=2,dp=3").unwrap();
    assert_eq!(Layout::new(&config).unwrap().world_size(), 12);
}

// PG-05
#[test]
fn all_broken_rules_are_told_at_once_with_values_and_the_nearest_setting() {
    let config = LayoutConfig {
        cp_levels: vec![2, 2],
        embedding_stages: Stages::At(vec![0, 5]),
        own_axes: sized(&[("egtp", 1)]),
        ..config(10, "tp=4,gtp=2,etp=3,instances=2")
    };
    let error = Layout::new(&config).unwrap_err();
    let message = error.to_string();
    let parts = [
        "axis 'egtp' has a name that the layout uses itself",
        "10 ranks, but dense tp=4 x gtp=2 x cp=1 x pp=1 x egtp=1 take 8",
        "nearest: 8 or 16 ranks",
        "10 ranks, but expert expt_tp=3 x ep=1 x egtp=1 x pp=1 take 3",
        "nearest: 9 or 12 ranks",
        "gtp = 2 with 2 optimizer instances",
        "cp_levels [2, 2] multiply to 4, but cp = 1",
        "embedding_stages [0, 5] with pp = 1",
        "nearest: [0]",
    ];
    for part in parts {
        assert!(message.contains(part), "no '{part}' in: {message}");
    }
    assert_eq!(violations(error).iter().filter(|v| matches!(v, LayoutViolation::Indivisible { .. })).count(), 2);
}

// PG-05
#[test]
fn what_both_grids_break_is_told_once() {
    let told = |text: &str| violations(try_layout(8, text).unwrap_err());
    let dense = |told: &[LayoutViolation], want| matches!(told, [LayoutViolation::Indivisible { class: ParamClass::Dense, product, .. }] if *product == want);
    // The expert grid has tp = 3, too, and what mends the dense one mends it.
    assert!(dense(&told("tp=3,gtp=2"), 6), "{:?}", told("tp=3,gtp=2"));
    // Six ranks would do for the dense grid, not for experts over five.
    let both = told("tp=3,ep=5,etp=1");
    assert!(matches!(both[..], [_, LayoutViolation::Indivisible { class: ParamClass::Expert, product: 5, .. }]));
    // More ranks than a world can hold is that and nothing else.
    let crowd = violations(Layout::new(&LayoutConfig::parse("tp=70000,pp=70000,dp=3").unwrap()).unwrap_err());
    assert!(matches!(crowd[..], [LayoutViolation::OutsideWorld { end: 14_700_000_000, .. }]), "{crowd:?}");
}

// PG-05
#[test]
fn contradicting_replicas_and_instances_are_refused_by_name() {
    let told = violations(try_layout(16, "tp=2,dp=4,edp=7").unwrap_err());
    assert!(
        matches!(
            told[..],
            [
                LayoutViolation::Replicas { field: "dp", given: 4, quotient: 8, .. },
                LayoutViolation::Replicas { field: "expt_dp", given: 7, quotient: 8, .. },
            ]
        ),
        "{told:?}"
    );
    let told = violations(try_layout(16, "egtp=2,instances=2").unwrap_err());
    assert!(
        matches!(told[..], [LayoutViolation::ShardedInstances { field: "egtp", size: 2, instances: 2 }]),
        "{told:?}"
    );
    let told = violations(LayoutConfig::parse("tp=0,pp=x,tp=2,dp=2,dp=3").unwrap_err());
    assert_eq!(told.len(), 3, "tp=0, pp=x and the second dp: {told:?}");
    let zero = LayoutConfig { gtp: 0, ..config(8, "tp=2") };
    let told = violations(Layout::new(&zero).unwrap_err());
    assert!(matches!(&told[..], [LayoutViolation::ZeroSize { field }] if field == "gtp"), "{told:?}");
}

// PG-06
#[test]
fn pipelines_that_differ_between_the_grids_are_refused() {
    let before_dp = LayoutConfig { order: "tp-ep-pp-dp".into(), ..config(16, "tp=2,pp=2,etp=1") };
    let told = violations(Layout::new(&before_dp).unwrap_err());
    assert!(
        matches!(&told[..], [LayoutViolation::ReplicasBeforeStages { dp: 4, expt_dp: 8, pp: 2, nearest, .. }]
            if nearest == "tp-gtp-ep-dp-pp"),
        "{told:?}"
    );
    // Equal replicas are not enough if the axes before pp differ.
    let apart = LayoutConfig { order: "tp-pp-dp-cp-ep".into(), ..config(16, "tp=4,pp=2,etp=2,ep=2") };
    let told = violations(Layout::new(&apart).unwrap_err());
    assert!(matches!(&told[..], [LayoutViolation::PipelinesDiffer { .. }]), "{told:?}");
}

// PG-07
#[test]
fn model_wide_groups_span_the_shard_axis() {
    let layout = layout(16, "tp=2,gtp=2,pp=2,etp=1,ep=2,egtp=2");
    assert_eq!(groups(&layout, Key::DP_CP)[0], [0, 4]);
    assert_eq!(groups(&layout, Key::DP_CP_GTP)[0], [0, 2, 4, 6]);
    assert_eq!(groups(&layout, Key::MP)[0], [0, 1, 2, 3, 8, 9, 10, 11]);
    assert_eq!(groups(&layout, Key::TP_DP_CP)[0], [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(groups(&layout, Key::TP_EP_PP)[0], [0, 1, 2, 3, 8, 9, 10, 11]);
    assert_eq!(groups(&layout, Key::EXPT_DP_EGTP)[0], [0, 2, 4, 6]);
}

// PG-07, and the grid of each class of parameters
#[test]
fn expert_replicas_are_counted_on_the_expert_grid() {
    // All four ranks shard the dense weights, none the experts': four expert replicas, one dense.
    let dense_only = layout(4, "gtp=4");
    assert_eq!(groups(&dense_only, Key::DP_CP), [[0], [1], [2], [3]]);
    assert_eq!(groups(&dense_only, Key::EXPT_DP), [[0, 1, 2, 3]]);
    // And the other way round: two dense shards, four expert shards.
    let wider = layout(4, "gtp=2,egtp=4");
    assert_eq!(groups(&wider, Key::GTP), [[0, 1], [2, 3]]);
    assert_eq!(groups(&wider, Key::EGTP), [[0, 1, 2, 3]]);
    assert_eq!(groups(&wider, Key::EXPT_DP), [[0], [1], [2], [3]]);
}

// PG-08
#[test]
fn middle_stages_are_in_no_embedding_group() {
    let layout = layout(12, "tp=2,pp=3");
    let holds = |rank, key: Key| {
        plan(&layout, std::slice::from_ref(&key), rank).supplied(&key).map(|p| matches!(p, Planned::Member(_)))
    };
    for rank in 0..12 {
        let stage = rank / 4;
        assert_eq!(holds(rank, Key::EMBD), Ok(stage != 1), "rank {rank}");
        assert_eq!(holds(rank, Key::POS_EMBD), Ok(stage == 0), "rank {rank}");
    }
    let bad = LayoutConfig { position_stages: Stages::At(vec![]), ..config(4, "pp=2") };
    let told = violations(Layout::new(&bad).unwrap_err());
    assert!(matches!(&told[..], [LayoutViolation::Stages { field: "position_stages", .. }]), "{told:?}");
}

// PG-09
#[test]
fn replicas_that_do_not_divide_into_instances_are_refused() {
    let told = violations(try_layout(12, "tp=2,instances=4").unwrap_err());
    assert!(
        matches!(
            told[..],
            [
                LayoutViolation::Instances { what: "dp x cp", replicas: 6, instances: 4, nearest: 3 },
                LayoutViolation::Instances { what: "expt_dp", replicas: 6, instances: 4, nearest: 3 },
            ]
        ),
        "{told:?}"
    );
}

fn base_16() -> Views {
    let base = sized(&[("tp", 2), ("dp", 4), ("pp", 2)]);
    Views::new(Grid::new(&base, GlobalRank(0), 16).unwrap(), 16)
}

fn with_experts() -> Views {
    let mut views = base_16();
    let axes = sized(&[("ep", 4), ("edp", 2), ("pp", 2)]);
    views.register(ViewName::EXPERT, &axes, &[Axis::PP]).unwrap();
    views
}

// PG-10
#[test]
fn a_view_lays_other_axes_over_the_same_ranks() {
    let views = with_experts();
    let of = |names: &[&str]| {
        let axes: Vec<Axis> = names.iter().map(|n| axis(n)).collect();
        lists(&views.groups(&ViewName::EXPERT, &axes).unwrap())
    };
    assert_eq!(of(&["ep"]), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]);
    let edp = [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]];
    assert_eq!(of(&["edp"]), edp);
    let pp = [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]];
    assert_eq!(of(&["pp"]), pp);
    assert_eq!(lists(&views.groups(&ViewName::DENSE, &[Axis::PP]).unwrap()), pp);
}

// PG-10
#[test]
fn views_that_do_not_fit_the_base_are_refused() {
    let mut views = with_experts();
    let mut refused = |name: &str, axes: &[(&str, u32)], shared: &[&str]| {
        let shared: Vec<Axis> = shared.iter().map(|n| axis(n)).collect();
        let name = ViewName::new(name).unwrap();
        views.register(name, &sized(axes), &shared).unwrap_err()
    };
    let again = refused("expert", &[("ep", 16)], &[]);
    assert!(matches!(again, PlanError::ViewTwice { .. }), "{again}");
    let base = refused("dense", &[("ep", 16)], &[]);
    assert!(matches!(base, PlanError::ViewTwice { .. }), "{base}");
    let product = refused("v", &[("ep", 5), ("edp", 4)], &[]);
    assert!(matches!(product, PlanError::ViewSize { product: 20, base: 16, .. }), "{product}");
    let twice = refused("v", &[("ep", 4), ("ep", 4)], &[]);
    assert!(matches!(twice, PlanError::DuplicateAxis { .. }), "{twice}");
    let zero = refused("v", &[("ep", 16), ("edp", 0)], &[]);
    assert!(matches!(zero, PlanError::ZeroSize { .. }), "{zero}");
    let missing = refused("v", &[("ep", 16)], &["pp"]);
    assert!(missing.to_string().contains("'v' does not have"), "{missing}");
    let missing = refused("v", &[("ep", 16)], &["ep"]);
    assert!(missing.to_string().contains("'dense' does not have"), "{missing}");
    // The base's dp is [0, 2, 4, 6], this view's is [0, 4, 8, 12].
    let differs = refused("v", &[("ep", 4), ("dp", 4)], &["dp"]);
    assert!(matches!(differs, PlanError::SharedAxisDiffers { .. }), "{differs}");
    let unknown = views.grid(&ViewName::new("vision").unwrap()).unwrap_err();
    assert!(unknown.to_string().contains("dense, expert"), "{unknown}");
    let unknown = views.key(&ViewName::EXPERT, &[Axis::TP]).unwrap_err();
    assert!(matches!(unknown, PlanError::UnknownAxis { .. }), "{unknown}");
}

// PG-10
#[test]
fn a_layout_carries_views_and_axes_of_the_users_own() {
    let (node, local) = (axis("node"), axis("local"));
    let hosts = ViewName::new("hosts").unwrap();
    let layout = Layout::new(&LayoutConfig {
        own_axes: sized(&[("ring", 3)]),
        order: "tp-ring-dp".into(),
        views: vec![ViewConfig { name: hosts.clone(), axes: sized(&[("local", 4), ("node", 3)]), shared: vec![] }],
        ..config(12, "tp=2")
    })
    .unwrap();
    assert_eq!(groups(&layout, Key::over([axis("ring")]))[1], [1, 3, 5]);
    assert_eq!(groups(&layout, Key::in_view(hosts.clone(), [local]))[2], [8, 9, 10, 11]);
    assert_eq!(groups(&layout, Key::in_view(hosts, [node]))[3], [3, 7, 11]);
    // Experts' replicas take the ranks of an axis that they do not know.
    assert_eq!(groups(&layout, Key::EXPT_DP)[0], [0, 2, 4, 6, 8, 10]);
}

// PG-11
#[test]
fn a_group_is_created_once_read_after_creation_and_released_once() {
    let mut registry: Registry<usize> = Registry::new(with_experts());
    let (tp, pp) = ([Axis::TP], [Axis::PP]);
    let experts = [axis("edp"), Axis::EP];
    let early = registry.get(&ViewName::DENSE, &tp).unwrap_err();
    assert!(matches!(early, PlanError::NotCreated { .. }), "{early}");

    assert_eq!(registry.create(&ViewName::DENSE, &tp, |_| 7), Ok(&7));
    assert_eq!(registry.create(&ViewName::DENSE, &pp, |_| 8), Ok(&8));
    assert_eq!(registry.create(&ViewName::EXPERT, &experts, |_| 9), Ok(&9));
    let keys: Vec<String> = registry.keys().map(ToString::to_string).collect();
    assert_eq!(keys, ["tp", "pp", "expert:ep+edp"]);

    // The shared axis is one object, whichever view asks, and so is a set of axes in any order.
    assert_eq!(registry.get(&ViewName::EXPERT, &pp), Ok(&8));
    assert_eq!(registry.get(&ViewName::EXPERT, &[Axis::EP, axis("edp")]), Ok(&9));
    let made = Cell::new(false);
    let twice = registry.create(&ViewName::EXPERT, &pp, |_| {
        made.set(true);
        10
    });
    assert!(matches!(twice, Err(PlanError::CreatedTwice { .. })), "{twice:?}");
    assert!(!made.get(), "a refused creation makes nothing");

    let released: Vec<usize> = registry.destroy().into_iter().map(|(_, v)| v).collect();
    assert_eq!(released, [9, 8, 7]);
}

#[test]
fn a_report_has_every_standard_key_and_groups_of_one() {
    let report = groups_report(&layout(8, "tp=2,gtp=2,dp=2")).unwrap();
    let names: Vec<String> = report.iter().map(|(key, _)| key.to_string()).collect();
    let wanted = [
        "tp",
        "gtp",
        "cp",
        "dp",
        "pp",
        "mp",
        "dp_cp",
        "dp_cp_gtp",
        "tp_cp",
        "tp_dp",
        "tp_dp_cp",
        "ep",
        "expt_tp",
        "egtp",
        "expt_dp",
        "expt_dp_egtp",
        "tp_ep",
        "tp_ep_pp",
        "embd",
        "pos_embd",
        "intra_dp_cp",
        "inter_dp_cp",
        "intra_expt_dp",
        "inter_expt_dp",
        "intra_dist_opt",
    ];
    assert_eq!(names[..wanted.len()], wanted);
    let of = |key| lists(report.get(&key).unwrap());
    assert_eq!(of(Key::CP), [[0], [1], [2], [3], [4], [5], [6], [7]]);
    assert_eq!(of(Key::DP_CP_GTP), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    assert!(report.to_string().contains("dp_cp_gtp: [0, 2, 4, 6] [1, 3, 5, 7]\n"));
    for (key, _) in report.iter() {
        assert_eq!(&Key::named(&key.to_string()).unwrap(), key, "names read back");
    }
}

#[test]
fn weight_shards_follow_from_either_input() {
    let rows = [
        ((1, None, 1), (1, 1)),
        ((2, None, 1), (2, 1)),
        ((2, None, 4), (8, 4)),
        ((2, Some(4), 1), (4, 2)),
        ((2, Some(8), 1), (8, 4)),
        ((2, Some(8), 2), (8, 4)),
        ((4, Some(4), 1), (4, 1)),
    ];
    for ((tp, shards, gtp), wanted) in rows {
        assert_eq!(weight_shards(tp, shards, gtp), Ok(wanted));
    }
    let low = weight_shards(4, Some(2), 1).unwrap_err();
    assert!(matches!(low, PlanError::WeightShards { shards: 2, tp: 4, nearest: 4 }));
    let odd = weight_shards(2, Some(3), 1).unwrap_err();
    assert!(matches!(odd, PlanError::WeightShards { nearest: 4, .. }));
}

#[test]
fn world_parts_say_where_they_start() {
    assert_eq!(WorldPart::Whole.offset(), GlobalRank(0));
    let part = WorldPart::From { offset: GlobalRank(6), ranks: Some(2) };
    let layout = Layout::new(&LayoutConfig { part, ..config(8, "tp=2") }).unwrap();
    assert_eq!(groups(&layout, Key::TP), [[6, 7]]);
}
