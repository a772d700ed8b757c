//! Every synchronisation of this crate, by name. Gathers read shards under
//! [`Turn::READ_AFTER_PUBLISH`](pgroups::Turn::READ_AFTER_PUBLISH), which is not ours.

use device::Why;

/// A gathered weight is used behind its gather.
pub const USE_AFTER_GATHER: Why = Why("gtp.use_after_gather");

/// A gather overwrites a slot behind the last use of what lay there.
pub const GATHER_AFTER_USE: Why = Why("gtp.gather_after_use");

/// A weight gradient is reduced behind the operations that write it.
pub const REDUCE_AFTER_GRAD: Why = Why("gtp.reduce_after_grad");

/// The reductions of a graph begin behind those of the graph before: both use what the lane has.
pub const REDUCE_AFTER_REDUCE: Why = Why("gtp.reduce_after_reduce");

/// A weight gradient overwrites a slot behind the reduce-scatter of what lay there.
pub const GRAD_AFTER_REDUCE: Why = Why("gtp.grad_after_reduce");

/// The first gather or reduction of a pass that follows other work is behind the stream that computes.
pub const BEGIN_AFTER_WORK: Why = Why("gtp.begin_after_work");

/// Whatever follows a pass elsewhere, or the end of a captured part of one, is behind its gathers and reductions.
pub const END_AFTER_LANES: Why = Why("gtp.end_after_lanes");

/// A pass that runs as it is submitted is behind the graphs before it.
pub const EAGER_AFTER_GRAPH: Why = Why("gtp.eager_after_graph");

/// A graph is behind the graphs of other streams that use the same slots.
pub const GRAPH_AFTER_GRAPH: Why = Why("gtp.graph_after_graph");

/// All of them, for tests that drop one at a time.
pub const ALL: [Why; 9] = [
    USE_AFTER_GATHER,
    GATHER_AFTER_USE,
    REDUCE_AFTER_GRAD,
    GRAD_AFTER_REDUCE,
    REDUCE_AFTER_REDUCE,
    BEGIN_AFTER_WORK,
    END_AFTER_LANES,
    EAGER_AFTER_GRAPH,
    GRAPH_AFTER_GRAPH,
];
