//! Passes of which graphs run a part: in front of it, behind it, in the middle; captures that fail.

use std::num::NonZeroUsize;

use device::Stream;
use graphcap::{GateMode, Graph, GraphConfig, GraphError, GraphSet, Scope};
use gtp::{Drain, GtpError, PassKind};
use pgroups::{Pass, Turn, Weights};

use crate::api::{
    rig::{Caught, hosts, machines},
    script::{Act, forward, there_and_back},
    stand::{Model, Stand, check_all},
};

pub(crate) const MODES: [GateMode; 2] = [GateMode::BeforeReplay, GateMode::InGraph];

pub(crate) fn set(stand: &Stand, scope: Scope, gates: GateMode, lanes: usize) -> Result<GraphSet, Caught> {
    let lanes = NonZeroUsize::new(lanes).unwrap();
    Ok(GraphSet::new(&stand.script.streams[0], GraphConfig { gates, lanes, ..GraphConfig::new(scope) })?)
}

/// A graph of each part of a pass.
pub(crate) fn capture(
    stand: &mut Stand,
    set: &mut GraphSet,
    kind: PassKind,
    parts: &[Vec<Act>],
) -> Result<Vec<Graph>, GraphError> {
    let Stand { gtp, script, .. } = stand;
    let mut graphs = Vec::new();
    let mut pass = Pass::Forward;
    for (i, acts) in parts.iter().enumerate() {
        let (graph, ()) = set.capture(&format!("{kind} {i}"), &script.streams[0], |scope| -> Result<(), Caught> {
            let turn = scope.turn(pass);
            let mut weights = if i == 0 { gtp.pass(kind, turn)? } else { gtp.resume(turn) };
            script.play(&mut weights, acts)?;
            pass = weights.enter(Pass::Forward);
            Ok(weights.finish()?)
        })?;
        graphs.push(graph);
    }
    Ok(graphs)
}

/// A part for each weight's forward, then for each one's backward.
pub(crate) fn layers(order: &[usize]) -> Vec<Vec<Act>> {
    let forward = order.iter().map(|w| forward(&[*w]));
    let backward = order
        .iter()
        .rev()
        .map(|&w| vec![Act::Enter(Pass::Backward), Act::Take(w), Act::Back(w), Act::Grad(w), Act::Done(w)]);
    forward.chain(backward).collect()
}

/// How a part of a pass runs.
#[derive(Clone, Copy, PartialEq, Debug)]
enum How {
    Eager,
    Replayed,
}

/// Runs the parts of a pass, each in its way; graphs on two streams in turn.
fn run(
    stand: &mut Stand,
    (graphs, streams): (&[Graph], &[Stream; 2]),
    parts: &[Vec<Act>],
    how: impl Fn(usize) -> How,
) -> Result<(), Caught> {
    let Stand { gtp, script, .. } = stand;
    for (i, acts) in parts.iter().enumerate() {
        if how(i) == How::Replayed {
            graphs[i].replay(&streams[i % 2], &[])?;
            continue;
        }
        let turn = Turn::eager(Pass::Forward);
        let mut weights = if i == 0 { gtp.pass(PassKind::TRAIN, turn)? } else { gtp.resume(turn) };
        script.play(&mut weights, acts)?;
        weights.finish()?;
    }
    Ok(())
}

#[test]
fn submitted_and_replayed_parts_of_a_pass_mix_in_every_way() {
    let machines = machines();
    for (look_ahead, drain) in [(0, Drain::Whole), (1, Drain::TwoStage), (2, Drain::TwoStage), (3, Drain::Whole)] {
        let mut model = Model::new(2, &[(4, 4), (6, 4), (4, 4), (4, 4)]).look_ahead(look_ahead);
        model.config.drain = drain;
        let parts = layers(&[0, 1, 2, 3]);
        let want = model.whole(&vec![parts.concat(); 18]);
        for machine in &machines {
            for gates in MODES {
                let got = model.run(machine, |stand| {
                    (0..2).try_for_each(|_| stand.pass(&parts.concat()))?;
                    let mut set = set(stand, Scope::Layer, gates, 1)?;
                    let graphs = capture(stand, &mut set, PassKind::TRAIN, &parts)?;
                    let streams = [stand.script.streams[0].clone(), stand.rank.device.stream("second")?];
                    for mix in 0..16usize {
                        // Runs of one way, of lengths that differ.
                        let how = |i: usize| match ((mix * 37 + 11) >> (i % 8)) & 1 {
                            0 => How::Eager,
                            _ => How::Replayed,
                        };
                        run(stand, (&graphs, &streams), &parts, how)?;
                    }
                    let counters = stand.gtp.counters();
                    assert_eq!((counters.repaired, counters.deviations, counters.plans), (0, 0, 1));
                    stand.found()
                });
                check_all(&got, &want, &format!("{gates}, {drain:?}, {look_ahead} ahead, on {}", machine.driver()));
            }
        }
    }
}

