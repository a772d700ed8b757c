//! What differs between architectures.

/// Which blocks a model is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arch {
    /// Learned positions, layer norm, GELU, biases everywhere but in the output.
    ///
    /// Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    Gpt2,
    /// Rotary positions, RMS norm, SwiGLU, grouped-query attention, no biases.
    ///
    /// Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023.
    Llama(LlamaConfig),
}

/// What only [`Arch::Llama`] lets choose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LlamaConfig {
    /// Heads of key and value; divides the query heads, each of which uses the key head of its group.
    pub kv_heads: usize,
    /// Base of the rotary angles: pair i of a head at position t is turned by t · base^(−2i / head width). Usually
    /// [`LlamaConfig::ROPE_BASE`]; larger for longer sequences.
    pub rope_base: usize,
}

impl LlamaConfig {
    /// The base that rotary positions came with.
    ///
    /// Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    pub const ROPE_BASE: usize = 10_000;

    /// What widths of the hidden layer are multiples of.
    pub const FFN_MULTIPLE: usize = 256;

    /// The usual width of the hidden layer: two thirds of `4 · dim`, so that three matrices have as many elements as
    /// two of `4 · dim`, up to the next multiple of [`LlamaConfig::FFN_MULTIPLE`]. 11008 for 4096, 13824 for 5120.
    ///
    /// Source: Shazeer, "GLU Variants Improve Transformer", 2020 (two thirds); the released LLaMA 7B and 13B (multiple).
    pub const fn usual_ffn_dim(dim: usize) -> usize {
        (8 * dim / 3).next_multiple_of(LlamaConfig::FFN_MULTIPLE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_layers_have_the_widths_of_the_released_models() {
        assert_eq!([4096, 5120, 6656, 8192].map(LlamaConfig::usual_ffn_dim), [11008, 13824, 17920, 22016]);
        assert_eq!([1, 384].map(LlamaConfig::usual_ffn_dim), [256, 1024]);
    }
}
