//! What stands behind a parameter: who publishes its values, who waits for its gradient.
//!
//! Neither side knows the other. A reader asks for a parameter through a [`Turn`](crate::Turn) and never learns
//! whether a publisher exists; a publisher learns that it is asked, and when a read has ended.

use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

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

/// Whether asking a publisher would do nothing: its last write is published, and its first reader has asked. Whoever
/// replays graphs keeps it and looks at it with one load, without keeping the publisher alive.
#[derive(Clone, Debug, Default)]
pub struct Quiet(Arc<AtomicBool>);

impl Quiet {
    /// In this state.
    #[must_use]
    pub fn new(quiet: bool) -> Quiet {
        Quiet(Arc::new(AtomicBool::new(quiet)))
    }

    /// Asking would do nothing.
    #[must_use]
    pub fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// For the publisher.
    pub fn set(&self, quiet: bool) {
        self.0.store(quiet, Ordering::Release);
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

    /// As long as this is quiet, nobody need call [`Publish::issue`]. A publisher without one is asked every time.
    fn quiet(&self) -> Option<Quiet> {
        None
    }

    /// Recorded behind every publication; the same event for life. Traces know the publisher by its name, which no
    /// other publisher of the device may have.
    fn event(&self) -> &Event;

    /// A read has ended. The first write of the next epoch waits for all of them.
    ///
    /// # Errors
    /// As [`Publish::issue`].
    fn done(&self, after: After<'_>) -> Result<(), PgError>;
}

/// Waits for the gradient of a parameter: gives its `main_grad` away to each use, and learns when it is in there.
pub trait Landed: Send + Sync {
    /// Orders `stream` behind whatever still needs what the gradient holds, so that a use may write it there. What the
    /// use does with what it finds.
    ///
    /// # Errors
    /// The backend's; those of other crates through [`PgError::backend`].
    fn open(&self, param: &Param, stream: &Stream) -> Result<Keep, PgError>;

    /// What the first use of a captured pass does with what the gradient holds: decided on the device, replay by
    /// replay. Changes nothing.
    fn first_use(&self) -> Keep;

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

    /// A use on `stream` is about to write the gradient of `param`. What it does with what is there; none: as it
    /// likes, because nobody waits for the gradient.
    ///
    /// # Errors
    /// As [`Recorder::read`].
    fn open(&mut self, param: &Param, stream: &Stream) -> Result<Option<Keep>, PgError>;

    /// A gradient of `param` has landed on `stream`.
    ///
    /// # Errors
    /// As [`Recorder::read`].
    fn landed(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError>;

    /// What is captured counts on something beside parameters, and leaves something: both are `what`'s at each replay.
    ///
    /// # Errors
    /// As [`Recorder::read`].
    fn hand_over(&mut self, what: Arc<dyn HandOver>) -> Result<(), PgError>;
}

/// What captured work finds and what it leaves beside parameters, such as weights that one graph gathers and the next
/// one uses. Held by the graph; it holds its backend weakly.
pub trait HandOver: Send + Sync {
    /// Ahead of each launch on `stream`, behind its publications: makes true what the captured work counts on, and
    /// orders `stream` behind everything under way that touches the same memory.
    ///
    /// # Errors
    /// The backend's; those of other crates through [`PgError::backend`]. Nothing is launched then.
    fn prepare(&self, stream: &Stream) -> Result<(), PgError>;

    /// Behind each launch on `stream`.
    ///
    /// # Errors
    /// As [`HandOver::prepare`].
    fn apply(&self, stream: &Stream) -> Result<(), PgError>;
}

/// Whoever keeps account on the host of what was submitted (epochs, counters, events): what a capture of a whole step
/// needs of it, because captured code must leave no trace there, and each replay must leave that of a step.
pub trait HostState: Send + Sync {
    /// The account as it is.
    fn save(&self) -> Box<dyn Any + Send + Sync>;

    /// Puts back what [`HostState::save`] gave.
    fn restore(&self, saved: &(dyn Any + Send + Sync));

    /// Makes the account that of a step's begin, for a capture: a step must publish by itself what it reads.
    fn begin_step(&self);

    /// What has been added to the account since `before` was saved.
    fn since(&self, before: &(dyn Any + Send + Sync)) -> Box<dyn Any + Send + Sync>;

    /// Tells a trace, ahead of a launch on `stream`, what [`HostState::since`] gave. Changes nothing.
    fn announce(&self, effects: &(dyn Any + Send + Sync), stream: &Stream);

    /// Adds what [`HostState::since`] gave, as if it had been submitted once more: to `stream`, which is behind it.
    fn add(&self, effects: &(dyn Any + Send + Sync), stream: &Stream);

    /// Orders `stream` behind everything on the account that is still under way.
    ///
    /// # Errors
    /// The backend's; those of other crates through [`PgError::backend`].
    fn join(&self, stream: &Stream) -> Result<(), PgError>;

    /// Records every event of the account behind what was submitted to `stream` so far.
    ///
    /// # Errors
    /// As [`HostState::join`].
    fn mark(&self, stream: &Stream) -> Result<(), PgError>;
}
