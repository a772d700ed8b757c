//! Traces proved free of races: every read ordered behind the write it needs, on all ranks.
#![forbid(unsafe_code)]

mod error;
pub mod verify; // what a trace proves, and what it lacks

pub use self::error::GraphError;

/// The README's snippets compile and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
