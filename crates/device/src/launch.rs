//! A launch: one run of an executable, with the records and the positions in its groups that it was bound to when it
//! was issued.

use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicUsize, Ordering},
};

use crate::{
    BoundGate, Error, Executable, Position, Stream, TraceGraph, WaitOutcome,
    event::Bound,
    executable::ExecInner,
    graph::{Counted, Instance, NodeKind},
    launch_trace::{LaunchAt, trace_launch},
    meeting::MeetingInner,
    queue::{Item, Mark, Waiter},
};

/// What an executable knows of its launches.
#[derive(Default)]
pub(crate) struct Launches {
    pub(crate) count: u64,
    /// Stream of the last one, and its end.
    last: Option<(u32, Arc<Mark>)>,
}

pub(crate) struct LaunchBody {
    pub(crate) exec: Arc<ExecInner>,
    /// Index of the stream, and position in it.
    pub(crate) stream: u32,
    pub(crate) seq: u64,
    /// By group: the number in its sequence that all calls of this launch have.
    pub(crate) numbers: Vec<u64>,
    gates: Mutex<Vec<Option<Arc<Mark>>>>,
    pub(crate) end: Arc<Mark>,
    unstarted: AtomicUsize,
    counted: Mutex<Option<Arc<Counted>>>,
}

impl LaunchBody {
    /// Nodes that have not begun.
    pub(crate) fn unstarted(&self) -> usize {
        self.unstarted.load(Ordering::Relaxed)
    }

    /// `nodes` more have begun.
    pub(crate) fn start(&self, nodes: usize) {
        self.unstarted.fetch_sub(nodes, Ordering::Relaxed);
    }

    /// By gate: what a wait waits for, `None` if a test dropped it; what a record completes.
    pub(crate) fn gates(&self) -> MutexGuard<'_, Vec<Option<Arc<Mark>>>> {
        self.gates.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    pub(crate) fn gate(&self, gate: u32) -> Option<Arc<Mark>> {
        self.gates()[gate as usize].clone()
    }

    /// All nodes have finished. Whoever waits for the end may find the executable deleted.
    #[must_use]
    pub(crate) fn finish(&self) -> Vec<Waiter> {
        drop(self.counted.lock().unwrap_or_else(|poison| poison.into_inner()).take());
        self.end.complete()
    }

    /// It will not run to its end: completes its marks.
    #[must_use]
    pub(crate) fn give_up(&self) -> Vec<Waiter> {
        let (graph, gates) = (&self.exec.graph, self.gates());
        let records =
            graph.gates.iter().zip(&*gates).filter_map(|(node, mark)| match graph.nodes[*node as usize].kind {
                NodeKind::Record(_) => mark.as_ref(),
                _ => None,
            });
        let mut waiters: Vec<Waiter> = records.flat_map(|mark| mark.complete()).collect();
        waiters.extend(self.finish());
        waiters
    }
}

