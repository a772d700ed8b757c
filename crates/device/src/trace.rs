//! What a machine was asked to do, in the order it was asked, and when it ran.

mod columns; // streams beside each other, as text
mod graph; // launched graphs, opened up
mod note; // what the crates above say about the host's program
mod tracer; // collects events while tracing is on
mod waits; // how long streams stood still

use std::{
    collections::HashSet,
    fmt::{self, Write},
    sync::Arc,
};

pub(crate) use self::tracer::Tracer;
pub use self::{
    columns::Columns,
    graph::{BoundGate, LaunchGroup, NodeWait, TraceGraph, TraceNode, TraceNodeKind},
    note::Note,
    waits::{Tick, WaitSpan},
};
use crate::{Access, Label, MemoryKind, Mode, Region};

/// A declared access, by number of the allocation on its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceAccess {
    /// Rank whose memory it is.
    pub rank: u32,
    /// Number of the allocation on that rank.
    pub allocation: u32,
    /// Its label.
    pub label: Label,
    /// What it is for.
    pub kind: MemoryKind,
    /// Bytes.
    pub region: Region,
    /// How they are touched.
    pub mode: Mode,
}

impl From<&Access> for TraceAccess {
    fn from(a: &Access) -> Self {
        TraceAccess {
            rank: a.view.rank(),
            allocation: a.view.allocation_id(),
            label: a.view.shared_label().into(),
            kind: a.view.allocation().kind,
            region: a.view.region(),
            mode: a.mode,
        }
    }
}

/// What became of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitOutcome {
    /// The stream waits.
    Enforced,
    /// The stream is behind that point already.
    Elided,
    /// A mutation test took the wait away.
    Dropped,
}

/// A place on a device that others are ordered behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position {
    /// Stream, by number on its device.
    pub stream: u32,
    /// Position in the stream.
    pub seq: u64,
    /// The node, if it is inside the launch of a graph.
    pub node: Option<u32>,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.stream, self.seq)?;
        self.node.map_or(Ok(()), |node| write!(f, ".{node}"))
    }
}

/// One event of a trace. `rank`, `stream` and `seq` say which stream and where in it.
#[derive(Clone, Debug, PartialEq)]
pub enum TraceEvent {
    /// An operation was submitted.
    Op {
        /// Submitting rank.
        rank: u32,
        /// Stream, by number on its device.
        stream: u32,
        /// Position in the stream.
        seq: u64,
        /// Operation.
        name: Label,
        /// Place in the model.
        site: Label,
        /// Floating-point operations; 0 for a user's own operation.
        flops: u64,
        /// Declared accesses.
        accesses: Vec<TraceAccess>,
    },
    /// A member's call of a joint operation was submitted.
    Joint {
        /// Submitting rank.
        rank: u32,
        /// Stream, by number on its device.
        stream: u32,
        /// Position in the stream.
        seq: u64,
        /// Group.
        group: Label,
        /// Ranks, in the order of the group.
        members: Arc<[u32]>,
        /// Position in the group's sequence.
        group_seq: u64,
        /// What is asked.
        what: Label,
        /// Place in the model.
        site: Label,
        /// Declared accesses.
        accesses: Vec<TraceAccess>,
    },
    /// An event was recorded.
    Record {
        /// Submitting rank.
        rank: u32,
        /// Stream, by number on its device.
        stream: u32,
        /// Position in the stream.
        seq: u64,
        /// Event.
        event: Label,
        /// Which record of the event, from 1.
        generation: u64,
    },
    /// A stream was told to wait.
    Wait {
        /// Submitting rank.
        rank: u32,
        /// Stream, by number on its device.
        stream: u32,
        /// Position in the stream.
        seq: u64,
        /// Name of the synchronisation.
        why: Label,
        /// Event.
        event: Label,
        /// Which record of the event it is bound to.
        generation: u64,
        /// Where that record is.
        on: Position,
        /// Whether it holds.
        outcome: WaitOutcome,
    },
    /// An executable graph was launched.
    Launch {
        /// Submitting rank.
        rank: u32,
        /// Stream, by number on its device.
        stream: u32,
        /// Position in the stream.
        seq: u64,
        /// Its nodes.
        graph: Arc<TraceGraph>,
        /// Which launch of this executable, from 1.
        launch: u64,
        /// External nodes, in the order of the nodes.
        bound: Vec<BoundGate>,
        /// Groups of its joint operations.
        groups: Vec<LaunchGroup>,
    },
    /// The host has waited for the end of a stream or an event.
    HostWait {
        /// Rank.
        rank: u32,
        /// What it waited for.
        what: Label,
        /// Where that is.
        on: Position,
    },
    /// The crates above said what the host is doing.
    Note {
        /// Rank.
        rank: u32,
        /// Stream, and the position that its next submission takes; `None` where the host means itself.
        at: Option<(u32, u64)>,
        /// What they said.
        note: Note,
    },
    /// An operation ran; on `cuda` also the whole launch of a graph.
    Ran {
        /// Rank.
        rank: u32,
        /// Stream, by number on its device.
        stream: u32,
        /// Position in the stream.
        seq: u64,
        /// The node, if it ran inside the launch of a graph.
        node: Option<u32>,
        /// Operation, or graph.
        name: Label,
        /// Nanoseconds since tracing began; the step's number on `sim` and `dry`.
        start: u64,
        /// As `start`.
        end: u64,
    },
}

