//! Lines into traces.

use std::{io::BufRead, sync::Arc};

use device::{
    BoundGate, Label, LaunchGroup, NodeWait, Note, Position, Region, Trace, TraceAccess, TraceEvent, TraceGraph,
    TraceNode, TraceNodeKind, WaitOutcome,
};

use super::{HEADER, KINDS, MODES, OUTCOMES, Tally};
use crate::verify::TraceError;

/// What lines so far have named.
#[derive(Default)]
struct Decoder {
    labels: Vec<Label>,
    members: Vec<Arc<[u32]>>,
    graphs: Vec<Arc<TraceGraph>>,
    /// A graph whose nodes are still to come, and how many it has in all.
    open: Option<(TraceGraph, usize)>,
}

pub(super) fn trace(mut from: impl BufRead) -> Result<Trace, TraceError> {
    let mut bytes = Vec::new();
    let mut next = |bytes: &mut Vec<u8>| {
        bytes.clear();
        from.read_until(b'\n', bytes).map_err(|source| TraceError::ReadTrace { source })
    };
    next(&mut bytes)?;
    check_header(&bytes)?;
    let mut tally = Tally::EMPTY;
    let mut decoder = Decoder::default();
    let mut trace = Trace::default();
    for number in 2.. {
        tally.add(&bytes);
        next(&mut bytes)?;
        // A line that is there in part is none.
        let Some(line) = bytes.strip_suffix(b"\n") else { return Err(TraceError::TraceCut { lines: number - 1 }) };
        let line = str::from_utf8(line).map_err(|_| TraceError::TraceLine {
            line: number,
            want: "text",
            found: start(line),
        })?;
        if let Some(told) = line.strip_prefix('E') {
            decoder.end(number, told, tally)?;
            break;
        }
        trace.events.extend(decoder.line(number, line)?);
    }
    let number = tally.lines as usize + 2;
    match next(&mut bytes)? {
        0 => Ok(trace),
        _ => Err(TraceError::TraceLine { line: number, want: "the end of the file", found: start(&bytes) }),
    }
}

/// The first line, as far as it is there.
fn check_header(bytes: &[u8]) -> Result<(), TraceError> {
    match bytes.strip_prefix(HEADER.as_bytes()) {
        Some(b"\n") => Ok(()),
        Some(b"") => Err(TraceError::TraceCut { lines: 0 }),
        None if HEADER.as_bytes().starts_with(bytes) => Err(TraceError::TraceCut { lines: 0 }),
        _ => Err(TraceError::NotATrace { found: start(bytes.trim_ascii_end()), want: HEADER }),
    }
}

/// As much of a line as a message has room for.
fn start(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().chars().take(40).map(printable).collect()
}

/// What a file has in the place of text must not switch a terminal.
fn printable(c: char) -> String {
    if c.is_control() { c.escape_default().to_string() } else { c.to_string() }
}

/// The rest of a line.
struct Words<'l> {
    line: usize,
    left: std::str::SplitAsciiWhitespace<'l>,
}

impl Words<'_> {
    fn number<T: TryFrom<u64>>(&mut self, want: &'static str) -> Result<T, TraceError> {
        let word = self.left.next().unwrap_or_default();
        let number = word.parse::<u64>().ok().and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| TraceError::TraceLine { line: self.line, want, found: word.to_owned() })
    }

    fn end(mut self) -> Result<(), TraceError> {
        match self.left.next() {
            None => Ok(()),
            Some(word) => Err(TraceError::TraceLine { line: self.line, want: "its end", found: word.to_owned() }),
        }
    }

    /// Entry `number` of `all`.
    fn of<T: Clone>(&mut self, all: &[T], want: &'static str) -> Result<T, TraceError> {
        let number: usize = self.number(want)?;
        let found = || TraceError::TraceLine { line: self.line, want, found: number.to_string() };
        all.get(number).cloned().ok_or_else(found)
    }

    fn node(&mut self) -> Result<Option<u32>, TraceError> {
        Ok(self.number::<u32>("a node, plus one")?.checked_sub(1))
    }

    fn position(&mut self) -> Result<Position, TraceError> {
        Ok(Position { stream: self.number("a stream")?, seq: self.number("a position")?, node: self.node()? })
    }

    fn outcome(&mut self) -> Result<WaitOutcome, TraceError> {
        self.of(&OUTCOMES, "an outcome")
    }

    fn list<T>(&mut self, mut one: impl FnMut(&mut Self) -> Result<T, TraceError>) -> Result<Vec<T>, TraceError> {
        let count: usize = self.number("a length")?;
        (0..count).map(|_| one(self)).collect()
    }
}

