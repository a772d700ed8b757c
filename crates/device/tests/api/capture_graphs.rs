//! What a launched graph does: what the streams would have done, in an order that its nodes allow.

use std::sync::{Arc, Condvar, Mutex, mpsc};

use device::*;

use super::{
    drivers::{Driver, LIMIT, sim},
    work::{Counter, Gate, copy, expect_values, floats, held, open, set, step, stepped},
};

conformance! {
    every:
        a_launch_has_its_place_in_the_stream,
        an_empty_graph_can_be_launched,
        an_executable_outlives_its_handles_while_it_runs,
        a_graph_keeps_its_memory_alive,
        executables_of_another_device_are_refused,
        nodes_are_behind_exactly_what_the_streams_were_behind,
        a_point_behind_two_branches_is_behind_both,
        a_wait_that_adds_nothing_adds_no_edge,
        a_dropped_wait_inside_a_capture_loses_its_edge_and_is_told,
        a_dropped_join_does_not_leave_the_stream_unjoined,
        a_trace_opens_up_every_launch,
        a_graph_tells_what_it_writes;
    computing:
        a_replay_gives_the_bits_of_its_eager_twin,
        a_captured_upload_writes_the_same_values_at_every_launch,
        a_graph_reads_what_memory_holds_at_its_launch,
        an_executable_never_overlaps_itself_on_two_streams;
    blocking:
        branches_of_a_graph_run_side_by_side,
        executables_of_one_graph_may_overlap,
        an_operation_of_a_graph_may_own_the_last_handle_of_its_stream
}

/// Waits on `to` for what is on `from` now.
pub(super) fn order(from: &Stream, to: &Stream, why: &'static str) {
    let e = from.device().event(why);
    from.record(&e).unwrap();
    to.wait(&e, Why(why)).unwrap();
}

/// The graph of what `body` submits.
pub(super) fn captured(origin: &Stream, body: impl FnOnce()) -> CapturedGraph {
    origin.begin_capture("g").unwrap();
    body();
    origin.end_capture().unwrap()
}

/// The same, ready to run, and the graph gone.
pub(super) fn executable(origin: &Stream, body: impl FnOnce()) -> Executable {
    captured(origin, body).instantiate().unwrap()
}

fn a_launch_has_its_place_in_the_stream(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let v = floats(&device, "v", 3);
    let exec = executable(&stream, || (1..4).for_each(|i| stream.launch(step(&v, 2.0, i as f32)).unwrap()));
    stream.launch(set(&v, 1.0)).unwrap();
    let mut want = 1.0;
    for round in 0..10 {
        stream.launch_graph(&exec).unwrap();
        stream.launch(step(&v, 3.0, round as f32)).unwrap();
        want = stepped((1..4).fold(want, |x, i| stepped(x, 2.0, i as f32)), 3.0, round as f32);
    }
    expect_values(&stream, &v, &[want; 3]);
    assert_eq!(exec.launches(), 10);
}

fn an_empty_graph_can_be_launched(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let exec = executable(&stream, || {});
    let v = floats(&device, "v", 1);
    stream.launch(set(&v, 1.0)).unwrap();
    (0..3).for_each(|_| stream.launch_graph(&exec).unwrap());
    stream.launch(step(&v, 2.0, 0.0)).unwrap();
    expect_values(&stream, &v, &[2.0]);
}

fn an_executable_outlives_its_handles_while_it_runs(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let (v, other) = (floats(&device, "v", 1), device.stream("other").unwrap());
    let exec = executable(&stream, || {
        stream.launch(set(&v, 1.0)).unwrap();
        stream.launch(step(&v, 2.0, 3.0)).unwrap();
    });
    let gate = Gate::before(&stream);
    stream.launch_graph(&exec).unwrap();
    drop(exec);
    assert_eq!((device.graphs().executables, device.graphs().nodes), (1, 2), "it is still to run");
    gate.open();
    expect_values(&stream, &v, &[5.0]);
    other.synchronize().unwrap();
    assert_eq!(device.graphs(), GraphUse::default());
}

