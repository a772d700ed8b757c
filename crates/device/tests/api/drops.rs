//! Handles dropped in any order, with work queued: what runs is waited for, what is queued is thrown away, and told.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use device::*;

use super::{
    drivers::{Driver, LIMIT},
    work::{Counter, Gate, expect_values, floats, held, open, set, step},
};

conformance! {
    every:
        a_stream_without_operations_is_dropped_without_an_error,
        a_dropped_stream_tells_what_it_threw_away,
        a_stream_that_waits_is_dropped_at_once;
    every_on_hosts:
        handles_can_be_dropped_in_every_order_with_work_queued,
        a_joint_operation_under_way_is_waited_for,
        a_dropped_stream_is_not_waited_for_any_more;
    computing:
        an_operation_may_own_the_last_handle_of_a_stream,
        a_stream_gets_its_part_of_what_its_peers_have_done_before_it_goes,
        what_an_operation_owns_may_submit_when_it_goes;
    computing_on_hosts:
        thrown_away_operations_let_go_of_what_they_own;
    blocking:
        dropping_waits_for_the_operation_that_runs,
        nothing_runs_behind_work_that_was_thrown_away
}

/// Stands in a stream for ever: rank 77 never comes.
fn stuck(stream: &Stream) {
    let meeting = stream.device().machine().meeting("stuck", &[stream.rank(), 77], stream.rank()).unwrap();
    stream.joint(&meeting, Exchange::Barrier, "test", Vec::new()).unwrap();
}

/// All orders of `0..n`.
fn orders(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![Vec::new()];
    }
    let shorter = orders(n - 1);
    let insert = |order: &Vec<usize>, at: usize| {
        let mut order = order.clone();
        order.insert(at, n - 1);
        order
    };
    shorter.iter().flat_map(|order| (0..n).map(move |at| insert(order, at))).collect()
}

fn handles_can_be_dropped_in_every_order_with_work_queued(driver: &Driver) {
    for order in orders(6) {
        let machine = driver.machine();
        let (device, one) = open(&machine, 0, "one");
        let (two, e, f) = (device.stream("two").unwrap(), device.event("e"), device.event("f"));
        let v = floats(&device, "v", 4);
        one.launch(set(&v, 1.0)).unwrap();
        one.record(&e).unwrap();
        two.wait(&e, Why("test")).unwrap();
        two.launch(step(&v, 2.0, 1.0)).unwrap();
        stuck(&two);
        two.record(&f).unwrap();
        one.wait(&f, Why("test")).unwrap();
        one.launch(step(&v, 3.0, 1.0)).unwrap();
        let handles: [Box<dyn std::any::Any>; 6] =
            [Box::new(one), Box::new(two), Box::new((e, f)), Box::new(v), Box::new(device), Box::new(machine)];
        let mut handles = handles.map(Some);
        let begin = Instant::now();
        order.into_iter().for_each(|i| drop(handles[i].take()));
        assert!(begin.elapsed() < LIMIT, "some drop waited for what never comes");
    }
}

fn a_dropped_stream_tells_what_it_threw_away(driver: &Driver) {
    let machine = driver.machine();
    let (device, stream) = open(&machine, 4, "compute");
    let (v, e) = (floats(&device, "v", 1), device.event("e"));
    stream.launch(set(&v, 1.0)).unwrap();
    stream.synchronize().unwrap();
    stuck(&stream);
    (0..3).for_each(|_| stream.launch(set(&v, 2.0)).unwrap());
    stream.record(&e).unwrap();
    let again = stream.clone();
    drop(stream);
    assert!(device.error().is_none(), "a handle is left");
    drop(again);
    let error = device.error().unwrap();
    assert_eq!(error.to_string(), "stream 'compute' of rank 4 was dropped with 4 operations that had not run");
    assert!(e.is_done(), "events complete behind what was thrown away");
    assert!(matches!(device.synchronize(), Err(Error::Cancelled { queued: 4, .. })));
}

/// The order it made for others stays.
fn a_stream_without_operations_is_dropped_without_an_error(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, three) = (device.stream("two").unwrap(), device.stream("three").unwrap());
    let (e, f, v) = (device.event("e"), device.event("f"), floats(&device, "v", 1));
    let gate = Gate::before(&one);
    one.launch(set(&v, 1.0)).unwrap();
    one.record(&e).unwrap();
    two.wait(&e, Why("test")).unwrap();
    two.record(&f).unwrap();
    three.wait(&f, Why("test")).unwrap();
    three.launch(step(&v, 2.0, 5.0)).unwrap();
    drop(two);
    assert!(device.error().is_none());
    drop(device.stream("four").unwrap());
    if machine.driver() == "cpu" {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!f.is_done());
    gate.open();
    expect_values(&three, &v, &[7.0]);
    assert!(device.error().is_none());
}

