//! Long failing traces and their smallest cases.

use std::{collections::BTreeSet, sync::Arc};

use device::{Mode, NodeWait, Trace, TraceEvent, TraceGraph, TraceNode, TraceNodeKind, WaitOutcome};
use graphcap::verify::{CallOrder, Finding, TraceError, VerifyOptions, shrink, verify};
use proptest::prelude::*;

use super::{
    oracle::{Act, played},
    traces::{Script, access, node, op_node},
};

const RANKS: u32 = 8;
const WEIGHTS: u32 = 24;

/// Eight ranks gather weights and use them; one weight's wait is missing on one rank.
fn gathered(missing: (u32, u32)) -> Script {
    let mut script = Script::default();
    let members: Vec<u32> = (0..RANKS).rev().collect();
    for weight in 0..WEIGHTS {
        for rank in 0..RANKS {
            let [shard, whole] =
                [access(rank, 100 + weight, Mode::Read, 0..8), access(rank, weight, Mode::Write, 0..64)];
            script.op_named(rank, 0, "adamw", vec![access(rank, 100 + weight, Mode::Write, 0..8)]);
            script.joint(rank, 0, ("dp", &members), "all_gather of 2 f32", vec![shard, whole]);
            script.record(rank, 0, "published");
            let is_missing = (rank, weight) == missing;
            let outcome = if is_missing { WaitOutcome::Dropped } else { WaitOutcome::Enforced };
            script.wait(rank, 1, "published", "test.read_after_publish", outcome);
            script.op_named(rank, 1, "gemm", vec![access(rank, weight, Mode::Read, 0..64)]);
        }
    }
    script
}

#[test]
fn a_mistake_among_eight_ranks_and_many_weights_shrinks_to_one_of_each() {
    let options = VerifyOptions::default();
    let script = gathered((5, 17));
    assert!(verify(&gathered((RANKS, 0)).trace, &options).is_clean());
    let shrunk = shrink(&script.trace, &options, 0).unwrap();
    let Finding::Race(race) = &shrunk.finding else { panic!("{}", shrunk.finding) };
    assert_eq!((race.first.rank, race.allocation, race.dropped.len()), (5, 17, 1));
    assert_eq!(shrunk.events_before, script.trace.events.len());
    let text = shrunk.trace.to_text();
    assert!(shrunk.trace.events.len() <= 4, "{text}");
    let ranks: BTreeSet<&str> = text.lines().filter_map(|line| line.split([' ', '.']).nth(1)).collect();
    assert_eq!(ranks.into_iter().collect::<Vec<_>>(), ["5"]);
    // What is left says the same when it is checked again.
    assert_eq!(verify(&shrunk.trace, &options).findings(), [shrunk.finding]);
}

#[test]
fn a_smallest_case_keeps_what_orders_everything_else() {
    let mut script = Script::default();
    // The read is behind the first write, and not behind the second one.
    script.op_named(0, 0, "first", vec![access(0, 0, Mode::Write, 0..8)]);
    script.record(0, 0, "e");
    script.wait(0, 1, "e", "test.wait", WaitOutcome::Enforced);
    script.op_named(0, 1, "read", vec![access(0, 0, Mode::Read, 0..8)]);
    script.op_named(0, 0, "second", vec![access(0, 0, Mode::Write, 0..8)]);
    let shrunk = shrink(&script.trace, &VerifyOptions::default(), 0).unwrap();
    let names: Vec<String> = shrunk
        .trace
        .events
        .iter()
        .map(|event| match event {
            TraceEvent::Op { name, .. } => name.to_string(),
            other => other.to_string(),
        })
        .collect();
    assert_eq!(names, ["read", "second"]);
}

#[test]
fn calls_that_contradict_each_other_shrink_to_two_of_them() {
    let mut script = Script::default();
    for rank in 0..4u32 {
        for call in 0..10 {
            let swapped = rank == 2 && call == 6;
            for group in if swapped { ["b", "a"] } else { ["a", "b"] } {
                script.joint(rank, 0, (group, &[0, 1, 2, 3]), "barrier", vec![]);
            }
        }
    }
    let options = VerifyOptions::default();
    let report = verify(&script.trace, &options);
    let circle = report.findings().iter().position(|finding| matches!(finding, Finding::Circle(_))).unwrap();
    let shrunk = shrink(&script.trace, &options, circle).unwrap();
    assert_eq!(shrunk.trace.events.len(), 4, "{}", shrunk.trace.to_text());
    assert!(matches!(shrink(&script.trace, &options, 9), Err(TraceError::NoSuchFinding { asked: 9, .. })));
}

/// Layers that each read a gathered weight and add to a gradient, with a sum over the ranks behind each, in one graph.
/// In the layer `missing` the wait that puts the gradient's reader behind it was taken away.
fn layers(rank: u32, missing: u32) -> TraceGraph {
    let mut nodes: Vec<TraceNode> = Vec::new();
    let mut push = |node: TraceNode| {
        nodes.push(node);
        nodes.len() as u32 - 1
    };
    let mut last: Vec<u32> = Vec::new();
    for layer in 0..WEIGHTS {
        let [weight, grad, act] = [layer, 100 + layer, 200];
        let event = format!("published {layer}").into();
        let gate = push(node(&[], TraceNodeKind::Wait { why: "test.read_after_publish".into(), event }));
        let touched = |list: &[(u32, Mode)]| list.iter().map(|(n, mode)| access(rank, *n, *mode, 0..64)).collect();
        let behind = [&last[..], &[gate]].concat();
        let used = push(op_node(&behind, "gemm", touched(&[(weight, Mode::Read), (act, Mode::Update)])));
        let added = push(op_node(&[used], "wgrad", touched(&[(grad, Mode::Update)])));
        let is_missing = layer == missing;
        let mut summed = node(
            if is_missing { &[] } else { std::slice::from_ref(&added) },
            TraceNodeKind::Joint {
                group: "dp".into(),
                position: u64::from(layer),
                what: "all_reduce(Sum) of 16 f32".into(),
                site: "grads".into(),
                accesses: touched(&[(grad, Mode::Update)]),
            },
        );
        let outcome = if is_missing { WaitOutcome::Dropped } else { WaitOutcome::Enforced };
        summed.waits = vec![NodeWait { why: "test.sum_after_wgrad".into(), node: added, outcome }];
        let summed = push(summed);
        last = vec![added, summed];
    }
    TraceGraph { id: 7, name: "microbatch".into(), nodes }
}

