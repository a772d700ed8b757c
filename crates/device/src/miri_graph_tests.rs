//! Launched graphs under Miri: branches, gates, planted races and drops. Small, because Miri is slow.

use crate::*;

fn open(machine: &Machine, rank: u32) -> (Device, Stream, Stream) {
    let device = machine.device(rank).unwrap();
    let (one, two) = (device.stream("one").unwrap(), device.stream("two").unwrap());
    (device, one, two)
}

fn floats(device: &Device, n: usize) -> View {
    device.alloc("v", &[n], DType::F32, MemoryKind::Other).unwrap()
}

fn add(view: &View, value: f32) -> Op {
    Op::host("add", "test", vec![Access::update(view)], move |args| {
        args.write::<f32>(0)?.iter_mut().for_each(|x| *x += value);
        Ok(())
    })
}

fn order(from: &Stream, to: &Stream) {
    let e = from.device().event("e");
    from.record(&e).unwrap();
    to.wait(&e, Why("test")).unwrap();
}

fn executable(origin: &Stream, body: impl FnOnce()) -> Executable {
    origin.begin_capture("g").unwrap();
    body();
    origin.end_capture().unwrap().instantiate().unwrap()
}

#[test]
fn miri_branches_of_a_graph_hand_memory_to_each_other() {
    for machine in [Machine::cpu(1).unwrap(), Machine::cpu(2).unwrap(), Machine::sim(3)] {
        let (device, one, two) = open(&machine, 0);
        let v = floats(&device, 4);
        let (left, right) = (v.flat(0..2).unwrap(), v.flat(2..4).unwrap());
        let exec = executable(&one, || {
            one.launch(add(&v, 1.0)).unwrap();
            order(&one, &two);
            one.launch(add(&left, 2.0)).unwrap();
            two.launch(add(&right, 3.0)).unwrap();
            two.launch(add(&right, 4.0)).unwrap();
            order(&two, &one);
            one.launch(add(&v, 5.0)).unwrap();
        });
        one.upload(&v, vec![0f32; 4]).unwrap();
        order(&one, &two);
        for stream in [&one, &two, &one] {
            stream.launch_graph(&exec).unwrap();
        }
        assert_eq!(one.download::<f32>(&v).unwrap().wait().unwrap(), [24.0, 24.0, 39.0, 39.0]);
    }
}

#[test]
fn miri_joint_operations_and_gates_of_graphs_move_memory_between_ranks() {
    let machine = Machine::cpu(2).unwrap();
    let program = |rank: u32| {
        let (device, one, two) = open(&machine, rank);
        let meeting = machine.meeting("dp", &[1, 0], rank).unwrap();
        let (v, w, landed) = (floats(&device, 2), floats(&device, 2), device.event("landed"));
        one.upload(&v, vec![rank as f32 + 1.0; 2]).unwrap();
        let exec = executable(&one, || {
            let sum = Exchange::AllReduce(Reduce::Sum);
            one.joint(&meeting, sum, "test", vec![Access::update(&v)]).unwrap();
            one.record_external(&landed).unwrap();
        });
        for _ in 0..2 {
            one.launch_graph(&exec).unwrap();
            two.wait(&landed, Why("test.landed")).unwrap();
            let copy = Op::host("copy", "test", vec![Access::read(&v), Access::write(&w)], |args| {
                let from = args.read::<f32>(0)?;
                args.write::<f32>(1)?.copy_from_slice(from);
                Ok(())
            });
            two.launch(copy).unwrap();
            order(&two, &one);
        }
        two.download::<f32>(&w).unwrap().wait().unwrap()
    };
    let both = std::thread::scope(|s| [0, 1].map(|rank| s.spawn(move || program(rank))).map(|t| t.join().unwrap()));
    assert_eq!(both, [[6.0; 2], [6.0; 2]]);
}

/// Nothing orders the two: either one is refused, or they happen one after the other.
#[test]
fn miri_a_planted_race_with_a_graph_is_an_error_or_an_order() {
    for _ in 0..4 {
        let machine = Machine::cpu(2).unwrap();
        let (device, one, two) = open(&machine, 0);
        let v = floats(&device, 8);
        one.upload(&v, vec![0f32; 8]).unwrap();
        order(&one, &two);
        let exec = executable(&one, || (0..3).for_each(|_| one.launch(add(&v, 1.0)).unwrap()));
        one.launch_graph(&exec).unwrap();
        let raced = two.launch(add(&v, 10.0)).is_err();
        match (one.synchronize(), two.synchronize()) {
            (Ok(()), Ok(())) => {
                assert!(!raced);
                assert_eq!(testing::get::<f32>(&v), [13.0; 8]);
            }
            (one, two) => assert!(matches!(one.and(two), Err(Error::Race { .. }))),
        }
    }
}

#[test]
fn miri_a_stream_is_dropped_with_a_launch_under_way() {
    for machine in [Machine::cpu(2).unwrap(), Machine::sim(1)] {
        let (device, one, two) = open(&machine, 0);
        let v = floats(&device, 4);
        one.upload(&v, vec![0f32; 4]).unwrap();
        let exec = executable(&one, || {
            order(&one, &two);
            one.launch(add(&v.flat(0..2).unwrap(), 1.0)).unwrap();
            two.launch(add(&v.flat(2..4).unwrap(), 1.0)).unwrap();
            order(&two, &one);
        });
        (0..3).for_each(|_| one.launch_graph(&exec).unwrap());
        drop(exec);
        drop(one);
        assert!(device.error().is_none_or(|error| matches!(error, Error::Cancelled { .. })));
    }
}
