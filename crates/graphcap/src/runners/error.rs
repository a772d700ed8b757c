//! What can go wrong with runners.

use std::fmt;

use thiserror::Error;

use super::call::{CacheKey, CallName, GradMode, GraphUnit, RunnerIndex};
use crate::schedule::MicrobatchIndex;

/// Failures of finding and using runners.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum RunnerError {
    /// A call at a moment when its runner cannot take it.
    #[error("{runner} of {unit}: out of turn")]
    OutOfTurn {
        /// The part.
        unit: GraphUnit,
        /// Its runner.
        runner: RunnerIndex,
        /// Which calls.
        #[source]
        source: OutOfTurn,
    },
    /// After creation, no runner can take the call.
    #[error(
        "forward of {call} on {unit}, signature {signature}, {grad}: no runner is left ({}); \
         run it once before the graphs are created",
        listed(unfit)
    )]
    NoneLeft {
        /// The part.
        unit: GraphUnit,
        /// The call.
        call: CallName,
        /// The call's signature.
        signature: String,
        /// What the call wants.
        grad: GradMode,
        /// Why each of the part's runners cannot take it.
        unfit: Vec<Unfit>,
    },
    /// After creation, a named kind of call that never ran before.
    #[error("forward of {call} on {unit}: no runner has key {}; run it once before the graphs are created", key.0)]
    UnknownKey {
        /// The part.
        unit: GraphUnit,
        /// The call.
        call: CallName,
        /// The name.
        key: CacheKey,
    },
    /// A name for a call where every microbatch has its own runner.
    #[error(
        "forward of {call} on {unit} with key {}: with {stages} pipeline stages each microbatch has its own runner; \
         leave the key out", key.0
    )]
    KeyAcrossStages {
        /// The part.
        unit: GraphUnit,
        /// The call.
        call: CallName,
        /// The name.
        key: CacheKey,
        /// Pipeline stages.
        stages: u32,
    },
    /// A runner that was made for other inputs, where there is no choice of runner.
    #[error("forward of {call} on {unit}: its {runner} is made for {made_for}, not for {signature}")]
    OtherSignature {
        /// The part.
        unit: GraphUnit,
        /// The call.
        call: CallName,
        /// The only runner that could take it.
        runner: RunnerIndex,
        /// The runner's signature.
        made_for: String,
        /// The call's signature.
        signature: String,
    },
    /// A named kind of call whose runner brings no gradients.
    #[error("forward of {call} on {unit}, {grad}: its {runner} is made for calls {made_for}")]
    OtherGradMode {
        /// The part.
        unit: GraphUnit,
        /// The call.
        call: CallName,
        /// The runner of the call's key.
        runner: RunnerIndex,
        /// What the runner brings.
        made_for: GradMode,
        /// What the call wants.
        grad: GradMode,
    },
    /// Microbatches in another order than they were recorded in, where each has its own runner.
    #[error("forward of {call} on {unit}: {turn} has its turn, on {runner}; run microbatches in recorded order")]
    OtherOrder {
        /// The part.
        unit: GraphUnit,
        /// The call.
        call: CallName,
        /// The microbatch that comes next.
        turn: MicrobatchIndex,
        /// Its runner.
        runner: RunnerIndex,
    },
    /// A backward that was never run before the graphs were created.
    #[error("backward of {call} on {unit}: {runner} has no backward; run it once before the graphs are created")]
    NotRecorded {
        /// The part.
        unit: GraphUnit,
        /// Its runner.
        runner: RunnerIndex,
        /// The call.
        call: CallName,
    },
    /// A runner that is not one of these.
    #[error("{runner} is none of {first}..{end}: it was cleared, or belongs to another set")]
    UnknownRunner {
        /// The runner.
        runner: RunnerIndex,
        /// First runner there is.
        first: usize,
        /// One past the last.
        end: usize,
    },
    /// A pass that ended in the middle.
    #[error("pass {pass} has ended with {}", listed(open))]
    PassUnfinished {
        /// The pass.
        pass: u64,
        /// What is left of it.
        open: Vec<OpenCall>,
    },
}

/// Two calls of one runner that cannot follow each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum OutOfTurn {
    /// No backward between two forwards.
    #[error("forward of {second} follows forward of {first}, whose backward has not run and needs what it saved")]
    TwoForwards {
        /// The earlier.
        first: CallName,
        /// The later.
        second: CallName,
    },
    /// No forward between two backwards.
    #[error("backward of {second} follows backward of {first}, with no forward between them")]
    TwoBackwards {
        /// The earlier.
        first: CallName,
        /// The later.
        second: CallName,
    },
    /// Nothing before a backward.
    #[error("backward of {backward} comes first, before any forward")]
    BackwardFirst {
        /// The backward.
        backward: CallName,
    },
    /// A backward of another microbatch.
    #[error("backward of {backward} follows forward of {forward}: a runner's backward is of the same microbatch")]
    OtherMicrobatch {
        /// The forward.
        forward: CallName,
        /// The backward.
        backward: CallName,
    },
    /// A backward of a forward that saved nothing.
    #[error("backward of {backward} follows forward of {forward}, which ran without gradients")]
    BackwardOfNoGrad {
        /// The forward.
        forward: CallName,
        /// The backward.
        backward: CallName,
    },
    /// A backward of a forward whose saved values are gone.
    #[error(
        "backward of {backward}: what forward of {forward} saved was overwritten by forward of {by}, which ran \
         without gradients"
    )]
    Dropped {
        /// The forward.
        forward: CallName,
        /// The forward without gradients that came after it.
        by: CallName,
        /// The backward.
        backward: CallName,
    },
    /// A backward after the end of its pass.
    #[error("backward of {backward}: forward of {forward} was given up when its pass ended")]
    GivenUp {
        /// The forward.
        forward: CallName,
        /// The backward.
        backward: CallName,
    },
}

/// A runner that cannot take a call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unfit {
    /// The runner.
    pub runner: RunnerIndex,
    /// The first reason.
    pub why: WhyUnfit,
}

/// Why a runner cannot take a call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WhyUnfit {
    /// Its backward is still to run.
    Awaits,
    /// It is made for these inputs.
    MadeFor(String),
    /// It brings no gradients.
    NoGradients,
}

/// What a pass left open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OpenCall {
    /// A forward without its backward.
    Backward {
        /// The part.
        unit: GraphUnit,
        /// Its runner.
        runner: RunnerIndex,
        /// The forward.
        forward: CallName,
    },
    /// Microbatches that did not have their turn.
    Turns {
        /// The part.
        unit: GraphUnit,
        /// Which of its calls.
        grad: GradMode,
        /// Microbatches that had their turn.
        done: usize,
        /// Microbatches that were recorded.
        recorded: usize,
    },
}

fn listed<T: fmt::Display>(items: &[T]) -> String {
    if items.is_empty() {
        return "it has none".to_owned();
    }
    items.iter().map(T::to_string).collect::<Vec<_>>().join("; ")
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.why {
            WhyUnfit::Awaits => write!(f, "{} awaits its backward", self.runner),
            WhyUnfit::MadeFor(signature) => write!(f, "{} is made for {signature}", self.runner),
            WhyUnfit::NoGradients => write!(f, "{} brings no gradients", self.runner),
        }
    }
}

impl fmt::Display for OpenCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenCall::Backward { unit, runner, forward } => {
                write!(f, "no backward of {forward} on {unit} ({runner})")
            }
            OpenCall::Turns { unit, grad, done, recorded } => {
                write!(f, "{done} of {recorded} microbatches {grad} run on {unit}")
            }
        }
    }
}
