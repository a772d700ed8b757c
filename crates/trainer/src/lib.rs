//! Composes the other crates into a training run; owns no mechanism.
#![forbid(unsafe_code)]

mod cli; // commands and their arguments
mod commands; // what each of them does
mod config; // what a run is to do
mod error; // why a command ends without its result
mod events; // the same for TensorBoard
mod metrics; // what every step leaves in the run folder
mod plot; // the loss curve
mod train; // the loop
mod report; // what is shown while a run goes on
mod timeline; // a trace as a picture, for Perfetto
mod verify; // steps proved free of races
mod whole_file; // files that are there whole or not at all

#[cfg(test)]
#[path = "../../../tests/cards.rs"]
mod cards; // the first card, for tests
#[cfg(test)]
#[path = "../../../tests/graphs.rs"]
mod graphs; // all ways to train from graphs, for tests

pub use self::{
    cli::{Cli, Command, ConfigArgs, DoctorArgs, GroupsArgs, InitArgs, PlanArgs, TrainArgs, VerifyArgs, VerifyOn},
    commands::{Outcome, run},
    config::{
        Arch, Config, DataConfig, DdpConfig, DeviceConfig, DeviceKind, Dispatch, GateMode, GraphConfig, GraphOrder,
        GraphScope, GtpConfig, Indivisible, LayoutConfig, LogConfig, LossNormalization, Microbatches, ModelConfig,
        NoEffect, NotYet, Number, OptimizerConfig, PrecisionConfig, ProgressKind, Range, Recompute, Report, Rule,
        Schedule, ScheduleKind, Setting, SettingValue, TokenizerKind, TrainConfig, Violation,
    },
    error::TrainError,
    events::EventFile,
    metrics::{MetricsFile, PhaseTimes, Spread, StepMetrics, read_metrics},
    plot::{loss_curve, write_loss_curve},
    report::{Doctor, Finding, Progress, ProgressConfig, RunSummary},
    timeline::{Clock, StreamNames, timeline, write_timeline},
    train::{
        Detail, ParallelSummary, Placement, RunEnd, RunOptions, RunPlan, Signal, StopSource, TimelineConfig, Trained,
        default_run_dir, dry_run, plan_run, planned_detail, product_peak, trace_steps, train, write_initial_weights,
    },
};