fn a_graph_keeps_its_memory_alive(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let (v, out) = (floats(&device, "v", 64), floats(&device, "out", 64));
    let exec = executable(&stream, || {
        stream.launch(set(&v, 2.0)).unwrap();
        stream.launch(copy(&v, &out)).unwrap();
    });
    drop(v);
    assert_eq!(device.memory().len(), 2);
    floats(&device, "newer", 64);
    stream.launch_graph(&exec).unwrap();
    expect_values(&stream, &out, &[2.0; 64]);
    drop(exec);
    stream.synchronize().unwrap();
    assert_eq!(device.memory().iter().map(|m| &m.label[..]).collect::<Vec<_>>(), ["out"]);
}

fn a_graph_tells_what_it_writes(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (v, w, e) = (floats(&device, "v", 4), floats(&device, "w", 4), device.event("e"));
    let alone = machine.meeting("alone", &[0], 0).unwrap();
    let graph = captured(&one, || {
        let part = v.flat(1..3).unwrap();
        one.launch(copy(&w, &v)).unwrap();
        one.launch(step(&part, 2.0, 1.0)).unwrap();
        one.launch(step(&v, 2.0, 1.0)).unwrap();
        one.wait_external(&e, Why("test")).unwrap();
        let sum = vec![Access::update(&w)];
        one.joint(&alone, Exchange::AllReduce(Reduce::Sum), "test", sum).unwrap();
    });
    let written: Vec<(u32, Region)> = graph.writes().iter().map(|v| (v.allocation_id(), v.region())).collect();
    let want = [v.clone(), v.flat(1..3).unwrap(), w.clone()].map(|v| (v.allocation_id(), v.region()));
    assert_eq!(written, want);
}

fn executables_of_another_device_are_refused(driver: &Driver) {
    let machine = driver.machine();
    let ((_first, one), (_second, two)) = (open(&machine, 0, "one"), open(&machine, 1, "two"));
    let exec = executable(&one, || {});
    let error = two.launch_graph(&exec).unwrap_err();
    assert_eq!(
        error.to_string(),
        "executable 'g' belongs to rank 0 and was used by rank 1; a handle belongs to one device"
    );
    two.synchronize().unwrap();
}

/// `behind` and lane of every node.
fn shape(graph: &CapturedGraph) -> Vec<(u32, Vec<u32>)> {
    graph.trace().nodes.iter().map(|node| (node.lane, node.behind.clone())).collect()
}

fn nodes_are_behind_exactly_what_the_streams_were_behind(driver: &Driver) {
    let (device, a) = open(&driver.machine(), 0, "a");
    let (b, c) = (device.stream("b").unwrap(), device.stream("c").unwrap());
    let count = Counter::default();
    let op = |stream: &Stream| stream.launch(count.op(Vec::new())).unwrap();
    let graph = captured(&a, || {
        op(&a); // 0
        order(&a, &b, "fork b");
        op(&b); // 1
        op(&a); // 2
        order(&a, &c, "fork c");
        order(&b, &c, "b to c");
        op(&c); // 3, behind both
        op(&b); // 4
        // The point of c is behind that of a, so a need not name its own last node.
        order(&c, &a, "c to a");
        order(&b, &a, "b to a");
        op(&a); // 5
    });
    let want = [(0, vec![]), (1, vec![0]), (0, vec![0]), (2, vec![2, 1]), (1, vec![1]), (0, vec![3, 4])];
    assert_eq!(shape(&graph), want);
}

/// The point that is waited for has one of the waiter's own nodes among those it is directly behind.
fn a_point_behind_two_branches_is_behind_both(driver: &Driver) {
    let (device, a) = open(&driver.machine(), 0, "a");
    let (b, c, count) = (device.stream("b").unwrap(), device.stream("c").unwrap(), Counter::default());
    let op = |stream: &Stream| stream.launch(count.op(Vec::new())).unwrap();
    let graph = captured(&a, || {
        order(&a, &c, "fork c");
        op(&a); // 0
        op(&c); // 1
        order(&a, &b, "a to b");
        order(&c, &b, "c to b");
        order(&b, &a, "both to a");
        op(&a); // 2
    });
    assert_eq!(shape(&graph), [(0, vec![]), (2, vec![]), (0, vec![0, 1])]);
}

