//! A trace as a picture: the JSON that Perfetto (ui.perfetto.dev) and Chrome's tracing page open.
//!
//! It lives here and not with the trace in `device`, because it is a way to show one: it needs a JSON writer, and names
//! of rows that only whoever made the streams knows.

use std::{collections::BTreeMap, path::Path};

use device::{Machine, Mode, Tick, Trace, TraceAccess, TraceEvent, TraceGraph, TraceNodeKind, WaitOutcome};
use serde_json::{Value, json};

use crate::{TrainError, whole_file::write_whole};

/// What the numbers of a trace count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Nanoseconds.
    Nanoseconds,
    /// Steps of the simulator, each drawn as a microsecond: what ran in which order, not for how long.
    Steps,
}

impl Clock {
    /// Of what `machine` traces.
    pub fn of(machine: &Machine) -> Clock {
        match Tick::of(machine) {
            Tick::Nanosecond => Clock::Nanoseconds,
            Tick::Step => Clock::Steps,
        }
    }

    /// Start and end as nanoseconds; the end lies behind the start, so that arrows find something to begin and end in.
    fn span(self, start: u64, end: u64) -> (u64, u64) {
        match self {
            Clock::Nanoseconds => (start, end.max(start + 1)),
            Clock::Steps => (start * 1000, start * 1000 + 1000),
        }
    }
}

/// Names of the streams of all ranks. A trace has their numbers only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamNames(BTreeMap<(u32, u32), String>);

impl StreamNames {
    /// Names by number, rank by rank, as [`device::Device::stream_names`] gives them.
    pub fn new(ranks: impl Iterator<Item = Vec<String>>) -> StreamNames {
        let named = |(rank, streams): (u32, Vec<String>)| {
            (0u32..).zip(streams).map(move |(stream, name)| ((rank, stream), name))
        };
        StreamNames((0u32..).zip(ranks).flat_map(named).collect())
    }

    fn of(&self, rank: u32, stream: u32) -> String {
        self.0.get(&(rank, stream)).map_or_else(|| format!("stream {stream}"), |name| format!("{stream} {name}"))
    }
}

/// A rank's stream, a position in it, and there the node of a launched graph, from 1; 0 outside.
type Place = (u32, u32, u64, u32);

/// Where node `node` of a launch is.
fn place(rank: u32, stream: u32, seq: u64, node: Option<u32>) -> Place {
    (rank, stream, seq, node.map_or(0, |node| node + 1))
}

/// The row of a rank's host, below its streams.
const HOST_ROW: u32 = 1 << 20;

/// Process and thread of a rank's row. From 1: Perfetto keeps process 0 and thread 0 for the idle task.
fn ids(rank: u32, row: u32) -> (u32, u32) {
    (rank + 1, row + 1)
}

/// One event per line: a process per rank, a row per stream, a slice per operation that ran.
///
/// * An operation is called `name@site` and has its floating-point operations and the bytes that it reads and writes.
/// * A member's part in a joint operation has its group, its number in the group's sequence and what was asked.
/// * A wait that holds is an arrow with its name, from the operation before the point that is waited for to the one that
///   waits. One that was elided or dropped, or that has no operation at both ends, is a mark.
/// * A wait of the host is a mark in the host's row, at the end of what had run by then.
///
/// What never ran has no slice.
pub fn timeline(trace: &Trace, clock: Clock, names: &StreamNames) -> String {
    let mut events = Picture { slices: slices(trace, clock), lines: Vec::new(), arrows: 0, now: 0 };
    events.rows(trace, names);
    trace.events.iter().for_each(|event| events.draw(event, clock));
    let lines: Vec<String> = events.lines.iter().map(Value::to_string).collect();
    format!("{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n{}\n]}}\n", lines.join(",\n"))
}

/// Writes [`timeline`] to a file, whole or not at all; makes its folder if need be.
///
/// # Errors
/// [`TrainError::Write`] with the file.
pub fn write_timeline(path: &Path, trace: &Trace, clock: Clock, names: &StreamNames) -> Result<(), TrainError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let made = folder.map_or(Ok(()), std::fs::create_dir_all);
    made.map_err(|source| TrainError::Write { path: path.to_owned(), source })?;
    write_whole(path, timeline(trace, clock, names).as_bytes())
}

