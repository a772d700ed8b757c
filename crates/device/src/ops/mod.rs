//! The closed set of kernels: typed requests that check their shapes once and become an [`Op`](crate::Op).
//!
//! A request borrows its views: `Gelu { x: &x, y: &y }.op("h0.mlp")?`. Views are taken as matrices: the last
//! dimension is the columns, all others together the rows.

mod accumulate;
mod activation;
mod adamw;
mod attention;
mod check;
mod cross_entropy;
pub(crate) mod cut;
mod elementwise;
mod embedding;
mod gemm;
mod gemm_shape;
mod master;
mod norm;
mod reduce;
mod rms_norm;
mod rotary;
#[cfg(test)]
pub(crate) mod trial;
mod values;

pub use self::accumulate::{Accumulate, Factor};
pub(crate) use self::accumulate::{By, Old};
pub(crate) use self::activation::Place;
pub use self::activation::{Gelu, GeluBackward, SwiGlu, SwiGluBackward};
pub use self::activation::{GeluBackwardSpec, GeluSpec, SwiGluBackwardSpec, SwiGluSpec};
pub use self::adamw::{AdamRun, AdamW, AdamWRuns, AdvanceAdam, Hyper};
pub use self::adamw::{AdamWSpec, AdvanceAdamSpec};
pub use self::attention::AttentionSpec;
pub use self::attention::{Attention, AttentionBackward};
pub use self::cross_entropy::{CrossEntropy, IGNORE, VocabFinish, VocabPartials, VocabRescale};
pub use self::cross_entropy::{CrossEntropySpec, VocabFinishSpec, VocabPartialsSpec, VocabRescaleSpec};
pub use self::elementwise::{Add, Axpy, Cast, Fill, Scale};
pub use self::elementwise::{AddSpec, AxpySpec, CastSpec, FillSpec, ScaleSpec};
pub use self::embedding::{Embedding, EmbeddingGrad, PositionGrad, Positions, Vocab};
pub use self::embedding::{EmbeddingGradSpec, EmbeddingSpec, PositionGradSpec};
pub(crate) use self::gemm::GemmFinish;
pub use self::gemm::GemmSpec;
pub use self::gemm::{Finish, Gemm, Trans};
pub use self::gemm_shape::GemmShape;
pub(crate) use self::gemm_shape::MatrixShape;
pub use self::master::{join_master, split_master};
pub use self::norm::{LayerNorm, LayerNormBackward, LayerNormGrad, Residual, StretchSums};
pub use self::norm::{LayerNormBackwardSpec, LayerNormGradSpec, LayerNormSpec};
pub(crate) use self::norm::{Skip, stretch};
pub use self::reduce::{BiasGrad, BiasGrads, ClipFactor, SquaredNorm, Sum};
pub use self::reduce::{BiasGradSpec, BiasGradsSpec, ClipFactorSpec, SquaredNormSpec, SumSpec};
pub use self::rms_norm::{RmsNorm, RmsNormBackward, RmsNormGrad};
pub use self::rms_norm::{RmsNormBackwardSpec, RmsNormGradSpec, RmsNormSpec};
pub use self::rotary::{Rotary, RotaryTable, Turning};
pub use self::rotary::{RotarySpec, RotaryTableSpec};
pub use self::values::ValueError;
use crate::{Access, Args, OpError};

