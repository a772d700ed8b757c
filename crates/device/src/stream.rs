//! Streams: operations in order, submitted without blocking.

use std::sync::Arc;

use crate::{
    Access, Args, DType, Departure, Device, Element, Error, Event, Exchange, Launch, Meeting, Note, Op, Position, Site,
    TraceAccess, TraceEvent, View, WaitOutcome, Why,
    capture::Draft,
    device::DeviceInner,
    download::Download,
    engine::Awaited,
    event::{Bound, Recorded},
    exchange::{Request, check_exchange},
    joint::{JointBody, JointCall},
    queue::{Item, Mark, OpBody, StreamInner},
};

/// Operations of one device in the order of the calls. Never blocks the caller.
///
/// Between [`Stream::begin_capture`] and [`Stream::end_capture`] nothing runs: what is submitted becomes a graph.
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

    pub(crate) fn inner(&self) -> &Arc<StreamInner> {
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
        inner.device.machine.engine.check_op(&op)?;
        if let Some(survey) = &inner.device.machine.survey {
            survey.note(&op);
        }
        let mut submit = inner.lock();
        if let Some(capture) = submit.capture()? {
            capture.add(inner.index, Draft::Op(op));
            return Ok(());
        }
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
        let body = OpBody { op, stream: inner.index, seq };
        let spent = inner.device.machine.engine.push(inner, Item::Op(body));
        drop(submit);
        inner.inbox.free(spent);
        Ok(())
    }

    /// Marks this point of the stream as the event's latest record. While the stream captures, it marks a point of the
    /// capture, which only streams that take part in it can wait for, or that join it by waiting.
    ///
    /// # Errors
    /// The device's sticky error; [`Error::Foreign`] for an event of another device; [`Error::CaptureInvalid`].
    pub fn record(&self, event: &Event) -> Result<(), Error> {
        let inner = self.inner();
        inner.device.check()?;
        event.check_owner(&inner.device)?;
        let mut submit = inner.lock();
        if let Some(capture) = submit.capture()? {
            event.record_captured(capture.point(inner.index));
            return Ok(());
        }
        let seq = submit.take();
        let mark = Arc::new(Mark::new());
        let at = Position { stream: inner.index, seq, node: None };
        let generation = event.record(|generation| Bound { mark: mark.clone(), at, generation });
        inner.device.machine.tracer.add(inner.device.rank, || TraceEvent::Record {
            rank: inner.device.rank,
            stream: inner.index,
            seq,
            event: event.label(),
            generation,
        });
        let spent = inner.device.machine.engine.push(inner, Item::Record(mark));
        drop(submit);
        inner.inbox.free(spent);
        Ok(())
    }

    /// Orders what is submitted to this stream from now on behind the last record of `event`. Costs one load when
    /// the stream is behind that point already.
    ///
    /// If that record is a point of an open capture, the stream takes part in the capture from now on.
    ///
    /// # Errors
    /// [`Error::NeverRecorded`]; the device's sticky error; [`Error::Foreign`] for an event of another device;
    /// [`Error::CapturedEvent`] for a point of a capture that has ended. While the stream captures,
    /// [`Error::ForeignWait`] for anything but a point of the same capture; the capture is invalid then.
    pub fn wait(&self, event: &Event, why: Why) -> Result<(), Error> {
        let inner = self.inner();
        inner.device.check()?;
        event.check_owner(&inner.device)?;
        let mut submit = inner.lock();
        let recorded = event.recorded();
        if submit.capture.is_some() || matches!(recorded, Recorded::Captured(_)) {
            let taken = inner.wait_captured(&mut submit, event, &recorded, why)?;
            if taken {
                return Ok(());
            }
        }
        let Recorded::At(bound) = recorded else {
            return Err(never_recorded(inner, event));
        };
        let machine = &inner.device.machine;
        // Behind a node is behind all that precedes its launch, no more.
        let (from, before) = (bound.at.stream, bound.at.seq + u64::from(bound.at.node.is_none()));
        let outcome = if machine.is_dropped(why) {
            WaitOutcome::Dropped
        } else if from == inner.index || submit.is_behind(from, bound.at.seq + 1) {
            WaitOutcome::Elided
        } else {
            WaitOutcome::Enforced
        };
        machine.tracer.add(inner.device.rank, || TraceEvent::Wait {
            rank: inner.device.rank,
            stream: inner.index,
            seq: submit.next,
            why: why.into(),
            event: event.label(),
            generation: bound.generation,
            on: bound.at,
            outcome,
        });
        if outcome == WaitOutcome::Enforced {
            submit.set_behind(from, before);
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
        self.meet(meeting, Request::one(signature), site, accesses)
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
            self.meet(meeting, request, site, accesses)?;
        }
        Ok(())
    }

    fn check_member(&self, meeting: &Meeting, accesses: &[Access]) -> Result<(), Error> {
        let device = &self.inner().device;
        device.check()?;
        let owner = meeting.inner.members[meeting.member];
        let of_this_machine = Arc::ptr_eq(&meeting.inner.machine, &device.machine.identity);
        if !of_this_machine || owner != device.rank {
            let what = format!("place {} of group '{}'", meeting.member, meeting.inner.name);
            return Err(Error::Foreign { what, owner, used_by: device.rank });
        }
        check_owner(accesses, device)?;
        check_planned(accesses, self.inner())
    }

    fn meet(&self, meeting: &Meeting, request: Request, site: Site, accesses: Vec<Access>) -> Result<(), Error> {
        let inner = self.inner();
        let mut submit = inner.lock();
        let body = JointBody { meeting: meeting.inner.clone(), member: meeting.member, request, site, accesses };
        if let Some(capture) = submit.capture()? {
            capture.add(inner.index, Draft::Joint { body, meeting: meeting.clone() });
            return Ok(());
        }
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
            what: body.request.to_string().into(),
            site: (&body.site).into(),
            accesses: body.accesses.iter().map(TraceAccess::from).collect(),
        });
        let call = JointCall { body, number: group_seq, stream: inner.index, seq };
        let spent = inner.device.machine.engine.push(inner, Item::Joint(Arc::new(call)));
        drop((next, submit));
        inner.inbox.free(spent);
        Ok(())
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
        let run = move |args: &mut Args<'_>| {
            let mut rows = args.rows_mut::<T>(0)?;
            let cols = rows.cols().max(1);
            for (i, row) in values.chunks_exact(cols).enumerate() {
                rows.row_mut(i).copy_from_slice(row);
            }
            Ok(())
        };
        let (site, launch) = (Site::from(view.label().to_owned()), Launch::Upload(Arc::new(run)));
        self.launch(Op::new("upload", site, vec![Access::write(view)], launch))
    }

    /// Copies `view` to the host, in row-major order, when the stream gets there. The values come from
    /// [`Download::wait`].
    ///
    /// # Errors
    /// As [`Stream::launch`]; [`Error::ElementType`] when the type differs; [`Error::NoValues`] on `dry`;
    /// [`Error::HostWaitInCapture`] while the stream captures, and the capture is invalid then.
    pub fn download<T: Element>(&self, view: &View) -> Result<Download<T>, Error> {
        if view.dtype() != T::DTYPE {
            return Err(wrong_type("download", view, T::DTYPE));
        }
        if !self.inner().device.machine.engine.computes() {
            return Err(Error::NoValues { label: view.label().to_owned() });
        }
        let what = format!("download of {}", view.label());
        // Not with the mark only: a download that is refused has submitted nothing.
        self.inner().refuse_in_capture(&mut self.inner().lock(), &what)?;
        let (op, landed) = Download::op(view);
        self.launch(op)?;
        Ok(Download::new(self.device(), view.label(), landed, self.inner().mark(&what)?))
    }

    /// A trace is being recorded: whatever [`Stream::note`] needs may be made.
    pub fn is_traced(&self) -> bool {
        self.inner().device.machine.tracer.is_on()
    }

    /// Says in the trace what the host is doing at this point of the stream. Costs one load when there is none; then
    /// `note` is not made. Nothing is said while the stream captures: nothing is done then.
    pub fn note(&self, note: impl FnOnce() -> Note) {
        let inner = self.inner();
        let tracer = &inner.device.machine.tracer;
        if tracer.is_on() {
            let submit = inner.lock();
            if submit.capture.is_some() {
                return;
            }
            tracer.note(inner.device.rank, Some((inner.index, submit.next)), note);
        }
    }

    /// The host waits for all that was submitted to this stream.
    ///
    /// # Errors
    /// The device's sticky error; [`Error::Timeout`] or [`Error::Deadlock`]; [`Error::HostWaitInCapture`] while the
    /// stream captures, and the capture is invalid then.
    pub fn synchronize(&self) -> Result<(), Error> {
        let inner = self.inner();
        inner.device.check()?;
        let (mark, on) = inner.mark(&inner.name)?;
        let waited = inner.device.wait(&mark, Awaited::Stream(&inner.name), on);
        inner.inbox.sweep();
        waited
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let how = if std::thread::panicking() { Departure::Panicked } else { Departure::Dropped };
        self.inner.set_dropped(how);
        self.inner.device.machine.engine.close(&self.inner);
    }
}

pub(crate) fn never_recorded(stream: &StreamInner, event: &Event) -> Error {
    let (rank, stream, event) = (stream.device.rank, stream.name.clone(), event.name().to_owned());
    Error::NeverRecorded { rank, stream, event }
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
