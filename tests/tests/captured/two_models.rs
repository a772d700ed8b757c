//! Two captured models with different replicas in one process.

use device::Machine;
use graphcap::{
    GateMode, Scope,
    verify::{VerifyOptions, verify},
};
use pgroups::{PgError, local};

use super::{support::*, training::*};

fn alone(program: &Program, machine: &Machine, name: &str) -> Result<Vec<Vec<u32>>, PgError> {
    local(machine, 4, |rank| {
        let mut trainer = Trainer::new(&rank, program, name)?;
        let graphs = trainer.prepare()?;
        (0..3).try_for_each(|step| trainer.step(graphs.as_ref(), step))?;
        trainer.finish()
    })
}

#[test]
fn two_captured_models_in_turns_give_the_bits_that_each_gives_alone() {
    let whole = Program { replicas: vec![vec![0, 1, 2, 3]], ..Program::captured(Scope::Microbatch, GateMode::InGraph) };
    let pairs =
        Program { replicas: vec![vec![2, 0], vec![3, 1]], ..Program::captured(Scope::Layer, GateMode::BeforeReplay) };
    let on_hosts = [sim(1), sim(2), cpu()].map(|machine| (sim(0), machine));
    // A card adds up four ranks' gradients in an order of its own.
    let on_cards = cards().into_iter().map(|card| (card.clone(), card));
    for (first, machine) in on_hosts.into_iter().chain(on_cards) {
        let want = [alone(&whole, &first, "a").unwrap(), alone(&pairs, &first, "b").unwrap()];
        // The values of the first bucket.
        assert!(want[1][0][..30] == want[1][2][..30] && want[1][0][..30] != want[1][1][..30]);
        machine.trace_start();
        let both = local(&machine, 4, |rank| -> Result<_, Caught> {
            let (mut a, mut b) = (Trainer::new(&rank, &whole, "a")?, Trainer::new(&rank, &pairs, "b")?);
            let graphs = (a.prepare()?, b.prepare()?);
            for step in 0..3 {
                a.step(graphs.0.as_ref(), step)?;
                b.step(graphs.1.as_ref(), step)?;
            }
            Ok((a.finish()?, b.finish()?))
        });
        let (a, b): (Vec<_>, Vec<_>) = both.unwrap().into_iter().unzip();
        assert!(a == want[0] && b == want[1], "on {}", machine.driver());
        let report = verify(&machine.trace_stop(), &VerifyOptions::default());
        assert!(report.is_clean(), "{report}");
    }
}