impl fmt::Display for TraceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TraceEvent::Op { rank, stream, seq, name, site, flops, accesses: list } => {
                write!(f, "op {rank}.{stream}.{seq} {name}@{site} flops={flops}")?;
                accesses_to(f, list)
            }
            TraceEvent::Joint { rank, stream, seq, group, group_seq, what, site, accesses: list, .. } => {
                write!(f, "joint {rank}.{stream}.{seq} {group}#{group_seq} {what}@{site}")?;
                accesses_to(f, list)
            }
            TraceEvent::Record { rank, stream, seq, event, generation } => {
                write!(f, "record {rank}.{stream}.{seq} {event}:{generation}")
            }
            TraceEvent::Wait { rank, stream, seq, why, event, generation, on, outcome } => {
                write!(f, "wait {rank}.{stream}.{seq} {event}:{generation} on {on} {why} {outcome:?}")
            }
            TraceEvent::Launch { rank, stream, seq, graph, launch, bound, groups } => {
                write!(f, "launch {rank}.{stream}.{seq} {}#{} {launch}", graph.name, graph.id)?;
                for gate in bound {
                    write!(f, " {}={}:{:?}", gate.node, gate.generation, gate.outcome)?;
                    gate.on.map_or(Ok(()), |on| write!(f, "@{on}"))?;
                }
                groups.iter().try_for_each(|g| write!(f, " {}#{}", g.group, g.group_seq))
            }
            TraceEvent::HostWait { rank, what, on } => write!(f, "host {rank} waits for {what} at {on}"),
            TraceEvent::Note { rank, at: None, note } => write!(f, "note {rank} {note}"),
            TraceEvent::Note { rank, at: Some((stream, seq)), note } => write!(f, "note {rank}.{stream}.{seq} {note}"),
            TraceEvent::Ran { rank, stream, seq, node, name, start, end } => {
                let on = Position { stream: *stream, seq: *seq, node: *node };
                write!(f, "ran {rank}.{on} {name} {start}..{end}")
            }
        }
    }
}

fn accesses_to(f: &mut fmt::Formatter<'_>, list: &[TraceAccess]) -> fmt::Result {
    list.iter().try_for_each(|a| {
        let mode = match a.mode {
            Mode::Read => 'r',
            Mode::Write => 'w',
            Mode::Update => 'u',
        };
        let r = a.region;
        write!(f, " {mode}:{}.{}+{}:{}x{}/{}", a.rank, a.allocation, r.start, r.rows, r.row_bytes, r.pitch)
    })
}

/// A recorded trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// In the order in which they happened; on `cpu` the order among ranks is that of the clock.
    pub events: Vec<TraceEvent>,
}

/// What a rank asked its device to do: sums over a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Operations and calls of joint operations.
    pub operations: u64,
    /// Floating-point operations of the known kernels, multiply and add counted separately.
    pub flops: u64,
    /// Bytes declared as read, updates included.
    pub bytes_read: u64,
    /// Bytes declared as written, updates included.
    pub bytes_written: u64,
}

impl Trace {
    /// The work of `rank`, launched graphs opened up.
    pub fn work(&self, rank: u32) -> Work {
        let mut work = Work::default();
        for event in &self.events {
            match event {
                TraceEvent::Op { rank: r, accesses, flops, .. } if *r == rank => work.add(*flops, accesses),
                TraceEvent::Joint { rank: r, accesses, .. } if *r == rank => work.add(0, accesses),
                TraceEvent::Launch { rank: r, graph, .. } if *r == rank => {
                    for node in &graph.nodes {
                        match &node.what {
                            TraceNodeKind::Op { flops, accesses, .. } => work.add(*flops, accesses),
                            TraceNodeKind::Joint { accesses, .. } => work.add(0, accesses),
                            TraceNodeKind::Wait { .. } | TraceNodeKind::Record { .. } => {}
                        }
                    }
                }
                _ => {}
            }
        }
        work
    }

    /// One line an event, and before the first launch of a graph one line a node. On `sim` and `dry`, equal seeds give
    /// equal text.
    pub fn to_text(&self) -> String {
        let mut seen = HashSet::new();
        self.events.iter().fold(String::new(), |mut text, event| {
            if let TraceEvent::Launch { rank, graph, .. } = event
                && seen.insert((*rank, graph.id))
            {
                writeln!(text, "{graph}").expect("BUG: writing to a string");
            }
            writeln!(text, "{event}").expect("BUG: writing to a string");
            text
        })
    }
}

impl Work {
    fn add(&mut self, flops: u64, accesses: &[TraceAccess]) {
        self.operations += 1;
        self.flops += flops;
        for a in accesses {
            let bytes = (a.region.rows * a.region.row_bytes) as u64;
            self.bytes_read += if a.mode == Mode::Write { 0 } else { bytes };
            self.bytes_written += if a.mode.writes() { bytes } else { 0 };
        }
    }
}
