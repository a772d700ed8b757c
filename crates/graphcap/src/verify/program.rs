//! A trace as a program: streams with their items in order, and what each item waits for.

use std::sync::Arc;

use device::{Label, Note, Position, Trace, TraceEvent, TraceGraph, TraceNodeKind, WaitOutcome};

use super::{
    hashing::FastMap,
    joint::{Caller, Calls},
    shape::Shape,
};

/// Number of a point that something waits for.
pub(super) type PointId = u32;

/// Everything in a trace that orders or touches memory.
pub(super) struct Program<'t> {
    pub(super) trace: &'t Trace,
    pub(super) streams: Vec<StreamItems>,
    pub(super) launches: Vec<Launched<'t>>,
    pub(super) shapes: Vec<Shape>,
    pub(super) calls: Calls,
    /// By rank's place in `ranks`: points that its host has waited for, in order.
    pub(super) hosts: Vec<Vec<Option<PointId>>>,
    pub(super) points: u32,
    pub(super) chains: u32,
    pub(super) dropped: Vec<DroppedWait>,
}

/// One stream of one rank.
pub(super) struct StreamItems {
    pub(super) rank: u32,
    /// Place of its rank in `Program::hosts`.
    pub(super) host: u32,
    pub(super) incarnation: u32,
    pub(super) items: Vec<Item>,
    /// Its own chain; those of graphs launched on it follow.
    pub(super) first_chain: u32,
    pub(super) chains: u32,
}

pub(super) struct Item {
    /// Place in the trace.
    pub(super) event: u32,
    seq: u64,
    /// Host waits of the rank before it.
    pub(super) host_waits: u32,
    /// What others wait for when this item is done.
    pub(super) point: Option<PointId>,
    pub(super) kind: ItemKind,
}

pub(super) enum ItemKind {
    Op,
    Joint(u32),
    Record,
    /// `None` if the record lies before the trace.
    Wait(Option<PointId>),
    /// Place in `Program::dropped`.
    Dropped(u32),
    Launch(u32),
    /// A parameter is read behind this point.
    Read,
}

/// A wait that a mutation test took away.
pub(super) struct DroppedWait {
    pub(super) why: Label,
    pub(super) on: Option<PointId>,
}

/// A launch of a graph.
pub(super) struct Launched<'t> {
    pub(super) graph: &'t Arc<TraceGraph>,
    /// Place in `Program::shapes`.
    pub(super) shape: u32,
    /// By node.
    pub(super) gates: FastMap<u32, Gate>,
    /// The end of this executable's last launch, which was on another stream.
    pub(super) after: Option<PointId>,
    /// By node: what others wait for when it is done.
    pub(super) points: FastMap<u32, PointId>,
    /// Nodes, and places in `Program::dropped`.
    pub(super) dropped: Vec<(u32, u32)>,
}

impl Launched<'_> {
    /// Calls that its nodes make.
    pub(super) fn calls(&self) -> impl Iterator<Item = u32> {
        self.gates.values().filter_map(|gate| match gate {
            Gate::Joint(call) => Some(*call),
            Gate::Wait(_) => None,
        })
    }
}

/// What an external or joint node does in a launch.
#[derive(Clone)]
pub(super) enum Gate {
    Wait(Option<PointId>),
    Joint(u32),
}

/// Builds a [`Program`] in one pass.
struct Builder<'t> {
    program: Program<'t>,
    ranks: FastMap<u32, Rank>,
    /// By rank, its incarnation, and stream.
    streams: FastMap<(u32, u32, u32), u32>,
    shapes: FastMap<usize, u32>,
    /// By rank, its incarnation, and graph: stream and item of the last launch.
    launches: FastMap<(u32, u32, u64), (u32, u32)>,
}

struct Rank {
    host: u32,
    /// How often the device was opened anew: its streams and allocations are numbered from 0 again.
    incarnation: u32,
}

