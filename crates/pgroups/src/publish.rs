//! What stands behind a parameter: who publishes its values, who waits for its gradient.
//!
//! Neither side knows the other. A reader asks for a parameter through a [`Turn`](crate::Turn) and never learns
//! whether a publisher exists; a publisher learns that it is asked, and when a read has ended.

use device::{Event, Stream};

use crate::{error::PgError, param::Param};

/// How often a publisher's values were written, and up to which write they were published.
///
/// Epochs count submitted writes: optimizer steps (one that the device skips too), initial values, loads. Initial
/// values and full loads count as issued; a load of shards only as written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Epochs {
    /// The last write.
    pub written: u64,
    /// The last write whose publication was started.
    pub issued: u64,
}

impl Epochs {
    /// The newest values are, or will be, where readers look.
    #[must_use]
    pub const fn is_current(self) -> bool {
        self.issued >= self.written
    }
}

/// Behind what something has happened.
#[derive(Clone, Copy)]
pub enum After<'a> {
    /// All that was submitted to the stream so far.
    Stream(&'a Stream),
    /// The last record of the event: an out-gate of a graph.
    Gate(&'a Event),
}

/// Makes the newest values of some parameters readable: one per bucket of a backend, attached to each of its
/// parameters.
///
/// Parameters hold it strongly; it holds what it publishes weakly, so a parameter keeps no replaced backend alive.
pub trait Publish: Send + Sync {
    /// Epochs of what it publishes.
    fn epochs(&self) -> Epochs;

    /// Starts the publication if this epoch's has not been started, with everything that must follow it; returns at
    /// once, without waiting for the device, and costs one load if it has. Starts nothing where the caller has taken
    /// over the schedule.
    ///
    /// # Errors
    /// The backend's; those of other crates through [`PgError::backend`].
    fn issue(&self) -> Result<(), PgError>;

    /// Recorded behind every publication; the same event for life.
    fn event(&self) -> &Event;

    /// A read has ended. The first write of the next epoch waits for all of them.
    ///
    /// # Errors
    /// As [`Publish::issue`].
    fn done(&self, after: After<'_>) -> Result<(), PgError>;
}

/// Learns that a use's gradient is in a parameter's `main_grad`.
pub trait Landed: Send + Sync {
    /// The gradient of one use of `param` has been added.
    ///
    /// # Errors
    /// The backend's; those of other crates through [`PgError::backend`].
    fn landed(&self, param: &Param, after: After<'_>) -> Result<(), PgError>;
}

/// Takes down what a pass does, instead of doing it: a capture in progress.
pub trait Recorder {
    /// A forward pass reads `param` on `stream`. Backward and recompute are not told: they read what forward read.
    ///
    /// # Errors
    /// The recorder's; those of other crates through [`PgError::backend`].
    fn read(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError>;

    /// A read of `param` on `stream` has ended, in any pass.
    ///
    /// # Errors
    /// As [`Recorder::read`].
    fn done(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError>;

    /// A gradient of `param` has landed on `stream`.
    ///
    /// # Errors
    /// As [`Recorder::read`].
    fn landed(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError>;
}
