//! One product with its weight, and the bias behind it if there is one.

use device::{
    Frame, Site, Stream, View,
    ops::{Accumulate, Finish, Gemm, Trans},
};
use pgroups::{Param, Weights};

use crate::{ModelError, grad::bias_grad};

/// y = x · weightᵀ + bias, weight `[out, in]`.
pub(crate) struct Linear {
    weight: Param,
    bias: Option<Param>,
    site: Site,
}

/// What follows the product and its bias.
pub(crate) enum Then<'a> {
    Nothing,
    /// GELU, and what it took is written here. Only behind a bias.
    Gelu {
        pre: &'a View,
    },
    /// Back to the residual stream: this is added.
    Add {
        r: &'a View,
    },
}

impl Linear {
    pub(crate) fn new(weight: &Param, bias: Option<&Param>, site: &str) -> Linear {
        Linear { weight: weight.clone(), bias: bias.cloned(), site: Site::from(site.to_owned()) }
    }

    pub(crate) fn forward(
        &self,
        on: &Stream,
        w: &mut dyn Weights,
        x: &View,
        y: &View,
        then: Then<'_>,
    ) -> Result<(), ModelError> {
        let weight = w.take(&self.weight, on)?;
        let bias = self.bias.as_ref().map(|bias| w.take(bias, on)).transpose()?;
        let finish = match (&bias, then) {
            (None, Then::Nothing) => Finish::Into(Accumulate::Overwrite),
            (Some(bias), Then::Nothing) => Finish::Bias(bias),
            (Some(bias), Then::Gelu { pre }) => Finish::BiasGelu { bias, pre },
            (None, Then::Gelu { .. }) => unreachable!("BUG: no architecture has a GELU without a bias"),
            (bias, Then::Add { r }) => Finish::Residual { bias: bias.as_ref(), r },
        };
        on.launch(Gemm { a: x, b: &weight, c: y, trans: Trans::Nt, finish }.op(&self.site)?)?;
        w.give_back(&self.weight, on)?;
        Ok(self.bias.as_ref().map_or(Ok(()), |bias| w.give_back(bias, on))?)
    }

    /// dx = dy · weight, and with `finish` what is done to it on the way.
    pub(crate) fn backward_input(
        &self,
        on: &Stream,
        w: &mut dyn Weights,
        dy: &View,
        dx: &View,
        finish: Finish<'_>,
    ) -> Result<(), ModelError> {
        let weight = w.take(&self.weight, on)?;
        on.launch(Gemm { a: dy, b: &weight, c: dx, trans: Trans::Nn, finish }.op(&self.site)?)?;
        Ok(w.give_back(&self.weight, on)?)
    }

    pub(crate) fn backward_weight(
        &self,
        f: &Frame,
        w: &mut dyn Weights,
        dy: &View,
        x: &View,
    ) -> Result<(), ModelError> {
        let on = f.stream();
        let grad = w.grad(&self.weight, on)?;
        let (c, into) = grad.target();
        let finish = Finish::Into(into);
        on.launch(Gemm { a: dy, b: x, c, trans: Trans::Tn, finish }.op(&self.site)?)?;
        w.grad_done(&self.weight, on)?;
        self.bias.as_ref().map_or(Ok(()), |bias| bias_grad(bias, dy, &self.site, f, w))
    }
}
