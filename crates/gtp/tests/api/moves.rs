//! Moves that a weight cannot make are errors with its name, and leave it usable.

use device::Machine;
use gtp::PassKind;
use pgroups::{Pass, Turn, Weights};

use crate::api::{
    mixed::told,
    rig::{hosts, options},
    script::{Act, there_and_back},
    stand::{Model, check_all},
};

fn model() -> Model {
    Model::new(2, &[(4, 4), (5, 4), (6, 4)])
}

#[test]
fn what_was_not_asked_for_is_neither_given_back_nor_done() {
    let order = there_and_back(&[0, 1, 2]);
    let want = model().whole(&vec![order.clone(); 4]);
    for machine in hosts() {
        let got = model().run(&machine, |stand| {
            // Without a plan, and with one.
            for _ in 0..2 {
                let mut weights = stand.gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Forward))?;
                let (stream, params) = (&stand.script.streams[0], &stand.script.params);
                stand.script.play(&mut weights, &order[..2])?;
                let twice = told(&weights.give_back(&params[0], stream).unwrap_err());
                assert!(twice.contains("'w0' is given back without having been asked for"), "{twice}");
                let never = told(&weights.grad_done(&params[2], stream).unwrap_err());
                assert!(never.contains("'w2' has its gradient done without having been asked for"), "{never}");
                stand.script.play(&mut weights, &order[2..])?;
                let late = told(&weights.give_back(&params[2], stream).unwrap_err());
                assert!(late.contains("'w2' is given back"), "{late}");
                weights.finish()?;
                stand.pass(&order)?;
            }
            assert_eq!(stand.gtp.counters().deviations, 0, "what was refused is no part of the pass");
            stand.found()
        });
        check_all(&got, &want, machine.driver());
    }
}

#[test]
fn a_gradient_that_is_being_written_is_not_given_away_again() {
    let order = there_and_back(&[0, 1, 2]);
    let want = model().whole(&vec![order.clone(); 2]);
    for machine in hosts() {
        let got = model().run(&machine, |stand| {
            for _ in 0..2 {
                let mut weights = stand.gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Forward))?;
                let asked = order.iter().position(|act| *act == Act::Grad(1)).unwrap();
                let (stream, params) = (&stand.script.streams[0], &stand.script.params);
                // Up to the gradient of weight 1, which then stays open.
                stand.script.play(&mut weights, &order[..asked])?;
                let open = weights.grad(&params[1], stream)?;
                let twice = told(&weights.grad(&params[1], stream).map(drop).unwrap_err());
                assert!(twice.contains("'w1' has a gradient that is not done: "), "{twice}");
                stand.script.finish_grad(&mut weights, 1, &open)?;
                stand.script.play(&mut weights, &order[asked + 2..])?;
                weights.finish()?;
            }
            stand.found()
        });
        check_all(&got, &want, machine.driver());
    }
}

#[test]
fn a_pass_does_not_end_with_a_gradient_open() {
    model().run(&Machine::sim_with(1, options()), |stand| {
        let mut weights = stand.gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Backward))?;
        weights.grad(&stand.script.params[2], &stand.script.streams[0])?;
        let open = weights.finish().unwrap_err().to_string();
        assert_eq!(open, "pass 'train' ends with a gradient of 'w2' still open");
        Ok(())
    });
}

#[test]
fn an_error_of_a_pass_names_the_weight_and_the_crate() {
    model().run(&Machine::sim_with(1, options()), |stand| {
        let mut weights = stand.gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Forward))?;
        let refused = weights.give_back(&stand.script.params[1], &stand.script.streams[0]).unwrap_err();
        let text = told(&refused);
        assert!(text.contains("gtp") && text.contains("w1"), "{text}");
        Ok(())
    });
}

#[test]
fn a_pass_that_leaves_its_plan_is_behind_every_stream_of_the_one_before() {
    let branched = [
        vec![
            Act::Take(0),
            Act::Take(0),
            Act::Back(0),
            Act::On(1),
            Act::Take(1),
            Act::Take(0),
            Act::Back(0),
            Act::Back(1),
        ],
        vec![Act::On(0), Act::Back(0)],
    ];
    let (branched, other) = (branched.concat(), vec![Act::Take(0), Act::Take(1), Act::Back(1), Act::Back(0)]);
    let model = Model::new(2, &[(4, 4); 2]);
    let passes = [&branched, &branched, &branched, &other, &branched, &branched, &branched].map(Clone::clone);
    let want = model.whole(&passes);
    for machine in hosts() {
        let got = model.run(&machine, |stand| {
            passes.iter().try_for_each(|acts| stand.pass(acts))?;
            stand.found()
        });
        check_all(&got, &want, machine.driver());
    }
}

#[test]
fn branches_on_two_streams_keep_their_slots_and_join_the_next_pass() {
    // Weight 0 is used on both streams, one inside the other and one behind the other; 1 and 2 on the side only.
    let acts = vec![
        Act::Take(0),
        Act::On(1),
        Act::Take(0),
        Act::Take(1),
        Act::Back(1),
        Act::On(0),
        Act::Back(0),
        Act::Take(3),
        Act::Back(3),
        Act::On(1),
        Act::Back(0),
        Act::Take(2),
        Act::Back(2),
        Act::On(0),
        Act::Take(4),
        Act::Back(4),
        Act::Enter(Pass::Backward),
        Act::Take(3),
        Act::Back(3),
        Act::On(1),
        Act::Grad(3),
        Act::Done(3),
        Act::Take(2),
        Act::On(0),
        Act::Take(2),
        Act::On(1),
        Act::Back(2),
        Act::On(0),
        Act::Back(2),
        Act::Grad(0),
        Act::On(1),
        Act::Grad(1),
        Act::Done(1),
        Act::On(0),
        Act::Grad(4),
        Act::Done(4),
        Act::Done(0),
    ];
    let eval = vec![
        Act::On(1),
        Act::Take(1),
        Act::Back(1),
        Act::Take(0),
        Act::Back(0),
        Act::On(0),
        Act::Take(2),
        Act::Back(2),
    ];
    for look_ahead in 0..3 {
        let model = Model::new(2, &[(4, 4); 5]).look_ahead(look_ahead);
        let want = model.whole(&[&acts, &eval, &acts, &eval, &acts, &acts, &eval].map(Clone::clone));
        for machine in hosts() {
            let got = model.run(&machine, |stand| {
                for _ in 0..2 {
                    stand.pass(&acts)?;
                    stand.pass_of(PassKind::EVAL, &eval)?;
                }
                (0..2).try_for_each(|_| stand.pass(&acts))?;
                stand.pass_of(PassKind::EVAL, &eval)?;
                stand.found()
            });
            check_all(&got, &want, &format!("{look_ahead} ahead on {}", machine.driver()));
        }
    }
}
