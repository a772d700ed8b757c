//! A stream's half on the card: what was submitted stays here until the card has passed it.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use cudarc::driver::sys;

use super::{
    CudaError,
    card::{Card, RawStream, lock},
    fault::{Post, Refused},
    graph::GraphOnCard,
    host::HostCall,
    launch::{self, Ready},
    line::Line,
    requests,
    steps::{self, Steps},
    times::Interval,
    workspace::Workspace,
};
use crate::{
    Kernel, Launch, Op, OpError,
    joint::JointRef,
    launch::LaunchBody,
    queue::{Item, Mark, OpAt},
};

pub(crate) struct StreamOnCard {
    pub(super) card: Arc<Card>,
    pub(super) raw: RawStream,
    pub(super) post: Arc<Post>,
    /// What was submitted and is not on the card.
    pub(super) line: Line,
    flight: Mutex<Flight>,
    /// Items that were pushed.
    pushed: AtomicUsize,
    /// What its kernels and libraries work in: all of them in the last, because they run one behind the other. Those
    /// before it were too small, and may still be worked in.
    workspaces: Mutex<Vec<Arc<Workspace>>>,
}

/// What the card has not been seen to pass.
#[derive(Default)]
struct Flight {
    sent: VecDeque<Sent>,
    /// Operations since the last mark.
    loose: usize,
    /// Kernels that the card has passed and nobody needs any more.
    spent: Vec<Op>,
}

struct Sent {
    item: Item,
    /// Its mark is on the card, if it has one. That of an item that did not get there tells nothing of what is before.
    placed: bool,
    along: Beside,
}

/// What is kept beside an item.
#[derive(Default)]
pub(super) struct Along {
    /// The card writes to its copies.
    pub(super) host: Option<Arc<HostCall>>,
    /// Of uses of communicators before this launch: dropped with it, by whoever submits to its stream.
    pub(super) ends: Vec<Arc<Mark>>,
    /// If somebody traces.
    pub(super) interval: Option<Interval>,
}

/// Mostly nothing.
pub(super) type Beside = Option<Box<Along>>;

impl Along {
    /// The interval ends here.
    #[inline]
    pub(super) fn timed(interval: Option<Interval>, on: &StreamOnCard) -> Result<Beside, CudaError> {
        match interval {
            None => Ok(None),
            Some(interval) => Ok(Some(Box::new(Along { interval: Some(interval.end(on)?), ..Along::default() }))),
        }
    }
}

/// What the card has passed since one looked last.
#[derive(Default)]
pub(super) struct Passed {
    /// To be dropped when no lock is held: they may own the last handles of anything.
    pub(super) items: Vec<Item>,
    /// When some of them ran, by place among them.
    pub(super) ran: Vec<(usize, Interval)>,
    /// Values that kernels refused.
    pub(super) refused: Vec<(OpAt, OpError)>,
    /// Kernels that go now.
    spent: Vec<Op>,
    /// There was something.
    pub(super) some: bool,
}

/// Operations without a mark among them, at most; then one is made, so that what they hold can go.
const LOOSE: usize = 128;

/// Spent operations that go with each item that comes: what is freed a little at a time, an allocator has at hand for
/// what is made next. All at once would take several times as long.
const GO: usize = 2;

/// Spent operations that a look leaves: as many as come until the next one takes with it.
const LEFT: usize = GO * LOOK_EVERY;

/// Items from one that looks what the card has passed to the next: asking the driver takes half of what a launch takes.
const LOOK_EVERY: usize = 128;

/// Bytes of a workspace that is made, at least.
const SMALLEST: usize = 1 << 20;

impl Sent {
    fn is_operation(&self) -> bool {
        matches!(self.item, Item::Op(_) | Item::Joint(_) | Item::Launch(_))
    }

    fn mark(&self) -> Option<&Arc<Mark>> {
        match &self.item {
            _ if !self.placed => None,
            Item::Record(mark) => Some(mark),
            Item::Launch(Some(launch)) => Some(&launch.end),
            Item::Op(_) | Item::Wait(_) | Item::Joint(_) | Item::Launch(None) => None,
        }
    }
}

