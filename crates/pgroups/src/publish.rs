//! What stands behind a parameter: who publishes its values, who waits for its gradient.
//!
//! Neither side knows the other. A reader asks for a parameter through a [`Turn`](crate::Turn) and never learns
//! whether a publisher exists; a publisher learns that it is asked, and when a read has ended.

use device::{Event, Stream};

use crate::{error::PgError, param::Param, weights::Keep};

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

/// Whoever reduces a parameter's `main_grad`: says when it may be written, and learns that a use's gradient is in it.
///
/// Contributions come in pairs: [`open`](Landed::open), submit what adds, [`landed`](Landed::landed).
pub trait Landed: Send + Sync {
    /// What a parameter's first contribution of a microbatch does with what `main_grad` holds, told without changing
    /// anything: what a captured pass bakes in. Later ones of the same microbatch add. None: it does not say.
    fn keep(&self, param: &Param) -> Option<Keep>;

    /// A contribution to `param` is about to be submitted to `stream`: orders it behind everything that still reads or
    /// writes the gradient, and says what becomes of what it holds. None: it does not say.
    ///
    /// # Errors
    /// The backend's; those of other crates through [`PgError::backend`].
    fn open(&self, param: &Param, stream: &Stream) -> Result<Option<Keep>, PgError>;

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

    /// A gradient of `param` is about to be written on `stream`; says what becomes of what is there, as [`Turn::open`]
    /// does. No sink is asked to open: that would order the capturing stream behind work outside the graph.
    ///
    /// A recorder notes the use, in order, as an in-gate of its graph, and answers for the sink: with [`Landed::keep`]
    /// for a parameter's first use in the microbatch, counting those in graphs captured before, else with
    /// [`Keep::All`]. Before each launch of the graph, each noted use is opened with [`Landed::open`] on the launching
    /// stream, so that the graph runs behind the gates; an answer other than the captured one means that the graph is
    /// replayed out of its place, and it is refused. After the launch, as many gradients land.
    ///
    /// # Errors
    /// As [`Recorder::read`].
    ///
    /// [`Turn::open`]: crate::Turn::open
    fn open(&mut self, param: &Param, stream: &Stream) -> Result<Option<Keep>, PgError>;

    /// A gradient of `param` has landed on `stream`.
    ///
    /// # Errors
    /// As [`Recorder::read`].
    fn landed(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError>;
}
