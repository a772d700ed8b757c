//! Forgotten waits: where two operations meet on the same bytes, the second is refused and told; where they do not
//! happen to meet, the simulator shows the wrong order.

use std::{
    collections::BTreeSet,
    sync::{Arc, Barrier},
};

use device::*;

use super::{
    drivers::{Driver, sim},
    work::{Counter, copy, floats, held, open, set, step},
};

conformance! {
    blocking:
        readers_at_the_same_time_are_none,
        columns_of_one_matrix_are_none,
        memory_of_different_ranks_never_races,
        the_order_of_an_event_is_no_race;
    blocking_on_hosts:
        two_writers_at_the_same_time_are_a_race,
        a_reader_and_a_writer_at_the_same_time_are_a_race,
        rows_that_share_columns_are_a_race,
        a_joint_operation_races_with_an_operation
}

/// Launches `first`, and `second` while it runs. The error names the race, if there is one.
fn meet(device: &Device, first: Vec<Access>, second: Vec<Access>) -> Option<Error> {
    let (one, two) = (device.stream("one").unwrap(), device.stream("two").unwrap());
    let (op, begun, go) = held(first);
    one.launch(op).unwrap();
    begun.recv().unwrap();
    let ran = Counter::default();
    two.launch(ran.op(second)).unwrap();
    let error = two.synchronize().err();
    go.send(()).unwrap();
    assert_eq!(ran.get(), usize::from(error.is_none()), "the second of a race must not run");
    let end = one.synchronize();
    assert_eq!(end.is_err(), error.is_some(), "a race is sticky on the device");
    error
}

#[track_caller]
fn is_race(error: Option<Error>, label: &str) {
    let error = error.expect("a race");
    let text = format!(
        "race on '{label}': count@test (rank 2, stream 'two', #0) started while held@test (rank 2, stream 'one', #0) \
         was running; order them with an event and a wait"
    );
    assert_eq!(error.to_string(), text);
}

fn two_writers_at_the_same_time_are_a_race(driver: &Driver) {
    for (first, second) in [(Mode::Write, Mode::Write), (Mode::Update, Mode::Write), (Mode::Update, Mode::Update)] {
        let (device, _stream) = open(&driver.machine(), 2, "main");
        let view = floats(&device, "h0.act", 8);
        let access = |mode| vec![Access { view: view.clone(), mode }];
        is_race(meet(&device, access(first), access(second)), "h0.act");
    }
}

fn a_reader_and_a_writer_at_the_same_time_are_a_race(driver: &Driver) {
    for write in [Mode::Write, Mode::Update] {
        for writer_first in [true, false] {
            let (device, _stream) = open(&driver.machine(), 2, "main");
            let view = floats(&device, "x", 8);
            let (r, w) = (vec![Access::read(&view)], vec![Access { view: view.flat(7..8).unwrap(), mode: write }]);
            let (first, second) = if writer_first { (w, r) } else { (r, w) };
            is_race(meet(&device, first, second), "x");
        }
    }
}

fn readers_at_the_same_time_are_none(driver: &Driver) {
    let (device, _stream) = open(&driver.machine(), 2, "main");
    let view = floats(&device, "x", 8);
    assert!(meet(&device, vec![Access::read(&view)], vec![Access::read(&view)]).is_none());
}

fn columns_of_one_matrix_are_none(driver: &Driver) {
    let (device, main) = open(&driver.machine(), 0, "main");
    let m = device.alloc("qkv", &[50, 6], DType::F32, MemoryKind::Other).unwrap();
    let both = Arc::new(Barrier::new(2));
    let fill = |columns: std::ops::Range<usize>, value: f32| {
        let (stream, both) = (device.stream("s").unwrap(), both.clone());
        let op = Op::host("fill", "test", vec![Access::write(&m.columns(columns).unwrap())], move |args| {
            // Both are inside at the same time.
            both.wait();
            let mut rows = args.rows_mut::<f32>(0)?;
            (0..rows.len()).for_each(|i| rows.row_mut(i).fill(value));
            Ok(())
        });
        stream.launch(op).unwrap();
        stream
    };
    let streams = [fill(0..4, 1.0), fill(4..6, 2.0)];
    streams.iter().for_each(|s| s.synchronize().unwrap());
    let got = main.download::<f32>(&m).unwrap().wait().unwrap();
    assert_eq!(got, [1.0, 1.0, 1.0, 1.0, 2.0, 2.0].repeat(50));
}

fn rows_that_share_columns_are_a_race(driver: &Driver) {
    let (device, _stream) = open(&driver.machine(), 2, "main");
    let m = device.alloc("m", &[4, 6], DType::F32, MemoryKind::Other).unwrap();
    let (left, row) = (m.columns(0..2).unwrap(), m.rows(3..4).unwrap());
    is_race(meet(&device, vec![Access::write(&left)], vec![Access::read(&row)]), "m");
}

