//! Forward and backward in turn.
//!
//! | state | forward, gradients on | forward, gradients off | backward |
//! |---|---|---|---|
//! | `Ready` | `Awaiting` | `Ready` | refused: names what came before |
//! | `Awaiting` its forward's backward | refused: names both forwards | `Ready`, the forward is dropped | `Ready`, if it is the same microbatch's |
//!
//! The end of a pass makes every runner `Ready`. A forward without gradients overwrites what a pending backward would read, so that backward is refused afterwards.
//! It is allowed all the same: an evaluation has to be able to follow a step that was given up.

use super::{
    call::{CallName, GradMode},
    error::OutOfTurn,
};

/// Where a runner is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Ready(Before),
    Awaiting(CallName),
}

/// What made a runner ready.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Before {
    Nothing,
    Backward(CallName),
    NoGrad(CallName),
    Dropped { forward: CallName, by: CallName },
    GivenUp(CallName),
}

impl State {
    pub(super) const NEW: State = State::Ready(Before::Nothing);

    /// A pass ended before this forward's backward.
    pub(super) fn given_up(forward: CallName) -> State {
        State::Ready(Before::GivenUp(forward))
    }

    pub(super) fn is_ready(self) -> bool {
        matches!(self, State::Ready(_))
    }

    pub(super) fn forward(self, call: CallName, grad: GradMode) -> Result<State, OutOfTurn> {
        match (self, grad) {
            (State::Ready(_), GradMode::On) => Ok(State::Awaiting(call)),
            (State::Ready(_), GradMode::Off) => Ok(State::Ready(Before::NoGrad(call))),
            (State::Awaiting(first), GradMode::On) => Err(OutOfTurn::TwoForwards { first, second: call }),
            (State::Awaiting(forward), GradMode::Off) => Ok(State::Ready(Before::Dropped { forward, by: call })),
        }
    }

    pub(super) fn backward(self, call: CallName) -> Result<State, OutOfTurn> {
        match self {
            State::Awaiting(forward) if forward.microbatch == call.microbatch => {
                Ok(State::Ready(Before::Backward(call)))
            }
            State::Awaiting(forward) => Err(OutOfTurn::OtherMicrobatch { forward, backward: call }),
            State::Ready(Before::Nothing) => Err(OutOfTurn::BackwardFirst { backward: call }),
            State::Ready(Before::Backward(first)) => Err(OutOfTurn::TwoBackwards { first, second: call }),
            State::Ready(Before::NoGrad(forward)) => Err(OutOfTurn::BackwardOfNoGrad { forward, backward: call }),
            State::Ready(Before::GivenUp(forward)) => Err(OutOfTurn::GivenUp { forward, backward: call }),
            State::Ready(Before::Dropped { forward, by }) => Err(OutOfTurn::Dropped { forward, by, backward: call }),
        }
    }
}
