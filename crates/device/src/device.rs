//! One rank's device: its memory, its streams, its first failure.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use crate::{
    Allocation, DType, Departure, Error, Event, GraphUse, Machine, MemoryKind, Note, OpRef, Position, Shape, Stream,
    TraceEvent, View,
    capture::Capturing,
    cpu::Claims,
    engine::{Awaited, Waited},
    graph::GraphCounters,
    joint::JointRef,
    machine::MachineInner,
    queue::{Mark, OpAt, StreamInner},
};

/// Streams, events, memory and ids of one rank. Cloning gives another handle of the same device.
#[derive(Clone)]
pub struct Device(Arc<Owner>);

/// Shared by all handles of a device, of its streams and of its events: when it goes, the rank is free again, also if
/// a worker still holds what it has just finished.
pub(crate) struct Owner(Arc<DeviceInner>);

pub(crate) struct DeviceInner {
    pub(crate) machine: Arc<MachineInner>,
    pub(crate) rank: u32,
    failed: AtomicBool,
    error: Mutex<Option<Error>>,
    pub(crate) claims: Claims,
    allocations: AtomicU32,
    ledger: Mutex<Vec<Weak<Allocation>>>,
    streams: Mutex<Streams>,
    pub(crate) capturing: Arc<Capturing>,
    pub(crate) graphs: Arc<GraphCounters>,
    /// What its memory is known by: ranks are not enough, two machines can have the same.
    pub(crate) identity: Arc<()>,
}

#[derive(Default)]
struct Streams {
    names: Vec<String>,
    live: Vec<Weak<StreamInner>>,
}

/// One piece of memory of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Number of the allocation.
    pub id: u32,
    /// Label.
    pub label: String,
    /// Bytes.
    pub bytes: usize,
    /// What it is for.
    pub kind: MemoryKind,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|poison| poison.into_inner())
}

impl Owner {
    /// Tells the trace what the streams that are open are called.
    pub(crate) fn name_streams(&self) {
        let streams = lock(&self.0.streams);
        for stream in streams.live.iter().filter_map(Weak::upgrade) {
            let note = || Note::Stream { stream: stream.index, name: stream.name.clone().into() };
            self.0.machine.tracer.note(self.0.rank, None, note);
        }
    }
}

impl DeviceInner {
    pub(crate) fn new(machine: Arc<MachineInner>, rank: u32) -> Self {
        DeviceInner {
            machine,
            rank,
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
            claims: Claims::default(),
            allocations: AtomicU32::new(0),
            ledger: Mutex::default(),
            streams: Mutex::default(),
            capturing: Arc::default(),
            graphs: Arc::default(),
            identity: Arc::default(),
        }
    }

