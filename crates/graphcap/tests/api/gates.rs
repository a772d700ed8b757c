//! Where graphs wait, and what they tell others: each gate is needed, and none is wider than it has to be.

use device::{Machine, Stream, Why};
use graphcap::{CaptureScope, GateMode, GraphConfig, Scope, why};
use pgroups::{Pass, Turn, Weights, Whole};

use super::{oracle::Oracle, support::*};

#[test]
fn each_branch_has_a_gate_in_front_of_its_first_read_unless_it_is_behind_one() {
    for (mode, want) in [(GateMode::BeforeReplay, 0), (GateMode::InGraph, 2)] {
        let rig = Rig::new(&sim(1), &[2]);
        let late = rig.device.stream("late").unwrap();
        // Memory that nobody else touches.
        let (other, third) = (rig.params[0].main_grad(), rig.params[1].main_grad());
        let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
            order(&rig.compute, &rig.side, "fork")?;
            rig.fold(&mut scope.turn(Pass::Forward), 0, &rig.compute)?;
            rig.fold_into(&mut scope.turn(Pass::Forward), 1, &rig.side, &other)?;
            // This branch leaves behind a gate.
            order(&rig.compute, &late, "late fork")?;
            rig.fold_into(&mut scope.turn(Pass::Forward), 1, &late, &third)?;
            rig.fold(&mut scope.turn(Pass::Forward), 1, &rig.compute)?;
            order(&late, &rig.compute, "late join")?;
            Ok(order(&rig.side, &rig.compute, "join")?)
        };
        let (graph, ()) = rig.set(mode).capture("g", &rig.compute, body).unwrap();
        let gates = nodes(&graph).iter().filter(|node| *node == "wait b0.published").count();
        assert_eq!(gates, want, "{mode}");
        graph.replay(&rig.compute, &[]).unwrap();
        assert_eq!(rig.result(), [(3.0 + 1.0) * 3.0 + 1.5; NUMEL]);
    }
}

#[test]
fn what_comes_first_waits_for_no_later_publication_inside_a_graph_and_for_all_before_it() {
    for (mode, first_waits) in [(GateMode::InGraph, (0, 1)), (GateMode::BeforeReplay, (1, 1))] {
        let machine = sim(1);
        machine.trace_start();
        let rig = Rig::new(&machine, &[1, 1]);
        let graph = rig.reading(&mut rig.set(mode), "g", &[0, 1]);
        graph.replay(&rig.compute, &[]).unwrap();
        rig.device.synchronize().unwrap();
        let oracle = Oracle::new(&machine.trace_stop());
        let path = |from: &str, to: &str| oracle.before(|op| op.site == from, |op| op.site == to);
        assert_eq!(path("publish b1", "w0"), first_waits, "{mode}");
        assert_eq!(path("w0", "publish b1"), (0, 1));
        assert_eq!((path("publish b0", "w0"), path("publish b1", "w1")), ((1, 1), (1, 1)));
    }
}

#[test]
fn gradients_that_land_behind_all_reads_of_a_bucket_tell_of_both() {
    for reads_last in [false, true] {
        let rig = Rig::new(&sim(1), &[1]);
        let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
            let mut weights = Whole::new(scope.turn(Pass::Forward));
            let param = &rig.params[0];
            let value = weights.take(param, &rig.compute)?;
            rig.compute.launch(fold(&value, &rig.out))?;
            weights.enter(Pass::Backward);
            if !reads_last {
                weights.give_back(param, &rig.compute)?;
            }
            let grad = weights.grad(param, &rig.compute)?;
            rig.compute.launch(fold(&value, grad.target().0))?;
            weights.grad_done(param, &rig.compute)?;
            if reads_last {
                rig.compute.launch(fold(&value, &rig.out))?;
                weights.give_back(param, &rig.compute)?;
            }
            Ok(())
        };
        let (graph, ()) = rig.set(GateMode::InGraph).capture("g", &rig.compute, body).unwrap();
        let records: Vec<String> = nodes(&graph).into_iter().filter(|node| node.starts_with("record")).collect();
        let want: &[&str] = match reads_last {
            false => &["record graphcap.landed.w0"],
            true => &["record graphcap.landed.w0", "record graphcap.released.w0"],
        };
        assert_eq!(records, want);
        rig.log.take();
        graph.replay(&rig.compute, &[]).unwrap();
        let released = if reads_last { "released" } else { "landed" };
        let said = [
            "issue b0".to_owned(),
            "open w0 graph.gates".into(),
            format!("done b0 graphcap.{released}.w0"),
            "landed w0 graphcap.landed.w0".into(),
        ];
        assert_eq!(rig.log.take(), said);
    }
}

