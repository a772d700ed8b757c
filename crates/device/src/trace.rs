//! What a machine was asked to do, in the order it was asked, and when it ran.

use std::{
    fmt::{self, Write},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use crate::{Access, Mode, Region, Why};

/// A declared access, by number of the allocation on its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceAccess {
    /// Rank whose memory it is.
    pub rank: u32,
    /// Number of the allocation on that rank.
    pub allocation: u32,
    /// Its label.
    pub label: String,
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
            label: a.view.label().to_owned(),
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
        name: &'static str,
        /// Place in the model.
        site: String,
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
        group: String,
        /// Position in the group's sequence.
        group_seq: u64,
        /// What is asked.
        what: String,
        /// Place in the model.
        site: String,
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
        event: String,
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
        why: Why,
        /// Event.
        event: String,
        /// Which record of the event it is bound to.
        generation: u64,
        /// Stream of that record.
        on_stream: u32,
        /// Position of that record.
        on_seq: u64,
        /// Whether it holds.
        outcome: WaitOutcome,
    },
    /// The host waited for the end of a stream or an event.
    HostWait {
        /// Rank.
        rank: u32,
        /// What it waited for.
        what: String,
    },
    /// An operation ran.
    Ran {
        /// Rank.
        rank: u32,
        /// Stream, by number on its device.
        stream: u32,
        /// Position in the stream.
        seq: u64,
        /// Operation.
        name: &'static str,
        /// Nanoseconds since tracing began; the step's number on `sim` and `dry`.
        start: u64,
        /// As `start`.
        end: u64,
    },
}

impl fmt::Display for TraceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let accesses = |f: &mut fmt::Formatter<'_>, list: &[TraceAccess]| {
            list.iter().try_for_each(|a| {
                let mode = match a.mode {
                    Mode::Read => 'r',
                    Mode::Write => 'w',
                    Mode::Update => 'u',
                };
                let r = a.region;
                write!(f, " {mode}:{}.{}+{}:{}x{}/{}", a.rank, a.allocation, r.start, r.rows, r.row_bytes, r.pitch)
            })
        };
        match self {
            TraceEvent::Op { rank, stream, seq, name, site, flops, accesses: list } => {
                write!(f, "op {rank}.{stream}.{seq} {name}@{site} flops={flops}")?;
                accesses(f, list)
            }
            TraceEvent::Joint { rank, stream, seq, group, group_seq, what, site, accesses: list } => {
                write!(f, "joint {rank}.{stream}.{seq} {group}#{group_seq} {what}@{site}")?;
                accesses(f, list)
            }
            TraceEvent::Record { rank, stream, seq, event, generation } => {
                write!(f, "record {rank}.{stream}.{seq} {event}:{generation}")
            }
            TraceEvent::Wait { rank, stream, seq, why, event, generation, on_stream, on_seq, outcome } => {
                write!(f, "wait {rank}.{stream}.{seq} {event}:{generation} on {on_stream}.{on_seq} {why} {outcome:?}")
            }
            TraceEvent::HostWait { rank, what } => write!(f, "host {rank} waits for {what}"),
            TraceEvent::Ran { rank, stream, seq, name, start, end } => {
                write!(f, "ran {rank}.{stream}.{seq} {name} {start}..{end}")
            }
        }
    }
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
    /// The work of `rank`.
    pub fn work(&self, rank: u32) -> Work {
        let mut work = Work::default();
        for event in &self.events {
            let (list, flops) = match event {
                TraceEvent::Op { rank: r, accesses, flops, .. } if *r == rank => (accesses, *flops),
                TraceEvent::Joint { rank: r, accesses, .. } if *r == rank => (accesses, 0),
                _ => continue,
            };
            work.operations += 1;
            work.flops += flops;
            for a in list {
                let bytes = (a.region.rows * a.region.row_bytes) as u64;
                work.bytes_read += if a.mode == Mode::Write { 0 } else { bytes };
                work.bytes_written += if a.mode.writes() { bytes } else { 0 };
            }
        }
        work
    }

    /// One line an event. On `sim` and `dry`, equal seeds give equal text.
    pub fn to_text(&self) -> String {
        self.events.iter().fold(String::new(), |mut text, event| {
            writeln!(text, "{event}").expect("BUG: writing to a string");
            text
        })
    }
}

/// Collects events while tracing is on; one load when it is off.
pub(crate) struct Tracer {
    on: AtomicBool,
    state: Mutex<Recording>,
}

struct Recording {
    began: Instant,
    events: Vec<TraceEvent>,
}

impl Tracer {
    pub(crate) fn new() -> Self {
        Tracer {
            on: AtomicBool::new(false),
            state: Mutex::new(Recording { began: Instant::now(), events: Vec::new() }),
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    pub(crate) fn start(&self) {
        let mut state = self.state.lock().unwrap_or_else(|poison| poison.into_inner());
        *state = Recording { began: Instant::now(), events: Vec::new() };
        self.on.store(true, Ordering::Relaxed);
    }

    pub(crate) fn stop(&self) -> Trace {
        self.on.store(false, Ordering::Relaxed);
        let mut state = self.state.lock().unwrap_or_else(|poison| poison.into_inner());
        Trace { events: std::mem::take(&mut state.events) }
    }

    /// `event` is made only when tracing is on.
    pub(crate) fn add(&self, event: impl FnOnce() -> TraceEvent) {
        if self.is_on() {
            let event = event();
            self.state.lock().unwrap_or_else(|poison| poison.into_inner()).events.push(event);
        }
    }

    /// Nanoseconds since tracing began; 0 when it is off.
    pub(crate) fn now(&self) -> u64 {
        if !self.is_on() {
            return 0;
        }
        let state = self.state.lock().unwrap_or_else(|poison| poison.into_inner());
        u64::try_from(state.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}
