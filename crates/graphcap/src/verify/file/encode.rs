//! Traces into lines.

use std::{
    collections::HashMap,
    io::{self, Write},
    sync::Arc,
};

use device::{
    BoundGate, Label, LaunchGroup, Note, Position, Trace, TraceAccess, TraceEvent, TraceGraph, TraceNode,
    TraceNodeKind, WaitOutcome,
};

use super::{HEADER, KINDS, MODES, OUTCOMES, Tally};

pub(super) fn trace(trace: &Trace, out: &mut impl Write) -> io::Result<()> {
    let mut out = Tallied { out, tally: Tally::EMPTY };
    let (labels, members, graphs) = (HashMap::new(), HashMap::new(), HashMap::new());
    let mut encoder = Encoder { out: &mut out, labels, members, graphs, line: Line::new() };
    writeln!(encoder.out, "{HEADER}")?;
    trace.events.iter().try_for_each(|event| encoder.event(event))?;
    let Tally { lines, sum } = out.tally;
    writeln!(out, "E {lines} {sum}")
}

/// Counts what is written.
struct Tallied<'o, W> {
    out: &'o mut W,
    tally: Tally,
}

impl<W: Write> Write for Tallied<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.tally.add(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A line in the making.
struct Line {
    text: String,
}

impl Line {
    fn new() -> Line {
        Line { text: String::new() }
    }

    fn put(&mut self, number: u64) {
        use std::fmt::Write;
        write!(self.text, " {number}").expect("BUG: writing to a string");
    }
}

struct Encoder<'o, W> {
    out: &'o mut W,
    labels: HashMap<Label, u64>,
    members: HashMap<Arc<[u32]>, u64>,
    /// By address: graphs are shared, and alive as long as the trace.
    graphs: HashMap<usize, u64>,
    line: Line,
}

/// The place of `value` in a list of all there are.
fn number<T: PartialEq>(all: &[T], value: &T) -> u64 {
    all.iter().position(|one| one == value).expect("BUG: a value that the format does not know") as u64
}

