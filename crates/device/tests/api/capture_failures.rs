//! Failures, races and drops in launches: told with the node, and nobody hangs.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use device::*;

use super::{
    capture_graphs::{captured, executable, order},
    drivers::{Driver, LIMIT, SHORT, sim},
    work::{Counter, Gate, copy, failing, floats, held, op_of, open, set, step},
};

conformance! {
    every_on_hosts:
        a_dropped_stream_tells_what_of_its_launch_it_threw_away,
        a_queued_launch_is_thrown_away_with_its_stream,
        a_launch_that_waits_for_ever_is_a_deadlock_or_a_time_out;
    computing:
        a_failure_names_its_node_and_skips_what_is_behind_it,
        gates_open_and_streams_go_on_behind_a_failure,
        a_panic_in_a_launch_is_told_like_one_in_a_stream,
        an_executable_is_whole_after_it_ran_behind_a_failure;
    blocking:
        memory_that_was_ordered_by_gates_is_no_race,
        dropping_waits_for_the_node_that_runs;
    blocking_on_hosts:
        a_race_between_two_branches_is_refused,
        a_race_with_a_node_that_is_still_to_come_in_the_same_chain_is_refused
}

fn a_failure_names_its_node_and_skips_what_is_behind_it(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 4, "one");
    let (before, behind) = (Counter::default(), Counter::default());
    let exec = executable(&one, || {
        one.launch(before.op(Vec::new())).unwrap();
        one.launch(failing("h3.mlp", "out of luck")).unwrap();
        one.launch(behind.op(Vec::new())).unwrap();
    });
    one.launch(before.op(Vec::new())).unwrap();
    one.launch_graph(&exec).unwrap();
    one.launch(behind.op(Vec::new())).unwrap();
    let error = one.synchronize().unwrap_err();
    let want = OpRef { name: "fail", site: "h3.mlp".into(), rank: 4, stream: "one".into(), seq: 1, node: Some(1) };
    assert_eq!(op_of(&error), &want);
    assert_eq!((before.get(), behind.get()), (2, 0));
    assert!(matches!(one.launch_graph(&exec), Err(Error::Failed { .. })));
    assert!(matches!(one.begin_capture("g"), Err(Error::Failed { .. })));
    assert!(device.error().is_some());
}

fn gates_open_and_streams_go_on_behind_a_failure(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, three) = (device.stream("two").unwrap(), device.stream("three").unwrap());
    let (input, output, end) = (device.event("input"), device.event("output"), device.event("end"));
    let exec = executable(&one, || {
        one.wait_external(&input, Why("test.input")).unwrap();
        order(&one, &two, "fork");
        one.launch(failing("here", "no luck")).unwrap();
        one.record_external(&output).unwrap();
        two.launch(Counter::default().op(Vec::new())).unwrap();
        order(&two, &one, "join");
        one.launch(Counter::default().op(Vec::new())).unwrap();
    });
    three.record(&input).unwrap();
    let gate = Gate::before(&one);
    one.launch_graph(&exec).unwrap();
    one.record(&end).unwrap();
    three.wait(&output, Why("test.output")).unwrap();
    gate.open();
    assert!(matches!(three.synchronize(), Err(Error::Failed { .. })));
    assert!(one.synchronize().is_err());
    // Nothing asks for them any more, but they come; the simulator only runs what somebody waits for.
    let begin = Instant::now();
    while machine.driver() == "cpu" && !(output.is_done() && end.is_done()) {
        assert!(begin.elapsed() < LIMIT);
        std::thread::yield_now();
    }
}

fn a_panic_in_a_launch_is_told_like_one_in_a_stream(driver: &Driver) {
    let (_device, one) = open(&driver.machine(), 0, "one");
    let exec = captured(&one, || {
        let panics = Op::host("panic", "h0", Vec::new(), |_| panic!("lost my head"));
        one.launch(panics).unwrap();
    });
    one.launch_graph(&exec.instantiate().unwrap()).unwrap();
    let error = one.synchronize().unwrap_err();
    assert_eq!(error.to_string(), "panic@h0 (rank 0, stream 'one', #0 node 0) panicked: lost my head");
}

