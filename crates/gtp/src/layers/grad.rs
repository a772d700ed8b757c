//! Gradients of biases.

use device::{Frame, Site, View, ops::BiasGrad};
use pgroups::{Param, Weights};

use super::LayerError;

/// dbias = Σ dy over all rows.
pub(crate) fn bias_grad(p: &Param, dy: &View, site: &Site, f: &Frame, w: &mut dyn Weights) -> Result<(), LayerError> {
    let on = f.stream();
    let grad = w.grad(p, on)?;
    let (dbias, into) = grad.target();
    on.launch(BiasGrad { dy, dbias, into }.op(site)?)?;
    Ok(w.grad_done(p, on)?)
}