fn a_wait_that_adds_nothing_adds_no_edge(driver: &Driver) {
    use WaitOutcome::{Elided, Enforced};
    let (device, a) = open(&driver.machine(), 0, "a");
    let (b, count) = (device.stream("b").unwrap(), Counter::default());
    let op = |stream: &Stream| stream.launch(count.op(Vec::new())).unwrap();
    let graph = captured(&a, || {
        let (early, late) = (device.event("early"), device.event("late"));
        op(&a);
        a.record(&early).unwrap();
        op(&a);
        a.record(&late).unwrap();
        b.wait(&late, Why("first")).unwrap();
        b.wait(&early, Why("earlier")).unwrap();
        b.wait(&late, Why("again")).unwrap();
        op(&b);
        a.wait(&late, Why("its own")).unwrap();
        order(&b, &a, "join");
        op(&a);
    });
    assert_eq!(shape(&graph), [(0, vec![]), (0, vec![0]), (1, vec![1]), (0, vec![2])]);
    let trace = graph.trace();
    let waits = |node: usize| -> Vec<(&str, u32, WaitOutcome)> {
        trace.nodes[node].waits.iter().map(|wait| (wait.why.as_str(), wait.node, wait.outcome)).collect()
    };
    assert_eq!(waits(2), [("first", 1, Enforced), ("earlier", 0, Elided), ("again", 1, Elided)]);
    assert_eq!(waits(3), [("its own", 1, Elided), ("join", 2, Enforced)]);
}

fn a_dropped_wait_inside_a_capture_loses_its_edge_and_is_told(driver: &Driver) {
    let machine = driver.machine();
    let (device, a) = open(&machine, 0, "a");
    let (b, count) = (device.stream("b").unwrap(), Counter::default());
    let op = |stream: &Stream| stream.launch(count.op(Vec::new())).unwrap();
    machine.drop_waits(Why("fork"));
    let graph = captured(&a, || {
        op(&a);
        order(&a, &b, "fork");
        op(&b);
        op(&b);
        order(&b, &a, "join");
        op(&a);
    });
    assert_eq!(shape(&graph), [(0, vec![]), (1, vec![]), (1, vec![1]), (0, vec![0, 2])]);
    let wait = &graph.trace().nodes[1].waits[0];
    assert_eq!((wait.why.as_str(), wait.node, wait.outcome), ("fork", 0, WaitOutcome::Dropped));
    a.launch_graph(&graph.instantiate().unwrap()).unwrap();
    a.synchronize().unwrap();
    assert_eq!(count.get(), if machine.computes() { 4 } else { 0 });
}

fn a_dropped_join_does_not_leave_the_stream_unjoined(driver: &Driver) {
    let machine = driver.machine();
    let (device, a) = open(&machine, 0, "a");
    let (b, count) = (device.stream("b").unwrap(), Counter::default());
    machine.drop_waits(Why("join"));
    let graph = captured(&a, || {
        order(&a, &b, "fork");
        b.launch(count.op(Vec::new())).unwrap();
        order(&b, &a, "join");
        a.launch(count.op(Vec::new())).unwrap();
    });
    assert_eq!(shape(&graph), [(1, vec![]), (0, vec![])]);
}

fn a_trace_opens_up_every_launch(driver: &Driver) {
    let machine = driver.machine();
    let (device, a) = open(&machine, 0, "a");
    let (b, v) = (device.stream("b").unwrap(), floats(&device, "v", 4));
    let (ready, done) = (device.event("ready"), device.event("done"));
    a.record(&ready).unwrap();
    let graph = captured(&a, || {
        a.wait_external(&ready, Why("test.in")).unwrap();
        a.launch(set(&v, 1.0)).unwrap();
        a.record_external(&done).unwrap();
    });
    let exec = graph.instantiate().unwrap();
    machine.trace_start();
    a.launch_graph(&exec).unwrap();
    b.record(&ready).unwrap();
    b.launch_graph(&exec).unwrap();
    device.synchronize().unwrap();
    let trace = machine.trace_stop();
    let launches = trace.events.iter().filter_map(|event| match event {
        TraceEvent::Launch { stream, seq, graph, launch, bound, .. } => Some((*stream, *seq, graph, *launch, bound)),
        _ => None,
    });
    let launches: Vec<_> = launches.collect();
    let [first, second] = &launches[..] else { panic!("{} launches", launches.len()) };
    assert_eq!((first.0, first.1, first.3), (0, 1, 1));
    assert_eq!((second.0, second.1, second.3), (1, 1, 2));
    assert!(Arc::ptr_eq(first.2, second.2) && Arc::ptr_eq(first.2, &exec.trace()));
    let gates = |bound: &[BoundGate]| -> Vec<_> { bound.iter().map(|b| (b.node, b.generation, b.on)).collect() };
    let at = |stream, seq| Some(Position { stream, seq, node: None });
    assert_eq!(gates(first.4), [(0, 1, at(0, 0)), (2, 1, None)]);
    assert_eq!(gates(second.4), [(0, 2, at(1, 0)), (2, 2, None)]);
    let ran = trace.events.iter().filter_map(|event| match event {
        // A card also tells of whole launches.
        TraceEvent::Ran { stream, seq, node: Some(node), .. } => Some((*stream, *seq, *node)),
        _ => None,
    });
    assert_eq!(ran.collect::<Vec<_>>(), [(0, 1, 1), (1, 1, 1)]);
    assert_eq!(trace.work(0).operations, 2);
    assert_eq!(trace.work(0).bytes_written, 32);
}

