//! Passes that do something else than planned are right as well, and soon run ahead again.

use std::time::Duration;

use device::{Machine, Options};
use gtp::{Counters, GtpError, PassKind};
use pgroups::{Pass, Turn};

use crate::api::{
    rig::{Caught, hosts, options},
    script::{Act, forward, there_and_back},
    stand::{Found, Model, Stand, check_all},
};

/// Five weights of different sizes over three ranks, two uses ahead.
fn model() -> Model {
    Model::new(3, &[(6, 4), (5, 8), (9, 2), (4, 4), (7, 3)]).look_ahead(2)
}

fn run(model: &Model, machine: &Machine, passes: &[Vec<Act>]) -> Vec<(Found, Vec<Counters>)> {
    model.run(machine, |stand| {
        let mut counters = Vec::new();
        for acts in passes {
            stand.pass(acts)?;
            counters.push(stand.gtp.counters());
        }
        Ok((stand.found()?, counters))
    })
}

/// The verifier objects to nothing, and values are those of whole weights.
fn right(model: &Model, passes: &[Vec<Act>]) -> Vec<Counters> {
    let want = model.whole(passes);
    let mut all = Vec::new();
    for machine in hosts() {
        let got = run(model, &machine, passes);
        let (found, counters): (Vec<_>, Vec<_>) = got.into_iter().unzip();
        check_all(&found, &want, machine.driver());
        assert!(counters.windows(2).all(|pair| pair[0] == pair[1]), "all members see the same: {counters:?}");
        all.push(counters[0].clone());
    }
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "so do all machines: {all:?}");
    all.remove(0)
}

#[test]
fn a_skipped_weight_is_answered_on_demand_and_two_steps_later_all_is_prefetched_again() {
    let (full, skipped) = (there_and_back(&[0, 1, 2, 3, 4]), there_and_back(&[0, 1, 3, 4]));
    let counters = right(&model(), &[full.clone(), full.clone(), skipped, full.clone(), full]);
    let on_demand: Vec<u64> = counters.iter().map(|c| c.on_demand).collect();
    // The first pass has no plan: each of its ten uses gathers. The third leaves its plan where weight 2 was to come:
    // six uses are left. The fourth leaves the third's plan there again: two weights of forward, five of backward and
    // weight 2 itself.
    assert_eq!(on_demand, [10, 10, 16, 24, 24]);
    assert_eq!(counters.iter().map(|c| c.deviations).collect::<Vec<_>>(), [0, 0, 1, 2, 2]);
    assert_eq!(counters.iter().map(|c| c.plans).collect::<Vec<_>>(), [0, 1, 1, 2, 3]);
    // A planned pass gathers the last weight of forward once for both of its uses.
    assert_eq!(counters[1].planned, 9);
    assert_eq!(counters[4].planned - counters[3].planned, 9);
    assert_eq!(counters[4].repaired, 0);
}

#[test]
fn a_pass_that_ends_early_and_one_that_goes_on_longer_are_right() {
    let (short, full) = (forward(&[0, 1, 2]), there_and_back(&[0, 1, 2, 3, 4]));
    let counters = right(&model(), &[full.clone(), full.clone(), short, full.clone(), full]);
    assert_eq!(counters.iter().map(|c| c.deviations).collect::<Vec<_>>(), [0, 0, 0, 2, 2]);
    assert_eq!(counters[4].on_demand, counters[3].on_demand, "the last pass runs as planned");
}

#[test]
fn a_weight_that_is_used_twice_in_a_pass_is_gathered_for_each_use_and_its_gradients_add_up() {
    // Weight 0 is tied: the first and the last of forward. Weight 1 is a repeated layer.
    let tied = there_and_back(&[0, 1, 1, 2, 3, 0]);
    let counters = right(&model().look_ahead(1), &vec![tied; 3]);
    let last = counters[2];
    assert_eq!((last.deviations, last.repaired, last.plans), (0, 0, 1));
    assert_eq!(last.reduced, 3 * 6);
}