/// When what ran, by place.
fn slices(trace: &Trace, clock: Clock) -> BTreeMap<Place, (u64, u64)> {
    let ran = trace.events.iter().filter_map(|event| match event {
        TraceEvent::Ran { rank, stream, seq, node, start, end, .. } => {
            Some((place(*rank, *stream, *seq, *node), clock.span(*start, *end)))
        }
        _ => None,
    });
    ran.collect()
}

struct Picture {
    /// Start and end in nanoseconds.
    slices: BTreeMap<Place, (u64, u64)>,
    lines: Vec<Value>,
    arrows: u64,
    /// The latest end of what has run.
    now: u64,
}

impl Picture {
    /// Names of processes and rows.
    fn rows(&mut self, trace: &Trace, names: &StreamNames) {
        let mut rows: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for event in &trace.events {
            let (rank, row) = match event {
                TraceEvent::Op { rank, stream, .. }
                | TraceEvent::Joint { rank, stream, .. }
                | TraceEvent::Launch { rank, stream, .. } => (*rank, *stream),
                TraceEvent::HostWait { rank, .. } => (*rank, HOST_ROW),
                _ => continue,
            };
            let of_rank = rows.entry(rank).or_default();
            if let Err(at) = of_rank.binary_search(&row) {
                of_rank.insert(at, row);
            }
        }
        let named = |what: &str, rank: u32, row: u32, args: Value| {
            let (pid, tid) = ids(rank, row);
            json!({ "ph": "M", "name": what, "pid": pid, "tid": tid, "args": args })
        };
        for (rank, streams) in rows {
            self.lines.push(named("process_name", rank, 0, json!({ "name": format!("rank {rank}") })));
            self.lines.push(named("process_sort_index", rank, 0, json!({ "sort_index": rank })));
            for (place, row) in streams.into_iter().enumerate() {
                let name = if row == HOST_ROW { "host".to_owned() } else { names.of(rank, row) };
                self.lines.push(named("thread_name", rank, row, json!({ "name": name })));
                self.lines.push(named("thread_sort_index", rank, row, json!({ "sort_index": place })));
            }
        }
    }

    fn draw(&mut self, event: &TraceEvent, clock: Clock) {
        match event {
            TraceEvent::Op { rank, stream, seq, name, site, flops, accesses } => {
                let mut args = bytes(accesses);
                args["flops"] = json!(flops);
                self.slice((*rank, *stream, *seq, 0), *stream, "op", &format!("{name}@{site}"), args);
            }
            TraceEvent::Joint { rank, stream, seq, group, group_seq, what, site, accesses, .. } => {
                let mut args = bytes(accesses);
                args["group"] = json!(group.as_str());
                args["group_seq"] = json!(group_seq);
                args["what"] = json!(what.as_str());
                let name = what.split([' ', '(']).next().unwrap_or_default();
                self.slice((*rank, *stream, *seq, 0), *stream, "joint", &format!("{name}@{site}"), args);
            }
            TraceEvent::Wait { rank, stream, seq, why, event, generation, on, outcome } => {
                let args =
                    json!({ "event": event.as_str(), "generation": generation, "outcome": format!("{outcome:?}") });
                let from = self.last(place(*rank, on.stream, on.seq, on.node));
                let to = self.first((*rank, *stream, *seq, 0));
                match (outcome, from, to) {
                    (WaitOutcome::Enforced, Some(from), Some(to)) => self.arrow(why, from, to, &args),
                    (_, from, to) => {
                        let at = to.map(|(_, (start, _))| start).or(from.map(|(_, (_, end))| end)).unwrap_or(self.now);
                        self.mark("wait", why, (*rank, *stream), at, args);
                    }
                }
            }
            TraceEvent::HostWait { rank, what, .. } => {
                self.mark("host", &format!("waits for {what}"), (*rank, HOST_ROW), self.now, json!({}));
            }
            TraceEvent::Ran { start, end, .. } => self.now = self.now.max(clock.span(*start, *end).1),
            // It shows where a wait on it ends.
            TraceEvent::Record { .. } | TraceEvent::Note { .. } => {}
            TraceEvent::Launch { rank, stream, seq, graph, .. } => self.launch(*rank, *stream, *seq, graph),
        }
    }