impl Stream {
    /// Launches `executable`: its operations run as one item of this stream, behind what was submitted before and
    /// before what is submitted after, in any order that its own nodes allow.
    ///
    /// External waits bind now, to the last records issued before. External records count as issued now; they happen
    /// when their nodes do, and release who waits before the launch ends. The calls of joint operations get one number
    /// of each group's sequence; all members launch graphs that make the same calls of the group, in the same order of
    /// capture, and may run them in any order. An executable never overlaps itself: this launch begins behind the end
    /// of the one before, also on another stream.
    ///
    /// # Errors
    /// [`Error::NeverRecorded`] for an external wait; [`Error::LaunchInCapture`] while this stream captures, and the
    /// capture is invalid then; [`Error::Foreign`] for an executable of another device; the device's sticky error.
    /// Nothing is queued then. Members that launch or call different things get [`Error::Disagree`] (sticky).
    pub fn launch_graph(&self, executable: &Executable) -> Result<(), Error> {
        let inner = self.inner();
        let instance = &*executable.0;
        inner.device.check()?;
        if !Arc::ptr_eq(&inner.device, instance.device.inner()) {
            let what = format!("executable '{}'", executable.name());
            return Err(Error::Foreign { what, owner: instance.device.rank(), used_by: inner.device.rank });
        }
        let mut submit = inner.lock();
        if let Some(capture) = submit.capture()? {
            return Err(capture.violate(Error::LaunchInCapture {
                rank: inner.device.rank,
                stream: inner.name.clone(),
                graph: executable.name().to_owned(),
                capture: capture.graph().to_owned(),
            }));
        }
        let mut launches = instance.launches.lock().unwrap_or_else(|poison| poison.into_inner());
        let seq = submit.next;
        let bound = bind(self, instance, seq)?;
        submit.take();
        let end = Arc::new(Mark::new());
        let before = launches.last.replace((inner.index, end.clone())).filter(|(stream, _)| *stream != inner.index);
        launches.count += 1;
        let at = LaunchAt { launch: launches.count, seq };
        // Held until the launch is queued: numbers of a group are in the order of its queue.
        let (numbers, sequences) = take_numbers(instance);
        let exec = instance.inner.clone();
        trace_launch(inner, &bound.trace, at, &bound.at, (&instance.meetings, &numbers));
        let body = LaunchBody {
            unstarted: AtomicUsize::new(exec.graph.nodes.len()),
            exec,
            stream: inner.index,
            seq,
            numbers,
            gates: Mutex::new(bound.gates),
            end,
            counted: Mutex::new(Some(instance.counted.clone())),
        };
        let engine = &inner.device.machine.engine;
        let wait = before.map(|(_, end)| engine.push(inner, Item::Wait(end)));
        let spent = engine.push(inner, Item::Launch(Some(Arc::new(body))));
        drop((sequences, launches, submit));
        wait.into_iter().chain([spent]).for_each(|spent| inner.inbox.free(spent));
        Ok(())
    }
}

/// The gates of a launch.
struct BoundGates {
    gates: Vec<Option<Arc<Mark>>>,
    /// As traces tell them, in the order of the nodes.
    at: Vec<BoundGate>,
    trace: Arc<TraceGraph>,
}

/// Waits bind to the records issued before; then the launch's own records are issued.
fn bind(stream: &Stream, instance: &Instance, seq: u64) -> Result<BoundGates, Error> {
    let inner = stream.inner();
    let gates = instance.gates();
    let events = &gates.events;
    let mut bound = BoundGates { gates: vec![None; events.len()], at: Vec::new(), trace: gates.trace.clone() };
    if events.is_empty() {
        return Ok(bound);
    }
    let graph = &instance.inner.graph;
    let nodes = || graph.gates.iter().map(|node| (*node, &graph.nodes[*node as usize]));
    bound.at.reserve(graph.gates.len());
    for (at, node) in nodes() {
        let NodeKind::Wait(gate, why) = node.kind else { continue };
        let event = &events[gate as usize];
        let record = event.bound_for(&inner.name)?;
        let dropped = inner.device.machine.is_dropped(why);
        let outcome = if dropped { WaitOutcome::Dropped } else { WaitOutcome::Enforced };
        bound.at.push(BoundGate { node: at, generation: record.generation, on: Some(record.at), outcome });
        bound.gates[gate as usize] = (!dropped).then_some(record.mark);
    }
    for (at, node) in nodes() {
        let NodeKind::Record(gate) = node.kind else { continue };
        let mark = Arc::new(Mark::new());
        let place = Position { stream: inner.index, seq, node: Some(at) };
        let generation = events[gate as usize].record(|generation| Bound { mark: mark.clone(), at: place, generation });
        bound.at.push(BoundGate { node: at, generation, on: None, outcome: WaitOutcome::Enforced });
        bound.gates[gate as usize] = Some(mark);
    }
    bound.at.sort_unstable_by_key(|bound| bound.node);
    Ok(bound)
}

/// One number of every group's sequence. Locked by address, so that two launches never wait for each other; the locks
/// are handed back with the numbers.
fn take_numbers(instance: &Instance) -> (Vec<u64>, Vec<MutexGuard<'_, u64>>) {
    let meetings = &instance.meetings;
    let mut order: Vec<usize> = (0..meetings.len()).collect();
    order.sort_unstable_by_key(|group| Arc::as_ptr(&meetings[*group].inner).cast::<MeetingInner>() as usize);
    let mut numbers = vec![0; meetings.len()];
    let mut sequences = Vec::with_capacity(meetings.len());
    for group in order {
        let mut next = meetings[group].next.lock().unwrap_or_else(|poison| poison.into_inner());
        numbers[group] = *next;
        *next += 1;
        sequences.push(next);
    }
    (numbers, sequences)
}
