//! Captured graphs: what is captured in which order, by which runner, over which memory.
//!
//! Read `schedule` first, then `runners`.
#![forbid(unsafe_code)]

mod schedule; // what a pipeline stage runs in which order, and what of it is captured
mod runners; //  which captured graph serves which call

pub use self::runners::{
    CacheKey, CallName, Creation, ForwardCall, GradMode, GraphUnit, OpenCall, OutOfTurn, Recorded, RunnerError,
    RunnerIndex, Runners, Sharing, Unfit, WhyUnfit,
};
pub use self::schedule::{
    CaptureOrder, ChunkIndex, Counts, Direction, ExpertOverlap, GraphScope, Interleaving, LayerIndex, LayerOrder,
    LayerStep, LocalWarmUp, MicrobatchIndex, OrderId, Pairing, PassKind, PipelinePlace, PipelinePlan, PipelineSetup,
    Schedule, ScheduleError, ScheduleViolation, ScheduleViolations, SlotEntry, SlotIndex, SlotPlan, Step, WeightGrads,
    WhereStopped, local_warm_up, warm_up_iterations,
};