impl StreamOnCard {
    /// The context is current.
    pub(super) fn new(card: &Arc<Card>) -> Result<StreamOnCard, CudaError> {
        let (post, flight) = (Arc::new(Post::new(card)?), Mutex::default());
        let (line, pushed, workspaces) = (Line::default(), AtomicUsize::new(0), Mutex::default());
        Ok(StreamOnCard { card: card.clone(), raw: card.new_stream()?, post, line, flight, pushed, workspaces })
    }

    /// Queues what `kernel` becomes, as operation `operation`. The context is current.
    pub(super) fn send_kernel(&self, op: &Op, kernel: &Kernel, operation: u64) -> Result<(), CudaError> {
        if let Some(ready) = self.ready(op, kernel)? {
            return ready.iter().try_for_each(|call| {
                let workspace = call.scratch().map(|bytes| self.workspace(bytes)).transpose()?;
                call.launch(&self.card, self.raw, &self.post, operation, workspace.as_deref())
            });
        }
        match requests::steps(kernel, &op.accesses, self.card.sums()) {
            // Most operations: what is launched stays where it was written.
            Steps::One(call) => {
                let workspace = call.scratch().map(|bytes| self.workspace(bytes)).transpose()?;
                launch::launch(&self.card, self.raw, &call, &self.post, operation, workspace.as_deref())
            }
            Steps::Several(several) => steps::settle_each(&self.card, several, &mut |step| {
                let workspace = step.scratch().map(|bytes| self.workspace(bytes)).transpose()?;
                step.launch(&self.card, self.raw, &self.post, operation, workspace.as_deref())
            }),
        }
    }

