//! Every synchronisation of sharded training, taken away one by one: the verifier notices each, or names what covers it.

use ddp::Loaded;
use device::{Access, DType, Device, Frame, Label, Machine, MemoryKind, Op, Stream, Trace, View, Why};
use graphcap::{
    GateMode, GraphConfig, GraphSet, Scope,
    verify::{Finding, Noticed, VerifyOptions, mutate},
};
use model::RecomputeLayers;
use pgroups::{PgError, Sequence, local};

use super::{
    captured::{Graphs, PASS_AFTER_INPUTS, replay},
    passes::Slot,
    program::{Inputs, Lanes, Program},
    support::Caught,
    worker::Worker,
};

/// Tensor groups, shards and replicas; two microbatches on two streams; one layer is recomputed.
fn program(graphs: Captures, [tp, gtp, dp]: [u32; 3]) -> Program {
    let recompute = RecomputeLayers::These(vec![1]);
    // Of whole passes even the reductions overlap.
    let inputs = match graphs {
        Some((Scope::Microbatch, _)) => Inputs::InPlace,
        _ => Inputs::Copied,
    };
    Program { graphs, recompute, lanes: Lanes::Turns, inputs, sequence: Sequence::Split, ..Program::on(tp, gtp, dp) }
}

/// Looks at what is there, on whatever stream.
fn look(at: &View, seen: &View) -> Op {
    Op::host("look", "side", vec![Access::read(at), Access::update(seen)], |args| {
        let sum: f32 = args.read::<f32>(0)?.iter().sum();
        args.write::<f32>(1)?[0] += sum;
        Ok(())
    })
}

/// A graph that touches no weight, and something to give to it: nothing orders its replays but what it reads.
fn looking(device: &Device, on: &Stream) -> Result<(GraphSet, View), Caught> {
    let alloc = |label: &str| device.alloc(label, &[1], DType::F32, MemoryKind::Other);
    let (x, slot, seen) = (alloc("x")?, alloc("slot")?, alloc("seen")?);
    on.upload(&x, vec![1.0f32])?;
    let mut set = GraphSet::new(on, GraphConfig::new(Scope::Layer))?;
    set.capture("look", on, |scope| -> Result<(), Caught> {
        scope.input("x", &slot)?;
        Ok(on.launch(look(&slot, &seen))?)
    })?;
    device.synchronize()?;
    Ok((set, x))
}

/// Steps with evaluations between them and loads behind them, the host ahead of everything; somebody looks at gradients
/// and values on a stream of its own.
fn traced(program: &Program, without: &[Label]) -> Result<Trace, PgError> {
    let machine = Machine::dry();
    without.iter().for_each(|why| machine.drop_waits(why.clone()));
    machine.trace_start();
    let ran = local(&machine, program.world(), |rank| -> Result<(), Caught> {
        let mut worker = Worker::new(&rank, program, "m")?;
        let evaluating = rank.device.stream("evaluation")?;
        worker.eval = Frame::unplanned(&evaluating, "evaluation");
        worker.eval_slot = Slot::alloc(&rank, program)?;
        worker.eval_slot.clear(&evaluating)?;
        worker.extra = Some(rank.device.stream("extra")?);
        (0..2).try_for_each(|step| worker.step(step))?;
        worker.evaluate()?;
        worker.capture()?;
        if program.graphs.is_some() {
            Graphs::capture_evaluation(&mut worker)?;
        }
        let stream = |name: &str| rank.device.stream(name);
        let (grads, side, loader) = (stream("grads")?, stream("side")?, stream("loader")?);
        let looking = worker.graphs.is_some().then(|| looking(&rank.device, &side)).transpose()?;
        let seen_grads = rank.device.alloc("seen", &[1], DType::F32, MemoryKind::Other)?;
        let seen = rank.device.alloc("seen", &[1], DType::F32, MemoryKind::Other)?;
        for step in 2..4 {
            worker.passes(step)?;
            worker.ddp.read_grads(&grads)?;
            worker.ddp.buckets().try_for_each(|bucket| grads.launch(look(&bucket.own_grads, &seen_grads)))?;
            worker.ddp.done_grads(&grads)?;
            match (&worker.graphs, step) {
                (Some(graphs), 2) => {
                    let all = graphs.evaluation.graphs();
                    all.iter().try_for_each(|graph| replay(graph, &evaluating, &worker.eval_slot))?;
                }
                _ => worker.evaluate()?,
            }
            worker.optimizer.step_at_rates(&worker.updates.clone())?;
            worker.optimizer.read_state(&side)?;
            side.launch(look(worker.optimizer.grad_norm(), &seen))?;
            worker.optimizer.done_state(&side)?;
            // Values that are published and read by nobody, then values that are not published.
            worker.ddp.dispatch()?;
            worker.optimizer.step_at_rates(&worker.updates.clone())?;
            worker.ddp.publish(&side)?;
            worker.ddp.buckets().try_for_each(|bucket| side.launch(look(&bucket.own_values, &seen)))?;
            for param in worker.buffers.params() {
                pgroups::Turn::eager(pgroups::Pass::Forward).done(param, &side)?;
            }
            for loaded in 0..2 {
                let on = if loaded == 0 { &loader } else { &worker.compute };
                worker.ddp.load(on, Loaded::Shards, |bucket| {
                    let (x, factor) = (&bucket.own_values, device::ops::Factor::Const(0.5));
                    Ok(on.launch(device::ops::Scale { x, factor, y: x }.op("load")?)?)
                })?;
            }
            worker.optimizer.refresh_masters(&worker.updates)?;
            if let Some((graphs, x)) = &looking {
                let replay = |on: &Stream| graphs.graphs()[0].replay(on, &[("x", x.into())]);
                [&side, &loader].into_iter().try_for_each(replay)?;
            }
        }
        worker.ddp.publish(&worker.compute)?;
        Ok(rank.device.synchronize()?)
    });
    let trace = machine.trace_stop();
    ran?;
    Ok(trace)
}

