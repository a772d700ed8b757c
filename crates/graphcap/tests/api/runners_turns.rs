//! A runner goes forward and backward in turn.

use graphcap::{
    CallName, ChunkIndex, ForwardCall, GradMode, GraphUnit, LayerIndex, MicrobatchIndex, OpenCall, OutOfTurn,
    RunnerError, RunnerIndex, Runners, Sharing,
};
use proptest::prelude::*;

const UNIT: GraphUnit = GraphUnit::Layer { chunk: ChunkIndex(1), layer: LayerIndex(3) };

fn call(microbatch: u32, grad: GradMode) -> ForwardCall<&'static str> {
    ForwardCall { unit: UNIT, microbatch: MicrobatchIndex(microbatch), signature: "x", grad, key: None }
}

fn name(pass: u64, microbatch: u32) -> CallName {
    CallName { pass, microbatch: MicrobatchIndex(microbatch) }
}

/// One runner of one microbatch, whose number the test can choose: the ring of a pipeline of two stages.
fn one() -> Runners<(), &'static str> {
    Runners::new(Sharing::PerMicrobatch { stages: 2 })
}

fn forward(runners: &mut Runners<(), &'static str>, microbatch: u32, grad: GradMode) -> RunnerIndex {
    runners.forward(call(microbatch, grad), || ()).unwrap()
}

fn out_of_turn(error: RunnerError) -> OutOfTurn {
    let RunnerError::OutOfTurn { unit, runner, source } = error else { panic!("{error}") };
    assert_eq!((unit, runner), (UNIT, RunnerIndex(0)));
    source
}

/// One runner in a created set, ready, with both passes recorded in pass 0.
fn created() -> Runners<(), &'static str> {
    let mut runners = one();
    let runner = forward(&mut runners, 0, GradMode::On);
    runners.backward(runner, MicrobatchIndex(0)).unwrap();
    runners.end_pass().unwrap();
    let _ = runners.create(|(), _| Ok::<(), ()>(())).unwrap();
    runners
}

#[test]
fn two_forwards_in_a_row_are_an_error_that_names_both() {
    let mut runners = created();
    forward(&mut runners, 0, GradMode::On);
    let error = runners.forward(call(0, GradMode::On), || ()).unwrap_err();
    assert_eq!(error.to_string(), "runner 0 of layer 3 of chunk 1: out of turn");
    let source = out_of_turn(error);
    assert_eq!(source, OutOfTurn::TwoForwards { first: name(1, 0), second: name(1, 0) });
    assert!(source.to_string().starts_with("forward of microbatch 0 of pass 1 follows forward of microbatch 0"));
    // The refused call has changed nothing.
    runners.backward(RunnerIndex(0), MicrobatchIndex(0)).unwrap();
}

#[test]
fn two_backwards_in_a_row_are_an_error_that_names_both() {
    let mut runners = created();
    let error = runners.backward(RunnerIndex(0), MicrobatchIndex(0)).unwrap_err();
    assert_eq!(out_of_turn(error), OutOfTurn::TwoBackwards { first: name(0, 0), second: name(1, 0) });
    forward(&mut runners, 0, GradMode::On);
    runners.backward(RunnerIndex(0), MicrobatchIndex(0)).unwrap();
    let error = runners.backward(RunnerIndex(0), MicrobatchIndex(0)).unwrap_err();
    assert_eq!(out_of_turn(error), OutOfTurn::TwoBackwards { first: name(1, 0), second: name(1, 0) });
}

#[test]
fn a_backward_is_of_the_microbatch_that_went_forward() {
    let mut runners = one();
    forward(&mut runners, 5, GradMode::On);
    let error = runners.backward(RunnerIndex(0), MicrobatchIndex(4)).unwrap_err();
    assert_eq!(out_of_turn(error), OutOfTurn::OtherMicrobatch { forward: name(0, 5), backward: name(0, 4) });
    runners.backward(RunnerIndex(0), MicrobatchIndex(5)).unwrap();
}

#[test]
fn a_forward_without_gradients_leaves_its_runner_ready_and_has_no_backward() {
    let mut runners = one();
    let runner = forward(&mut runners, 2, GradMode::Off);
    let error = runners.backward(runner, MicrobatchIndex(2)).unwrap_err();
    assert_eq!(out_of_turn(error), OutOfTurn::BackwardOfNoGrad { forward: name(0, 2), backward: name(0, 2) });
    runners.end_pass().unwrap();
    assert_eq!(forward(&mut runners, 2, GradMode::Off), runner, "ready, and the next round's first");
    runners.end_pass().unwrap();
}

