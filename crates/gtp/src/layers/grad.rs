//! Where a weight gradient goes.

use device::{
    Frame, Site, Stream, View,
    ops::{Accumulate, BiasGrad},
};
use pgroups::{Param, Weights};

use super::LayerError;

/// Adds `values`, or puts them there, into `part` of a gradient: as a sum over one row, which reads nothing of what is
/// not kept.
pub(crate) fn contribute(
    values: &View,
    part: &View,
    into: Accumulate<'_>,
    site: &Site,
    on: &Stream,
) -> Result<(), LayerError> {
    let flat = [values.numel()];
    let (dy, dbias) = (values.reshape(&flat)?, part.reshape(&flat)?);
    on.launch(BiasGrad { dy: &dy, dbias: &dbias, into }.op(site)?)?;
    Ok(())
}

/// dbias = Σ dy over all rows.
pub(crate) fn bias_grad(p: &Param, dy: &View, site: &Site, f: &Frame, w: &mut dyn Weights) -> Result<(), LayerError> {
    let on = f.stream();
    let grad = w.grad(p, on)?;
    let (dbias, into) = grad.target();
    on.launch(BiasGrad { dy, dbias, into }.op(site)?)?;
    Ok(w.grad_done(p, on)?)
}
