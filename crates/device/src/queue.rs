//! What a stream is made of, and the host's side of it.

use std::{
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, OnceLock, atomic::AtomicBool},
};

use crate::{
    Departure, Error, Op, Position,
    capture::Capture,
    cuda::{Point, StreamOnCard},
    device::DeviceInner,
    handoff::{self, Inbox},
    joint::JointCall,
    launch::LaunchBody,
};

/// A point in a stream. On a card it is reached when the card says so; elsewhere whoever runs the stream completes it.
pub(crate) struct Mark {
    own: handoff::Mark<Waiter>,
    on_card: OnceLock<Point>,
}

impl Mark {
    pub(crate) fn new() -> Mark {
        Mark { own: handoff::Mark::new(), on_card: OnceLock::new() }
    }

    pub(crate) fn is_done(&self) -> bool {
        if self.own.is_done() {
            return true;
        }
        let reached = self.on_card.get().is_some_and(Point::is_reached);
        if reached {
            // From now on asking costs one load. Nobody parks at a point on a card.
            drop(self.own.complete());
        }
        reached
    }

    /// Says where on the card it is. Once, and on every way out of a submission: others wait to be told.
    pub(crate) fn put_on_card(&self, point: Point) {
        let first = self.on_card.set(point);
        debug_assert!(first.is_ok(), "BUG: a mark is in two places of a card");
    }

    /// It did not get to the card: whoever waits finds the error. A mark that did stays where it is.
    pub(crate) fn lose(&self) {
        let _ = self.on_card.set(Point::Reached);
    }

    /// It is on the card, or never will be.
    pub(crate) fn is_placed(&self) -> bool {
        self.on_card.get().is_some()
    }

    /// Where on the card it is. Blocks for the few instructions between the issue of a record and its submission.
    pub(crate) fn on_card(&self) -> &Point {
        self.on_card.wait()
    }
}

impl Deref for Mark {
    type Target = handoff::Mark<Waiter>;

    fn deref(&self) -> &handoff::Mark<Waiter> {
        &self.own
    }
}

/// Who waits for a mark or for a worker.
pub(crate) enum Waiter {
    Stream(Arc<StreamInner>),
    Part(PartAt),
}

/// A part of a launch, on its way.
pub(crate) struct PartAt {
    pub(crate) launch: Arc<LaunchBody>,
    pub(crate) stream: Arc<StreamInner>,
    pub(crate) part: u32,
    pub(crate) stage: Stage,
}

/// How far a part is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It may begin.
    Begin,
    /// Its joint operation is over.
    Met,
}

/// An operation in its stream.
#[derive(Clone)]
pub(crate) struct OpBody {
    pub(crate) op: Op,
    pub(crate) stream: u32,
    pub(crate) seq: u64,
}

/// An operation that runs.
#[derive(Clone)]
pub(crate) enum OpAt {
    Eager(OpBody),
    /// A node of a launch.
    Node(Arc<LaunchBody>, u32),
}

impl OpAt {
    pub(crate) fn op(&self) -> &Op {
        match self {
            OpAt::Eager(body) => &body.op,
            OpAt::Node(launch, node) => launch.exec.graph.op(*node),
        }
    }

    pub(crate) fn position(&self) -> Position {
        match self {
            OpAt::Eager(body) => Position { stream: body.stream, seq: body.seq, node: None },
            OpAt::Node(launch, node) => Position { stream: launch.stream, seq: launch.seq, node: Some(*node) },
        }
    }
}

/// What a stream's queue is made of.
#[derive(Clone)]
pub(crate) enum Item {
    Op(OpBody),
    Record(Arc<Mark>),
    Wait(Arc<Mark>),
    Joint(Arc<JointCall>),
    /// Taken out when it begins, so that finished queues keep no graph.
    Launch(Option<Arc<LaunchBody>>),
}

impl Item {
    /// Operations that do not run when it is thrown away. A launch is one at least: its gates cannot open without it.
    fn operations(&self) -> usize {
        match self {
            Item::Op(_) | Item::Joint(_) => 1,
            Item::Launch(Some(launch)) => launch.unstarted().max(1),
            Item::Record(_) | Item::Wait(_) | Item::Launch(None) => 0,
        }
    }

    /// Completes the marks of an item that was thrown away. Whoever waited for them finds the error.
    #[must_use]
    pub(crate) fn give_up(&self) -> Vec<Waiter> {
        match self {
            Item::Record(mark) => mark.complete(),
            Item::Launch(Some(launch)) => launch.give_up(),
            Item::Op(_) | Item::Wait(_) | Item::Joint(_) | Item::Launch(None) => Vec::new(),
        }
    }
}

/// The batch that a worker runs at the moment, and how far it is.
#[derive(Default)]
pub(crate) struct Lane {
    pub(crate) batch: Vec<Item>,
    pub(crate) at: usize,
    /// The launch that the stream waits in.
    pub(crate) launch: Option<Arc<LaunchBody>>,
}

