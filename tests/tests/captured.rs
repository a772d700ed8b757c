//! Captured training with a real backend, against eager training and under the verifier.

pub(crate) mod left_out; //     publishers with one thing left out
mod overlap; //      gathers beside layers, in time
mod purity; //       captures and warm-up change nothing
mod replays; //      the bits of eager training
mod support; //      machines and memory
mod training; //     the program
mod training_ops; // what its layers compute
mod two_models; //   two in one process
mod unordered; //    what of a trace nothing orders
mod verified; //     what is proved, and noticed
