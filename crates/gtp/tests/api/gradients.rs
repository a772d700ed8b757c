//! Gradients of whole weights become means or sums of shards, once each, in order.

use std::num::NonZeroUsize;

use device::{Access, Label, Machine, Note, Op, Stream, Trace, TraceEvent, View, ops::Fill};
use graphcap::{GateMode, Scope};
use gtp::{GradScaling, GradSum, PassKind};
use pgroups::{LayoutConfig, Param, Pass, Turn, Weights};

use crate::api::{
    backend::Backend,
    mixed::{MODES, capture, layers, set},
    rig::{Caught, hosts, machines, options},
    script::{Act, there_and_back},
    stand::{Found, Model, Stand, check_all},
};

/// Overwrites the gradient of a weight, in a pass of its own.
fn contribute(
    w: &mut dyn Weights,
    param: &Param,
    on: &Stream,
    value: impl Fn(usize) -> f32 + Send + Sync + 'static,
) -> Result<(), Caught> {
    let out = w.grad(param, on)?;
    let (grad, _) = out.target();
    on.launch(Op::host("wgrad", "test", vec![Access::write(grad)], move |args| {
        args.write::<f32>(0)?.iter_mut().enumerate().for_each(|(e, g)| *g = value(e));
        Ok(())
    }))?;
    Ok(w.grad_done(param, on)?)
}

fn grad(stand: &Stand, i: usize) -> Result<Vec<f32>, Caught> {
    Ok(stand.found()?.grads[i].clone())
}

/// The main gradients of one weight over `peers` ranks, of which each contributes `value` of its rank.
fn reduced(
    machine: &Machine,
    peers: u32,
    (scaling, sum): (GradScaling, GradSum),
    value: fn(u32, usize) -> f32,
) -> (Vec<Vec<f32>>, Trace) {
    let mut model = Model::new(peers, &[(6, 2), (3, 2)]);
    (model.config.scaling, model.config.sum) = (scaling, sum);
    model.specs.iter_mut().for_each(|spec| spec.placement.cuts[0].alignment = 2);
    let (grads, trace) = model.traced(machine, None, |stand| {
        let rank = stand.rank.global.0;
        for _ in 0..2 {
            let mut weights = stand.gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Backward))?;
            let (on, params) = (&stand.script.streams[0], &stand.script.params);
            contribute(&mut weights, &params[0], on, move |e| value(rank, e))?;
            contribute(&mut weights, &params[1], on, move |e| value(rank, e + 3))?;
            weights.finish()?;
        }
        grad(stand, 0)
    });
    (grads.unwrap(), trace)
}

/// Gathered into one list, without padding.
fn joined(grads: &[Vec<f32>]) -> Vec<f32> {
    grads.concat()[..12].to_vec()
}

#[test]
fn means_are_scaled_ahead_of_the_sum_and_sums_are_not() {
    // Sums of thirds round in ways of their own: equal bits tell the order of operations.
    let value = |rank: u32, e: usize| (1 << rank) as f32 + 0.1 * e as f32;
    for machine in hosts() {
        for peers in [2, 3, 4] {
            let sum = |scale: f32| -> Vec<f32> {
                let of = |e: usize| (0..peers).map(|rank| value(rank, e) * scale).reduce(|a, b| a + b).unwrap();
                // Two passes.
                (0..12).map(|e| of(e) + of(e)).collect()
            };
            let (means, _) = reduced(&machine, peers, (GradScaling::Mean, GradSum::Collective), value);
            assert_eq!(joined(&means), sum(1.0 / peers as f32), "{peers} peers");
            let (sums, _) = reduced(&machine, peers, (GradScaling::Sum, GradSum::Collective), value);
            assert_eq!(joined(&sums), sum(1.0), "{peers} peers");
        }
    }
}

/// Calls of the reducing communicator on rank 0.
fn calls(trace: &Trace) -> Vec<Label> {
    let of = |event: &TraceEvent| match event {
        TraceEvent::Joint { rank: 0, group, what, .. } if group.ends_with("gtp_reduce") => Some(what.clone()),
        _ => None,
    };
    trace.events.iter().filter_map(of).collect()
}

