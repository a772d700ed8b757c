//! What is shown while a run goes on, when it ends, and of the machine it runs on.

mod doctor; // what the machine and the build have
mod progress; // a bar or lines
mod summary; // a run in a few numbers

pub use self::{
    doctor::{Doctor, Finding},
    progress::{Progress, ProgressConfig},
    summary::RunSummary,
};
