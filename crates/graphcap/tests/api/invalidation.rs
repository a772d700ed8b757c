//! What has changed since the capture: followed where gates can follow, else refused by name, and for those graphs only.

use std::sync::Arc;

use graphcap::{CaptureScope, Change, FirstUse, GateMode, Graph, GraphError, GraphSet};
use pgroups::Pass;

use super::support::*;

fn changes(error: &GraphError) -> &[Change] {
    match error {
        GraphError::Invalid { changes, .. } => changes,
        other => panic!("{other}"),
    }
}

#[test]
fn moving_one_parameter_invalidates_exactly_the_graphs_that_touch_it() {
    for mode in MODES {
        let rig = Rig::new(&sim(1), &[1, 1, 1]);
        let mut set = rig.set(mode);
        let readers: Vec<Graph> =
            [vec![0, 1], vec![1, 2], vec![2]].iter().map(|reads| rig.reading(&mut set, "reads", reads)).collect();
        let writing = |scope: &mut CaptureScope<'_>| rig.contribute(scope.turn(Pass::Backward), 0, &rig.compute, 1.0);
        let (writer, ()) = set.capture("writes", &rig.compute, writing).unwrap();
        assert!(readers[0].uses(&rig.params[0]) && writer.uses(&rig.params[0]) && !readers[1].uses(&rig.params[0]));
        readers.iter().for_each(|graph| graph.replay(&rig.compute, &[]).unwrap());
        let captured = rig.params[0].address();
        let moved = floats(&rig.device, "moved", NUMEL);
        rig.params[0].rebind(&moved, &floats(&rig.device, "moved grad", NUMEL)).unwrap();
        let now = rig.params[0].address();
        let names: Vec<String> = set.invalid().iter().map(|graph| graph.name().to_owned()).collect();
        assert_eq!(names, ["reads", "writes"]);
        rig.log.take();
        rig.machine.trace_start();
        for graph in [&readers[0], &writer] {
            let error = graph.replay(&rig.compute, &[]).unwrap_err();
            assert_eq!(changes(&error), [Change::Moved { param: "w0".into(), captured, now }]);
            for part in ["'w0'", "16 bytes", &format!("allocation {} ", now.allocation), "bound 1 times"] {
                assert!(error.to_string().contains(part), "no {part} in {error}");
            }
        }
        assert!(submitted(&rig.machine.trace_stop()).is_empty() && rig.log.take().is_empty());
        readers[1..].iter().for_each(|graph| graph.replay(&rig.compute, &[]).unwrap());
        // Captured again it reads what is there now.
        rig.compute.upload(&moved, vec![6f32; NUMEL]).unwrap();
        let before = rig.result()[0];
        rig.reading(&mut set, "again", &[0]).replay(&rig.compute, &[]).unwrap();
        assert_eq!(rig.result()[0], (3.0 * before + 6.0) % 8191.0);
    }
}

#[test]
fn a_load_into_the_same_memory_invalidates_nothing() {
    let rig = Rig::new(&sim(1), &[1]);
    let graph = rig.reading(&mut rig.set(GateMode::InGraph), "g", &[0]);
    graph.replay(&rig.compute, &[]).unwrap();
    rig.buckets[0].write(&rig.optimizer, 40.0);
    graph.replay(&rig.compute, &[]).unwrap();
    assert_eq!(rig.result(), [(3.0 + 1.0) * 3.0 + 40.0; NUMEL]);
}

/// A new publisher of the same parameters, as another owner would attach it.
fn next_owner(rig: &Rig, i: usize, name: &str) -> Arc<Bucket> {
    let next = Arc::new(bucket(&rig.device, name, rig.buckets[i].memory.clone(), &rig.log));
    // Behind everything that the old one has published and others have read.
    rig.device.synchronize().unwrap();
    next
}