impl<W: Write> Encoder<'_, W> {
    fn end(&mut self, letter: char) -> io::Result<()> {
        writeln!(self.out, "{letter}{}", self.line.text)?;
        self.line.text.clear();
        Ok(())
    }

    fn put(&mut self, numbers: &[u64]) {
        numbers.iter().for_each(|number| self.line.put(*number));
    }

    fn label(&mut self, label: &Label) -> io::Result<()> {
        let next = self.labels.len() as u64;
        let number = match self.labels.get(label) {
            Some(number) => *number,
            None => {
                let text = label.replace('\\', "\\\\").replace('\n', "\\n").replace('\r', "\\r");
                writeln!(self.out, "L {text}")?;
                self.labels.insert(label.clone(), next);
                next
            }
        };
        self.line.put(number);
        Ok(())
    }

    fn members(&mut self, members: &Arc<[u32]>) -> io::Result<()> {
        let next = self.members.len() as u64;
        let number = match self.members.get(members) {
            Some(number) => *number,
            None => {
                let list: Vec<String> = members.iter().map(u32::to_string).collect();
                writeln!(self.out, "M {}", list.join(" "))?;
                self.members.insert(members.clone(), next);
                next
            }
        };
        self.line.put(number);
        Ok(())
    }

    fn accesses(&mut self, list: &[TraceAccess]) -> io::Result<()> {
        self.line.put(list.len() as u64);
        for access in list {
            self.put(&[u64::from(access.rank), u64::from(access.allocation)]);
            self.label(&access.label)?;
            let r = access.region;
            self.put(&[
                number(&KINDS, &access.kind),
                r.start as u64,
                r.row_bytes as u64,
                r.rows as u64,
                r.pitch as u64,
                number(&MODES, &access.mode),
            ]);
        }
        Ok(())
    }

    fn position(&mut self, on: &Position) {
        self.put(&[u64::from(on.stream), on.seq, on.node.map_or(0, |node| u64::from(node) + 1)]);
    }

    fn outcome(&mut self, outcome: &WaitOutcome) {
        self.line.put(number(&OUTCOMES, outcome));
    }

    fn event(&mut self, event: &TraceEvent) -> io::Result<()> {
        match event {
            TraceEvent::Op { rank, stream, seq, name, site, flops, accesses } => {
                self.put(&[u64::from(*rank), u64::from(*stream), *seq]);
                self.label(name)?;
                self.label(site)?;
                self.line.put(*flops);
                self.accesses(accesses)?;
                self.end('o')
            }
            TraceEvent::Joint { rank, stream, seq, group, members, group_seq, what, site, accesses } => {
                self.put(&[u64::from(*rank), u64::from(*stream), *seq]);
                self.label(group)?;
                self.members(members)?;
                self.line.put(*group_seq);
                self.label(what)?;
                self.label(site)?;
                self.accesses(accesses)?;
                self.end('j')
            }
            TraceEvent::Record { rank, stream, seq, event, generation } => {
                self.put(&[u64::from(*rank), u64::from(*stream), *seq]);
                self.label(event)?;
                self.line.put(*generation);
                self.end('r')
            }
            TraceEvent::Wait { rank, stream, seq, why, event, generation, on, outcome } => {
                self.put(&[u64::from(*rank), u64::from(*stream), *seq]);
                self.label(why)?;
                self.label(event)?;
                self.line.put(*generation);
                self.position(on);
                self.outcome(outcome);
                self.end('w')
            }
            TraceEvent::Launch { rank, stream, seq, graph, launch, bound, groups } => {
                // Its lines come first, so this one begins when they are written.
                let graph = self.graph(graph)?;
                self.put(&[u64::from(*rank), u64::from(*stream), *seq, graph, *launch]);
                self.bound(bound);
                self.groups(groups)?;
                self.end('l')
            }
            TraceEvent::HostWait { rank, what, on } => {
                self.line.put(u64::from(*rank));
                self.label(what)?;
                self.position(on);
                self.end('h')
            }
            TraceEvent::Note { rank, at, note } => {
                let (stream, seq) = at.unwrap_or_default();
                self.put(&[u64::from(*rank), u64::from(at.is_some()), u64::from(stream), seq]);
                self.note(note)?;
                self.end('n')
            }
            TraceEvent::Ran { rank, stream, seq, node, name, start, end } => {
                self.line.put(u64::from(*rank));
                self.position(&Position { stream: *stream, seq: *seq, node: *node });
                self.label(name)?;
                self.put(&[*start, *end]);
                self.end('x')
            }
        }
    }

    fn bound(&mut self, bound: &[BoundGate]) {
        self.line.put(bound.len() as u64);
        for gate in bound {
            self.put(&[u64::from(gate.node), gate.generation, u64::from(gate.on.is_some())]);
            self.position(&gate.on.unwrap_or(Position { stream: 0, seq: 0, node: None }));
            self.outcome(&gate.outcome);
        }
    }

    fn groups(&mut self, groups: &[LaunchGroup]) -> io::Result<()> {
        self.line.put(groups.len() as u64);
        for group in groups {
            self.label(&group.group)?;
            self.members(&group.members)?;
            self.line.put(group.group_seq);
        }
        Ok(())
    }

    fn graph(&mut self, graph: &Arc<TraceGraph>) -> io::Result<u64> {
        let (key, next) = (Arc::as_ptr(graph).addr(), self.graphs.len() as u64);
        if let Some(number) = self.graphs.get(&key) {
            return Ok(*number);
        }
        self.line.put(graph.id);
        self.label(&graph.name)?;
        self.line.put(graph.nodes.len() as u64);
        self.end('G')?;
        graph.nodes.iter().try_for_each(|node| self.node(node))?;
        self.graphs.insert(key, next);
        Ok(next)
    }

    fn node(&mut self, node: &TraceNode) -> io::Result<()> {
        self.put(&[u64::from(node.lane), node.behind.len() as u64]);
        node.behind.iter().for_each(|behind| self.line.put(u64::from(*behind)));
        self.line.put(node.waits.len() as u64);
        for wait in &node.waits {
            self.label(&wait.why)?;
            self.line.put(u64::from(wait.node));
            self.outcome(&wait.outcome);
        }
        match &node.what {
            TraceNodeKind::Op { name, site, flops, accesses } => {
                self.line.put(0);
                self.label(name)?;
                self.label(site)?;
                self.line.put(*flops);
                self.accesses(accesses)?;
            }
            TraceNodeKind::Joint { group, position, what, site, accesses } => {
                self.line.put(1);
                self.label(group)?;
                self.line.put(*position);
                self.label(what)?;
                self.label(site)?;
                self.accesses(accesses)?;
            }
            TraceNodeKind::Wait { why, event } => {
                self.line.put(2);
                self.label(why)?;
                self.label(event)?;
            }
            TraceNodeKind::Record { event } => {
                self.line.put(3);
                self.label(event)?;
            }
        }
        self.end('N')
    }

    fn note(&mut self, note: &Note) -> io::Result<()> {
        match note {
            Note::Stream { stream, name } => {
                self.put(&[0, u64::from(*stream)]);
                self.label(name)
            }
            Note::Step(step) => {
                self.put(&[1, *step]);
                Ok(())
            }
            Note::Microbatch(microbatch) => {
                self.put(&[2, *microbatch]);
                Ok(())
            }
            Note::Pass(pass) => {
                self.line.put(3);
                self.label(pass)
            }
            Note::Written { publisher, epoch, regions } => {
                self.line.put(4);
                self.label(publisher)?;
                self.line.put(*epoch);
                self.accesses(regions)
            }
            Note::Issued { publisher, epoch, group, by, regions } => {
                self.line.put(5);
                self.label(publisher)?;
                self.line.put(*epoch);
                self.label(group)?;
                self.label(by)?;
                self.accesses(regions)
            }
            Note::Read { publisher, param, pass, written, issued, regions } => {
                self.line.put(6);
                [publisher, param, pass].into_iter().try_for_each(|label| self.label(label))?;
                self.put(&[*written, *issued]);
                self.accesses(regions)
            }
            Note::Released { publisher } => {
                self.line.put(7);
                self.label(publisher)
            }
            Note::Landed { param, regions } => {
                self.line.put(8);
                self.label(param)?;
                self.accesses(regions)
            }
            Note::Reduced { bucket, group, regions } => {
                self.line.put(9);
                self.label(bucket)?;
                self.label(group)?;
                self.accesses(regions)
            }
            Note::Gathered { param, epoch, regions } | Note::Used { param, epoch, regions } => {
                self.line.put(if matches!(note, Note::Gathered { .. }) { 11 } else { 12 });
                self.label(param)?;
                self.line.put(*epoch);
                self.accesses(regions)
            }
            Note::Scope { graph, scope } => {
                self.put(&[10, *graph]);
                self.label(scope)
            }
        }
    }
}
