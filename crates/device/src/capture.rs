//! A capture: what streams submit becomes nodes of a graph, ordered as the streams were.
//!
//! The state belongs to the streams that take part, never to a thread. It is open from the begin in one stream, its
//! origin, until the end there. Other streams join by waiting for an event that was recorded in it, and stay until
//! its end.

use std::sync::{
    Arc, Mutex, MutexGuard, Weak,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use crate::{Error, Event, Meeting, Op, WaitOutcome, Why, joint::JointBody, queue::StreamInner};

/// What a node will do.
pub(crate) enum Draft {
    Op(Op),
    Joint { body: JointBody, meeting: Meeting },
    Wait { event: Event, why: Why },
    Record { event: Event },
}

/// A node as captured.
pub(crate) struct DraftNode {
    pub(crate) what: Draft,
    /// The stream it was captured on.
    pub(crate) lane: u32,
    /// Earlier nodes that it is directly behind, none of them behind another.
    pub(crate) behind: Vec<u32>,
    /// What became of the waits since the lane's node before.
    pub(crate) waits: Vec<(Why, u32, WaitOutcome)>,
    /// Among the lane's nodes, from 1.
    pub(crate) place: u32,
    /// Later results do not wait for it, see [`GraphOrder::Accesses`](crate::GraphOrder::Accesses).
    pub(crate) aside: bool,
}

/// How far a lane, or the point that an event marks, is: by lane the last node that it is behind, from 1.
#[derive(Clone, Default)]
struct Clock(Vec<u32>);

impl Clock {
    fn at(&self, lane: usize) -> u32 {
        self.0.get(lane).copied().unwrap_or(0)
    }

    fn set(&mut self, lane: usize, place: u32) {
        if self.0.len() <= lane {
            self.0.resize(lane + 1, 0);
        }
        self.0[lane] = self.0[lane].max(place);
    }

    fn join(&mut self, other: &Clock) {
        (0..other.0.len()).for_each(|lane| self.set(lane, other.0[lane]));
    }
}

/// A point in a captured stream.
#[derive(Clone, Default)]
struct Point {
    /// Nodes that the next one is directly behind.
    tail: Vec<u32>,
    clock: Clock,
    /// The clock as it would be had no test dropped a wait: streams have joined by it.
    joined: Clock,
}

/// A stream that takes part.
struct Lane {
    stream: u32,
    name: String,
    point: Point,
    waits: Vec<(Why, u32, WaitOutcome)>,
    nodes: u32,
}

/// The point of a capture that an event marks.
#[derive(Clone)]
pub(crate) struct CapturedPoint {
    pub(crate) capture: Arc<Capture>,
    point: Point,
}

#[derive(Default)]
struct State {
    nodes: Vec<DraftNode>,
    lanes: Vec<Lane>,
    /// The first broken rule.
    violated: Option<Error>,
    ended: bool,
    /// Its origin went away, so nobody can end it.
    abandoned: bool,
}

pub(crate) struct Capture {
    graph: String,
    rank: u32,
    origin: u32,
    origin_name: String,
    /// The open captures of the device.
    device: Arc<Capturing>,
    counted: AtomicBool,
    state: Mutex<State>,
}

impl Capture {
    /// Opens a capture at `origin`.
    pub(crate) fn open(origin: &StreamInner, graph: &str) -> Arc<Capture> {
        let device = origin.device.clone();
        let capture = Arc::new(Capture {
            graph: graph.to_owned(),
            rank: device.rank,
            origin: origin.index,
            origin_name: origin.name.clone(),
            counted: AtomicBool::new(true),
            device: device.capturing.clone(),
            state: Mutex::default(),
        });
        capture.join(origin);
        device.capturing.enter(&capture);
        capture
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Name of the graph that it makes.
    pub(crate) fn graph(&self) -> &str {
        &self.graph
    }

    /// Number of the stream that began it.
    pub(crate) fn origin(&self) -> u32 {
        self.origin
    }

    pub(crate) fn origin_name(&self) -> &str {
        &self.origin_name
    }

    /// True while it takes nodes, false when it has ended.
    ///
    /// # Errors
    /// [`Error::CaptureInvalid`] after a broken rule, until it ends.
    pub(crate) fn check(&self) -> Result<bool, Error> {
        let state = self.lock();
        match &state.violated {
            Some(cause) if !state.ended => Err(self.invalid(cause)),
            _ => Ok(!state.ended),
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        let state = self.lock();
        state.ended || state.abandoned
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.lock().abandoned
    }

    fn invalid(&self, cause: &Error) -> Error {
        Error::CaptureInvalid { rank: self.rank, graph: self.graph.clone(), source: Box::new(cause.clone()) }
    }

    /// The capture is invalid from now on, because of `error`, which is handed back.
    pub(crate) fn violate(&self, error: Error) -> Error {
        self.lock().violated.get_or_insert_with(|| error.clone());
        error
    }

    /// The last handle of its origin has gone.
    pub(crate) fn abandon(&self) {
        let mut state = self.lock();
        state.abandoned = true;
        let (rank, stream) = (self.rank, self.origin_name.clone());
        state.violated.get_or_insert(Error::CaptureAbandoned { rank, stream, graph: self.graph.clone() });
        let nodes = std::mem::take(&mut state.nodes);
        drop(state);
        self.leave();
        // Operations may own handles, whose drop comes back here: not under the lock.
        drop(nodes);
    }

    fn leave(&self) {
        if self.counted.swap(false, Ordering::AcqRel) {
            self.device.leave(self);
        }
    }

    /// `stream` takes part from now on.
    pub(crate) fn join(&self, stream: &StreamInner) {
        let (stream, name) = (stream.index, stream.name.clone());
        let lane = Lane { stream, name, point: Point::default(), waits: Vec::new(), nodes: 0 };
        self.lock().lanes.push(lane);
    }

    /// Adds a node behind all that `stream` submitted and waited for.
    pub(crate) fn add(&self, stream: u32, what: Draft) {
        let mut state = self.lock();
        let State { nodes, lanes, .. } = &mut *state;
        let at = position(lanes, stream);
        let (lane, node) = (&mut lanes[at], nodes.len() as u32);
        lane.nodes += 1;
        let (behind, waits) = (std::mem::replace(&mut lane.point.tail, vec![node]), std::mem::take(&mut lane.waits));
        lane.point.clock.set(at, lane.nodes);
        lane.point.joined.set(at, lane.nodes);
        nodes.push(DraftNode { what, lane: stream, behind, waits, place: lane.nodes, aside: false });
    }

    /// Adds a node that waits for `event`, unless `stream` is behind one already: both would bind to one record.
    pub(crate) fn wait_external(&self, stream: u32, event: &Event, why: Why) {
        let state = self.lock();
        let State { nodes, lanes, .. } = &*state;
        let clock = &lanes[position(lanes, stream)].point.clock;
        let waits = |node: &DraftNode| matches!(&node.what, Draft::Wait { event: known, .. } if known.same_as(event));
        let is_behind = |node: &DraftNode| clock.at(position(lanes, node.lane)) >= node.place;
        let is_covered = nodes.iter().any(|node| waits(node) && is_behind(node));
        drop(state);
        if !is_covered {
            self.add(stream, Draft::Wait { event: event.clone(), why });
        }
    }

    /// The present point of `stream`, for an event.
    pub(crate) fn point(self: &Arc<Self>, stream: u32) -> CapturedPoint {
        let state = self.lock();
        let lane = &state.lanes[position(&state.lanes, stream)];
        CapturedPoint { capture: self.clone(), point: lane.point.clone() }
    }

    /// Orders what `stream` submits from now on behind `point`, unless a test drops this wait.
    pub(crate) fn wait(&self, stream: u32, point: &CapturedPoint, why: Why, dropped: bool) {
        let mut state = self.lock();
        let State { nodes, lanes, .. } = &mut *state;
        let lane_of = |node: u32| {
            let node = &nodes[node as usize];
            (position(lanes, node.lane), node.place)
        };
        let at = position(lanes, stream);
        let (from, to) = (&point.point, &lanes[at].point);
        let covered = |clock: &Clock, node: u32| {
            let (lane, place) = lane_of(node);
            clock.at(lane) >= place
        };
        let outcome = |node: u32| match (dropped, covered(&to.clock, node)) {
            (true, _) => WaitOutcome::Dropped,
            (false, true) => WaitOutcome::Elided,
            (false, false) => WaitOutcome::Enforced,
        };
        let outcomes: Vec<_> = from.tail.iter().map(|node| (why, *node, outcome(*node))).collect();
        let added = outcomes.iter().filter(|(_, _, outcome)| *outcome == WaitOutcome::Enforced);
        let added: Vec<u32> = added.map(|(_, node, _)| *node).collect();
        // What the new ones are behind already, the next node need not name.
        let kept: Vec<u32> = match added.is_empty() {
            true => to.tail.clone(),
            false => {
                let needed = |node: &u32| from.tail.contains(node) || !covered(&from.clock, *node);
                to.tail.iter().copied().filter(needed).collect()
            }
        };
        let lane = &mut lanes[at];
        lane.point.joined.join(&from.joined);
        if !dropped {
            lane.point.clock.join(&from.clock);
            lane.point.tail = kept;
            lane.point.tail.extend(added);
        }
        lane.waits.extend(outcomes);
    }

    /// Ends it: no stream takes part any more.
    ///
    /// # Errors
    /// [`Error::CaptureInvalid`]; [`Error::Unjoined`].
    pub(crate) fn end(&self) -> Result<Vec<DraftNode>, Error> {
        let mut state = self.lock();
        state.ended = true;
        let (nodes, lanes) = (std::mem::take(&mut state.nodes), std::mem::take(&mut state.lanes));
        let violated = state.violated.take();
        drop(state);
        self.leave();
        if let Some(cause) = violated {
            return Err(self.invalid(&cause));
        }
        let origin = &lanes[0].point.joined;
        let unjoined = lanes.iter().enumerate().filter(|(at, lane)| origin.at(*at) < lane.nodes);
        let streams: Vec<String> = unjoined.map(|(_, lane)| lane.name.clone()).collect();
        if !streams.is_empty() {
            let origin = self.origin_name.clone();
            return Err(Error::Unjoined { rank: self.rank, graph: self.graph.clone(), origin, streams });
        }
        Ok(nodes)
    }
}

/// The open captures of a device.
#[derive(Default)]
pub(crate) struct Capturing {
    count: AtomicUsize,
    open: Mutex<Vec<Weak<Capture>>>,
}

impl Capturing {
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    fn enter(&self, capture: &Arc<Capture>) {
        lock(&self.open).push(Arc::downgrade(capture));
        self.count.fetch_add(1, Ordering::AcqRel);
    }

    fn leave(&self, capture: &Capture) {
        self.count.fetch_sub(1, Ordering::AcqRel);
        lock(&self.open).retain(|open| !std::ptr::eq(open.as_ptr(), capture));
    }

    /// What a device with an open capture refuses. Costs one load without any; otherwise all of them are invalid.
    pub(crate) fn refuse(&self, error: impl Fn(&str) -> Error) -> Result<(), Error> {
        if self.count() == 0 {
            return Ok(());
        }
        let open: Vec<Arc<Capture>> = lock(&self.open).iter().filter_map(Weak::upgrade).collect();
        let refused = open.iter().map(|capture| capture.violate(error(&capture.graph)));
        refused.reduce(|first, _| first).map_or(Ok(()), Err)
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|poison| poison.into_inner())
}

fn position(lanes: &[Lane], stream: u32) -> usize {
    lanes.iter().position(|lane| lane.stream == stream).expect("BUG: a stream that takes no part in this capture")
}
