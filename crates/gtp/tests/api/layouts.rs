//! Weights of any layout: permuted and scattered groups, padding, axes of the user's own, classes on grids of their own.

use device::{Machine, Reduce, TraceEvent};
use gtp::{PassKind, ShardAxis};
use pgroups::{Axis, Key, LayoutConfig, ParamClass, ParamSpec, Pass, PgError, Placement, Turn, Weights};

use crate::api::{
    mixed::told,
    rig::{Caught, machines, options},
    script::there_and_back,
    stand::{Model, Stand, check_all, spec},
};

fn sim() -> Machine {
    Machine::sim_with(5, options())
}

#[test]
fn groups_of_any_order_give_the_gradients_of_whole_weights() {
    let (machines, sizes) = (machines(), [(6, 4), (5, 8), (9, 2)]);
    // Replicas fastest: gather groups have gaps.
    for (gtp, dp, order) in [
        (2, 2, "dp-gtp-tp-cp-ep-pp"),
        (3, 2, "dp-gtp-tp-cp-ep-pp"),
        (4, 1, "gtp-dp-tp-cp-ep-pp"),
        (2, 3, "tp-gtp-cp-ep-dp-pp"),
    ] {
        let mut model = Model::new(gtp, &sizes);
        model.layout = LayoutConfig { dp: Some(dp), order: order.into(), ..model.layout };
        model.specs.iter_mut().for_each(|spec| spec.placement.cuts[0].alignment = 2);
        let acts = there_and_back(&[0, 1, 2, 1]);
        let want = model.whole(&vec![acts.clone(); 3]);
        for machine in &machines {
            let got = model.run(machine, |stand| {
                (0..3).try_for_each(|_| stand.pass(&acts))?;
                stand.found()
            });
            check_all(&got, &want, &format!("{order} on {}", machine.driver()));
        }
    }
}

#[test]
fn hand_made_groups_gather_if_their_members_hold_the_shards_in_their_order() {
    let mut model = Model::new(2, &[(6, 4), (5, 8)]);
    model.layout = LayoutConfig { dp: Some(2), ..model.layout };
    let acts = there_and_back(&[0, 1]);
    let logs: Vec<_> = model.whole(&vec![acts.clone(); 2]).into_iter().map(|found| found.logs).collect();
    // Ranks 0 and 2 hold the first shards, 1 and 3 the second ones.
    model.custom = vec![(Key::GTP, vec![vec![0, 3], vec![2, 1]])];
    for machine in machines() {
        let got = model.run(&machine, |stand| {
            (0..2).try_for_each(|_| stand.pass(&acts))?;
            stand.found()
        });
        got.iter().zip(&logs).for_each(|(got, want)| assert_eq!(got.logs, *want, "on {}", machine.driver()));
    }
    // One order at a time is wrong: not even the first gather is right there.
    model.custom = vec![(Key::GTP, vec![vec![1, 0], vec![2, 3]])];
    let refused = told(&model.traced(&sim(), None, |_| Ok(())).0.unwrap_err());
    let want = "group 'gtp[0]@0..4#0' has rank 1 at place 0, which holds shard 1 of 'w0'";
    assert!(refused.contains(want), "{refused}");
}

#[test]
fn padding_reaches_no_product_and_no_gradient() {
    // 10 rows over 4 with alignment 2: shards of 4 rows, the third one half padding, the last one all.
    let mut model = Model::new(4, &[(10, 3)]);
    model.specs[0].placement.cuts[0].alignment = 2;
    let acts = there_and_back(&[0]);
    let (results, trace) = model.traced(&sim(), None, |stand| {
        (0..3).try_for_each(|_| stand.pass(&acts))?;
        let mut weights = stand.gtp.pass(PassKind::EVAL, Turn::eager(Pass::Forward))?;
        let (param, on) = (&stand.script.params[0], &stand.script.streams[0]);
        let value = weights.take(param, on)?;
        assert_eq!(value.shape(), [10, 3]);
        weights.give_back(param, on)?;
        weights.finish()?;
        stand.found()
    });
    for (rank, found) in results.unwrap().into_iter().enumerate() {
        let rows = 10usize.saturating_sub(rank * 4).min(4);
        let (own, padding) = found.grads[0].split_at(rows * 3);
        assert_eq!(found.grads[0].len(), 12);
        assert!(own.iter().all(|grad| *grad != 0.0) && padding.iter().all(|grad| *grad == 0.0), "{found:?}");
    }
    for event in &trace.events {
        if let TraceEvent::Op { name, accesses, .. } = event
            && (*name == *"use" || name.starts_with("wgrad"))
        {
            assert_eq!(
                accesses[0].region.rows * accesses[0].region.row_bytes,
                10 * 3 * 4,
                "{name} sees the weight and nothing else"
            );
        }
    }
}

