//! One use of a communicator at a time: a call, or a launch with calls, begins behind the end of the use before.
//!
//! NCCL keeps that order itself only among calls that are on no graph. For graphs it would put a wait and a record of an event
//! around each captured call; with ranks that share a card such nodes stop each other, so it is told to leave them out.

use std::sync::{Arc, Mutex};

use super::{
    CudaError,
    card::{RawStream, lock},
    clique::Seat,
    stream::wait_for,
};
use crate::queue::Mark;

/// The last use of one member's end: its stream, and the mark behind it there. Read and set by whoever has the turn.
#[derive(Default)]
pub(super) struct LastUse(Mutex<Option<(RawStream, Arc<Mark>)>>);

impl Seat {
    /// Lets `stream` wait for the use before the one that is submitted next. The card's context is current.
    pub(super) fn wait_for_last_use(&self, stream: RawStream) -> Result<(), CudaError> {
        match &*lock(&self.last.0) {
            // A stream keeps its own order.
            Some((before, mark)) if before.0 != stream.0 => wait_for(&self.card, stream, mark),
            _ => Ok(()),
        }
    }

    /// `mark` is behind what was submitted last, on `stream`. Gives back the one before.
    pub(super) fn used(&self, stream: RawStream, mark: &Arc<Mark>) -> Option<Arc<Mark>> {
        lock(&self.last.0).replace((stream, mark.clone())).map(|(_, before)| before)
    }
}
