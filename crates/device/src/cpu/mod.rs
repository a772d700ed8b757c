//! The driver that computes on this host. The only module of the crate with unsafe code.

mod args;
pub(crate) mod kernels;
mod storage;

pub use self::args::{ArgError, Args, Rows, RowsMut};
pub use self::storage::Fresh;
pub(crate) use self::storage::Storage;