/// The elements of a weight as rank 0 of a world of one has them.
fn whole_values(spec: &ParamSpec) -> Vec<f32> {
    let mut model = Model::new(1, &[]);
    let placement = Placement::whole(spec.placement.global.clone());
    model.specs = vec![ParamSpec { placement, ..spec.clone() }];
    model.run(&sim(), |stand| taken(stand, 0)).remove(0)
}

fn taken(stand: &mut Stand, i: usize) -> Result<Vec<f32>, Caught> {
    let mut weights = stand.gtp.pass(PassKind::EVAL, Turn::eager(Pass::Forward))?;
    let (param, on) = (&stand.script.params[i], &stand.script.streams[0]);
    let value = weights.take(param, on)?;
    let values = on.download::<f32>(&value)?.wait()?;
    weights.give_back(param, on)?;
    weights.finish()?;
    Ok(values)
}

#[test]
fn a_tensor_groups_part_is_gathered_and_no_more() {
    // Columns (rows of the matrix) over tp, then gtp; and the other dimension over tp.
    for (dim, order) in [(0, "tp-gtp-cp-ep-dp-pp"), (1, "gtp-tp-cp-ep-dp-pp")] {
        let mut model = Model::new(2, &[]);
        model.layout = LayoutConfig { tp: 2, order: order.into(), ..model.layout };
        let whole = spec("w0", 12, 4);
        let placement = whole.placement.clone().cut(dim, Axis::TP, 1).cut(0, Axis::GTP, 1);
        model.specs = vec![ParamSpec { placement, ..whole.clone() }];
        let values = whole_values(&whole);
        let got = model.run(&sim(), |stand| {
            let grid = stand.rank.global;
            Ok((grid, taken(stand, 0)?))
        });
        let layout = model.laid_out();
        for (rank, got) in got {
            let tp = layout.grid(ParamClass::Dense).coordinate(rank, &Axis::TP).unwrap() as usize;
            let mine = |e: usize| if dim == 0 { e / 4 / 6 == tp } else { e % 4 / 2 == tp };
            let want: Vec<f32> = (0..48).filter(|e| mine(*e)).map(|e| values[e]).collect();
            assert_eq!(got, want, "dimension {dim}, {rank:?}");
        }
    }
}