fn a_stream_that_waits_is_dropped_at_once(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, e, v) = (device.stream("two").unwrap(), device.event("e"), floats(&device, "v", 1));
    stuck(&one);
    one.record(&e).unwrap();
    two.wait(&e, Why("test")).unwrap();
    two.launch(set(&v, 1.0)).unwrap();
    if machine.driver() == "cpu" {
        std::thread::sleep(Duration::from_millis(5));
    }
    let begin = Instant::now();
    drop(two);
    assert!(begin.elapsed() < LIMIT, "waited {:?} for another stream", begin.elapsed());
    assert!(matches!(device.error(), Some(Error::Cancelled { queued: 1, .. })));
}

/// Either all of it happens and nobody fails, or it is thrown away and both are told; never one of the two.
fn a_joint_operation_under_way_is_waited_for(driver: &Driver) {
    let n = 200_000;
    for round in 0..40 {
        let machine = driver.machine();
        let opened = [0, 1].map(|rank| {
            let (device, stream) = open(&machine, rank, "comm");
            let v = floats(&device, "v", n);
            stream.launch(set(&v, rank as f32 + 1.0)).unwrap();
            (device, stream, v)
        });
        for (device, stream, v) in &opened {
            let meeting = machine.meeting("g", &[0, 1], device.rank()).unwrap();
            stream.joint(&meeting, Exchange::AllReduce(Reduce::Sum), "test", vec![Access::update(v)]).unwrap();
        }
        if machine.driver() == "cpu" {
            std::thread::sleep(Duration::from_micros(round * 30));
        }
        let [(d0, s0, v0), (d1, s1, _)] = opened;
        drop(s1);
        match (s0.synchronize(), d1.error()) {
            (Ok(()), None) => {
                if machine.computes() {
                    let got = s0.download::<f32>(&v0).unwrap().wait().unwrap();
                    assert!(got.iter().all(|x| *x == 3.0));
                }
            }
            (Err(Error::PeerGone { rank: 1, how: Departure::Dropped, .. }), Some(Error::Cancelled { .. })) => {}
            (peer, own) => panic!("round {round}: peer {peer:?}, own {own:?}"),
        }
        drop(d0);
    }
}

fn a_stream_gets_its_part_of_what_its_peers_have_done_before_it_goes(driver: &Driver) {
    for _ in 0..10 {
        let machine = driver.machine();
        let opened = [0, 1, 2].map(|rank| {
            let (device, stream) = open(&machine, rank, "comm");
            let v = floats(&device, "v", 2);
            stream.launch(set(&v, rank as f32 + 1.0)).unwrap();
            let meeting = machine.meeting("g", &[2, 0, 1], rank).unwrap();
            let accesses = vec![Access::update(&v)];
            stream.joint(&meeting, Exchange::AllReduce(Reduce::Sum), "test", accesses).unwrap();
            (device, stream, v)
        });
        // On the simulator the others' parts may still be open then.
        opened[0].1.synchronize().unwrap();
        // All go before anybody looks: a look would let the simulator deliver what is open.
        let left = opened.map(|(device, stream, v)| {
            drop(stream);
            (device, v)
        });
        for (device, v) in left {
            assert!(device.error().is_none(), "{:?}", device.error());
            expect_values(&device.stream("look").unwrap(), &v, &[6.0; 2]);
        }
    }
}

fn a_dropped_stream_is_not_waited_for_any_more(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, e) = (device.stream("two").unwrap(), device.event("e"));
    stuck(&one);
    one.record(&e).unwrap();
    two.wait(&e, Why("test")).unwrap();
    drop(two);
    let (three, begin) = (device.stream("three").unwrap(), Instant::now());
    three.synchronize().unwrap();
    drop(one);
    assert!(matches!(device.synchronize(), Err(Error::Cancelled { queued: 1, .. })));
    assert!(begin.elapsed() < LIMIT);
}

fn an_operation_may_own_the_last_handle_of_a_stream(driver: &Driver) {
    for _ in 0..50 {
        let machine = driver.machine();
        let (device, one) = open(&machine, 0, "one");
        let (two, v) = (device.stream("two").unwrap(), floats(&device, "v", 1));
        two.launch(set(&v, 1.0)).unwrap();
        two.synchronize().unwrap();
        let owned = Mutex::new(Some((two, device.event("e"), device)));
        let op = Op::host("own", "test", Vec::new(), move |_| {
            drop(owned.lock().unwrap().take());
            Ok(())
        });
        one.launch(op).unwrap();
        one.launch(step(&v, 1.0, 1.0)).unwrap();
        assert_eq!(one.download::<f32>(&v).unwrap().wait().unwrap(), [2.0]);
    }
}

