//! The hidden layer between the norm and the product back.

use device::{
    Frame, Site, View,
    ops::{Accumulate, Finish, SwiGlu, SwiGluBackward},
};
use gtp::layers::{Linear, Region, RowLinear, Then};
use pgroups::Weights;

use crate::ModelError;

/// r + last(active), active = gelu(first(x)) or silu(gate(x)) · up(x).
///
/// Columns of the hidden layer are independent of each other: each rank of a tensor group has its share of them.
pub(crate) struct FeedForward {
    hidden: Hidden,
    last: RowLinear,
    /// Columns of this rank.
    ffn_dim: usize,
}

enum Hidden {
    Gelu { first: Linear },
    SwiGlu { gate: Linear, up: Linear, site: Site },
}

impl FeedForward {
    pub(crate) fn gelu(first: Linear, last: RowLinear, ffn_dim: usize) -> FeedForward {
        FeedForward { hidden: Hidden::Gelu { first }, last, ffn_dim }
    }

    pub(crate) fn swiglu([gate, up]: [Linear; 2], last: RowLinear, ffn_dim: usize, site: &str) -> FeedForward {
        FeedForward { hidden: Hidden::SwiGlu { gate, up, site: Site::from(site.to_owned()) }, last, ffn_dim }
    }

    /// Up to the hidden layer, which is kept: all that the backward pass needs. `x` is what this rank has of
    /// `[batch, sequence, dim]`.
    pub(crate) fn hidden(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        x: &View,
        [batch, tokens]: [usize; 2],
    ) -> Result<View, ModelError> {
        let x = Region::of(w).gather(f, x)?;
        let (on, shape) = (f.stream().clone(), [batch, tokens, self.ffn_dim]);
        let active = match &self.hidden {
            Hidden::Gelu { first } => {
                let pre = f.save("pre", &shape, x.dtype())?;
                let active = f.save("active", &shape, x.dtype())?;
                first.forward(&on, w, &x, &active, Then::Gelu { pre: &pre })?;
                active
            }
            Hidden::SwiGlu { gate, up, site } => {
                let gated = f.save("gate", &shape, x.dtype())?;
                gate.forward(&on, w, &x, &gated, Then::Nothing)?;
                let upped = f.save("up", &shape, x.dtype())?;
                up.forward(&on, w, &x, &upped, Then::Nothing)?;
                let active = f.save("active", &shape, x.dtype())?;
                on.launch(SwiGlu { gate: &gated, up: &upped, y: &active }.op(site)?)?;
                active
            }
        };
        Ok(active)
    }

    /// From the hidden layer back to the residual stream `r`, `dim` wide.
    pub(crate) fn output(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        active: &View,
        r: &View,
    ) -> Result<View, ModelError> {
        let [batch, tokens, _] = *active.shape() else { unreachable!("BUG: made by `hidden`") };
        Ok(self.last.forward(f, w, active, &[batch, tokens, r.cols()], Some(r))?)
    }

    /// Gradient of x, from that of all rows of the result. Keeps what the weights' gradients need.
    pub(crate) fn backward_input(&self, f: &mut Frame, w: &mut dyn Weights, dy: &View) -> Result<View, ModelError> {
        let on = f.stream().clone();
        let wide = |hidden: &View| [hidden.shape()[0], hidden.shape()[1], dy.cols()];
        let dx = match &self.hidden {
            Hidden::Gelu { first } => {
                let pre = f.saved("pre")?;
                let dpre = f.save("dpre", pre.shape(), dy.dtype())?;
                self.last.backward_input(&on, w, dy, &dpre, Finish::GeluBackward { pre: &pre })?;
                let dx = f.temp(&wide(&pre), dy.dtype())?;
                first.backward_input(&on, w, &dpre, &dx, Finish::Into(Accumulate::Overwrite))?;
                dx
            }
            Hidden::SwiGlu { gate, up, site } => {
                let (gated, upped) = (f.saved("gate")?, f.saved("up")?);
                let dactive = f.temp(gated.shape(), dy.dtype())?;
                self.last.backward_input(&on, w, dy, &dactive, Finish::Into(Accumulate::Overwrite))?;
                let dgate = f.save("dgate", gated.shape(), dy.dtype())?;
                let dup = f.save("dup", upped.shape(), dy.dtype())?;
                let backward = SwiGluBackward { dy: &dactive, gate: &gated, up: &upped, dgate: &dgate, dup: &dup };
                on.launch(backward.op(site)?)?;
                let dx = f.temp(&wide(&gated), dy.dtype())?;
                gate.backward_input(&on, w, &dgate, &dx, Finish::Into(Accumulate::Overwrite))?;
                up.backward_input(&on, w, &dup, &dx, Finish::Into(Accumulate::Add))?;
                dx
            }
        };
        Ok(Region::of(w).reduce(f, &dx)?)
    }

    /// From all rows of dy and what this rank has of x.
    pub(crate) fn backward_weight(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        dy: &View,
        x: &View,
    ) -> Result<(), ModelError> {
        self.last.backward_weight(f, w, dy, &f.saved("active")?)?;
        // Once more, instead of keeping all rows from the forward pass on.
        let x = Region::of(w).gather(f, x)?;
        match &self.hidden {
            Hidden::Gelu { first } => first.backward_weight(f, w, &f.saved("dpre")?, &x)?,
            Hidden::SwiGlu { gate, up, .. } => {
                gate.backward_weight(f, w, &f.saved("dgate")?, &x)?;
                up.backward_weight(f, w, &f.saved("dup")?, &x)?;
            }
        }
        Ok(())
    }
}