impl<'t> Program<'t> {
    pub(super) fn new(trace: &'t Trace) -> Program<'t> {
        let program = Program {
            trace,
            streams: Vec::new(),
            launches: Vec::new(),
            shapes: Vec::new(),
            calls: Calls::default(),
            hosts: Vec::new(),
            points: 0,
            chains: 0,
            dropped: Vec::new(),
        };
        let mut builder = Builder {
            program,
            ranks: FastMap::default(),
            streams: FastMap::default(),
            shapes: FastMap::default(),
            launches: FastMap::default(),
        };
        (0..).zip(&trace.events).for_each(|(at, event)| builder.add(at, event));
        let mut program = builder.program;
        program.calls.close();
        for stream in &mut program.streams {
            stream.first_chain = program.chains;
            program.chains += stream.chains;
        }
        program
    }
}

impl<'t> Builder<'t> {
    fn add(&mut self, at: u32, event: &'t TraceEvent) {
        match event {
            TraceEvent::Op { rank, stream, seq, .. } => drop(self.push(at, (*rank, *stream, *seq), ItemKind::Op)),
            TraceEvent::Record { rank, stream, seq, .. } => {
                self.push(at, (*rank, *stream, *seq), ItemKind::Record);
            }
            TraceEvent::Joint { rank, stream, seq, group, members, group_seq, .. } => {
                let caller = Caller { event: at, node: None };
                let call = self.program.calls.add(*rank, group, members, (*group_seq, None), caller);
                self.push(at, (*rank, *stream, *seq), ItemKind::Joint(call));
            }
            TraceEvent::Wait { rank, stream, seq, why, on, outcome, .. } => match outcome {
                // It adds nothing to what the stream is behind already: if it should, the race shows.
                WaitOutcome::Elided => {}
                WaitOutcome::Enforced => {
                    let on = self.point(*rank, *on);
                    self.push(at, (*rank, *stream, *seq), ItemKind::Wait(on));
                }
                WaitOutcome::Dropped => {
                    let kind = self.dropped(why, *rank, *on);
                    self.push(at, (*rank, *stream, *seq), kind);
                }
            },
            TraceEvent::Launch { rank, stream, seq, .. } => self.launch(at, (*rank, *stream, *seq), event),
            TraceEvent::HostWait { rank, on, .. } => {
                let on = self.point(*rank, *on);
                let host = self.rank(*rank).host;
                self.program.hosts[host as usize].push(on);
            }
            TraceEvent::Note { rank, at: Some((stream, seq)), note: Note::Read { .. } | Note::Used { .. } } => {
                self.push(at, (*rank, *stream, *seq), ItemKind::Read);
            }
            TraceEvent::Note { .. } | TraceEvent::Ran { .. } => {}
        }
    }

    fn rank(&mut self, rank: u32) -> &mut Rank {
        let hosts = &mut self.program.hosts;
        self.ranks.entry(rank).or_insert_with(|| {
            hosts.push(Vec::new());
            Rank { host: hosts.len() as u32 - 1, incarnation: 0 }
        })
    }

    fn stream(&mut self, rank: u32, stream: u32) -> u32 {
        let Rank { host, incarnation } = *self.rank(rank);
        let streams = &mut self.program.streams;
        *self.streams.entry((rank, incarnation, stream)).or_insert_with(|| {
            streams.push(StreamItems { rank, host, incarnation, items: Vec::new(), first_chain: 0, chains: 1 });
            streams.len() as u32 - 1
        })
    }

    /// Stream and place of the new item.
    fn push(&mut self, event: u32, (rank, stream, seq): (u32, u32, u64), kind: ItemKind) -> (u32, u32) {
        let mut at = self.stream(rank, stream);
        if self.program.streams[at as usize].items.last().is_some_and(|last| last.seq > seq) {
            self.rank(rank).incarnation += 1;
            at = self.stream(rank, stream);
        }
        let host = self.program.streams[at as usize].host;
        let host_waits = self.program.hosts[host as usize].len() as u32;
        let items = &mut self.program.streams[at as usize].items;
        items.push(Item { event, seq, host_waits, point: None, kind });
        (at, items.len() as u32 - 1)
    }

    /// The point behind all up to `on`; `None` if the trace has nothing there.
    fn point(&mut self, rank: u32, on: Position) -> Option<PointId> {
        let stream = self.stream(rank, on.stream);
        let Program { streams, points, launches, .. } = &mut self.program;
        let items = &mut streams[stream as usize].items;
        let at = items.partition_point(|item| item.seq <= on.seq).checked_sub(1)?;
        let next = |points: &mut u32| {
            *points += 1;
            *points - 1
        };
        match (&items[at].kind, on.node) {
            (ItemKind::Launch(launch), Some(node)) if items[at].seq == on.seq => {
                let inner = &mut launches[*launch as usize].points;
                Some(*inner.entry(node).or_insert_with(|| next(points)))
            }
            _ => Some(*items[at].point.get_or_insert_with(|| next(points))),
        }
    }

