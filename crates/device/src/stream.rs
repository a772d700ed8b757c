//! Streams: operations in order, submitted without blocking.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, atomic::AtomicBool};

use crate::{
    Access, DType, Departure, Device, Element, Error, Event, Exchange, Meeting, Note, Op, OpRef, Position, Site,
    TraceAccess, TraceEvent, View, WaitOutcome, Why,
    device::DeviceInner,
    download::Download,
    engine::Awaited,
    event::Bound,
    exchange::{Request, check_exchange},
    handoff::{self, Inbox},
    meeting::JointBody,
};

pub(crate) type Mark = handoff::Mark<Arc<StreamInner>>;

/// An operation in its stream.
pub(crate) struct OpBody {
    pub(crate) op: Op,
    pub(crate) stream: u32,
    pub(crate) seq: u64,
}

/// What a stream is made of.
#[derive(Clone)]
pub(crate) enum Item {
    Op(Arc<OpBody>),
    Record(Arc<Mark>),
    Wait(Arc<Mark>),
    Joint(Arc<JointBody>),
}

/// The batch that a worker runs at the moment, and how far it is.
#[derive(Default)]
pub(crate) struct Lane {
    pub(crate) batch: Vec<Item>,
    pub(crate) at: usize,
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
}

/// The host's side of a stream.
struct Submit {
    next: u64,
    /// By stream of the same device: the position that this stream is ordered behind, plus one.
    behind: Vec<u64>,
}

impl Submit {
    /// The next position.
    fn take(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
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
            submit: Mutex::new(Submit { next: 0, behind: Vec::new() }),
            dropped: OnceLock::new(),
            at_joint: AtomicBool::new(false),
        }
    }

    pub(crate) fn op_ref(&self, body: &OpBody) -> OpRef {
        self.device.op_ref(&body.op, body.stream, body.seq)
    }

    fn lock(&self) -> MutexGuard<'_, Submit> {
        self.submit.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    /// Pushes a mark behind all that was submitted, for the host to wait for. Of a dropped stream nothing is left
    /// to wait for.
    pub(crate) fn mark(self: &Arc<Self>) -> (Arc<Mark>, Position) {
        let mark = Arc::new(Mark::new());
        let mut submit = self.lock();
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
        (mark, on)
    }

    /// Nobody submits any more, and operations that are queued do not run.
    pub(crate) fn is_dropped(&self) -> bool {
        self.dropped.get().is_some()
    }

    /// Fails the device when operations are among the `queued` items of this dropped stream, or `taken_back` from a
    /// meeting: then the marks among the items may complete at once, because whoever waits for them finds the error.
    /// False when there are none: waits and records alone keep their order and go on without a handle.
    pub(crate) fn throw_away(&self, queued: &[Item], taken_back: usize) -> bool {
        let operations = queued.iter().filter(|item| matches!(item, Item::Op(_) | Item::Joint(_)));
        let queued = taken_back + operations.count();
        if queued > 0 {
            let error = Error::Cancelled { rank: self.device.rank, stream: self.name.clone(), queued };
            let how = self.dropped.get().expect("BUG: only a dropped stream is thrown away").clone();
            self.device.machine.fail_because(&self.device, error, how);
        }
        queued > 0
    }
}

/// Operations of one device in the order of the calls. Never blocks the caller.
///
/// Cloning gives another handle of the same stream; dropping the last one waits for what runs and cancels what is
/// queued (then the device has the sticky error [`Error::Cancelled`]): synchronize first.
#[derive(Clone)]
pub struct Stream(Arc<Handle>);

struct Handle {
    inner: Arc<StreamInner>,
    device: Device,
}

impl Stream {
    pub(crate) fn open(inner: Arc<StreamInner>, device: Device) -> Stream {
        Stream(Arc::new(Handle { inner, device }))
    }

    fn inner(&self) -> &Arc<StreamInner> {
        &self.0.inner
    }

    /// Name given when the stream was made.
    pub fn name(&self) -> &str {
        &self.inner().name
    }

    /// Number of the stream on its device, from 0, as in traces.
    pub fn index(&self) -> u32 {
        self.inner().index
    }

    /// The device it belongs to.
    pub fn device(&self) -> Device {
        self.0.device.clone()
    }

    /// Rank of that device.
    pub fn rank(&self) -> u32 {
        self.inner().device.rank
    }