type Captures = Option<(Scope, GateMode)>;

/// What others cover, with one of them: streams meet for several reasons.
fn covered(graphs: Captures) -> Vec<(Label, Label)> {
    let pairs: &[(Why, Why)] = match graphs {
        // A gradient that is whole waits for all that has landed in its bucket, sums of shards among them.
        None => &[(gtp::why::GRAD_AFTER_REDUCE, ddp::why::GRAD_AFTER_LANDED)],
        // The graphs of a pass are a chain, also from one stream to the other.
        Some((Scope::Layer, _)) => &[(PASS_AFTER_INPUTS, gtp::why::GRAPH_AFTER_GRAPH)],
        // A replay waits for all that has landed, the last reduction of the pass before among it.
        Some((_, GateMode::BeforeReplay)) => &[(gtp::why::REDUCE_AFTER_REDUCE, graphcap::why::GATE_AFTER_LANDED)],
        Some((_, GateMode::InGraph)) => &[],
    };
    // Gradients are written where a pass computes, which is behind everything that it follows.
    let begin = [(gtp::why::BEGIN_AFTER_WORK, gtp::why::REDUCE_AFTER_GRAD)];
    pairs.iter().copied().chain(begin).map(|(why, by)| (why.0.into(), by.0.into())).collect()
}

/// Every mutant is noticed; what is covered is noticed by its own name once its cover is gone, too.
fn assert_noticed(program: &Program) {
    let excuses = covered(program.graphs);
    let run = |without: &[Label]| traced(program, without);
    let score = mutate(run, &excuses, &VerifyOptions { limit: 10_000, ..VerifyOptions::default() }).unwrap();
    assert!(score.is_full(), "{:?}: {score}", program.graphs);
    let excused: Vec<&Label> = score
        .mutants
        .iter()
        .filter_map(|mutant| match &mutant.noticed {
            Noticed::Covered { without_both, .. } => {
                let Finding::Race(race) = &**without_both else { panic!("{without_both}") };
                assert!(race.dropped.contains(&mutant.why), "{}: {race}", mutant.why);
                Some(&mutant.why)
            }
            _ => None,
        })
        .collect();
    let mut wanted: Vec<&Label> = excuses.iter().map(|(why, _)| why).collect();
    wanted.sort();
    assert_eq!(excused, wanted, "{:?}: {score}", program.graphs);
    // Those of gtp are all there where they can be.
    let known = |why: &&Why| score.mutants.iter().any(|mutant| mutant.why.as_str() == why.0);
    let count = gtp::why::ALL.iter().filter(known).count();
    assert_eq!(count, if program.graphs.is_some() { gtp::why::ALL.len() } else { 6 }, "{score}");
}

#[test]
fn every_synchronisation_of_sharded_training_is_noticed_when_it_is_missing() {
    assert_noticed(&program(None, [1, 2, 2]));
    assert_noticed(&program(Some((Scope::Layer, GateMode::InGraph)), [1, 2, 2]));
}

/// Minutes in an unoptimised build.
#[cfg(feature = "full")]
mod full {
    use super::*;

    const LAYOUT: [u32; 3] = [2, 2, 2];

    #[test]
    fn every_synchronisation_is_noticed_in_submitted_steps() {
        assert_noticed(&program(None, LAYOUT));
    }

    #[test]
    fn every_synchronisation_is_noticed_in_graphs_of_layers_with_gates_inside() {
        assert_noticed(&program(Some((Scope::Layer, GateMode::InGraph)), LAYOUT));
    }

    #[test]
    fn every_synchronisation_is_noticed_in_graphs_of_layers_with_waits_before_replays() {
        assert_noticed(&program(Some((Scope::Layer, GateMode::BeforeReplay)), LAYOUT));
    }

    #[test]
    fn every_synchronisation_is_noticed_in_graphs_of_microbatches_with_gates_inside() {
        assert_noticed(&program(Some((Scope::Microbatch, GateMode::InGraph)), LAYOUT));
    }

    #[test]
    fn every_synchronisation_is_noticed_in_graphs_of_microbatches_with_waits_before_replays() {
        assert_noticed(&program(Some((Scope::Microbatch, GateMode::BeforeReplay)), LAYOUT));
    }
}
