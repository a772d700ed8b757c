//! Composes the other crates into a training run; owns no mechanism.
#![forbid(unsafe_code)]

mod cli; // commands and their arguments
mod commands; // what each of them does
mod config; // what a run is to do
mod error; // why a command ends without its result
mod metrics; // what every step leaves in the run folder
mod plot; // the loss curve
mod train; // the loop
mod report; // what is shown while a run goes on

pub use self::{
    cli::{Cli, Command, ConfigArgs, DoctorArgs, GroupsArgs, PlanArgs, TrainArgs},
    commands::run,
    config::{
        Arch, Config, DataConfig, DdpConfig, DeviceConfig, DeviceKind, Dispatch, Indivisible, LayoutConfig, LogConfig,
        LossNormalization, Microbatches, ModelConfig, NoEffect, NotYet, Number, OptimizerConfig, PrecisionConfig,
        ProgressKind, Range, Recompute, Report, Rule, Schedule, ScheduleKind, Setting, SettingValue, TokenizerKind,
        TrainConfig, Violation,
    },
    error::TrainError,
    metrics::{MetricsFile, StepMetrics, read_metrics},
    plot::{loss_curve, write_loss_curve},
    report::{Doctor, Finding, Progress, ProgressConfig, RunSummary},
    train::{RunPlan, Trained, default_run_dir, plan_run, product_peak, train},
};
