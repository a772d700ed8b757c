//! Events: points in a stream that others wait for.

use std::sync::{Arc, Mutex};

use crate::{Device, Error, Label, Position, engine::Awaited, stream::Mark};

/// The record that a wait binds to.
#[derive(Clone)]
pub(crate) struct Bound {
    pub(crate) mark: Arc<Mark>,
    /// Index of the recording stream.
    pub(crate) stream: u32,
    /// Position in the recording stream.
    pub(crate) seq: u64,
    /// Counts the records of this event from 1.
    pub(crate) generation: u64,
}

impl Bound {
    pub(crate) fn position(&self) -> Position {
        Position { stream: self.stream, seq: self.seq, node: None }
    }
}

/// Marks a point in a stream. Recording it again moves it; a wait binds to the last record issued before the wait.
///
/// Belongs to one device. Cloning gives another handle of the same event.
#[derive(Clone)]
pub struct Event(pub(crate) Arc<EventInner>);

pub(crate) struct EventInner {
    pub(crate) device: Device,
    pub(crate) name: Arc<str>,
    pub(crate) latest: Mutex<Option<Bound>>,
}

impl Event {
    /// Name given when the event was made.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The name, shared, for traces.
    pub fn label(&self) -> Label {
        (&self.0.name).into()
    }

    /// How often it has been recorded.
    pub fn generation(&self) -> u64 {
        self.bound().map_or(0, |b| b.generation)
    }

    /// Whether what precedes the last record is done. An event never recorded is not.
    pub fn is_done(&self) -> bool {
        self.bound().is_some_and(|b| b.mark.is_done())
    }

    /// The host waits for the last record.
    ///
    /// # Errors
    /// [`Error::NeverRecorded`]; the device's sticky error; [`Error::Timeout`] or [`Error::Deadlock`].
    pub fn synchronize(&self) -> Result<(), Error> {
        let bound = self.bound().ok_or_else(|| Error::NeverRecorded {
            rank: self.0.device.rank(),
            stream: "(host)".into(),
            event: self.name().to_owned(),
        })?;
        self.0.device.wait_host(&bound.mark, Awaited::Event(self.name()), bound.position())
    }

    pub(crate) fn bound(&self) -> Option<Bound> {
        self.0.latest.lock().unwrap_or_else(|poison| poison.into_inner()).clone()
    }
}
