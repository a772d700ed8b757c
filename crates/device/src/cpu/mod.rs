//! The driver that computes on this host. The only module of the crate with unsafe code.

mod args;
mod claims;
mod engine;
mod exchange;
mod exec;
pub(crate) mod kernels;
mod launch;
mod storage;
mod tiles;

pub(crate) use self::args::Staged;
pub use self::args::{ArgError, Args, Rows, RowsMut};
pub(crate) use self::claims::{Claim, Claims};
pub(crate) use self::engine::CpuEngine;
pub(crate) use self::exchange::{deliver, snapshot};
pub(crate) use self::exec::{Alone, disagree, failure, run_op, trace_run, with_claims};
pub use self::storage::Fresh;
pub(crate) use self::storage::{POISON, Storage};
pub(crate) use self::tiles::catch;
