//! Declared parameters, in the order of their first use in the forward pass.

use pgroups::{Axis, Init, Layout, ParamClass, ParamSpec, Placement, Sequence};

use crate::{
    Arch, ConfigViolations, GptConfig, Output,
    sharding::{ShardConfig, Sharding, Split, TensorCut},
};

/// Whether the optimizer's weight decay reaches a parameter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Decay {
    /// Matrices and embeddings.
    Applied,
    /// Biases and norm weights: pulling them to 0 only hurts.
    Exempt,
}

/// A parameter that a model declares.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelParam {
    /// Name, placement and initial values.
    pub spec: ParamSpec,
    /// Whether weight decay reaches it: by default whatever has two dimensions or more.
    pub decay: Decay,
}

impl ModelParam {
    fn new(name: String, placement: Placement, init: Init) -> ModelParam {
        let decay = if placement.global.len() >= 2 { Decay::Applied } else { Decay::Exempt };
        ModelParam { spec: ParamSpec { name, class: ParamClass::Dense, placement, init }, decay }
    }

    /// Elements of the global tensor.
    pub fn numel(&self) -> usize {
        self.spec.placement.global.iter().product()
    }
}

/// Checked sizes and the parameters that they need. Pure data.
#[derive(Clone, PartialEq, Debug)]
pub struct GptPlan {
    config: GptConfig,
    params: Vec<ModelParam>,
    /// Names of weights and biases of norms.
    norms: Vec<String>,
    sharding: Sharding,
}

/// Standard deviation of matrices and embeddings.
const STD: f32 = 0.02;

const NORMAL: Init = Init::Normal { std: STD };

/// Parameters of a transformer block of GPT-2.
pub(crate) const GPT2_BLOCK: usize = 12;

/// Parameters of a transformer block of Llama.
pub(crate) const LLAMA_BLOCK: usize = 9;

impl GptPlan {
    /// Declares all parameters.
    ///
    /// Initial values: matrices and embeddings normal with 0.02, the two projections into the residual stream with
    /// 0.02 / √(2 · layers), norm weights 1, biases 0. Matrices are stored `[out, in]`.
    ///
    /// # Errors
    /// Every rule that the sizes break.
    ///
    /// Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, for the initial values of
    /// both architectures.
    pub fn new(config: GptConfig) -> Result<GptPlan, ConfigViolations> {
        config.check()?;
        Ok(GptPlan::declare(config, Sharding::WHOLE))
    }

    /// As [`GptPlan::new`], laid on `layout`: heads, hidden columns and the vocabulary are cut over its tensor axis,
    /// then the rows of every matrix and table over its weight-shard axis. Norm weights and the biases of sums stay
    /// whole. On a layout without the two axes this is [`GptPlan::new`].
    ///
    /// Initial values are those of the undivided model, bit for bit; padding holds 0.
    ///
    /// # Errors
    /// Every rule that the sizes break, those of the layout included, with the nearest sizes that break none.
    pub fn on(config: GptConfig, layout: &Layout, shards: ShardConfig) -> Result<GptPlan, ConfigViolations> {
        let sharding = Sharding::of(layout, shards);
        let uneven = config.uneven_over(&sharding);
        if let Err(ConfigViolations(mut found)) = config.check() {
            found.extend(uneven);
            return Err(ConfigViolations(found));
        }
        let plan = GptPlan::declare(config, sharding);
        let found = [uneven, sharding.uneven_rows(&plan.params)].concat();
        if found.is_empty() { Ok(plan) } else { Err(ConfigViolations(found)) }
    }

    fn declare(config: GptConfig, sharding: Sharding) -> GptPlan {
        let mut declared = Declared { params: Vec::new(), norms: Vec::new(), layers: config.layers, sharding };
        match config.arch {
            Arch::Gpt2 => declared.gpt2(&config),
            Arch::Llama(_) => declared.llama(&config),
        }
        if config.output == Output::Own {
            declared.matrix("lm_head", [config.vocab_rows, config.dim], TensorCut::Vocab);
        }
        GptPlan { config, params: declared.params, norms: declared.norms, sharding }
    }

    /// Parameters whose gradients, on each rank of the tensor group, are those of its rows only: their sum over the
    /// group is the gradient. Norms, under a sequence split; none otherwise.
    pub fn partial_over_tp(&self) -> Vec<String> {
        let split = self.sharding.tp > 1 && self.sharding.config.sequence == Sequence::Split;
        if split { self.norms.clone() } else { Vec::new() }
    }