    /// What `op` keeps, if it was submitted before or may be again. One that nobody else has is encoded on its way.
    #[inline]
    fn ready<'o>(&self, op: &'o Op, kernel: &Kernel) -> Result<Option<&'o [Ready]>, CudaError> {
        let known = match op.ready() {
            None if op.is_shared() => Some(op.keep_ready(steps::ready(&self.card, kernel, &op.accesses)?)),
            known => known,
        };
        Ok(known.and_then(Option::as_deref))
    }

    /// Made for the first operation that needs it, and again for one that needs more, in powers of two: all that were
    /// too small are together no larger than the last.
    fn workspace(&self, bytes: usize) -> Result<Arc<Workspace>, CudaError> {
        let mut workspaces = lock(&self.workspaces);
        if let Some(last) = workspaces.last().filter(|last| last.bytes() >= bytes) {
            return Ok(last.clone());
        }
        let size = bytes.max(SMALLEST).next_power_of_two();
        let made = Workspace::new(&self.card, size).or_else(|error| {
            // Its own passed operations may hold memory that nobody needs.
            if self.take_spent().is_empty() { Err(error) } else { Workspace::new(&self.card, size) }
        });
        let made = Arc::new(made?);
        workspaces.push(made.clone());
        Ok(made)
    }

    /// Gives up what its kernels worked in, if none is on its way. The caller has the line, so none gets there meanwhile.
    pub(super) fn give_up_workspaces(&self) {
        if !self.has_operations() {
            let workspaces = std::mem::take(&mut *lock(&self.workspaces));
            drop(workspaces);
        }
    }

    /// Keeps what was sent. True when it is time for a mark.
    pub(super) fn keep(&self, item: Item, along: Beside) -> bool {
        self.add(Sent { item, placed: true, along })
    }

    /// Keeps what did not get to the card, until the stream has passed: it may own the last handles of anything.
    pub(super) fn keep_lost(&self, item: Item) -> bool {
        self.add(Sent { item, placed: false, along: None })
    }

    /// One more item was pushed: whether it is the one to look what the card has passed.
    pub(super) fn is_time_to_look(&self) -> bool {
        // Pushes come one after the other, but for some that are rare; one that is not counted changes nothing.
        let pushed = self.pushed.load(Ordering::Relaxed) + 1;
        self.pushed.store(pushed, Ordering::Relaxed);
        pushed.is_multiple_of(LOOK_EVERY)
    }

    /// Whether what was sent last has a mark behind it, or nothing is on its way.
    pub(super) fn ends_in_mark(&self) -> bool {
        lock(&self.flight).sent.back().is_none_or(|sent| sent.mark().is_some())
    }

    #[inline]
    fn add(&self, sent: Sent) -> bool {
        let mut flight = lock(&self.flight);
        flight.loose = if sent.mark().is_some() { 0 } else { flight.loose + 1 };
        flight.sent.push_back(sent);
        let (is_time, gone) = (flight.loose >= LOOSE, [(); GO].map(|()| flight.spent.pop()));
        drop((flight, gone));
        is_time
    }

    /// Takes out what the card has passed, as far as its marks tell. On a broken card that is nothing. Kernels leave
    /// their last operations here, to go a few at a time.
    pub(super) fn take_passed(&self, passed: &mut Passed) {
        let mut flight = lock(&self.flight);
        self.pass(&mut flight, passed);
        let more = flight.spent.len().saturating_sub(LEFT);
        passed.spent.extend(flight.spent.drain(..more));
    }

    /// Operations that hold nothing but memory, and that only until others come.
    pub(super) fn take_spent(&self) -> Vec<Op> {
        std::mem::take(&mut lock(&self.flight).spent)
    }

    /// As [`StreamOnCard::take_passed`], with all that was left.
    pub(super) fn take_all_passed(&self, passed: &mut Passed) {
        let mut flight = lock(&self.flight);
        self.pass(&mut flight, passed);
        passed.spent.append(&mut flight.spent);
    }

    fn pass(&self, Flight { sent, spent, .. }: &mut Flight, passed: &mut Passed) {
        let mut done = 0;
        for (at, sent) in sent.iter().enumerate() {
            let Some(mark) = sent.mark() else { continue };
            if !mark.is_done() || self.card.lost().is_some() {
                break;
            }
            done = at + 1;
        }
        if done == 0 {
            return;
        }
        let eager = self.post.refused();
        passed.some = true;
        for Sent { item, along, .. } in sent.drain(..done) {
            match &item {
                Item::Op(body) => {
                    let own = eager.as_ref().filter(|refused| refused.operation == body.seq + 1);
                    passed.refused.extend(own.map(|refused| (OpAt::Eager(body.clone()), refused)).map(value_error));
                }
                Item::Launch(Some(launch)) => {
                    let graph = on_card(launch);
                    let refused = graph.post().refused();
                    let node =
                        refused.map(|refused| (OpAt::Node(launch.clone(), (refused.operation - 1) as u32), refused));
                    passed.refused.extend(node.as_ref().map(|(op, refused)| value_error((op.clone(), refused))));
                    graph.passed(launch);
                    drop(launch.finish());
                }
                _ => {}
            }
            match item {
                // It holds nothing but memory.
                Item::Op(body) if along.is_none() && matches!(body.op.launch, Launch::Kernel(_)) => spent.push(body.op),
                item => {
                    let interval = along.and_then(|along| along.interval);
                    passed.ran.extend(interval.map(|interval| (passed.items.len(), interval)));
                    passed.items.push(item);
                }
            }
        }
    }

    /// Of a broken card: the last operation that began here and was not seen to end, and all that was sent.
    pub(super) fn take_broken(&self) -> (Option<OpAt>, Vec<Item>) {
        let mut flight = lock(&self.flight);
        let sent: Vec<Item> = flight.sent.drain(..).map(|sent| sent.item).collect();
        flight.spent.clear();
        let launch = sent.iter().find_map(|item| match item {
            Item::Launch(Some(launch)) if on_card(launch).post().begun() > 0 => Some(launch),
            _ => None,
        });
        let in_graph = launch.map(|launch| OpAt::Node(launch.clone(), on_card(launch).post().begun() as u32 - 1));
        let eager = sent.iter().find_map(|item| match item {
            Item::Op(body) if self.post.begun() == body.seq + 1 => Some(OpAt::Eager(body.clone())),
            _ => None,
        });
        (eager.or(in_graph), sent)
    }

    /// Something is on its way that uses memory or runs functions. Marks and waits keep their order by themselves.
    pub(super) fn has_operations(&self) -> bool {
        lock(&self.flight).sent.iter().any(Sent::is_operation)
    }

    /// Joint operations on their way, and launches with some: the last mark before each tells whether the stream has
    /// got there.
    pub(super) fn joints(&self) -> Vec<(JointRef, bool)> {
        let flight = lock(&self.flight);
        let over = flight.sent.iter().rposition(|sent| sent.mark().is_some_and(|mark| mark.is_done()));
        let mut reached = true;
        let mut found = Vec::new();
        for sent in flight.sent.iter().skip(over.map_or(0, |last| last + 1)) {
            match &sent.item {
                Item::Joint(call) => found.push((JointRef::Call(call.clone()), reached)),
                Item::Launch(Some(launch)) => {
                    let first = launch.exec.graph.groups.iter().map(|calls| calls[0]);
                    found.extend(first.map(|node| (JointRef::Node(launch.clone(), node), reached)));
                }
                Item::Op(_) | Item::Record(_) | Item::Wait(_) | Item::Launch(None) => {}
            }
            reached &= sent.mark().is_none();
        }
        found
    }

    /// The launch on its way that is the first to end, and the node of the last kernel of ours that began in it.
    pub(super) fn oldest_launch(&self) -> Option<(Arc<LaunchBody>, Option<u32>)> {
        let flight = lock(&self.flight);
        let launch = flight.sent.iter().find_map(|sent| match &sent.item {
            Item::Launch(Some(launch)) if sent.placed && !launch.end.is_done() => Some(launch.clone()),
            _ => None,
        })?;
        let begun = on_card(&launch).post().begun().checked_sub(1).map(|node| node as u32);
        Some((launch, begun))
    }

    pub(super) fn wait_for(&self, mark: &Mark) -> Result<(), CudaError> {
        wait_for(&self.card, self.raw, mark)
    }
}

