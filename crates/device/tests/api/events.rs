//! Order within a stream, and between streams through events.

use device::*;

use super::{
    drivers::Driver,
    work::{Counter, Gate, copy, expect_values, floats, open, set, step, stepped},
};

conformance! {
    every:
        a_wait_binds_to_the_last_record_before_it,
        a_wait_stays_bound_when_another_stream_records_the_event_again,
        a_later_wait_binds_to_the_new_record,
        a_wait_for_an_event_never_recorded_is_refused,
        an_event_tells_whether_its_last_record_is_reached,
        the_host_waits_for_a_record_and_not_for_what_follows,
        waits_that_add_no_order_are_elided_and_the_others_are_not,
        a_dropped_wait_leaves_the_next_one_its_work,
        streams_without_an_order_do_not_wait_for_each_other;
    computing:
        a_stream_runs_in_the_order_of_the_calls,
        an_event_orders_two_streams,
        order_passes_through_a_chain_of_streams,
        an_elided_wait_still_orders,
        a_synchronised_stream_has_run_everything,
        synchronising_a_device_waits_for_all_its_streams
}

fn a_stream_runs_in_the_order_of_the_calls(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let v = floats(&device, "v", 3);
    stream.upload(&v, vec![1f32, 2.0, 3.0]).unwrap();
    (0..100).for_each(|i| stream.launch(step(&v, 2.0, i as f32)).unwrap());
    let want = [1f32, 2.0, 3.0].map(|x| (0..100).fold(x, |x, i| stepped(x, 2.0, i as f32)));
    expect_values(&stream, &v, &want);
}

fn an_event_orders_two_streams(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let two = device.stream("two").unwrap();
    let (v, e) = (floats(&device, "v", 5), device.event("ready"));
    one.launch(set(&v, 1.0)).unwrap();
    for i in 0..50 {
        let (from, to) = if i % 2 == 0 { (&one, &two) } else { (&two, &one) };
        from.launch(step(&v, 3.0, 1.0)).unwrap();
        from.record(&e).unwrap();
        to.wait(&e, Why("test.turns")).unwrap();
        to.launch(step(&v, 5.0, 2.0)).unwrap();
    }
    let want = (0..50).fold(1.0, |x, _| stepped(stepped(x, 3.0, 1.0), 5.0, 2.0));
    one.record(&e).unwrap();
    two.wait(&e, Why("test.end")).unwrap();
    expect_values(&two, &v, &[want; 5]);
}

fn order_passes_through_a_chain_of_streams(driver: &Driver) {
    let (device, first) = open(&driver.machine(), 0, "s0");
    let streams: Vec<Stream> = (1..6).map(|i| device.stream(&format!("s{i}")).unwrap()).collect();
    let v = floats(&device, "v", 1);
    first.launch(set(&v, 1.0)).unwrap();
    let mut before = &first;
    for (i, stream) in streams.iter().enumerate() {
        let e = device.event("next");
        before.record(&e).unwrap();
        stream.wait(&e, Why("test.chain")).unwrap();
        stream.launch(step(&v, 2.0, i as f32)).unwrap();
        before = stream;
    }
    expect_values(before, &v, &[(0..5).fold(1.0, |x, i| stepped(x, 2.0, i as f32))]);
}

fn a_wait_binds_to_the_last_record_before_it(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let two = device.stream("two").unwrap();
    let (v, seen, e) = (floats(&device, "v", 2), floats(&device, "seen", 2), device.event("e"));
    one.launch(set(&v, 1.0)).unwrap();
    one.record(&e).unwrap();
    two.wait(&e, Why("test.bound")).unwrap();
    two.launch(copy(&v, &seen)).unwrap();
    let gate = Gate::before(&one);
    one.launch(set(&v, 2.0)).unwrap();
    one.record(&e).unwrap();
    // Ends although the second record cannot be reached yet.
    expect_values(&two, &seen, &[1.0, 1.0]);
    assert_eq!((e.generation(), e.is_done()), (2, false));
    gate.open();
    expect_values(&one, &v, &[2.0, 2.0]);
    assert!(e.is_done());
}