    /// Parameters that every rank of the weight-shard axis holds whole, while each reads samples of its own: the
    /// average over the axis is the gradient (the sum, under a loss per token). None on a layout without that axis.
    pub fn whole_over_gtp(&self) -> Vec<String> {
        let cut = |p: &ModelParam| p.spec.placement.cuts.iter().any(|cut| cut.axis == Axis::GTP);
        let whole = |p: &&ModelParam| self.sharding.gtp > 1 && !cut(p);
        self.params.iter().filter(whole).map(|p| p.spec.name.clone()).collect()
    }

    pub(crate) fn split(&self) -> Split {
        Split { tp: self.sharding.tp, sequence: self.sharding.config.sequence }
    }

    /// Sizes.
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// All parameters, in the order of their first use in the forward pass.
    pub fn params(&self) -> &[ModelParam] {
        &self.params
    }

    /// What the parameters are made from, in the same order.
    pub fn specs(&self) -> Vec<ParamSpec> {
        self.params.iter().map(|p| p.spec.clone()).collect()
    }

    /// Elements of all parameters.
    pub fn numel(&self) -> usize {
        self.params.iter().map(ModelParam::numel).sum()
    }
}

/// Parameters so far.
struct Declared {
    params: Vec<ModelParam>,
    norms: Vec<String>,
    layers: usize,
    sharding: Sharding,
}

impl Declared {
    fn gpt2(&mut self, config: &GptConfig) {
        let (dim, ffn) = (config.dim, config.ffn_dim);
        self.push("wte".into(), &[config.vocab_rows, dim], TensorCut::Vocab, NORMAL);
        self.push("wpe".into(), &[config.seq_len, dim], TensorCut::None, NORMAL);
        let norm = |declared: &mut Declared, name: &str| {
            declared.scale(name, dim);
            declared.bias(name, dim, TensorCut::None);
            declared.norms.push(format!("{name}.bias"));
        };
        // Queries, keys and values: each rank has its heads of all three.
        let fused = TensorCut::Out { blocks: 3 };
        for layer in 0..config.layers {
            let name = |part: &str| format!("h.{layer}.{part}");
            norm(self, &name("ln_1"));
            self.matrix(&name("attn.c_attn"), [3 * dim, dim], fused);
            self.bias(&name("attn.c_attn"), 3 * dim, fused);
            self.residual(&name("attn.c_proj"), [dim, dim]);
            self.bias(&name("attn.c_proj"), dim, TensorCut::None);
            norm(self, &name("ln_2"));
            self.matrix(&name("mlp.c_fc"), [ffn, dim], TensorCut::OUT);
            self.bias(&name("mlp.c_fc"), ffn, TensorCut::OUT);
            self.residual(&name("mlp.c_proj"), [dim, ffn]);
            self.bias(&name("mlp.c_proj"), dim, TensorCut::None);
        }
        norm(self, "ln_f");
    }

    fn llama(&mut self, config: &GptConfig) {
        let (dim, ffn, kv) = (config.dim, config.ffn_dim, config.kv_dim());
        self.matrix("model.embed_tokens", [config.vocab_rows, dim], TensorCut::Vocab);
        for layer in 0..config.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            self.scale(&name("input_layernorm"), dim);
            self.matrix(&name("self_attn.q_proj"), [dim, dim], TensorCut::OUT);
            self.matrix(&name("self_attn.k_proj"), [kv, dim], TensorCut::OUT);
            self.matrix(&name("self_attn.v_proj"), [kv, dim], TensorCut::OUT);
            self.residual(&name("self_attn.o_proj"), [dim, dim]);
            self.scale(&name("post_attention_layernorm"), dim);
            self.matrix(&name("mlp.gate_proj"), [ffn, dim], TensorCut::OUT);
            self.matrix(&name("mlp.up_proj"), [ffn, dim], TensorCut::OUT);
            self.residual(&name("mlp.down_proj"), [dim, ffn]);
        }
        self.scale("model.norm", dim);
    }

    fn push(&mut self, name: String, shape: &[usize], cut: TensorCut, init: Init) {
        let placement = self.sharding.placement(shape, cut);
        self.params.push(ModelParam::new(name, placement, init));
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2], cut: TensorCut) {
        self.push(format!("{name}.weight"), &shape, cut, NORMAL);
    }

    /// Each block adds twice to the residual stream; its variance must not grow with depth.
    fn residual(&mut self, name: &str, shape: [usize; 2]) {
        let std = STD / (2.0 * self.layers as f32).sqrt();
        self.push(format!("{name}.weight"), &shape, TensorCut::In, Init::Normal { std });
    }

    /// A norm's weight.
    fn scale(&mut self, name: &str, dim: usize) {
        self.push(format!("{name}.weight"), &[dim], TensorCut::None, Init::Constant(1.0));
        self.norms.push(format!("{name}.weight"));
    }

    fn bias(&mut self, name: &str, dim: usize, cut: TensorCut) {
        self.push(format!("{name}.bias"), &[dim], cut, Init::Constant(0.0));
    }
}
