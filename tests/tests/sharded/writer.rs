//! Whoever writes values comes behind whoever reads them, and gradients are overwritten behind whoever needs them.

use device::{Access, DType, Label, Machine, MemoryKind, Op, Trace, View};
use graphcap::{
    GateMode, Scope,
    verify::{Finding, Report, VerifyOptions, verify},
};
use gtp::PassKind;
use model::RecomputeLayers;
use pgroups::{PgError, local};

use super::{
    captured::{Graphs, replay},
    program::{Optimizing, Program},
    support::{Caught, MODES, captures, kinds, sim},
    worker::Worker,
};
use crate::captured::left_out::{LeftOut, leave_out_of};

/// Buckets are stepped one by one as they are reduced, one layer is recomputed, and three uses are gathered ahead.
fn early() -> Program {
    Program { clip: 0.0, recompute: RecomputeLayers::These(vec![0]), look_ahead: 3, ..Program::on(1, 2, 2) }
}

/// Steps with an evaluation between their passes and their update, whose writes overlap what it reads.
fn run(
    program: &Program,
    machine: &Machine,
    change: impl Fn(&Worker) + Sync,
) -> Result<(Vec<Vec<u32>>, Report), PgError> {
    machine.trace_start();
    let ran = local(machine, program.world(), |rank| -> Result<_, Caught> {
        let mut worker = Worker::new(&rank, program, "m")?;
        worker.step(0)?;
        worker.evaluate()?;
        worker.capture()?;
        if program.graphs.is_some() {
            Graphs::capture_evaluation(&mut worker)?;
        }
        change(&worker);
        let side = rank.device.stream("side")?;
        let seen = rank.device.alloc("seen", &[1], DType::F32, MemoryKind::Other)?;
        side.upload(&seen, vec![0.0f32])?;
        for step in 1..4 {
            worker.passes(step)?;
            // Somebody who looks at gradients on a stream of its own.
            worker.ddp.read_grads(&side)?;
            for bucket in worker.ddp.buckets() {
                side.launch(look(&bucket.own_grads, &seen))?;
            }
            worker.ddp.done_grads(&side)?;
            evaluate(&mut worker)?;
            worker.optimizer.step_at_rates(&worker.updates.clone())?;
        }
        worker.finish()
    });
    let trace: Trace = machine.trace_stop();
    let options = VerifyOptions { limit: 1_000, ..VerifyOptions::default() };
    Ok((ran?, verify(&trace, &options)))
}

/// The simulator without the waits of a name.
fn without(seed: u64, why: &'static str) -> Machine {
    let machine = sim(seed);
    machine.drop_waits(why);
    machine
}

/// Adds up what is there.
fn look(grads: &View, seen: &View) -> Op {
    Op::host("look", "side", vec![Access::read(grads), Access::update(seen)], |args| {
        let sum: f32 = args.read::<f32>(0)?.iter().sum();
        args.write::<f32>(1)?[0] += sum;
        Ok(())
    })
}

fn evaluate(worker: &mut Worker) -> Result<(), Caught> {
    let Some(graphs) = &worker.graphs else { return worker.evaluate() };
    graphs.evaluation.graphs().iter().try_for_each(|graph| replay(graph, &worker.compute, &worker.eval_slot))?;
    worker.log_loss(PassKind::EVAL)
}

fn programs() -> Vec<Program> {
    let captured = [Scope::Layer, Scope::Microbatch].into_iter().flat_map(|scope| MODES.map(|gates| (scope, gates)));
    [early()].into_iter().chain(captured.map(|(scope, gates)| early().captured(scope, gates))).collect()
}

/// A race about values, or gradients, of parameters that a wait of this name would have ordered.
fn names(report: &Report, why: &str) -> bool {
    let named = |label: &Label| *label == *why;
    report.findings().iter().any(|finding| matches!(finding, Finding::Race(race) if race.dropped.iter().any(named)))
}

#[test]
fn values_are_written_behind_the_gathers_that_read_them_before() {
    for program in programs() {
        let (want, report) = run(&program, &sim(0), |_| ()).unwrap();
        assert!(report.is_clean(), "{:?}: {report}", program.graphs);
        let mut other = 0;
        for seed in 1..4 {
            let (got, report) = run(&program, &sim(seed), |_| ()).unwrap();
            assert!(got == want && report.is_clean(), "{:?}, seed {seed}: {report}", program.graphs);
            let (got, report) = run(&program, &without(seed, ddp::why::WRITE_AFTER_READ.0), |_| ()).unwrap();
            assert!(names(&report, ddp::why::WRITE_AFTER_READ.0), "{:?}, seed {seed}: {report}", program.graphs);
            other += usize::from(got != want);
        }
        assert!(other > 0, "{:?}: no order shows it", program.graphs);
    }
}

#[test]
fn values_that_are_read_and_written_by_graphs_are_those_of_eager_steps_and_nothing_races() {
    for machine in kinds() {
        let [eager, captured @ ..] = &programs()[..] else { panic!("programs") };
        let (want, report) = run(eager, &machine(0), |_| ()).unwrap();
        let here = machine(0).driver();
        assert!(report.is_clean(), "eager on {here}: {report}");
        for program in captured {
            let (got, report) = run(program, &machine(1), |_| ()).unwrap();
            assert!(got == want && report.is_clean(), "{:?} on {here}: {report}", program.graphs);
        }
    }
}

