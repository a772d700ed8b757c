//! Attention and feed-forward, each behind a norm and beside the residual stream.

use device::{
    Frame, View,
    ops::{Accumulate, Finish},
};
use gtp::layers::{Linear, Norm, NormConfig, NormTags, Region, RowLinear};
use pgroups::{Param, Weights};

use crate::{
    Block, GptConfig, LlamaConfig, ModelError,
    attention::SelfAttention,
    config::EPS,
    feed_forward::FeedForward,
    params::{GPT2_BLOCK, LLAMA_BLOCK},
    sequences,
};

/// sum = x + proj(attention(norm(x))), y = sum + feed_forward(norm(sum)).
///
/// Its input is kept alive, not copied; `docs/model.md` counts what else it keeps.
pub struct TransformerBlock {
    params: Vec<Param>,
    norm_1: Norm,
    attention: SelfAttention,
    proj: RowLinear,
    norm_2: Norm,
    feed_forward: FeedForward,
    name: String,
    dim: usize,
}

const TAGS_1: NormTags =
    NormTags { x: "x", y: "norm_1", mean: "mean_1", rstd: "rstd_1", dweight: "dweight_1", dbias: "dbias_1" };
const TAGS_2: NormTags =
    NormTags { x: "sum", y: "norm_2", mean: "mean_2", rstd: "rstd_2", dweight: "dweight_2", dbias: "dbias_2" };

const NORM_1: NormConfig = NormConfig { eps: EPS, tags: TAGS_1 };
const NORM_2: NormConfig = NormConfig { eps: EPS, tags: TAGS_2 };

impl TransformerBlock {
    /// Over the parameters of layer `layer` of a GPT-2, in the order of the plan, as one of `ranks` has them.
    pub(crate) fn gpt2(
        config: &GptConfig,
        ranks: usize,
        layer: usize,
        params: &[Param; GPT2_BLOCK],
    ) -> TransformerBlock {
        let name = format!("h.{layer}");
        let site = |part: &str| format!("{name}.{part}");
        let [n1w, n1b, qw, qb, pw, pb, n2w, n2b, f1w, f1b, f2w, f2b] = params;
        let qkv = Linear::new(qw, Some(qb), &site("attn.c_attn"));
        let first = Linear::new(f1w, Some(f1b), &site("mlp.c_fc"));
        let last = RowLinear::new(f2w, Some(f2b), &site("mlp.c_proj"));
        TransformerBlock {
            norm_1: Norm::new(n1w, Some(n1b), &site("ln_1"), NORM_1),
            attention: SelfAttention::fused(config, ranks, qkv, &site("attn")),
            proj: RowLinear::new(pw, Some(pb), &site("attn.c_proj")),
            norm_2: Norm::new(n2w, Some(n2b), &site("ln_2"), NORM_2),
            feed_forward: FeedForward::gelu(first, last, config.ffn_dim / ranks),
            params: params.to_vec(),
            name,
            dim: config.dim,
        }
    }

    /// Over the parameters of layer `layer` of a Llama, in the order of the plan, as one of `ranks` has them.
    pub(crate) fn llama(
        config: &GptConfig,
        llama: LlamaConfig,
        ranks: usize,
        layer: usize,
        params: &[Param; LLAMA_BLOCK],
    ) -> TransformerBlock {
        let name = format!("model.layers.{layer}");
        let site = |part: &str| format!("{name}.{part}");
        let linear = |weight: &Param, part: &str| Linear::new(weight, None, &site(part));
        let [n1, q, k, v, o, n2, gate, up, down] = params;
        let qkv = [linear(q, "self_attn.q_proj"), linear(k, "self_attn.k_proj"), linear(v, "self_attn.v_proj")];
        let row = |weight: &Param, part: &str| RowLinear::new(weight, None, &site(part));
        let feed = [linear(gate, "mlp.gate_proj"), linear(up, "mlp.up_proj")];
        TransformerBlock {
            norm_1: Norm::new(n1, None, &site("input_layernorm"), NORM_1),
            attention: SelfAttention::turned(config, ranks, qkv, llama.rope_base, &site("self_attn")),
            proj: row(o, "self_attn.o_proj"),
            norm_2: Norm::new(n2, None, &site("post_attention_layernorm"), NORM_2),
            feed_forward: FeedForward::swiglu(feed, row(down, "mlp.down_proj"), config.ffn_dim / ranks, &site("mlp")),
            params: params.to_vec(),
            name,
            dim: config.dim,
        }
    }

    /// Sequences and tokens in each, of the microbatch that `x` belongs to.
    fn sequences(&self, f: &mut Frame, w: &dyn Weights, x: &View) -> Result<[usize; 2], ModelError> {
        sequences::of(f, &Region::of(w), x, self.dim, &self.name)
    }

    /// Everything that is kept. Returns the hidden layer.
    fn up_to_hidden(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<View, ModelError> {
        let sizes @ [batch, tokens] = self.sequences(f, w, x)?;
        let normed = self.norm_1.forward(f, w, x, None)?;
        let attended = self.attention.forward(f, w, &normed, sizes)?;
        let branch = self.proj.forward(f, w, &attended, &[batch, tokens, self.dim], None)?;
        let normed = self.norm_2.forward(f, w, x, Some(&branch))?;
        self.feed_forward.hidden(f, w, &normed, sizes)
    }
}

impl Block for TransformerBlock {
    fn params(&self) -> &[Param] {
        &self.params
    }

    /// `[batch, sequence, dim]` to the same, or this rank's rows of it, `[rows, dim]`, to the same.
    fn forward(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<View, ModelError> {
        let active = self.up_to_hidden(f, w, x)?;
        let sum = f.saved(TAGS_2.x)?;
        self.feed_forward.output(f, w, &active, &sum)
    }

    fn recompute(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<(), ModelError> {
        self.up_to_hidden(f, w, x).map(drop)
    }

    fn backward_input(&self, f: &mut Frame, w: &mut dyn Weights, dy: &View) -> Result<Option<View>, ModelError> {
        self.sequences(f, w, dy)?;
        let region = Region::of(w);
        let dy_rows = region.gather(f, dy)?;
        f.keep("dy", &dy_rows);
        let dnorm = self.feed_forward.backward_input(f, w, &dy_rows)?;
        let dsum = self.norm_2.backward_input(f, w, &dnorm, Some(dy))?;

        let dsum_rows = region.gather(f, &dsum)?;
        f.keep("dsum", &dsum_rows);
        let d_o = f.temp(f.saved("attended")?.shape(), dy.dtype())?;
        self.proj.backward_input(f.stream(), w, &dsum_rows, &d_o, Finish::Into(Accumulate::Overwrite))?;
        let dnorm = self.attention.backward_input(f, w, &d_o, self.dim)?;
        Ok(Some(self.norm_1.backward_input(f, w, &dnorm, Some(&dsum))?))
    }

    fn backward_weight(&self, f: &mut Frame, w: &mut dyn Weights) -> Result<(), ModelError> {
        let (dy, normed) = (f.saved("dy")?, f.saved(TAGS_2.y)?);
        self.feed_forward.backward_weight(f, w, &dy, &normed)?;
        self.norm_2.backward_weight(f, w)?;
        self.proj.backward_weight(f, w, &f.saved("dsum")?, &f.saved("attended")?)?;
        let normed = f.saved(TAGS_1.y)?;
        self.attention.backward_weight(f, w, &normed)?;
        Ok(self.norm_1.backward_weight(f, w)?)
    }
}