/// Keyed calls go to one runner whatever it waits for: the one way to reach a runner in the middle of its turn.
#[test]
fn a_forward_without_gradients_resets_a_runner_and_the_backward_it_spoils_is_refused() {
    let mut runners: Runners<(), &str> = Runners::new(Sharing::AcrossMicrobatches);
    let keyed = |microbatch, grad| ForwardCall { key: Some(graphcap::CacheKey(7)), ..call(microbatch, grad) };
    let runner = runners.forward(keyed(1, GradMode::On), || ()).unwrap();
    assert_eq!(runners.forward(keyed(2, GradMode::Off), || panic!("there is one")), Ok(runner));
    let error = runners.backward(runner, MicrobatchIndex(1)).unwrap_err();
    let spoiled = OutOfTurn::Dropped { forward: name(0, 1), by: name(0, 2), backward: name(0, 1) };
    assert_eq!(out_of_turn(error), spoiled);
    assert!(spoiled.to_string().contains("microbatch 2 of pass 0, which ran without gradients"), "{spoiled}");
    assert_eq!(runners.forward(keyed(3, GradMode::On), || panic!("there is one")), Ok(runner));
    runners.backward(runner, MicrobatchIndex(3)).unwrap();
}

#[test]
fn a_pass_ends_with_a_list_of_what_it_left_open_and_the_next_begins_clean() {
    let mut runners = one();
    for microbatch in [4, 9] {
        let runner = forward(&mut runners, microbatch, GradMode::On);
        runners.backward(runner, MicrobatchIndex(microbatch)).unwrap();
    }
    runners.end_pass().unwrap();
    forward(&mut runners, 4, GradMode::On);
    let error = runners.end_pass().unwrap_err();
    let backward = OpenCall::Backward { unit: UNIT, runner: RunnerIndex(0), forward: name(1, 4) };
    let turns = OpenCall::Turns { unit: UNIT, grad: GradMode::On, done: 1, recorded: 2 };
    assert_eq!(error, RunnerError::PassUnfinished { pass: 1, open: vec![backward, turns] });
    assert_eq!(
        error.to_string(),
        "pass 1 has ended with no backward of microbatch 4 of pass 1 on layer 3 of chunk 1 (runner 0); \
         1 of 2 microbatches with gradients run on layer 3 of chunk 1"
    );
    let late = runners.backward(RunnerIndex(0), MicrobatchIndex(4)).unwrap_err();
    assert_eq!(out_of_turn(late), OutOfTurn::GivenUp { forward: name(1, 4), backward: name(2, 4) });
    let first = forward(&mut runners, 4, GradMode::On);
    assert_eq!(first, RunnerIndex(0), "the first microbatch again");
}

#[test]
fn a_runner_that_was_cleared_is_not_taken_for_a_later_one() {
    let mut runners = created();
    assert_eq!(runners.clear().len(), 1);
    let unknown = |end| Err(RunnerError::UnknownRunner { runner: RunnerIndex(0), first: 1, end });
    assert_eq!(runners.backward(RunnerIndex(0), MicrobatchIndex(0)), unknown(1));
    let again = forward(&mut runners, 0, GradMode::On);
    assert_eq!((again, runners.get(RunnerIndex(0))), (RunnerIndex(1), None));
    assert_eq!(runners.backward(RunnerIndex(0), MicrobatchIndex(0)), unknown(2));
    runners.backward(again, MicrobatchIndex(0)).unwrap();
    assert_eq!(runners.get(again), Some(&()));
}

proptest! {
    /// Against a word: a backward is allowed behind a forward with gradients of the same microbatch, if only that.
    #[test]
    fn a_keyed_runner_takes_exactly_the_calls_whose_turn_it_is(
        calls in prop::collection::vec((0u32..2, prop::option::of(any::<bool>())), 1..40),
    ) {
        let mut runners: Runners<(), &str> = Runners::new(Sharing::AcrossMicrobatches);
        let key = Some(graphcap::CacheKey(0));
        let runner = runners.forward(ForwardCall { key, ..call(0, GradMode::On) }, || ()).unwrap();
        let mut open = Some(0);
        for (microbatch, kind) in calls {
            let taken = match kind {
                None => runners.backward(runner, MicrobatchIndex(microbatch)).is_ok(),
                Some(true) => runners.forward(ForwardCall { key, ..call(microbatch, GradMode::On) }, || ()).is_ok(),
                Some(false) => runners.forward(ForwardCall { key, ..call(microbatch, GradMode::Off) }, || ()).is_ok(),
            };
            let (allowed, then) = match kind {
                None => (open == Some(microbatch), None),
                Some(true) => (open.is_none(), Some(microbatch)),
                Some(false) => (true, None),
            };
            prop_assert_eq!(taken, allowed);
            open = if allowed { then } else { open };
        }
    }
}