fn thrown_away_operations_let_go_of_what_they_own(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let owned = Arc::new(());
    stuck(&stream);
    for _ in 0..3 {
        let owned = owned.clone();
        let use_it = move |_: &mut Args<'_>| {
            let _ = &owned;
            Ok(())
        };
        stream.launch(Op::host("own", "test", Vec::new(), use_it)).unwrap();
    }
    drop(stream);
    drop(device);
    let begin = Instant::now();
    // A worker may still hold the stream for a moment.
    while Arc::strong_count(&owned) > 1 {
        assert!(begin.elapsed() < LIMIT, "{} operations were kept", Arc::strong_count(&owned) - 1);
        std::thread::yield_now();
    }
}

/// Launches on the stream that its owner ran on.
struct Parting(Stream, Counter);

impl Drop for Parting {
    fn drop(&mut self) {
        self.0.launch(self.1.op(Vec::new())).unwrap();
    }
}

fn what_an_operation_owns_may_submit_when_it_goes(driver: &Driver) {
    let machine = driver.machine();
    let (ended, end) = mpsc::channel();
    let submit = std::thread::spawn(move || {
        let (device, stream) = open(&machine, 0, "compute");
        let (parting, filling) = (Counter::default(), Counter::default());
        for _ in 0..30 {
            let owned = Parting(stream.clone(), parting.clone());
            let own = move |_: &mut Args<'_>| {
                let _ = &owned;
                Ok(())
            };
            stream.launch(Op::host("own", "test", Vec::new(), own)).unwrap();
            // Until it has run and goes with the next submission.
            for _ in 0..20 {
                std::thread::sleep(Duration::from_micros(20));
                stream.launch(filling.op(Vec::new())).unwrap();
            }
        }
        // Each lets go of what a worker has handed back by then, and waits for what that submitted. A worker may be late.
        let begin = Instant::now();
        while (parting.get() < 30 || filling.get() < 600) && begin.elapsed() < LIMIT / 2 {
            stream.synchronize().unwrap();
        }
        ended.send((parting.get(), filling.get())).unwrap();
        drop(device);
    });
    assert_eq!(end.recv_timeout(LIMIT).expect("a submission waits for itself"), (30, 600));
    submit.join().unwrap();
}

fn dropping_waits_for_the_operation_that_runs(driver: &Driver) {
    for _ in 0..20 {
        let (device, stream) = open(&driver.machine(), 0, "compute");
        let done = Arc::new(AtomicBool::new(false));
        let (op, begun, go) = held(Vec::new());
        stream.launch(op).unwrap();
        begun.recv().unwrap();
        let release = std::thread::spawn({
            let done = done.clone();
            move || {
                std::thread::sleep(Duration::from_millis(3));
                done.store(true, Ordering::SeqCst);
                go.send(()).unwrap();
            }
        });
        drop(stream);
        assert!(done.load(Ordering::SeqCst), "dropped while an operation was running");
        assert!(device.error().is_none(), "nothing was thrown away");
        release.join().unwrap();
    }
}

fn nothing_runs_behind_work_that_was_thrown_away(driver: &Driver) {
    for _ in 0..40 {
        let (device, one) = open(&driver.machine(), 0, "one");
        let (two, e) = (device.stream("two").unwrap(), device.event("e"));
        let (cancelled, behind) = (Counter::default(), Counter::default());
        let (op, begun, go) = held(Vec::new());
        one.launch(op).unwrap();
        (0..3).for_each(|_| one.launch(cancelled.op(Vec::new())).unwrap());
        one.record(&e).unwrap();
        two.wait(&e, Why("test")).unwrap();
        two.launch(behind.op(Vec::new())).unwrap();
        begun.recv().unwrap();
        let dropper = std::thread::spawn(move || drop(one));
        std::thread::sleep(Duration::from_millis(1));
        go.send(()).unwrap();
        dropper.join().unwrap();
        match device.error() {
            // The drop came too late to cancel anything.
            None => assert_eq!(cancelled.get(), 3),
            Some(error) => {
                assert!(matches!(error, Error::Cancelled { .. }), "{error}");
                assert!(two.synchronize().is_err());
                drop(two);
                assert_eq!(behind.get(), 0, "ran behind {} of 3 operations", cancelled.get());
            }
        }
    }
}