#[test]
fn other_publishers_of_the_same_buckets_get_the_gates() {
    for mode in MODES {
        for seed in 0..40 {
            let mut rig = Rig::new(&sim(seed), &[1, 1]);
            let mut set = rig.set(mode);
            let reads = rig.reading(&mut set, "g", &[0, 1]);
            let writing =
                |scope: &mut CaptureScope<'_>| rig.contribute(scope.turn(Pass::Backward), 0, &rig.compute, 1.0);
            // It has releases and gradients of the bucket, and no gate in front of reads.
            let (writes, ()) = set.capture("writes", &rig.compute, writing).unwrap();
            reads.replay(&rig.compute, &[]).unwrap();
            let want = (3.0 + 1.0) * 3.0 + 2.0;
            for i in [0, 1] {
                // The names change places, so that no gate keeps its event by chance.
                let next = next_owner(&rig, i, &format!("next{i}"));
                rig.params[i].attach(Some(next.clone()), Some(rig.sinks[i].clone()));
                rig.buckets[i] = next;
                rig.buckets[i].write(&rig.optimizer, 30.0 + i as f32);
            }
            rig.log.take();
            reads.replay(&rig.compute, &[]).unwrap();
            writes.replay(&rig.compute, &[]).unwrap();
            let said = rig.log.take();
            assert_eq!(said[..2], ["issue next0", "issue next1"]);
            assert!(set.invalid().is_empty());
            assert_eq!(rig.result(), [(want * 3.0 + 30.0) * 3.0 + 31.0; NUMEL], "{mode}, seed {seed}");
        }
    }
}

fn refused(rig: &Rig, set: &GraphSet, graph: &Graph, want: &[Change]) {
    let error = graph.replay(&rig.compute, &[]).unwrap_err();
    assert_eq!((changes(&error), graph.changes().as_slice()), (want, want));
    assert_eq!(set.invalid().len(), 1);
}

fn regrouped(param: &str, with: &str) -> Change {
    Change::Regrouped { param: param.into(), with: with.into() }
}

#[test]
fn buckets_that_were_cut_or_joined_differently_are_told() {
    for mode in MODES {
        let rig = Rig::new(&sim(1), &[2, 1]);
        let mut set = rig.set(mode);
        let graph = rig.reading(&mut set, "g", &[0, 1, 2]);
        let attach = |i: usize, to: usize| {
            rig.params[i].attach(Some(rig.buckets[to].clone()), Some(rig.sinks[i].clone()));
        };
        attach(1, 1);
        refused(&rig, &set, &graph, &[regrouped("w1", "w0")]);
        attach(1, 0);
        attach(2, 0);
        refused(&rig, &set, &graph, &[regrouped("w2", "w0")]);
        // As it was, it is good again.
        attach(2, 1);
        graph.replay(&rig.compute, &[]).unwrap();
    }
}

#[test]
fn gradients_that_are_governed_by_others_are_told() {
    // The graph reads the old flag: with a new one it would add this step's gradient to the last step's.
    let rig = Rig::new(&sim(1), &[1]);
    let mut set = rig.set(GateMode::InGraph);
    let writing = |scope: &mut CaptureScope<'_>| rig.contribute(scope.turn(Pass::Backward), 0, &rig.compute, 1.0);
    let (graph, ()) = set.capture("g", &rig.compute, writing).unwrap();
    graph.replay(&rig.compute, &[]).unwrap();
    let publisher = || rig.params[0].publisher();
    let flag = |sink: &Sink| FirstUse::Flag { allocation: sink.flag.allocation_id(), byte: 0 };
    let (old, next) = (flag(&rig.sinks[0]), Arc::new(Sink::new(&rig.compute, &rig.log)));
    let governed = |captured, now| Change::Governed { param: "w0".into(), captured: Some(captured), now };
    rig.params[0].attach(publisher(), Some(next.clone()));
    refused(&rig, &set, &graph, &[governed(old, flag(&next))]);
    rig.params[0].attach(publisher(), None);
    refused(&rig, &set, &graph, &[governed(old, FirstUse::Nobodys)]);
    // One that adds to what an earlier graph has put there looks at no flag, and still needs someone who waits.
    rig.params[0].attach(publisher(), Some(rig.sinks[0].clone()));
    let (second, ()) = set.capture("second", &rig.compute, writing).unwrap();
    rig.params[0].attach(publisher(), Some(next));
    second.replay(&rig.compute, &[]).unwrap();
    rig.params[0].attach(publisher(), None);
    let error = second.replay(&rig.compute, &[]).unwrap_err();
    assert!(error.to_string().contains("'w0' was added to, and has to be begun as its blocks like"), "{error}");
    // Captured for nobody: whoever comes later has not said what its first use does.
    let mut other = rig.set(GateMode::InGraph);
    let (nobodys, ()) = other.capture("nobodys", &rig.compute, writing).unwrap();
    nobodys.replay(&rig.compute, &[]).unwrap();
    rig.params[0].attach(publisher(), Some(rig.sinks[0].clone()));
    refused(&rig, &other, &nobodys, &[governed(FirstUse::Nobodys, old)]);
}
