//! Declared parameters, in the order of their first use in the forward pass.

use pgroups::{Init, ParamClass, ParamSpec, Placement};

use crate::{ConfigViolations, GptConfig, Output};

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

/// Parameters of one transformer block.
pub(crate) const BLOCK_PARAMS: usize = 12;

impl GptPlan {
    /// Declares all parameters.
    ///
    /// Initial values: matrices and embeddings normal with 0.02, the two projections into the residual stream with
    /// 0.02 / √(2 · layers), norm weights 1, biases 0. Matrices are stored `[out, in]`.
    ///
    /// # Errors
    /// Every rule that the sizes break.
    ///
    /// Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    pub fn new(config: GptConfig) -> Result<GptPlan, ConfigViolations> {
        config.check()?;
        let normal = Init::Normal { std: STD };
        let (dim, ffn) = (config.dim, config.ffn_dim);
        // Each block adds twice to the residual stream; its variance must not grow with depth.
        let residual = Init::Normal { std: STD / (2.0 * config.layers as f32).sqrt() };
        let mut params = vec![
            ModelParam::new("wte".into(), &[config.vocab_rows, dim], normal),
            ModelParam::new("wpe".into(), &[config.seq_len, dim], normal),
        ];
        let norm = |params: &mut Vec<ModelParam>, name: String| {
            params.push(ModelParam::new(format!("{name}.weight"), &[dim], Init::Constant(1.0)));
            params.push(ModelParam::new(format!("{name}.bias"), &[dim], Init::Constant(0.0)));
        };
        let linear = |params: &mut Vec<ModelParam>, name: String, [rows, cols]: [usize; 2], init| {
            params.push(ModelParam::new(format!("{name}.weight"), &[rows, cols], init));
            params.push(ModelParam::new(format!("{name}.bias"), &[rows], Init::Constant(0.0)));
        };
        for layer in 0..config.layers {
            norm(&mut params, format!("h.{layer}.ln_1"));
            linear(&mut params, format!("h.{layer}.attn.c_attn"), [3 * dim, dim], normal);
            linear(&mut params, format!("h.{layer}.attn.c_proj"), [dim, dim], residual);
            norm(&mut params, format!("h.{layer}.ln_2"));
            linear(&mut params, format!("h.{layer}.mlp.c_fc"), [ffn, dim], normal);
            linear(&mut params, format!("h.{layer}.mlp.c_proj"), [dim, ffn], residual);
        }
        norm(&mut params, "ln_f".into());
        if config.output == Output::Own {
            params.push(ModelParam::new("lm_head.weight".into(), &[config.vocab_rows, dim], normal));
        }
        Ok(GptPlan { config, params })
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
