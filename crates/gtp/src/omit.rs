//! What mutation tests leave out.

use std::sync::atomic::{AtomicU32, Ordering};

use device::{Event, Stream};

use crate::GtpError;

/// Something that a mutation test leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[doc(hidden)]
pub enum Record {
    /// The event behind a gather.
    Gathered,
    /// The event behind a use.
    Used,
    /// The event behind what writes a gradient.
    Written,
    /// The event behind a reduce-scatter.
    Reduced,
    /// The events of the ends of lanes.
    Tails,
    /// The point of the computing stream that lanes begin behind.
    Fork,
    /// The event behind a launch.
    Launched,
    /// The gate behind the uses and gathers of a graph.
    Drained,
    /// The gates behind its reductions.
    Gates,
    /// A planned gather itself.
    Gather,
    /// A gather for a use whose planned one is not there.
    Repair,
    /// Asking for the publication of what is gathered.
    Ready,
    /// Telling that a shard has been read.
    Release,
    /// Telling that a gradient has been added.
    Landed,
}

impl Record {
    /// All of them.
    pub const ALL: [Record; 14] = [
        Record::Gathered,
        Record::Used,
        Record::Written,
        Record::Reduced,
        Record::Tails,
        Record::Fork,
        Record::Launched,
        Record::Drained,
        Record::Gates,
        Record::Gather,
        Record::Repair,
        Record::Ready,
        Record::Release,
        Record::Landed,
    ];
}

/// What is left out: nothing, but in mutation tests.
#[derive(Default)]
pub(crate) struct Omitted(AtomicU32);

impl Omitted {
    pub(crate) fn add(&self, record: Record) {
        self.0.fetch_or(1 << record as u32, Ordering::Relaxed);
    }

    pub(crate) fn does(&self, record: Record) -> bool {
        self.0.load(Ordering::Relaxed) & (1 << record as u32) == 0
    }

    pub(crate) fn record(&self, record: Record, stream: &Stream, event: &Event) -> Result<(), GtpError> {
        if self.does(record) {
            stream.record(event)?;
        }
        Ok(())
    }

    pub(crate) fn record_external(&self, record: Record, stream: &Stream, event: &Event) -> Result<(), GtpError> {
        if self.does(record) {
            stream.record_external(event)?;
        }
        Ok(())
    }
}
