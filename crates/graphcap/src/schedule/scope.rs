//! How much one graph holds, and which pipelines allow it.
//!
//! | scope | one stage | several stages | with expert overlap |
//! |---|---|---|---|
//! | `none` | yes | yes | yes |
//! | `layer` | yes | yes | yes |
//! | `chunk` | yes | yes | no: its layers take turns with another microbatch's |
//! | `microbatch` | yes | no: other microbatches run between its forward and backward | no |
//! | `step` | yes | no: a step waits for other stages in between | yes |

use std::{fmt, str::FromStr};

use super::{
    error::ScheduleError,
    setup::{ExpertOverlap, PipelineSetup},
    violation::{ScheduleViolation, ScheduleViolations},
};
use crate::Scope;

/// How much one captured graph holds, as a setting: nothing, or a [`Scope`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum GraphScope {
    /// Nothing is captured.
    None,
    /// One pass over one layer.
    Layer,
    /// One pass over one chunk.
    Chunk,
    /// Forward and backward of one microbatch.
    Microbatch,
    /// A whole step.
    Step,
}

impl GraphScope {
    /// All scopes, smallest first.
    pub const ALL: [GraphScope; 5] =
        [GraphScope::None, GraphScope::Layer, GraphScope::Chunk, GraphScope::Microbatch, GraphScope::Step];

    /// As it is written in settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            GraphScope::None => "none",
            GraphScope::Layer => "layer",
            GraphScope::Chunk => "chunk",
            GraphScope::Microbatch => "microbatch",
            GraphScope::Step => "step",
        }
    }

    /// What is captured, if anything is.
    #[must_use]
    pub const fn captured(self) -> Option<Scope> {
        match self {
            GraphScope::None => None,
            GraphScope::Layer => Some(Scope::Layer),
            GraphScope::Chunk => Some(Scope::Chunk),
            GraphScope::Microbatch => Some(Scope::Microbatch),
            GraphScope::Step => Some(Scope::Step),
        }
    }

    /// Whether a pipeline can be captured with this scope.
    ///
    /// # Errors
    /// Every rule that the scope breaks there, with the nearest setting that would do. The setup's own rules are
    /// [`PipelineSetup::check`]'s.
    pub fn check(self, setup: &PipelineSetup) -> Result<(), ScheduleViolations> {
        let mut broken = Vec::new();
        let pp = setup.place.size();
        if self >= GraphScope::Microbatch && pp > 1 {
            broken.push(ScheduleViolation::ScopeAcrossStages { scope: self, pp });
        }
        // A step holds both halves of what runs together, a layer holds neither's neighbours.
        if matches!(self, GraphScope::Chunk | GraphScope::Microbatch) && setup.overlap == ExpertOverlap::On {
            broken.push(ScheduleViolation::ScopeAcrossOverlap { scope: self });
        }
        ScheduleViolations::of(broken)
    }
}

impl From<Scope> for GraphScope {
    fn from(scope: Scope) -> GraphScope {
        match scope {
            Scope::Layer => GraphScope::Layer,
            Scope::Chunk => GraphScope::Chunk,
            Scope::Microbatch => GraphScope::Microbatch,
            Scope::Step => GraphScope::Step,
        }
    }
}

impl fmt::Display for GraphScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for GraphScope {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<GraphScope, ScheduleError> {
        let known = GraphScope::ALL.into_iter().find(|scope| scope.name() == text);
        known.ok_or_else(|| ScheduleError::UnknownScope { text: text.to_owned() })
    }
}