/// Steps of two microbatches: reads on two branches, gradients on two branches of which one waits for nothing in the
/// graph, an evaluation on a stream of its own, a reduction and a write on others.
fn steps(machine: &Machine, mode: GateMode, eager: bool) -> Vec<f32> {
    let rig = Rig::new(machine, &[1, 2]);
    let [reduce, evaluate] = ["reduce", "evaluate"].map(|name| rig.device.stream(name).unwrap());
    let [side_out, seen] = ["side out", "seen"].map(|name| floats(&rig.device, name, NUMEL));
    let sums: Vec<_> = (0..3).map(|_| floats(&rig.device, "sum", NUMEL)).collect();
    let total = floats(&rig.device, "total", NUMEL);
    for view in [&side_out, &seen, &total] {
        rig.compute.upload(view, vec![2f32; NUMEL]).unwrap();
    }
    rig.compute.synchronize().unwrap();
    let mut set = rig.set(mode);
    let training = |scope: Option<&mut CaptureScope<'_>>| training(&rig, &side_out, scope);
    let evaluation = |scope: Option<&mut CaptureScope<'_>>, on: &Stream| -> Result<(), Caught> {
        let mut turn = match scope {
            Some(scope) => scope.turn(Pass::Forward),
            None => Turn::eager(Pass::Forward),
        };
        (0..3).try_for_each(|i| rig.fold_into(&mut turn, i, on, &seen))
    };
    let graphs = (!eager).then(|| {
        let (trained, ()) = set.capture("microbatch", &rig.compute, |scope| training(Some(scope))).unwrap();
        let (seen, ()) = set.capture("evaluation", &evaluate, |scope| evaluation(Some(scope), &evaluate)).unwrap();
        (trained, seen)
    });
    for step in 0..3 {
        for microbatch in 0..2 {
            rig.sinks.iter().for_each(|sink| sink.set_flag(&rig.compute, microbatch as f32));
            match &graphs {
                Some((trained, _)) => trained.replay(&rig.compute, &[]).unwrap(),
                None => training(None).unwrap(),
            }
        }
        match &graphs {
            Some((_, seen)) => seen.replay(&evaluate, &[]).unwrap(),
            None => evaluation(None, &evaluate).unwrap(),
        }
        for (i, sink) in rig.sinks.iter().enumerate() {
            sink.reduce(&reduce, &rig.params[i].main_grad(), &sums[i]);
            reduce.launch(fold(&sums[i], &total)).unwrap();
        }
        for (i, bucket) in rig.buckets.iter().enumerate() {
            bucket.write(&rig.optimizer, (7 * step + 3 * i + 5) as f32);
        }
    }
    rig.device.synchronize().unwrap();
    [&rig.out, &side_out, &seen, &total].iter().flat_map(|view| get::<f32>(&rig.compute, view)).collect()
}

fn training(rig: &Rig, side_out: &device::View, scope: Option<&mut CaptureScope<'_>>) -> Result<(), Caught> {
    let mut weights = Whole::new(match scope {
        Some(scope) => scope.turn(Pass::Forward),
        None => Turn::eager(Pass::Forward),
    });
    let (compute, side) = (&rig.compute, &rig.side);
    order(compute, side, "test.fork")?;
    // Nothing in the graph comes before this one.
    weights.enter(Pass::Backward);
    let grad = weights.grad(&rig.params[2], side)?;
    side.launch(contribution(&grad, 0.5))?;
    weights.grad_done(&rig.params[2], side)?;
    weights.enter(Pass::Forward);
    for (i, (on, out)) in [(compute, &rig.out), (side, side_out), (compute, &rig.out)].into_iter().enumerate() {
        let value = weights.take(&rig.params[i], on)?;
        on.launch(fold(&value, out))?;
        weights.give_back(&rig.params[i], on)?;
    }
    weights.enter(Pass::Backward);
    for (i, (on, out)) in [(compute, &rig.out), (side, side_out)].into_iter().enumerate() {
        let value = weights.take(&rig.params[i], on)?;
        let grad = weights.grad(&rig.params[i], on)?;
        on.launch(contribution(&grad, 1.5 + i as f32))?;
        weights.grad_done(&rig.params[i], on)?;
        on.launch(fold(&value, out))?;
        weights.give_back(&rig.params[i], on)?;
    }
    Ok(order(side, compute, "test.join")?)
}

fn contribution(grad: &pgroups::GradOut, value: f32) -> device::Op {
    let (into, how) = grad.target();
    add(into, how, value)
}