fn a_wait_stays_bound_when_another_stream_records_the_event_again(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (two, three) = (device.stream("two").unwrap(), device.stream("three").unwrap());
    let (v, seen, e) = (floats(&device, "v", 2), floats(&device, "seen", 2), device.event("e"));
    let gate = Gate::before(&three);
    one.launch(set(&v, 1.0)).unwrap();
    one.record(&e).unwrap();
    two.wait(&e, Why("test.bound")).unwrap();
    three.record(&e).unwrap();
    two.launch(copy(&v, &seen)).unwrap();
    expect_values(&two, &seen, &[1.0, 1.0]);
    assert!(!e.is_done());
    gate.open();
    three.synchronize().unwrap();
    assert!(e.is_done());
}

fn a_later_wait_binds_to_the_new_record(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, three) = (device.stream("two").unwrap(), device.stream("three").unwrap());
    let (v, seen, e) = (floats(&device, "v", 2), floats(&device, "seen", 2), device.event("e"));
    one.record(&e).unwrap();
    two.wait(&e, Why("test.old")).unwrap();
    let gate = Gate::before(&three);
    three.launch(set(&v, 7.0)).unwrap();
    three.record(&e).unwrap();
    two.wait(&e, Why("test.new")).unwrap();
    two.launch(copy(&v, &seen)).unwrap();
    let done = device.event("done");
    two.record(&done).unwrap();
    one.synchronize().unwrap();
    assert!(!done.is_done(), "passed a record that was not reached");
    gate.open();
    expect_values(&two, &seen, &[7.0, 7.0]);
}

fn a_wait_for_an_event_never_recorded_is_refused(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 3, "compute");
    let e = device.event("grads_ready");
    let error = stream.wait(&e, Why("test")).unwrap_err();
    let text = "stream 'compute' of rank 3 waits for event 'grads_ready', which was never recorded";
    assert_eq!(error.to_string(), text);
    assert!(matches!(e.synchronize(), Err(Error::NeverRecorded { rank: 3, .. })));
    assert_eq!((e.generation(), e.is_done()), (0, false));
    // Nothing was queued and nothing has failed.
    stream.synchronize().unwrap();
    stream.record(&e).unwrap();
    stream.wait(&e, Why("test")).unwrap();
    e.synchronize().unwrap();
}

fn an_event_tells_whether_its_last_record_is_reached(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let e = device.event("e");
    for generation in 1..4 {
        stream.record(&e).unwrap();
        stream.synchronize().unwrap();
        assert_eq!((e.generation(), e.is_done()), (generation, true));
    }
    let gate = Gate::before(&stream);
    stream.record(&e).unwrap();
    assert_eq!((e.generation(), e.is_done()), (4, false));
    gate.open();
    e.synchronize().unwrap();
    assert!(e.is_done());
}

fn the_host_waits_for_a_record_and_not_for_what_follows(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let e = device.event("e");
    stream.record(&e).unwrap();
    let gate = Gate::before(&stream);
    e.synchronize().unwrap();
    gate.open();
    stream.synchronize().unwrap();
}

fn outcomes(trace: &Trace) -> Vec<WaitOutcome> {
    let waits = trace.events.iter().filter_map(|e| match e {
        TraceEvent::Wait { outcome, .. } => Some(*outcome),
        _ => None,
    });
    waits.collect()
}

