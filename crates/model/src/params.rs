//! Declared parameters, in the order of their first use in the forward pass.

use pgroups::{Init, ParamClass, ParamSpec, Placement};

use crate::{Arch, ConfigViolations, GptConfig, Output};

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
    fn new(name: String, shape: &[usize], init: Init) -> ModelParam {
        let decay = if shape.len() >= 2 { Decay::Applied } else { Decay::Exempt };
        let spec = ParamSpec { name, class: ParamClass::Dense, placement: Placement::whole(shape), init };
        ModelParam { spec, decay }
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
        let mut declared = Declared { params: Vec::new(), layers: config.layers };
        match config.arch {
            Arch::Gpt2 => declared.gpt2(&config),
            Arch::Llama(_) => declared.llama(&config),
        }
        if config.output == Output::Own {
            declared.matrix("lm_head", [config.vocab_rows, config.dim]);
        }
        Ok(GptPlan { config, params: declared.params })
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
    layers: usize,
}

impl Declared {
    fn gpt2(&mut self, config: &GptConfig) {
        let (dim, ffn) = (config.dim, config.ffn_dim);
        self.push("wte".into(), &[config.vocab_rows, dim], NORMAL);
        self.push("wpe".into(), &[config.seq_len, dim], NORMAL);
        let norm = |declared: &mut Declared, name: &str| {
            declared.scale(name, dim);
            declared.bias(name, dim);
        };
        for layer in 0..config.layers {
            let name = |part: &str| format!("h.{layer}.{part}");
            norm(self, &name("ln_1"));
            self.matrix(&name("attn.c_attn"), [3 * dim, dim]);
            self.bias(&name("attn.c_attn"), 3 * dim);
            self.residual(&name("attn.c_proj"), [dim, dim]);
            self.bias(&name("attn.c_proj"), dim);
            norm(self, &name("ln_2"));
            self.matrix(&name("mlp.c_fc"), [ffn, dim]);
            self.bias(&name("mlp.c_fc"), ffn);
            self.residual(&name("mlp.c_proj"), [dim, ffn]);
            self.bias(&name("mlp.c_proj"), dim);
        }
        norm(self, "ln_f");
    }

    fn llama(&mut self, config: &GptConfig) {
        let (dim, ffn, kv) = (config.dim, config.ffn_dim, config.kv_dim());
        self.matrix("model.embed_tokens", [config.vocab_rows, dim]);
        for layer in 0..config.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            self.scale(&name("input_layernorm"), dim);
            self.matrix(&name("self_attn.q_proj"), [dim, dim]);
            self.matrix(&name("self_attn.k_proj"), [kv, dim]);
            self.matrix(&name("self_attn.v_proj"), [kv, dim]);
            self.residual(&name("self_attn.o_proj"), [dim, dim]);
            self.scale(&name("post_attention_layernorm"), dim);
            self.matrix(&name("mlp.gate_proj"), [ffn, dim]);
            self.matrix(&name("mlp.up_proj"), [ffn, dim]);
            self.residual(&name("mlp.down_proj"), [dim, ffn]);
        }
        self.scale("model.norm", dim);
    }

    fn push(&mut self, name: String, shape: &[usize], init: Init) {
        self.params.push(ModelParam::new(name, shape, init));
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2]) {
        self.push(format!("{name}.weight"), &shape, NORMAL);
    }

    /// Each block adds twice to the residual stream; its variance must not grow with depth.
    fn residual(&mut self, name: &str, shape: [usize; 2]) {
        let std = STD / (2.0 * self.layers as f32).sqrt();
        self.push(format!("{name}.weight"), &shape, Init::Normal { std });
    }

    /// A norm's weight.
    fn scale(&mut self, name: &str, dim: usize) {
        self.push(format!("{name}.weight"), &[dim], Init::Constant(1.0));
    }

    fn bias(&mut self, name: &str, dim: usize) {
        self.push(format!("{name}.bias"), &[dim], Init::Constant(0.0));
    }
}
