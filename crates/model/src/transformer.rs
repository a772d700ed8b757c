//! Attention and feed-forward, each behind a norm and beside the residual stream.

use device::{
    DType, Frame, Site, View,
    ops::{Accumulate, Add, Attention, AttentionBackward, Finish},
};
use pgroups::{Param, Weights};

use crate::{
    Block, GptConfig, ModelError,
    linear::{Linear, Then},
    norm::{Norm, Tags},
    params::BLOCK_PARAMS,
};

/// x₁ = x + proj(attention(norm(x))), y = x₁ + fc₂(gelu(fc₁(norm(x₁)))).
///
/// Keeps per token, in elements: 3·dim of query, key and value, 4·dim of norms, attention and its sum, 2·ffn_dim
/// around the activation, and `heads + 4` row statistics. Its input is kept alive, not copied.
pub struct TransformerBlock {
    params: [Param; BLOCK_PARAMS],
    norm_1: Norm,
    qkv: Linear,
    proj: Linear,
    norm_2: Norm,
    fc_1: Linear,
    fc_2: Linear,
    attention: Site,
    add: Site,
    sizes: Sizes,
}

#[derive(Clone, Copy)]
struct Sizes {
    dim: usize,
    heads: usize,
    ffn_dim: usize,
}

impl Sizes {
    fn head_dim(self) -> usize {
        self.dim / self.heads
    }

    /// Of the scores.
    fn scale(self) -> f32 {
        1.0 / (self.head_dim() as f32).sqrt()
    }
}

impl TransformerBlock {
    /// Over the parameters of layer `layer`, in the order of the plan.
    pub(crate) fn new(config: &GptConfig, layer: usize, params: [Param; BLOCK_PARAMS]) -> TransformerBlock {
        let site = |part: &str| format!("h.{layer}.{part}");
        let [n1w, n1b, qw, qb, pw, pb, n2w, n2b, f1w, f1b, f2w, f2b] = &params;
        let tags_1 = Tags { x: "x", y: "norm_1", mean: "mean_1", rstd: "rstd_1", dy: "dnorm_1" };
        let tags_2 = Tags { x: "sum", y: "norm_2", mean: "mean_2", rstd: "rstd_2", dy: "dnorm_2" };
        TransformerBlock {
            norm_1: Norm::new(n1w, n1b, &site("ln_1"), tags_1),
            qkv: Linear::new(qw, qb, &site("attn.c_attn")),
            proj: Linear::new(pw, pb, &site("attn.c_proj")),
            norm_2: Norm::new(n2w, n2b, &site("ln_2"), tags_2),
            fc_1: Linear::new(f1w, f1b, &site("mlp.c_fc")),
            fc_2: Linear::new(f2w, f2b, &site("mlp.c_proj")),
            attention: Site::from(site("attn")),
            add: Site::from(site("mlp")),
            sizes: Sizes { dim: config.dim, heads: config.heads, ffn_dim: config.ffn_dim },
            params,
        }
    }

    /// Batch and sequence of activations.
    fn batch_of(&self, x: &View) -> Result<[usize; 2], ModelError> {
        match *x.shape() {
            [batch, tokens, dim] if dim == self.sizes.dim => Ok([batch, tokens]),
            _ => Err(ModelError::Activations {
                site: self.add.as_str().to_owned(),
                shape: x.shape().to_vec(),
                dim: self.sizes.dim,
            }),
        }
    }

    /// Query, key and value columns of the fused projection.
    fn split(&self, qkv: &View) -> Result<[View; 3], ModelError> {
        let dim = self.sizes.dim;
        Ok([qkv.columns(0..dim)?, qkv.columns(dim..2 * dim)?, qkv.columns(2 * dim..3 * dim)?])
    }

    fn attend(&self, f: &mut Frame, qkv: &View, [batch, tokens]: [usize; 2]) -> Result<View, ModelError> {
        let Sizes { dim, heads, .. } = self.sizes;
        let o = f.save("attended", &[batch, tokens, dim], DType::F32)?;
        let lse = f.save("lse", &[batch, heads, tokens], DType::F32)?;
        let [q, k, v] = self.split(qkv)?;
        let (head_dim, scale) = (self.sizes.head_dim(), self.sizes.scale());
        let attention = Attention { q: &q, k: &k, v: &v, o: &o, lse: &lse, head_dim, seq_len: tokens, scale };
        f.stream().launch(attention.op(&self.attention)?)?;
        Ok(o)
    }