#[test]
fn orders_that_change_every_time_are_right() {
    let orders: [&[usize]; 6] = [&[0, 1, 2], &[2, 1, 0], &[4], &[0, 0, 4, 3], &[1, 3, 1, 3], &[0, 1, 2, 3, 4]];
    let passes: Vec<Vec<Act>> = orders.iter().map(|order| there_and_back(order)).collect();
    right(&model(), &passes);
}

#[test]
fn an_evaluation_between_training_passes_has_a_plan_of_its_own() {
    let model = model();
    let (train, eval) = (there_and_back(&[0, 1, 2, 3, 4]), forward(&[0, 1, 2, 3, 4]));
    let want = model.whole(&[train.clone(), train.clone(), eval.clone(), train.clone(), eval.clone(), train.clone()]);
    for machine in hosts() {
        let got = model.run(&machine, |stand| {
            let both = |stand: &mut Stand| -> Result<(), Caught> {
                stand.pass(&train)?;
                stand.pass_of(PassKind::EVAL, &eval)
            };
            stand.pass(&train)?;
            both(stand)?;
            let warm = stand.gtp.counters();
            both(stand)?;
            stand.pass(&train)?;
            let counters = stand.gtp.counters();
            assert_eq!((warm.plans, warm.on_demand), (1, 10 + 5));
            assert_eq!((counters.plans, counters.on_demand, counters.deviations), (2, warm.on_demand, 0));
            let plan = stand.gtp.plan()?;
            let eval = plan.pass(PassKind::EVAL).unwrap();
            assert!(eval.grads().is_empty() && eval.gathers().len() == 5, "nothing is prefetched for backward");
            stand.found()
        });
        check_all(&got, &want, machine.driver());
    }
}

#[test]
fn ranks_that_do_different_things_are_told_and_do_not_hang() {
    let short = Options { timeout: Duration::from_secs(1), ..options() };
    for machine in [Machine::cpu_with(2, short).unwrap(), Machine::sim_with(1, options())] {
        let (results, _) = model().traced(&machine, None, |stand| {
            stand.pass(&there_and_back(&[0, 1, 2]))?;
            // Rank 1 leaves out a layer.
            let order: &[usize] = if stand.rank.global.0 == 1 { &[0, 2] } else { &[0, 1, 2] };
            stand.pass(&there_and_back(order))?;
            stand.found()
        });
        let text = format!("{:?}", results.unwrap_err());
        assert!(text.contains("gtp_gather") || text.contains("gtp_on_demand"), "{text}");
    }
}

#[test]
fn a_use_that_stays_open_is_told_by_name_once_and_the_next_pass_is_right() {
    let model = model();
    let order = there_and_back(&[0, 1, 2]);
    let want = model.whole(&[vec![Act::Take(1)], order.clone(), order.clone()]);
    for machine in hosts() {
        let got = model.run(&machine, |stand| {
            let mut weights = stand.gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Forward))?;
            stand.script.play(&mut weights, &[Act::Take(1)])?;
            let open = weights.finish().unwrap_err();
            assert!(
                matches!(&open, GtpError::StillOpen { kind: PassKind::TRAIN, what: "a use", param } if param == "w1"),
                "{open}"
            );
            let again = stand.gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Forward)).map(drop).unwrap_err();
            assert!(matches!(again, GtpError::StillOpen { .. }), "{again}");
            (0..2).try_for_each(|_| stand.pass(&order))?;
            stand.found()
        });
        check_all(&got, &want, machine.driver());
    }
}

#[test]
fn a_forward_that_fails_half_way_leaves_the_next_pass_right() {
    let model = model();
    let order = there_and_back(&[0, 1, 2, 3, 4]);
    let want = model.whole(&[order.clone(), forward(&[0, 1]), order.clone(), order.clone()]);
    for machine in hosts() {
        let got = model.run(&machine, |stand| {
            stand.pass(&order)?;
            {
                let mut weights = stand.gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Forward))?;
                stand.script.play(&mut weights, &forward(&[0, 1]))?;
                // Dropped without `finish`, as `?` does it.
            }
            (0..2).try_for_each(|_| stand.pass(&order))?;
            stand.found()
        });
        check_all(&got, &want, machine.driver());
    }
}