    #[inline]
    pub(crate) fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// The sticky error, if there is one.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.failed() { Err(self.sticky_error()) } else { Ok(()) }
    }

    #[cold]
    fn sticky_error(&self) -> Error {
        lock(&self.error).clone().expect("BUG: failed without an error")
    }

    /// The rank in which the failure began, and what its groups are told; `None` while there is no failure.
    pub(crate) fn root_failure(&self) -> Option<(u32, Departure)> {
        self.check().err().map(|error| match error {
            Error::PeerGone { rank, how, .. } => (rank, how),
            Error::Cancelled { .. } => (self.rank, Departure::Dropped),
            error => (self.rank, Departure::Failed(error.chain())),
        })
    }

    /// True when this is the first failure. Groups are told by the caller.
    pub(crate) fn set_error(&self, error: Error) -> bool {
        let mut slot = lock(&self.error);
        let first = slot.is_none();
        if first {
            tracing::debug!(rank = self.rank, error = %error, "device.set_error");
            *slot = Some(error);
            self.failed.store(true, Ordering::Release);
        }
        first
    }

    pub(crate) fn op_ref(&self, op: &OpAt) -> OpRef {
        self.op_ref_of(op.op().name, op.op().site.as_str(), op.position())
    }

    pub(crate) fn joint_ref(&self, joint: &JointRef) -> OpRef {
        self.op_ref_of(joint.body().name(), joint.body().site.as_str(), joint.position())
    }

    /// The operation `name` at a place of this device.
    pub(crate) fn op_ref_of(&self, name: &'static str, site: &str, at: Position) -> OpRef {
        let stream = lock(&self.streams).names[at.stream as usize].clone();
        OpRef { name, site: site.to_owned(), rank: self.rank, stream, seq: at.seq, node: at.node }
    }

    /// `on` is where `mark` is, for traces.
    pub(crate) fn wait(&self, mark: &Arc<Mark>, what: Awaited<'_>, on: Position) -> Result<(), Error> {
        let machine = &self.machine;
        match machine.engine.wait_host(self, mark, what) {
            // Now, and not before: what other threads of this rank submit meanwhile is behind nothing.
            Waited::Done => machine.tracer.add(self.rank, || TraceEvent::HostWait {
                rank: self.rank,
                what: what.name().to_owned().into(),
                on,
            }),
            Waited::NothingMoved => {
                let after = machine.options.timeout;
                let pending = machine.pending();
                let error = Error::Timeout { rank: self.rank, what: what.to_string(), after, pending };
                machine.fail(self, error);
                machine.engine.stop_waiting_for(self);
            }
        }
        self.check()
    }
}

impl Device {
    pub(crate) fn new(inner: DeviceInner) -> Device {
        Device(Arc::new(Owner(Arc::new(inner))))
    }

    pub(crate) fn inner(&self) -> &Arc<DeviceInner> {
        &self.0.0
    }

    pub(crate) fn owner(&self) -> Weak<Owner> {
        Arc::downgrade(&self.0)
    }

    /// The rank.
    pub fn rank(&self) -> u32 {
        self.inner().rank
    }

    /// The machine.
    pub fn machine(&self) -> Machine {
        Machine(self.inner().machine.clone())
    }

    /// Opens a stream.
    ///
    /// # Errors
    /// The sticky error.
    pub fn stream(&self, name: &str) -> Result<Stream, Error> {
        self.inner().check()?;
        let mut streams = lock(&self.inner().streams);
        let index = streams.names.len() as u32;
        streams.names.push(name.to_owned());
        let inner = Arc::new(StreamInner::new(self.inner().clone(), index, name.to_owned()));
        streams.live.retain(|s| s.strong_count() > 0);
        streams.live.push(Arc::downgrade(&inner));
        drop(streams);
        self.note(|| Note::Stream { stream: index, name: name.to_owned().into() });
        self.inner().machine.engine.open(&inner)?;
        Ok(Stream::open(inner, self.clone()))
    }

    /// Names of all streams that were opened, by number, as in traces; those that are gone too.
    pub fn stream_names(&self) -> Vec<String> {
        lock(&self.inner().streams).names.clone()
    }

    /// Makes an event, not recorded yet.
    pub fn event(&self, name: &str) -> Event {
        Event::new(self.clone(), name)
    }

    /// Memory for `shape`, 128-byte aligned, filled as [`Options::fresh`](crate::Options::fresh) says. It is freed
    /// with its last view.
    ///
    /// # Errors
    /// The sticky error; [`Error::Reshape`] with more than [`Shape::MAX`] dimensions or [`Shape::MAX_NUMEL`]
    /// elements; [`Error::OutOfMemory`]; [`Error::AllocationInCapture`] while a stream of the device captures, and all
    /// its captures are invalid then.
    pub fn alloc(&self, label: &str, shape: &[usize], dtype: DType, kind: MemoryKind) -> Result<View, Error> {
        self.alloc_for(label, shape, dtype, kind, None)
    }

