//! What a capture takes and what it refuses, and that a refused capture leaves streams usable.

use device::*;

use super::{
    drivers::Driver,
    work::{Counter, expect_values, floats, open, set, step},
};

conformance! {
    every:
        nothing_runs_while_a_stream_captures,
        a_second_capture_of_a_stream_is_refused_and_the_first_goes_on,
        calls_that_need_a_capture_are_refused_without_one,
        a_capture_ends_in_the_stream_where_it_began,
        streams_that_were_not_joined_are_named,
        a_joined_stream_without_work_needs_no_join,
        a_capture_cannot_wait_for_what_was_recorded_outside,
        two_captures_cannot_wait_for_each_other,
        an_event_of_a_capture_orders_nothing_outside,
        host_waits_on_a_capturing_stream_are_refused,
        the_host_cannot_wait_for_an_event_of_a_capture,
        allocations_are_refused_while_a_stream_captures,
        graphs_are_not_launched_into_a_capture,
        a_broken_capture_gives_its_first_reason_and_then_streams_run_again,
        a_refused_operation_breaks_no_capture,
        asking_for_an_event_breaks_no_capture,
        a_dropped_origin_ends_the_capture_for_all,
        streams_outside_a_capture_run_on,
        a_capture_belongs_to_streams_and_not_to_threads,
        captures_and_graphs_are_counted_until_they_go;
    computing:
        a_download_is_refused_in_a_capture
}

/// `two` joins the capture of `one`.
fn fork(one: &Stream, two: &Stream) {
    let e = one.device().event("fork");
    one.record(&e).unwrap();
    two.wait(&e, Why("test.fork")).unwrap();
}

fn join(one: &Stream, two: &Stream) {
    let e = one.device().event("join");
    two.record(&e).unwrap();
    one.wait(&e, Why("test.join")).unwrap();
}

/// The reason why a capture is invalid.
#[track_caller]
fn reason(error: &Error) -> &Error {
    match error {
        Error::CaptureInvalid { source, .. } => source,
        other => panic!("no invalid capture: {other}"),
    }
}

/// After all that a claim did to a capture, the stream runs and can capture again.
#[track_caller]
fn usable(stream: &Stream, view: &View) {
    assert!(!stream.is_capturing());
    stream.launch(set(view, 1.0)).unwrap();
    stream.begin_capture("again").unwrap();
    stream.launch(step(view, 2.0, 5.0)).unwrap();
    let graph = stream.end_capture().unwrap();
    stream.launch_graph(&graph.instantiate().unwrap()).unwrap();
    expect_values(stream, view, &vec![7.0; view.numel()]);
}

fn nothing_runs_while_a_stream_captures(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, v, count) = (device.stream("two").unwrap(), floats(&device, "v", 1), Counter::default());
    one.begin_capture("g").unwrap();
    machine.trace_start();
    one.launch(count.op(vec![Access::update(&v)])).unwrap();
    one.upload(&v, vec![3f32]).unwrap();
    fork(&one, &two);
    two.launch(count.op(Vec::new())).unwrap();
    join(&one, &two);
    assert!(one.is_capturing() && two.is_capturing());
    let graph = one.end_capture().unwrap();
    assert!(!one.is_capturing() && !two.is_capturing());
    let done = machine.trace_stop().events.into_iter().filter(|event| !matches!(event, TraceEvent::Note { .. }));
    assert_eq!(done.collect::<Vec<_>>(), Vec::new());
    device.synchronize().unwrap();
    assert_eq!((count.get(), graph.node_count(), graph.name()), (0, 3, "g"));
    usable(&one, &v);
}

fn a_second_capture_of_a_stream_is_refused_and_the_first_goes_on(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 3, "one");
    let (two, v) = (device.stream("two").unwrap(), floats(&device, "v", 1));
    one.begin_capture("outer").unwrap();
    one.launch(set(&v, 1.0)).unwrap();
    fork(&one, &two);
    for stream in [&one, &two] {
        let error = stream.begin_capture("inner").unwrap_err();
        assert!(matches!(&error, Error::AlreadyCapturing { rank: 3, graph, .. } if graph == "outer"), "{error}");
    }
    one.launch(set(&v, 2.0)).unwrap();
    assert_eq!(one.end_capture().unwrap().node_count(), 2);
    usable(&one, &v);
}

fn calls_that_need_a_capture_are_refused_without_one(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let e = device.event("gate");
    stream.record(&e).unwrap();
    let refused = |error: Error| match error {
        Error::NotCapturing { call, stream, .. } if stream == "compute" => call,
        other => panic!("{other}"),
    };
    assert_eq!(refused(stream.end_capture().unwrap_err()), "end_capture");
    assert_eq!(refused(stream.wait_external(&e, Why("test")).unwrap_err()), "wait_external");
    assert_eq!(refused(stream.record_external(&e).unwrap_err()), "record_external");
    stream.synchronize().unwrap();
}

