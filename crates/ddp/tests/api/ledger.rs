//! The ledger: each write of each bucket published once, by whom, and who waited.

use std::sync::Mutex;

use ddp::{DdpConfig, DdpError, Dispatch, Ledger};
use device::{Note, Tick, Trace, TraceEvent, ops::Cast};
use graphcap::{GateMode, Graph, GraphConfig, GraphSet, Scope};
use pgroups::Pass;

use crate::support::{Caught, One, Setup, cpu, declared, machines, sim};

const STEPS: u64 = 3;

/// Four buckets of one parameter each on two replicas: parameter 0 is read first and lies in the last bucket.
fn four(dispatch: Dispatch) -> Setup {
    let ddp = DdpConfig { dispatch, ..DdpConfig::default() };
    Setup { ddp, ..Setup::new(2, declared(&[90, 60, 40, 20])) }.sharded()
}

/// A graph that reads some parameters.
fn capture(one: &One, set: &mut GraphSet, name: &str, reads: &[usize]) -> Result<Graph, Caught> {
    let copies = reads.iter().map(|&i| {
        let param = one.param(i);
        one.device.alloc("copy", param.shape().dims(), param.dtype(), device::MemoryKind::Other)
    });
    let copies = copies.collect::<Result<Vec<_>, _>>()?;
    let (graph, ()) = set.capture(name, &one.stream, |scope| -> Result<(), Caught> {
        for (&i, copy) in reads.iter().zip(&copies) {
            let mut turn = scope.turn(Pass::Forward);
            let value = turn.read(one.param(i), &one.stream)?;
            one.stream.launch(Cast { x: &value, y: copy }.op("use")?)?;
            turn.done(one.param(i), &one.stream)?;
        }
        Ok(())
    })?;
    Ok(graph)
}

fn contributions(one: &One) -> Result<(), Caught> {
    (0..4).rev().try_for_each(|i| one.contribute(i, 1.0))
}

/// Two graphs, of the first three parameters and of the last; two microbatches a step; an evaluation behind each step.
fn graphs(one: &One, gates: GateMode) -> Result<(), Caught> {
    let mut set = GraphSet::new(&one.stream, GraphConfig { gates, ..GraphConfig::new(Scope::Layer) })?;
    let a = capture(one, &mut set, "a", &[0, 1, 2])?;
    let b = capture(one, &mut set, "b", &[3])?;
    let pass = |one: &One| -> Result<(), Caught> {
        a.replay(&one.stream, &[])?;
        b.replay(&one.stream, &[])?;
        contributions(one)
    };
    for step in 1..=STEPS {
        one.device.note(|| Note::Step(step));
        {
            let _adding_up = one.ddp.no_sync();
            one.microbatch(pass)?;
        }
        one.microbatch(pass)?;
        one.ddp.finish_grads()?;
        one.descend(&one.stream, 1.0)?;
    }
    Ok(())
}

fn traced(machine: &device::Machine, setup: &Setup, body: impl Fn(&One) -> Result<(), Caught> + Sync) -> Trace {
    machine.trace_start();
    setup.run(machine, |one| body(one)).unwrap();
    machine.trace_stop()
}

#[test]
fn graphs_publish_each_bucket_once_in_the_first_microbatch_and_nothing_in_the_second() {
    for machine in machines() {
        for gates in [GateMode::BeforeReplay, GateMode::InGraph] {
            let trace = traced(&machine, &four(Dispatch::Chain), |one| graphs(one, gates));
            for rank in 0..2 {
                let ledger = Ledger::of(&trace, rank);
                ledger.check().unwrap();
                let of_step = |step: u64| -> Vec<(String, String, u64)> {
                    let issued = ledger.entries().iter().flat_map(|e| e.issued.iter().map(move |i| (e, i)));
                    let issued = issued.filter(|(_, i)| i.step == step);
                    issued.map(|(e, i)| (e.bucket().to_owned(), i.by.clone(), i.microbatch)).collect()
                };
                assert!(of_step(1).is_empty(), "initial values are published");
                for step in 2..=STEPS {
                    let mut issued = of_step(step);
                    issued.sort();
                    let line = |bucket: usize, by: &str| (format!("p{bucket}"), by.to_owned(), 1);
                    let want = [line(0, "read"), line(1, "chain"), line(2, "chain"), line(3, "chain")];
                    assert_eq!(issued, want, "step {step} on {} with {gates}", machine.driver());
                }
                let of_write_2 = ledger.entries().iter().filter(|entry| entry.epoch == 2);
                for entry in of_write_2 {
                    assert_eq!(entry.reads, 2, "{}: one in each microbatch", entry.bucket());
                    assert!(!entry.waits.is_empty(), "{}: nobody waited", entry.bucket());
                }
            }
        }
    }
}

