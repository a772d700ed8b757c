//! Gradients of biases.

use device::{
    Frame, Site, View,
    ops::{BiasGrad, BiasGrads},
};
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

/// The same for two at once, of matrices of one size.
pub(crate) fn bias_grads(
    each: [(&Param, &View); 2],
    site: &Site,
    f: &Frame,
    w: &mut dyn Weights,
) -> Result<(), LayerError> {
    let on = f.stream();
    let grads = [w.grad(each[0].0, on)?, w.grad(each[1].0, on)?];
    let [first, second] = [0, 1].map(|which| {
        let (dbias, into) = grads[which].target();
        BiasGrad { dy: each[which].1, dbias, into }
    });
    on.launch(BiasGrads { each: [first, second] }.op(site)?)?;
    each.into_iter().try_for_each(|(param, _)| Ok(w.grad_done(param, on)?))
}