    /// Submits an operation.
    ///
    /// # Errors
    /// The device's sticky error; [`Error::Foreign`] for memory of another device; [`Error::SelfConflict`] when two
    /// accesses of the operation touch the same bytes and one writes. Nothing is queued then.
    pub fn launch(&self, op: Op) -> Result<(), Error> {
        let inner = self.inner();
        inner.device.check()?;
        check_accesses(op.name, &op.site, &op.accesses, &inner.device)?;
        check_planned(&op.accesses, inner)?;
        let mut submit = inner.lock();
        let seq = submit.take();
        let tracer = &inner.device.machine.tracer;
        tracer.add(inner.device.rank, || TraceEvent::Op {
            rank: inner.device.rank,
            stream: inner.index,
            seq,
            name: op.name.into(),
            site: (&op.site).into(),
            flops: op.flops(),
            accesses: op.accesses.iter().map(TraceAccess::from).collect(),
        });
        let body = Arc::new(OpBody { op, stream: inner.index, seq });
        let spent = inner.device.machine.engine.push(inner, Item::Op(body));
        drop(submit);
        inner.inbox.free(spent);
        Ok(())
    }

    /// Marks this point of the stream as the event's latest record.
    ///
    /// # Errors
    /// The device's sticky error; [`Error::Foreign`] for an event of another device.
    pub fn record(&self, event: &Event) -> Result<(), Error> {
        let inner = self.inner();
        inner.device.check()?;
        self.own_event(event)?;
        let mut submit = inner.lock();
        let seq = submit.take();
        let mark = Arc::new(Mark::new());
        let mut latest = event.0.latest.lock().unwrap_or_else(|poison| poison.into_inner());
        let generation = latest.as_ref().map_or(0, |b| b.generation) + 1;
        *latest = Some(Bound { mark: mark.clone(), stream: inner.index, seq, generation });
        inner.device.machine.tracer.add(inner.device.rank, || TraceEvent::Record {
            rank: inner.device.rank,
            stream: inner.index,
            seq,
            event: (&event.0.name).into(),
            generation,
        });
        let spent = inner.device.machine.engine.push(inner, Item::Record(mark));
        drop((latest, submit));
        inner.inbox.free(spent);
        Ok(())
    }

    /// Orders what is submitted to this stream from now on behind the last record of `event`. Costs one load when
    /// the stream is behind that point already.
    ///
    /// # Errors
    /// [`Error::NeverRecorded`]; the device's sticky error; [`Error::Foreign`] for an event of another device.
    pub fn wait(&self, event: &Event, why: Why) -> Result<(), Error> {
        let inner = self.inner();
        inner.device.check()?;
        self.own_event(event)?;
        let bound = event.bound().ok_or_else(|| Error::NeverRecorded {
            rank: inner.device.rank,
            stream: inner.name.clone(),
            event: event.name().to_owned(),
        })?;
        let machine = &inner.device.machine;
        let mut submit = inner.lock();
        let from = bound.stream as usize;
        let behind = submit.behind.get(from).copied().unwrap_or(0);
        let outcome = if machine.is_dropped(why) {
            WaitOutcome::Dropped
        } else if bound.stream == inner.index || behind > bound.seq {
            WaitOutcome::Elided
        } else {
            WaitOutcome::Enforced
        };
        machine.tracer.add(inner.device.rank, || TraceEvent::Wait {
            rank: inner.device.rank,
            stream: inner.index,
            seq: submit.next,
            why: why.into(),
            event: (&event.0.name).into(),
            generation: bound.generation,
            on: bound.position(),
            outcome,
        });
        if outcome == WaitOutcome::Enforced {
            if submit.behind.len() <= from {
                submit.behind.resize(from + 1, 0);
            }
            submit.behind[from] = bound.seq + 1;
            submit.next += 1;
            let spent = machine.engine.push(inner, Item::Wait(bound.mark));
            drop(submit);
            inner.inbox.free(spent);
        }
        Ok(())
    }

