//! Events that cross the border of a graph: waits bind when the launch is issued, records release before its end.

use device::*;

use super::{
    capture_graphs::{captured, executable, order},
    drivers::Driver,
    work::{Counter, Gate, Never, copy, expect_values, floats, open, set, step},
};

conformance! {
    every:
        an_external_wait_binds_to_the_last_record_before_the_launch,
        a_later_launch_binds_to_the_later_record,
        an_external_wait_for_an_event_never_recorded_is_refused_at_the_launch,
        an_external_wait_for_an_event_of_a_capture_is_refused_at_the_launch,
        an_external_record_releases_before_the_graph_ends,
        only_what_is_behind_an_external_wait_waits,
        branches_behind_one_external_wait_need_no_other,
        an_external_record_counts_as_issued_at_every_launch,
        a_record_keeps_its_place_when_the_next_launch_records_again,
        a_wait_that_is_held_back_keeps_its_record,
        a_wait_of_a_launch_binds_before_its_own_records,
        a_wait_for_a_node_leaves_waits_for_other_nodes_their_work,
        a_dropped_external_wait_is_told_at_the_launch,
        events_of_gates_can_be_exchanged,
        exchanging_an_event_that_no_gate_has_is_refused
}

fn an_external_wait_binds_to_the_last_record_before_the_launch(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (other, late) = (device.stream("other").unwrap(), device.stream("late").unwrap());
    let (v, seen, e) = (floats(&device, "v", 1), floats(&device, "seen", 1), device.event("published"));
    let exec = executable(&one, || {
        one.wait_external(&e, Why("test.published")).unwrap();
        one.launch(copy(&v, &seen)).unwrap();
    });
    other.launch(set(&v, 1.0)).unwrap();
    other.record(&e).unwrap();
    // The launch is issued and cannot start; the event is recorded again, where nobody ever gets to.
    let before = Gate::before(&one);
    one.launch_graph(&exec).unwrap();
    let _never = Never::before(&late);
    late.record(&e).unwrap();
    assert!(!e.is_done());
    before.open();
    expect_values(&one, &seen, &[1.0]);
    assert!(!e.is_done(), "waited for a record that was issued later");
}

fn a_later_launch_binds_to_the_later_record(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (other, v, seen) = (device.stream("other").unwrap(), floats(&device, "v", 1), floats(&device, "seen", 1));
    let (e, read) = (device.event("published"), device.event("read"));
    let exec = executable(&one, || {
        one.wait_external(&e, Why("test.published")).unwrap();
        one.launch(copy(&v, &seen)).unwrap();
    });
    for i in 0..30 {
        other.launch(set(&v, i as f32)).unwrap();
        other.record(&e).unwrap();
        one.launch_graph(&exec).unwrap();
        expect_values(&one, &seen, &[i as f32]);
        one.record(&read).unwrap();
        other.wait(&read, Why("test.read")).unwrap();
    }
}

fn an_external_wait_for_an_event_never_recorded_is_refused_at_the_launch(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 2, "one");
    let (e, done, count) = (device.event("gate"), device.event("done"), Counter::default());
    let exec = executable(&one, || {
        one.launch(count.op(Vec::new())).unwrap();
        one.record_external(&done).unwrap();
        one.wait_external(&e, Why("test")).unwrap();
    });
    let error = one.launch_graph(&exec).unwrap_err();
    let text = "stream 'one' of rank 2 waits for event 'gate', which was never recorded";
    assert_eq!(error.to_string(), text);
    // Nothing was queued, recorded or counted.
    one.synchronize().unwrap();
    assert_eq!((count.get(), done.generation(), exec.launches()), (0, 0, 0));
    one.record(&e).unwrap();
    one.launch_graph(&exec).unwrap();
    one.synchronize().unwrap();
    assert_eq!((done.generation(), exec.launches()), (1, 1));
}