#[test]
fn two_axes_have_streams_communicators_and_look_aheads_of_their_own() {
    let outer = Axis::new("outer").unwrap();
    let mut model = Model::new(2, &[(6, 4), (8, 4), (4, 4), (6, 2)]);
    model.layout =
        LayoutConfig { own_axes: vec![(outer.clone(), 3)], order: "tp-gtp-outer-cp-ep-dp-pp".into(), ..model.layout };
    // Weights 1 and 2 are cut over the user's own axis, with a deeper look-ahead.
    for w in [1, 2] {
        model.specs[w].placement.cuts[0].axis = outer.clone();
        model.specs[w].placement.cuts[0].alignment = 1;
    }
    let own = ShardAxis { look_ahead: 3, ..ShardAxis::new(ParamClass::Dense, outer) };
    model.config.axes.push(own);
    let acts = there_and_back(&[0, 1, 2, 3, 2]);
    let want = model.whole(&vec![acts.clone(); 3]);
    for machine in machines() {
        let got = model.run(&machine, |stand| {
            (0..3).try_for_each(|_| stand.pass(&acts))?;
            let streams = stand.rank.device.stream_names();
            for name in ["gtp.gather", "gtp.reduce", "gtp.gather.outer", "gtp.reduce.outer"] {
                assert_eq!(streams.iter().filter(|known| *known == name).count(), 1, "{name} in {streams:?}");
            }
            let plan = stand.plan()?;
            let axes: Vec<usize> = [0, 1, 2, 3].map(|w: usize| usize::from(w == 1 || w == 2)).into();
            for gather in plan.gathers() {
                let weight = |u: gtp::UseIndex| plan.schedule().uses()[u.0].weight.0;
                let (first, issued) = (gather.uses[0], gather.issued_at);
                let between = (issued.0..first.0).filter(|u| axes[weight(gtp::UseIndex(*u))] == axes[weight(first)]);
                let limit = [1, 3][axes[weight(first)]];
                assert!(between.count() <= limit, "{gather:?}");
            }
            stand.found()
        });
        check_all(&got, &want, machine.driver());
    }
}

/// World of four; dense weights over `gtp`, experts over `egtp`.
fn experts(gtp: u32, egtp: u32) -> Model {
    let mut model = Model::new(gtp, &[(4, 4), (8, 2)]);
    model.layout = LayoutConfig { world_size: Some(4), egtp, ..model.layout };
    model.specs[1].class = ParamClass::Expert;
    model.config.axes.push(ShardAxis::new(ParamClass::Expert, Axis::GTP));
    model
}

#[test]
fn experts_are_cut_and_averaged_over_their_own_grid() {
    let machines = machines();
    for (gtp, egtp) in [(4, 1), (2, 4), (4, 2), (1, 2), (1, 4), (4, 4)] {
        let model = experts(gtp, egtp);
        let acts = there_and_back(&[0, 1]);
        let want = model.whole(&vec![acts.clone(); 3]);
        for machine in &machines {
            let got = model.run(machine, |stand| {
                (0..3).try_for_each(|_| stand.pass(&acts))?;
                stand.found()
            });
            check_all(&got, &want, &format!("gtp {gtp}, egtp {egtp} on {}", machine.driver()));
        }
    }
}

/// Writes `value` by row into the gradient of the expert.
fn expert_gradient(stand: &mut Stand, value: fn(u32, usize) -> f32) -> Result<(), Caught> {
    let rank = stand.rank.global.0;
    let mut weights = stand.gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Backward))?;
    let (param, on) = (&stand.script.params[1], &stand.script.streams[0]);
    let out = weights.grad(param, on)?;
    let (grad, into) = out.target();
    let overwrite = matches!(into, device::ops::Accumulate::Overwrite);
    on.launch(device::Op::host("wgrad", "test", vec![device::Access::update(grad)], move |args| {
        let grad = args.write::<f32>(0)?.iter_mut().enumerate();
        grad.for_each(|(e, g)| *g = if overwrite { 0.0 } else { *g } + value(rank, e / 2));
        Ok(())
    }))?;
    weights.grad_done(param, on)?;
    Ok(weights.finish()?)
}

#[test]
fn an_expert_that_is_not_cut_is_averaged_over_its_replicas_alone() {
    // The dense weights' four shards have nothing to do with it.
    let grads = experts(4, 1).run(&sim(), |stand| {
        expert_gradient(stand, |rank, _| rank as f32 + 1.0)?;
        let on = &stand.script.streams[0];
        stand.groups.get(&Key::EXPT_DP, "the test")?.all_reduce(
            on,
            &stand.params.grads().flat(64..80)?,
            Reduce::Avg,
        )?;
        Ok(stand.found()?.grads[1].clone())
    });
    assert!(grads.iter().flatten().all(|grad| *grad == 2.5), "{grads:?}");
}