fn waits_that_add_no_order_are_elided_and_the_others_are_not(driver: &Driver) {
    use WaitOutcome::{Elided, Enforced};
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, three) = (device.stream("two").unwrap(), device.stream("three").unwrap());
    let (early, late) = (device.event("early"), device.event("late"));
    machine.trace_start();
    one.record(&early).unwrap();
    one.record(&late).unwrap();
    two.wait(&late, Why("enforced: the first")).unwrap();
    two.wait(&early, Why("elided: behind a later point of that stream")).unwrap();
    two.wait(&late, Why("elided: the same record")).unwrap();
    one.wait(&late, Why("elided: its own stream")).unwrap();
    three.wait(&early, Why("enforced: another stream")).unwrap();
    three.wait(&late, Why("enforced: a later point")).unwrap();
    one.record(&early).unwrap();
    two.wait(&early, Why("enforced: recorded again")).unwrap();
    two.record(&early).unwrap();
    three.wait(&early, Why("enforced: recorded on another stream")).unwrap();
    // An early position of a stream that nobody is behind yet.
    let four = device.stream("four").unwrap();
    four.record(&early).unwrap();
    two.wait(&early, Why("enforced: a stream of its own")).unwrap();
    three.wait(&early, Why("enforced: a stream of its own")).unwrap();
    let want = [Enforced, Elided, Elided, Elided, Enforced, Enforced, Enforced, Enforced, Enforced, Enforced];
    assert_eq!(outcomes(&machine.trace_stop()), want);
    device.synchronize().unwrap();
}

fn a_dropped_wait_leaves_the_next_one_its_work(driver: &Driver) {
    use WaitOutcome::{Dropped, Elided, Enforced};
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, e) = (device.stream("two").unwrap(), device.event("e"));
    machine.drop_waits(Why("test.dropped"));
    machine.trace_start();
    one.record(&e).unwrap();
    for why in ["test.dropped", "test.kept", "test.dropped", "test.kept"] {
        two.wait(&e, Why(why)).unwrap();
    }
    assert_eq!(outcomes(&machine.trace_stop()), [Dropped, Enforced, Dropped, Elided]);
    device.synchronize().unwrap();
}

fn an_elided_wait_still_orders(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let two = device.stream("two").unwrap();
    let (v, e, back) = (floats(&device, "v", 3), device.event("e"), device.event("back"));
    one.launch(set(&v, 1.0)).unwrap();
    for i in 0..40 {
        one.launch(step(&v, 2.0, i as f32)).unwrap();
        one.record(&e).unwrap();
        // The second of each pair costs nothing; what follows is ordered all the same.
        two.wait(&e, Why("test.first")).unwrap();
        two.wait(&e, Why("test.again")).unwrap();
        two.launch(step(&v, 3.0, 1.0)).unwrap();
        two.record(&back).unwrap();
        one.wait(&back, Why("test.back")).unwrap();
        one.wait(&back, Why("test.back_again")).unwrap();
    }
    let want = (0..40).fold(1.0, |x, i| stepped(stepped(x, 2.0, i as f32), 3.0, 1.0));
    expect_values(&one, &v, &[want; 3]);
}

fn streams_without_an_order_do_not_wait_for_each_other(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let two = device.stream("two").unwrap();
    let gate = Gate::before(&one);
    two.launch(set(&floats(&device, "v", 1), 1.0)).unwrap();
    two.synchronize().unwrap();
    gate.open();
    one.synchronize().unwrap();
}

fn a_synchronised_stream_has_run_everything(driver: &Driver) {
    let (_device, stream) = open(&driver.machine(), 0, "compute");
    let count = Counter::default();
    for round in 1..20 {
        (0..round).for_each(|_| stream.launch(count.op(Vec::new())).unwrap());
        stream.synchronize().unwrap();
        assert_eq!(count.get(), round * (round + 1) / 2);
    }
}

fn synchronising_a_device_waits_for_all_its_streams(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let two = device.stream("two").unwrap();
    let count = Counter::default();
    for _ in 0..50 {
        one.launch(count.op(Vec::new())).unwrap();
        two.launch(count.op(Vec::new())).unwrap();
    }
    device.synchronize().unwrap();
    assert_eq!(count.get(), 100);
}
