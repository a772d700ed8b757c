//! Attention and feed-forward, each behind a norm and beside the residual stream.

use device::{
    DType, Frame, View,
    ops::{Accumulate, Finish},
};
use pgroups::{Param, Weights};

use crate::{
    Block, GptConfig, LlamaConfig, ModelError,
    attention::SelfAttention,
    feed_forward::FeedForward,
    linear::{Linear, Then},
    norm::{Norm, Tags},
    params::{GPT2_BLOCK, LLAMA_BLOCK},
};

/// sum = x + proj(attention(norm(x))), y = sum + feed_forward(norm(sum)).
///
/// Its input is kept alive, not copied; `docs/model.md` counts what else it keeps.
pub struct TransformerBlock {
    params: Vec<Param>,
    norm_1: Norm,
    attention: SelfAttention,
    proj: Linear,
    norm_2: Norm,
    feed_forward: FeedForward,
    name: String,
    dim: usize,
}

const TAGS_1: Tags = Tags { x: "x", y: "norm_1", mean: "mean_1", rstd: "rstd_1", dy: "dnorm_1" };
const TAGS_2: Tags = Tags { x: "sum", y: "norm_2", mean: "mean_2", rstd: "rstd_2", dy: "dnorm_2" };

impl TransformerBlock {
    /// Over the parameters of layer `layer` of a GPT-2, in the order of the plan.
    pub(crate) fn gpt2(config: &GptConfig, layer: usize, params: &[Param; GPT2_BLOCK]) -> TransformerBlock {
        let name = format!("h.{layer}");
        let site = |part: &str| format!("{name}.{part}");
        let [n1w, n1b, qw, qb, pw, pb, n2w, n2b, f1w, f1b, f2w, f2b] = params;
        let qkv = Linear::new(qw, Some(qb), &site("attn.c_attn"));
        let first = Linear::new(f1w, Some(f1b), &site("mlp.c_fc"));
        let last = Linear::new(f2w, Some(f2b), &site("mlp.c_proj"));
        TransformerBlock {
            norm_1: Norm::new(n1w, Some(n1b), &site("ln_1"), TAGS_1),
            attention: SelfAttention::fused(config, qkv, &site("attn")),
            proj: Linear::new(pw, Some(pb), &site("attn.c_proj")),
            norm_2: Norm::new(n2w, Some(n2b), &site("ln_2"), TAGS_2),
            feed_forward: FeedForward::gelu([first, last], config.ffn_dim),
            params: params.to_vec(),
            name,
            dim: config.dim,
        }
    }

    /// Over the parameters of layer `layer` of a Llama, in the order of the plan.
    pub(crate) fn llama(
        config: &GptConfig,
        llama: LlamaConfig,
        layer: usize,
        params: &[Param; LLAMA_BLOCK],
    ) -> TransformerBlock {
        let name = format!("model.layers.{layer}");
        let site = |part: &str| format!("{name}.{part}");
        let linear = |weight: &Param, part: &str| Linear::new(weight, None, &site(part));
        let [n1, q, k, v, o, n2, gate, up, down] = params;
        let qkv = [linear(q, "self_attn.q_proj"), linear(k, "self_attn.k_proj"), linear(v, "self_attn.v_proj")];
        let feed = [linear(gate, "mlp.gate_proj"), linear(up, "mlp.up_proj"), linear(down, "mlp.down_proj")];
        TransformerBlock {
            norm_1: Norm::new(n1, None, &site("input_layernorm"), TAGS_1),
            attention: SelfAttention::turned(config, qkv, llama.rope_base, &site("self_attn")),
            proj: linear(o, "self_attn.o_proj"),
            norm_2: Norm::new(n2, None, &site("post_attention_layernorm"), TAGS_2),
            feed_forward: FeedForward::swiglu(feed, config.ffn_dim, &site("mlp")),
            params: params.to_vec(),
            name,
            dim: config.dim,
        }
    }

    fn check(&self, x: &View) -> Result<(), ModelError> {
        match *x.shape() {
            [_, _, dim] if dim == self.dim => Ok(()),
            _ => Err(ModelError::Activations { site: self.name.clone(), shape: x.shape().to_vec(), dim: self.dim }),
        }
    }

    /// Everything that is kept. Returns the hidden layer.
    fn up_to_hidden(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<View, ModelError> {
        self.check(x)?;
        let normed = self.norm_1.forward(f, w, x, None)?;
        let attended = self.attention.forward(f, w, &normed)?;
        let branch = f.temp(x.shape(), DType::F32)?;
        self.proj.forward(f.stream(), w, &attended, &branch, Then::Nothing)?;
        let normed = self.norm_2.forward(f, w, x, Some(&branch))?;
        self.feed_forward.hidden(f, w, &normed)
    }
}

impl Block for TransformerBlock {
    fn params(&self) -> &[Param] {
        &self.params
    }

    /// `[batch, sequence, dim]` to the same.
    fn forward(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<View, ModelError> {
        let active = self.up_to_hidden(f, w, x)?;
        let sum = f.saved(TAGS_2.x)?;
        self.feed_forward.output(f, w, &active, &sum)
    }

    fn recompute(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<(), ModelError> {
        self.up_to_hidden(f, w, x).map(drop)
    }

    fn backward_input(&self, f: &mut Frame, w: &mut dyn Weights, dy: &View) -> Result<Option<View>, ModelError> {
        self.check(dy)?;
        f.keep("dy", dy);
        let dnorm = self.feed_forward.backward_input(f, w, dy)?;
        let dsum = self.norm_2.backward_input(f, w, &dnorm, Some(dy))?;

        f.keep("dsum", &dsum);
        let d_o = f.temp(dy.shape(), DType::F32)?;
        self.proj.backward_input(f.stream(), w, &dsum, &d_o, Finish::Into(Accumulate::Overwrite))?;
        let dnorm = self.attention.backward_input(f, w, &d_o)?;
        self.norm_1.backward_input(f, w, &dnorm, Some(&dsum)).map(Some)
    }

    fn backward_weight(&self, f: &mut Frame, w: &mut dyn Weights) -> Result<(), ModelError> {
        self.feed_forward.backward_weight(f, w, &f.saved("dy")?, &f.saved(TAGS_2.y)?)?;
        self.norm_2.backward_weight(f, w)?;
        self.proj.backward_weight(f, w, &f.saved("dsum")?, &f.saved("attended")?)?;
        self.attention.backward_weight(f, w, &f.saved(TAGS_1.y)?)?;
        self.norm_1.backward_weight(f, w)
    }
}