fn a_capture_ends_in_the_stream_where_it_began(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (two, v) = (device.stream("two").unwrap(), floats(&device, "v", 1));
    one.begin_capture("g").unwrap();
    fork(&one, &two);
    let error = two.end_capture().unwrap_err();
    let text = "stream 'two' of rank 0 only joined the capture of 'g'; end it on stream 'one'";
    assert_eq!(error.to_string(), text);
    one.end_capture().unwrap();
    assert!(matches!(two.end_capture(), Err(Error::NotCapturing { .. })));
    usable(&two, &v);
}

fn streams_that_were_not_joined_are_named(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let streams: Vec<Stream> = (0..4).map(|i| device.stream(&format!("s{i}")).unwrap()).collect();
    let v = floats(&device, "v", 5);
    one.begin_capture("g").unwrap();
    streams.iter().for_each(|stream| fork(&one, stream));
    for (i, stream) in streams.iter().enumerate() {
        stream.launch(set(&v.flat(i..i + 1).unwrap(), 1.0)).unwrap();
    }
    // The third is joined through the fourth, the second goes on after its join.
    join(&one, &streams[1]);
    streams[1].launch(set(&v.flat(4..5).unwrap(), 1.0)).unwrap();
    join(&streams[3], &streams[2]);
    join(&one, &streams[3]);
    let error = one.end_capture().unwrap_err();
    let Error::Unjoined { streams: names, origin, graph, .. } = &error else { panic!("{error}") };
    assert_eq!((&names[..], &origin[..], &graph[..]), (&["s0".to_owned(), "s1".to_owned()][..], "one", "g"));
    usable(&streams[0], &v);
    usable(&one, &v);
}

fn a_joined_stream_without_work_needs_no_join(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (two, three, v) = (device.stream("two").unwrap(), device.stream("three").unwrap(), floats(&device, "v", 1));
    one.begin_capture("g").unwrap();
    // Before any node, and after one.
    fork(&one, &two);
    one.launch(set(&v, 1.0)).unwrap();
    fork(&two, &three);
    fork(&one, &three);
    assert!(two.is_capturing() && three.is_capturing());
    assert_eq!(one.end_capture().unwrap().node_count(), 1);
    usable(&three, &v);
}

fn a_capture_cannot_wait_for_what_was_recorded_outside(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (other, v, e) = (device.stream("other").unwrap(), floats(&device, "v", 1), device.event("published"));
    other.record(&e).unwrap();
    one.begin_capture("g").unwrap();
    let error = one.wait(&e, Why("test")).unwrap_err();
    let Error::ForeignWait { event, graph, stream, .. } = &error else { panic!("{error}") };
    assert_eq!((&event[..], &graph[..], &stream[..]), ("published", "g", "one"));
    assert!(error.to_string().contains("wait_external"), "{error}");
    // The end tells again, for a program that did not listen.
    assert!(matches!(reason(&one.launch(set(&v, 1.0)).unwrap_err()), Error::ForeignWait { .. }));
    assert!(matches!(reason(&one.end_capture().unwrap_err()), Error::ForeignWait { .. }));
    usable(&one, &v);
    one.begin_capture("never").unwrap();
    assert!(matches!(one.wait(&device.event("new"), Why("test")), Err(Error::NeverRecorded { .. })));
    assert!(matches!(reason(&one.end_capture().unwrap_err()), Error::NeverRecorded { .. }));
    usable(&one, &v);
}

fn two_captures_cannot_wait_for_each_other(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (two, v, e) = (device.stream("two").unwrap(), floats(&device, "v", 1), device.event("e"));
    one.begin_capture("first").unwrap();
    two.begin_capture("second").unwrap();
    assert_eq!(device.graphs().captures, 2);
    one.record(&e).unwrap();
    let error = two.wait(&e, Why("test")).unwrap_err();
    assert!(matches!(&error, Error::ForeignWait { graph, .. } if graph == "second"), "{error}");
    // The one that was waited for is whole.
    one.launch(set(&v, 1.0)).unwrap();
    assert_eq!(one.end_capture().unwrap().node_count(), 1);
    two.end_capture().unwrap_err();
    usable(&two, &v);
}

