//! Events: points in a stream, or in a launch, that others wait for.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard},
};

use crate::{
    Device, Error, Label, Position, capture::CapturedPoint, device::DeviceInner, engine::Awaited, queue::Mark,
};

/// The record that a wait binds to.
#[derive(Clone)]
pub(crate) struct Bound {
    pub(crate) mark: Arc<Mark>,
    pub(crate) at: Position,
    /// Counts the records of this event from 1.
    pub(crate) generation: u64,
}

/// Where an event was recorded last.
#[derive(Clone)]
pub(crate) enum Recorded {
    Never,
    /// On a stream, or by an external record of a launch.
    At(Bound),
    /// In a capture: it orders the streams of this capture and nothing else.
    Captured(CapturedPoint),
}

/// Marks a point in a stream. Recording it again moves it; a wait binds to the last record issued before the wait.
///
/// Belongs to one device. Cloning gives another handle of the same event.
#[derive(Clone)]
pub struct Event(Arc<EventInner>);

struct EventInner {
    device: Device,
    name: Arc<str>,
    latest: Mutex<Latest>,
}

struct Latest {
    recorded: Recorded,
    generation: u64,
}

impl Event {
    pub(crate) fn new(device: Device, name: &str) -> Event {
        let latest = Mutex::new(Latest { recorded: Recorded::Never, generation: 0 });
        Event(Arc::new(EventInner { device, name: name.into(), latest }))
    }

    /// Name given when the event was made.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The name, shared, for traces.
    pub fn label(&self) -> Label {
        (&self.0.name).into()
    }

    /// Both are handles of one event.
    pub fn same_as(&self, other: &Event) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// How often it has been recorded. Records inside a capture do not count; external ones do, at every launch.
    pub fn generation(&self) -> u64 {
        self.lock().generation
    }

    /// Whether what precedes the last record is done. An event never recorded is not, nor one that was last recorded
    /// inside a capture. Asking breaks no capture.
    pub fn is_done(&self) -> bool {
        matches!(&self.lock().recorded, Recorded::At(bound) if bound.mark.is_done())
    }

    /// The host waits for the last record.
    ///
    /// # Errors
    /// [`Error::NeverRecorded`]; [`Error::CapturedEvent`] when it was last recorded inside a capture, which is invalid
    /// then if it is still open; the device's sticky error; [`Error::Timeout`] or [`Error::Deadlock`].
    pub fn synchronize(&self) -> Result<(), Error> {
        let bound = self.bound_for("(host)")?;
        self.0.device.wait_host(&bound.mark, Awaited::Event(self.name()), bound.at)
    }

    fn lock(&self) -> MutexGuard<'_, Latest> {
        self.0.latest.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    pub(crate) fn recorded(&self) -> Recorded {
        self.lock().recorded.clone()
    }

    /// The record that a wait on `stream` binds to now.
    pub(crate) fn bound_for(&self, stream: &str) -> Result<Bound, Error> {
        let names = || (self.0.device.rank(), stream.to_owned(), self.name().to_owned());
        match self.recorded() {
            Recorded::At(bound) => Ok(bound),
            Recorded::Never => {
                let (rank, stream, event) = names();
                Err(Error::NeverRecorded { rank, stream, event })
            }
            Recorded::Captured(point) => {
                let (rank, stream, event) = names();
                let graph = point.capture.graph().to_owned();
                let error = Error::CapturedEvent { rank, stream, event, graph };
                Err(point.capture.violate(error))
            }
        }
    }

    /// Issues a record; tells its generation.
    pub(crate) fn record(&self, bound: impl FnOnce(u64) -> Bound) -> u64 {
        let mut latest = self.lock();
        latest.generation += 1;
        latest.recorded = Recorded::At(bound(latest.generation));
        latest.generation
    }

    pub(crate) fn record_captured(&self, point: CapturedPoint) {
        self.lock().recorded = Recorded::Captured(point);
    }

    pub(crate) fn check_owner(&self, device: &Arc<DeviceInner>) -> Result<(), Error> {
        if Arc::ptr_eq(device, self.0.device.inner()) {
            return Ok(());
        }
        let (what, owner) = (format!("event '{}'", self.name()), self.0.device.rank());
        Err(Error::Foreign { what, owner, used_by: device.rank })
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event('{}' of rank {})", self.name(), self.0.device.rank())
    }
}
