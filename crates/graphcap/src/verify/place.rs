//! Names for places in a trace: which operation, of which rank, stream, step and microbatch.

use std::{collections::BTreeMap, fmt};

use device::{Label, Mode, Note, Position, Region, Trace, TraceAccess, TraceEvent, TraceNodeKind};

/// An operation, by place in the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct OpAt {
    pub(super) event: u32,
    pub(super) node: Option<u32>,
}

/// Where in the host's program something was submitted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct When {
    /// Step, if the trace says it.
    pub step: Option<u64>,
    /// Microbatch, if the trace says it.
    pub microbatch: Option<u64>,
    /// Pass, if the trace says it.
    pub pass: Option<Label>,
}

/// An operation, a member's call or a note, with all that tells it from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Rank.
    pub rank: u32,
    /// Name of the stream, or its number; `host` for the host itself.
    pub stream: Label,
    /// Position on the device.
    pub on: Position,
    /// What it does (`gemm`).
    pub name: Label,
    /// Place in the model.
    pub site: Label,
    /// The graph, if it is inside a launch: its name, and which launch.
    pub graph: Option<(Label, u64)>,
    /// Step, microbatch and pass.
    pub when: When,
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        let numbers = [("step", self.step), ("microbatch", self.microbatch)];
        for (what, number) in numbers.into_iter().filter_map(|(what, number)| Some((what, number?))) {
            write!(f, "{comma}{what} {number}")?;
            comma = ", ";
        }
        self.pass.as_ref().map_or(Ok(()), |pass| write!(f, "{comma}{pass}"))
    }
}

impl Place {
    /// Stream, position and name: what stands for it in a sentence.
    pub fn short(&self) -> String {
        let node = self.on.node.map_or(String::new(), |node| format!(".{node}"));
        format!("{} {}{node} '{}'", self.stream, self.on.seq, self.name)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} {}", self.rank, self.short())?;
        if !self.site.is_empty() {
            write!(f, " at {}", self.site)?;
        }
        if let Some((graph, launch)) = &self.graph {
            write!(f, " in launch {launch} of graph '{graph}'")?;
        }
        let when = self.when.to_string();
        if when.is_empty() { Ok(()) } else { write!(f, " ({when})") }
    }
}

/// What a trace says about places.
pub(super) struct Places<'t> {
    pub(super) trace: &'t Trace,
    streams: BTreeMap<(u32, u32), &'t Label>,
    /// By rank: from which event on.
    whens: BTreeMap<u32, Vec<(u32, When)>>,
}

