//! Buffers leave the device between two steps and come back bit for bit.

use std::fmt;

use device::{DType, Download, Stream, View, bf16};

use crate::{
    Ddp, DdpError,
    core::{Core, Phase, Record, StepState},
    gates::lock,
};

/// Which buffers of the trained parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Buffers {
    /// Values: the optimizer's masters, too, if they are f32, and their upper halves if they are bf16.
    Values,
    /// Gradients.
    Grads,
    /// Both.
    All,
}

impl Buffers {
    fn overlaps(self, other: Buffers) -> bool {
        self == other || self == Buffers::All || other == Buffers::All
    }
}

impl fmt::Display for Buffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Buffers::Values => "values",
            Buffers::Grads => "gradients",
            Buffers::All => "values and gradients",
        })
    }
}

/// The contents of buffers in host memory; see [`Ddp::offload`]. Without [`restore`](Offloaded::restore) they are lost,
/// and the buffers stay out of use.
#[must_use = "the contents come back by restore()"]
pub struct Offloaded<'d> {
    core: &'d Core,
    what: Buffers,
    /// Values first, bucket by bucket.
    copies: Vec<(View, Copy)>,
}

/// The elements of a view.
enum Copy {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

/// The elements of a view on their way.
enum Leaving {
    F32(Download<f32>),
    Bf16(Download<bf16>),
}

impl Ddp {
    /// Copies buffers to the host and lends their device memory to whoever holds the result, until it is restored.
    /// Between two steps only. The host waits for the copies.
    ///
    /// Publications in flight are completed first, with the work behind them, and whatever is stale is published: all
    /// ranks call it. Addresses are fixed for life, so the memory stays allocated; a captured graph finds it where it
    /// was. Meanwhile everything that would look at the buffers is refused: reads of values, microbatches, steps of
    /// the optimizer. Moments and rests of masters stay, and so do frozen parameters.
    ///
    /// # Errors
    /// [`DdpError::OffloadInStep`] unless the last step's gradients are finished; [`DdpError::Offloaded`] if they are
    /// away already; the groups'; the device's, which has no values on `dry`.
    pub fn offload(&self, what: Buffers, stream: &Stream) -> Result<Offloaded<'_>, DdpError> {
        let core: &Core = self.core();
        {
            let state = lock(&core.state);
            state.resident(Buffers::All)?;
            if state.phase != Phase::Idle {
                return Err(DdpError::OffloadInStep { what });
            }
        }
        let copies = core.leave(what, stream)?;
        lock(&core.state).away = Some(what);
        if what.overlaps(Buffers::Values) {
            core.groups.iter().for_each(|group| group.gates.unsettle());
        }
        Ok(Offloaded { core, what, copies })
    }
}

impl Offloaded<'_> {
    /// Which buffers.
    #[must_use]
    pub fn what(&self) -> Buffers {
        self.what
    }

    /// The device memory that is free meanwhile, each `[numel]` of a bucket.
    pub fn memory(&self) -> impl Iterator<Item = &View> {
        self.copies.iter().map(|(view, _)| view)
    }

    /// Submits the contents to `stream`, behind what was submitted there so far, and opens the buffers behind them.
    /// Values count as written and published; work behind gathers has been done when they were.
    ///
    /// # Errors
    /// The device's.
    pub fn restore(self, stream: &Stream) -> Result<(), DdpError> {
        let Offloaded { core, what, copies } = self;
        for (view, copy) in copies {
            match copy {
                Copy::F32(values) => stream.upload(&view, values)?,
                Copy::Bf16(values) => stream.upload(&view, values)?,
            }
        }
        if what.overlaps(Buffers::Values) {
            (0..core.groups.len()).try_for_each(|group| core.restored(group, stream))?;
        }
        if what.overlaps(Buffers::Grads) {
            // Whoever reads them, or overwrites them in the next step, waits for one or the other.
            for group in &core.groups {
                core.record(Record::Reduced, stream, &group.reduced)?;
            }
            core.record(Record::Finished, stream, &core.finished)?;
        }
        lock(&core.state).away = None;
        Ok(())
    }
}

impl StepState {
    /// Refuses the use of buffers that are away.
    pub(crate) fn resident(&self, needed: Buffers) -> Result<(), DdpError> {
        match self.away.filter(|away| away.overlaps(needed)) {
            Some(what) => Err(DdpError::Offloaded { what }),
            None => Ok(()),
        }
    }
}

impl Core {
    /// As [`StepState::resident`].
    pub(crate) fn resident(&self, needed: Buffers) -> Result<(), DdpError> {
        lock(&self.state).resident(needed)
    }

    /// The contents, behind everything that reads or writes them.
    fn leave(&self, what: Buffers, stream: &Stream) -> Result<Vec<(View, Copy)>, DdpError> {
        let buckets = || self.groups.iter().flat_map(|group| &group.buckets);
        let mut views = Vec::new();
        if what.overlaps(Buffers::Values) {
            self.publish_all(Some(stream))?;
            for group in &self.groups {
                group.gates.open_for_write(&group.written, stream)?;
            }
            views.extend(buckets().map(|bucket| bucket.values.clone()));
        }
        if what.overlaps(Buffers::Grads) {
            for group in &self.groups {
                self.write_grads(group, stream)?;
            }
            views.extend(buckets().map(|bucket| bucket.grads.clone()));
        }
        let leave = |view: View| -> Result<(View, Leaving), DdpError> {
            let leaving = match view.dtype() {
                DType::Bf16 => Leaving::Bf16(stream.download(&view)?),
                _ => Leaving::F32(stream.download(&view)?),
            };
            Ok((view, leaving))
        };
        let leaving = views.into_iter().map(leave).collect::<Result<Vec<_>, _>>()?;
        let arrive = |(view, leaving)| {
            let copy = match leaving {
                Leaving::F32(values) => Copy::F32(values.wait()?),
                Leaving::Bf16(values) => Copy::Bf16(values.wait()?),
            };
            Ok((view, copy))
        };
        leaving.into_iter().map(arrive).collect()
    }
}
