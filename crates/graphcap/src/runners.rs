//! Which captured graph serves which call.
//!
//! A [runner](Runners) is a forward graph with its backward graph, made for one part of the model and one signature of
//! inputs. What a runner is made of is the caller's: here it is a handle `R` and a signature `S`.
//!
//! * With one pipeline stage a microbatch is done before the next begins, so one runner can serve all: a call takes
//!   the first that is ready, has its signature and brings gradients if the call wants them. With more stages
//!   microbatches are in flight together, and each has its own runner, in strict turn. Which of the two holds is
//!   decided by the pipeline group that was passed ([`Sharing`]).
//! * First come eager passes. The first forward and the first backward of every runner are recorded in the order they
//!   run, over all parts of the model; [`Runners::create`] captures in that order, since graphs that share memory can
//!   only be captured as they will be replayed. After that no call can ask for a graph that is not there.
//! * A runner goes forward and backward in turn (the table is in `state`): anything else is an error that names both
//!   calls.

mod call; //  who calls
mod error;
mod pool; //  the runners of one part
mod set; //   the runners of a model
mod state; // forward and backward in turn

pub use self::{
    call::{CacheKey, CallName, ForwardCall, GradMode, GraphUnit, RunnerIndex},
    error::{OpenCall, OutOfTurn, RunnerError, Unfit, WhyUnfit},
    pool::Sharing,
    set::{Creation, Recorded, Runners},
};