#[test]
fn sums_in_f32_add_up_everybodys_pieces_where_they_arrive_and_two_peers_leave_it_to_the_collective() {
    let value = |rank: u32, e: usize| if rank == 0 { 1.0 + e as f32 } else { 0.3 / (rank as f32 + e as f32) };
    for machine in hosts() {
        for peers in [2, 3, 4] {
            let (collective, by_collective) = reduced(&machine, peers, (GradScaling::Mean, GradSum::Collective), value);
            let (local, by_pieces) = reduced(&machine, peers, (GradScaling::Mean, GradSum::F32), value);
            assert_eq!(local, collective, "the same additions, in the order of ranks");
            let is = |what: &str, trace: &Trace| calls(trace).iter().all(|call| call.starts_with(what));
            assert_eq!(calls(&by_pieces).len(), 4);
            assert!(is("reduce_scatter", &by_collective), "{:?}", calls(&by_collective));
            let want = if peers > 2 { "all_to_all" } else { "reduce_scatter" };
            assert!(is(want, &by_pieces), "{:?}", calls(&by_pieces));
        }
    }
}

#[test]
fn two_replicas_of_two_shards_see_the_mean_of_all_four_ranks_and_hear_of_it_once() {
    for machine in machines() {
        let mut model = Model::new(2, &[(4, 4), (8, 4)]);
        model.layout = LayoutConfig { dp: Some(2), ..model.layout };
        let grads = model.run(&machine, |stand| {
            let backend = Backend::attach(stand)?;
            for step in 0..3 {
                let rank = stand.rank.global.0;
                let mut weights = stand.gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Backward))?;
                let (on, params) = (&stand.script.streams[0], &stand.script.params);
                params.iter().try_for_each(|param| contribute(&mut weights, param, on, move |_| rank as f32 + 1.0))?;
                weights.finish()?;
                assert_eq!(backend.heard(), ["landed w0", "landed w1"]);
                if step < 2 {
                    backend.step(0.0)?;
                }
            }
            stand.found()
        });
        for found in grads {
            assert!(found.grads.iter().flatten().all(|grad| *grad == 2.5), "{found:?} on {}", machine.driver());
        }
    }
}

#[test]
fn a_tied_weight_adds_its_contributions_whatever_its_memory_held_before() {
    let junk = PassKind("junk");
    for machine in machines() {
        let grads = Model::new(2, &[(4, 4), (4, 4)]).run(&machine, |stand| {
            let tied = |stand: &mut Stand, kind: PassKind, values: [f32; 2]| -> Result<(), Caught> {
                let mut weights = stand.gtp.pass(kind, Turn::eager(Pass::Backward))?;
                let (on, params) = (&stand.script.streams[0], &stand.script.params);
                for value in values {
                    contribute(&mut weights, &params[0], on, move |_| value)?;
                }
                Ok(weights.finish()?)
            };
            let mut all = Vec::new();
            for _ in 0..4 {
                // Sevens lie where the gradients of the next pass are written.
                tied(stand, junk, [7.0, 7.0])?;
                stand.rank.device.synchronize()?;
                stand.script.streams[0].launch(Fill { y: stand.params.grads(), value: 0.0 }.op("zero")?)?;
                tied(stand, PassKind::TRAIN, [1.0, 2.0])?;
                all.extend(grad(stand, 0)?);
            }
            Ok(all)
        });
        assert!(grads.iter().flatten().all(|grad| *grad == 3.0), "{grads:?} on {}", machine.driver());
    }
}