fn an_event_of_a_capture_orders_nothing_outside(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (two, v, e) = (device.stream("two").unwrap(), floats(&device, "v", 1), device.event("inner"));
    one.begin_capture("g").unwrap();
    one.launch(set(&v, 1.0)).unwrap();
    one.record(&e).unwrap();
    let graph = one.end_capture().unwrap();
    let error = two.wait(&e, Why("test")).unwrap_err();
    assert!(matches!(&error, Error::CapturedEvent { event, graph, .. } if event == "inner" && graph == "g"), "{error}");
    assert!(error.to_string().contains("record_external"), "{error}");
    one.begin_capture("later").unwrap();
    assert!(matches!(one.wait(&e, Why("test")), Err(Error::ForeignWait { .. })));
    one.end_capture().unwrap_err();
    // A record outside makes it an event like any other.
    one.record(&e).unwrap();
    two.wait(&e, Why("test")).unwrap();
    e.synchronize().unwrap();
    assert_eq!((e.generation(), graph.node_count()), (1, 1));
    usable(&two, &v);
}

fn host_waits_on_a_capturing_stream_are_refused(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (two, v) = (device.stream("two").unwrap(), floats(&device, "v", 1));
    type Wait = fn(&Device, &Stream) -> Result<(), Error>;
    let waits: [(Wait, &str); 2] =
        [(|_, two| two.synchronize(), "two"), (|device, _| device.synchronize(), "all streams")];
    for (wait, what) in waits {
        one.begin_capture("g").unwrap();
        fork(&one, &two);
        let error = wait(&device, &two).unwrap_err();
        assert!(matches!(&error, Error::HostWaitInCapture { what: w, .. } if w == what), "{error}");
        let end = one.end_capture().unwrap_err();
        assert_eq!(reason(&end).to_string(), error.to_string());
        usable(&one, &v);
    }
}

fn the_host_cannot_wait_for_an_event_of_a_capture(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (v, e) = (floats(&device, "v", 1), device.event("e"));
    one.record(&e).unwrap();
    one.synchronize().unwrap();
    one.begin_capture("g").unwrap();
    one.launch(set(&v, 1.0)).unwrap();
    e.synchronize().unwrap();
    one.record(&e).unwrap();
    assert!(matches!(e.synchronize(), Err(Error::CapturedEvent { .. })));
    assert!(matches!(reason(&one.end_capture().unwrap_err()), Error::CapturedEvent { .. }));
    assert!(matches!(e.synchronize(), Err(Error::CapturedEvent { .. })), "it still marks nothing that runs");
    usable(&one, &v);
}

fn allocations_are_refused_while_a_stream_captures(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (other, v) = (open(&machine, 1, "other"), floats(&device, "v", 1));
    one.begin_capture("g").unwrap();
    floats(&other.0, "of another rank", 4);
    let error = device.alloc("act", &[5], DType::F32, MemoryKind::Other).map(|_| ()).unwrap_err();
    assert!(matches!(&error, Error::AllocationInCapture { label, bytes: 20, .. } if label == "act"), "{error}");
    assert!(matches!(reason(&one.end_capture().unwrap_err()), Error::AllocationInCapture { .. }));
    floats(&device, "after", 5);
    usable(&one, &v);
}

fn graphs_are_not_launched_into_a_capture(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let v = floats(&device, "v", 1);
    one.begin_capture("inner").unwrap();
    let inner = one.end_capture().unwrap().instantiate().unwrap();
    one.begin_capture("outer").unwrap();
    let error = one.launch_graph(&inner).unwrap_err();
    assert!(matches!(&error, Error::LaunchInCapture { graph, capture, .. } if graph == "inner" && capture == "outer"));
    assert!(matches!(reason(&one.end_capture().unwrap_err()), Error::LaunchInCapture { .. }));
    usable(&one, &v);
}

fn a_broken_capture_gives_its_first_reason_and_then_streams_run_again(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (two, v) = (device.stream("two").unwrap(), floats(&device, "v", 1));
    one.begin_capture("g").unwrap();
    one.launch(set(&v, 1.0)).unwrap();
    fork(&one, &two);
    device.synchronize().unwrap_err();
    // Everything that the streams are asked for names the first reason.
    let e = device.event("e");
    for refused in [one.record(&e), two.launch(set(&v, 2.0)), two.synchronize(), one.wait_external(&e, Why("test"))] {
        let error = refused.unwrap_err();
        assert!(matches!(reason(&error), Error::HostWaitInCapture { what, .. } if what == "all streams"), "{error}");
    }
    let error = one.end_capture().unwrap_err();
    assert!(matches!(reason(&error), Error::HostWaitInCapture { what, .. } if what == "all streams"));
    assert!(device.error().is_none(), "a broken capture is no failure of the device");
    usable(&two, &v);
    usable(&one, &v);
}

