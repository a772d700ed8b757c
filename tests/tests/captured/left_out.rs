//! Publishers with one thing left out: what a test takes away from a real backend.

use std::sync::Arc;

use pgroups::{After, Epochs, Param, PgError, Publish};

use super::training::Trainer;

/// A publisher with one thing left out.
pub(crate) struct Without {
    inner: Arc<dyn Publish>,
    left_out: LeftOut,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum LeftOut {
    Issue,
    Release,
    /// Nothing is issued, and whoever asks is told that it was.
    IssueAndEpochs,
}

impl Publish for Without {
    fn epochs(&self) -> Epochs {
        let Epochs { written, issued } = self.inner.epochs();
        Epochs { written, issued: if self.left_out == LeftOut::IssueAndEpochs { written } else { issued } }
    }

    fn issue(&self) -> Result<(), PgError> {
        if self.left_out == LeftOut::Release { self.inner.issue() } else { Ok(()) }
    }

    fn event(&self) -> &device::Event {
        self.inner.event()
    }

    fn done(&self, after: After<'_>) -> Result<(), PgError> {
        if self.left_out == LeftOut::Release { Ok(()) } else { self.inner.done(after) }
    }
}

pub(crate) fn leave_out(trainer: &Trainer, left_out: LeftOut) {
    leave_out_of(trainer.buffers.params(), left_out);
}

pub(crate) fn leave_out_of(params: &[Param], left_out: LeftOut) {
    for param in params {
        let inner = param.publisher().unwrap();
        param.attach(Some(Arc::new(Without { inner, left_out })), param.landed_sink());
    }
}
