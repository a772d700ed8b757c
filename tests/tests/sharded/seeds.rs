//! No read is stale, and every write is published once: graphs of every scope, in both modes, whatever happens in
//! between.

use ddp::{Dispatch, Loaded};
use device::{
    Machine, Stream,
    ops::{Factor, Scale},
};
use graphcap::{GateMode, GraphError, Scope};
use gtp::PassKind;
use model::RecomputeLayers;
use pgroups::{Pass, PgError, Sequence, Turn, local};

use super::{
    captured::{Graphs, replay},
    passes::{Carried, Parts, Piece, forward_pieces, pieces},
    program::{Arch, Lanes, Program},
    support::{Caught, MODES, captures, cpu, kinds},
    worker::Worker,
};

/// What every rank has behind steps and evaluations; `change` happens between the two halves of them.
pub(crate) fn train(
    program: &Program,
    machine: &Machine,
    change: impl Fn(&mut Worker) -> Result<(), Caught> + Sync,
) -> Result<Vec<Vec<u32>>, PgError> {
    local(machine, program.world(), |rank| {
        let mut worker = Worker::prepared(&rank, program, "m")?;
        worker.evaluate()?;
        worker.step(1)?;
        change(&mut worker)?;
        worker.step(2)?;
        worker.evaluate()?;
        worker.step(3)?;
        worker.finish()
    })
}

pub(crate) fn nothing(_: &mut Worker) -> Result<(), Caught> {
    Ok(())
}

fn is_finite(all: &[Vec<u32>]) -> bool {
    all.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite())
}

/// Replicas of shards, and tensor groups of them with all that is split; one layer is recomputed.
fn programs() -> [Program; 2] {
    let recompute = RecomputeLayers::These(vec![1]);
    let split = Program { arch: Arch::Llama, sequence: Sequence::Split, ..Program::on(2, 2, 2) };
    [Program { recompute, ..Program::on(1, 2, 2) }, split]
}

#[test]
fn graphs_give_the_bits_of_eager_steps_however_values_are_published() {
    for (machine, program) in kinds().iter().flat_map(|machine| programs().map(|program| (machine, program))) {
        let want = train(&program, &machine(0), nothing).unwrap();
        let here = machine(0).driver();
        assert!(is_finite(&want) && want[0] != want[1]);
        for (at, dispatch) in (0..).zip([Dispatch::Chain, Dispatch::Aligned, Dispatch::WithOptimizer]) {
            for (seed, (scope, gates)) in (1..).zip(captures()) {
                // On a card each way to capture has its turn once.
                if here == "cuda" && seed % 3 != at {
                    continue;
                }
                let lanes = if at == 0 { Lanes::Turns } else { Lanes::One };
                let program = Program { dispatch, lanes, ..program.clone() }.captured(scope, gates);
                let got = train(&program, &machine(10 * at + seed), nothing).unwrap();
                assert!(got == want, "{program:?} on {here}");
            }
        }
        if here == "sim" {
            let program = program.captured(Scope::Layer, GateMode::InGraph);
            assert!(train(&program, &cpu(), nothing).unwrap() == want, "{program:?} on cpu");
        }
    }
}

