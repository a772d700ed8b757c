//! Marks on a card.

use std::sync::Arc;

use super::{
    CudaError,
    card::{Card, RawEvent, RawStream, lock},
};

/// Where a mark is on a card.
pub(crate) enum Point {
    /// Nowhere: what it marks did not get there, and whoever waits finds the error.
    Reached,
    Event(Arc<CardEvent>),
}

impl Point {
    pub(crate) fn is_reached(&self) -> bool {
        match self {
            Point::Reached => true,
            // On a broken card nothing is reached any more; nobody may wait for that.
            Point::Event(event) => event.card.is_reached(event.raw).unwrap_or(true),
        }
    }

    /// What a stream or a node waits for, if it must wait for anything.
    pub(super) fn raw(&self) -> Option<RawEvent> {
        match self {
            Point::Reached => None,
            Point::Event(event) => Some(event.raw),
        }
    }
}

/// An event of the card with one record that somebody may still ask for: whoever may holds it. It is recorded again when
/// nobody does, by the gate that has it or, when it goes, by whoever takes it from the pool. Streams and launches that
/// were told to wait for it are bound to its record by then, reached or not.
pub(crate) struct CardEvent {
    card: Arc<Card>,
    raw: RawEvent,
}

impl CardEvent {
    pub(super) fn new(card: &Arc<Card>) -> Result<CardEvent, CudaError> {
        Ok(CardEvent { card: card.clone(), raw: card.take_event()? })
    }

    pub(super) fn record(card: &Arc<Card>, stream: RawStream) -> Result<CardEvent, CudaError> {
        let event = CardEvent::new(card)?;
        card.record(event.raw, stream)?;
        Ok(event)
    }

    pub(super) fn raw(&self) -> RawEvent {
        self.raw
    }
}

impl Drop for CardEvent {
    fn drop(&mut self) {
        lock(&self.card.events).push(self.raw);
    }
}
