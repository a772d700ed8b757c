//! A trace written down action by action, as a machine would number it.

use std::{collections::BTreeMap, sync::Arc};

use device::{
    BoundGate, LaunchGroup, MemoryKind, Mode, NodeWait, Note, Position, Region, Trace, TraceAccess, TraceEvent,
    TraceGraph, TraceNode, TraceNodeKind, WaitOutcome,
};

/// Numbers what ranks submit.
#[derive(Clone, Default)]
pub(crate) struct Script {
    pub(crate) trace: Trace,
    next: BTreeMap<(u32, u32), u64>,
    groups: BTreeMap<(u32, String), u64>,
    records: BTreeMap<(u32, String), (u64, Position)>,
    launches: BTreeMap<(u32, u64), u64>,
    ops: u32,
}

/// Touches bytes `range` of allocation `number`.
pub(crate) fn access(rank: u32, number: u32, mode: Mode, range: std::ops::Range<usize>) -> TraceAccess {
    let region = Region::contiguous(range.start, range.len());
    TraceAccess { rank, allocation: number, label: format!("m{number}").into(), kind: MemoryKind::Other, region, mode }
}

impl Script {
    fn take(&mut self, rank: u32, stream: u32) -> u64 {
        let next = self.next.entry((rank, stream)).or_default();
        *next += 1;
        *next - 1
    }

    /// A name that no other operation has.
    fn name(&mut self) -> String {
        self.ops += 1;
        format!("op{}", self.ops - 1)
    }

    pub(crate) fn op(&mut self, rank: u32, stream: u32, accesses: Vec<TraceAccess>) {
        let name = self.name();
        self.op_named(rank, stream, &name, accesses);
    }

    pub(crate) fn op_named(&mut self, rank: u32, stream: u32, name: &str, accesses: Vec<TraceAccess>) {
        let (seq, name) = (self.take(rank, stream), name.to_owned().into());
        self.trace.events.push(TraceEvent::Op { rank, stream, seq, name, site: "test".into(), flops: 0, accesses });
    }

    pub(crate) fn record(&mut self, rank: u32, stream: u32, event: &str) {
        let seq = self.take(rank, stream);
        let generation = self.records.get(&(rank, event.to_owned())).map_or(1, |(last, _)| last + 1);
        let at = Position { stream, seq, node: None };
        self.records.insert((rank, event.to_owned()), (generation, at));
        let event = event.to_owned().into();
        self.trace.events.push(TraceEvent::Record { rank, stream, seq, event, generation });
    }

    /// Nothing if the event was never recorded: a machine refuses that.
    pub(crate) fn wait(&mut self, rank: u32, stream: u32, event: &str, why: &str, outcome: WaitOutcome) {
        let Some((generation, on)) = self.records.get(&(rank, event.to_owned())).copied() else { return };
        let seq = match outcome {
            WaitOutcome::Enforced => self.take(rank, stream),
            _ => self.next.get(&(rank, stream)).copied().unwrap_or(0),
        };
        let (why, event) = (why.to_owned().into(), event.to_owned().into());
        self.trace.events.push(TraceEvent::Wait { rank, stream, seq, why, event, generation, on, outcome });
    }

    pub(crate) fn host_wait(&mut self, rank: u32, stream: u32) {
        let seq = self.take(rank, stream);
        let on = Position { stream, seq, node: None };
        self.trace.events.push(TraceEvent::HostWait { rank, what: "all".into(), on });
    }

    /// One member's call.
    pub(crate) fn joint(
        &mut self,
        rank: u32,
        stream: u32,
        (group, members): (&str, &[u32]),
        what: &str,
        accesses: Vec<TraceAccess>,
    ) {
        let seq = self.take(rank, stream);
        let next = self.groups.entry((rank, group.to_owned())).or_default();
        let group_seq = *next;
        *next += 1;
        self.trace.events.push(TraceEvent::Joint {
            rank,
            stream,
            seq,
            group: group.to_owned().into(),
            members: members.into(),
            group_seq,
            what: what.to_owned().into(),
            site: format!("site{}", self.trace.events.len()).into(),
            accesses,
        });
    }

    /// Waits bind to what was recorded by now.
    pub(crate) fn launch(&mut self, rank: u32, stream: u32, graph: &Arc<TraceGraph>, members: &[u32]) {
        let seq = self.take(rank, stream);
        let mut bound = Vec::new();
        let mut made = Vec::new();
        let mut groups: Vec<LaunchGroup> = Vec::new();
        for (node, what) in (0..).zip(graph.nodes.iter().map(|node| &node.what)) {
            match what {
                TraceNodeKind::Wait { event, .. } => {
                    let last = self.records.get(&(rank, event.to_string())).copied();
                    let (generation, on) = last.map_or((0, None), |(generation, on)| (generation, Some(on)));
                    bound.push(BoundGate { node, generation, on, outcome: WaitOutcome::Enforced });
                }
                TraceNodeKind::Record { event } => {
                    let generation = self.records.get(&(rank, event.to_string())).map_or(1, |(last, _)| last + 1);
                    bound.push(BoundGate { node, generation, on: None, outcome: WaitOutcome::Enforced });
                    let at = Position { stream, seq, node: Some(node) };
                    made.push(((rank, event.to_string()), (generation, at)));
                }
                TraceNodeKind::Joint { group, .. } if groups.iter().all(|g| g.group != *group) => {
                    let next = self.groups.entry((rank, group.to_string())).or_default();
                    groups.push(LaunchGroup { group: group.clone(), members: members.into(), group_seq: *next });
                    *next += 1;
                }
                _ => {}
            }
        }
        self.records.extend(made);
        let launch = self.launches.entry((rank, graph.id)).or_default();
        *launch += 1;
        let (graph, launch) = (graph.clone(), *launch);
        self.trace.events.push(TraceEvent::Launch { rank, stream, seq, graph, launch, bound, groups });
    }

    pub(crate) fn note(&mut self, rank: u32, on: Option<u32>, note: Note) {
        let at = on.map(|stream| (stream, self.next.get(&(rank, stream)).copied().unwrap_or(0)));
        self.trace.events.push(TraceEvent::Note { rank, at, note });
    }
}

/// A node that does something, without waits.
pub(crate) fn node(behind: &[u32], what: TraceNodeKind) -> TraceNode {
    TraceNode { behind: behind.to_vec(), lane: 0, waits: Vec::<NodeWait>::new(), what }
}

pub(crate) fn op_node(behind: &[u32], name: &str, accesses: Vec<TraceAccess>) -> TraceNode {
    let (name, site) = (name.to_owned().into(), "graph".into());
    node(behind, TraceNodeKind::Op { name, site, flops: 0, accesses })
}
