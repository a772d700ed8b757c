//! When traced work ran, from events of its card: one before it and one behind it, read when the card has passed both.
//! Nothing is timed while nothing is traced.

use std::sync::{Arc, Mutex};

use super::{
    CudaEngine, CudaError,
    card::{Card, lock},
    stopwatch::Stopwatch,
    stream::StreamOnCard,
};
use crate::{
    TraceEvent,
    queue::{Item, StreamInner},
    trace::Tracer,
};

/// A moment that a card and the host both know.
pub(super) struct Zero {
    watch: Stopwatch,
    card: u32,
    /// Which recording it is of.
    recording: u64,
    /// Nanoseconds since the recording began.
    at: u64,
}

/// Those of all cards, of the recording that goes on.
#[derive(Default)]
pub(super) struct Zeros(Mutex<Vec<Arc<Zero>>>);

impl Zeros {
    /// That of `card` in the recording that goes on, made by who needs it first. The card's own stream has nothing else
    /// to do then, so its record is reached at once.
    fn of(&self, card: &Arc<Card>, tracer: &Tracer, recording: u64) -> Result<Arc<Zero>, CudaError> {
        let mut zeros = lock(&self.0);
        zeros.retain(|zero| zero.recording == recording);
        if let Some(zero) = zeros.iter().find(|zero| zero.card == card.ordinal) {
            return Ok(zero.clone());
        }
        let watch = Stopwatch::new(card)?;
        let before = tracer.now();
        card.record_aside(watch.begin)?;
        let at = before.midpoint(tracer.now());
        let zero = Arc::new(Zero { watch, card: card.ordinal, recording, at });
        zeros.push(zero.clone());
        Ok(zero)
    }
}

/// The time of what was sent between its beginning and its end.
pub(super) struct Interval {
    watch: Stopwatch,
    zero: Arc<Zero>,
}

impl Interval {
    /// Ends it behind what was sent to the stream by now.
    pub(super) fn end(self, on: &StreamOnCard) -> Result<Interval, CudaError> {
        on.card.record(self.watch.end, on.raw)?;
        Ok(self)
    }

    /// Nanoseconds since the recording began, when the card has passed its end.
    fn read(&self) -> Result<(u64, u64), CudaError> {
        let from_zero = |event| self.zero.watch.nanoseconds_to(event).map(|behind| self.zero.at + behind);
        Ok((from_zero(self.watch.begin)?, from_zero(self.watch.end)?))
    }
}

impl CudaEngine {
    /// From here on in `stream`, if somebody traces. The context is current.
    pub(super) fn begin_interval(
        &self,
        stream: &StreamInner,
        on: &StreamOnCard,
    ) -> Result<Option<Interval>, CudaError> {
        let tracer = &stream.device.machine.tracer;
        let Some(recording) = tracer.recording() else { return Ok(None) };
        let (zero, watch) = (self.zeros.of(&on.card, tracer, recording)?, Stopwatch::new(&on.card)?);
        on.card.record(watch.begin, on.raw)?;
        Ok(Some(Interval { watch, zero }))
    }
}

/// Tells when `item`, which the card has passed, ran. A card that is broken tells nothing.
pub(super) fn tell(stream: &StreamInner, item: &Item, interval: &Interval) {
    let (name, seq) = match item {
        Item::Op(body) => (body.op.name.into(), body.seq),
        Item::Joint(call) => (call.body.name().into(), call.seq),
        Item::Launch(Some(launch)) => (launch.exec.graph.trace.name.clone(), launch.seq),
        Item::Record(_) | Item::Wait(_) | Item::Launch(None) => return,
    };
    let Ok((start, end)) = interval.read() else { return };
    let (rank, stream_index, node) = (stream.device.rank, stream.index, None);
    let tracer = &stream.device.machine.tracer;
    tracer.add(rank, || TraceEvent::Ran { rank, stream: stream_index, seq, node, name, start, end });
}