/// What one rank's reducing stream does, and what it says, in order.
fn reductions(trace: &Trace, rank: u32) -> Vec<String> {
    let of = |event: &TraceEvent| match event {
        TraceEvent::Op { rank: of, name, accesses, .. } if *of == rank && name.starts_with("bias_grad") => {
            let target = accesses.iter().find(|access| access.mode.writes()).unwrap();
            Some(format!("add at {}", target.region.start))
        }
        TraceEvent::Note { rank: of, note: Note::Landed { param, regions }, .. } if *of == rank => {
            Some(format!("landed {param} at {}", regions[0].region.start))
        }
        _ => None,
    };
    trace.events.iter().filter_map(of).collect()
}

#[test]
fn each_gradient_lands_once_behind_its_own_addition() {
    for machine in machines() {
        let model = Model::new(3, &[(6, 8), (4, 8), (5, 8)]);
        let (results, trace) = model.traced(&machine, None, |stand| {
            let _backend = Backend::attach(stand)?;
            stand.pass(&there_and_back(&[0, 1, 2, 1]))?;
            let places = stand.script.params.iter().map(|param| param.address().region.start).collect::<Vec<_>>();
            stand.rank.device.synchronize()?;
            Ok(places)
        });
        for (rank, places) in (0..).zip(results.unwrap()) {
            let want =
                [1, 2, 1, 0].map(|w: usize| [format!("add at {}", places[w]), format!("landed w{w} at {}", places[w])]);
            assert_eq!(reductions(&trace, rank), want.concat(), "on {}", machine.driver());
        }
    }
}

#[test]
fn a_replayed_graph_tells_of_those_gradients_that_it_holds() {
    for machine in machines() {
        for gates in MODES {
            let mut model = Model::new(2, &[(4, 4), (8, 4), (4, 4)]);
            model.layout = LayoutConfig { dp: Some(2), ..model.layout };
            let parts = layers(&[0, 1, 2]);
            model.run(&machine, |stand| {
                let backend = Backend::attach(stand)?;
                stand.pass(&parts.concat())?;
                backend.step(0.5)?;
                stand.gtp.plan()?;
                let mut set = set(stand, Scope::Layer, gates, 1)?;
                let graphs = capture(stand, &mut set, PassKind::TRAIN, &parts)?;
                let want = ["", "", "", "landed w2", "landed w1", "landed w0"];
                for _ in 0..3 {
                    for (graph, want) in graphs.iter().zip(want) {
                        backend.heard();
                        graph.replay(&stand.script.streams[0], &[])?;
                        let heard = backend.heard();
                        let landed: Vec<_> = heard.iter().filter(|word| word.starts_with("landed")).collect();
                        assert_eq!(landed, Vec::from_iter((!want.is_empty()).then_some(want)));
                    }
                    backend.step(0.5)?;
                }
                Ok(stand.rank.device.synchronize()?)
            });
        }
    }
}

#[test]
fn the_ring_has_as_many_slots_as_gradients_may_be_under_way_and_one_that_is_written() {
    let (machines, acts) = (machines(), there_and_back(&[0, 1, 2, 3, 4]));
    for behind in 1..5 {
        let mut model = Model::new(2, &[(4, 4); 5]);
        model.config.grads_behind = NonZeroUsize::new(behind).unwrap();
        let want = model.whole(&vec![acts.clone(); 4]);
        for machine in &machines {
            let got = model.run(machine, |stand| {
                (0..3).try_for_each(|_| stand.pass(&acts))?;
                let plan = stand.plan()?;
                let mut slots: Vec<usize> = plan.grads().iter().map(|grad| grad.slot.offset).collect();
                let next: Vec<bool> =
                    slots.windows(behind + 1).map(|run| run[1..].iter().all(|s| *s != run[0])).collect();
                assert!(next.iter().all(|apart| *apart), "a slot comes round after {behind} others");
                slots.sort_unstable();
                slots.dedup();
                assert_eq!(slots.len(), (behind + 1).min(5));
                stand.pass(&acts)?;
                stand.found()
            });
            check_all(&got, &want, &format!("{behind} behind on {}", machine.driver()));
        }
    }
}

