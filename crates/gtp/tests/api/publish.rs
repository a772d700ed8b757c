//! Weights that others publish: asked for by whoever gathers, ahead of the gather, and never stale.

use std::sync::atomic::Ordering;

use device::{
    Access, Machine, Op, Stream, View,
    ops::{Accumulate, Fill},
};
use graphcap::Scope;
use gtp::PassKind;
use pgroups::{Init, LayoutConfig, Pass, Turn, Weights};

use crate::api::{
    backend::Backend,
    mixed::{MODES, set, told},
    rig::{Caught, machines},
    stand::{Model, Stand},
};

/// Three weights of ones, four ranks: gather groups {0, 2} and {1, 3}, replicas {0, 1} and {2, 3}.
fn model() -> Model {
    let mut model = Model::new(2, &[(4, 4), (8, 4), (4, 4)]);
    model.layout = LayoutConfig { dp: Some(2), order: "dp-gtp-tp-cp-ep-pp".into(), ..model.layout };
    model.specs.iter_mut().for_each(|spec| spec.init = Init::Constant(1.0));
    model
}

/// Logs the first and the last element, the sum and whether all are equal.
fn log(on: &Stream, value: &View, log: &View) -> Result<(), Caught> {
    let op = Op::host("use", "test", vec![Access::read(value), Access::update(log)], |args| {
        let value = args.read::<f32>(0)?;
        let (first, equal) = (value[0], value.iter().all(|x| *x == value[0]));
        let log = args.write::<f32>(1)?;
        log[0] += 1.0;
        let at = log[0] as usize;
        log[at] = if equal { first } else { f32::NAN };
        Ok(())
    });
    Ok(on.launch(op)?)
}

/// Forward in `order`, then a gradient of `grad` everywhere, in the other direction.
fn ones(weights: &mut dyn Weights, stand: &Parts, order: &[usize], grad: f32) -> Result<(), Caught> {
    let on = &stand.on;
    for &w in order {
        let value = weights.take(&stand.params[w], on)?;
        log(on, &value, &stand.log)?;
        weights.give_back(&stand.params[w], on)?;
    }
    let back = weights.enter(Pass::Backward);
    for &w in order.iter().rev() {
        let value = weights.take(&stand.params[w], on)?;
        log(on, &value, &stand.log)?;
        weights.give_back(&stand.params[w], on)?;
        let out = weights.grad(&stand.params[w], on)?;
        let (y, into) = out.target();
        assert!(matches!(into, Accumulate::Overwrite));
        on.launch(Fill { y, value: grad }.op("wgrad")?)?;
        weights.grad_done(&stand.params[w], on)?;
    }
    weights.enter(back);
    Ok(())
}

struct Parts {
    params: Vec<pgroups::Param>,
    on: Stream,
    log: View,
}

impl Parts {
    fn of(stand: &Stand) -> Parts {
        let script = &stand.script;
        Parts { params: script.params.clone(), on: script.streams[0].clone(), log: script.logs[0].clone() }
    }
}

fn pass(stand: &mut Stand, parts: &Parts, order: &[usize], grad: f32) -> Result<(), Caught> {
    let mut weights = stand.gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Forward))?;
    ones(&mut weights, parts, order, grad)?;
    Ok(weights.finish()?)
}

/// What `found` has logged.
fn logged(stand: &Stand) -> Result<Vec<f32>, Caught> {
    let log = stand.found()?.logs[0].clone();
    Ok(log[1..=log[0] as usize].to_vec())
}

#[test]
fn the_second_step_uses_what_the_first_one_wrote_in_whatever_order_weights_come() {
    // Declared 0, 1, 2; used 0, 2, 1: a weight ahead of its turn is published when it is gathered ahead.
    let machines = machines();
    for order in [[0, 1, 2], [0, 2, 1]] {
        for machine in &machines {
            let logs = model().run(machine, |stand| {
                let (backend, parts) = (Backend::attach(stand)?, Parts::of(stand));
                for step in 0..4 {
                    // Every rank has gradients of its own; their mean is 1.
                    pass(stand, &parts, &order, 0.25 + 0.5 * stand.rank.global.0 as f32)?;
                    backend.step(if step == 0 { 1.0 } else { 0.5 })?;
                }
                logged(stand)
            });
            let want: Vec<f32> = [1.0, 0.0, -0.5, -1.0].into_iter().flat_map(|value| [value; 6]).collect();
            logs.iter().for_each(|log| assert_eq!(*log, want, "{order:?} on {}", machine.driver()));
        }
    }
}

#[test]
fn each_forward_gather_asks_first_and_backward_never_does() {
    for machine in machines() {
        model().run(&machine, |stand| {
            let (backend, parts) = (Backend::attach(stand)?, Parts::of(stand));
            for _ in 0..2 {
                pass(stand, &parts, &[0, 1, 2], 1.0)?;
                backend.step(1.0)?;
            }
            backend.load(3.0)?;
            backend.heard();
            let mut weights = stand.gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Forward))?;
            let on = &parts.on;
            let heard = |w: &mut dyn Weights, i: usize| -> Result<Vec<String>, Caught> {
                w.take(&parts.params[i], on)?;
                w.give_back(&parts.params[i], on)?;
                Ok(backend.heard())
            };
            assert_eq!(heard(&mut weights, 0)?, ["ask w0", "ask w1"], "its own, and the one that is gathered ahead");
            assert_eq!(heard(&mut weights, 1)?, ["ask w2"]);
            assert!(heard(&mut weights, 2)?.is_empty());
            weights.enter(Pass::Backward);
            for i in [2, 1, 0] {
                assert!(heard(&mut weights, i)?.is_empty(), "backward relies on forward");
                weights.grad(&parts.params[i], on)?;
                weights.grad_done(&parts.params[i], on)?;
                assert_eq!(backend.heard(), [format!("landed w{i}")]);
            }
            weights.finish()?;
            Ok(stand.rank.device.synchronize()?)
        });
    }
}

