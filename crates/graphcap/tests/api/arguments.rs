//! What a replay is given.

use device::{DType, MemoryKind, Stream, View};
use graphcap::{CaptureScope, Difference, GateMode, Given, Graph, GraphError, GraphSet, why};

use super::support::*;

fn captured(rig: &Rig, set: &mut GraphSet, slot: &View) -> Graph {
    let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
        scope.input("x", slot)?;
        scope.value("causal", true)?;
        scope.input("y", &rig.buckets[0].memory[0].1)?;
        Ok(rig.compute.launch(fold(slot, &rig.out))?)
    };
    set.capture("g", &rig.compute, body).unwrap().0
}

#[test]
fn one_error_lists_everything_that_differs() {
    let rig = Rig::new(&sim(1), &[1]);
    let (mut set, slot) = (rig.set(GateMode::InGraph), floats(&rig.device, "slot", NUMEL));
    let graph = captured(&rig, &mut set, &slot);
    assert_eq!(graph.arguments(), ["x", "causal", "y"]);
    let other = rig.machine.device(3).unwrap();
    let wrong = other.alloc("wrong", &[2, 3], DType::Bf16, MemoryKind::Other).unwrap();
    let given =
        [("x", Given::from(&wrong)), ("causal", Given::Value("false")), ("z", (&slot).into()), ("x", "1".into())];
    let error = graph.replay(&rig.compute, &given).unwrap_err();
    let GraphError::Arguments { graph: name, differences } = &error else { panic!("{error}") };
    let argument = |name: &str| name.to_owned();
    let want = [
        Difference::Unknown { argument: argument("z") },
        Difference::Twice { argument: argument("x") },
        Difference::Shape { argument: argument("x"), captured: vec![NUMEL], given: vec![2, 3] },
        Difference::Type { argument: argument("x"), captured: DType::F32, given: DType::Bf16 },
        Difference::Rank { argument: argument("x"), captured: 0, given: 3 },
        Difference::Value { argument: argument("causal"), captured: "true".into(), given: "false".into() },
        Difference::Missing { argument: argument("y") },
    ];
    assert_eq!((name.as_str(), differences.as_slice()), ("g", want.as_slice()));
    let text = error.to_string();
    for difference in &want {
        assert!(text.contains(&format!("\n  {difference}")), "no '{difference}' in {text}");
    }
    let swapped = [("x", Given::Value("1")), ("causal", (&slot).into()), ("y", (&slot).into())];
    let error = graph.replay(&rig.compute, &swapped).unwrap_err();
    assert!(error.to_string().contains("'x' was memory, and is a value\n  'causal' was a value, and is memory"));
    assert_eq!(graph.replays(), 0);
}

#[test]
fn two_arguments_need_two_names() {
    let rig = Rig::new(&sim(1), &[1]);
    let body = |scope: &mut CaptureScope<'_>| {
        scope.input("x", &rig.out)?;
        scope.value("x", 1)
    };
    let error = rig.set(GateMode::InGraph).capture("g", &rig.compute, body).map(drop).unwrap_err();
    let GraphError::Body { source, .. } = &error else { panic!("{error}") };
    assert_eq!(source.to_string(), "graph 'g': input 'x' is declared twice: give each its own name");
}

fn copies(rig: &Rig, replay: impl FnOnce()) -> usize {
    rig.machine.trace_start();
    replay();
    submitted(&rig.machine.trace_stop()).iter().filter(|what| what.starts_with("cast")).count()
}

#[test]
fn what_is_in_place_is_not_copied() {
    let rig = Rig::new(&sim(1), &[1]);
    let (mut set, slot) = (rig.set(GateMode::InGraph), floats(&rig.device, "slot", NUMEL));
    let [a, b] = ["a", "b"].map(|name| {
        let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
            scope.input("lengths", &slot)?;
            Ok(rig.compute.launch(fold(&slot, &rig.out))?)
        };
        set.capture(name, &rig.compute, body).unwrap().0
    });
    let lengths = floats(&rig.device, "lengths", NUMEL);
    rig.compute.upload(&lengths, vec![2f32; NUMEL]).unwrap();
    // The first user fills it, the second finds it.
    assert_eq!(copies(&rig, || a.replay(&rig.compute, &[("lengths", (&lengths).into())]).unwrap()), 1);
    assert_eq!(copies(&rig, || b.replay(&rig.compute, &[("lengths", (&slot).into())]).unwrap()), 0);
    assert_eq!(rig.result(), [(3.0 + 2.0) * 3.0 + 2.0; NUMEL]);
}

/// Replays one graph on two streams in turns, each time with other values.
fn alternate(rig: &Rig) -> Vec<f32> {
    let (mut set, slot) = (rig.set(GateMode::InGraph), floats(&rig.device, "slot", NUMEL));
    let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
        scope.input("x", &slot)?;
        Ok(rig.compute.launch(fold(&slot, &rig.out))?)
    };
    let (graph, ()) = set.capture("g", &rig.compute, body).unwrap();
    let streams: [&Stream; 2] = [&rig.compute, &rig.side];
    for i in 0..6 {
        let (stream, x) = (streams[i % 2], floats(&rig.device, "x", NUMEL));
        stream.upload(&x, vec![i as f32 + 1.0; NUMEL]).unwrap();
        graph.replay(stream, &[("x", (&x).into())]).unwrap();
    }
    rig.device.synchronize().unwrap();
    rig.result()
}

#[test]
fn a_copy_waits_for_the_replay_that_reads_what_was_there_on_another_stream() {
    let want = (1..=6).fold(1f32, |out, x| (3.0 * out + x as f32) % 8191.0);
    let run = |seed: u64, dropped: bool| {
        let machine = sim(seed);
        if dropped {
            machine.drop_waits(why::INPUT_AFTER_READ);
        }
        alternate(&Rig::new(&machine, &[1]))
    };
    for seed in 0..40 {
        assert_eq!(run(seed, false), [want; NUMEL], "seed {seed}");
    }
    assert_eq!(alternate(&Rig::new(&cpu(), &[1])), [want; NUMEL]);
    assert!((0..40).any(|seed| run(seed, true) != [want; NUMEL]), "no order shows that the wait is missing");
}