/// Counters of a launch that was skipped are as good as those of one that ran.
fn an_executable_is_whole_after_it_ran_behind_a_failure(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let two = device.stream("two").unwrap();
    let exec = executable(&one, || {
        order(&one, &two, "fork");
        one.launch(Counter::default().op(Vec::new())).unwrap();
        two.launch(Counter::default().op(Vec::new())).unwrap();
        order(&two, &one, "join");
        one.launch(Counter::default().op(Vec::new())).unwrap();
    });
    let gate = Gate::before(&one);
    one.launch(failing("before", "no luck")).unwrap();
    (0..5).for_each(|_| one.launch_graph(&exec).unwrap());
    gate.open();
    assert!(one.synchronize().is_err());
    drop((exec, one, two));
    let begin = Instant::now();
    while device.graphs() != GraphUse::default() {
        assert!(begin.elapsed() < LIMIT, "{:?} is left", device.graphs());
        std::thread::yield_now();
    }
}

/// Rank 77 never comes.
fn stuck(stream: &Stream) {
    let meeting = stream.device().machine().meeting("stuck", &[stream.rank(), 77], stream.rank()).unwrap();
    stream.joint(&meeting, Exchange::Barrier, "test", Vec::new()).unwrap();
}

fn a_dropped_stream_tells_what_of_its_launch_it_threw_away(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, v) = (device.stream("two").unwrap(), floats(&device, "v", 1));
    let (begun, out, end) = (device.event("begun"), device.event("out"), device.event("end"));
    let exec = executable(&one, || {
        one.launch(set(&v, 1.0)).unwrap();
        one.record_external(&begun).unwrap();
        stuck(&one);
        one.launch(set(&v, 2.0)).unwrap();
        one.record_external(&out).unwrap();
    });
    one.launch_graph(&exec).unwrap();
    one.launch(set(&v, 3.0)).unwrap();
    one.record(&end).unwrap();
    begun.synchronize().unwrap();
    let begin = Instant::now();
    drop(one);
    assert!(begin.elapsed() < LIMIT, "waited for what never comes");
    // The meeting, the operation and the record behind it, and the operation behind the launch.
    let error = device.error().unwrap();
    assert!(matches!(error, Error::Cancelled { queued: 4, .. }), "{error}");
    assert!(out.is_done() && end.is_done(), "events complete behind what was thrown away");
    assert!(two.synchronize().is_err());
    drop(exec);
    assert_eq!(device.graphs(), GraphUse::default());
}

fn a_queued_launch_is_thrown_away_with_its_stream(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, out) = (device.stream("two").unwrap(), device.event("out"));
    let exec = executable(&two, || two.record_external(&out).unwrap());
    stuck(&one);
    one.launch_graph(&exec).unwrap();
    // It begins behind the end of the launch before, also when that never begins.
    two.launch_graph(&exec).unwrap();
    let end = device.event("end");
    two.record(&end).unwrap();
    drop(one);
    let error = device.error().unwrap();
    assert!(matches!(error, Error::Cancelled { queued: 2, .. }), "{error}");
    let begin = Instant::now();
    // The simulator only runs what somebody waits for.
    while machine.driver() == "cpu" && !end.is_done() {
        assert!(begin.elapsed() < LIMIT, "a launch waits for one that was thrown away");
        std::thread::yield_now();
    }
    drop((two, exec));
    let begin = Instant::now();
    while device.graphs() != GraphUse::default() {
        assert!(begin.elapsed() < LIMIT, "{:?} is left", device.graphs());
        std::thread::yield_now();
    }
    assert!(out.is_done());
}

fn a_launch_that_waits_for_ever_is_a_deadlock_or_a_time_out(driver: &Driver) {
    let machine = driver.limited(SHORT);
    let (device, one) = open(&machine, 0, "one");
    let (blocker, e) = (device.stream("blocker").unwrap(), device.event("gate"));
    let exec = executable(&one, || one.wait_external(&e, Why("test.gate")).unwrap());
    stuck(&blocker);
    blocker.record(&e).unwrap();
    one.launch_graph(&exec).unwrap();
    let error = one.synchronize().unwrap_err();
    let (Error::Timeout { pending, .. } | Error::Deadlock { pending, .. }) = &error else { panic!("{error}") };
    assert_eq!(pending.0[0].missing, [77]);
}

