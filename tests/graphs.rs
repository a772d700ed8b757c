//! All ways to train from graphs, as settings. The tests of every crate that go through them include this file by its path.

/// The first one submits every step; all others replay.
pub(crate) const GRAPHS: [&[&str]; 8] = [
    &["graph.scope=none"],
    &["graph.scope=layer", "graph.gates=in-graph"],
    &["graph.scope=layer", "graph.gates=before-replay"],
    &["graph.scope=chunk", "graph.gates=in-graph"],
    &["graph.scope=chunk", "graph.gates=before-replay"],
    &["graph.scope=microbatch", "graph.gates=in-graph"],
    &["graph.scope=microbatch", "graph.gates=before-replay"],
    &["graph.scope=step"],
];
