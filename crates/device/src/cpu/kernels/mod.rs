//! How each kernel computes on the host: plain loops over rows, no knowledge of streams.

// A row's number is used for several matrices and vectors at once; zips of five iterators hide that.
#![allow(clippy::needless_range_loop)]

mod activation;
mod adamw;
mod attention;
mod cross_entropy;
mod elementwise;
mod embedding;
mod gemm;
mod lanes;
mod lines;
mod math;
mod norm;
mod reduce;
mod rotary;
mod wide;
mod widened;

use crate::{Args, Kernel, OpError};

pub(crate) fn run(kernel: &Kernel, args: &mut Args<'_>) -> Result<(), OpError> {
    if takes_bf16(kernel) { compute(kernel, args) } else { widened::run(args, |args| compute(kernel, args)) }
}

/// Whether a kernel reads and writes bf16 by itself: the others compute on copies in f32.
///
/// A sum of many terms needs the copies anyway, because it is rounded only at its end; and for a loop over elements they
/// are cheap, because a piece's copies stay in cache. Tables are read in a few rows only, optimizer state once.
fn takes_bf16(kernel: &Kernel) -> bool {
    matches!(
        kernel,
        Kernel::Embedding(_)
            | Kernel::AdamW(_)
            | Kernel::Fill(_)
            | Kernel::Cast(_)
            | Kernel::Scale(_)
            | Kernel::Add(_)
            | Kernel::Axpy(_)
            | Kernel::SquaredNorm(_)
    )
}

fn compute(kernel: &Kernel, args: &mut Args<'_>) -> Result<(), OpError> {
    match kernel {
        Kernel::Gemm(spec) => gemm::gemm(spec, args)?,
        Kernel::LayerNorm(spec) => norm::layer_norm(spec, args)?,
        Kernel::LayerNormBackward(spec) => norm::layer_norm_backward(spec, args)?,
        Kernel::LayerNormGrad(spec) => norm::layer_norm_grad(spec, args)?,
        Kernel::RmsNorm(spec) => norm::rms_norm(spec, args)?,
        Kernel::RmsNormBackward(spec) => norm::rms_norm_backward(spec, args)?,
        Kernel::RmsNormGrad(spec) => norm::rms_norm_grad(spec, args)?,
        Kernel::Gelu(spec) => activation::gelu(spec, args)?,
        Kernel::GeluBackward(spec) => activation::gelu_backward(spec, args)?,
        Kernel::SwiGlu(_) => activation::swiglu(args)?,
        Kernel::SwiGluBackward(_) => activation::swiglu_backward(args)?,
        Kernel::RotaryTable(spec) => rotary::table(spec, args)?,
        Kernel::Rotary(spec) => rotary::rotary(spec, args)?,
        Kernel::Embedding(spec) => embedding::embedding(spec, args)?,
        Kernel::EmbeddingGrad(spec) => embedding::embedding_grad(spec, args)?,
        Kernel::PositionGrad(spec) => embedding::position_grad(spec, args)?,
        Kernel::Attention(spec) => attention::forward(spec, args)?,
        Kernel::AttentionBackward(spec) => attention::backward(spec, args)?,
        Kernel::CrossEntropy(spec) => cross_entropy::cross_entropy(spec, args)?,
        Kernel::VocabPartials(spec) => cross_entropy::partials(spec, args)?,
        Kernel::VocabRescale(_) => cross_entropy::rescale(args)?,
        Kernel::VocabFinish(spec) => cross_entropy::finish(spec, args)?,
        Kernel::AdamW(spec) => adamw::adamw(spec, args)?,
        Kernel::AdvanceAdam(spec) => adamw::advance(spec, args)?,
        Kernel::Fill(spec) => elementwise::fill(spec, args)?,
        Kernel::Cast(_) => elementwise::cast(args)?,
        Kernel::Scale(spec) => elementwise::scale(spec, args)?,
        Kernel::Add(spec) => elementwise::add(spec, args)?,
        Kernel::Axpy(spec) => elementwise::axpy(spec, args)?,
        Kernel::BiasGrad(spec) => reduce::bias_grad(spec, args)?,
        Kernel::BiasGrads(spec) => reduce::bias_grads(spec, args)?,
        Kernel::Sum(spec) => reduce::sum(spec, args)?,
        Kernel::SquaredNorm(_) => reduce::squared_norm(args)?,
        Kernel::ClipFactor(spec) => reduce::clip_factor(spec, args)?,
    }
    Ok(())
}
