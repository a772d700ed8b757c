//! The only way to a parameter's value.

use std::sync::Arc;

use device::{Access, Note, Stream, TraceAccess, View, Why};

use crate::{
    error::PgError,
    param::Param,
    publish::{After, HandOver, Recorder},
    weights::Keep,
};

/// The part of a step that a read belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pass {
    /// Reads make sure that values are published.
    Forward,
    /// Reads what forward read.
    Backward,
    /// Forward once more, inside backward: reads what forward read.
    Recompute,
}

impl Pass {
    /// In traces.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
            Pass::Recompute => "recompute",
        }
    }
}

/// Which pass this is, and whether it is being captured: handed down to whoever reads parameters, never ambient.
///
/// | pass | eager | recorded |
/// |---|---|---|
/// | forward | issue the publication, order this stream behind it, refuse stale values | record the read, issue nothing |
/// | backward, recompute | the value only | the value only |
/// | end of a read, any pass | tell the publisher | record |
/// | gradient about to be written, any pass | ask the sink, which orders this stream | record |
/// | gradient landed, any pass | tell the sink | record |
/// | hand-over, any pass | nothing | record |
pub struct Turn<'c> {
    pass: Pass,
    recorder: Option<&'c mut (dyn Recorder + 'c)>,
}

impl<'c> Turn<'c> {
    /// Orders a reading stream behind the publication of what it reads.
    pub const READ_AFTER_PUBLISH: Why = Why("pgroups.read_after_publish");

    /// A pass that runs as it is submitted.
    #[must_use]
    pub fn eager(pass: Pass) -> Turn<'c> {
        Turn { pass, recorder: None }
    }

    /// A pass that is being captured.
    pub fn recorded(pass: Pass, by: &'c mut (dyn Recorder + 'c)) -> Turn<'c> {
        Turn { pass, recorder: Some(by) }
    }

    /// The pass.
    #[must_use]
    pub fn pass(&self) -> Pass {
        self.pass
    }

    /// The value of `param`, readable by what is submitted to `stream` from now on.
    ///
    /// # Errors
    /// [`PgError::Stale`] in an eager forward pass if the last write was not published, also when whoever owns the
    /// schedule has switched publication off; the publisher's, the recorder's or the device's error.
    pub fn read(&mut self, param: &Param, stream: &Stream) -> Result<View, PgError> {
        match (self.pass, &mut self.recorder) {
            (Pass::Forward, Some(recorder)) => recorder.read(param, stream)?,
            (Pass::Forward, None) => make_ready(param, stream)?,
            (Pass::Backward | Pass::Recompute, _) => {}
        }
        let view = param.view();
        if self.recorder.is_none() {
            note_read(param, stream, &view, self.pass);
        }
        Ok(view)
    }

    /// The read of `param` on `stream` ends with what was submitted so far: its memory may be written behind that.
    ///
    /// # Errors
    /// The publisher's or the recorder's.
    pub fn done(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        match &mut self.recorder {
            Some(recorder) => recorder.done(param, stream),
            None => param.publisher().map_or(Ok(()), |publisher| {
                stream.note(|| Note::Released { publisher: publisher.event().label() });
                publisher.done(After::Stream(stream))
            }),
        }
    }

    /// Makes `param.main_grad()` writable by what is submitted to `stream` from now on. What the use does with what it
    /// holds; none if nobody waits for the gradient, and it is for the caller to decide.
    ///
    /// # Errors
    /// The sink's or the recorder's.
    pub fn open(&mut self, param: &Param, stream: &Stream) -> Result<Option<Keep>, PgError> {
        match &mut self.recorder {
            Some(recorder) => recorder.open(param, stream),
            None => param.landed_sink().map(|sink| sink.open(param, stream)).transpose(),
        }
    }

    /// This use's gradient is in `param.main_grad()` behind what was submitted to `stream` so far.
    ///
    /// # Errors
    /// The sink's or the recorder's.
    pub fn landed(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        match &mut self.recorder {
            Some(recorder) => recorder.landed(param, stream),
            None => param.landed_sink().map_or(Ok(()), |sink| {
                // Before the sink hears of it: it may reduce at once.
                stream.note(|| Note::Landed {
                    param: param.label(),
                    regions: vec![TraceAccess::from(&Access::update(&param.main_grad()))],
                });
                sink.landed(param, After::Stream(stream))
            }),
        }
    }

    /// Whether what is submitted is being captured in a graph below the scope of a step.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.recorder.is_some()
    }

    /// Names what a captured graph finds and leaves beside parameters. Does nothing in a pass that runs as it is
    /// submitted.
    ///
    /// # Errors
    /// The recorder's.
    pub fn hand_over(&mut self, what: Arc<dyn HandOver>) -> Result<(), PgError> {
        self.recorder.as_mut().map_or(Ok(()), |recorder| recorder.hand_over(what))
    }

    /// Changes the pass; returns the one to go back to. Recompute inside backward needs it.
    pub fn enter(&mut self, pass: Pass) -> Pass {
        std::mem::replace(&mut self.pass, pass)
    }
}

/// What is read, by the name of its publication's event, for whoever checks a trace.
fn note_read(param: &Param, stream: &Stream, view: &View, pass: Pass) {
    if !stream.is_traced() {
        return;
    }
    let Some(publisher) = param.publisher() else { return };
    let epochs = publisher.epochs();
    stream.note(|| Note::Read {
        publisher: publisher.event().label(),
        param: param.label(),
        pass: pass.name().into(),
        written: epochs.written,
        issued: epochs.issued,
        regions: vec![TraceAccess::from(&Access::read(view))],
    });
}

/// Issues, compares, then orders: a stale value is refused before anything waits for it.
fn make_ready(param: &Param, stream: &Stream) -> Result<(), PgError> {
    let Some(publisher) = param.publisher() else { return Ok(()) };
    publisher.issue()?;
    let epochs = publisher.epochs();
    if !epochs.is_current() {
        let (written, issued) = (epochs.written, epochs.issued);
        return Err(PgError::Stale { param: param.name().to_owned(), written, issued });
    }
    Ok(stream.wait(publisher.event(), Turn::READ_AFTER_PUBLISH)?)
}