#[test]
fn a_graph_that_only_passes_a_prefetch_on_does_not_claim_that_it_is_there() {
    let model = Model::new(2, &[(4, 4); 5]).look_ahead(2);
    let parts = layers(&[0, 1, 2, 3, 4]);
    // Weight 2 is gathered in the first graph and used in the third: the second one neither gathers nor uses it. Whole
    // passes in between leave other weights in its slot.
    let all: Vec<usize> = (0..10).collect();
    let orders = [all.clone(), vec![1, 2, 3], all.clone(), vec![0, 1, 1, 2, 8, 9], vec![1, 3], all];
    let passes: Vec<Vec<Act>> = std::iter::once(parts.concat())
        .chain(orders.iter().flatten().map(|part: &usize| parts[*part].clone()))
        .collect();
    let want = model.whole(&passes);
    for machine in machines() {
        for gates in MODES {
            let got = model.run(&machine, |stand| {
                stand.pass(&parts.concat())?;
                stand.gtp.plan()?;
                let mut set = set(stand, Scope::Layer, gates, 1)?;
                let graphs = capture(stand, &mut set, PassKind::TRAIN, &parts)?;
                for part in orders.iter().flatten() {
                    graphs[*part].replay(&stand.script.streams[0], &[])?;
                }
                stand.found()
            });
            check_all(&got, &want, &format!("{gates} on {}", machine.driver()));
        }
    }
}

#[test]
fn a_capture_that_leaves_its_plan_is_refused_by_name_and_all_goes_on() {
    let model = Model::new(3, &[(6, 4), (5, 4), (4, 4)]);
    let acts = there_and_back(&[0, 1, 2]);
    let want = model.whole(&vec![acts.clone(); 6]);
    for machine in hosts() {
        for gates in MODES {
            let got = model.run(&machine, |stand| {
                (0..2).try_for_each(|_| stand.pass(&acts))?;
                let mut set = set(stand, Scope::Microbatch, gates, 1)?;
                for other in [there_and_back(&[0, 2]), [acts.clone(), forward(&[1])].concat()] {
                    let refused = capture(stand, &mut set, PassKind::TRAIN, &[other]).map(drop).unwrap_err();
                    let text = format!("{refused:?}");
                    assert!(text.contains("LeavesPlan"), "{text}");
                }
                let refused =
                    capture(stand, &mut set, PassKind::TRAIN, &[there_and_back(&[0, 2])]).map(drop).unwrap_err();
                let text = told(&refused);
                for part in
                    ["'train'", "takes 'w2' in forward", "takes 'w1' in forward", "run it once as it is submitted"]
                {
                    assert!(text.contains(part), "no '{part}' in {text}");
                }
                // As planned from the first pass behind it, and captured after all.
                let before = stand.gtp.counters();
                (0..2).try_for_each(|_| stand.pass(&acts))?;
                assert_eq!(stand.gtp.counters().on_demand, before.on_demand);
                let graphs = capture(stand, &mut set, PassKind::TRAIN, std::slice::from_ref(&acts))?;
                graphs[0].replay(&stand.script.streams[0], &[])?;
                stand.pass(&acts)?;
                stand.found()
            });
            check_all(&got, &want, &format!("{gates} on {}", machine.driver()));
        }
    }
}

/// A failure and its causes.
pub(crate) fn told(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        text += &format!(": {error}");
        next = error.source();
    }
    text
}

#[test]
fn a_capture_that_fails_between_two_calls_leaves_nothing_open() {
    let model = Model::new(2, &[(6, 4), (5, 4), (4, 4)]);
    let acts = there_and_back(&[0, 1, 2]);
    let want = model.whole(&vec![acts.clone(); 5]);
    for machine in hosts() {
        let got = model.run(&machine, |stand| {
            (0..2).try_for_each(|_| stand.pass(&acts))?;
            let mut set = set(stand, Scope::Microbatch, GateMode::InGraph, 1)?;
            let Stand { gtp, script, .. } = &mut *stand;
            let failed = set.capture("fails", &script.streams[0], |scope| -> Result<(), Caught> {
                let mut weights = gtp.pass(PassKind::TRAIN, scope.turn(Pass::Forward))?;
                script.play(&mut weights, &[Act::Take(0), Act::Back(0), Act::Take(1)])?;
                Err("the user's own".into())
            });
            assert!(matches!(failed, Err(GraphError::Body { .. })));
            stand.pass(&acts)?;
            let graphs = capture(stand, &mut set, PassKind::TRAIN, std::slice::from_ref(&acts))?;
            graphs[0].replay(&stand.script.streams[0], &[])?;
            stand.pass(&acts)?;
            let counters = stand.gtp.counters();
            assert_eq!((counters.deviations, counters.plans), (0, 1));
            stand.found()
        });
        check_all(&got, &want, machine.driver());
    }
}

