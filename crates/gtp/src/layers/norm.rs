//! One norm with its weights: layer norm, or RMS norm where there is no bias.

use device::{
    DType, Frame, Site, View,
    ops::{LayerNorm, LayerNormBackward, Residual, RmsNorm, RmsNormBackward, StretchSums},
};
use pgroups::{Param, Weights};

use super::{
    LayerError,
    grad::{bias_grad, bias_grads},
};

/// y = (x − mean) · rstd · weight + bias over the last dimension, or x · rstd · weight.
///
/// Its weights are whole on every rank of a tensor group. It works on the rows that the rank has: under a sequence split
/// a rank's gradients are those of its rows, and have to be summed over the group before the step.
pub struct Norm {
    weight: Param,
    /// Of a layer norm; an RMS norm has none.
    bias: Option<Param>,
    site: Site,
    eps: f32,
    tags: NormTags,
}

/// What a norm needs besides its weights.
#[derive(Clone, Copy, Debug)]
pub struct NormConfig {
    /// Added to the variance or the mean square.
    pub eps: f32,
    /// Names of what it keeps.
    pub tags: NormTags,
}

/// Names under which a frame keeps what the backward pass needs.
#[derive(Clone, Copy, Debug)]
pub struct NormTags {
    /// What was normalised.
    pub x: &'static str,
    /// The result.
    pub y: &'static str,
    /// Of a layer norm: the mean of each row.
    pub mean: &'static str,
    /// One over the deviation of each row.
    pub rstd: &'static str,
    /// Sums over stretches of rows, of which the gradient of the weight is made.
    pub dweight: &'static str,
    /// Of a layer norm: likewise, of the bias.
    pub dbias: &'static str,
}

impl Norm {
    /// A layer norm, or without a bias an RMS norm; `site` is its place in traces and messages.
    pub fn new(weight: &Param, bias: Option<&Param>, site: &str, config: NormConfig) -> Norm {
        let NormConfig { eps, tags } = config;
        Norm { weight: weight.clone(), bias: bias.cloned(), site: Site::from(site.to_owned()), eps, tags }
    }

    /// Normalises `x`, `[.., columns]`, or `x + r` with a branch `r` of the residual stream. Returns y.
    ///
    /// # Errors
    /// Of the device, the frame and the weights.
    pub fn forward(&self, f: &mut Frame, w: &mut dyn Weights, x: &View, r: Option<&View>) -> Result<View, LayerError> {
        let tags = &self.tags;
        let sum = match r {
            Some(_) => f.save(tags.x, x.shape(), x.dtype())?,
            None => {
                f.keep(tags.x, x);
                x.clone()
            }
        };
        let y = f.save(tags.y, x.shape(), x.dtype())?;
        let rows = [x.row_count()];
        let rstd = f.save(tags.rstd, &rows, DType::F32)?;
        let on = f.stream().clone();
        let residual = r.map(|r| Residual { r, sum: &sum });
        let weight = w.take(&self.weight, &on)?;
        match &self.bias {
            None => {
                let norm = RmsNorm { x, residual, weight: &weight, y: &y, rstd: &rstd, eps: self.eps };
                on.launch(norm.op(&self.site)?)?;
            }
            Some(bias) => {
                let mean = f.save(tags.mean, &rows, DType::F32)?;
                let b = w.take(bias, &on)?;
                let norm = LayerNorm {
                    x,
                    residual,
                    weight: &weight,
                    bias: &b,
                    y: &y,
                    mean: &mean,
                    rstd: &rstd,
                    eps: self.eps,
                };
                on.launch(norm.op(&self.site)?)?;
                w.give_back(bias, &on)?;
            }
        }
        w.give_back(&self.weight, &on)?;
        Ok(y)
    }

    /// dx, with the gradient `skip` that reaches x past the norm. Keeps for [`Norm::backward_weight`] what dy and x give.
    ///
    /// # Errors
    /// Of the device, the frame and the weights; [`device::Error::NotSaved`] without a forward pass before it.
    pub fn backward_input(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        dy: &View,
        skip: Option<&View>,
    ) -> Result<View, LayerError> {
        let tags = &self.tags;
        let (x, rstd) = (f.saved(tags.x)?, f.saved(tags.rstd)?);
        let dx = f.temp(dy.shape(), dy.dtype())?;
        let sums = [LayerNormBackward::stretches(dy.row_count()), dy.cols()];
        let dweight = f.save(tags.dweight, &sums, DType::F32)?;
        let dbias = self.bias.as_ref().map(|_| f.save(tags.dbias, &sums, DType::F32)).transpose()?;
        let on = f.stream();
        let weight = w.take(&self.weight, on)?;
        let op = match &dbias {
            None => {
                let sums = Some(&dweight);
                RmsNormBackward { dy, x: &x, weight: &weight, rstd: &rstd, skip, dx: &dx, sums }.op(&self.site)?
            }
            Some(dbias) => {
                let (mean, sums) = (f.saved(tags.mean)?, Some(StretchSums { dweight: &dweight, dbias }));
                LayerNormBackward { dy, x: &x, weight: &weight, mean: &mean, rstd: &rstd, skip, dx: &dx, sums }
                    .op(&self.site)?
            }
        };
        on.launch(op)?;
        w.give_back(&self.weight, on)?;
        Ok(dx)
    }

    /// The gradients of weight and bias, over the rank's rows.
    ///
    /// # Errors
    /// As [`Norm::backward_input`].
    pub fn backward_weight(&self, f: &mut Frame, w: &mut dyn Weights) -> Result<(), LayerError> {
        let dweight = f.saved(self.tags.dweight)?;
        match &self.bias {
            None => bias_grad(&self.weight, &dweight, &self.site, f, w),
            Some(bias) => {
                let dbias = f.saved(self.tags.dbias)?;
                bias_grads([(&self.weight, &dweight), (bias, &dbias)], &self.site, f, w)
            }
        }
    }
}
