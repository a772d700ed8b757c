//! How much of a step a graph holds, and how it waits for what it reads.

use std::fmt;

use crate::GraphScope;

/// How much of a step one graph holds. As a setting, which may be nothing, it is a [`GraphScope`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scope {
    /// One pass of a layer.
    Layer,
    /// One pass of a chunk of the model.
    Chunk,
    /// Forward and backward of a microbatch.
    Microbatch,
    /// Everything: microbatches, reductions, the optimizer, publications. Each happens once in a replay.
    Step,
}

impl Scope {
    /// Whether replays happen several times between two writes of the parameters, so that publications and reductions
    /// of gradients must stay outside.
    #[must_use]
    pub const fn is_below_step(self) -> bool {
        !matches!(self, Scope::Step)
    }

    /// Its name, as in configurations.
    #[must_use]
    pub fn name(self) -> &'static str {
        GraphScope::from(self).name()
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Where a replay waits for what it reads, and for gradients that it may write. Results are the same.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum GateMode {
    /// Before it begins: the launching stream waits for everything.
    BeforeReplay,
    /// Inside, in front of the first reader of each branch: what comes first does not wait for what comes later.
    #[default]
    InGraph,
}

impl GateMode {
    /// Both.
    pub const ALL: [GateMode; 2] = [GateMode::BeforeReplay, GateMode::InGraph];

    /// Its name, as in configurations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            GateMode::BeforeReplay => "before-replay",
            GateMode::InGraph => "in-graph",
        }
    }
}

impl fmt::Display for GateMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