    /// Submits this member's call of a joint operation. It happens once, when every member's call with the same
    /// position in the meeting's sequence has come up in its stream; no worker waits for it.
    ///
    /// # Errors
    /// The device's sticky error; [`Error::Shapes`] or [`Error::ElementType`] when the accesses do not fit
    /// `exchange`; [`Error::Foreign`]. What other members ask for is compared when all have come
    /// ([`Error::Disagree`], sticky).
    pub fn joint(
        &self,
        meeting: &Meeting,
        exchange: Exchange,
        site: impl Into<Site>,
        accesses: Vec<Access>,
    ) -> Result<(), Error> {
        let site = site.into();
        self.check_member(meeting, &accesses)?;
        let signature = check_exchange(exchange, meeting.inner.members.len(), meeting.member, &site, &accesses)?;
        self.meet(meeting, Request::one(signature), site, accesses);
        Ok(())
    }

    /// Submits several exchanges as one call of a joint operation: they take one number of the meeting's sequence and
    /// happen together, in no order among each other. All members submit the same list.
    ///
    /// # Errors
    /// As [`Stream::joint`]; [`Error::SelfConflict`] when an exchange writes what another one touches. Nothing is
    /// queued then, nor for an empty list.
    pub fn joint_all(
        &self,
        meeting: &Meeting,
        site: impl Into<Site>,
        exchanges: Vec<(Exchange, Vec<Access>)>,
    ) -> Result<(), Error> {
        let site = site.into();
        for (_, accesses) in &exchanges {
            self.check_member(meeting, accesses)?;
        }
        let request = Request::several(&exchanges, meeting.inner.members.len(), meeting.member, &site)?;
        if let Some(request) = request {
            let accesses = exchanges.into_iter().flat_map(|(_, accesses)| accesses).collect();
            self.meet(meeting, request, site, accesses);
        }
        Ok(())
    }

    fn check_member(&self, meeting: &Meeting, accesses: &[Access]) -> Result<(), Error> {
        let device = &self.inner().device;
        device.check()?;
        let owner = meeting.inner.members[meeting.member];
        let of_this_machine = std::ptr::eq(meeting.inner.machine.as_ptr(), Arc::as_ptr(&device.machine));
        if !of_this_machine || owner != device.rank {
            let what = format!("place {} of group '{}'", meeting.member, meeting.inner.name);
            return Err(Error::Foreign { what, owner, used_by: device.rank });
        }
        check_owner(accesses, device)?;
        check_planned(accesses, self.inner())
    }

    fn meet(&self, meeting: &Meeting, request: Request, site: Site, accesses: Vec<Access>) {
        let inner = self.inner();
        let mut submit = inner.lock();
        // Held until the call is queued: two streams must not swap two numbers.
        let mut next = meeting.next.lock().unwrap_or_else(|poison| poison.into_inner());
        let group_seq = *next;
        *next += 1;
        let seq = submit.take();
        inner.device.machine.tracer.add(inner.device.rank, || TraceEvent::Joint {
            rank: inner.device.rank,
            stream: inner.index,
            seq,
            group: (&meeting.inner.name).into(),
            members: meeting.inner.members.clone(),
            group_seq,
            what: request.to_string().into(),
            site: (&site).into(),
            accesses: accesses.iter().map(TraceAccess::from).collect(),
        });
        let body = JointBody {
            meeting: meeting.inner.clone(),
            member: meeting.member,
            group_seq,
            request,
            site,
            accesses,
            stream: inner.index,
            seq,
        };
        let spent = inner.device.machine.engine.push(inner, Item::Joint(Arc::new(body)));
        drop((next, submit));
        inner.inbox.free(spent);
    }

    /// Copies host values into `view`, in row-major order, when the stream gets there.
    ///
    /// # Errors
    /// As [`Stream::launch`]; [`Error::Shapes`] when the number of values differs, [`Error::ElementType`] when the
    /// type does.
    pub fn upload<T: Element>(&self, view: &View, values: Vec<T>) -> Result<(), Error> {
        if view.dtype() != T::DTYPE {
            return Err(wrong_type("upload", view, T::DTYPE));
        }
        if view.numel() != values.len() {
            return Err(Error::Shapes {
                op: "upload",
                site: view.label().to_owned(),
                left: "view",
                left_shape: view.shape().to_vec(),
                right: "values",
                right_shape: vec![values.len()],
                rule: "as many values as elements",
            });
        }
        self.launch(Op::host("upload", Site::from(view.label().to_owned()), vec![Access::write(view)], move |args| {
            let mut rows = args.rows_mut::<T>(0)?;
            let cols = rows.cols().max(1);
            for (i, row) in values.chunks_exact(cols).enumerate() {
                rows.row_mut(i).copy_from_slice(row);
            }
            Ok(())
        }))
    }

