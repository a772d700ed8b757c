//! The deterministic drivers: one thing at a time, over all ranks. `sim` computes real numbers, `dry` only shapes.

mod chooser;
mod engine;
mod exchanging;
mod hosts;
mod running;
mod search;
mod state;

pub(crate) use self::chooser::Chooser;
pub(crate) use self::engine::SimEngine;
pub use self::search::{Explored, explore};
