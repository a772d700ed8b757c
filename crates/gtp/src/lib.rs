//! Generalized tensor parallelism: weights gathered just before use, and layers cut over a tensor group.
#![forbid(unsafe_code)]

pub mod layers; // products, embeddings and losses of which each rank of a tensor group computes a part