#[test]
fn a_graph_shrinks_to_the_nodes_that_lack_an_order() {
    let trace = |missing: u32| {
        let mut script = Script::default();
        let graphs = [0, 1].map(|rank| Arc::new(layers(rank, if rank == 1 { missing } else { WEIGHTS })));
        for _microbatch in 0..2 {
            for (rank, graph) in (0..).zip(&graphs) {
                for layer in 0..WEIGHTS {
                    script.op_named(rank, 1, "publish", vec![access(rank, layer, Mode::Write, 0..64)]);
                    script.record(rank, 1, &format!("published {layer}"));
                }
                script.launch(rank, 0, graph, &[1, 0]);
                // The next publication writes what this launch has read.
                script.record(rank, 0, "read");
                script.wait(rank, 1, "read", "test.write_after_read", WaitOutcome::Enforced);
            }
        }
        script.trace
    };
    let options = VerifyOptions::default();
    assert!(verify(&trace(WEIGHTS), &options).is_clean());
    let whole = trace(9);
    let shrunk = shrink(&whole, &options, 0).unwrap();
    let Finding::Race(race) = &shrunk.finding else { panic!("{}", shrunk.finding) };
    assert_eq!((race.first.rank, race.allocation), (1, 109));
    assert_eq!(race.dropped.iter().map(|why| why.as_str()).collect::<Vec<_>>(), ["test.sum_after_wgrad"]);
    let [TraceEvent::Launch { rank: 1, graph, bound, groups, .. }] = &shrunk.trace.events[..] else {
        panic!("{}", shrunk.trace.to_text())
    };
    assert_eq!((graph.nodes.len(), bound.len(), groups.len()), (2, 0, 1), "{}", shrunk.trace.to_text());
    // The graph of the whole trace is what it was.
    assert!(matches!(whole.events.iter().find(|event| matches!(event, TraceEvent::Launch { .. })),
        Some(TraceEvent::Launch { graph, .. }) if graph.nodes.len() == 4 * WEIGHTS as usize));
    assert_eq!(verify(&shrunk.trace, &options).findings(), [shrunk.finding]);
}

#[test]
fn gates_that_somebody_outside_waits_for_stay() {
    let mut script = Script::default();
    let touched = |mode| vec![access(0, 0, mode, 0..8)];
    let graph = TraceGraph {
        id: 1,
        name: "g".into(),
        nodes: vec![
            op_node(&[], "other", vec![access(0, 1, Mode::Write, 0..8)]),
            op_node(&[0], "first", touched(Mode::Write)),
            node(&[1], TraceNodeKind::Record { event: "landed".into() }),
            op_node(&[2], "second", touched(Mode::Write)),
        ],
    };
    script.launch(0, 0, &Arc::new(graph), &[]);
    script.wait(0, 1, "landed", "test.landed", WaitOutcome::Enforced);
    script.op_named(0, 1, "reader", touched(Mode::Read));
    let options = VerifyOptions::default();
    let shrunk = shrink(&script.trace, &options, 0).unwrap();
    let names: Vec<String> = shrunk.trace.events.iter().flat_map(named).collect();
    // What the gate orders is not a part of the finding, and it is no new one either.
    assert_eq!(names, ["second", "reader"], "{}", shrunk.trace.to_text());
}

/// Names of an event's operations.
fn named(event: &TraceEvent) -> Vec<String> {
    match event {
        TraceEvent::Op { name, .. } => vec![name.to_string()],
        TraceEvent::Launch { graph, .. } => {
            let name = |node: &TraceNode| match &node.what {
                TraceNodeKind::Op { name, .. } => name.to_string(),
                other => format!("{other:?}"),
            };
            graph.nodes.iter().map(name).collect()
        }
        other => vec![other.to_string()],
    }
}

fn size(trace: &Trace) -> usize {
    trace.events.iter().map(|event| named(event).len()).sum()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn a_smaller_case_has_its_finding_and_no_other_kind(acts in prop::collection::vec(any::<Act>(), 1..25)) {
        let trace = played(&acts);
        let options = VerifyOptions { limit: 10_000, call_order: CallOrder::Free, ..VerifyOptions::default() };
        let whole = verify(&trace, &options);
        prop_assume!(!whole.is_clean());
        let kind = |finding: &Finding| match finding {
            Finding::Race(race) => format!("{} {} {:?}", race.first.name, race.second.name, race.dropped),
            other => format!("{:?}", std::mem::discriminant(other)),
        };
        let known: BTreeSet<String> = whole.findings().iter().map(kind).collect();
        let shrunk = shrink(&trace, &options, 0).unwrap();
        prop_assert!(size(&shrunk.trace) <= size(&trace));
        let report = verify(&shrunk.trace, &options);
        prop_assert!(report.findings().contains(&shrunk.finding), "{}\n{}", report, shrunk.trace.to_text());
        prop_assert!(report.findings().iter().map(kind).all(|kind| known.contains(&kind)), "{}", report);
    }
}
