//! The planned arena against what a run touches.

use device::{Fresh, Machine, MemoryKind, Options, View, cuda::CudaOptions};

use super::{
    eval::{Evaluator, eval_windows},
    plan::{any_corpus, batches, plan_run},
    rank::{Plans, RankRun},
};
use crate::{Config, TrainError, cards::cards};

fn config() -> Config {
    let text = "[model]\narch = \"gpt2\"\nlayers = 3\ndim = 48\nheads = 3\nseq_len = 17\n[layout]\ndp = 2\n\
                [train]\nsteps = 1\nglobal_batch = 12\nmicro_batch = 3\neval_interval = 1\n[data]\npath = \"none\"\n";
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
    let (plans, corpus) = (plan.plans(), any_corpus(&config).expect("text"));
    let eval_plan = plan.eval.as_ref().expect("a plan of evaluations");
    let options = Options { fresh: Fresh::Poisoned, ..Options::default() };
    for machine in [Machine::cpu_with(2, options.clone()).expect("two workers"), Machine::sim_with(5, options)] {
        let touched = pgroups::local(&machine, 2, |rank| -> Result<_, TrainError> {
            let mut run = RankRun::build(&rank, &config, Some(&plans))?;
            let batch = batches(&config, &corpus, rank.global.0)?.next_batch()?;
            run.step(&batch.microbatches().collect::<Vec<_>>(), 1e-3)?;
            let windows = eval_windows(&config, &corpus)?.expect("an evaluation");
            let mut eval = Evaluator::open(&run, &rank, &config, windows, Some(eval_plan))?;
            eval.submit(&mut run, |_| Ok(None))?;
            run.parallel.publish(&run.stream)?;
            run.next_logits(&vec![7; config.model.seq_len], 5)?;
            let arenas = [&run.frame, &run.sample_frame, &eval.frame].map(|f| f.arena().expect("planned").clone());
            let highest = |arena| words(&run, arena).map(|words| highest_touched(&words));
            run.meet()?;
            Ok([highest(&arenas[0])?, highest(&arenas[1])?, highest(&arenas[2])?])
        });
        for rank in touched.expect("the run") {
            assert_eq!(rank, [plan.train.bytes(), plan.sample.bytes(), eval_plan.bytes()], "{}", machine.driver());
        }
    }
}

#[test]
fn planned_memory_gives_the_losses_of_memory_that_nothing_shares() {
    let config = config();
    let plan = plan_run(&config).expect("a plan");
    let corpus = any_corpus(&config).expect("text");
    let losses = |machine: &Machine, plans: Option<&Plans>| {
        let ranks = pgroups::local(machine, 2, |rank| -> Result<_, TrainError> {
            let mut run = RankRun::build(&rank, &config, plans)?;
            let mut batches = batches(&config, &corpus, rank.global.0)?;
            let mut losses = Vec::new();
            for _ in 0..4 {
                let batch = batches.next_batch()?;
                run.step(&batch.microbatches().collect::<Vec<_>>(), 1e-2)?;
                losses.push(run.stream.download::<f32>(&run.loss)?.wait()?[0].to_bits());
            }
            run.meet()?;
            Ok(losses)
        });
        ranks.expect("the run")
    };
    let options = Options { fresh: Fresh::Poisoned, ..Options::default() };
    let host = Machine::cpu_with(2, options.clone()).expect("two workers");
    for machine in [host].into_iter().chain(cards(CudaOptions::default(), options)) {
        let planned = losses(&machine, Some(&plan.plans()));
        assert_eq!(planned, losses(&machine, None), "on {}", machine.driver());
        assert!(planned[0].iter().all(|bits| f32::from_bits(*bits).is_finite()));
    }
}

#[test]
fn microbatches_share_one_arena_as_small_as_a_single_ones() {
    let config = config();
    let mut single = config.clone();
    single.train.global_batch = config.train.micro_batch * config.layout.data_ranks();
    let [many, one] = [&config, &single].map(|config| plan_run(config).expect("a plan"));
    assert_eq!((config.microbatches(), single.microbatches()), (2, 1));
    assert_eq!(many.train.bytes(), one.train.bytes());
    assert!(many.train.bytes() < many.train.unshared_bytes());
    assert!(many.work.flops > one.work.flops);
}

