//! Where a weight gradient goes.

use device::{Frame, Stream, View, ops};

use crate::{
    ModelError,
    stand_in::{GradOut, Param, Weights},
};

/// A gradient's buffer and what happens to its old values, as the weights say for this use.
pub(crate) struct Grad {
    pub(crate) view: View,
    keep: Option<View>,
}

impl Grad {
    /// Asks the weights. A parameter that is used twice in a pass is asked for twice, and its second answer adds.
    pub(crate) fn of(p: &Param, w: &mut dyn Weights, on: &Stream) -> Result<Grad, ModelError> {
        Ok(match w.grad(p, on)? {
            GradOut::Scratch(view) => Grad { view, keep: None },
            GradOut::Main { grad, keep } => Grad { view: grad, keep: Some(keep) },
        })
    }

    /// Scratch is overwritten; a main gradient is kept as far as its flag on the device says.
    pub(crate) fn accumulate(&self) -> ops::Accumulate<'_> {
        self.keep.as_ref().map_or(ops::Accumulate::Overwrite, ops::Accumulate::Keep)
    }

    /// One kernel can write both.
    pub(crate) fn keeps_like(&self, other: &Grad) -> bool {
        match (&self.keep, &other.keep) {
            (None, None) => true,
            (Some(a), Some(b)) => a.same_as(b),
            _ => false,
        }
    }

    /// Adds the f32 `values`, or puts them there, into `part` of the gradient: as a sum over one row, which reads
    /// nothing of what is not kept.
    pub(crate) fn contribute(
        &self,
        values: &View,
        part: &View,
        site: &device::Site,
        on: &Stream,
    ) -> Result<(), ModelError> {
        let flat = [values.numel()];
        let (dy, dbias) = (values.reshape(&flat)?, part.reshape(&flat)?);
        on.launch(ops::BiasGrad { dy: &dy, dbias: &dbias, into: self.accumulate() }.op(site)?)?;
        Ok(())
    }
}

/// dbias = Σ dy over all rows.
pub(crate) fn bias_grad(
    p: &Param,
    dy: &View,
    site: &device::Site,
    f: &Frame,
    w: &mut dyn Weights,
) -> Result<(), ModelError> {
    let on = f.stream();
    let grad = Grad::of(p, w, on)?;
    on.launch(ops::BiasGrad { dy, dbias: &grad.view, into: grad.accumulate() }.op(site)?)?;
    Ok(w.grad_done(p, on)?)
}