    fn attend_backward(&self, f: &mut Frame, d_o: &View, tokens: usize) -> Result<View, ModelError> {
        let (qkv, o, lse) = (f.saved("qkv")?, f.saved("attended")?, f.saved("lse")?);
        let dqkv = f.save("dqkv", qkv.shape(), DType::F32)?;
        let [q, k, v] = self.split(&qkv)?;
        let [dq, dk, dv] = self.split(&dqkv)?;
        let attention = AttentionBackward {
            q: &q,
            k: &k,
            v: &v,
            o: &o,
            d_o,
            lse: &lse,
            dq: &dq,
            dk: &dk,
            dv: &dv,
            head_dim: self.sizes.head_dim(),
            seq_len: tokens,
            scale: self.sizes.scale(),
        };
        f.stream().launch(attention.op(&self.attention)?)?;
        Ok(dqkv)
    }
}

impl Block for TransformerBlock {
    fn params(&self) -> &[Param] {
        &self.params
    }

    /// `[batch, sequence, dim]` to the same.
    fn forward(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<View, ModelError> {
        let [batch, tokens] = self.batch_of(x)?;
        let Sizes { dim, ffn_dim, .. } = self.sizes;
        let hidden = [batch, tokens, ffn_dim];
        let on = f.stream().clone();

        let normed = self.norm_1.forward(f, w, x, None)?;
        let qkv = f.save("qkv", &[batch, tokens, 3 * dim], DType::F32)?;
        self.qkv.forward(&on, w, &normed, &qkv, Then::Nothing)?;
        let attended = self.attend(f, &qkv, [batch, tokens])?;
        let branch = f.temp(x.shape(), DType::F32)?;
        self.proj.forward(&on, w, &attended, &branch, Then::Nothing)?;

        let normed = self.norm_2.forward(f, w, x, Some(&branch))?;
        let pre = f.save("pre", &hidden, DType::F32)?;
        let active = f.save("active", &hidden, DType::F32)?;
        self.fc_1.forward(&on, w, &normed, &active, Then::Gelu { pre: &pre })?;
        let y = f.temp(x.shape(), DType::F32)?;
        self.fc_2.forward(&on, w, &active, &y, Then::Nothing)?;
        let sum = f.saved("sum")?;
        on.launch(Add { a: &y, b: &sum, y: &y }.op(&self.add)?)?;
        Ok(y)
    }

    fn backward_input(&self, f: &mut Frame, w: &mut dyn Weights, dy: &View) -> Result<Option<View>, ModelError> {
        let [_, tokens] = self.batch_of(dy)?;
        let on = f.stream().clone();
        let plain = || Finish::Into(Accumulate::Overwrite);

        f.keep("dy", dy);
        let pre = f.saved("pre")?;
        let dpre = f.save("dpre", pre.shape(), DType::F32)?;
        self.fc_2.backward_input(&on, w, dy, &dpre, Finish::GeluBackward { pre: &pre })?;
        let dnorm = f.temp(dy.shape(), DType::F32)?;
        self.fc_1.backward_input(&on, w, &dpre, &dnorm, plain())?;
        let dsum = self.norm_2.backward_input(f, w, &dnorm, Some(dy))?;

        f.keep("dsum", &dsum);
        let d_o = f.temp(dy.shape(), DType::F32)?;
        self.proj.backward_input(&on, w, &dsum, &d_o, plain())?;
        let dqkv = self.attend_backward(f, &d_o, tokens)?;
        let dnorm = f.temp(dy.shape(), DType::F32)?;
        self.qkv.backward_input(&on, w, &dqkv, &dnorm, plain())?;
        self.norm_1.backward_input(f, w, &dnorm, Some(&dsum)).map(Some)
    }

    fn backward_weight(&self, f: &mut Frame, w: &mut dyn Weights) -> Result<(), ModelError> {
        self.fc_2.backward_weight(f, w, &f.saved("dy")?, &f.saved("active")?)?;
        self.fc_1.backward_weight(f, w, &f.saved("dpre")?, &f.saved("norm_2")?)?;
        self.norm_2.backward_weight(f, w)?;
        self.proj.backward_weight(f, w, &f.saved("dsum")?, &f.saved("attended")?)?;
        self.qkv.backward_weight(f, w, &f.saved("dqkv")?, &f.saved("norm_1")?)?;
        self.norm_1.backward_weight(f, w)
    }
}
