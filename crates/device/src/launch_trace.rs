//! Graphs and launches as traces tell them.

use std::sync::Arc;

use crate::{
    BoundGate, Event, LaunchGroup, Meeting, NodeWait, TraceAccess, TraceEvent, TraceGraph, TraceNode, TraceNodeKind,
    capture::{Draft, DraftNode},
    queue::StreamInner,
};

/// The nodes of a graph whose number on its device is `id`.
pub(crate) fn trace_graph(id: u64, name: &str, drafts: &[DraftNode]) -> TraceGraph {
    // Calls of each group so far.
    let mut calls: Vec<(String, u64)> = Vec::new();
    let mut position = |group: &str| match calls.iter_mut().find(|(known, _)| known == group) {
        Some((_, count)) => {
            *count += 1;
            *count - 1
        }
        None => {
            calls.push((group.to_owned(), 1));
            0
        }
    };
    let nodes = drafts.iter().map(|draft| TraceNode {
        behind: draft.behind.clone(),
        lane: draft.lane,
        waits: draft.waits.iter().map(|(why, node, outcome)| wait(*why, *node, *outcome)).collect(),
        what: kind(&draft.what, &mut position),
    });
    TraceGraph { id, name: name.to_owned().into(), nodes: nodes.collect() }
}

fn wait(why: crate::Why, node: u32, outcome: crate::WaitOutcome) -> NodeWait {
    NodeWait { why: why.into(), node, outcome }
}

fn kind(what: &Draft, position: &mut impl FnMut(&str) -> u64) -> TraceNodeKind {
    match what {
        Draft::Op(op) => TraceNodeKind::Op {
            name: op.name.into(),
            site: (&op.site).into(),
            flops: op.flops(),
            accesses: op.accesses.iter().map(TraceAccess::from).collect(),
        },
        Draft::Joint { body, .. } => TraceNodeKind::Joint {
            group: (&body.meeting.name).into(),
            position: position(&body.meeting.name),
            what: body.request.to_string().into(),
            site: (&body.site).into(),
            accesses: body.accesses.iter().map(TraceAccess::from).collect(),
        },
        Draft::Wait { event, why } => TraceNodeKind::Wait { why: (*why).into(), event: event.label() },
        Draft::Record { event } => TraceNodeKind::Record { event: event.label() },
    }
}

/// Which launch of an executable, from 1, and where.
#[derive(Clone, Copy)]
pub(crate) struct LaunchAt {
    pub(crate) launch: u64,
    pub(crate) seq: u64,
}

pub(crate) fn trace_launch(
    stream: &StreamInner,
    graph: &Arc<TraceGraph>,
    at: LaunchAt,
    bound: &[BoundGate],
    groups: (&[Meeting], &[u64]),
) {
    let rank = stream.device.rank;
    stream.device.machine.tracer.add(rank, || {
        let groups = groups.0.iter().zip(groups.1).map(|(meeting, number)| LaunchGroup {
            group: (&meeting.inner.name).into(),
            members: meeting.inner.members.clone(),
            group_seq: *number,
        });
        TraceEvent::Launch {
            rank,
            stream: stream.index,
            seq: at.seq,
            graph: graph.clone(),
            launch: at.launch,
            bound: bound.to_vec(),
            groups: groups.collect(),
        }
    });
}

/// The same nodes as another graph, whose gates have `events`.
pub(crate) fn with_events(graph: &TraceGraph, id: u64, events: &[Event]) -> TraceGraph {
    let mut events = events.iter();
    let mut renamed = TraceGraph { id, ..graph.clone() };
    for node in &mut renamed.nodes {
        if let TraceNodeKind::Wait { event, .. } | TraceNodeKind::Record { event } = &mut node.what {
            *event = events.next().expect("BUG: a gate without an event").label();
        }
    }
    renamed
}