#[test]
fn a_model_that_is_wrapped_again_is_read_through_its_new_publishers_and_its_training_graphs_are_refused() {
    let [program, _] = programs();
    let wrap_again = |worker: &mut Worker| {
        worker.wrap_again()?;
        // Of values that only the new publishers know to be unpublished.
        load(worker, &worker.updates)?;
        worker.evaluate()
    };
    for machine in kinds() {
        let want = train(&program, &machine(0), wrap_again).unwrap();
        assert!(want != train(&program, &machine(0), nothing).unwrap(), "the optimizer began anew");
        for (seed, (scope, gates)) in (1..).zip(captures()) {
            let program = program.clone().captured(scope, gates);
            let got = train(&program, &machine(seed), |worker| {
                Graphs::capture_evaluation(worker)?;
                let old: Vec<_> = worker.buffers.params().iter().map(|param| param.publisher().unwrap()).collect();
                worker.wrap_again()?;
                let new = worker.buffers.params().iter().map(|param| param.publisher().unwrap());
                assert!(new.zip(&old).all(|(new, old)| !new.event().same_as(old.event())));
                load(worker, &worker.updates)?;
                // An evaluation's graphs follow: same memory, other events.
                let graphs = worker.graphs.as_ref().expect("graphs");
                graphs
                    .evaluation
                    .graphs()
                    .iter()
                    .try_for_each(|graph| replay(graph, &worker.compute, &worker.eval_slot))?;
                worker.log_loss(PassKind::EVAL)?;
                // What adds gradients reads a flag that is not the one that was captured.
                let graphs = worker.graphs.as_ref().expect("graphs");
                let refused =
                    graphs.replay(&[&worker.compute], &worker.source, &worker.slot).expect_err("another flag governs");
                assert!(matches!(refused.downcast_ref(), Some(GraphError::Invalid { .. })), "{refused:?}");
                worker.rank.device.synchronize()?;
                worker.graphs.take().expect("graphs").delete();
                worker.capture()
            });
            assert!(got.unwrap() == want, "{scope}, {gates} on {}", machine(seed).driver());
        }
    }
}

#[test]
fn graphs_that_are_deleted_captured_again_and_warmed_up_give_the_same_bits() {
    let [program, _] = programs();
    for machine in kinds() {
        let want = train(&program, &machine(0), nothing).unwrap();
        for (seed, (scope, gates)) in (1..).zip(captures()) {
            let program = program.clone().captured(scope, gates);
            let got = train(&program, &machine(seed), |worker| {
                for _ in 0..2 {
                    // What is under way would keep its executables.
                    worker.rank.device.synchronize()?;
                    let survivors = worker.graphs.take().expect("graphs").delete();
                    assert!(survivors.is_empty(), "{survivors:?}");
                    worker.capture()?;
                    let graphs = worker.graphs.as_ref().expect("graphs");
                    graphs.training.warm_up(&worker.compute, 2)?;
                }
                Ok(())
            });
            assert!(got.unwrap() == want, "{scope}, {gates} on {}", machine(seed).driver());
        }
    }
}

/// Between two passes: values of which every rank has written its shards only.
fn load(worker: &Worker, on: &Stream) -> Result<(), Caught> {
    // No publication may be in flight that nobody has read.
    worker.ddp.publish(on)?;
    Ok(worker.ddp.load(on, Loaded::Shards, |bucket| {
        let (x, factor) = (&bucket.own_values, Factor::Const(0.75));
        Ok(on.launch(Scale { x, factor, y: x }.op("load")?)?)
    })?)
}

#[test]
fn while_somebody_else_owns_the_schedule_stale_reads_are_refused_by_name_and_training_goes_on() {
    let [program, _] = programs();
    // What reads nothing while the schedule is taken over.
    let patient = |worker: &mut Worker| {
        load(worker, &worker.updates.clone())?;
        worker.evaluate()
    };
    for machine in kinds() {
        let want = train(&program, &machine(0), patient).unwrap();
        for (seed, (scope, gates)) in (1..).zip(captures()) {
            let program = program.clone().captured(scope, gates);
            let got = train(&program, &machine(seed), |worker| {
                load(worker, &worker.updates.clone())?;
                let given = worker.slot.clone();
                let forward = forward_pieces(&worker.model);
                let Worker { ddp, graphs, compute, model, source, eval, slot, buffers, .. } = &mut *worker;
                let owned = ddp.own_schedule();
                let before = ddp.counters().publications;
                let replayed = graphs.as_ref().expect("graphs").replay(&[compute], source, &given);
                let mut parts = Parts { model, source, frame: eval, slot, kind: PassKind::EVAL };
                let submitted = parts.run(&forward, Turn::eager(Pass::Forward), &mut Carried::default());
                for refused in [replayed, submitted] {
                    let refused = refused.expect_err("nothing is published");
                    let named = format!("Stale {{ param: {:?}", buffers.params()[0].name());
                    assert!(format!("{refused:?}").contains(&named), "{refused:?}");
                }
                assert_eq!(ddp.counters().publications, before);
                drop(owned);
                worker.evaluate()
            });
            assert!(got.unwrap() == want, "{scope}, {gates} on {}", machine(seed).driver());
        }
    }
}

