//! Launched graphs without some of their nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use device::{BoundGate, Label, NodeWait, Position, Trace, TraceEvent, TraceGraph, TraceNode, TraceNodeKind};

use crate::verify::place::position;

/// A node: the graph, by place in the order of first launches, and its number there.
pub(super) type NodeAt = (usize, u32);

/// All graphs of a trace, in the order of their first launches.
fn graphs(trace: &Trace) -> Vec<&Arc<TraceGraph>> {
    let mut found: Vec<&Arc<TraceGraph>> = Vec::new();
    for event in &trace.events {
        if let TraceEvent::Launch { graph, .. } = event
            && !found.iter().any(|known| Arc::ptr_eq(known, graph))
        {
            found.push(graph);
        }
    }
    found
}

/// Nodes that go together: calls of one joint operation, by whatever graph. Last first.
pub(super) fn units(trace: &Trace) -> Vec<Vec<NodeAt>> {
    let mut joint: BTreeMap<(&Label, u64), Vec<NodeAt>> = BTreeMap::new();
    let mut units: Vec<Vec<NodeAt>> = Vec::new();
    for (at, graph) in graphs(trace).into_iter().enumerate() {
        for (number, node) in (0..).zip(&graph.nodes) {
            match &node.what {
                TraceNodeKind::Joint { group, position, .. } => {
                    joint.entry((group, *position)).or_default().push((at, number));
                }
                _ => units.push(vec![(at, number)]),
            }
        }
    }
    units.extend(joint.into_values());
    units.sort_by_key(|unit| std::cmp::Reverse(unit[0]));
    units
}

/// `None` if what is left would wait for what is gone. Nodes that were ordered by one that is gone still are.
pub(super) fn without(trace: &Trace, gone: &BTreeSet<NodeAt>) -> Option<Trace> {
    let cuts: Vec<(&Arc<TraceGraph>, Cut)> = graphs(trace)
        .into_iter()
        .enumerate()
        .map(|(at, graph)| (graph, Cut::new(graph, |node| gone.contains(&(at, node)))))
        .collect();
    let cut = |graph: &Arc<TraceGraph>| {
        &cuts.iter().find(|(known, _)| Arc::ptr_eq(known, graph)).expect("BUG: a graph of this trace").1
    };
    let mut launched: BTreeMap<(u32, u32, u64), &Cut> = BTreeMap::new();
    for event in &trace.events {
        if let (TraceEvent::Launch { graph, .. }, Some(at)) = (event, position(event)) {
            launched.insert(at, cut(graph));
        }
    }
    let moved = |rank: u32, on: Position| match (on.node, launched.get(&(rank, on.stream, on.seq))) {
        (Some(node), Some(cut)) => cut.left(node).map(|node| Position { node: Some(node), ..on }),
        _ => Some(on),
    };
    let mut events = Vec::with_capacity(trace.events.len());
    for event in &trace.events {
        let mut event = event.clone();
        match &mut event {
            TraceEvent::Wait { rank, on, .. } | TraceEvent::HostWait { rank, on, .. } => *on = moved(*rank, *on)?,
            TraceEvent::Launch { rank, graph, bound, groups, .. } => {
                let cut = cut(graph);
                let left = bound.iter().filter_map(|gate| Some((cut.left(gate.node)?, gate)));
                let gate = |(node, gate): (u32, &BoundGate)| {
                    let on = gate.on.map(|on| moved(*rank, on)).map_or(Some(None), |on| on.map(Some))?;
                    Some(BoundGate { node, on, ..*gate })
                };
                *bound = left.map(gate).collect::<Option<_>>()?;
                groups.retain(|group| cut.calls(&group.group));
                *graph = cut.graph.clone();
            }
            _ => {}
        }
        events.push(event);
    }
    Some(Trace { events })
}

/// A graph without some nodes.
struct Cut {
    graph: Arc<TraceGraph>,
    /// By former number: what is behind which nodes now, itself if it is left.
    now: Vec<Now>,
}

enum Now {
    Left(u32),
    /// What it was behind stands for it.
    Gone(Vec<u32>),
}

impl Cut {
    fn new(graph: &Arc<TraceGraph>, is_gone: impl Fn(u32) -> bool) -> Cut {
        let mut now: Vec<Now> = Vec::new();
        let mut nodes: Vec<TraceNode> = Vec::new();
        for (number, node) in (0..).zip(&graph.nodes) {
            let mut behind = BTreeSet::new();
            for &before in node.behind.iter().filter(|&&before| (before as usize) < now.len()) {
                match &now[before as usize] {
                    Now::Left(number) => drop(behind.insert(*number)),
                    Now::Gone(stand_ins) => behind.extend(stand_ins),
                }
            }
            let behind: Vec<u32> = behind.into_iter().collect();
            if is_gone(number) {
                now.push(Now::Gone(behind));
                continue;
            }
            let wait = |wait: &NodeWait| match now.get(wait.node as usize)? {
                Now::Left(node) => Some(NodeWait { node: *node, ..wait.clone() }),
                Now::Gone(_) => None,
            };
            let waits = node.waits.iter().filter_map(wait).collect();
            now.push(Now::Left(nodes.len() as u32));
            nodes.push(TraceNode { behind, waits, ..node.clone() });
        }
        let graph = if nodes.len() == graph.nodes.len() {
            graph.clone()
        } else {
            Arc::new(TraceGraph { id: graph.id, name: graph.name.clone(), nodes })
        };
        Cut { graph, now }
    }

    /// The number that a node has now.
    fn left(&self, node: u32) -> Option<u32> {
        match self.now.get(node as usize)? {
            Now::Left(number) => Some(*number),
            Now::Gone(_) => None,
        }
    }

    fn calls(&self, asked: &Label) -> bool {
        let calls = |node: &TraceNode| matches!(&node.what, TraceNodeKind::Joint { group, .. } if group == asked);
        self.graph.nodes.iter().any(calls)
    }
}