#[test]
fn a_weight_that_nobody_publishes_after_its_write_is_refused_not_gathered() {
    let machine = Machine::sim_with(1, crate::api::rig::options());
    let logs = model().run(&machine, |stand| {
        let (backend, parts) = (Backend::attach(stand)?, Parts::of(stand));
        for _ in 0..2 {
            pass(stand, &parts, &[0, 1, 2], 1.0)?;
            backend.step(0.5)?;
        }
        let log = logged(stand)?;
        // Weight 1 is gathered ahead by the use of weight 0: it is refused there.
        backend.buckets[1].off.store(true, Ordering::Relaxed);
        let refused = told(&*pass(stand, &parts, &[0, 1, 2], 1.0).unwrap_err());
        assert!(refused.contains("'w1' is at epoch 1, but epoch 2 was written"), "{refused}");
        assert_eq!(logged(stand)?, log, "nothing was used");
        backend.buckets[1].off.store(false, Ordering::Relaxed);
        for _ in 0..2 {
            pass(stand, &parts, &[0, 1, 2], 1.0)?;
            backend.step(0.5)?;
        }
        logged(stand)
    });
    let want: Vec<f32> = [1.0, 0.5, 0.0, -0.5].into_iter().flat_map(|value| [value; 6]).collect();
    logs.iter().for_each(|log| assert_eq!(*log, want));
}

#[test]
fn replays_use_what_was_written_before_them_and_each_write_is_published_once() {
    for machine in machines() {
        for gates in MODES {
            let logs = model().run(&machine, |stand| {
                let (backend, parts) = (Backend::attach(stand)?, Parts::of(stand));
                pass(stand, &parts, &[0, 2, 1], 1.0)?;
                backend.step(1.0)?;
                stand.gtp.plan()?;
                let mut set = set(stand, Scope::Microbatch, gates, 1)?;
                let Stand { gtp, script, .. } = &mut *stand;
                backend.heard();
                let (graph, ()) = set.capture("pass", &script.streams[0], |scope| -> Result<(), Caught> {
                    let mut weights = gtp.pass(PassKind::TRAIN, scope.turn(Pass::Forward))?;
                    ones(&mut weights, &parts, &[0, 2, 1], 1.0)?;
                    Ok(weights.finish()?)
                })?;
                assert!(backend.heard().is_empty(), "a capture asks nobody");
                assert_eq!(graph.reads(), ["w0", "w2", "w1"], "in the order of gathers");
                for _ in 0..3 {
                    graph.replay(&parts.on, &[])?;
                    let mut heard = backend.heard();
                    let landed = heard.split_off(3);
                    assert_eq!(heard, ["ask w0", "ask w2", "ask w1"], "before it is launched");
                    assert_eq!(landed, ["landed w1", "landed w2", "landed w0"], "each once, in its order");
                    backend.step(1.0)?;
                }
                // Submitted again, between replays.
                pass(stand, &parts, &[0, 2, 1], 1.0)?;
                logged(stand)
            });
            let want: Vec<f32> = [1.0, 0.0, -1.0, -2.0, -3.0].into_iter().flat_map(|value| [value; 6]).collect();
            logs.iter().for_each(|log| assert_eq!(*log, want, "{gates} on {}", machine.driver()));
        }
    }
}

#[test]
fn a_prefetch_in_one_graph_that_the_next_uses_is_gathered_again_if_it_was_written_in_between() {
    for machine in machines() {
        for gates in MODES {
            let logs = model().run(&machine, |stand| {
                let (backend, parts) = (Backend::attach(stand)?, Parts::of(stand));
                pass(stand, &parts, &[0, 1, 2], 1.0)?;
                backend.step(0.0)?;
                stand.gtp.plan()?;
                let mut set = set(stand, Scope::Layer, gates, 1)?;
                let Stand { gtp, script, .. } = &mut *stand;
                let mut graphs = Vec::new();
                for i in 0..2 {
                    let name = format!("forward {i}");
                    let (graph, ()) = set.capture(&name, &script.streams[0], |scope| -> Result<(), Caught> {
                        let turn = scope.turn(Pass::Forward);
                        let mut weights = if i == 0 { gtp.pass(PassKind::TRAIN, turn)? } else { gtp.resume(turn) };
                        let value = weights.take(&parts.params[i], &parts.on)?;
                        log(&parts.on, &value, &parts.log)?;
                        weights.give_back(&parts.params[i], &parts.on)?;
                        Ok(weights.finish()?)
                    })?;
                    graphs.push(graph);
                }
                assert_eq!(graphs[0].reads(), ["w0", "w1"], "what it gathers ahead is read there");
                graphs[0].replay(&parts.on, &[])?;
                backend.load(0.5)?;
                graphs[1].replay(&parts.on, &[])?;
                assert_eq!(stand.gtp.counters().repaired, 1);
                logged(stand)
            });
            let want = [[1.0; 6].as_slice(), &[1.0, 0.5]].concat();
            logs.iter().for_each(|log| assert_eq!(*log, want, "{gates} on {}", machine.driver()));
        }
    }
}
