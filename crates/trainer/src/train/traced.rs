//! A few steps of a run, traced from the first submission on, for whoever checks the trace.

use device::{Machine, Note, Trace};
use pgroups::Rank;

use super::{
    eval::{Evaluator, eval_windows},
    plan::{eval_corpus, plan_run},
    rank::{Plans, RankRun},
};
use crate::{Config, TrainError};

/// Builds all ranks on `machine` and runs `steps` steps, the host ahead of all of them, with an evaluation behind the
/// second one if the configuration asks for evaluations. Needs no data, and on the `dry` driver computes nothing.
///
/// # Errors
/// What the run itself would fail with.
pub fn trace_steps(config: &Config, machine: &Machine, steps: u64) -> Result<Trace, TrainError> {
    let plans = plan_run(config)?.plans();
    machine.trace_start();
    let ran = pgroups::local(machine, config.ranks().world_size(), |rank| run_rank(&rank, config, &plans, steps));
    let trace = machine.trace_stop();
    ran?;
    Ok(trace)
}

fn run_rank(rank: &Rank, config: &Config, plans: &Plans, steps: u64) -> Result<(), TrainError> {
    // With the memory of a real run, which has several tenants.
    let mut run = RankRun::build(rank, config, Some(plans))?;
    let windows = eval_windows(config, &eval_corpus(config)?)?;
    let mut eval =
        windows.map(|windows| Evaluator::open(&run, rank, config, windows, plans.eval.as_ref())).transpose()?;
    // What is in a microbatch does not matter to the order of things.
    let tokens = vec![0; config.train.micro_batch as usize * config.model.seq_len];
    let microbatches = vec![data::Microbatch { inputs: &tokens, targets: &tokens }; config.microbatches() as usize];
    for step in 1..=steps {
        if step == 2 {
            run.capture(config)?;
        }
        rank.device.note(|| Note::Step(step));
        run.stop.submit(&run.stream, None)?;
        run.step(&microbatches, 1e-3)?;
        if let (2, Some(eval)) = (step, &mut eval) {
            eval.submit(&mut run, |_| Ok(None))?;
        }
    }
    run.parallel.publish(&run.stream)?;
    Ok(rank.device.synchronize()?)
}