fn memory_of_different_ranks_never_races(driver: &Driver) {
    let machine = driver.machine();
    let both = Arc::new(Barrier::new(2));
    let ranks = [0, 1].map(|rank| {
        let (device, stream) = open(&machine, rank, "main");
        let (view, both) = (floats(&device, "x", 8), both.clone());
        let op = Op::host("fill", "test", vec![Access::write(&view)], move |_| {
            both.wait();
            Ok(())
        });
        stream.launch(op).unwrap();
        stream
    });
    ranks.iter().for_each(|s| s.synchronize().unwrap());
}

fn a_joint_operation_races_with_an_operation(driver: &Driver) {
    let machine = driver.machine();
    let (zero, one) = open(&machine, 0, "main");
    let (other, far) = open(&machine, 1, "main");
    let two = zero.stream("comm").unwrap();
    let (x, y) = (floats(&zero, "x", 4), floats(&other, "y", 4));
    let (op, begun, go) = held(vec![Access::write(&x)]);
    one.launch(op).unwrap();
    begun.recv().unwrap();
    let meeting = |rank| machine.meeting("dp", &[1, 0], rank).unwrap();
    let sum = Exchange::AllReduce(Reduce::Sum);
    two.joint(&meeting(0), sum, "bucket 3", vec![Access::update(&x)]).unwrap();
    far.joint(&meeting(1), sum, "bucket 3", vec![Access::update(&y)]).unwrap();
    let (own, peer) = (two.synchronize().unwrap_err(), far.synchronize().unwrap_err());
    go.send(()).unwrap();
    let Error::Race { label, first, second } = &own else { panic!("{own}") };
    let names = (&label[..], first.name, second.name, &second.site[..], &second.stream[..]);
    assert_eq!(names, ("x", "held", "all_reduce", "bucket 3", "comm"));
    let Error::PeerGone { rank: 0, group, how: Departure::Failed(text), .. } = &peer else { panic!("{peer}") };
    assert_eq!((&group[..], text), ("dp", &own.chain()));
}

fn the_order_of_an_event_is_no_race(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let two = device.stream("two").unwrap();
    let (x, e, f) = (floats(&device, "x", 4), device.event("e"), device.event("f"));
    for i in 0..300 {
        one.launch(set(&x, i as f32)).unwrap();
        one.record(&e).unwrap();
        two.wait(&e, Why("test")).unwrap();
        two.launch(step(&x, 2.0, 1.0)).unwrap();
        two.record(&f).unwrap();
        one.wait(&f, Why("test")).unwrap();
    }
    device.synchronize().unwrap();
}

/// Stream two copies what stream one writes.
fn hand_over(machine: &Machine) -> Result<u32, Error> {
    let (device, one) = open(machine, 0, "one");
    let (two, e) = (device.stream("two").unwrap(), device.event("e"));
    let (x, y) = (floats(&device, "x", 1), floats(&device, "y", 1));
    one.launch(set(&x, 1.0))?;
    one.synchronize()?;
    one.launch(set(&x, 2.0))?;
    one.record(&e)?;
    two.wait(&e, Why("test.handed_over"))?;
    two.launch(copy(&x, &y))?;
    device.synchronize()?;
    Ok(two.download::<f32>(&y)?.wait()?[0] as u32)
}

#[test]
fn a_dropped_wait_shows_under_some_seed_and_a_kept_one_under_none() {
    let run = |dropped: bool| -> BTreeSet<u32> {
        let under = |seed: u64| {
            let machine = sim(seed).machine();
            if dropped {
                machine.drop_waits(Why("test.handed_over"));
            }
            machine.drop_waits(Why("test.some_other"));
            hand_over(&machine).unwrap()
        };
        (0..30).map(under).collect()
    };
    assert_eq!(run(false), BTreeSet::from([2]));
    assert_eq!(run(true), BTreeSet::from([1, 2]));
}

#[test]
fn a_search_finds_both_results_of_a_dropped_wait() {
    let run = |dropped: bool| {
        let program = |machine: &Machine| {
            if dropped {
                machine.drop_waits(Why("test.handed_over"));
            }
            hand_over(machine)
        };
        explore(100, &Options::default(), program).unwrap()
    };
    let (kept, dropped) = (run(false), run(true));
    assert!(kept.complete && dropped.complete);
    assert_eq!((kept.results.into_keys().collect::<Vec<_>>(), kept.runs), (vec![2], 1));
    assert_eq!(dropped.results.into_keys().collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn the_trace_tells_which_wait_was_dropped() {
    let machine = sim(0).machine();
    machine.drop_waits(Why("test.handed_over"));
    machine.trace_start();
    hand_over(&machine).unwrap();
    let text = machine.trace_stop().to_text();
    assert!(text.contains("test.handed_over Dropped"), "{text}");
}