/// Two branches that meet twice, over memory that the launches before have left behind.
fn diamond(a: &Stream, b: &Stream, views: &[View; 3]) {
    let [x, y, z] = views;
    a.launch(step(x, 3.0, 1.0)).unwrap();
    order(a, b, "fork");
    b.launch(step(y, 2.0, 7.0)).unwrap();
    b.launch(copy(y, &z.flat(0..y.numel()).unwrap())).unwrap();
    a.launch(step(x, 5.0, 2.0)).unwrap();
    order(b, a, "join");
    a.launch(step(z, 7.0, 3.0)).unwrap();
    order(a, b, "fork again");
    b.launch(copy(&z.flat(1..1 + x.numel()).unwrap(), x)).unwrap();
    order(b, a, "join again");
}

fn a_replay_gives_the_bits_of_its_eager_twin(driver: &Driver) {
    let run = |replay: bool| {
        let (device, a) = open(&driver.machine(), 0, "a");
        let b = device.stream("b").unwrap();
        let views = [floats(&device, "x", 3), floats(&device, "y", 4), floats(&device, "z", 6)];
        views.iter().zip([1.0, 2.0, 3.0]).for_each(|(v, x)| a.launch(set(v, x)).unwrap());
        let exec = replay.then(|| executable(&a, || diamond(&a, &b, &views)));
        for _ in 0..12 {
            match &exec {
                Some(exec) => a.launch_graph(exec).unwrap(),
                None => diamond(&a, &b, &views),
            }
        }
        let all = views.each_ref().map(|v| a.download::<f32>(v).unwrap());
        all.map(|values| values.wait().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>())
    };
    assert_eq!(run(true), run(false));
}

fn a_captured_upload_writes_the_same_values_at_every_launch(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let v = floats(&device, "v", 2);
    let graph = captured(&stream, || stream.upload(&v, vec![4f32, 5.0]).unwrap());
    let exec = graph.instantiate().unwrap();
    for _ in 0..3 {
        stream.launch(set(&v, 0.0)).unwrap();
        stream.launch_graph(&exec).unwrap();
        expect_values(&stream, &v, &[4.0, 5.0]);
    }
}

fn a_graph_reads_what_memory_holds_at_its_launch(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let (input, output) = (floats(&device, "input", 2), floats(&device, "output", 2));
    let exec = executable(&stream, || stream.launch(copy(&input, &output)).unwrap());
    for i in 0..5 {
        stream.upload(&input, vec![i as f32, -1.0]).unwrap();
        stream.launch_graph(&exec).unwrap();
        expect_values(&stream, &output, &[i as f32, -1.0]);
    }
}

fn an_executable_never_overlaps_itself_on_two_streams(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (two, v) = (device.stream("two").unwrap(), floats(&device, "v", 1));
    one.launch(set(&v, 1.0)).unwrap();
    let exec = executable(&one, || (0..4).for_each(|i| one.launch(step(&v, 2.0, i as f32)).unwrap()));
    // No event orders the two streams; the executable does.
    for i in 0..40 {
        [&one, &two][i % 2].launch_graph(&exec).unwrap();
    }
    device.synchronize().unwrap();
    let want = (0..40).fold(1.0, |x, _| (0..4).fold(x, |x, i| stepped(x, 2.0, i as f32)));
    expect_values(&two, &v, &[want]);
    // Two executables of one graph are not held back: without an order that is a race, or a lost step.
    drop(exec);
}

