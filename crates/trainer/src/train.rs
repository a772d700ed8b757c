//! The training loop: one program for every rank and every driver.

#[cfg(test)]
mod arena_test;
mod loss_log; // losses on their way to the host, at most two steps behind
mod peak; // what products can do here at best
mod plan; // memory and work, from a dry pass of the same program
mod rank; // what one rank owns, and one step of it
mod resident; // memory of this process, as the system counts it
mod run; // the run: data, ranks, metrics, a sample at the end
mod writer; // text from the trained model

pub use self::{
    peak::product_peak,
    plan::{RunPlan, plan_run},
    run::{Trained, default_run_dir, train},
};