#[test]
fn an_evaluation_between_the_graphs_of_a_pass_is_of_the_same_values_and_leaves_the_pass_its_weights() {
    let [program, _] = programs();
    // Evaluates between the blocks of a pass, by graphs of its own or as it is submitted.
    type Evaluate<'e> = &'e (dyn Fn(&mut Worker, usize) -> Result<(), Caught> + Sync);
    let run = |machine: Machine, gates: GateMode, evaluate: Evaluate<'_>| {
        let program = Program { microbatches: 1, ..program.clone() }.captured(Scope::Layer, gates);
        local(&machine, program.world(), |rank| -> Result<_, Caught> {
            let mut worker = Worker::new(&rank, &program, "m")?;
            worker.step(0)?;
            worker.evaluate()?;
            worker.capture()?;
            Graphs::capture_evaluation(&mut worker)?;
            for _ in 0..2 {
                let given = worker.slot.clone();
                worker.ddp.begin_microbatch(&worker.compute)?;
                let count = worker.graphs.as_ref().expect("graphs").training.graphs().len();
                for at in 0..count {
                    let graph = worker.graphs.as_ref().expect("graphs").training.graphs()[at].clone();
                    replay(&graph, &worker.compute, &given)?;
                    evaluate(&mut worker, at)?;
                }
                worker.ddp.end_microbatch(&worker.compute)?;
                worker.ddp.finish_grads()?;
                worker.optimizer.step_at_rates(&worker.updates.clone())?;
            }
            worker.ddp.publish(&worker.compute)?;
            let counters = worker.source.counters();
            // Without the losses: an evaluation's are not asked here.
            worker.rank.device.synchronize()?;
            worker.losses()?;
            Ok((worker.bits()?, counters))
        })
        .unwrap()
    };
    let by_graphs = |worker: &mut Worker| -> Result<(), Caught> {
        let graphs = worker.graphs.as_ref().expect("graphs");
        graphs.evaluation.graphs().iter().try_for_each(|graph| replay(graph, &worker.compute, &worker.eval_slot))
    };
    let twice =
        |worker: &mut Worker, at: usize| if at.is_multiple_of(2) { by_graphs(worker) } else { worker.evaluate() };
    for machine in kinds() {
        let plain = run(machine(0), GateMode::InGraph, &|_, _| Ok(()));
        assert!(plain.iter().all(|(_, counters)| counters.repaired == 0));
        for (gates, seed) in MODES.into_iter().flat_map(|gates| (1..4).map(move |seed| (gates, seed))) {
            for ((got, counters), (want, _)) in run(machine(seed), gates, &twice).iter().zip(&plain) {
                assert!(got == want, "{gates}, seed {seed} on {}", machine(seed).driver());
                assert!(counters.repaired > 0, "the pass finds its weights gone: {counters:?}");
            }
        }
    }
}