    fn dropped(&mut self, why: &Label, rank: u32, on: Position) -> ItemKind {
        let on = self.point(rank, on);
        self.program.dropped.push(DroppedWait { why: why.clone(), on });
        ItemKind::Dropped(self.program.dropped.len() as u32 - 1)
    }

    fn launch(&mut self, at: u32, place: (u32, u32, u64), event: &'t TraceEvent) {
        let TraceEvent::Launch { rank, graph, bound, groups, .. } = event else { return };
        let shapes = &mut self.program.shapes;
        let shape = *self.shapes.entry(Arc::as_ptr(graph).addr()).or_insert_with(|| {
            shapes.push(Shape::new(graph));
            shapes.len() as u32 - 1
        });
        let chains = self.program.shapes[shape as usize].chains;
        let mut gates = FastMap::default();
        for gate in bound.iter().filter(|gate| gate.outcome == WaitOutcome::Enforced) {
            let is_wait =
                matches!(graph.nodes.get(gate.node as usize).map(|n| &n.what), Some(TraceNodeKind::Wait { .. }));
            if let (true, Some(on)) = (is_wait, gate.on) {
                gates.insert(gate.node, Gate::Wait(self.point(*rank, on)));
            }
        }
        for (i, node) in (0..).zip(&graph.nodes) {
            let TraceNodeKind::Joint { group, position, .. } = &node.what else { continue };
            // Without its group in the launch nobody else can be found for it.
            let Some(block) = groups.iter().find(|g| g.group == *group) else { continue };
            let caller = Caller { event: at, node: Some(i) };
            let key = (block.group_seq, Some(*position));
            gates.insert(i, Gate::Joint(self.program.calls.add(*rank, group, &block.members, key, caller)));
        }
        let incarnation = self.rank(*rank).incarnation;
        let last = self.launches.get(&(*rank, incarnation, graph.id)).copied();
        let number = self.program.launches.len() as u32;
        let (stream, item) = self.push(at, place, ItemKind::Launch(number));
        self.program.streams[stream as usize].chains = self.program.streams[stream as usize].chains.max(chains);
        self.launches.insert((*rank, incarnation, graph.id), (stream, item));
        let after = last.filter(|(on, _)| *on != stream).map(|(on, item)| {
            let Program { streams, points, .. } = &mut self.program;
            *streams[on as usize].items[item as usize].point.get_or_insert_with(|| {
                *points += 1;
                *points - 1
            })
        });
        let mut launched = Launched { graph, shape, gates, after, points: FastMap::default(), dropped: Vec::new() };
        for (node, why, on) in inner_dropped(graph) {
            let on = Some(*launched.points.entry(on).or_insert_with(|| {
                self.program.points += 1;
                self.program.points - 1
            }));
            launched.dropped.push((node, self.program.dropped.len() as u32));
            self.program.dropped.push(DroppedWait { why: why.clone(), on });
        }
        for gate in bound.iter().filter(|gate| gate.outcome == WaitOutcome::Dropped) {
            let what = graph.nodes.get(gate.node as usize).map(|node| &node.what);
            let (Some(TraceNodeKind::Wait { why, .. }), Some(on)) = (what, gate.on) else { continue };
            if let ItemKind::Dropped(number) = self.dropped(why, *rank, on) {
                launched.dropped.push((gate.node, number));
            }
        }
        self.program.launches.push(launched);
    }
}

/// Waits inside a graph that were taken away: node, name, and the node that it would have been behind.
fn inner_dropped(graph: &TraceGraph) -> impl Iterator<Item = (u32, &Label, u32)> {
    (0..).zip(&graph.nodes).flat_map(|(i, node)| {
        let dropped = node.waits.iter().filter(move |wait| wait.outcome == WaitOutcome::Dropped && wait.node < i);
        dropped.map(move |wait| (i, &wait.why, wait.node))
    })
}