/// Two operations, each of which ends when the other has begun.
fn meeting_each_other() -> [Op; 2] {
    let ((to_right, from_left), (to_left, from_right)) = (mpsc::channel(), mpsc::channel());
    [(to_right, from_right), (to_left, from_left)].map(|ends| {
        let ends = Mutex::new(ends);
        Op::host("meet", "test", Vec::new(), move |_| {
            let ends = ends.lock().unwrap();
            ends.0.send(())?;
            Ok(ends.1.recv_timeout(LIMIT)?)
        })
    })
}

fn branches_of_a_graph_run_side_by_side(driver: &Driver) {
    let (device, a) = open(&driver.machine(), 0, "a");
    let (b, [left, right]) = (device.stream("b").unwrap(), meeting_each_other());
    let graph = captured(&a, || {
        a.launch(Counter::default().op(Vec::new())).unwrap();
        order(&a, &b, "fork");
        a.launch(left).unwrap();
        b.launch(right).unwrap();
        order(&b, &a, "join");
    });
    let exec = graph.instantiate().unwrap();
    (0..20).for_each(|_| a.launch_graph(&exec).unwrap());
    a.synchronize().unwrap();
}

fn executables_of_one_graph_may_overlap(driver: &Driver) {
    let (device, a) = open(&driver.machine(), 0, "a");
    let b = device.stream("b").unwrap();
    // Whoever comes first waits for the other, the operation being the same in both.
    let come = Arc::new((Mutex::new(0), Condvar::new()));
    let graph = captured(&a, || {
        let meet = Op::host("meet", "test", Vec::new(), move |_| {
            let mut count = come.0.lock().unwrap();
            *count += 1;
            come.1.notify_all();
            let even = *count + *count % 2;
            let (_count, waited) = come.1.wait_timeout_while(count, LIMIT, |count| *count < even).unwrap();
            if waited.timed_out() { Err("nobody came".into()) } else { Ok(()) }
        });
        a.launch(meet).unwrap();
    });
    let lanes = [graph.instantiate().unwrap(), graph.instantiate().unwrap()];
    for _ in 0..20 {
        a.launch_graph(&lanes[0]).unwrap();
        b.launch_graph(&lanes[1]).unwrap();
    }
    device.synchronize().unwrap();
}

fn an_operation_of_a_graph_may_own_the_last_handle_of_its_stream(driver: &Driver) {
    for _ in 0..20 {
        let machine = driver.machine();
        let (device, one) = open(&machine, 0, "one");
        let (op, begun, go) = held(Vec::new());
        let slot = Arc::new(Mutex::new(None::<Stream>));
        let taken = slot.clone();
        let exec = executable(&one, || {
            one.launch(op).unwrap();
            let let_go = Op::host("own", "test", Vec::new(), move |_| {
                drop(taken.lock().unwrap().take());
                Ok(())
            });
            one.launch(let_go).unwrap();
        });
        one.launch_graph(&exec).unwrap();
        begun.recv_timeout(LIMIT).unwrap();
        *slot.lock().unwrap() = Some(one);
        go.send(()).unwrap();
        drop(exec);
        let begin = std::time::Instant::now();
        while device.graphs().executables > 0 {
            assert!(begin.elapsed() < LIMIT, "the launch never ended");
            std::thread::yield_now();
        }
        assert!(device.error().is_none(), "{:?}", device.error());
    }
}

/// One launch at a time on `sim`, too: a lost order between launches would show under some seed.
#[test]
fn two_executables_without_an_order_give_different_values_under_some_seed() {
    let run = |seed| {
        let (device, one) = open(&sim(seed).machine(), 0, "one");
        let (two, v, e) = (device.stream("two").unwrap(), floats(&device, "v", 1), device.event("start"));
        one.launch(set(&v, 1.0)).unwrap();
        one.record(&e).unwrap();
        two.wait(&e, Why("test.start")).unwrap();
        let graph = captured(&one, || (0..3).for_each(|i| one.launch(step(&v, 2.0, i as f32)).unwrap()));
        one.launch_graph(&graph.instantiate().unwrap()).unwrap();
        two.launch_graph(&graph.instantiate().unwrap()).unwrap();
        device.synchronize().unwrap();
        one.download::<f32>(&v).unwrap().wait().unwrap()[0].to_bits()
    };
    let values: std::collections::BTreeSet<u32> = (0..30).map(run).collect();
    assert!(values.len() > 1, "thirty seeds gave one order");
}
