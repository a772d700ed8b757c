//! One product with its weight, and the bias behind it if there is one.

use device::{
    Frame, Site, Stream, View,
    ops::{Accumulate, Add, Finish, Gemm, Trans},
};
use pgroups::{Param, Sequence, Weights};

use super::{LayerError, Region, grad::bias_grad};

/// y = x · weightᵀ + bias, weight `[out, in]`.
///
/// Column-parallel where the weight, and the bias, are cut by dimension 0: from all of x, a rank computes its columns
/// of y. Whoever calls it leads in and out of the [`Region`]: several such products share an input.
pub struct Linear {
    weight: Param,
    bias: Option<Param>,
    site: Site,
}

/// What follows the product and its bias.
#[derive(Clone, Copy, Debug)]
pub enum Then<'a> {
    /// Nothing.
    Nothing,
    /// GELU, and what it took is written here. Only behind a bias.
    Gelu {
        /// As y, written.
        pre: &'a View,
    },
    /// Back to the residual stream: this is added.
    Add {
        /// As y.
        r: &'a View,
    },
}

/// Which member of a group adds what is the same on all of them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bias {
    Added,
    /// Another member adds it.
    Elsewhere,
}

impl Linear {
    /// Over `weight` and, if there is one, `bias`; `site` is its place in traces and messages.
    pub fn new(weight: &Param, bias: Option<&Param>, site: &str) -> Linear {
        Linear { weight: weight.clone(), bias: bias.cloned(), site: Site::from(site.to_owned()) }
    }

    /// `x` is `[.., in]`, `y` `[.., out]`, written; both may be columns of wider tensors.
    ///
    /// # Errors
    /// [`LayerError::GeluWithoutBias`]; of the device and the weights.
    pub fn forward(
        &self,
        on: &Stream,
        w: &mut dyn Weights,
        x: &View,
        y: &View,
        then: Then<'_>,
    ) -> Result<(), LayerError> {
        self.product(on, w, [x, y], then, Bias::Added)
    }

    fn product(
        &self,
        on: &Stream,
        w: &mut dyn Weights,
        [x, y]: [&View; 2],
        then: Then<'_>,
        added: Bias,
    ) -> Result<(), LayerError> {
        if self.bias.is_none() && matches!(then, Then::Gelu { .. }) {
            return Err(LayerError::GeluWithoutBias { weight: self.weight.name().to_owned() });
        }
        let weight = w.take(&self.weight, on)?;
        // Also where another member adds it: all members take the same weights in the same order.
        let taken = self.bias.as_ref().map(|bias| w.take(bias, on)).transpose()?;
        let bias = taken.as_ref().filter(|_| added == Bias::Added);
        let finish = match (bias, then) {
            (Some(bias), Then::Nothing) => Finish::Bias(bias),
            (Some(bias), Then::Gelu { pre }) => Finish::BiasGelu { bias, pre },
            (bias, Then::Add { r }) => Finish::Residual { bias, r },
            (None, _) => Finish::Into(Accumulate::Overwrite),
        };
        on.launch(Gemm { a: x, b: &weight, c: y, trans: Trans::Nt, finish }.op(&self.site)?)?;
        w.give_back(&self.weight, on)?;
        Ok(self.bias.as_ref().map_or(Ok(()), |bias| w.give_back(bias, on))?)
    }

    /// dx = dy · weight, and with `finish` what is done to it on the way. Where the weight is cut by dimension 0 this is
    /// the part of its columns: [`Region::reduce`] adds the parts.
    ///
    /// # Errors
    /// Of the device and the weights.
    pub fn backward_input(
        &self,
        on: &Stream,
        w: &mut dyn Weights,
        dy: &View,
        dx: &View,
        finish: Finish<'_>,
    ) -> Result<(), LayerError> {
        let weight = w.take(&self.weight, on)?;
        on.launch(Gemm { a: dy, b: &weight, c: dx, trans: Trans::Nn, finish }.op(&self.site)?)?;
        Ok(w.give_back(&self.weight, on)?)
    }

    /// The gradients of weight and bias, from dy and x over all rows.
    ///
    /// # Errors
    /// Of the device and the weights.
    pub fn backward_weight(&self, f: &Frame, w: &mut dyn Weights, dy: &View, x: &View) -> Result<(), LayerError> {
        let on = f.stream();
        let grad = w.grad(&self.weight, on)?;
        let (c, into) = grad.target();
        let finish = Finish::Into(into);
        on.launch(Gemm { a: dy, b: x, c, trans: Trans::Tn, finish }.op(&self.site)?)?;
        w.grad_done(&self.weight, on)?;
        self.bias.as_ref().map_or(Ok(()), |bias| bias_grad(bias, dy, &self.site, f, w))
    }
}

/// A [`Linear`] whose weight is cut by dimension 1: each rank multiplies its columns of x, and the results are added.
///
/// The bias is whole on every rank and added once, by the first member.
pub struct RowLinear(Linear);

impl RowLinear {
    /// As [`Linear::new`].
    pub fn new(weight: &Param, bias: Option<&Param>, site: &str) -> RowLinear {
        RowLinear(Linear::new(weight, bias, site))
    }

    /// `x` is this rank's `[.., in / size]` over all rows. The result has sizes `shape`, `[.., out]`, or under a split
    /// this rank's rows of it, `[rows / size, out]`. The residual `r` is added if given; it has the result's sizes.
    ///
    /// # Errors
    /// [`LayerError::UnevenRows`]; of the device, the frame, the weights and the group.
    pub fn forward(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        x: &View,
        shape: &[usize],
        r: Option<&View>,
    ) -> Result<View, LayerError> {
        let (region, on) = (Region::of(w), f.stream().clone());
        region.own_rows(x.row_count())?; // refused before anything is submitted
        let y = f.temp(shape, x.dtype())?;
        let residual = r.map_or(Then::Nothing, |r| Then::Add { r });
        let is_first = region.place() == 0;
        match region.sequence() {
            Sequence::Whole if is_first => self.0.product(&on, w, [x, &y], residual, Bias::Added)?,
            Sequence::Split if is_first => self.0.product(&on, w, [x, &y], Then::Nothing, Bias::Added)?,
            _ => self.0.product(&on, w, [x, &y], Then::Nothing, Bias::Elsewhere)?,
        }
        let sum = region.reduce(f, &y)?;
        // A residual that is cut by rows cannot join the product, which has all of them.
        let (Some(r), Sequence::Split) = (r, region.sequence()) else { return Ok(sum) };
        on.launch(Add { a: &sum, b: r, y: &sum }.op(&self.0.site)?)?;
        Ok(sum)
    }

    /// As [`Linear::backward_input`], with dy over all rows; dx is this rank's columns, and complete.
    ///
    /// # Errors
    /// Of the device and the weights.
    pub fn backward_input(
        &self,
        on: &Stream,
        w: &mut dyn Weights,
        dy: &View,
        dx: &View,
        finish: Finish<'_>,
    ) -> Result<(), LayerError> {
        self.0.backward_input(on, w, dy, dx, finish)
    }

    /// As [`Linear::backward_weight`]. Every rank has all rows of dy, so the bias's gradient is complete, and the same
    /// on all.
    ///
    /// # Errors
    /// Of the device and the weights.
    pub fn backward_weight(&self, f: &Frame, w: &mut dyn Weights, dy: &View, x: &View) -> Result<(), LayerError> {
        self.0.backward_weight(f, w, dy, x)
    }
}
