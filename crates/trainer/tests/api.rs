//! The trainer as a library and as a command.

#[path = "api/bf16.rs"]
mod bf16;
#[path = "api/command.rs"]
mod command;
#[path = "api/evaluation.rs"]
mod evaluation;
#[path = "api/fixture.rs"]
mod fixture;
#[path = "api/kept_files.rs"]
mod kept_files;
#[path = "api/layouts.rs"]
mod layouts;
#[path = "api/parity.rs"]
mod parity;
#[path = "api/replicas.rs"]
mod replicas;
#[path = "api/runs.rs"]
mod runs;
#[path = "api/stopping.rs"]
mod stopping;
#[path = "api/timeline.rs"]
mod timeline;
