//! Reference GPT with explicit forward and backward passes over weights and memory that are handed to it.
//!
//! A [`GptConfig`] becomes a [`GptPlan`] (checked sizes, declared parameters), which becomes a [`Gpt`] over the
//! [`Param`](pgroups::Param)s of a layout. A [`Gpt`] is a chain of [`Block`]s and holds no value, group or stream.
#![forbid(unsafe_code)]

// What a model is.
mod arch; //        which blocks
mod config; //      sizes, and every rule they break
mod flops; //       operations per token
mod params; //      declared parameters, in forward order
mod sharding; //    how they lie on a layout, and what does not divide
// How it runs.
mod attention; //   queries, keys, values, and what they gather
mod block; //       the seam: forward, input gradient, weight gradient
mod embedding; //   tokens and learned positions
mod feed_forward; // the hidden layer
mod gpt; //         a chain of blocks and its loss
mod head; //        final norm and logits
mod recompute; //   computing a second time instead of keeping
mod rotary; //      positions as angles
mod sequences; //   how many tokens there are where a rank has only some
mod transformer; // attention and feed-forward beside the residual stream
// Beside it.
mod error;
mod file; //        weights as other programs have them
mod sample; //      one token out of logits

pub use self::{
    arch::{Arch, LlamaConfig},
    block::Block,
    config::{ConfigRule, ConfigViolation, ConfigViolations, GptConfig, Output},
    embedding::Embedding,
    error::ModelError,
    gpt::{Gpt, Microbatch},
    head::Head,
    params::{Decay, GptPlan, ModelParam},
    recompute::{Recompute, RecomputeLayers},
    sample::{Draw, Sampling, sample},
    sharding::ShardConfig,
    transformer::TransformerBlock,
};

/// The page's snippets compile and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/model.md")]
struct Page;

/// So do the README's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
