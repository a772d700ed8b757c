//! What streams wait for: events that many leave, and the epochs and events of one publication.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use device::{Event, Stream, Why};
use pgroups::{After, Epochs, Quiet};

use crate::DdpError;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Everyone who has done something to a bucket: an event for each stream, recorded anew each time, and the gates of
/// graphs.
pub(crate) struct Crowd {
    name: String,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// By number of the stream.
    streams: Vec<(u32, Event)>,
    /// Kept until someone has waited for them, which then is behind all their records so far.
    gates: Vec<Event>,
    /// Somebody has, and they were forgotten.
    settled: bool,
}

impl Crowd {
    pub(crate) fn new(name: String) -> Crowd {
        Crowd { name, seen: Mutex::default() }
    }

    /// Notes what has happened behind `after`.
    pub(crate) fn note(&self, after: After<'_>) -> Result<(), device::Error> {
        let mut seen = lock(&self.seen);
        let stream = match after {
            After::Gate(gate) => {
                // Its last record is behind those before: a graph never overlaps itself.
                if !seen.gates.iter().any(|known| known.same_as(gate)) {
                    seen.gates.push(gate.clone());
                }
                return Ok(());
            }
            After::Stream(stream) => stream,
        };
        if let Some((_, event)) = seen.streams.iter().find(|(index, _)| *index == stream.index()) {
            return stream.record(event);
        }
        let event = stream.device().event(&format!("{}.{}", self.name, stream.name()));
        stream.record(&event)?;
        seen.streams.push((stream.index(), event));
        Ok(())
    }

    /// Forgets everyone: whoever calls it is behind all of them.
    pub(crate) fn begin_anew(&self) {
        *lock(&self.seen) = Seen::default();
    }

    /// Orders `stream` behind all of it.
    pub(crate) fn wait(&self, stream: &Stream, why: Why) -> Result<(), device::Error> {
        let seen = lock(&self.seen);
        seen.streams.iter().map(|(_, event)| event).chain(&seen.gates).try_for_each(|event| stream.wait(event, why))
    }

    /// As [`Crowd::wait`], and nobody has to wait for those gates again: the stream's next record stands for them.
    pub(crate) fn settle(&self, stream: &Stream, why: Why) -> Result<(), device::Error> {
        self.wait(stream, why)?;
        let mut seen = lock(&self.seen);
        seen.settled |= !seen.gates.is_empty();
        seen.gates.clear();
        Ok(())
    }

    /// As [`Crowd::wait`], also behind gates that were settled: `record` is the one that stands for them.
    pub(crate) fn wait_for_settled(&self, stream: &Stream, record: &Event, why: Why) -> Result<(), device::Error> {
        if lock(&self.seen).settled {
            stream.wait(record, why)?;
        }
        self.wait(stream, why)
    }
}

/// The state of one bucket group's values that readers look at without asking its owner.
pub(crate) struct Gates {
    written: AtomicU64,
    issued: AtomicU64,
    /// This epoch's publication is issued and its first reader has done what first readers do: nothing is left.
    pub(crate) quiet: Quiet,
    /// Recorded behind every publication.
    pub(crate) published: Event,
    /// Reads that have ended.
    pub(crate) releases: Crowd,
}

impl Gates {
    pub(crate) fn new(published: Event, name: &str) -> Gates {
        let releases = Crowd::new(format!("{name}.released"));
        // Initial values count as written and issued.
        let first = AtomicU64::new(1);
        Gates { written: AtomicU64::new(1), issued: first, quiet: Quiet::new(true), published, releases }
    }

    /// One load.
    pub(crate) fn is_quiet(&self) -> bool {
        self.quiet.get()
    }

    pub(crate) fn epochs(&self) -> Epochs {
        // Read first: a value issued in between may be newer than `written`, never older.
        let written = self.written.load(Ordering::Acquire);
        Epochs { written, issued: self.issued.load(Ordering::Acquire) }
    }

    pub(crate) fn is_current(&self) -> bool {
        self.epochs().is_current()
    }

