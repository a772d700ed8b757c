//! One asynchronous machine with several drivers: streams, events, memory and kernels.

mod cpu;
mod dtype;
mod error;
mod op;
pub mod ops;
mod region;
mod shape;
#[cfg(test)]
mod testing;
mod view;
mod why;

pub use self::cpu::{ArgError, Args, Fresh, Rows, RowsMut};
pub use self::dtype::{DType, Element, bf16};
pub use self::error::{Asked, Departure, Error, OpRef, Pending, PendingJoint};
pub use self::op::{Access, HostFn, Launch, Mode, Op, OpError, Site};
pub use self::ops::Kernel;
pub use self::region::Region;
pub use self::shape::Shape;
pub use self::view::{Allocation, MemoryKind, View};
pub use self::why::Why;