fn read_grads(stand: &Stand, log: &View) -> Result<(), Caught> {
    let accesses = vec![Access::read(stand.params.grads()), Access::update(log)];
    let read = Op::host("clip", "test", accesses, |args| {
        let sum: f32 = args.read::<f32>(0)?.iter().sum();
        args.write::<f32>(1)?[0] = sum;
        Ok(())
    });
    Ok(stand.script.streams[1].launch(read)?)
}

#[test]
fn whoever_joins_the_account_is_behind_all_reductions_and_nobody_else_is() {
    let (model, acts) = (Model::new(2, &[(4, 4), (6, 4)]), there_and_back(&[0, 1]));
    let run = |fenced: bool| {
        model.verified(&Machine::sim_with(1, options()), |stand| {
            for kind in [PassKind::TRAIN, PassKind::TRAIN, PassKind::EVAL, PassKind::TRAIN] {
                stand.pass_of(kind, &acts)?;
            }
            if fenced {
                stand.gtp.account().join(&stand.script.streams[1])?;
            }
            read_grads(stand, &stand.script.logs[1])
        })
    };
    let (with, without) = (run(true), run(false));
    assert!(with.is_clean(), "{with}");
    assert!(without.to_string().contains("'clip'"), "{without}");
}

#[test]
fn the_account_of_graphs_is_joined_too() {
    let (model, acts) = (Model::new(2, &[(4, 4), (6, 4)]), there_and_back(&[0, 1]));
    for fenced in [true, false] {
        let report = model.verified(&Machine::sim_with(1, options()), |stand| {
            stand.pass(&acts)?;
            stand.gtp.plan()?;
            let mut set = set(stand, Scope::Microbatch, GateMode::InGraph, 1)?;
            let graphs = capture(stand, &mut set, PassKind::TRAIN, std::slice::from_ref(&acts))?;
            graphs[0].replay(&stand.script.streams[0], &[])?;
            if fenced {
                stand.gtp.account().join(&stand.script.streams[1])?;
            }
            read_grads(stand, &stand.script.logs[1])
        });
        assert_eq!(report.is_clean(), fenced, "{report}");
    }
}

#[test]
fn recomputed_layers_change_no_gradient() {
    // Equal shapes, recompute of the first and the third: what was between them when forward ran is not there.
    let plain = there_and_back(&[0, 1, 2]);
    let again = |w: usize| {
        let inner = [Act::Enter(Pass::Recompute), Act::Take(w), Act::Back(w), Act::Enter(Pass::Backward)];
        [inner.as_slice(), &[Act::Take(w), Act::Back(w), Act::Grad(w), Act::Done(w)]].concat()
    };
    let middle = vec![Act::Take(1), Act::Back(1), Act::Grad(1), Act::Done(1)];
    let recomputed = [plain[..6].to_vec(), again(2), middle, again(0)].concat();
    let machines = machines();
    for look_ahead in 0..3 {
        let model = Model::new(2, &[(8, 4); 3]).look_ahead(look_ahead);
        let (want, whole) = (model.whole(&vec![plain.clone(); 4]), model.whole(&vec![recomputed.clone(); 4]));
        for machine in &machines {
            model.run(machine, |stand| {
                let backend = Backend::attach(stand)?;
                stand.pass(&recomputed)?;
                backend.step(0.5)?;
                backend.heard();
                stand.pass(&recomputed)?;
                let asked = backend.heard().into_iter().filter(|word| word.starts_with("ask")).count();
                assert_eq!(asked, 3, "recompute asks for nothing");
                Ok(stand.rank.device.synchronize()?)
            });
            let got = model.run(machine, |stand| {
                (0..4).try_for_each(|_| stand.pass(&recomputed))?;
                let plan = stand.plan()?;
                assert_eq!(plan.schedule().uses().iter().filter(|u| u.pass == Pass::Recompute).count(), 2);
                assert_eq!(stand.gtp.counters().repaired, 0);
                stand.found()
            });
            check_all(&got, &whole, machine.driver());
            for (got, want) in got.iter().zip(&want) {
                Found { logs: want.logs.clone(), ..got.clone() }.check(want, "gradients as without recompute");
            }
        }
    }
}