impl Decoder {
    fn line(&mut self, number: usize, line: &str) -> Result<Option<TraceEvent>, TraceError> {
        let wrong = |want| TraceError::TraceLine { line: number, want, found: start(line.as_bytes()) };
        let letter = line.chars().next().ok_or_else(|| wrong("a letter"))?;
        let rest = &line[letter.len_utf8()..];
        if letter == 'L' {
            let text = rest.strip_prefix(' ').ok_or_else(|| wrong("a label"))?;
            self.labels.push(plain(text).into());
            return Ok(None);
        }
        if self.open.is_some() != (letter == 'N') {
            return Err(wrong(if self.open.is_some() { "a node of a graph" } else { "something outside of graphs" }));
        }
        let mut words = Words { line: number, left: rest.split_ascii_whitespace() };
        let event = match letter {
            'M' => {
                let mut ranks = Vec::new();
                while words.left.clone().next().is_some() {
                    ranks.push(words.number("a rank")?);
                }
                self.members.push(ranks.into());
                None
            }
            'G' => {
                let graph = TraceGraph { id: words.number("a number")?, name: self.label(&mut words)?, nodes: vec![] };
                let count = words.number("a length")?;
                self.open = Some((graph, count));
                self.close();
                None
            }
            'N' => {
                let node = self.node(&mut words)?;
                self.open.iter_mut().for_each(|(graph, _)| graph.nodes.push(node.clone()));
                self.close();
                None
            }
            _ => Some(self.event(letter, &mut words)?.ok_or_else(|| wrong("one of the letters LMGNojrwlhnxE"))?),
        };
        words.end()?;
        Ok(event)
    }

    /// The last line, behind what `tally` has counted.
    fn end(&self, number: usize, told: &str, tally: Tally) -> Result<(), TraceError> {
        if self.open.is_some() {
            return Err(TraceError::TraceLine { line: number, want: "a node of a graph", found: format!("E{told}") });
        }
        let mut words = Words { line: number, left: told.split_ascii_whitespace() };
        let told = Tally { lines: words.number("lines")?, sum: words.number("a sum")? };
        words.end()?;
        if told == tally {
            return Ok(());
        }
        let (lines, told_lines) = (tally.lines, told.lines);
        Err(TraceError::TraceChanged { lines, told_lines, sum: tally.sum, told_sum: told.sum })
    }

    /// A graph with all its nodes is complete.
    fn close(&mut self) {
        if let Some((graph, _)) = self.open.take_if(|(graph, count)| graph.nodes.len() >= *count) {
            self.graphs.push(Arc::new(graph));
        }
    }

    fn label(&self, words: &mut Words<'_>) -> Result<Label, TraceError> {
        words.of(&self.labels, "a label")
    }

    fn accesses(&self, words: &mut Words<'_>) -> Result<Vec<TraceAccess>, TraceError> {
        words.list(|words| {
            Ok(TraceAccess {
                rank: words.number("a rank")?,
                allocation: words.number("an allocation")?,
                label: self.label(words)?,
                kind: words.of(&KINDS, "a kind of memory")?,
                region: Region {
                    start: words.number("a byte")?,
                    row_bytes: words.number("bytes")?,
                    rows: words.number("rows")?,
                    pitch: words.number("a pitch")?,
                },
                mode: words.of(&MODES, "a mode")?,
            })
        })
    }

    fn event(&self, letter: char, w: &mut Words<'_>) -> Result<Option<TraceEvent>, TraceError> {
        let rank = w.number("a rank")?;
        if letter == 'h' {
            return Ok(Some(TraceEvent::HostWait { rank, what: self.label(w)?, on: w.position()? }));
        }
        if letter == 'n' {
            let is_on: bool = w.number::<u8>("0 or 1")? == 1;
            let at = (w.number("a stream")?, w.number("a position")?);
            return Ok(Some(TraceEvent::Note { rank, at: is_on.then_some(at), note: self.note(w)? }));
        }
        let (stream, seq) = (w.number("a stream")?, w.number("a position")?);
        let event = match letter {
            'o' => TraceEvent::Op {
                rank,
                stream,
                seq,
                name: self.label(w)?,
                site: self.label(w)?,
                flops: w.number("operations")?,
                accesses: self.accesses(w)?,
            },
            'j' => TraceEvent::Joint {
                rank,
                stream,
                seq,
                group: self.label(w)?,
                members: w.of(&self.members, "a list of members")?,
                group_seq: w.number("a position")?,
                what: self.label(w)?,
                site: self.label(w)?,
                accesses: self.accesses(w)?,
            },
            'r' => TraceEvent::Record { rank, stream, seq, event: self.label(w)?, generation: w.number("a count")? },
            'w' => TraceEvent::Wait {
                rank,
                stream,
                seq,
                why: self.label(w)?,
                event: self.label(w)?,
                generation: w.number("a count")?,
                on: w.position()?,
                outcome: w.outcome()?,
            },
            'l' => TraceEvent::Launch {
                rank,
                stream,
                seq,
                graph: w.of(&self.graphs, "a graph")?,
                launch: w.number("a count")?,
                bound: w.list(gate)?,
                groups: w.list(|w| {
                    Ok(LaunchGroup {
                        group: self.label(w)?,
                        members: w.of(&self.members, "a list of members")?,
                        group_seq: w.number("a position")?,
                    })
                })?,
            },
            'x' => TraceEvent::Ran {
                rank,
                stream,
                seq,
                node: w.node()?,
                name: self.label(w)?,
                start: w.number("a time")?,
                end: w.number("a time")?,
            },
            _ => return Ok(None),
        };
        Ok(Some(event))
    }

