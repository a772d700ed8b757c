//! Deleting graphs: everything goes, or is told with its holder.

use device::{Exchange, Machine};
use graphcap::{CaptureScope, GateMode, GraphConfig, GraphError, Scope, Survivor};
use pgroups::{Pass, Turn};

use super::support::*;

#[test]
fn a_hundred_cycles_leave_the_counters_of_the_device_where_they_were() {
    for machine in [cpu(), sim(1)] {
        let rig = Rig::new(&machine, &[1, 1]);
        let before = rig.device.graphs();
        for cycle in 0..100 {
            let config = GraphConfig { lanes: (1 + cycle % 2).try_into().unwrap(), ..GraphConfig::new(Scope::Layer) };
            let mut set = rig.set_of(GraphConfig { gates: MODES[cycle % 2], ..config });
            rig.reading(&mut set, "a", &[0, 1]).replay(&rig.compute, &[]).unwrap();
            let failing = |_: &mut CaptureScope<'_>| Err::<(), Caught>("planted".into());
            assert!(set.capture("failed", &rig.compute, failing).is_err());
            let writing =
                |scope: &mut CaptureScope<'_>| rig.contribute(scope.turn(Pass::Backward), 1, &rig.compute, 1.0);
            set.capture("b", &rig.compute, writing).unwrap().0.replay(&rig.compute, &[]).unwrap();
            rig.compute.synchronize().unwrap();
            assert_eq!(set.delete(), [], "cycle {cycle}");
            assert_eq!(rig.device.graphs(), before, "cycle {cycle}");
        }
    }
}

#[test]
fn lists_go_with_the_graph_and_its_replays_are_refused() {
    let rig = Rig::new(&sim(1), &[1, 1]);
    let mut set = rig.set(GateMode::InGraph);
    let graph = rig.reading(&mut set, "g", &[0, 1]);
    graph.replay(&rig.compute, &[]).unwrap();
    rig.compute.synchronize().unwrap();
    let left = set.delete();
    assert_eq!(left, [Survivor::Handles { graph: "g".into(), handles: 1 }]);
    assert!(graph.reads().is_empty() && graph.conditions().is_empty() && graph.arguments().is_empty());
    assert_eq!((graph.node_count(), graph.replays(), graph.uses(&rig.params[0])), (0, 0, false));
    assert!(graph.captured().is_none());
    rig.log.take();
    assert!(matches!(graph.replay(&rig.compute, &[]), Err(GraphError::Deleted { graph }) if graph == "g"));
    assert!(matches!(graph.warm_up(&rig.compute, 1), Err(GraphError::Deleted { .. })));
    assert!(rig.log.take().is_empty());
    // Eager passes go on, and so does a new set.
    rig.fold(&mut Turn::eager(Pass::Forward), 0, &rig.compute).unwrap();
    rig.reading(&mut rig.set(GateMode::InGraph), "next", &[1]).replay(&rig.compute, &[]).unwrap();
    assert_eq!(rig.result(), [(((3.0 + 1.0) * 3.0 + 2.0) * 3.0 + 1.0) * 3.0 + 2.0; NUMEL]);
}

#[test]
fn each_kind_of_leak_is_told_with_its_holder() {
    let machine = sim(1);
    let rig = Rig::new(&machine, &[1]);
    // Somebody keeps what was captured.
    let mut set = rig.set(GateMode::InGraph);
    let kept = rig.reading(&mut set, "kept", &[0]).captured().unwrap();
    let left = set.delete();
    assert_eq!(left, [Survivor::Captured { rank: 0, graphs: 1 }]);
    assert!(left[0].to_string().contains("held by whoever asked a graph for what it captured"));
    // Somebody made an executable of it.
    let set = rig.set(GateMode::InGraph);
    let executable = kept.instantiate().unwrap();
    let left = set.delete();
    assert_eq!(left, [Survivor::Executables { rank: 0, executables: 1 }]);
    drop((executable, kept));
    // Two handles, and both are counted.
    let mut set = rig.set(GateMode::InGraph);
    let graph = rig.reading(&mut set, "twice", &[0]);
    let other = graph.clone();
    let left = set.delete();
    assert_eq!(left, [Survivor::Handles { graph: "twice".into(), handles: 2 }]);
    assert!(left[0].to_string().starts_with("graph 'twice': 2 handles"));
    drop((graph, other));
    assert_eq!(rig.device.graphs(), device::GraphUse::default());
}

#[test]
fn a_launch_that_is_under_way_is_told_and_ends() {
    let machine = Machine::cpu_with(2, options()).unwrap();
    let rig = Rig::new(&machine, &[1]);
    let meetings = [0, 9].map(|rank| machine.meeting("held", &[0, 9], rank).unwrap());
    let late = machine.device(9).unwrap().stream("late").unwrap();
    let mut set = rig.set(GateMode::InGraph);
    let graph = rig.reading(&mut set, "g", &[0]);
    rig.compute.joint(&meetings[0], Exchange::Barrier, "test", Vec::new()).unwrap();
    graph.replay(&rig.compute, &[]).unwrap();
    drop(graph);
    assert_eq!(set.delete(), [Survivor::Executables { rank: 0, executables: 1 }]);
    late.joint(&meetings[1], Exchange::Barrier, "test", Vec::new()).unwrap();
    assert_eq!(rig.result(), [4.0; NUMEL]);
    rig.device.synchronize().unwrap();
    assert_eq!(rig.device.graphs(), device::GraphUse::default());
}

#[test]
fn a_set_in_which_nothing_was_captured_ends_as_any_other() {
    let rig = Rig::new(&sim(1), &[1]);
    let set = rig.set(GateMode::InGraph);
    set.warm_up(&rig.compute, 3).unwrap();
    assert!(set.graphs().is_empty() && set.invalid().is_empty());
    assert_eq!(set.delete(), []);
}