#[test]
fn a_kind_of_pass_that_nobody_has_planned_is_not_captured() {
    let model = Model::new(2, &[(4, 4), (6, 4)]);
    let acts = forward(&[0, 1]);
    let want = model.whole(&vec![acts.clone(); 2]);
    for machine in hosts() {
        let got = model.run(&machine, |stand| {
            let mut set = set(stand, Scope::Microbatch, GateMode::InGraph, 1)?;
            let refused = capture(stand, &mut set, PassKind::EVAL, std::slice::from_ref(&acts)).map(drop).unwrap_err();
            assert!(told(&refused).contains("pass 'eval' cannot be captured before it is planned"), "{refused:?}");
            stand.pass_of(PassKind::EVAL, &acts)?;
            stand.gtp.plan()?;
            let graphs = capture(stand, &mut set, PassKind::EVAL, std::slice::from_ref(&acts))?;
            graphs[0].replay(&stand.script.streams[0], &[])?;
            stand.found()
        });
        check_all(&got, &want, machine.driver());
    }
}

#[test]
fn graphs_of_two_kinds_and_submitted_passes_take_turns_on_two_streams() {
    let mut model = Model::new(2, &[(4, 4), (6, 4), (4, 4)]);
    let (train, eval) = (there_and_back(&[0, 1, 2]), forward(&[2, 0, 1]));
    // Logs of both streams: graphs write the first one's, whichever stream they are launched on.
    let passes = [&train, &eval, &train, &eval, &train, &train, &eval, &train, &eval, &eval, &train];
    let want = model.whole(&passes.map(Clone::clone));
    for machine in machines() {
        for (gates, lanes, drain) in [
            (GateMode::BeforeReplay, 1, Drain::Whole),
            (GateMode::InGraph, 2, Drain::Whole),
            (GateMode::BeforeReplay, 2, Drain::TwoStage),
            (GateMode::InGraph, 1, Drain::TwoStage),
        ] {
            model.config.drain = drain;
            let got = model.run(&machine, |stand| {
                stand.pass(&train)?;
                stand.pass_of(PassKind::EVAL, &eval)?;
                stand.gtp.plan()?;
                let mut set = set(stand, Scope::Microbatch, gates, lanes)?;
                let graphs = [
                    capture(stand, &mut set, PassKind::TRAIN, std::slice::from_ref(&train))?.remove(0),
                    capture(stand, &mut set, PassKind::EVAL, std::slice::from_ref(&eval))?.remove(0),
                ];
                // Two passes in flight: launched on streams in turn.
                let launch = [stand.rank.device.stream("lane a")?, stand.rank.device.stream("lane b")?];
                let on = |i: usize| &launch[i % 2];
                for (i, graph) in [0, 1, 0, 0, 1].into_iter().enumerate() {
                    graphs[graph].replay(on(i), &[])?;
                }
                stand.pass(&train)?;
                stand.pass_of(PassKind::EVAL, &eval)?;
                graphs[1].replay(on(0), &[])?;
                graphs[0].replay(on(1), &[])?;
                assert_eq!(stand.gtp.counters().repaired, 0);
                stand.found()
            });
            check_all(&got, &want, &format!("{gates}, {drain:?} on {}", machine.driver()));
        }
    }
}

#[test]
fn a_part_that_is_captured_in_a_submitted_pass_is_refused_by_name() {
    let model = Model::new(2, &[(4, 4), (6, 4)]);
    let parts = layers(&[0, 1]);
    let want = model.whole(&[parts.concat(), parts[0].clone(), parts.concat(), parts.concat()]);
    for machine in hosts() {
        let got = model.run(&machine, |stand| {
            stand.pass(&parts.concat())?;
            let mut set = set(stand, Scope::Layer, GateMode::InGraph, 1)?;
            stand.pass(&parts[0])?;
            let Stand { gtp, script, .. } = &mut *stand;
            let refused = set.capture("part", &script.streams[0], |scope| -> Result<(), Caught> {
                let mut weights = gtp.resume(scope.turn(Pass::Forward));
                script.play(&mut weights, &parts[1])?;
                Ok(weights.finish()?)
            });
            let text = told(&refused.map(drop).unwrap_err());
            assert!(text.contains("is submitted, and its next part is captured"), "{text}");
            (0..2).try_for_each(|_| stand.pass(&parts.concat()))?;
            stand.found()
        });
        check_all(&got, &want, machine.driver());
    }
}

#[test]
fn going_on_with_a_pass_that_was_not_begun_is_refused() {
    let model = Model::new(2, &[(4, 4)]);
    model.run(&hosts()[0], |stand| {
        let Stand { gtp, script, .. } = stand;
        let mut weights = gtp.resume(Turn::eager(Pass::Forward));
        let refused = script.play(&mut weights, &[Act::Take(0)]).unwrap_err();
        assert!(told(&*refused).contains(&GtpError::NoPass.to_string()), "{refused}");
        Ok(())
    });
}
