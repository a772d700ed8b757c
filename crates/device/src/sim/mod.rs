//! The deterministic drivers: one thing at a time, over all ranks. `sim` computes real numbers, `dry` only shapes.

mod chooser;
mod engine;
mod exchanging;
mod guide; //   a run that is led by a search
mod hosts;
mod moves; //   what may run, and what commutes
mod order; //   what comes before what in a guided run
mod past;
mod races; //   which orders would differ
mod running;
mod search; //  all orders that differ
mod state;

pub(crate) use self::chooser::Chooser;
pub(crate) use self::engine::SimEngine;
pub use self::search::{Explored, explore, explore_every_order};
