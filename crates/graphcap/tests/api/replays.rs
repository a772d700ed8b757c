//! Gradients and device state over replays: as eagerly, and once each.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use device::{Access, Op, View};
use graphcap::{CaptureScope, GateMode};
use pgroups::{Pass, Turn, Weights, Whole};

use super::support::*;

#[test]
fn a_captured_gradient_that_is_kept_adds_up_over_replays() {
    // The gradient of w x is x: 1, then 10.
    for mode in MODES {
        let rig = Rig::new(&sim(1), &[1]);
        let (mut set, x) = (rig.set(mode), floats(&rig.device, "x", NUMEL));
        let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
            scope.input("x", &x)?;
            let mut weights = Whole::new(scope.turn(Pass::Backward));
            let grad = weights.grad(&rig.params[0], &rig.compute)?;
            let (into, how) = grad.target();
            let alpha = device::ops::Factor::Const(1.0);
            let device::ops::Accumulate::Keep(flag) = how else { panic!("{how:?}") };
            let factor = device::ops::Factor::Device(flag);
            rig.compute.launch(device::ops::Scale { x: into, factor, y: into }.op("keep")?)?;
            rig.compute.launch(device::ops::Axpy { alpha, x: &x, y: into }.op("add")?)?;
            Ok(weights.grad_done(&rig.params[0], &rig.compute)?)
        };
        let (graph, ()) = set.capture("g", &rig.compute, body).unwrap();
        rig.compute.upload(&rig.params[0].main_grad(), vec![99f32; NUMEL]).unwrap();
        for (keep, value) in [(0.0, 1f32), (1.0, 10.0)] {
            rig.sinks[0].set_flag(&rig.compute, keep);
            let given = floats(&rig.device, "given", NUMEL);
            rig.compute.upload(&given, vec![value; NUMEL]).unwrap();
            graph.replay(&rig.compute, &[("x", (&given).into())]).unwrap();
        }
        rig.device.synchronize().unwrap();
        assert_eq!(get::<f32>(&rig.compute, &rig.params[0].main_grad()), [11.0; NUMEL], "{mode}");
    }
}

#[test]
fn equal_weights_keep_their_own_gradients_and_each_lands_once_a_pass_as_eagerly() {
    let run = |mode: Option<GateMode>| {
        let rig = Rig::new(&sim(2), &[1, 1]);
        let graph = mode.map(|mode| {
            let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
                [1, 0]
                    .iter()
                    .try_for_each(|&i| rig.contribute(scope.turn(Pass::Backward), i, &rig.compute, (i + 1) as f32))
            };
            rig.set(mode).capture("g", &rig.compute, body).unwrap().0
        });
        rig.log.take();
        for microbatch in 0..2 {
            rig.sinks.iter().for_each(|sink| sink.set_flag(&rig.compute, microbatch as f32));
            match &graph {
                Some(graph) => graph.replay(&rig.compute, &[]).unwrap(),
                None => [1, 0].iter().for_each(|&i| {
                    let turn = Turn::eager(Pass::Backward);
                    rig.contribute(turn, i, &rig.compute, (i + 1) as f32).unwrap();
                }),
            }
        }
        let said = rig.log.take();
        let of = |kind: &str| -> Vec<String> {
            let lines = said.iter().filter(|line| line.starts_with(kind));
            lines.map(|line| line.split(' ').nth(1).unwrap().to_owned()).collect()
        };
        rig.device.synchronize().unwrap();
        let grads: Vec<f32> = rig.params.iter().map(|p| get::<f32>(&rig.compute, &p.main_grad())[0]).collect();
        (grads, of("open"), of("landed"))
    };
    let want = run(None);
    assert_eq!(want.0, [2.0, 4.0]);
    assert_eq!(want.2, ["w1", "w0", "w1", "w0"]);
    for mode in MODES {
        assert_eq!(run(Some(mode)), want, "{mode}");
    }
}

#[test]
fn what_changes_from_replay_to_replay_is_memory_of_the_device() {
    // A counter on the device stands for whatever draws random numbers: captured once, it goes on in every replay.
    let rig = Rig::new(&sim(1), &[1]);
    let (seed, ran) = (floats(&rig.device, "seed", 1), std::sync::Arc::new(AtomicUsize::new(0)));
    rig.compute.upload(&seed, vec![5f32]).unwrap();
    let count = ran.clone();
    let draw = move |seed: &View, out: &View| {
        let count = count.clone();
        Op::host("draw", "test", vec![Access::update(seed), Access::update(out)], move |args| {
            count.fetch_add(1, SeqCst);
            let state = &mut args.write::<f32>(0)?[0];
            *state = (*state * 75.0 + 74.0) % 65537.0;
            let drawn = *state;
            args.write::<f32>(1)?.iter_mut().for_each(|x| *x = (3.0 * *x + drawn) % 8191.0);
            Ok(())
        })
    };
    let mut set = rig.set(GateMode::InGraph);
    let body = |_: &mut CaptureScope<'_>| rig.compute.launch(draw(&seed, &rig.out));
    let (graph, ()) = set.capture("g", &rig.compute, body).unwrap();
    // A warm-up draws, and gives back what it has drawn.
    graph.warm_up(&rig.compute, 4).unwrap();
    assert_eq!((ran.load(SeqCst), get::<f32>(&rig.compute, &seed)), (4, vec![5.0]));
    let (mut state, mut want) = (5f32, 1f32);
    for _ in 0..5 {
        graph.replay(&rig.compute, &[]).unwrap();
        state = (state * 75.0 + 74.0) % 65537.0;
        want = (3.0 * want + state) % 8191.0;
    }
    assert_eq!((rig.result(), get::<f32>(&rig.compute, &seed)), (vec![want; NUMEL], vec![state]));
}