#[test]
fn the_work_of_a_step_is_that_of_its_microbatches_and_of_nothing_else() {
    let config = config();
    let mut without = config.clone();
    without.train.eval_interval = 0;
    let mut double = config.clone();
    double.train.global_batch *= 2;
    let [work, without, double] = [&config, &without, &double].map(|config| plan_run(config).expect("a plan").work);
    assert_eq!(work, without);
    // A token's share of the products is the same in every microbatch; what is done once a step is not doubled.
    assert!(double.flops > work.flops * 19 / 10 && double.flops < work.flops * 2, "{work:?} {double:?}");
}

#[test]
fn a_pass_of_an_evaluation_needs_less_memory_than_one_of_training() {
    let plan = plan_run(&config()).expect("a plan");
    let eval = plan.eval.expect("a plan of evaluations");
    assert!(eval.bytes() < plan.train.bytes() / 2, "{eval}\n{}", plan.train);
}

#[test]
fn the_highest_byte_that_gathers_and_gradients_touch_is_the_last_of_their_plan() {
    // Every size is a multiple of what slots are aligned to.
    let text = "[model]\nlayers = 2\ndim = 64\nheads = 4\nseq_len = 16\n[layout]\ntp = 2\ngtp = 2\n[gtp]\n\
                look_ahead = 2\n[train]\nsteps = 1\nglobal_batch = 4\neval_interval = 1\n[data]\npath = \"none\"\n";
    let config = Config::parse::<&str>(text, "test".as_ref(), "".as_ref(), &[]).expect("a valid configuration");
    let plan = plan_run(&config).expect("a plan");
    let (plans, corpus) = (plan.plans(), any_corpus(&config).expect("text"));
    let arrivals = plan.gtp.weights().iter().map(|w| w.numel / w.shards).max().expect("sharded weights") * 4;
    let options = Options { fresh: Fresh::Poisoned, ..Options::default() };
    for machine in [Machine::cpu_with(2, options.clone()).expect("two workers"), Machine::sim_with(5, options)] {
        let touched = pgroups::local(&machine, 4, |rank| -> Result<_, TrainError> {
            let mut run = RankRun::build(&rank, &config, Some(&plans))?;
            let batch = batches(&config, &corpus, rank.global.0 / 2)?.next_batch()?;
            run.step(&batch.microbatches().collect::<Vec<_>>(), 1e-3)?;
            let windows = eval_windows(&config, &corpus)?.expect("an evaluation");
            let mut eval = Evaluator::open(&run, &rank, &config, windows, plan.eval.as_ref())?;
            eval.submit(&mut run, |_| Ok(None))?;
            run.next_logits(&vec![7; config.model.seq_len], 5)?;
            run.meet()?;
            let arenas = run.gtp.memory();
            let words = arenas.iter().map(|arena| {
                let words = run.stream.download::<f32>(arena)?.wait()?;
                Ok::<_, TrainError>(words.into_iter().map(|word| word.to_bits() as i32).collect::<Vec<_>>())
            });
            let touched = words.map(|words| Ok(highest_touched(&words?))).collect::<Result<Vec<_>, TrainError>>()?;
            let planned: Vec<usize> = arenas.iter().map(|arena| arena.numel() * 4).collect();
            Ok((touched, planned, rank.device.memory_by_kind()[&MemoryKind::Arena]))
        });
        for (touched, planned, held) in touched.expect("the run") {
            assert_eq!(touched, planned, "{}", machine.driver());
            assert_eq!(held, plan.memory[&MemoryKind::Arena], "all arenas of a rank");
            assert_eq!(planned.len(), 2, "gathered weights, weight gradients");
            assert_eq!(planned.iter().sum::<usize>() + arrivals, plan.gtp.bytes());
        }
    }
}
