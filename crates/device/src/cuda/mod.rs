//! The driver for NVIDIA cards: real streams, events, memory, graphs and kernels.
//!
//! The CUDA libraries are opened when a machine is, so the same program runs on hosts without them and says what is
//! missing. A program begins with [`prepare`], because CUDA reads some variables before anything else.
//!
//! Raw calls come from cudarc; `error::check` makes results of them; the types of this module (`Card`,
//! `DeviceMemory`, `PinnedBlock`, `CardEvent`, `StreamOnCard`, `GraphOnCard`) own what they made and are safe to use.

mod begin; // members that begin, and calls that wait for a card
mod blaslt; // products through a library
mod branches; // which nodes of a graph may work in the same memory
mod captured; // what libraries queue, as graphs
mod card; // a card's context, and what is made once for it
#[cfg(all(test, feature = "gpu-tests"))]
mod card_tests; // facts about CUDA
mod choices; // which algorithms, from run to run
mod clique; // a group's communicators, and how many fit on a card
mod collective; // joint operations as calls of NCCL
mod comm_settings; // of communicators
mod compile; // kernels from source
mod contest; // the fastest of several ways
mod cudnn; // attention through a library
mod engine; // what is submitted, waited for and closed
mod prepare; // variables that CUDA reads at its start
mod error;
mod event; // marks on a card
mod exec; // graphs of the driver's, and the gates in them
mod fault; // which operation it was
mod fnv; // bits that stand for bytes
mod functions; // kernels by name
mod fused; // attention as the library takes it
mod gang; // launches that go to the card together
mod graph; // captured graphs as CUDA graphs
mod hopper; // products by our kernel for compute capability 9.0
mod host; // host operations in the order of a stream
mod kept; // files that are whole or not there
mod kernels; // sources, and the functions in them
mod launch; // kernels with their arguments
mod leave; // the way out of a process whose card stands
mod line; // what a stream holds back
mod measure; // algorithms for products, by their times
mod meet; // members of joint operations find each other
mod memory; // of the card, and pinned
mod nccl; // calls of the library
mod numerics; // algorithms that compute in f32 what is f32
mod product; // products as the library takes them
mod requests; // what a kernel request becomes
mod stacks; // memory for the stacks of threads
mod steps; // what is launched for a request, with what it works in
mod stopwatch; // times on a card
mod stream; // a stream's half on the card
mod times; // when traced work ran
mod stuck; // collectives that do not end
mod uses; // one use of a communicator at a time
mod workers; // threads for host operations
mod workspace; // memory that kernels and the library work in

pub use self::card::{Attentions, CudaOptions, Products, count_cards};
pub(crate) use self::clique::Lease;
pub use self::compile::{Arch, Compiled, compile_kernels};
pub use self::cudnn::find_cudnn;
pub(crate) use self::engine::CudaEngine;
pub use self::error::CudaError;
pub(crate) use self::event::Point;
pub(crate) use self::graph::GraphOnCard;
pub(crate) use self::launch::Ready;
pub use self::measure::ProductChoices;
pub(crate) use self::memory::DeviceMemory;
pub use self::nccl::find_nccl;
pub use self::prepare::{prepare, prepare_for};
pub(crate) use self::stream::StreamOnCard;