#[test]
fn an_evaluation_that_nobody_prepares_publishes_each_bucket_once_at_its_read() {
    let causes = Mutex::new(Vec::new());
    for machine in machines() {
        let trace = traced(&machine, &four(Dispatch::Aligned), |one| {
            one.microbatch(contributions)?;
            one.ddp.finish_grads()?;
            one.descend(&one.stream, 1.0)?;
            // Two microbatches of an evaluation.
            for i in [0, 1, 2, 3, 0, 1, 2, 3] {
                one.read(i)?;
            }
            let last = one.ddp.publications().into_iter().map(|last| last.unwrap().cause.name());
            causes.lock().unwrap().push(last.collect::<Vec<_>>());
            Ok(())
        });
        for rank in 0..2 {
            let ledger = Ledger::of(&trace, rank);
            ledger.check().unwrap();
            assert_eq!(ledger.by_cause().into_iter().collect::<Vec<_>>(), [("read", 4)]);
            let of_write = ledger.entries().iter().filter(|entry| entry.epoch == 2);
            assert!(of_write.clone().all(|e| (e.issued.len(), e.issued[0].microbatch, e.reads) == (1, 0, 2)));
            assert_eq!(of_write.count(), 4);
        }
    }
    // The host's account says the same.
    assert!(causes.into_inner().unwrap().iter().all(|last| *last == ["read"; 4]));
}

#[test]
fn the_ledger_names_every_way_to_start_a_publication() {
    let by = |dispatch, forced: bool| {
        let trace = traced(&sim(3), &four(dispatch), |one| {
            one.microbatch(contributions)?;
            one.ddp.finish_grads()?;
            one.optimizer(ddp::OptimizerConfig::default())?.step(&one.stream, &[0.1])?;
            if forced {
                one.ddp.publish(&one.stream)?;
            }
            one.read(0)?;
            Ok(())
        });
        let ledger = Ledger::of(&trace, 1);
        ledger.by_cause().into_iter().map(|(by, times)| (by.to_owned(), times)).collect::<Vec<_>>()
    };
    let told = |list: &[(&str, usize)]| list.iter().map(|(by, n)| ((*by).to_owned(), *n)).collect::<Vec<_>>();
    assert_eq!(by(Dispatch::Chain, false), told(&[("chain", 1), ("read", 1)]));
    assert_eq!(by(Dispatch::Aligned, false), told(&[("read", 1)]));
    assert_eq!(by(Dispatch::Aligned, true), told(&[("forced", 4)]));
    assert_eq!(by(Dispatch::WithOptimizer, false), told(&[("optimizer", 4)]));
    assert_eq!(by(Dispatch::AtStep, false), told(&[("optimizer", 4)]));
}

#[test]
fn a_write_that_is_read_unpublished_and_one_that_is_published_again_are_told_apart() {
    let trace = traced(&sim(1), &four(Dispatch::Chain), |one| graphs(one, GateMode::InGraph));
    let of = |event: &TraceEvent| {
        let TraceEvent::Note { rank: 1, note: Note::Issued { publisher, epoch: 3, .. }, .. } = event else {
            return false;
        };
        publisher.starts_with("ddp.published.p2@")
    };
    let mut without = trace.clone();
    without.events.retain(|event| !of(event));
    Ledger::of(&without, 0).check().unwrap();
    let error = Ledger::of(&without, 1).check().unwrap_err();
    assert!(
        matches!(&error, DdpError::NeverPublished { group, rank: 1, epoch: 3, reads: 2 } if group == "p2"),
        "{error:?}"
    );
    let mut twice = trace;
    let again = twice.events.iter().find(|event| of(event)).unwrap().clone();
    // Behind everything, when the second microbatch of the last step and its write are over.
    twice.events.push(again);
    let error = Ledger::of(&twice, 1).check().unwrap_err();
    let want = "p2, rank 1: write 3 was published 2 times (chain in step 3, microbatch 1, chain in step 3): \
                one of them is too many";
    assert_eq!(error.to_string(), want);
}

#[test]
fn who_waits_on_a_clock_was_held_up_for_some_time() {
    let trace = traced(&cpu(), &four(Dispatch::AtStep), |one| {
        one.microbatch(contributions)?;
        one.ddp.finish_grads()?;
        one.optimizer(ddp::OptimizerConfig::default())?.step(&one.stream, &[0.1])?;
        one.read(0)?;
        Ok(())
    });
    // The optimizer's stream has nothing to do while the values travel.
    let ledger = Ledger::of(&trace, 0);
    assert!(ledger.exposed().unwrap() > 0, "{ledger:?}");
    let text = ledger.table(Tick::Nanosecond);
    assert!(text.lines().count() == 5 && text.contains("optimizer in step 0"), "{text}");
}