fn an_external_wait_for_an_event_of_a_capture_is_refused_at_the_launch(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let e = device.event("inner");
    let exec = executable(&one, || one.wait_external(&e, Why("test")).unwrap());
    captured(&one, || one.record(&e).unwrap());
    assert!(matches!(one.launch_graph(&exec), Err(Error::CapturedEvent { .. })));
    one.synchronize().unwrap();
}

fn an_external_record_releases_before_the_graph_ends(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (two, blocker) = (device.stream("two").unwrap(), device.stream("blocker").unwrap());
    let (v, seen) = (floats(&device, "v", 1), floats(&device, "seen", 1));
    let (landed, held) = (device.event("landed"), device.event("held"));
    let exec = executable(&one, || {
        one.launch(set(&v, 5.0)).unwrap();
        one.record_external(&landed).unwrap();
        one.wait_external(&held, Why("test.held")).unwrap();
        one.launch(Counter::default().op(Vec::new())).unwrap();
    });
    let gate = Gate::before(&blocker);
    blocker.record(&held).unwrap();
    one.launch_graph(&exec).unwrap();
    let end = device.event("end");
    one.record(&end).unwrap();
    two.wait(&landed, Why("test.landed")).unwrap();
    two.launch(copy(&v, &seen)).unwrap();
    landed.synchronize().unwrap();
    expect_values(&two, &seen, &[5.0]);
    assert!(landed.is_done() && !end.is_done(), "the graph still waits");
    gate.open();
    end.synchronize().unwrap();
}

fn only_what_is_behind_an_external_wait_waits(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (two, blocker) = (device.stream("two").unwrap(), device.stream("blocker").unwrap());
    let (early, late) = (device.event("early"), device.event("late"));
    let (bucket, v) = (device.event("bucket"), floats(&device, "v", 2));
    let exec = executable(&one, || {
        order(&one, &two, "fork");
        two.wait_external(&bucket, Why("test.bucket")).unwrap();
        two.launch(set(&v.flat(1..2).unwrap(), 2.0)).unwrap();
        two.record_external(&late).unwrap();
        one.launch(set(&v.flat(0..1).unwrap(), 1.0)).unwrap();
        one.record_external(&early).unwrap();
        order(&two, &one, "join");
    });
    let gate = Gate::before(&blocker);
    blocker.record(&bucket).unwrap();
    one.launch_graph(&exec).unwrap();
    early.synchronize().unwrap();
    assert!(!late.is_done());
    gate.open();
    expect_values(&one, &v, &[1.0, 2.0]);
    assert!(late.is_done());
}

