//! Streams that capture: begin, end, joining by waits, and the events that cross the border of a capture.

use std::sync::Arc;

use crate::{
    CapturedGraph, Error, Event, GraphOrder, Stream, Why,
    capture::{Capture, Draft},
    event::Recorded,
    loosen::loosen,
    queue::{StreamInner, Submit},
    stream::never_recorded,
};

impl Stream {
    /// From now on nothing that is submitted to this stream runs: it becomes the graph `name`, until
    /// [`Stream::end_capture`]. What was submitted before is no part of it, and runs.
    ///
    /// Another stream takes part from the moment it waits for an event that was recorded in the capture, until the end
    /// of the capture; by then the origin must be behind all its work. Several captures of one device may be open, on
    /// different streams.
    ///
    /// Not to be done meanwhile, by any thread: waiting on the host for a stream that takes part or for the device,
    /// downloads, waits between the capture and what is outside, allocations on the device, launches of graphs. The
    /// call is refused, the capture is invalid, and its end tells why. Asking whether an event is done is no such call.
    ///
    /// # Errors
    /// [`Error::AlreadyCapturing`]; the device's sticky error.
    pub fn begin_capture(&self, name: &str) -> Result<(), Error> {
        let inner = self.inner();
        inner.device.check()?;
        let mut submit = inner.lock();
        if let Some(capture) = submit.capture()? {
            let (rank, stream) = (inner.device.rank, inner.name.clone());
            return Err(Error::AlreadyCapturing { rank, stream, graph: capture.graph().to_owned() });
        }
        submit.capture = Some(Capture::open(inner, name));
        Ok(())
    }

    /// Ends the capture that began in this stream and gives its graph. The streams that took part run again what is
    /// submitted, also after an error.
    ///
    /// # Errors
    /// [`Error::NotCapturing`]; [`Error::NotOrigin`] on a stream that only joined, and the capture goes on then;
    /// [`Error::CaptureInvalid`] with the first broken rule; [`Error::Unjoined`]; the device's sticky error.
    pub fn end_capture(&self) -> Result<CapturedGraph, Error> {
        self.end_capture_in(GraphOrder::Submission)
    }

    /// The same for a graph whose operations have another order among them than that of submission.
    ///
    /// # Errors
    /// As [`Stream::end_capture`].
    pub fn end_capture_in(&self, order: GraphOrder) -> Result<CapturedGraph, Error> {
        let inner = self.inner();
        let mut submit = inner.lock();
        let (rank, stream) = (inner.device.rank, inner.name.clone());
        let Some(capture) = submit.capture.clone() else {
            return Err(Error::NotCapturing { rank, stream, call: "end_capture" });
        };
        if capture.origin() != inner.index {
            submit.capture()?;
            let (graph, origin) = (capture.graph().to_owned(), capture.origin_name().to_owned());
            return Err(match submit.capture {
                Some(_) => Error::NotOrigin { rank, stream, graph, origin },
                None => Error::NotCapturing { rank, stream, call: "end_capture" },
            });
        }
        submit.capture = None;
        drop(submit);
        let mut nodes = capture.end()?;
        inner.device.check()?;
        if order == GraphOrder::Accesses {
            loosen(&mut nodes);
        }
        Ok(CapturedGraph::new(self.device(), capture.graph(), nodes))
    }

    /// Whether this stream takes part in a capture.
    pub fn is_capturing(&self) -> bool {
        let submit = self.inner().lock();
        submit.capture.as_ref().is_some_and(|capture| !capture.has_ended())
    }

    /// Makes a node that waits for a record outside the capture: at every launch for the last one that was issued
    /// before the launch was. None if this stream is behind such a wait for the same event already.
    ///
    /// # Errors
    /// [`Error::NotCapturing`]; [`Error::Foreign`] for an event of another device; [`Error::CaptureInvalid`]; the
    /// device's sticky error.
    pub fn wait_external(&self, event: &Event, why: Why) -> Result<(), Error> {
        self.external(event, "wait_external", |capture, stream| capture.wait_external(stream, event, why))
    }

    /// Makes a node that records `event` for whoever waits outside the capture. It counts as issued when the graph is
    /// launched, and happens when the launch gets there, before the rest of it has ended.
    ///
    /// # Errors
    /// As [`Stream::wait_external`].
    pub fn record_external(&self, event: &Event) -> Result<(), Error> {
        let record = || Draft::Record { event: event.clone() };
        self.external(event, "record_external", |capture, stream| capture.add(stream, record()))
    }

    fn external(&self, event: &Event, call: &'static str, add: impl FnOnce(&Capture, u32)) -> Result<(), Error> {
        let inner = self.inner();
        inner.device.check()?;
        event.check_owner(&inner.device)?;
        let mut submit = inner.lock();
        let Some(capture) = submit.capture()? else {
            return Err(Error::NotCapturing { rank: inner.device.rank, stream: inner.name.clone(), call });
        };
        add(&capture, inner.index);
        Ok(())
    }
}

impl StreamInner {
    /// Waits inside a capture, joins one, or refuses; false if nobody captures after all.
    pub(crate) fn wait_captured(
        &self,
        submit: &mut Submit,
        event: &Event,
        recorded: &Recorded,
        why: Why,
    ) -> Result<bool, Error> {
        let own = submit.capture()?;
        let point = match (own.as_ref(), recorded) {
            (Some(own), Recorded::Captured(point)) if Arc::ptr_eq(own, &point.capture) => point,
            (None, Recorded::Captured(point)) => {
                if !point.capture.check()? {
                    return Err(self.captured_event(event, &point.capture));
                }
                point.capture.join(self);
                submit.capture = Some(point.capture.clone());
                point
            }
            (None, _) => return Ok(false),
            (Some(own), Recorded::Never) => return Err(own.violate(never_recorded(self, event))),
            (Some(own), _) => {
                return Err(own.violate(Error::ForeignWait {
                    rank: self.device.rank,
                    stream: self.name.clone(),
                    graph: own.graph().to_owned(),
                    event: event.name().to_owned(),
                }));
            }
        };
        point.capture.wait(self.index, point, why, self.device.machine.is_dropped(why));
        Ok(true)
    }

    fn captured_event(&self, event: &Event, capture: &Capture) -> Error {
        let (rank, stream) = (self.device.rank, self.name.clone());
        Error::CapturedEvent { rank, stream, event: event.name().to_owned(), graph: capture.graph().to_owned() }
    }
}