pub(crate) struct StreamInner {
    pub(crate) device: Arc<DeviceInner>,
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) inbox: Inbox<Item>,
    pub(crate) lane: Mutex<Lane>,
    submit: Mutex<Submit>,
    /// Set when the last handle is dropped, to what groups are told if operations are thrown away.
    dropped: OnceLock<Departure>,
    /// Parked in a meeting that someone else must complete.
    pub(crate) at_joint: AtomicBool,
    /// Its other half, on the `cuda` driver.
    pub(crate) on_card: OnceLock<StreamOnCard>,
}

/// The host's side of a stream.
pub(crate) struct Submit {
    pub(crate) next: u64,
    /// By stream of the same device: the position that this stream is ordered behind, plus one.
    pub(crate) behind: Vec<u64>,
    /// What is submitted becomes nodes of it, while it is open.
    pub(crate) capture: Option<Arc<Capture>>,
}

impl Submit {
    /// The next position.
    pub(crate) fn take(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// The capture that takes what is submitted now. One that has ended is forgotten.
    ///
    /// # Errors
    /// [`Error::CaptureInvalid`] when rules of the capture were broken.
    pub(crate) fn capture(&mut self) -> Result<Option<Arc<Capture>>, Error> {
        let Some(capture) = &self.capture else { return Ok(None) };
        match capture.check() {
            Ok(true) => Ok(Some(capture.clone())),
            Ok(false) => {
                self.capture = None;
                Ok(None)
            }
            Err(error) => {
                if capture.is_abandoned() {
                    self.capture = None;
                }
                Err(error)
            }
        }
    }

    /// Ordered behind everything up to position `before` of `stream`, that excluded.
    pub(crate) fn is_behind(&self, stream: u32, before: u64) -> bool {
        self.behind.get(stream as usize).is_some_and(|behind| *behind >= before)
    }

    /// From now on it is.
    pub(crate) fn set_behind(&mut self, stream: u32, before: u64) {
        let from = stream as usize;
        if self.behind.len() <= from {
            self.behind.resize(from + 1, 0);
        }
        self.behind[from] = self.behind[from].max(before);
    }
}

impl StreamInner {
    pub(crate) fn new(device: Arc<DeviceInner>, index: u32, name: String) -> Self {
        StreamInner {
            device,
            index,
            name,
            inbox: Inbox::new(),
            lane: Mutex::new(Lane::default()),
            submit: Mutex::new(Submit { next: 0, behind: Vec::new(), capture: None }),
            dropped: OnceLock::new(),
            at_joint: AtomicBool::new(false),
            on_card: OnceLock::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Submit> {
        self.submit.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    /// Pushes a mark behind all that was submitted, for the host to wait for as `what`. Of a dropped stream nothing is
    /// left to wait for.
    ///
    /// # Errors
    /// [`Error::HostWaitInCapture`] while the stream captures; the capture is invalid then.
    pub(crate) fn mark(self: &Arc<Self>, what: &str) -> Result<(Arc<Mark>, Position), Error> {
        let mark = Arc::new(Mark::new());
        let mut submit = self.lock();
        self.refuse_in_capture(&mut submit, what)?;
        let on = Position { stream: self.index, seq: submit.next, node: None };
        if self.is_dropped() {
            let parked = mark.complete();
            debug_assert!(parked.is_empty(), "BUG: nobody else has this mark");
        } else {
            submit.next += 1;
            let spent = self.device.machine.engine.push(self, Item::Record(mark.clone()));
            drop(submit);
            self.inbox.free(spent);
        }
        Ok((mark, on))
    }

    /// The host would wait for `what`.
    ///
    /// # Errors
    /// As [`StreamInner::mark`].
    pub(crate) fn refuse_in_capture(&self, submit: &mut Submit, what: &str) -> Result<(), Error> {
        let Some(capture) = submit.capture()? else { return Ok(()) };
        let (rank, what, graph) = (self.device.rank, what.to_owned(), capture.graph().to_owned());
        Err(capture.violate(Error::HostWaitInCapture { rank, what, graph }))
    }

    /// Nobody submits any more, and operations that are queued do not run.
    pub(crate) fn is_dropped(&self) -> bool {
        self.dropped.get().is_some()
    }

    /// The last handle has gone. What it captured alone is given up.
    pub(crate) fn set_dropped(&self, how: Departure) {
        // With the lock, so that a mark is either in the queue by now or not pushed at all.
        let mut submit = self.lock();
        self.dropped.get_or_init(|| how);
        if let Some(capture) = submit.capture.take().filter(|capture| capture.origin() == self.index) {
            capture.abandon();
        }
    }

    /// Fails the device when operations are among the `queued` items of this dropped stream, or `taken_back` from a
    /// meeting: then the marks among the items may complete at once, because whoever waits for them finds the error.
    /// False when there are none: waits and records alone keep their order and go on without a handle.
    pub(crate) fn throw_away<'i>(&self, queued: impl IntoIterator<Item = &'i Item>, taken_back: usize) -> bool {
        let queued = taken_back + queued.into_iter().map(Item::operations).sum::<usize>();
        if queued > 0 {
            let error = Error::Cancelled { rank: self.device.rank, stream: self.name.clone(), queued };
            let how = self.dropped.get().expect("BUG: only a dropped stream is thrown away").clone();
            self.device.machine.fail_because(&self.device, error, how);
        }
        queued > 0
    }
}