/// Lets `stream`, of `card`, wait for `mark`, of the same. The context is current.
pub(super) fn wait_for(card: &Card, stream: RawStream, mark: &Mark) -> Result<(), CudaError> {
    let Some(event) = mark.on_card().raw() else { return Ok(()) };
    let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;
    // SAFETY: both are of this card and live; the context is current. The wait binds to the record now, so that the
    // event may be used again as soon as this returns.
    card.check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream.0, event.0, flags) })
}

pub(super) fn on_card(launch: &LaunchBody) -> &GraphOnCard {
    launch.exec.on_card.as_ref().expect("BUG: a launch on a card of a graph that is not there")
}

fn value_error((op, refused): (OpAt, &Refused)) -> (OpAt, OpError) {
    let Launch::Kernel(kernel) = &op.op().launch else { unreachable!("BUG: a host function is no kernel") };
    let error = requests::refused(kernel, &op.op().accesses, refused.position, refused.value);
    (op, Box::new(error))
}

impl Drop for StreamOnCard {
    fn drop(&mut self) {
        let sent = std::mem::take(&mut lock(&self.flight).sent);
        if sent.iter().any(Sent::is_operation) && self.card.lost().is_none() {
            // Whoever dropped it has waited as long as a host may. The card may still get there, so nothing that it
            // would touch is given away.
            tracing::error!(items = sent.len(), "cuda.abandon_stream");
            let workspaces = std::mem::take(&mut *lock(&self.workspaces));
            std::mem::forget((sent, workspaces, self.post.clone()));
            return;
        }
        self.card.end_stream(self.raw);
    }
}
