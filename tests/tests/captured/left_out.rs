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
    let mut known: Vec<(Arc<dyn Publish>, Arc<dyn Publish>)> = Vec::new();
    for param in params {
        let inner = param.publisher().unwrap();
        let found = known.iter().find(|(of, _)| Arc::ptr_eq(of, &inner)).map(|(_, without)| without.clone());
        let without = found.unwrap_or_else(|| {
            let without: Arc<dyn Publish> = Arc::new(Without { inner: inner.clone(), left_out });
            known.push((inner, without.clone()));
            without
        });
        param.attach(Some(without), param.landed_sink());
    }
}