fn a_race_between_two_branches_is_refused(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let two = device.stream("racing").unwrap();
    let (v, w) = (floats(&device, "act", 8), floats(&device, "other", 8));
    let ran = Counter::default();
    let (op, begun, go) = held(vec![Access::write(&v.flat(0..5).unwrap())]);
    let exec = captured(&one, || {
        order(&one, &two, "fork");
        one.launch(op).unwrap();
        two.launch(ran.op(vec![Access::write(&w)])).unwrap();
        two.launch(ran.op(vec![Access::read(&v.flat(4..8).unwrap())])).unwrap();
        order(&two, &one, "join");
    });
    one.launch_graph(&exec.instantiate().unwrap()).unwrap();
    begun.recv_timeout(LIMIT).unwrap();
    let error = wait_for_error(&device);
    go.send(()).unwrap();
    let Error::Race { label, first, second } = &error else { panic!("{error}") };
    assert_eq!((&label[..], first.name, second.name), ("act", "held", "count"));
    assert_eq!((first.node, second.node), (Some(0), Some(2)));
    assert!(one.synchronize().is_err());
    assert_eq!(ran.get(), 0, "nothing of the refused chain runs");
}

fn wait_for_error(device: &Device) -> Error {
    let begin = Instant::now();
    loop {
        if let Some(error) = device.error() {
            return error;
        }
        assert!(begin.elapsed() < LIMIT, "no error came");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Nothing from outside can be ordered between two operations of a chain, so the whole chain's memory is taken.
fn a_race_with_a_node_that_is_still_to_come_in_the_same_chain_is_refused(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (two, v) = (device.stream("two").unwrap(), floats(&device, "late", 2));
    let (op, begun, go) = held(Vec::new());
    let exec = captured(&one, || {
        one.launch(op).unwrap();
        one.launch(Counter::default().op(Vec::new())).unwrap();
        one.launch(set(&v, 1.0)).unwrap();
    });
    one.launch_graph(&exec.instantiate().unwrap()).unwrap();
    begun.recv_timeout(LIMIT).unwrap();
    two.launch(set(&v, 2.0)).unwrap();
    let error = two.synchronize().unwrap_err();
    go.send(()).unwrap();
    let Error::Race { first, second, .. } = &error else { panic!("{error}") };
    assert_eq!((first.node, second.node, first.name), (Some(2), None, "set"));
    assert!(one.synchronize().is_err());
}

fn memory_that_was_ordered_by_gates_is_no_race(driver: &Driver) {
    for _ in 0..20 {
        let (device, one) = open(&driver.machine(), 0, "one");
        let (two, v, w) = (device.stream("two").unwrap(), floats(&device, "v", 64), floats(&device, "w", 64));
        let (filled, taken) = (device.event("filled"), device.event("taken"));
        let exec = executable(&one, || {
            one.launch(step(&v, 2.0, 1.0)).unwrap();
            one.record_external(&filled).unwrap();
            one.launch(Counter::default().op(vec![Access::read(&v)])).unwrap();
            one.wait_external(&taken, Why("test.taken")).unwrap();
            one.launch(step(&v, 3.0, 1.0)).unwrap();
        });
        one.launch(set(&v, 1.0)).unwrap();
        two.record(&taken).unwrap();
        for _ in 0..10 {
            one.launch_graph(&exec).unwrap();
            // Reads while the graph is under way; its last operation of the next launch waits for that, and the first
            // is ordered by an event.
            two.wait(&filled, Why("test.filled")).unwrap();
            let end = device.event("end");
            one.record(&end).unwrap();
            two.wait(&end, Why("test.end")).unwrap();
            two.launch(copy(&v, &w)).unwrap();
            two.record(&taken).unwrap();
            one.wait(&taken, Why("test.first")).unwrap();
        }
        device.synchronize().unwrap();
    }
}

fn dropping_waits_for_the_node_that_runs(driver: &Driver) {
    for _ in 0..20 {
        let (device, one) = open(&driver.machine(), 0, "one");
        let (op, begun, go) = held(Vec::new());
        let (ran, out) = (Counter::default(), device.event("out"));
        let exec = executable(&one, || {
            one.launch(op).unwrap();
            one.record_external(&out).unwrap();
            one.launch(ran.op(Vec::new())).unwrap();
        });
        one.launch_graph(&exec).unwrap();
        begun.recv_timeout(LIMIT).unwrap();
        let dropper = std::thread::spawn(move || {
            drop(one);
            Instant::now()
        });
        std::thread::sleep(Duration::from_millis(2));
        let let_go = Instant::now();
        go.send(()).unwrap();
        assert!(dropper.join().unwrap() >= let_go, "dropped while a node was running");
        drop(exec);
        assert!(out.is_done());
        match device.error() {
            None => assert_eq!(ran.get(), 1),
            Some(error) => assert!(matches!(error, Error::Cancelled { .. }), "{error}"),
        }
        assert_eq!(device.graphs(), GraphUse::default());
    }
}

/// The fork is taken away: under some seed the reader in the branch comes before the writer.
#[test]
fn a_dropped_wait_inside_a_graph_shows_under_some_seed() {
    let run = |seed: u64, dropped: bool| {
        let machine = sim(seed).machine();
        if dropped {
            machine.drop_waits(Why("fork"));
        }
        let (device, one) = open(&machine, 0, "one");
        let (two, v, seen) = (device.stream("two").unwrap(), floats(&device, "v", 1), floats(&device, "seen", 1));
        one.launch(set(&v, 1.0)).unwrap();
        let graph = captured(&one, || {
            one.launch(set(&v, 2.0)).unwrap();
            order(&one, &two, "fork");
            two.launch(copy(&v, &seen)).unwrap();
            order(&two, &one, "join");
        });
        one.launch_graph(&graph.instantiate().unwrap()).unwrap();
        one.download::<f32>(&seen).unwrap().wait().unwrap()[0] as i32
    };
    let results = |dropped| (0..30).map(|seed| run(seed, dropped)).collect::<BTreeSet<i32>>();
    assert_eq!(results(false), BTreeSet::from([2]));
    assert_eq!(results(true), BTreeSet::from([1, 2]));
}

/// The same for a wait that crosses the border.
#[test]
fn a_dropped_external_wait_shows_under_some_seed() {
    let run = |seed: u64, dropped: bool| {
        let machine = sim(seed).machine();
        let (device, one) = open(&machine, 0, "one");
        let (two, v, seen) = (device.stream("two").unwrap(), floats(&device, "v", 1), floats(&device, "seen", 1));
        let (e, start) = (device.event("published"), device.event("start"));
        one.launch(set(&v, 1.0)).unwrap();
        one.record(&start).unwrap();
        let exec = executable(&one, || {
            one.wait_external(&e, Why("test.published")).unwrap();
            one.launch(copy(&v, &seen)).unwrap();
        });
        if dropped {
            machine.drop_waits(Why("test.published"));
        }
        two.wait(&start, Why("test.start")).unwrap();
        two.launch(set(&v, 2.0)).unwrap();
        two.record(&e).unwrap();
        one.launch_graph(&exec).unwrap();
        one.download::<f32>(&seen).unwrap().wait().unwrap()[0] as i32
    };
    let results = |dropped| (0..30).map(|seed| run(seed, dropped)).collect::<BTreeSet<i32>>();
    assert_eq!(results(false), BTreeSet::from([2]));
    assert_eq!(results(true), BTreeSet::from([1, 2]));
}

/// Every order of a small graph: two branches of two operations each, and a join.
#[test]
fn a_search_runs_a_graph_in_every_order_of_its_nodes() {
    // The notes commute, as far as their accesses say.
    let explored = explore_every_order(1000, &Options::default(), |machine| {
        let (device, one) = open(machine, 0, "one");
        let two = device.stream("two")?;
        let log = Arc::new(Mutex::new(String::new()));
        let note = |letter: char| {
            let log = log.clone();
            Op::host("note", "test", Vec::new(), move |_| {
                log.lock().unwrap().push(letter);
                Ok(())
            })
        };
        let exec = captured(&one, || {
            order(&one, &two, "fork");
            "ab".chars().for_each(|c| one.launch(note(c)).unwrap());
            "xy".chars().for_each(|c| two.launch(note(c)).unwrap());
            order(&two, &one, "join");
            one.launch(note('z')).unwrap();
        });
        one.launch_graph(&exec.instantiate()?)?;
        one.synchronize()?;
        let log = log.lock().unwrap().clone();
        Ok(log)
    });
    let explored = explored.unwrap();
    assert!(explored.complete);
    let orders: Vec<&str> = explored.results.keys().map(|s| &s[..]).collect();
    assert_eq!(orders, ["abxyz", "axbyz", "axybz", "xabyz", "xaybz", "xyabz"]);
}