fn branches_behind_one_external_wait_need_no_other(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let [two, three] = ["two", "three"].map(|name| device.stream(name).unwrap());
    let [a, b] = ["a", "b"].map(|name| device.event(name));
    let wait = |stream: &Stream, event: &Event| stream.wait_external(event, Why("test.gate")).unwrap();
    let graph = captured(&one, || {
        // A branch that leaves before the wait needs its own, one that leaves after it does not.
        order(&one, &two, "early fork");
        wait(&one, &a);
        wait(&one, &a);
        order(&one, &three, "late fork");
        wait(&three, &a);
        wait(&two, &a);
        wait(&two, &b);
        order(&two, &one, "join");
        wait(&one, &b);
        order(&three, &one, "join");
        wait(&one, &a);
    });
    let waits: Vec<(u32, &str)> = graph
        .trace()
        .nodes
        .iter()
        .map(|node| match &node.what {
            TraceNodeKind::Wait { event, .. } => (node.lane, event.as_str()),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(waits, [(one.index(), "a"), (two.index(), "a"), (two.index(), "b")]);
}

fn an_external_record_counts_as_issued_at_every_launch(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let e = device.event("out");
    let graph = captured(&one, || one.record_external(&e).unwrap());
    assert_eq!(e.generation(), 0, "captured, not issued");
    let exec = graph.instantiate().unwrap();
    let gate = Gate::before(&one);
    for generation in 1..4 {
        one.launch_graph(&exec).unwrap();
        assert_eq!((e.generation(), e.is_done()), (generation, false));
    }
    gate.open();
    e.synchronize().unwrap();
    assert!(e.is_done());
}

fn a_record_keeps_its_place_when_the_next_launch_records_again(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let [two, three] = ["two", "three"].map(|name| device.stream(name).unwrap());
    let e = device.event("out");
    let records = executable(&one, || one.record_external(&e).unwrap());
    let waits = executable(&three, || three.wait_external(&e, Why("test.out")).unwrap());
    for _ in 0..2 {
        one.launch_graph(&records).unwrap();
    }
    // A stream and a launch wait for a record that is not reached.
    let gate = Gate::before(&one);
    one.launch_graph(&records).unwrap();
    two.wait(&e, Why("test.out")).unwrap();
    three.launch_graph(&waits).unwrap();
    // Nothing gets to the next one.
    let _never = Never::before(&one);
    one.launch_graph(&records).unwrap();
    gate.open();
    two.synchronize().unwrap();
    three.synchronize().unwrap();
    assert!(!e.is_done(), "waited for a record that was issued later");
}

fn a_wait_that_is_held_back_keeps_its_record(driver: &Driver) {
    let machine = driver.machine();
    let ((device, one), (_peer, other)) = (open(&machine, 0, "one"), open(&machine, 1, "other"));
    let (two, e) = (device.stream("two").unwrap(), device.event("out"));
    let meetings = [0, 1].map(|rank| machine.meeting("dp", &[0, 1], rank).unwrap());
    let exec = executable(&one, || one.record_external(&e).unwrap());
    one.launch_graph(&exec).unwrap();
    // Once before anything stands still: the first call of a group makes communicators, for which a card's streams must move.
    two.joint(&meetings[0], Exchange::Barrier, "test", Vec::new()).unwrap();
    other.joint(&meetings[1], Exchange::Barrier, "test", Vec::new()).unwrap();
    two.synchronize().unwrap();
    // The stream comes to its wait when the other rank has come.
    two.joint(&meetings[0], Exchange::Barrier, "test", Vec::new()).unwrap();
    two.wait(&e, Why("test.out")).unwrap();
    // Nothing gets to the next record.
    let _never = Never::before(&one);
    one.launch_graph(&exec).unwrap();
    other.joint(&meetings[1], Exchange::Barrier, "test", Vec::new()).unwrap();
    two.synchronize().unwrap();
    assert!(!e.is_done(), "waited for a record that was issued later");
}

/// A graph may wait for what its own launch before has recorded.
fn a_wait_of_a_launch_binds_before_its_own_records(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let e = device.event("slot");
    let exec = executable(&one, || {
        one.record_external(&e).unwrap();
        one.wait_external(&e, Why("test.slot")).unwrap();
    });
    one.record(&e).unwrap();
    machine.trace_start();
    (0..3).for_each(|_| one.launch_graph(&exec).unwrap());
    one.synchronize().unwrap();
    let bound = machine.trace_stop().events.into_iter().filter_map(|event| match event {
        TraceEvent::Launch { bound, .. } => Some([bound[0].generation, bound[1].generation]),
        _ => None,
    });
    assert_eq!(bound.collect::<Vec<_>>(), [[2, 1], [3, 2], [4, 3]]);
}

fn a_wait_for_a_node_leaves_waits_for_other_nodes_their_work(driver: &Driver) {
    use WaitOutcome::{Elided, Enforced};
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, before) = (device.stream("two").unwrap(), device.event("before"));
    let (node, late, after) = (device.event("node"), device.event("late"), device.event("after"));
    let exec = executable(&one, || [&node, &late].into_iter().for_each(|e| one.record_external(e).unwrap()));
    one.record(&before).unwrap();
    one.launch_graph(&exec).unwrap();
    one.record(&after).unwrap();
    machine.trace_start();
    for event in [&node, &before, &late, &after, &node] {
        two.wait(event, Why("test")).unwrap();
    }
    one.wait(&node, Why("test.own")).unwrap();
    let outcomes = machine.trace_stop().events.into_iter().filter_map(|event| match event {
        TraceEvent::Wait { outcome, on, .. } => Some((outcome, on.seq, on.node)),
        _ => None,
    });
    let want = [
        (Enforced, 1, Some(0)),
        // What precedes the launch precedes the node.
        (Elided, 0, None),
        (Enforced, 1, Some(1)),
        (Enforced, 2, None),
        (Elided, 1, Some(0)),
        (Elided, 1, Some(0)),
    ];
    assert_eq!(outcomes.collect::<Vec<_>>(), want);
    device.synchronize().unwrap();
}

fn a_dropped_external_wait_is_told_at_the_launch(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (blocker, e) = (device.stream("blocker").unwrap(), device.event("gate"));
    let exec = executable(&one, || one.wait_external(&e, Why("test.gate")).unwrap());
    let gate = Gate::before(&blocker);
    blocker.record(&e).unwrap();
    machine.drop_waits(Why("test.gate"));
    machine.trace_start();
    one.launch_graph(&exec).unwrap();
    one.synchronize().unwrap();
    let bound = machine.trace_stop().events.into_iter().find_map(|event| match event {
        TraceEvent::Launch { bound, .. } => Some(bound),
        _ => None,
    });
    // Where the record is that it would have waited for is told, too: findings name what was taken away.
    let on = Some(Position { stream: blocker.index(), seq: 1, node: None });
    assert_eq!(bound.unwrap(), [BoundGate { node: 0, generation: 1, on, outcome: WaitOutcome::Dropped }]);
    gate.open();
    blocker.synchronize().unwrap();
}

fn events_of_gates_can_be_exchanged(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let blocker = device.stream("blocker").unwrap();
    let (a, b, out) = (device.event("a"), device.event("b"), device.event("out"));
    let v = floats(&device, "v", 1);
    let graph = captured(&one, || {
        one.wait_external(&a, Why("test.in")).unwrap();
        one.launch(step(&v, 1.0, 1.0)).unwrap();
        one.record_external(&out).unwrap();
        one.record_external(&b).unwrap();
    });
    let (exec, untouched) = (graph.instantiate().unwrap(), graph.instantiate().unwrap());
    one.launch(set(&v, 0.0)).unwrap();
    one.record(&a).unwrap();
    // Both at once: one after the other would make them one event.
    exec.set_events(&[(a.clone(), b.clone()), (b.clone(), a.clone())]).unwrap();
    let names = |exec: &Executable| exec.gate_events().iter().map(|e| e.name().to_owned()).collect::<Vec<_>>();
    assert_eq!(names(&exec), ["b", "out", "a"]);
    assert_eq!(names(&untouched), ["a", "out", "b"]);
    assert_ne!(exec.trace().id, untouched.trace().id);
    assert!(matches!(one.launch_graph(&exec), Err(Error::NeverRecorded { event, .. }) if event == "b"));
    blocker.record(&b).unwrap();
    one.launch_graph(&exec).unwrap();
    assert_eq!((a.generation(), b.generation(), out.generation()), (2, 1, 1));
    one.launch_graph(&untouched).unwrap();
    assert_eq!((a.generation(), b.generation(), out.generation()), (2, 2, 2));
    expect_values(&one, &v, &[2.0]);
}

fn exchanging_an_event_that_no_gate_has_is_refused(driver: &Driver) {
    let machine = driver.machine();
    let ((device, one), (other, _)) = (open(&machine, 0, "one"), open(&machine, 1, "other"));
    let (a, b) = (device.event("a"), device.event("b"));
    let exec = executable(&one, || one.record_external(&a).unwrap());
    let error = exec.set_events(&[(a.clone(), b.clone()), (b.clone(), a.clone())]).unwrap_err();
    assert!(matches!(&error, Error::NoSuchGate { event, graph, .. } if event == "b" && graph == "g"), "{error}");
    let foreign = exec.set_events(&[(a.clone(), other.event("foreign"))]).unwrap_err();
    assert!(matches!(foreign, Error::Foreign { .. }));
    assert!(exec.gate_events()[0].same_as(&a), "nothing is replaced by half");
}
