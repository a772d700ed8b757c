//! What graphs of sharded passes hold and ask for, and what they leave alone.

use device::{Note, TraceEvent};
use graphcap::{
    GateMode, Graph, GraphConfig, GraphSet, Scope,
    verify::{VerifyOptions, verify},
};
use pgroups::{Sequence, local};

use super::{
    passes::{Carried, pieces},
    program::Program,
    support::{Caught, captures, kinds, sim},
    worker::Worker,
};

fn program() -> Program {
    Program { sequence: Sequence::Split, ..Program::on(2, 2, 2) }
}

#[test]
fn conditions_are_of_what_a_graph_gathers_each_bucket_once_in_the_order_of_first_reads() {
    let program = program().captured(Scope::Layer, GateMode::InGraph);
    let told = local(&sim(1), 8, |rank| -> Result<_, Caught> {
        let mut worker = Worker::prepared(&rank, &program, "m")?;
        let graphs = worker.graphs.as_ref().expect("graphs").training.graphs();
        let of = |graph: &Graph| (graph.reads(), graph.conditions());
        let told: Vec<_> = graphs.iter().map(of).collect();
        let weak: Vec<_> = graphs.to_vec();
        assert!(worker.graphs.take().expect("graphs").delete().iter().all(|left| left.to_string().contains("handle")));
        assert!(weak.iter().all(|graph| graph.reads().is_empty() && graph.conditions().is_empty()));
        Ok(told)
    })
    .unwrap();
    let (first, forward) = (&told[0], program.gpt().unwrap().config().layers + 2);
    assert!(told.iter().all(|rank| rank == first), "all ranks list the same");
    let mut seen = Vec::new();
    for (at, (reads, conditions)) in first.iter().enumerate() {
        assert_eq!(reads.is_empty(), at >= forward, "backward lists nothing: {reads:?}");
        let mut unique = reads.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), reads.len(), "{reads:?}");
        // One bucket a layer: a condition is the first read of each.
        let unit = |name: &String| name.split('.').take_while(|part| part.parse::<u32>().is_err()).count();
        assert!(conditions.iter().all(|name| reads.contains(name)) && unit(&"h.0".into()) == 1);
        seen.extend(reads.clone());
    }
    // The embedding's graph gathers the first layer's first matrix ahead, so the first layer's own does not list it.
    let ahead = &first[0].0;
    assert!(ahead.iter().any(|name| name.starts_with("h.0.")), "{ahead:?}");
    assert!(ahead.iter().filter(|name| name.starts_with("h.0.")).all(|name| !first[1].0.contains(name)), "{first:?}");
}

#[test]
fn capturing_a_sharded_pass_failing_to_and_warming_up_leave_every_bit_and_account() {
    let kinds = kinds();
    for (machine, (seed, (scope, gates))) in
        kinds.iter().flat_map(|machine| (1..).zip(captures()).map(move |capture| (machine, capture)))
    {
        let program = program().captured(scope, gates);
        local(&machine(seed), 8, |rank| -> Result<(), Caught> {
            let mut worker = Worker::new(&rank, &program, "m")?;
            worker.step(0)?;
            worker.evaluate()?;
            worker.source.settle()?;
            worker.bits()?;
            let (bits, accounts) = (worker.bits()?, worker.accounts());
            let compute = worker.compute.clone();
            let mut failing = GraphSet::new(&compute, GraphConfig { gates, ..GraphConfig::new(scope) })?;
            let all = pieces(&worker.model);
            let failed = failing.capture("failing", &compute, |scope| -> Result<(), Caught> {
                let turn = scope.turn(pgroups::Pass::Forward);
                worker.training().run(&all[..3], turn, &mut Carried::default())?;
                Err("planted".into())
            });
            assert!(failed.map(drop).unwrap_err().to_string().contains("nothing is left of the capture"));
            worker.capture()?;
            worker.graphs.as_ref().expect("graphs").training.warm_up(&compute, 2)?;
            assert!(worker.bits()? == bits, "{scope}, {gates}");
            assert_eq!(worker.accounts(), accounts);
            // Both do see a step.
            worker.step(1)?;
            assert!(worker.bits()? != bits && worker.accounts() != accounts);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn every_write_of_sharded_training_is_published_once_whoever_reads_it_first() {
    let kinds = kinds();
    let graphs = || (1..).zip([None].into_iter().chain(captures().into_iter().map(Some)));
    for (machine, (seed, graphs)) in kinds.iter().flat_map(|machine| graphs().map(move |graphs| (machine, graphs))) {
        let program = Program { graphs, ..Program::on(1, 2, 2) };
        let machine = machine(seed);
        machine.trace_start();
        let buckets = local(&machine, 4, |rank| -> Result<_, Caught> {
            let mut worker = Worker::prepared(&rank, &program, "m")?;
            for step in 1..4 {
                worker.step(step)?;
                // In odd steps an evaluation reads first.
                if step % 2 == 1 {
                    worker.evaluate()?;
                }
            }
            let buckets = worker.ddp.plan().groups().len();
            worker.finish()?;
            Ok(buckets)
        })
        .unwrap();
        let trace = machine.trace_stop();
        let report = verify(&trace, &VerifyOptions::default());
        assert!(report.is_clean(), "{graphs:?} on {}: {report}", machine.driver());
        let mut issued: Vec<(u32, String, u64)> = Vec::new();
        for event in &trace.events {
            if let TraceEvent::Note { rank, note: Note::Issued { publisher, epoch, .. }, .. } = event {
                issued.push((*rank, publisher.to_string(), *epoch));
            }
        }
        let all = issued.len();
        issued.sort();
        issued.dedup();
        // Four steps; the initial values are published.
        assert_eq!((all, issued.len()), (4 * buckets[0] * 4, all), "{graphs:?}");
    }
}
