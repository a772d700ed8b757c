//! Data parallelism: gradients reduced over replicas, and the optimizer step. Read `replicas` first, then `adam`.
#![forbid(unsafe_code)]

mod adam; // AdamW over flat buffers, all that changes from step to step on the device
mod error; // what can go wrong here
mod replicas; // gradients averaged over the ranks that hold the same parameters

pub use self::adam::{Adam, AdamConfig, DecayRange};
pub use self::error::DdpError;
pub use self::replicas::Replicas;