    /// As [`Device::alloc`]; with `only_stream`, operations of other streams are refused.
    pub(crate) fn alloc_for(
        &self,
        label: &str,
        shape: &[usize],
        dtype: DType,
        kind: MemoryKind,
        only_stream: Option<(u32, String)>,
    ) -> Result<View, Error> {
        self.inner().check()?;
        let shape = Shape::new(shape).ok_or_else(|| Error::Reshape {
            label: label.to_owned(),
            from: Vec::new(),
            to: shape.to_vec(),
        })?;
        let bytes = shape.numel() * dtype.size_bytes();
        self.inner().capturing.refuse(|graph| Error::AllocationInCapture {
            rank: self.rank(),
            label: label.to_owned(),
            bytes,
            graph: graph.to_owned(),
        })?;
        let machine = &self.inner().machine;
        let storage = machine.engine.alloc(self.inner(), label, bytes)?;
        let alloc = Arc::new(Allocation {
            rank: self.inner().rank,
            id: self.inner().allocations.fetch_add(1, Ordering::Relaxed),
            label: label.into(),
            bytes,
            kind,
            storage,
            only_stream,
            owner: self.inner().identity.clone(),
        });
        let mut ledger = lock(&self.inner().ledger);
        ledger.retain(|a| a.strong_count() > 0);
        ledger.push(Arc::downgrade(&alloc));
        Ok(View::whole(alloc, shape, dtype))
    }

    /// All memory that lives, in the order of allocation.
    pub fn memory(&self) -> Vec<MemoryUse> {
        let live = lock(&self.inner().ledger).iter().filter_map(Weak::upgrade).collect::<Vec<_>>();
        live.iter().map(|a| MemoryUse { id: a.id, label: a.label.to_string(), bytes: a.bytes, kind: a.kind }).collect()
    }

    /// Bytes that live, by what they are for.
    pub fn memory_by_kind(&self) -> BTreeMap<MemoryKind, usize> {
        let mut sums = BTreeMap::new();
        for piece in self.memory() {
            *sums.entry(piece.kind).or_default() += piece.bytes;
        }
        sums
    }

    /// The host waits for all that was submitted to any stream of this device.
    ///
    /// # Errors
    /// The sticky error: the root cause where there is one. [`Error::Timeout`] or [`Error::Deadlock`], which name
    /// who is missing. [`Error::HostWaitInCapture`] while a stream of the device captures, and all its captures are
    /// invalid then.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.inner().check()?;
        self.inner().capturing.refuse(|graph| {
            let (rank, what) = (self.rank(), "all streams".to_owned());
            Error::HostWaitInCapture { rank, what, graph: graph.to_owned() }
        })?;
        let live: Vec<Arc<StreamInner>> = lock(&self.inner().streams).live.iter().filter_map(Weak::upgrade).collect();
        // A stream whose last handle is gone has said what it did not run.
        let live: Vec<_> = live.into_iter().filter(|s| !s.is_dropped()).collect();
        let marks = live.iter().map(|s| Ok((s.mark(&s.name)?, s))).collect::<Result<Vec<_>, Error>>()?;
        for ((mark, on), stream) in marks {
            self.inner().wait(&mark, Awaited::Stream(&stream.name), on)?;
            stream.inbox.sweep();
        }
        self.inner().check()
    }

    /// Graphs and executables that somebody could still launch or that run, for an audit of what is left.
    pub fn graphs(&self) -> GraphUse {
        self.inner().graphs.read(self.inner().capturing.count())
    }

    /// The sticky error, if there is one.
    pub fn error(&self) -> Option<Error> {
        self.inner().check().err()
    }

    pub(crate) fn wait_host(&self, mark: &Arc<Mark>, what: Awaited<'_>, on: Position) -> Result<(), Error> {
        self.inner().wait(mark, what, on)
    }

    /// Says in the trace what the host is doing. Costs one load when there is none; then `note` is not made.
    pub fn note(&self, note: impl FnOnce() -> Note) {
        self.inner().machine.tracer.note(self.rank(), None, note);
    }
}
