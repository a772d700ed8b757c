//! The trainer as a library and as a command.

#[path = "api/command.rs"]
mod command;
#[path = "api/fixture.rs"]
mod fixture;
#[path = "api/runs.rs"]
mod runs;