impl<'t> Places<'t> {
    pub(super) fn new(trace: &'t Trace) -> Places<'t> {
        let mut places = Places { trace, streams: BTreeMap::new(), whens: BTreeMap::new() };
        for (at, event) in (0..).zip(&trace.events) {
            let TraceEvent::Note { rank, note, .. } = event else { continue };
            if let Note::Stream { stream, name } = note {
                places.streams.insert((*rank, *stream), name);
                continue;
            }
            let whens = places.whens.entry(*rank).or_default();
            let mut when = whens.last().map(|(_, when)| when.clone()).unwrap_or_default();
            match note {
                Note::Step(step) => when = When { step: Some(*step), ..When::default() },
                Note::Microbatch(microbatch) => when = When { microbatch: Some(*microbatch), pass: None, ..when },
                Note::Pass(pass) => when.pass = Some(pass.clone()),
                _ => continue,
            }
            whens.push((at, when));
        }
        places
    }

    fn stream(&self, rank: u32, stream: u32) -> Label {
        let name = self.streams.get(&(rank, stream)).copied().cloned();
        name.unwrap_or_else(|| format!("stream {stream}").into())
    }

    fn when(&self, rank: u32, event: u32) -> When {
        let Some(whens) = self.whens.get(&rank) else { return When::default() };
        let at = whens.partition_point(|(from, _)| *from <= event);
        at.checked_sub(1).map(|at| whens[at].1.clone()).unwrap_or_default()
    }

    /// An operation or a member's call.
    pub(super) fn op(&self, at: OpAt) -> Place {
        let event = &self.trace.events[at.event as usize];
        let (rank, stream, seq) = position(event).unwrap_or_default();
        let (name, site) = named(event, at.node);
        let graph = match event {
            TraceEvent::Launch { graph, launch, .. } => Some((graph.name.clone(), *launch)),
            _ => None,
        };
        let on = Position { stream, seq, node: at.node };
        Place { rank, stream: self.stream(rank, stream), on, name, site, graph, when: self.when(rank, at.event) }
    }

    /// A note.
    pub(super) fn note(&self, event: u32) -> Place {
        let TraceEvent::Note { rank, at, note } = &self.trace.events[event as usize] else {
            return self.op(OpAt { event, node: None });
        };
        let (stream, seq) = at.unwrap_or_default();
        let name: Label = match note {
            Note::Read { .. } => "read".into(),
            Note::Issued { .. } => "publication".into(),
            Note::Written { .. } => "write".into(),
            Note::Landed { .. } => "gradient landed".into(),
            Note::Reduced { .. } => "reduction".into(),
            Note::Gathered { .. } => "gather".into(),
            Note::Used { .. } => "use".into(),
            _ => "note".into(),
        };
        let site = match note {
            Note::Read { param, .. }
            | Note::Landed { param, .. }
            | Note::Gathered { param, .. }
            | Note::Used { param, .. } => param.clone(),
            Note::Issued { publisher, .. } | Note::Written { publisher, .. } => publisher.clone(),
            Note::Reduced { bucket, .. } => bucket.clone(),
            _ => "".into(),
        };
        let stream_name = if at.is_some() { self.stream(*rank, stream) } else { "host".into() };
        let on = Position { stream, seq, node: None };
        Place { rank: *rank, stream: stream_name, on, name, site, graph: None, when: self.when(*rank, event) }
    }
}

/// Rank, stream and position of whatever has one.
pub(super) fn position(event: &TraceEvent) -> Option<(u32, u32, u64)> {
    match event {
        TraceEvent::Op { rank, stream, seq, .. }
        | TraceEvent::Joint { rank, stream, seq, .. }
        | TraceEvent::Record { rank, stream, seq, .. }
        | TraceEvent::Wait { rank, stream, seq, .. }
        | TraceEvent::Launch { rank, stream, seq, .. }
        | TraceEvent::Ran { rank, stream, seq, .. } => Some((*rank, *stream, *seq)),
        TraceEvent::Note { rank, at, .. } => at.map(|(stream, seq)| (*rank, stream, seq)),
        TraceEvent::HostWait { .. } => None,
    }
}

/// Name and site.
pub(super) fn named(event: &TraceEvent, node: Option<u32>) -> (Label, Label) {
    match event {
        TraceEvent::Op { name, site, .. } => (name.clone(), site.clone()),
        TraceEvent::Joint { what, site, .. } => (verb(what), site.clone()),
        TraceEvent::Launch { graph, .. } => match node.and_then(|node| graph.nodes.get(node as usize)).map(|n| &n.what)
        {
            Some(TraceNodeKind::Op { name, site, .. }) => (name.clone(), site.clone()),
            Some(TraceNodeKind::Joint { what, site, .. }) => (verb(what), site.clone()),
            Some(TraceNodeKind::Wait { why, event }) => (format!("wait {why}").into(), event.clone()),
            Some(TraceNodeKind::Record { event }) => ("record".into(), event.clone()),
            None => ("launch".into(), graph.name.clone()),
        },
        TraceEvent::Wait { why, event, .. } => (format!("wait {why}").into(), event.clone()),
        TraceEvent::Record { event, .. } => ("record".into(), event.clone()),
        _ => ("".into(), "".into()),
    }
}

/// `all_gather` out of `all_gather of 8 f32`.
fn verb(what: &Label) -> Label {
    match what.contains(" + ") {
        true => "coalesced".into(),
        false => what.split([' ', '(']).next().unwrap_or_default().to_owned().into(),
    }
}

/// Declared accesses of an operation.
pub(super) fn accesses(event: &TraceEvent, node: Option<u32>) -> &[TraceAccess] {
    match event {
        TraceEvent::Op { accesses, .. } | TraceEvent::Joint { accesses, .. } => accesses,
        TraceEvent::Launch { graph, .. } => match node.and_then(|node| graph.nodes.get(node as usize)).map(|n| &n.what)
        {
            Some(TraceNodeKind::Op { accesses, .. } | TraceNodeKind::Joint { accesses, .. }) => accesses,
            _ => &[],
        },
        _ => &[],
    }
}

/// In words.
pub(super) fn verb_of(mode: Mode) -> &'static str {
    match mode {
        Mode::Read => "reads",
        Mode::Write => "writes",
        Mode::Update => "updates",
    }
}

/// First to last shared byte of two regions, gaps of strided ones included.
pub(super) fn shared(a: Region, b: Region) -> std::ops::Range<usize> {
    a.start.max(b.start)..a.end().min(b.end())
}
