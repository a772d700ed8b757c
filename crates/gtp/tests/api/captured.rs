//! Graphs of sharded passes: whole passes and layers, in order and out of it.

use graphcap::{
    GateMode, Graph, GraphConfig, GraphSet, Scope,
    verify::{VerifyOptions, verify},
};
use gtp::{Drain, PassKind};
use pgroups::{Pass, Weights};

use crate::api::rig::{Caught, Chain, Rig, backward, forward, machines, on_all, train};

const MODES: [GateMode; 2] = [GateMode::BeforeReplay, GateMode::InGraph];

fn set(rig: &Rig, scope: Scope, gates: GateMode) -> Result<GraphSet, Caught> {
    Ok(GraphSet::new(&rig.compute, GraphConfig { gates, ..GraphConfig::new(scope) })?)
}

/// One graph of the whole pass.
fn capture_pass(rig: &mut Rig, set: &mut GraphSet) -> Result<Graph, Caught> {
    let all = rig.all();
    let Rig { params, gtp, compute, x, dx, .. } = rig;
    let (graph, ()) = set.capture("pass", compute, |scope| -> Result<(), Caught> {
        let mut weights = gtp.pass(PassKind::TRAIN, scope.turn(Pass::Forward))?;
        train(&mut weights, params, compute, x, dx, &all)?;
        Ok(weights.finish()?)
    })?;
    Ok(graph)
}

/// A graph of each weight's forward, then of each one's backward.
fn capture_layers(rig: &mut Rig, set: &mut GraphSet) -> Result<Vec<Graph>, Caught> {
    let all = rig.all();
    let Rig { params, gtp, compute, x, dx, .. } = rig;
    let mut graphs = Vec::new();
    for &i in &all {
        let (graph, ()) = set.capture(&format!("forward {i}"), compute, |scope| -> Result<(), Caught> {
            let turn = scope.turn(Pass::Forward);
            let mut weights = if i == 0 { gtp.pass(PassKind::TRAIN, turn)? } else { gtp.resume(turn) };
            forward(&mut weights, params, compute, x, i)?;
            Ok(weights.finish()?)
        })?;
        graphs.push(graph);
    }
    for &i in all.iter().rev() {
        let (graph, ()) = set.capture(&format!("backward {i}"), compute, |scope| -> Result<(), Caught> {
            let mut weights = gtp.resume(scope.turn(Pass::Forward));
            weights.enter(Pass::Backward);
            backward(&mut weights, params, compute, x, dx, i)?;
            Ok(weights.finish()?)
        })?;
        graphs.push(graph);
    }
    Ok(graphs)
}

fn eager(chain: &Chain, machine: &device::Machine, passes: usize) -> Vec<Vec<f32>> {
    on_all(machine, chain, |mut rig| {
        let all = rig.all();
        (0..passes).try_for_each(|_| rig.pass(&all))?;
        rig.grads()
    })
    .unwrap()
}

#[test]
fn replays_of_passes_and_of_layers_give_the_bits_of_eager_passes() {
    let chain = Chain { alignment: 2, ..Chain::new(3, &[4, 7, 5, 7]) };
    for machine in machines() {
        let want = eager(&chain, &machine, 4);
        for gates in MODES {
            for scope in [Scope::Microbatch, Scope::Layer] {
                let got = on_all(&machine, &chain, |mut rig| {
                    let all = rig.all();
                    // One pass plans, one runs as planned.
                    (0..2).try_for_each(|_| rig.pass(&all))?;
                    rig.rank.device.synchronize()?;
                    let mut set = set(&rig, scope, gates)?;
                    let graphs = match scope {
                        Scope::Layer => capture_layers(&mut rig, &mut set)?,
                        _ => vec![capture_pass(&mut rig, &mut set)?],
                    };
                    // A replayed pass, one that is submitted.
                    graphs.iter().try_for_each(|graph| graph.replay(&rig.compute, &[]))?;
                    rig.pass(&all)?;
                    let counters = rig.gtp.counters();
                    assert_eq!((counters.repaired, counters.deviations), (0, 0));
                    rig.grads()
                });
                assert_eq!(got.unwrap(), want, "{scope} {gates} on {}", machine.driver());
            }
        }
    }
}

#[test]
fn a_warm_up_between_two_graphs_of_a_pass_leaves_what_one_hands_to_the_other() {
    let chain = Chain { alignment: 2, ..Chain::new(3, &[4, 7, 5, 7]) };
    for machine in machines() {
        let want = eager(&chain, &machine, 3);
        for gates in MODES {
            let got = on_all(&machine, &chain, |mut rig| {
                let all = rig.all();
                rig.pass(&all)?;
                rig.gtp.plan()?;
                rig.rank.device.synchronize()?;
                let mut set = set(&rig, Scope::Layer, gates)?;
                let graphs = capture_layers(&mut rig, &mut set)?;
                // Each graph has gathered for the next one when all of them are warmed up.
                for pass in 0..2 {
                    for (at, graph) in graphs.iter().enumerate() {
                        graph.replay(&rig.compute, &[])?;
                        if at % 2 == pass {
                            set.warm_up(&rig.compute, 2)?;
                        }
                    }
                }
                assert_eq!(rig.gtp.counters().repaired, 0, "what was handed over is still there");
                rig.grads()
            });
            assert_eq!(got.unwrap(), want, "{gates} on {}", machine.driver());
        }
    }
}