    /// Copies `view` to the host, in row-major order, when the stream gets there. The values come from
    /// [`Download::wait`].
    ///
    /// # Errors
    /// As [`Stream::launch`]; [`Error::ElementType`] when the type differs; [`Error::NoValues`] on `dry`.
    pub fn download<T: Element>(&self, view: &View) -> Result<Download<T>, Error> {
        if view.dtype() != T::DTYPE {
            return Err(wrong_type("download", view, T::DTYPE));
        }
        if !self.inner().device.machine.engine.computes() {
            return Err(Error::NoValues { label: view.label().to_owned() });
        }
        let (op, slot) = Download::op(view);
        self.launch(op)?;
        Ok(Download::new(self.device(), view.label(), slot, self.inner().mark()))
    }

    /// A trace is being recorded: whatever [`Stream::note`] needs may be made.
    pub fn is_traced(&self) -> bool {
        self.inner().device.machine.tracer.is_on()
    }

    /// Says in the trace what the host is doing at this point of the stream. Costs one load when there is none; then
    /// `note` is not made.
    pub fn note(&self, note: impl FnOnce() -> Note) {
        let inner = self.inner();
        let tracer = &inner.device.machine.tracer;
        if tracer.is_on() {
            let submit = inner.lock();
            tracer.note(inner.device.rank, Some((inner.index, submit.next)), note);
        }
    }

    /// The host waits for all that was submitted to this stream.
    ///
    /// # Errors
    /// The device's sticky error; [`Error::Timeout`] or [`Error::Deadlock`].
    pub fn synchronize(&self) -> Result<(), Error> {
        let inner = self.inner();
        inner.device.check()?;
        let (mark, on) = inner.mark();
        let waited = inner.device.wait(&mark, Awaited::Stream(&inner.name), on);
        inner.inbox.sweep();
        waited
    }

    fn own_event(&self, event: &Event) -> Result<(), Error> {
        let device = &self.inner().device;
        if Arc::ptr_eq(device, event.0.device.inner()) {
            return Ok(());
        }
        Err(Error::Foreign {
            what: format!("event '{}'", event.name()),
            owner: event.0.device.rank(),
            used_by: device.rank,
        })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let how = if std::thread::panicking() { Departure::Panicked } else { Departure::Dropped };
        {
            // With the lock, so that a mark is either in the queue by now or not pushed at all.
            let _submit = self.inner.lock();
            self.inner.dropped.get_or_init(|| how);
        }
        self.inner.device.machine.engine.close(&self.inner);
    }
}

fn wrong_type(op: &'static str, view: &View, need: DType) -> Error {
    Error::ElementType { op, site: view.label().to_owned(), tensor: "view", have: view.dtype(), need }
}

/// Claims are kept by device, so memory of another one would be unguarded.
fn check_owner(accesses: &[Access], device: &Arc<DeviceInner>) -> Result<(), Error> {
    match accesses.iter().find(|a| !a.view.is_of(device)) {
        None => Ok(()),
        Some(a) => {
            let what = format!("memory '{}'", a.view.label());
            Err(Error::Foreign { what, owner: a.view.rank(), used_by: device.rank })
        }
    }
}

/// Planned memory is reused in the order of its own stream: another one would meet the next tenant.
fn check_planned(accesses: &[Access], stream: &StreamInner) -> Result<(), Error> {
    for view in accesses.iter().map(|a| &a.view) {
        if let Some((index, owner)) = &view.allocation().only_stream
            && *index != stream.index
        {
            let label = view.label().to_owned();
            return Err(Error::PlannedElsewhere { label, owner: owner.clone(), stream: stream.name.clone() });
        }
    }
    Ok(())
}

fn check_accesses(op: &'static str, site: &Site, accesses: &[Access], device: &Arc<DeviceInner>) -> Result<(), Error> {
    if accesses.len() > 64 {
        return Err(Error::TooManyAccesses { op, site: site.as_str().to_owned(), have: accesses.len() });
    }
    check_owner(accesses, device)?;
    for (second, b) in accesses.iter().enumerate() {
        if let Some(first) = accesses[..second].iter().position(|a| a.conflicts(b)) {
            let (site, label) = (site.as_str().to_owned(), b.view.label().to_owned());
            return Err(Error::SelfConflict { op, site, first, second, label });
        }
    }
    Ok(())
}