fn a_refused_operation_breaks_no_capture(driver: &Driver) {
    let machine = driver.machine();
    let ((device, one), (other, _)) = (open(&machine, 0, "one"), open(&machine, 1, "other"));
    let (v, foreign) = (floats(&device, "v", 1), floats(&other, "foreign", 1));
    one.begin_capture("g").unwrap();
    assert!(matches!(one.launch(set(&foreign, 1.0)), Err(Error::Foreign { .. })));
    assert!(matches!(one.upload(&v, vec![1f32, 2.0]), Err(Error::Shapes { .. })));
    one.launch(set(&v, 1.0)).unwrap();
    assert_eq!(one.end_capture().unwrap().node_count(), 1);
    usable(&one, &v);
}

/// As a watchdog does: it polls what was recorded before, and what is being captured.
fn asking_for_an_event_breaks_no_capture(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (v, before, inside) = (floats(&device, "v", 1), device.event("before"), device.event("inside"));
    one.record(&before).unwrap();
    one.synchronize().unwrap();
    for _ in 0..50 {
        one.begin_capture("g").unwrap();
        one.launch(set(&v, 1.0)).unwrap();
        one.record(&inside).unwrap();
        assert!(before.is_done() && !inside.is_done());
        one.launch(step(&v, 2.0, 1.0)).unwrap();
        assert_eq!(one.end_capture().unwrap().node_count(), 2);
        assert!(!inside.is_done());
    }
    usable(&one, &v);
}

fn a_dropped_origin_ends_the_capture_for_all(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (two, v) = (device.stream("two").unwrap(), floats(&device, "v", 1));
    one.begin_capture("g").unwrap();
    one.launch(set(&v, 1.0)).unwrap();
    fork(&one, &two);
    drop(one);
    assert_eq!(device.graphs(), GraphUse::default());
    // Told once: what was to be captured does not run by mistake.
    let error = two.launch(set(&v, 9.0)).unwrap_err();
    assert!(matches!(reason(&error), Error::CaptureAbandoned { stream, .. } if stream == "one"), "{error}");
    usable(&two, &v);
}

fn streams_outside_a_capture_run_on(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (two, v, e) = (device.stream("two").unwrap(), floats(&device, "v", 1), device.event("e"));
    one.begin_capture("g").unwrap();
    two.launch(set(&v, 4.0)).unwrap();
    two.record(&e).unwrap();
    e.synchronize().unwrap();
    expect_values(&two, &v, &[4.0]);
    one.end_capture().unwrap();
    usable(&one, &v);
}

fn a_capture_belongs_to_streams_and_not_to_threads(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, v) = (device.stream("two").unwrap(), floats(&device, "v", 1));
    one.begin_capture("g").unwrap();
    std::thread::scope(|scope| {
        // Another thread adds to the capture, and runs another stream meanwhile.
        scope.spawn(|| one.launch(step(&v, 2.0, 5.0)).unwrap()).join().unwrap();
        two.launch(set(&v, 1.0)).unwrap();
        two.synchronize().unwrap();
    });
    let graph = std::thread::scope(|scope| scope.spawn(|| one.end_capture().unwrap()).join().unwrap());
    assert_eq!(graph.node_count(), 1);
    one.launch_graph(&graph.instantiate().unwrap()).unwrap();
    expect_values(&one, &v, &[7.0]);
}

fn captures_and_graphs_are_counted_until_they_go(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let v = floats(&device, "v", 1);
    let memory = device.memory_by_kind();
    let used = |captures, graphs, executables, nodes| GraphUse { captures, graphs, executables, nodes };
    for _ in 0..100 {
        assert_eq!(device.graphs(), GraphUse::default());
        one.begin_capture("g").unwrap();
        assert_eq!(device.graphs(), used(1, 0, 0, 0));
        (0..3).for_each(|_| one.launch(set(&v, 1.0)).unwrap());
        let graph = one.end_capture().unwrap();
        assert_eq!(device.graphs(), used(0, 1, 0, 3));
        let (first, second) = (graph.instantiate().unwrap(), graph.instantiate().unwrap());
        assert_eq!(device.graphs(), used(0, 1, 2, 9));
        drop((graph, second));
        one.launch_graph(&first).unwrap();
        drop(first);
        one.synchronize().unwrap();
    }
    assert_eq!(device.graphs(), GraphUse::default());
    assert_eq!(device.memory_by_kind(), memory);
}

fn a_download_is_refused_in_a_capture(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let v = floats(&device, "loss", 1);
    one.begin_capture("g").unwrap();
    let error = one.download::<f32>(&v).map(|_| ()).unwrap_err();
    assert!(matches!(&error, Error::HostWaitInCapture { what, .. } if what == "download of loss"), "{error}");
    assert!(matches!(reason(&one.end_capture().unwrap_err()), Error::HostWaitInCapture { .. }));
    usable(&one, &v);
}
