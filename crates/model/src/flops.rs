//! Operations per token, for the share of the hardware's peak that training reaches.

use crate::{Arch, GptPlan};

impl GptPlan {
    /// Floating-point operations that training needs for one token, forward and backward, a multiplication and an
    /// addition counted as two.
    ///
    /// 6 · N for N elements of matrices that tokens are multiplied with (those of the blocks, and the output table
    /// once, tied or not), and 6 · layers · dim · seq_len for attention: the two products of scores and values cost
    /// 4 · dim · seq_len forward, three times that in all, and half of it is masked away. Not counted: looking up
    /// embeddings, rows that pad the vocabulary, biases, norms, activations, softmax, the optimizer, and whatever is
    /// computed twice (recomputed layers; attention's backward pass recomputes probabilities), so the share is of useful
    /// work.
    ///
    /// Source: Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1; Chowdhery et al., "PaLM",
    /// 2022, appendix B, with the causal half left out.
    pub fn flops_per_token(&self) -> f64 {
        let c = self.config();
        let (layers, dim, ffn) = (c.layers as f64, c.dim as f64, c.ffn_dim as f64);
        // Queries and the projection back; keys and values.
        let attention = 2.0 * dim * dim + 2.0 * dim * c.kv_dim() as f64;
        let feed_forward = match c.arch {
            Arch::Gpt2 => 2.0 * dim * ffn,
            Arch::Llama(_) => 3.0 * dim * ffn,
        };
        let block = attention + feed_forward;
        let matrices = layers * block + (c.vocab * c.dim) as f64;
        6.0 * matrices + 6.0 * layers * dim * c.seq_len as f64
    }
}
