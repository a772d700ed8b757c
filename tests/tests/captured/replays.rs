//! Replays against eager training: the same bits, the same accounts, in every order.

use device::Machine;
use graphcap::{GateMode, Scope};

use super::{support::*, training::*};

const SCOPES: [Scope; 4] = [Scope::Layer, Scope::Chunk, Scope::Microbatch, Scope::Step];

#[test]
fn replays_give_the_bits_of_eager_training_at_every_scope_and_in_both_modes() {
    let cards = cards();
    for scope in SCOPES {
        let eager = |machine: &Machine| Program::eager(scope).run(machine, &nothing).unwrap();
        let want = eager(&sim(0));
        assert!(want[0].iter().all(|bits| f32::from_bits(*bits).is_finite()) && want[0] != want[1]);
        for mode in MODES {
            let program = Program::captured(scope, mode);
            for seed in 0..25 {
                assert_eq!(program.run(&sim(seed), &nothing).unwrap(), want, "{scope}, {mode}, seed {seed}");
            }
            assert_eq!(program.run(&cpu(), &nothing).unwrap(), want, "{scope}, {mode} on cpu");
            // A card adds up norms in an order of its own.
            for card in &cards {
                assert_eq!(program.run(card, &nothing).unwrap(), eager(card), "{scope}, {mode} on a card");
            }
        }
    }
}

#[test]
fn warm_up_and_failed_captures_change_no_bit_of_the_training_that_follows() {
    let cards = cards();
    for mode in MODES {
        let plain = Program::captured(Scope::Microbatch, mode);
        let program = Program { warm_ups: 3, failures: 2, ..plain.clone() };
        let want = plain.run(&sim(0), &nothing).unwrap();
        for machine in [cpu(), sim(1), sim(2), sim(3)] {
            assert_eq!(program.run(&machine, &nothing).unwrap(), want, "{mode} on {}", machine.driver());
        }
        for card in &cards {
            assert_eq!(program.run(card, &nothing).unwrap(), plain.run(card, &nothing).unwrap(), "{mode} on a card");
        }
    }
}

#[test]
fn replays_leave_the_accounts_of_eager_steps() {
    let accounts = |machine: &Machine, program: &Program| {
        let said = pgroups::local(machine, 2, |rank| -> Result<_, Caught> {
            let mut trainer = Trainer::new(&rank, program, "m")?;
            let graphs = trainer.prepare()?;
            let mut said = Vec::new();
            for step in 0..3 {
                trainer.step(graphs.as_ref(), step)?;
                said.push(trainer.accounts());
            }
            trainer.device.synchronize()?;
            let count = |set: &graphcap::GraphSet| replays(set.graphs());
            Ok((said, graphs.map(|graphs| (count(&graphs.training), count(&graphs.evaluation)))))
        });
        said.unwrap().remove(0)
    };
    let (want, none) = accounts(&sim(3), &Program::eager(Scope::Layer));
    assert!(none.is_none());
    let machines: Vec<_> = [sim(3)].into_iter().chain(cards()).collect();
    for (machine, mode) in machines.iter().flat_map(|machine| MODES.map(|mode| (machine, mode))) {
        let (said, replayed) = accounts(machine, &Program::captured(Scope::Layer, mode));
        // Whoever replays looks at a published bucket without asking: lookups are fewer.
        let told = |steps: &[Vec<String>]| -> Vec<String> {
            steps.iter().flatten().map(|line| line.split(", lookups").next().unwrap().to_owned()).collect()
        };
        assert_eq!(told(&said), told(&want));
        // Three layers forward, the loss, three backward; two microbatches and one evaluation a step.
        assert_eq!(replayed.unwrap(), (vec![6; 7], vec![3]));
    }
}

#[test]
fn replays_and_chained_gathers_publish_each_bucket_once_in_the_order_of_first_reads() {
    let program = Program::captured(Scope::Layer, GateMode::InGraph);
    pgroups::local(&sim(1), 2, |rank| -> Result<(), Caught> {
        let mut trainer = Trainer::new(&rank, &program, "m")?;
        let graphs = trainer.prepare()?.unwrap();
        let forward = &graphs.training.graphs()[..3];
        let x = trainer.sample(0, 0)?;
        let published = || trainer.ddp.counters().publications;
        let step = |replay: &dyn Fn() -> Result<(), Caught>| -> Result<u64, Caught> {
            let before = published();
            replay()?;
            Ok(published() - before)
        };
        let pass = || -> Result<Vec<u64>, Caught> {
            let given = [("x", (&x).into())];
            let replay =
                |at: usize| step(&|| Ok(forward[at].replay(&trainer.compute, if at == 0 { &given } else { &[] })?));
            (0..3).map(replay).collect()
        };
        // Initial values are published; the look at them finds that.
        assert_eq!(pass()?, [0, 0, 0]);
        trainer.ddp.load(&trainer.compute, ddp::Loaded::Shards, |_| Ok(()))?;
        // The first read gathers its bucket and the next one, which then takes the one behind it.
        assert_eq!(pass()?, [2, 1, 0]);
        assert_eq!(pass()?, [0, 0, 0]);
        // An evaluation asks by itself, in one graph.
        trainer.ddp.load(&trainer.compute, ddp::Loaded::Shards, |_| Ok(()))?;
        let evaluation = &graphs.evaluation.graphs()[0];
        let evaluate = || step(&|| Ok(evaluation.replay(&trainer.compute, &[])?));
        assert_eq!([evaluate()?, evaluate()?], [3, 0]);
        trainer.device.synchronize()?;
        Ok(())
    })
    .unwrap();
}
