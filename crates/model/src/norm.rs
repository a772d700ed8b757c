//! One layer norm with its weights.

use device::{
    DType, Frame, Site, View,
    ops::{Accumulate, LayerNorm, LayerNormBackward, LayerNormGrad, Residual},
};
use pgroups::{Param, Weights};

use crate::{
    ModelError,
    grad::{contribute, keep_alike},
};

/// Added to the variance, as in GPT-2.
const EPS: f32 = 1e-5;

/// y = (x − mean) · rstd · weight + bias over the last dimension.
pub(crate) struct Norm {
    weight: Param,
    bias: Param,
    site: Site,
    tags: Tags,
}

/// Names under which a frame keeps what the backward pass needs.
pub(crate) struct Tags {
    /// What was normalised.
    pub(crate) x: &'static str,
    pub(crate) y: &'static str,
    pub(crate) mean: &'static str,
    pub(crate) rstd: &'static str,
    pub(crate) dy: &'static str,
}

impl Norm {
    pub(crate) fn new(weight: &Param, bias: &Param, site: &str, tags: Tags) -> Norm {
        Norm { weight: weight.clone(), bias: bias.clone(), site: Site::from(site.to_owned()), tags }
    }

    /// Normalises `x`, or `x + r` with a branch `r` of the residual stream. Returns y.
    pub(crate) fn forward(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        x: &View,
        r: Option<&View>,
    ) -> Result<View, ModelError> {
        let tags = &self.tags;
        let sum = match r {
            Some(_) => f.save(tags.x, x.shape(), DType::F32)?,
            None => {
                f.keep(tags.x, x);
                x.clone()
            }
        };
        let y = f.save(tags.y, x.shape(), DType::F32)?;
        let rows = [x.row_count()];
        let mean = f.save(tags.mean, &rows, DType::F32)?;
        let rstd = f.save(tags.rstd, &rows, DType::F32)?;
        let on = f.stream();
        let weight = w.take(&self.weight, on)?;
        let bias = w.take(&self.bias, on)?;
        let residual = r.map(|r| Residual { r, sum: &sum });
        let norm = LayerNorm { x, residual, weight: &weight, bias: &bias, y: &y, mean: &mean, rstd: &rstd, eps: EPS };
        on.launch(norm.op(&self.site)?)?;
        w.give_back(&self.weight, on)?;
        w.give_back(&self.bias, on)?;
        Ok(y)
    }

    /// dx, with the gradient `skip` that reaches x past the norm. Keeps `dy` for [`Norm::backward_weight`].
    pub(crate) fn backward_input(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        dy: &View,
        skip: Option<&View>,
    ) -> Result<View, ModelError> {
        let tags = &self.tags;
        f.keep(tags.dy, dy);
        let (x, mean, rstd) = (f.saved(tags.x)?, f.saved(tags.mean)?, f.saved(tags.rstd)?);
        let dx = f.temp(dy.shape(), DType::F32)?;
        let on = f.stream();
        let weight = w.take(&self.weight, on)?;
        let norm = LayerNormBackward { dy, x: &x, weight: &weight, mean: &mean, rstd: &rstd, skip, dx: &dx };
        on.launch(norm.op(&self.site)?)?;
        w.give_back(&self.weight, on)?;
        Ok(dx)
    }

    pub(crate) fn backward_weight(&self, f: &mut Frame, w: &mut dyn Weights) -> Result<(), ModelError> {
        let tags = &self.tags;
        let (dy, x) = (f.saved(tags.dy)?, f.saved(tags.x)?);
        let (mean, rstd) = (f.saved(tags.mean)?, f.saved(tags.rstd)?);
        let weight = w.grad(&self.weight, f.stream())?;
        let bias = w.grad(&self.bias, f.stream())?;
        let ((dweight, into), (dbias, bias_into)) = (weight.target(), bias.target());
        let grad = LayerNormGrad { dy: &dy, x: &x, mean: &mean, rstd: &rstd, dweight, dbias, into };
        if keep_alike(&weight, &bias) {
            f.stream().launch(grad.op(&self.site)?)?;
        } else {
            // The kernel has one setting for both, so a pair that differs takes the way over temporaries.
            let own = [f.temp(dweight.shape(), DType::F32)?, f.temp(dbias.shape(), DType::F32)?];
            let grad = LayerNormGrad { dweight: &own[0], dbias: &own[1], into: Accumulate::Overwrite, ..grad };
            f.stream().launch(grad.op(&self.site)?)?;
            contribute(&own[0], dweight, into, &self.site, f.stream())?;
            contribute(&own[1], dbias, bias_into, &self.site, f.stream())?;
        }
        w.grad_done(&self.weight, f.stream())?;
        Ok(w.grad_done(&self.bias, f.stream())?)
    }
}
