//! The planned arena against what a run touches.

use std::sync::Arc;

use device::{Fresh, Machine, Options, View};

use super::{
    plan::{any_batches, plan_run},
    rank::{Plans, RankRun},
};
use crate::{Config, TrainError};

fn config() -> Config {
    let text = "[model]\narch = \"gpt2\"\nlayers = 3\ndim = 48\nheads = 3\nseq_len = 17\n[layout]\ndp = 2\n\
                [train]\nsteps = 1\nglobal_batch = 12\nmicro_batch = 3\n[data]\npath = \"none\"\n";
    Config::parse::<&str>(text, "test".as_ref(), "".as_ref(), &[]).expect("a valid configuration")
}

/// One past the last byte that differs from what poisoned memory holds.
fn highest_touched(words: &[i32]) -> usize {
    words.iter().rposition(|word| *word != -1).map_or(0, |at| (at + 1) * 4)
}

fn words(run: &RankRun, arena: &View) -> Result<Vec<i32>, TrainError> {
    Ok(run.stream.download::<i32>(arena)?.wait()?)
}

#[test]
fn the_highest_byte_that_a_run_touches_is_the_last_of_the_plan() {
    let config = config();
    let plan = plan_run(&config).expect("a plan");
    let plans = Plans { train: plan.train.clone(), sample: plan.sample.clone() };
    let options = Options { fresh: Fresh::Poisoned, ..Options::default() };
    for machine in [Machine::cpu_with(2, options.clone()).expect("two workers"), Machine::sim_with(5, options)] {
        let touched = pgroups::local(&machine, 2, |rank| -> Result<_, TrainError> {
            let mut run = RankRun::build(&rank, &config, Some(&plans))?;
            let mut batches = any_batches(&config, rank.global.0)?;
            run.step(&batches.next_batch()?, 1e-3)?;
            run.next_logits(&vec![7; config.model.seq_len], 5)?;
            let arenas = [&run.frame, &run.sample_frame].map(|frame| frame.arena().expect("planned").clone());
            Ok([words(&run, &arenas[0])?, words(&run, &arenas[1])?].map(|words| highest_touched(&words)))
        });
        for rank in touched.expect("the run") {
            assert_eq!(rank, [plan.train.bytes(), plan.sample.bytes()], "{}", machine.driver());
        }
    }
}

#[test]
fn planned_memory_gives_the_losses_of_memory_that_nothing_shares() {
    let config = config();
    let plan = plan_run(&config).expect("a plan");
    let losses = |plans: Option<&Plans>| {
        let options = Options { fresh: Fresh::Poisoned, ..Options::default() };
        let machine = Machine::cpu_with(2, options).expect("two workers");
        let ranks = pgroups::local(&machine, 2, |rank| -> Result<_, TrainError> {
            let mut run = RankRun::build(&rank, &config, plans)?;
            let mut batches = any_batches(&config, rank.global.0)?;
            let mut losses = Vec::new();
            for _ in 0..4 {
                run.step(&batches.next_batch()?, 1e-2)?;
                losses.push(run.stream.download::<f32>(&run.loss)?.wait()?[0].to_bits());
            }
            Ok(losses)
        });
        ranks.expect("the run")
    };
    let planned = losses(Some(&Plans { train: Arc::clone(&plan.train), sample: Arc::clone(&plan.sample) }));
    assert_eq!(planned, losses(None));
    assert!(planned[0].iter().all(|bits| f32::from_bits(*bits).is_finite()));
}