#[test]
fn weights_that_were_gathered_before_a_write_are_gathered_again_behind_it() {
    let [program, _] = programs();
    let program = Program { microbatches: 1, ..program };
    // Values are written behind the first block, whose pass has the second one's weights by then.
    let run = |machine: &Machine, graphs: Option<GateMode>| {
        let program = Program { graphs: graphs.map(|gates| (Scope::Layer, gates)), ..program.clone() };
        local(machine, program.world(), |rank| -> Result<_, Caught> {
            let mut worker = Worker::prepared(&rank, &program, "m")?;
            let (all, mut carried) = (pieces(&worker.model), Carried::default());
            worker.ddp.begin_microbatch(&worker.compute)?;
            for (at, piece) in all.iter().enumerate() {
                // The loss is a part of the last block's graph.
                let loss = all.iter().position(|piece| *piece == Piece::Loss).expect("a loss");
                match worker.graphs.as_ref().map(|graphs| graphs.training.graphs().to_vec()) {
                    Some(_) if at == loss => {}
                    Some(graphs) => {
                        let graph = &graphs[if at > loss { at - 1 } else { at }];
                        replay(graph, &worker.compute, &worker.slot)?;
                    }
                    None => {
                        let turn = Turn::eager(Pass::Forward);
                        worker.training().run(&[*piece], turn, &mut carried)?;
                    }
                }
                if at == 0 {
                    load(&worker, &worker.updates)?;
                }
            }
            worker.ddp.end_microbatch(&worker.compute)?;
            worker.ddp.finish_grads()?;
            worker.log_loss(PassKind::TRAIN)?;
            let repaired = worker.source.counters().repaired;
            worker.ddp.publish(&worker.compute)?;
            Ok((worker.bits()?, repaired))
        })
        .unwrap()
    };
    for machine in kinds() {
        let want = run(&machine(0), None);
        assert!(want.iter().all(|(_, repaired)| *repaired > 0));
        for (seed, gates) in (1..4).flat_map(|seed| MODES.map(|gates| (seed, gates))) {
            let got = run(&machine(seed), Some(gates));
            for ((got, repaired), (want, _)) in got.iter().zip(&want) {
                let here = machine(seed).driver();
                assert!(got == want && *repaired > 0, "{gates}, seed {seed} on {here}: {repaired}");
            }
        }
    }
}

#[test]
fn backward_and_recompute_gather_without_asking_for_a_publication() {
    let program = Program { microbatches: 1, recompute: RecomputeLayers::All, ..Program::on(1, 2, 2) };
    let chunks = [None, Some((Scope::Chunk, GateMode::InGraph)), Some((Scope::Chunk, GateMode::BeforeReplay))];
    for (machine, graphs) in kinds().iter().flat_map(|machine| chunks.map(|graphs| (machine, graphs))) {
        let program = Program { graphs, ..program.clone() };
        local(&machine(2), program.world(), |rank| -> Result<(), Caught> {
            let mut worker = Worker::prepared(&rank, &program, "m")?;
            let (all, mut carried) = (pieces(&worker.model), Carried::default());
            let (forward, backward) = all.split_at(forward_pieces(&worker.model).len());
            worker.ddp.begin_microbatch(&worker.compute)?;
            for (at, half) in [forward, backward].into_iter().enumerate() {
                if at == 1 {
                    load(&worker, &worker.updates)?;
                }
                let before = (worker.ddp.counters(), worker.source.counters());
                match worker.graphs.as_ref().map(|graphs| graphs.training.graphs()[at].clone()) {
                    Some(graph) => {
                        assert_eq!(graph.conditions().is_empty(), at == 1, "{:?}", graph.conditions());
                        replay(&graph, &worker.compute, &worker.slot)?;
                    }
                    None => {
                        let turn = Turn::eager(Pass::Forward);
                        worker.training().run(half, turn, &mut carried)?;
                    }
                }
                let after = (worker.ddp.counters(), worker.source.counters());
                if at == 1 {
                    assert_eq!(after.0.publications, before.0.publications);
                    assert_eq!(after.0.lookups, before.0.lookups);
                    assert!(program.graphs.is_some() || after.1.planned > before.1.planned, "it gathers");
                } else {
                    assert!(after.0.publications > before.0.publications, "forward asks");
                }
            }
            worker.ddp.end_microbatch(&worker.compute)?;
            worker.ddp.finish_grads()?;
            worker.finish()?;
            Ok(())
        })
        .unwrap();
    }
}
