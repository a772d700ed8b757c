//! The training loop: one program for every rank and every driver.

#[cfg(test)]
mod arena_test;
mod data_parallel; // buckets, the optimizer, who publishes when
mod graphs; // steps from captured graphs
mod sharded; // weights cut over tensor groups and shards
mod detail; // gathers and publications, one by one
mod eval; // the loss on text that is not trained on
mod eval_graphs; // its passes from captured graphs
#[cfg(test)]
mod layouts_test;
mod initial; // the weights that a run begins with, as files
mod loss_log; // losses on their way to the host, at most two steps behind
mod normalize; // what a token's gradient is multiplied with
#[cfg(test)]
mod normalize_test;
#[cfg(test)]
mod parallel_test;
#[cfg(test)]
mod replicas_test;
#[cfg(test)]
mod memory_test;
mod outputs; // what a run writes at its end, made sure of before
mod peak; // what products can do here at best
mod phases; // where the time of a step goes
mod plan; // memory and work, from a dry pass of the same program
mod rank; // what one rank owns, and one step of it
mod rank_loop; // the loop of one rank
mod resident; // memory of this process, as the system counts it
mod run; // the run: data, plan, machine, ranks, files
mod run_log; // what a run writes while it goes on
mod stop; // how a run is asked to end, and how all ranks learn of it
mod table_rows; // what a card makes of the rows of the table of tokens
mod traced; // a few steps with a trace from the start
mod trace_window; // the steps of a run that are traced
mod trained; // what a run leaves
mod writer; // text from the trained model

#[cfg(test)]
pub(crate) use self::rank::gpt_plan;
pub(crate) use self::rank::lay_out;
pub use self::{
    data_parallel::ParallelSummary,
    detail::{Detail, planned_detail},
    initial::write_initial_weights,
    peak::product_peak,
    plan::{RunPlan, dry_run, plan_run},
    run::{RunOptions, TimelineConfig, default_run_dir, train},
    stop::{Signal, StopSource},
    traced::trace_steps,
    trained::{Placement, RunEnd, Trained},
};
