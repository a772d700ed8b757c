//! One asynchronous machine with several drivers: streams, events, memory and kernels.

mod apart; // values on cache lines of their own
mod arena;
mod capture;
mod cpu;
pub mod cuda;
mod dataflow;
mod device;
mod download;
mod dtype;
mod engine;
mod error;
mod event;
mod exchange;
mod executable;
mod frame;
mod graph;
mod handoff;
mod joint;
mod label;
mod launch;
mod launch_trace;
mod loosen;
mod machine;
mod meeting;
mod memory;
#[cfg(test)]
mod miri_graph_tests;
#[cfg(test)]
mod miri_tests;
mod op;
pub mod ops;
mod queue;
mod region;
mod report;
mod shape;
mod sim;
mod stream;
mod stream_capture;
mod survey;
#[cfg(test)]
mod testing;
mod trace;
mod view;
mod why;

pub use self::arena::{FramePlan, Place};
pub use self::cpu::{ArgError, Args, Fresh, Rows, RowsMut};
pub use self::device::{Device, MemoryUse};
pub use self::download::Download;
pub use self::dtype::{DType, Element, bf16};
pub use self::error::Error;
pub use self::event::Event;
pub use self::exchange::{Exchange, Reduce};
pub use self::frame::Frame;
pub use self::graph::{CapturedGraph, Executable, GraphUse};
pub use self::label::Label;
pub use self::loosen::GraphOrder;
pub use self::machine::{HostTurn, Machine, Options};
pub use self::meeting::Meeting;
pub use self::op::{Access, HostFn, Landing, Launch, Mode, Op, OpError, OpParts, Site};
pub use self::ops::Kernel;
pub use self::region::Region;
pub use self::report::{Asked, Departure, OpRef, Pending, PendingJoint};
pub use self::shape::Shape;
pub use self::sim::{Explored, explore, explore_every_order};
pub use self::stream::Stream;
pub use self::trace::{
    BoundGate, Columns, LaunchGroup, NodeWait, Note, Position, Tick, Trace, TraceAccess, TraceEvent, TraceGraph,
    TraceNode, TraceNodeKind, WaitOutcome, WaitSpan, Work,
};
pub use self::view::{Allocation, MemoryKind, View};
pub use self::why::Why;

/// The page's snippets compile and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/device.md")]
struct Page;

/// So does this one's, as far as it can without a card.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/device-cuda.md")]
struct CudaPage;

/// So do the README's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