#[test]
fn replays_give_the_bits_of_eager_passes_in_every_order() {
    let want = steps(&sim(0), GateMode::InGraph, true);
    assert!(want.iter().all(|value| value.is_finite()));
    for mode in MODES {
        for seed in 0..60 {
            assert_eq!(steps(&sim(seed), mode, false), want, "{mode}, seed {seed}");
        }
        for _ in 0..5 {
            assert_eq!(steps(&cpu(), mode, false), want, "{mode} on cpu");
        }
    }
    assert!((0..60).all(|seed| steps(&sim(seed), GateMode::InGraph, true) == want));
}

#[test]
fn without_any_one_gate_some_order_gives_other_results() {
    let want = steps(&sim(0), GateMode::InGraph, true);
    let gates = [why::GRAD_AFTER_FREE, why::GATE_AFTER_LANDED, why::GATE_AFTER_READ, Turn::READ_AFTER_PUBLISH];
    let shows = |gate: Why| {
        (0..300).any(|seed| {
            let machine = sim(seed);
            machine.drop_waits(gate);
            steps(&machine, GateMode::InGraph, false) != want
        })
    };
    let silent: Vec<Why> = gates.into_iter().filter(|gate| !shows(*gate)).collect();
    assert!(silent.is_empty(), "without one of {silent:?} all orders give the same");
}

#[test]
fn every_lane_has_gates_of_its_own() {
    let rig = Rig::new(&sim(1), &[1]);
    let config = GraphConfig { lanes: 2.try_into().unwrap(), ..GraphConfig::new(Scope::Layer) };
    let mut set = rig.set_of(config);
    let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
        rig.fold(&mut scope.turn(Pass::Forward), 0, &rig.compute)?;
        rig.contribute(scope.turn(Pass::Backward), 0, &rig.compute, 1.0)
    };
    let (graph, ()) = set.capture("g", &rig.compute, body).unwrap();
    rig.log.take();
    (0..3).for_each(|_| graph.replay(&rig.compute, &[]).unwrap());
    let landed: Vec<String> = rig.log.take().into_iter().filter(|said| said.starts_with("landed")).collect();
    let [first, second] = ["landed w0 graphcap.landed.w0", "landed w0 graphcap.landed.w0.1"];
    assert_eq!(landed, [first, second, first]);
    assert_eq!(rig.device.graphs().executables, 2);
}

#[test]
fn a_hand_over_between_graphs_is_waited_for_on_the_device_in_every_replay() {
    // A fetches w1 into a slot on a stream that is late, B uses the slot; w1 changes before every replay.
    for machine in [cpu(), sim(1), sim(2), sim(3), sim(4)] {
        let want = Rig::eagerly_changing(&machine, 3);
        let rig = Rig::new(&machine, &[1, 1]);
        let (mut set, slot) = (rig.set(GateMode::InGraph), floats(&rig.device, "slot", NUMEL));
        let fetched = rig.device.event("fetched");
        rig.side.upload(&slot, vec![0f32; NUMEL]).unwrap();
        rig.side.record(&fetched).unwrap();
        rig.side.synchronize().unwrap();
        let a = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
            order(&rig.compute, &rig.side, "fork")?;
            let value = scope.turn(Pass::Forward).read(&rig.params[1], &rig.side)?;
            rig.side.launch(device::ops::Cast { x: &value, y: &slot }.op("fetch")?)?;
            scope.turn(Pass::Forward).done(&rig.params[1], &rig.side)?;
            rig.side.record_external(&fetched)?;
            rig.fold(&mut scope.turn(Pass::Forward), 0, &rig.compute)?;
            Ok(order(&rig.side, &rig.compute, "join")?)
        };
        let b = |_: &mut CaptureScope<'_>| -> Result<(), Caught> {
            rig.compute.wait_external(&fetched, Why("test.fetched"))?;
            Ok(rig.compute.launch(fold(&slot, &rig.out))?)
        };
        let (a, ()) = set.capture("a", &rig.compute, a).unwrap();
        let (b, ()) = set.capture("b", &rig.compute, b).unwrap();
        // Warm-up uses nothing up.
        set.warm_up(&rig.compute, 2).unwrap();
        assert_eq!(nodes(&b), ["wait fetched", "fold"]);
        for round in 0..3 {
            if rig.machine.driver() == "cpu" {
                let late = |_: &mut device::Args<'_>| {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    Ok(())
                };
                rig.buckets[1].comm.launch(device::Op::host("late", "test", Vec::new(), late)).unwrap();
            }
            a.replay(&rig.compute, &[]).unwrap();
            b.replay(&rig.compute, &[]).unwrap();
            rig.buckets[1].write(&rig.optimizer, 20.0 + round as f32);
        }
        assert_eq!(rig.result(), want, "on {}", machine.driver());
    }
}