    fn node(&self, w: &mut Words<'_>) -> Result<TraceNode, TraceError> {
        let lane = w.number("a stream")?;
        let behind = w.list(|w| w.number("a node"))?;
        let waits =
            w.list(|w| Ok(NodeWait { why: self.label(w)?, node: w.number("a node")?, outcome: w.outcome()? }))?;
        let what = match w.number::<u8>("a kind of node")? {
            0 => TraceNodeKind::Op {
                name: self.label(w)?,
                site: self.label(w)?,
                flops: w.number("operations")?,
                accesses: self.accesses(w)?,
            },
            1 => TraceNodeKind::Joint {
                group: self.label(w)?,
                position: w.number("a position")?,
                what: self.label(w)?,
                site: self.label(w)?,
                accesses: self.accesses(w)?,
            },
            2 => TraceNodeKind::Wait { why: self.label(w)?, event: self.label(w)? },
            3 => TraceNodeKind::Record { event: self.label(w)? },
            kind => return Err(unknown(w, "a kind of node", kind)),
        };
        Ok(TraceNode { behind, lane, waits, what })
    }

    fn note(&self, w: &mut Words<'_>) -> Result<Note, TraceError> {
        Ok(match w.number::<u8>("a kind of note")? {
            0 => Note::Stream { stream: w.number("a stream")?, name: self.label(w)? },
            1 => Note::Step(w.number("a step")?),
            2 => Note::Microbatch(w.number("a microbatch")?),
            3 => Note::Pass(self.label(w)?),
            4 => Note::Written { publisher: self.label(w)?, epoch: w.number("an epoch")?, regions: self.accesses(w)? },
            5 => Note::Issued {
                publisher: self.label(w)?,
                epoch: w.number("an epoch")?,
                group: self.label(w)?,
                by: self.label(w)?,
                regions: self.accesses(w)?,
            },
            6 => Note::Read {
                publisher: self.label(w)?,
                param: self.label(w)?,
                pass: self.label(w)?,
                written: w.number("an epoch")?,
                issued: w.number("an epoch")?,
                regions: self.accesses(w)?,
            },
            7 => Note::Released { publisher: self.label(w)? },
            8 => Note::Landed { param: self.label(w)?, regions: self.accesses(w)? },
            9 => Note::Reduced { bucket: self.label(w)?, group: self.label(w)?, regions: self.accesses(w)? },
            10 => Note::Scope { graph: w.number("a number")?, scope: self.label(w)? },
            11 => Note::Gathered { param: self.label(w)?, epoch: w.number("an epoch")?, regions: self.accesses(w)? },
            12 => Note::Used { param: self.label(w)?, epoch: w.number("an epoch")?, regions: self.accesses(w)? },
            kind => return Err(unknown(w, "a kind of note", kind)),
        })
    }
}

fn gate(w: &mut Words<'_>) -> Result<BoundGate, TraceError> {
    let (node, generation) = (w.number("a node")?, w.number("a count")?);
    let is_bound = w.number::<u8>("0 or 1")? == 1;
    let on = w.position()?;
    Ok(BoundGate { node, generation, on: is_bound.then_some(on), outcome: w.outcome()? })
}

fn unknown(w: &Words<'_>, want: &'static str, kind: u8) -> TraceError {
    TraceError::TraceLine { line: w.line, want, found: kind.to_string() }
}

/// Without escapes.
fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, c == '\\') {
            (_, true) => out.push(match chars.next() {
                Some('n') => '\n',
                Some('r') => '\r',
                other => other.unwrap_or('\\'),
            }),
            (c, false) => out.push(c),
        }
    }
    out
}