#[test]
fn an_expert_that_is_cut_over_more_ranks_than_dense_weights_keeps_its_slices_apart() {
    // Rank r's gradient of row block b is 10 b + r.
    for machine in machines() {
        let grads = experts(2, 4).run(&machine, |stand| {
            expert_gradient(stand, |rank, row| 10.0 * (row / 2) as f32 + rank as f32)?;
            Ok(stand.found()?.grads[1].clone())
        });
        let want: Vec<Vec<f32>> = [1.5, 11.5, 21.5, 31.5].map(|mean| vec![mean; 4]).into();
        assert_eq!(grads, want, "on {}", machine.driver());
    }
}

#[test]
fn a_model_that_is_built_again_has_settings_slots_and_communicators_of_its_own() {
    let (acts, other) = (there_and_back(&[0, 1, 2]), there_and_back(&[2, 0]));
    let model = Model::new(2, &[(4, 4), (6, 4), (4, 4)]);
    let second = model.clone().look_ahead(3);
    let want = (model.whole(&vec![acts.clone(); 3]), model.whole(&[&other, &acts, &acts].map(Clone::clone)));
    for machine in machines() {
        let got = model.run(&machine, |stand| {
            // Beside the first one, over the same parameters' groups; interleaved.
            let params =
                pgroups::ParamSet::allocate(&stand.rank, &second.laid_out(), &second.specs, Default::default())?;
            params.fill(&stand.script.streams[0], pgroups::Seed(7))?;
            let pairs = params.params().iter().zip(&second.specs);
            let gtp = gtp::Gtp::new(&stand.rank, &second.laid_out(), &stand.groups, pairs, second.config.clone())?;
            let log = stand.rank.device.alloc("log", &[2048], device::DType::F32, device::MemoryKind::Other)?;
            stand.script.streams[0].upload(&log, vec![0.0; 2048])?;
            let mut script = stand.script.clone();
            (script.params, script.logs[0]) = (params.params().to_vec(), log);
            let mut twin = Stand { rank: stand.rank.clone(), groups: stand.groups.clone(), params, gtp, script };
            for step in 0..3 {
                stand.pass(&acts)?;
                twin.pass(if step == 0 { &other } else { &acts })?;
            }
            let (own, twins) = (stand.gtp.counters(), twin.gtp.counters());
            assert_eq!((own.deviations, own.plans), (0, 1));
            assert_eq!((twins.deviations, twins.plans), (1, 2));
            Ok((stand.found()?, twin.found()?))
        });
        let (first, twins): (Vec<_>, Vec<_>) = got.into_iter().unzip();
        check_all(&first, &want.0, machine.driver());
        check_all(&twins, &want.1, machine.driver());
    }
}

/// What building a model is refused with.
fn refused(model: &Model) -> String {
    let error: PgError = model.traced(&sim(), None, |_| Ok(())).0.unwrap_err();
    told(&error)
}

#[test]
fn weights_that_cannot_be_gathered_are_refused_by_name() {
    let outer = Axis::new("outer").unwrap();
    let mut model = Model::new(2, &[(8, 4)]);
    model.layout =
        LayoutConfig { own_axes: vec![(outer.clone(), 2)], order: "tp-gtp-outer-cp-ep-dp-pp".into(), ..model.layout };
    model.config.axes.push(ShardAxis::new(ParamClass::Dense, outer.clone()));
    let mut twice = model.clone();
    twice.specs[0].placement = Placement::whole([8, 4]).cut(0, Axis::GTP, 1).cut(0, outer, 1);
    let text = refused(&twice);
    assert!(text.contains("weight 'w0' is cut over gtp and over outer"), "{text}");
    let mut columns = model.clone();
    columns.specs[0].placement = Placement::whole([8, 4]).cut(1, Axis::GTP, 1);
    let text = refused(&columns);
    assert!(text.contains("weight 'w0' is cut over gtp on dimension 1"), "{text}");
    let mut uneven = model;
    uneven.specs[0].placement = Placement::whole([7, 4]).cut(0, Axis::GTP, 0);
    let text = refused(&uneven);
    assert!(text.contains('7') && text.contains('2'), "{text}");
}