/// A known kernel with its settings: plain data, matched once per driver. Made by the request of the same name.
#[derive(Clone, Debug)]
pub enum Kernel {
    /// [`Gemm`].
    Gemm(GemmSpec),
    /// [`LayerNorm`].
    LayerNorm(LayerNormSpec),
    /// [`LayerNormBackward`].
    LayerNormBackward(LayerNormBackwardSpec),
    /// [`LayerNormGrad`].
    LayerNormGrad(LayerNormGradSpec),
    /// [`RmsNorm`].
    RmsNorm(RmsNormSpec),
    /// [`RmsNormBackward`].
    RmsNormBackward(RmsNormBackwardSpec),
    /// [`RmsNormGrad`].
    RmsNormGrad(RmsNormGradSpec),
    /// [`Gelu`].
    Gelu(GeluSpec),
    /// [`GeluBackward`].
    GeluBackward(GeluBackwardSpec),
    /// [`SwiGlu`].
    SwiGlu(SwiGluSpec),
    /// [`SwiGluBackward`].
    SwiGluBackward(SwiGluBackwardSpec),
    /// [`RotaryTable`].
    RotaryTable(RotaryTableSpec),
    /// [`Rotary`].
    Rotary(RotarySpec),
    /// [`Embedding`].
    Embedding(EmbeddingSpec),
    /// [`EmbeddingGrad`].
    EmbeddingGrad(EmbeddingGradSpec),
    /// [`PositionGrad`].
    PositionGrad(PositionGradSpec),
    /// [`Attention`].
    Attention(AttentionSpec),
    /// [`AttentionBackward`].
    AttentionBackward(AttentionSpec),
    /// [`CrossEntropy`].
    CrossEntropy(CrossEntropySpec),
    /// [`VocabPartials`].
    VocabPartials(VocabPartialsSpec),
    /// [`VocabRescale`].
    VocabRescale(VocabRescaleSpec),
    /// [`VocabFinish`].
    VocabFinish(VocabFinishSpec),
    /// [`AdamW`].
    AdamW(AdamWSpec),
    /// [`AdvanceAdam`].
    AdvanceAdam(AdvanceAdamSpec),
    /// [`Fill`].
    Fill(FillSpec),
    /// [`Cast`].
    Cast(CastSpec),
    /// [`Scale`].
    Scale(ScaleSpec),
    /// [`Add`].
    Add(AddSpec),
    /// [`Axpy`].
    Axpy(AxpySpec),
    /// [`BiasGrad`].
    BiasGrad(BiasGradSpec),
    /// [`BiasGrads`].
    BiasGrads(BiasGradsSpec),
    /// [`Sum`].
    Sum(SumSpec),
    /// [`SquaredNorm`].
    SquaredNorm(SquaredNormSpec),
    /// [`ClipFactor`].
    ClipFactor(ClipFactorSpec),
}

/// How a kernel is cut and what it costs; from settings and shapes only.
pub(crate) trait Work {
    fn tiles(&self, _accesses: &[Access]) -> usize {
        1
    }

    fn tile(&self, accesses: &[Access], _tile: usize) -> Vec<Access> {
        accesses.to_vec()
    }

    fn flops(&self, accesses: &[Access]) -> u64;
}

impl Kernel {
    /// Pieces that may run at the same time; by shape only, so results do not depend on how many run.
    pub(crate) fn tiles(&self, accesses: &[Access]) -> usize {
        self.work(|w| w.tiles(accesses))
    }

    /// The accesses of piece `tile`: the same kernel over parts of its views.
    pub(crate) fn tile(&self, accesses: &[Access], tile: usize) -> Vec<Access> {
        self.work(|w| w.tile(accesses, tile))
    }

    /// Computes on the host.
    pub(crate) fn run(&self, args: &mut Args<'_>) -> Result<(), OpError> {
        crate::cpu::kernels::run(self, args)
    }

    /// Floating-point operations, multiply and add counted separately.
    pub fn flops(&self, accesses: &[Access]) -> u64 {
        self.work(|w| w.flops(accesses))
    }

    fn work<R>(&self, ask: impl FnOnce(&dyn Work) -> R) -> R {
        match self {
            Kernel::Gemm(k) => ask(k),
            Kernel::LayerNorm(k) => ask(k),
            Kernel::LayerNormBackward(k) => ask(k),
            Kernel::LayerNormGrad(k) => ask(k),
            Kernel::RmsNorm(k) => ask(k),
            Kernel::RmsNormBackward(k) => ask(k),
            Kernel::RmsNormGrad(k) => ask(k),
            Kernel::Gelu(k) => ask(k),
            Kernel::GeluBackward(k) => ask(k),
            Kernel::SwiGlu(k) => ask(k),
            Kernel::SwiGluBackward(k) => ask(k),
            Kernel::RotaryTable(k) => ask(k),
            Kernel::Rotary(k) => ask(k),
            Kernel::Embedding(k) => ask(k),
            Kernel::EmbeddingGrad(k) => ask(k),
            Kernel::PositionGrad(k) => ask(k),
            Kernel::Attention(k) => ask(&k.forward()),
            Kernel::AttentionBackward(k) => ask(&k.backward()),
            Kernel::CrossEntropy(k) => ask(k),
            Kernel::VocabPartials(k) => ask(k),
            Kernel::VocabRescale(k) => ask(k),
            Kernel::VocabFinish(k) => ask(k),
            Kernel::AdamW(k) => ask(k),
            Kernel::AdvanceAdam(k) => ask(k),
            Kernel::Fill(k) => ask(k),
            Kernel::Cast(k) => ask(k),
            Kernel::Scale(k) => ask(k),
            Kernel::Add(k) => ask(k),
            Kernel::Axpy(k) => ask(k),
            Kernel::BiasGrad(k) => ask(k),
            Kernel::BiasGrads(k) => ask(k),
            Kernel::Sum(k) => ask(k),
            Kernel::SquaredNorm(k) => ask(k),
            Kernel::ClipFactor(k) => ask(k),
        }
    }
}
