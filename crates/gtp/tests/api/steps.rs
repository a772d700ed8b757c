//! Graphs of whole steps: gathers, reductions and the optimizer inside, passes that are submitted between them.

use device::{
    Machine,
    ops::{Axpy, Factor, Fill},
};
use graphcap::{GraphConfig, GraphSet, Scope};
use gtp::{Gtp, PassKind};
use pgroups::{ParamSet, Pass, Turn};

use crate::api::{
    rig::{Caught, machines},
    script::{Act, Script, forward, there_and_back},
    stand::{Found, Model, Stand},
};

/// In a graph of a whole step reads and gradients are as they are submitted: two microbatches, an evaluation of what they were computed with, and a step of the optimizer.
fn step(gtp: &mut Gtp, script: &Script, params: &ParamSet) -> Result<(), Caught> {
    let passes: [(PassKind, Vec<Act>); 3] = [
        (PassKind::TRAIN, there_and_back(&[0, 1, 2, 0])),
        (PassKind::TRAIN, there_and_back(&[0, 1, 2, 0])),
        (PassKind::EVAL, forward(&[2, 1])),
    ];
    for (kind, acts) in passes {
        let mut weights = gtp.pass(kind, Turn::eager(Pass::Forward))?;
        script.play(&mut weights, &acts)?;
        weights.finish()?;
    }
    let on = &script.streams[0];
    gtp.account().join(on)?;
    on.launch(Axpy { alpha: Factor::Const(-0.01), x: params.grads(), y: params.values() }.op("descend")?)?;
    Ok(on.launch(Fill { y: params.grads(), value: 0.0 }.op("zero")?)?)
}

/// Which steps are replays.
fn run(machine: &Machine, replayed: [bool; 6]) -> Vec<Found> {
    Model::new(3, &[(6, 4), (5, 4), (4, 4)]).run(machine, |stand| {
        let Stand { gtp, script, params, .. } = &mut *stand;
        // Plans both kinds.
        step(gtp, script, params)?;
        gtp.plan()?;
        let accounts = vec![gtp.account()];
        let mut set = GraphSet::new(&script.streams[0], GraphConfig { accounts, ..GraphConfig::new(Scope::Step) })?;
        let before = gtp.counters();
        let (graph, ()) = set.capture("step", &script.streams[0], |_| step(gtp, script, params))?;
        assert_eq!(gtp.counters(), before, "a capture leaves no trace");
        for replayed in replayed {
            if replayed {
                graph.replay(&script.streams[0], &[])?;
            } else {
                step(gtp, script, params)?;
            }
        }
        script.play(&mut gtp.pass(PassKind::EVAL, Turn::eager(Pass::Forward))?, &forward(&[2, 1]))?;
        stand.found()
    })
}

#[test]
fn replayed_steps_give_the_bits_of_submitted_ones_in_any_mixture() {
    for machine in machines() {
        let want = run(&machine, [false; 6]);
        for replayed in [[true; 6], [true, false, true, true, false, false]] {
            assert_eq!(run(&machine, replayed), want, "{replayed:?} on {}", machine.driver());
        }
    }
}