#[test]
fn a_layer_that_is_replayed_without_its_producer_gathers_by_itself() {
    let chain = Chain::new(2, &[4, 6, 5, 3]);
    for machine in machines() {
        for gates in MODES {
            let outputs = on_all(&machine, &chain, |mut rig| {
                let all = rig.all();
                rig.pass(&all)?;
                rig.gtp.plan()?;
                let mut set = set(&rig, Scope::Layer, gates)?;
                let graphs = capture_layers(&mut rig, &mut set)?;
                let run = |order: &[usize]| order.iter().try_for_each(|i| graphs[*i].replay(&rig.compute, &[]));
                run(&[0, 1, 2])?;
                let want = rig.output()?;
                // The second without the first, the first twice, the last twice and without the second.
                run(&[1, 0, 0, 1, 0, 1, 2, 2, 0, 2])?;
                let got = rig.output()?;
                Ok((want, got, rig.gtp.counters().repaired))
            });
            for (want, got, repaired) in outputs.unwrap() {
                assert_eq!(want, got, "{gates} on {}", machine.driver());
                assert_eq!(repaired, 2, "one gather for the first, one for the last");
            }
        }
    }
}

#[test]
fn layers_that_drain_in_two_stages_give_the_bits_of_eager_passes_and_race_with_nobody() {
    let chain = Chain { alignment: 2, drain: Drain::TwoStage, ..Chain::new(3, &[4, 7, 5, 7, 3]) };
    for machine in machines() {
        let want = eager(&chain, &machine, 5);
        for gates in MODES {
            machine.trace_start();
            let got = on_all(&machine, &chain, |mut rig| {
                let all = rig.all();
                (0..2).try_for_each(|_| rig.pass(&all))?;
                rig.rank.device.synchronize()?;
                let mut set = set(&rig, Scope::Layer, gates)?;
                let graphs = capture_layers(&mut rig, &mut set)?;
                let lanes = [rig.compute.clone(), rig.rank.device.stream("second")?];
                let replay = |at: usize| graphs[at].replay(&lanes[at % 2], &[]);
                (0..2).try_for_each(|_| (0..graphs.len()).try_for_each(replay))?;
                rig.gtp.follow_graphs(&rig.compute)?;
                rig.pass(&all)?;
                rig.grads()
            });
            let report = verify(&machine.trace_stop(), &VerifyOptions::default());
            assert_eq!(got.unwrap(), want, "{gates} on {}", machine.driver());
            assert!(report.is_clean(), "{gates} on {}: {report}", machine.driver());
        }
    }
}

/// What the verifier says of two passes of layers on two streams in turn, without the waits of a name.
fn without(why: Option<device::Why>) -> bool {
    let chain = Chain { drain: Drain::TwoStage, ..Chain::new(2, &[4, 4, 4, 4, 4, 4]) };
    let machine = device::Machine::dry();
    why.into_iter().for_each(|why| machine.drop_waits(why));
    machine.trace_start();
    on_all(&machine, &chain, |mut rig| {
        let all = rig.all();
        rig.pass(&all)?;
        rig.gtp.plan()?;
        rig.rank.device.synchronize()?;
        let mut set = set(&rig, Scope::Layer, GateMode::InGraph)?;
        let graphs = capture_layers(&mut rig, &mut set)?;
        let lanes = [rig.compute.clone(), rig.rank.device.stream("second")?];
        let replay = |at: usize| graphs[at].replay(&lanes[at % 2], &[]);
        (0..2).try_for_each(|_| (0..graphs.len()).try_for_each(replay))?;
        rig.gtp.follow_graphs(&rig.compute)?;
        rig.pass(&all)?;
        Ok(rig.rank.device.synchronize()?)
    })
    .unwrap();
    verify(&machine.trace_stop(), &VerifyOptions::default()).is_clean()
}

#[test]
fn each_wait_of_two_stages_is_missed_when_it_is_left_out() {
    use gtp::why;
    assert!(without(None));
    let needed = [
        why::USE_AFTER_GATHER,
        why::REDUCE_AFTER_GRAD,
        why::GRAD_AFTER_REDUCE,
        why::REDUCE_AFTER_REDUCE,
        why::GRAPH_AFTER_GRAPH,
        why::EAGER_AFTER_GRAPH,
        why::END_AFTER_LANES,
    ];
    let missed: Vec<_> = needed.into_iter().filter(|why| without(Some(*why))).collect();
    assert!(missed.is_empty(), "nobody notices that these are gone: {missed:?}");
}
