//! Training text: files to tokens to samples, in an order that depends on the seed and the consumed count only.
//!
//! Invariant: `data` knows files, tokens and data ranks. It has never heard of a device, a group or a model.
#![forbid(unsafe_code)]

mod batches;
mod corpus; // the text in memory, and the windows of a part
mod error; // what can be wrong with the text, and what to change
mod files; // which files a pattern stands for
mod order; // which sample comes at which position
mod sampler; // which samples make a global batch, and which of them a data rank gets
mod split; // which part of the token stream is trained on, which is kept for evaluation
mod tokenizer; // text to token ids and back // the tensors of a rank's share

pub use self::{
    batches::{Batch, Batches, BatchesConfig, Microbatch},
    corpus::{Corpus, Source, Windows},
    error::DataError,
    files::resolve,
    order::{SampleId, SampleOrder},
    sampler::{DataRank, DataRanks, GlobalBatch, Sampler, SamplerConfig},
    split::{Part, Split},
    tokenizer::Tokenizer,
};

#[cfg(doctest)]
#[doc = include_str!("../../../docs/data.md")]
mod page {}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
