//! Which runner takes which call, and what is captured in which order.

use std::cell::Cell;

use graphcap::{
    CacheKey, CallName, ChunkIndex, Creation, Direction, ForwardCall, GradMode, GraphUnit, LayerIndex, LayerOrder,
    LayerStep, MicrobatchIndex, Pairing, Recorded, RunnerError, RunnerIndex, Runners, Sharing, Unfit, WeightGrads,
    WhyUnfit,
};

use super::schedule_support::{plan, settings, setup};

type Plain = Runners<u32, &'static str>;

const SHARED: Sharing = Sharing::AcrossMicrobatches;
const OWN: Sharing = Sharing::PerMicrobatch { stages: 3 };

fn unit(layer: u32) -> GraphUnit {
    GraphUnit::Layer { chunk: ChunkIndex(0), layer: LayerIndex(layer) }
}

fn call(layer: u32, microbatch: u32, signature: &'static str) -> ForwardCall<&'static str> {
    let microbatch = MicrobatchIndex(microbatch);
    ForwardCall { unit: unit(layer), microbatch, signature, grad: GradMode::On, key: None }
}

fn without_gradients(call: ForwardCall<&'static str>) -> ForwardCall<&'static str> {
    ForwardCall { grad: GradMode::Off, ..call }
}

fn keyed(key: u64, call: ForwardCall<&'static str>) -> ForwardCall<&'static str> {
    ForwardCall { key: Some(CacheKey(key)), ..call }
}

fn forward(runners: &mut Plain, call: ForwardCall<&'static str>) -> usize {
    runners.forward(call, || 0).unwrap().0
}

fn backward(runners: &mut Plain, runner: usize, microbatch: u32) {
    runners.backward(RunnerIndex(runner), MicrobatchIndex(microbatch)).unwrap();
}

fn create(runners: &mut Plain) -> Creation {
    runners.create(|_, _| Ok::<(), ()>(())).unwrap()
}

fn none_made() -> u32 {
    panic!("a runner was made")
}

#[test]
fn one_runner_serves_all_microbatches_of_one_stage() {
    let mut runners = Plain::new(SHARED);
    for pass in 0..2 {
        for microbatch in 0..5 {
            let layers = [0, 1].map(|layer| forward(&mut runners, call(layer, microbatch, "x")));
            assert_eq!(layers, [0, 1], "microbatch {microbatch} of pass {pass}");
            [1, 0].into_iter().for_each(|layer| backward(&mut runners, layer, microbatch));
        }
        runners.end_pass().unwrap();
        let captured = if pass == 0 { Creation::Captured(4) } else { Creation::AlreadyCreated };
        assert_eq!(create(&mut runners), captured);
    }
}

#[test]
fn the_first_ready_runner_with_the_signature_is_taken() {
    let mut runners = Plain::new(SHARED);
    // In flight together: runners 0 and 1 are alike, 2 is made for other inputs.
    assert_eq!([call(0, 0, "x"), call(0, 1, "x"), call(0, 2, "y")].map(|c| forward(&mut runners, c)), [0, 1, 2]);
    backward(&mut runners, 1, 1);
    backward(&mut runners, 0, 0);
    backward(&mut runners, 2, 2);
    assert_eq!([call(0, 3, "y"), call(0, 4, "x"), call(0, 5, "x")].map(|c| forward(&mut runners, c)), [2, 0, 1]);
    backward(&mut runners, 1, 5);
    assert_eq!(forward(&mut runners, call(0, 6, "x")), 1, "0 still awaits its backward");
    assert_eq!(forward(&mut runners, call(1, 6, "x")), 3, "another layer never shares");
}

#[test]
fn a_runner_with_gradients_serves_calls_without_but_not_the_other_way_round() {
    let mut runners = Plain::new(SHARED);
    let plain = forward(&mut runners, without_gradients(call(0, 0, "x")));
    let training = forward(&mut runners, call(0, 0, "x"));
    assert_eq!((plain, training), (0, 1));
    backward(&mut runners, training, 0);
    let mut other = Plain::new(SHARED);
    let training = forward(&mut other, call(0, 0, "x"));
    backward(&mut other, training, 0);
    assert_eq!(forward(&mut other, without_gradients(call(0, 1, "x"))), training);
}

#[test]
fn none_left_after_creation_is_an_error_that_says_why_each_does_not_fit() {
    let mut runners = Plain::new(SHARED);
    forward(&mut runners, without_gradients(call(0, 0, "x")));
    for (at, signature) in [(1, "x"), (2, "y")] {
        assert_eq!(forward(&mut runners, call(0, at, signature)), at as usize);
        backward(&mut runners, at as usize, at);
    }
    runners.end_pass().unwrap();
    assert_eq!(create(&mut runners), Creation::Captured(5));
    assert_eq!(forward(&mut runners, call(0, 0, "x")), 1);
    let error = runners.forward(call(0, 6, "x"), none_made).unwrap_err();
    let unfit = |runner, why| Unfit { runner: RunnerIndex(runner), why };
    let wanted = RunnerError::NoneLeft {
        unit: unit(0),
        call: CallName { pass: 1, microbatch: MicrobatchIndex(6) },
        signature: "\"x\"".into(),
        grad: GradMode::On,
        unfit: vec![
            unfit(0, WhyUnfit::NoGradients),
            unfit(1, WhyUnfit::Awaits),
            unfit(2, WhyUnfit::MadeFor("\"y\"".into())),
        ],
    };
    assert_eq!(error, wanted);
    assert_eq!(
        error.to_string(),
        "forward of microbatch 6 of pass 1 on layer 0 of chunk 0, signature \"x\", with gradients: no runner is left \
         (runner 0 brings no gradients; runner 1 awaits its backward; runner 2 is made for \"y\"); \
         run it once before the graphs are created"
    );
    let elsewhere = runners.forward(call(9, 0, "x"), none_made).unwrap_err();
    assert!(elsewhere.to_string().contains("(it has none)"), "{elsewhere}");
    // What is refused changes nothing.
    backward(&mut runners, 1, 0);
    assert_eq!(forward(&mut runners, call(0, 6, "x")), 1);
}

#[test]
fn a_key_finds_its_runner_without_a_search() {
    let mut runners = Plain::new(SHARED);
    let decode = |key, signature| without_gradients(keyed(key, call(0, 0, signature)));
    assert_eq!([decode(8, "b8"), decode(4, "b4"), decode(8, "b8")].map(|c| forward(&mut runners, c)), [0, 1, 0]);
    assert_eq!(forward(&mut runners, without_gradients(call(0, 0, "b8"))), 2, "a call without key has its own");
    assert_eq!(forward(&mut runners, without_gradients(keyed(8, call(1, 0, "b8")))), 3, "keys are of one layer");
    assert_eq!(create(&mut runners), Creation::Captured(4));
    assert_eq!(runners.forward(decode(4, "b4"), none_made), Ok(RunnerIndex(1)));
    let call_name = CallName { pass: 0, microbatch: MicrobatchIndex(0) };
    let (unit, call) = (unit(0), call_name);
    let unknown = RunnerError::UnknownKey { unit, call, key: CacheKey(16) };
    assert_eq!(runners.forward(decode(16, "b16"), none_made), Err(unknown));
    let (made_for, signature) = ("\"b4\"".to_owned(), "\"b5\"".to_owned());
    let other = RunnerError::OtherSignature { unit, call, runner: RunnerIndex(1), made_for, signature };
    assert_eq!(runners.forward(decode(4, "b5"), none_made), Err(other));
    let with_gradients = ForwardCall { grad: GradMode::On, ..decode(4, "b4") };
    let (made_for, grad) = (GradMode::Off, GradMode::On);
    let other = RunnerError::OtherGradMode { unit, call, runner: RunnerIndex(1), made_for, grad };
    assert_eq!(runners.forward(with_gradients, none_made), Err(other));
}

#[test]
fn several_stages_have_a_runner_for_each_microbatch_in_strict_turn() {
    let mut runners = Plain::new(OWN);
    for pass in 0..3 {
        for microbatch in 0..4 {
            // Ready or not, alike or not: the next in turn.
            let runner = forward(&mut runners, call(0, microbatch, "x"));
            assert_eq!(runner, microbatch as usize, "pass {pass}");
            backward(&mut runners, runner, microbatch);
        }
        if pass < 2 {
            // The end of a pass begins the round again; after creation a full round does so by itself.
            runners.end_pass().unwrap();
        }
        if pass == 1 {
            assert_eq!(create(&mut runners), Creation::Captured(8));
        }
    }
    assert_eq!(forward(&mut runners, call(0, 0, "x")), 0);
    assert_eq!(runners.len(), 4);
}

#[test]
fn a_microbatch_out_of_its_turn_or_with_other_inputs_is_refused() {
    let mut runners = Plain::new(OWN);
    for (microbatch, signature) in [(0, "x"), (1, "y")] {
        let runner = forward(&mut runners, call(0, microbatch, signature));
        backward(&mut runners, runner, microbatch);
    }
    runners.end_pass().unwrap();
    assert_eq!(create(&mut runners), Creation::Captured(4));
    let called = |microbatch| CallName { pass: 1, microbatch: MicrobatchIndex(microbatch) };
    let (unit, turn) = (unit(0), MicrobatchIndex(0));
    let order = RunnerError::OtherOrder { unit, call: called(1), turn, runner: RunnerIndex(0) };
    assert_eq!(runners.forward(call(0, 1, "y"), none_made), Err(order));
    assert_eq!(forward(&mut runners, call(0, 0, "x")), 0, "the refused call took no turn");
    let (made_for, signature) = ("\"y\"".to_owned(), "\"x\"".to_owned());
    let other = RunnerError::OtherSignature { unit, call: called(1), runner: RunnerIndex(1), made_for, signature };
    assert_eq!(runners.forward(call(0, 1, "x"), none_made), Err(other));
    let key = CacheKey(3);
    let across = RunnerError::KeyAcrossStages { unit, call: called(1), key, stages: 3 };
    assert_eq!(runners.forward(keyed(3, call(0, 1, "y")), none_made), Err(across));
    assert_eq!(forward(&mut runners, call(0, 1, "y")), 1);
}

#[test]
fn an_evaluation_between_steps_takes_no_training_turn() {
    let mut runners = Plain::new(OWN);
    let step = |runners: &mut Plain| {
        [0, 1, 2].map(|microbatch| {
            let runner = forward(runners, call(0, microbatch, "x"));
            backward(runners, runner, microbatch);
            runner
        })
    };
    let evaluation = |runners: &mut Plain| [0, 1].map(|mb| forward(runners, without_gradients(call(0, mb, "x"))));
    for pass in 0..2 {
        assert_eq!((step(&mut runners), runners.end_pass()), ([0, 1, 2], Ok(())));
        assert_eq!((evaluation(&mut runners), runners.end_pass()), ([3, 4], Ok(())));
        let _ = create(&mut runners);
        assert_eq!(runners.len(), 5, "pass {pass}");
    }
}

#[test]
fn graphs_are_captured_in_the_order_they_first_ran() {
    let mut runners: Plain = Runners::new(SHARED);
    let handles = Cell::new(100);
    let make = || handles.replace(handles.get() + 1);
    for microbatch in 0..3 {
        for layer in [0, 1] {
            runners.forward(call(layer, microbatch, "x"), make).unwrap();
        }
        backward(&mut runners, 1, microbatch);
        backward(&mut runners, 0, microbatch);
    }
    let recorded = |runner, direction| Recorded {
        runner: RunnerIndex(runner),
        unit: unit(runner as u32),
        microbatch: MicrobatchIndex(0),
        direction,
    };
    let (ahead, back) = (Direction::Forward, Direction::Backward);
    let order = [recorded(0, ahead), recorded(1, ahead), recorded(1, back), recorded(0, back)];
    assert_eq!(runners.recorded(), order);
    let mut captured = Vec::new();
    let created = runners.create(|handle, recorded| {
        captured.push((*handle, *recorded));
        Ok::<(), ()>(())
    });
    assert_eq!(created, Ok(Creation::Captured(4)));
    assert_eq!(captured, [100, 101, 101, 100].into_iter().zip(order).collect::<Vec<_>>());
}

#[test]
fn creating_with_no_record_and_creating_again_do_nothing() {
    let mut runners = Plain::new(OWN);
    let refuse = |_: &mut u32, recorded: &Recorded| -> Result<(), Recorded> { Err(*recorded) };
    assert_eq!(runners.create(refuse), Ok(Creation::NothingRecorded));
    let runner = forward(&mut runners, call(0, 0, "x"));
    backward(&mut runners, runner, 0);
    assert_eq!(create(&mut runners), Creation::Captured(2));
    assert_eq!(runners.create(refuse), Ok(Creation::AlreadyCreated));
}

#[test]
fn a_record_request_after_creation_is_an_error() {
    let mut runners = Plain::new(SHARED);
    let runner = forward(&mut runners, call(0, 0, "x"));
    let _ = runners.end_pass().unwrap_err(); // its backward never ran
    assert_eq!(create(&mut runners), Creation::Captured(1));
    assert_eq!(forward(&mut runners, call(0, 4, "x")), runner);
    let error = runners.backward(RunnerIndex(runner), MicrobatchIndex(4)).unwrap_err();
    let call_name = CallName { pass: 1, microbatch: MicrobatchIndex(4) };
    let wanted = RunnerError::NotRecorded { unit: unit(0), runner: RunnerIndex(0), call: call_name };
    assert_eq!(error, wanted);
    assert_eq!(runners.recorded().len(), 1);
    for sharing in [SHARED, OWN] {
        let mut runners = Plain::new(sharing);
        forward(&mut runners, without_gradients(call(0, 0, "x")));
        let _ = create(&mut runners);
        let error = runners.forward(call(0, 1, "x"), none_made).unwrap_err();
        assert!(matches!(error, RunnerError::NoneLeft { .. }), "{sharing:?}: {error}");
    }
}

#[test]
fn a_failed_capture_keeps_the_record_and_a_later_one_captures_all() {
    let mut runners = Plain::new(OWN);
    for microbatch in 0..2 {
        let runner = forward(&mut runners, call(0, microbatch, "x"));
        backward(&mut runners, runner, microbatch);
    }
    runners.end_pass().unwrap();
    let mut left = 3;
    let third_fails = runners.create(|_, recorded| {
        left -= 1;
        if left == 0 { Err(recorded.runner) } else { Ok(()) }
    });
    assert_eq!(third_fails, Err(RunnerIndex(1)));
    // Eager work goes on, also with a microbatch that was never there.
    for microbatch in 0..3 {
        let runner = forward(&mut runners, call(0, microbatch, "x"));
        backward(&mut runners, runner, microbatch);
    }
    assert_eq!(create(&mut runners), Creation::Captured(6));
}

#[test]
fn clearing_gives_back_every_runner_also_captured_ones() {
    let mut runners: Plain = Runners::new(OWN);
    for microbatch in 0..3 {
        runners.forward(call(0, microbatch, "x"), || 10 + microbatch).unwrap();
    }
    let _ = runners.end_pass();
    assert_eq!(create(&mut runners), Creation::Captured(3));
    assert_eq!(runners.clear(), [10, 11, 12]);
    assert!(runners.is_empty() && runners.recorded().is_empty());
    assert_eq!(create(&mut runners), Creation::NothingRecorded, "recording has begun again");
    assert_eq!(runners.forward(call(0, 0, "y"), || 20), Ok(RunnerIndex(3)));
    assert_eq!(runners.clear(), [20]);
}

/// Two eager steps, a creation, two replayed steps, on every stage of hundreds of pipelines.
#[test]
fn pipelines_record_their_schedule_and_replay_it_with_the_same_runners() {
    for base in settings() {
        let schedule = plan(base).schedule();
        let layers: Vec<u32> = (0..base.chunks()).map(|chunk| chunk % 2 + 1).collect();
        let order = LayerOrder::new(&schedule, &layers, Pairing::Apart, WeightGrads::Joined).unwrap();
        let mut runners: Plain = Runners::new(Sharing::at(base.place));
        let mut took = Vec::new();
        for pass in 0..4 {
            let runner_of = run(&mut runners, &order);
            runners.end_pass().unwrap();
            took.push(runner_of);
            if pass == 1 {
                let of_a_step = |recorded: &Recorded| (recorded.unit, recorded.microbatch, recorded.direction);
                let of_a_layer = |step: &LayerStep| (unit_of(step), step.microbatch, step.direction);
                let all_run_alike = base.place.size() == 1;
                let first = |step: &&LayerStep| !all_run_alike || step.microbatch.0 == 0;
                let recorded = runners.recorded().iter().map(of_a_step);
                assert!(recorded.eq(order.steps().iter().filter(first).map(of_a_layer)), "{base:?}");
                let _ = create(&mut runners);
            }
        }
        assert!(took.iter().all(|pass| *pass == took[0]), "{base:?}");
    }
}

fn unit_of(step: &LayerStep) -> GraphUnit {
    GraphUnit::Layer { chunk: step.chunk, layer: step.layer }
}

/// Runs a step, and says which runner each of its steps had.
fn run(runners: &mut Plain, order: &LayerOrder) -> Vec<RunnerIndex> {
    let mut open = std::collections::HashMap::new();
    let mut took = Vec::new();
    for step in order.steps() {
        let (unit, microbatch) = (unit_of(step), step.microbatch);
        let runner = if step.direction == Direction::Forward {
            let call = ForwardCall { unit, microbatch, signature: "x", grad: GradMode::On, key: None };
            let runner = runners.forward(call, || 0).unwrap();
            assert_eq!(open.insert((unit, microbatch), runner), None);
            runner
        } else {
            let runner = open.remove(&(unit, microbatch)).unwrap();
            runners.backward(runner, microbatch).unwrap();
            runner
        };
        took.push(runner);
    }
    took
}

#[test]
fn two_microbatches_in_flight_on_one_stage_have_two_runners() {
    // As under expert overlap, where the next forward runs beside a backward.
    let schedule = plan(setup(5, 1, 0, None, None)).schedule();
    let order = LayerOrder::new(&schedule, &[2], Pairing::Together, WeightGrads::Joined).unwrap();
    let mut runners = Plain::new(SHARED);
    let first = run(&mut runners, &order);
    runners.end_pass().unwrap();
    // Layer 0 goes forward before its last backward has run, layer 1 does so too.
    assert_eq!(runners.len(), 3, "{first:?}");
    let _ = create(&mut runners);
    assert_eq!(run(&mut runners, &order), first);
}