    /// Each node in the row of the stream that it was captured on, and the launch itself where times are those of
    /// launches.
    fn launch(&mut self, rank: u32, stream: u32, seq: u64, graph: &TraceGraph) {
        let nodes = json!({ "nodes": graph.nodes.len() });
        self.slice(place(rank, stream, seq, None), stream, "graph", graph.name.as_str(), nodes);
        for (i, node) in (0..).zip(&graph.nodes) {
            let (name, kind, accesses) = match &node.what {
                TraceNodeKind::Op { name, site, accesses, .. } => (format!("{name}@{site}"), "op", accesses),
                TraceNodeKind::Joint { what, site, accesses, .. } => {
                    (format!("{}@{site}", what.split([' ', '(']).next().unwrap_or_default()), "joint", accesses)
                }
                TraceNodeKind::Wait { .. } | TraceNodeKind::Record { .. } => continue,
            };
            let mut args = bytes(accesses);
            args["graph"] = json!(graph.name.as_str());
            args["node"] = json!(i);
            self.slice(place(rank, stream, seq, Some(i)), node.lane, kind, &name, args);
        }
    }

    fn slice(&mut self, place: Place, row: u32, kind: &str, name: &str, mut args: Value) {
        let Some(&(start, end)) = self.slices.get(&place) else { return };
        args["seq"] = json!(place.2);
        let (ts, dur) = (micros(start), micros(end - start));
        let (pid, tid) = ids(place.0, row);
        self.lines.push(json!({
            "ph": "X", "cat": kind, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args,
        }));
    }

    fn mark(&mut self, kind: &str, name: &str, (rank, row): (u32, u32), at: u64, args: Value) {
        let (pid, tid) = ids(rank, row);
        self.lines.push(json!({
            "ph": "i", "s": "t", "cat": kind, "name": name, "pid": pid, "tid": tid, "ts": micros(at), "args": args,
        }));
    }

    fn arrow(&mut self, name: &str, from: (Place, (u64, u64)), to: (Place, (u64, u64)), args: &Value) {
        self.arrows += 1;
        let mut end = |phase: &str, (rank, stream, ..): Place, at: u64| {
            let (pid, tid) = ids(rank, stream);
            let mut line = json!({
                "ph": phase, "cat": "wait", "name": name, "id": self.arrows,
                "pid": pid, "tid": tid, "ts": micros(at), "args": args,
            });
            if phase == "f" {
                // To the slice that is open there, not to the next one.
                line["bp"] = json!("e");
            }
            self.lines.push(line);
        };
        // Within the first slice, as late as possible.
        end("s", from.0, from.1.1 - 1);
        end("f", to.0, to.1.0);
    }

    /// The last slice of the stream up to a position.
    fn last(&self, place: Place) -> Option<(Place, (u64, u64))> {
        let (rank, stream, ..) = place;
        self.slices.range((rank, stream, 0, 0)..=place).next_back().map(|(place, span)| (*place, *span))
    }

    /// The first slice of the stream from a position on.
    fn first(&self, place: Place) -> Option<(Place, (u64, u64))> {
        let (rank, stream, ..) = place;
        self.slices.range(place..=(rank, stream, u64::MAX, u32::MAX)).next().map(|(place, span)| (*place, *span))
    }
}

/// Of all accesses, updates counted as both.
fn bytes(accesses: &[TraceAccess]) -> Value {
    let sum = |counts: fn(Mode) -> bool| -> usize {
        accesses.iter().filter(|a| counts(a.mode)).map(|a| a.region.rows * a.region.row_bytes).sum()
    };
    json!({ "bytes_read": sum(|mode| mode != Mode::Write), "bytes_written": sum(Mode::writes) })
}

fn micros(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1000.0
}