    /// For whoever puts back, or adds, what a captured step has done.
    pub(crate) fn set(&self, written: u64, issued: u64, quiet: bool) {
        self.quiet.set(false);
        self.written.store(written, Ordering::Release);
        self.issued.store(issued, Ordering::Release);
        self.quiet.set(quiet);
    }

    /// A write was submitted; all that follow it have to be told.
    pub(crate) fn write(&self) {
        self.quiet.set(false);
        self.written.fetch_add(1, Ordering::AcqRel);
    }

    /// The publication of the last write was submitted.
    pub(crate) fn issue(&self) {
        self.issued.store(self.written.load(Ordering::Acquire), Ordering::Release);
    }

    pub(crate) fn settle(&self) {
        self.quiet.set(true);
    }

    /// The next reader has to ask the owner.
    pub(crate) fn unsettle(&self) {
        self.quiet.set(false);
    }

    /// Orders the first write of the next epoch behind everything that reads or writes the values now.
    pub(crate) fn open_for_write(&self, written: &Event, stream: &Stream) -> Result<(), DdpError> {
        stream.wait(written, crate::why::WRITE_AFTER_WRITE)?;
        self.releases.settle(stream, crate::why::WRITE_AFTER_READ)?;
        Ok(stream.wait(&self.published, crate::why::WRITE_AFTER_PUBLISH)?)
    }
}

#[cfg(test)]
mod tests {
    use device::{Error, Machine, Trace, TraceEvent};

    use super::*;

    const WHY: Why = Why("test.crowd");

    fn waits(trace: &Trace) -> Vec<String> {
        let name = |event: &TraceEvent| match event {
            TraceEvent::Wait { event, generation, .. } => Some(format!("{event}:{generation}")),
            _ => None,
        };
        trace.events.iter().filter_map(name).collect()
    }

    #[test]
    fn a_gate_that_is_noted_again_and_again_is_kept_once() -> Result<(), Error> {
        let machine = Machine::sim(1);
        let device = machine.device(0)?;
        let (lane, writer) = (device.stream("lane")?, device.stream("writer")?);
        let gates = ["a", "b"].map(|name| device.event(name));
        let crowd = Crowd::new("crowd".to_owned());
        for _evaluation in 0..1_000 {
            for gate in &gates {
                lane.record(gate)?;
                crowd.note(After::Gate(gate))?;
            }
        }
        assert_eq!(lock(&crowd.seen).gates.len(), 2);
        machine.trace_start();
        crowd.settle(&writer, WHY)?;
        assert_eq!(waits(&machine.trace_stop()), ["a:1000", "b:1000"], "behind the last record of each");
        assert!(lock(&crowd.seen).gates.is_empty());
        // Settled gates are noted anew.
        lane.record(&gates[1])?;
        crowd.note(After::Gate(&gates[1]))?;
        machine.trace_start();
        crowd.wait(&writer, WHY)?;
        assert_eq!(waits(&machine.trace_stop()), ["b:1001"]);
        Ok(())
    }

    #[test]
    fn only_gates_that_were_settled_need_the_record_that_stands_for_them() -> Result<(), Error> {
        let machine = Machine::sim(1);
        let device = machine.device(0)?;
        let (lane, reduce, marks) = (device.stream("lane")?, device.stream("reduce")?, device.stream("marks")?);
        let [gate, record] = ["gate", "record"].map(|name| device.event(name));
        let crowd = Crowd::new("crowd".to_owned());
        crowd.note(After::Stream(&lane))?;
        crowd.settle(&reduce, WHY)?;
        reduce.record(&record)?;
        let behind = |crowd: &Crowd| {
            machine.trace_start();
            crowd.wait_for_settled(&marks, &record, WHY)?;
            Ok::<_, Error>(waits(&machine.trace_stop()))
        };
        assert_eq!(behind(&crowd)?, ["crowd.lane:1"], "a stream's event stays");
        lane.record(&gate)?;
        crowd.note(After::Gate(&gate))?;
        crowd.settle(&reduce, WHY)?;
        reduce.record(&record)?;
        assert_eq!(behind(&crowd)?, ["record:2", "crowd.lane:1"]);
        crowd.begin_anew();
        assert!(behind(&crowd)?.is_empty());
        Ok(())
    }
}