#[test]
fn releases_of_gathers_that_nobody_hears_of_are_told() {
    for program in programs() {
        let leave = |worker: &Worker| leave_out_of(worker.buffers.params(), LeftOut::Release);
        let (_, report) = run(&program, &sim(1), leave).unwrap();
        let gathers = |finding: &Finding| match finding {
            Finding::Race(race) => {
                let sides = [race.first.to_string(), race.second.to_string()];
                sides.iter().any(|side| side.contains("gtp_")) && sides.iter().any(|side| side.contains("adamw"))
            }
            _ => false,
        };
        assert!(report.findings().iter().any(gathers), "{:?}: {report}", program.graphs);
    }
}

#[test]
fn shards_of_gradients_are_reduced_behind_their_sums_and_overwritten_behind_their_update() {
    for program in programs() {
        for why in [ddp::why::REDUCE_AFTER_LANDED.0, ddp::why::STEP_AFTER_REDUCE.0] {
            let (_, report) = run(&program, &without(1, why), |_| ()).unwrap();
            assert!(names(&report, why), "{why}, {:?}: {report}", program.graphs);
        }
    }
    // What the optimizer reads is read before values are published, and those before anything lands: whoever looks at
    // gradients besides is behind nothing else.
    for program in programs() {
        let why = match program.graphs {
            Some((_, GateMode::InGraph)) => graphcap::why::GRAD_AFTER_FREE.0,
            _ => ddp::why::GRAD_AFTER_FREE.0,
        };
        let (_, report) = run(&program, &without(1, why), |_| ()).unwrap();
        assert!(names(&report, why), "{why}, {:?}: {report}", program.graphs);
    }
}

#[test]
fn a_step_that_is_skipped_for_an_infinite_gradient_changes_no_value_and_is_published_like_any_other() {
    let kinds = kinds();
    let ways = [Optimizing::Distributed, Optimizing::Everywhere];
    for (machine, optimizing) in kinds.iter().flat_map(|machine| ways.map(|optimizing| (machine, optimizing))) {
        let program = Program { clip: 0.5, optimizing, ..Program::on(2, 2, 2) };
        let all = [None].into_iter().chain(captures().into_iter().map(Some));
        let mut first = None;
        for (seed, graphs) in (0..).zip(all) {
            let program = Program { graphs, ..program.clone() };
            let ran = local(&machine(seed), program.world(), |rank| -> Result<_, Caught> {
                let mut worker = Worker::prepared(&rank, &program, "m")?;
                worker.step(1)?;
                worker.ddp.publish(&worker.compute)?;
                let (before, epochs) = (worker.bits()?, worker.epochs());
                // One rank of eight.
                worker.token_scale = if rank.global.0 == 5 { f32::INFINITY } else { 1.0 };
                worker.step(2)?;
                worker.token_scale = 1.0;
                worker.ddp.publish(&worker.compute)?;
                let (skipped, after) = (worker.bits()?, worker.epochs());
                let behind = |bits: &[u32]| bits[program.microbatches..].to_vec();
                // Losses of two steps are in front of the first, those of one of the second.
                assert!(before[2 * program.microbatches..] == behind(&skipped)[..], "no value, no moment");
                assert!(epochs.iter().zip(&after).all(|(a, b)| b.written == a.written + 1 && b.is_current()));
                worker.step(3)?;
                worker.finish()
            })
            .unwrap();
            assert!(ran.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()));
            assert!(*first.get_or_insert_with(|| ran.clone()) == ran, "{graphs:?}");
        }
    }
}

#[test]
fn buckets_that_are_read_out_of_turn_or_by_nobody_are_written_and_published_alike() {
    let base = Program { microbatches: 1, ..early() };
    let run = |machine: &Machine, graphs: Option<(Scope, GateMode)>| {
        let program = Program { graphs, ..base.clone() };
        local(machine, program.world(), |rank| -> Result<_, Caught> {
            let mut worker = Worker::new(&rank, &program, "m")?;
            worker.step(0)?;
            worker.evaluate()?;
            worker.capture()?;
            let mut all = Vec::new();
            for step in 1..4 {
                if let Some(graphs) = &worker.graphs {
                    // The last blocks first: over what the pass before has left, so nothing is asked of the result.
                    let forward = worker.model.blocks().len();
                    for graph in graphs.training.graphs()[..forward].iter().rev() {
                        replay(graph, &worker.compute, &worker.slot)?;
                    }
                }
                worker.step(step)?;
                // Once more over the same gradients: nobody has read what it wrote before.
                worker.optimizer.step_at_rates(&worker.updates.clone())?;
            }
            worker.ddp.publish(&worker.compute)?;
            all.extend(worker.bits()?);
            Ok(all)
        })
        .unwrap()
    };
    for machine in kinds() {
        let want = run(&machine(0), None);
        for (seed, gates) in (1..4).flat_map(|seed| MODES.map(|gates| (seed, gates))) {
            let got = run(&machine(seed), Some((Scope::Layer, gates)));
            assert!(got == want, "{gates}, seed {seed} on {}", machine(seed).driver());
        }
    }
}
