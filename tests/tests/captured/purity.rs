//! Warm-up and capture change nothing that training can see: every byte and every account is compared.

use graphcap::Scope;
use pgroups::local;

use super::{support::*, training::*};

#[test]
fn capture_failed_capture_and_warm_up_leave_every_byte_and_account() {
    let machines: Vec<_> = [cpu(), sim(1), sim(2)].into_iter().chain(cards()).collect();
    for scope in [Scope::Layer, Scope::Microbatch, Scope::Step] {
        for mode in MODES {
            for machine in &machines {
                let program = Program { warm_ups: 2, failures: 1, ..Program::captured(scope, mode) };
                local(machine, 2, |rank| -> Result<(), Caught> {
                    let mut trainer = Trainer::new(&rank, &program, "m")?;
                    // In the middle of training: nothing is zero any more, nothing is published.
                    trainer.step(None, 0)?;
                    let (bytes, accounts) = (trainer.snapshot()?, trainer.accounts());
                    assert!(bytes.iter().filter(|bits| **bits != 0).count() > 400);
                    let graphs = trainer.prepare()?.unwrap();
                    assert!(trainer.snapshot()? == bytes, "{scope}, {mode} on {}", machine.driver());
                    assert_eq!(trainer.accounts(), accounts);
                    assert!(replays(graphs.training.graphs()).iter().all(|count| *count == 0));
                    // The snapshot does see what a replay changes.
                    trainer.step(Some(&graphs), 1)?;
                    assert!(trainer.snapshot()? != bytes);
                    assert_ne!(trainer.accounts(), accounts);
                    Ok(())
                })
                .unwrap();
            }
        }
    }
}
