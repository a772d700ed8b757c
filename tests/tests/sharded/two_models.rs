//! Two models on different layouts in one process, in turns.

use graphcap::{
    GateMode, Scope,
    verify::{Finding, VerifyOptions, verify},
};
use pgroups::{Sequence, local};

use super::{
    program::{Arch, Program},
    support::{Caught, cards, cpu, sim},
    worker::Worker,
};

#[test]
fn two_sharded_models_in_turns_give_the_bits_that_each_gives_alone() {
    let split = Program { arch: Arch::Llama, sequence: Sequence::Split, ..Program::on(2, 1, 2) };
    let shards = Program { clip: 0.0, microbatches: 1, ..Program::on(1, 2, 2) };
    let graphs = [(Scope::Layer, GateMode::InGraph), (Scope::Microbatch, GateMode::BeforeReplay)];
    let pairs = [
        [split.clone(), shards.clone()],
        [split.captured(graphs[1].0, graphs[1].1), shards.captured(graphs[0].0, graphs[0].1)],
    ];
    let on_hosts = (sim(0), vec![sim(1), sim(2), cpu()]);
    let on_cards = cards().into_iter().map(|card| (card.clone(), vec![card]));
    let places: Vec<_> = [on_hosts].into_iter().chain(on_cards).collect();
    for ((first, machines), [a, b]) in places.iter().flat_map(|place| pairs.iter().map(move |pair| (place, pair))) {
        let alone = |program: &Program, name: &str| {
            local(first, 4, |rank| -> Result<_, Caught> {
                let mut worker = Worker::prepared(&rank, program, name)?;
                for step in 1..4 {
                    worker.step(step)?;
                    worker.evaluate()?;
                }
                worker.finish()
            })
            .unwrap()
        };
        let want = [alone(a, "a"), alone(b, "b")];
        for machine in machines {
            machine.trace_start();
            let both = local(machine, 4, |rank| -> Result<_, Caught> {
                let (mut one, mut other) = (Worker::new(&rank, a, "a")?, Worker::new(&rank, b, "b")?);
                one.step(0)?;
                other.step(0)?;
                one.capture()?;
                other.capture()?;
                for step in 1..4 {
                    // The passes of both, then the updates of both.
                    one.passes(step)?;
                    other.passes(step)?;
                    one.optimizer.step_at_rates(&one.updates.clone())?;
                    other.optimizer.step_at_rates(&other.updates.clone())?;
                    other.evaluate()?;
                    one.evaluate()?;
                }
                Ok((one.finish()?, other.finish()?))
            });
            let (one, other): (Vec<_>, Vec<_>) = both.unwrap().into_iter().unzip();
            assert!(one == want[0] && other == want[1], "{:?} on {}", a.graphs, machine.driver());
            let report = verify(&machine.trace_stop(), &VerifyOptions { limit: 10_000, ..VerifyOptions::default() });
            // Publishers are told apart by name in a trace, and both models have the same ones: only orders are asked
            // here.
            let is_race = |finding: &&Finding| matches!(finding, Finding::Race(_) | Finding::CallOrder(_));
            assert_eq!(report.findings().iter().find(is_race), None);
        }
    }
}
