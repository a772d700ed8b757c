//! Joint operations whose members do not fit: refused at once where one member can tell, else told by name.

use device::*;

use super::{
    drivers::Driver,
    ranks::run_ranks,
    work::{expect_values, floats, open, set},
};

conformance! {
    every:
        sizes_that_do_not_fit_are_refused_at_submission,
        accesses_that_do_not_fit_are_refused_at_submission,
        exchanges_of_one_call_that_touch_each_other_are_refused,
        a_refused_call_takes_no_place_in_the_sequence,
        members_that_ask_for_different_things_are_all_told,
        a_group_is_opened_with_one_list_by_its_members_only
}

fn pair(machine: &Machine) -> (Device, Stream, Meeting) {
    let (device, stream) = open(machine, 0, "comm");
    let meeting = machine.meeting("tp", &[0, 1], 0).unwrap();
    (device, stream, meeting)
}

fn sizes_that_do_not_fit_are_refused_at_submission(driver: &Driver) {
    let machine = driver.machine();
    let (device, stream, meeting) = pair(&machine);
    let (three, six, five) = (floats(&device, "x", 3), floats(&device, "y", 6), floats(&device, "z", 5));
    let refuse = |exchange: Exchange, from: &View, to: &View| {
        let error = stream.joint(&meeting, exchange, "h0.qkv", vec![Access::read(from), Access::write(to)]);
        let error = error.unwrap_err();
        assert!(matches!(error, Error::Shapes { .. }), "{exchange:?}: {error}");
        error.to_string()
    };
    assert_eq!(
        refuse(Exchange::AllGather, &three, &five),
        "all_gather@h0.qkv: source is [3] and destination is [5]; destination = group size x source"
    );
    refuse(Exchange::AllGather, &six, &three);
    refuse(Exchange::ReduceScatter(Reduce::Sum), &five, &three);
    refuse(Exchange::AllReduce(Reduce::Avg), &five, &three);
    refuse(Exchange::AllToAll, &six, &five);
    refuse(Exchange::AllToAll, &three, &floats(&device, "w", 3));
    // Overlapping ends, but not the member's own part.
    refuse(Exchange::AllGather, &six.flat(3..6).unwrap(), &six);
    refuse(Exchange::ReduceScatter(Reduce::Sum), &six, &six.flat(1..4).unwrap());
    refuse(Exchange::AllReduce(Reduce::Sum), &six.flat(0..3).unwrap(), &six.flat(2..5).unwrap());
    refuse(Exchange::AllReduce(Reduce::Sum), &six, &six);
    let apart = refuse(Exchange::AllReduce(Reduce::Sum), &six.flat(0..4).unwrap(), &six.flat(2..6).unwrap());
    assert!(apart.ends_with("give one update of the same view, or a destination apart"), "{apart}");
    let exchanged = refuse(Exchange::AllToAll, &six, &six);
    assert!(exchanged.ends_with("overwritten before they are sent: give a destination apart"), "{exchanged}");
    assert!(device.error().is_none());
}

fn accesses_that_do_not_fit_are_refused_at_submission(driver: &Driver) {
    let machine = driver.machine();
    let (device, stream, meeting) = pair(&machine);
    let of_three = machine.meeting("cp", &[2, 0, 1], 0).unwrap();
    let (x, y) = (floats(&device, "x", 4), floats(&device, "y", 4));
    let m = device.alloc("m", &[2, 4], DType::F32, MemoryKind::Other).unwrap();
    let i = device.alloc("i", &[4], DType::I32, MemoryKind::Other).unwrap();
    let (read, write, update) = (Access::read(&x), Access::write(&y), Access::update(&x));
    let refuse = |meeting: &Meeting, exchange: Exchange, accesses: &[Access]| {
        let error = stream.joint(meeting, exchange, "test", accesses.to_vec()).unwrap_err();
        assert!(matches!(error, Error::Setting { .. }), "{exchange:?}: {error}");
    };
    refuse(&meeting, Exchange::Barrier, std::slice::from_ref(&read));
    refuse(&meeting, Exchange::AllGather, std::slice::from_ref(&read));
    refuse(&meeting, Exchange::AllReduce(Reduce::Sum), &[]);
    refuse(&meeting, Exchange::AllReduce(Reduce::Sum), &[read.clone(), write.clone(), write.clone()]);
    refuse(&meeting, Exchange::AllReduce(Reduce::Sum), &[read.clone(), update.clone()]);
    refuse(&meeting, Exchange::Broadcast { root: 0 }, std::slice::from_ref(&write));
    refuse(&meeting, Exchange::Broadcast { root: 1 }, std::slice::from_ref(&read));
    refuse(&meeting, Exchange::SendRecv, std::slice::from_ref(&write));
    refuse(&of_three, Exchange::SendRecv, std::slice::from_ref(&write));
    // One member's parts would be overwritten before they are sent.
    refuse(&meeting, Exchange::AllToAll, std::slice::from_ref(&update));
    // Beyond the group, whatever is brought.
    for access in [&read, &write] {
        let error = stream.joint(&of_three, Exchange::Broadcast { root: 3 }, "h1", vec![access.clone()]).unwrap_err();
        assert_eq!(error.to_string(), "broadcast@h1: the root is place 3 of a group of 3; places are 0..3");
    }
    let strided = Access::read(&m.columns(0..2).unwrap());
    let error = stream.joint(&meeting, Exchange::AllReduce(Reduce::Sum), "test", vec![strided, write.clone()]);
    assert!(matches!(error, Err(Error::Strided { .. })));
    let error = stream.joint(&meeting, Exchange::AllReduce(Reduce::Sum), "test", vec![Access::read(&i), write]);
    assert!(matches!(error, Err(Error::ElementType { have: DType::F32, need: DType::I32, .. })));
    let average = vec![Access::update(&i)];
    let error = stream.joint(&meeting, Exchange::AllReduce(Reduce::Avg), "test", average).unwrap_err();
    assert_eq!(error.to_string(), "all_reduce@test: source is i32, needs f32");
    let halves = device.alloc("halves", &[4], DType::I16, MemoryKind::Other).unwrap();
    let halves = vec![Access::update(&halves)];
    let error = stream.joint(&meeting, Exchange::AllReduce(Reduce::Sum), "test", halves).unwrap_err();
    assert_eq!(error.to_string(), "all_reduce@test: source is i16, needs i32");
    assert!(device.error().is_none());
}

fn a_refused_call_takes_no_place_in_the_sequence(driver: &Driver) {
    let machine = driver.machine();
    let (device, stream, meeting) = pair(&machine);
    let (other_device, other) = open(&machine, 1, "comm");
    let other_meeting = machine.meeting("tp", &[0, 1], 1).unwrap();
    let (x, y) = (floats(&device, "x", 2), floats(&other_device, "y", 2));
    stream.joint(&meeting, Exchange::SendRecv, "test", Vec::new()).unwrap_err();
    stream.launch(set(&x, 3.0)).unwrap();
    stream.joint(&meeting, Exchange::SendRecv, "test", vec![Access::read(&x)]).unwrap();
    other.joint(&other_meeting, Exchange::SendRecv, "test", vec![Access::write(&y)]).unwrap();
    expect_values(&other, &y, &[3.0; 2]);
    stream.synchronize().unwrap();
}

fn members_that_ask_for_different_things_are_all_told(driver: &Driver) {
    type Ask = fn(u32, &Device) -> (Exchange, Vec<Access>);
    let cases: [(Ask, &str); 5] = [
        (
            |rank, d| (Exchange::AllReduce(Reduce::Sum), vec![Access::update(&floats(d, "x", 4 + rank as usize / 2))]),
            "rank 2 asks all_reduce(Sum) of 5 f32; rank 0 asks all_reduce(Sum) of 4 f32; \
             rank 1 asks all_reduce(Sum) of 4 f32",
        ),
        (
            |rank, d| {
                let kind = if rank == 1 { Reduce::Max } else { Reduce::Sum };
                (Exchange::AllReduce(kind), vec![Access::update(&floats(d, "x", 4))])
            },
            "rank 2 asks all_reduce(Sum) of 4 f32; rank 0 asks all_reduce(Sum) of 4 f32; \
             rank 1 asks all_reduce(Max) of 4 f32",
        ),
        (
            |rank, d| {
                let dtype = if rank == 0 { DType::Bf16 } else { DType::F32 };
                let v = d.alloc("x", &[4], dtype, MemoryKind::Other).unwrap();
                (Exchange::AllReduce(Reduce::Sum), vec![Access::update(&v)])
            },
            "rank 2 asks all_reduce(Sum) of 4 f32; rank 0 asks all_reduce(Sum) of 4 bf16; \
             rank 1 asks all_reduce(Sum) of 4 f32",
        ),
        (
            |rank, d| match rank {
                0 => (Exchange::Barrier, Vec::new()),
                _ => (Exchange::AllGather, vec![Access::read(&floats(d, "x", 1)), Access::write(&floats(d, "y", 3))]),
            },
            "rank 2 asks all_gather of 1 f32; rank 0 asks barrier; rank 1 asks all_gather of 1 f32",
        ),
        (
            |rank, d| {
                let root = rank % 2;
                let x = floats(d, "x", 3);
                // Place 0 is rank 2.
                (Exchange::Broadcast { root }, vec![if rank == 2 { Access::read(&x) } else { Access::write(&x) }])
            },
            "rank 2 asks broadcast(root 0) of 3 f32; rank 0 asks broadcast(root 0) of 3 f32; \
             rank 1 asks broadcast(root 1) of 3 f32",
        ),
    ];
    for (ask, want) in cases {
        let machine = driver.machine();
        let ended = run_ranks(&machine, &[0, 1, 2], |device| {
            let stream = device.stream("comm")?;
            let meeting = device.machine().meeting("dp", &[2, 0, 1], device.rank())?;
            stream.joint(&meeting, Exchange::Barrier, "first", Vec::new())?;
            let (exchange, accesses) = ask(device.rank(), device);
            stream.joint(&meeting, exchange, "second", accesses)?;
            stream.synchronize()
        });
        for error in ended {
            let error = error.unwrap().unwrap_err();
            assert!(matches!(error, Error::Disagree { seq: 1, .. }), "{error}");
            assert_eq!(error.to_string(), format!("members of group 'dp' disagree at #1: {want}"));
        }
    }
}

fn a_group_is_opened_with_one_list_by_its_members_only(driver: &Driver) {
    let machine = driver.machine();
    let open = |members: &[u32], rank| machine.meeting("dp", members, rank).map(drop);
    let _first = machine.meeting("dp", &[4, 2], 4).unwrap();
    open(&[4, 2], 2).unwrap();
    let text = open(&[2, 4], 2).unwrap_err().to_string();
    assert_eq!(text, "group 'dp' has members [4, 2]; rank 2 opens it with [2, 4]: give all members the same list");
    assert!(matches!(open(&[4], 4), Err(Error::Members { .. })));
    for (members, rank) in [(&[4, 2][..], 3), (&[], 0), (&[5, 7], 4)] {
        let text = open(members, rank).unwrap_err().to_string();
        let want = format!(
            "rank {rank} opens group 'dp' of ranks {members:?}: only members open a group, so add it or leave it"
        );
        assert_eq!(text, want);
    }
    for (name, members, rank) in [("dp", &[4, 2, 2][..], 4), ("new", &[3, 2, 1, 2], 1), ("new", &[2, 2], 6)] {
        let text = machine.meeting(name, members, rank).map(drop).unwrap_err().to_string();
        let want = format!("group '{name}' of ranks {members:?} has rank 2 more than once: each member has one place");
        assert_eq!(text, want);
    }
}

fn exchanges_of_one_call_that_touch_each_other_are_refused(driver: &Driver) {
    let machine = driver.machine();
    let (device, stream, meeting) = pair(&machine);
    let (x, y) = (floats(&device, "bucket", 4), floats(&device, "y", 2));
    let sum = |view: &View| (Exchange::AllReduce(Reduce::Sum), vec![Access::update(view)]);
    let gather = |view: &View| (Exchange::AllGather, vec![Access::read(&y), Access::write(view)]);
    let error = stream.joint_all(&meeting, "h0", vec![sum(&y.flat(0..1).unwrap()), sum(&x), gather(&x)]).unwrap_err();
    assert!(matches!(&error, Error::SelfConflict { first: 0, second: 2, .. }), "{error}");
    let error = stream.joint_all(&meeting, "h0", vec![sum(&x), sum(&x.flat(3..4).unwrap())]).unwrap_err();
    assert!(matches!(&error, Error::SelfConflict { first: 0, second: 1, label, .. } if label == "bucket"), "{error}");
    assert!(device.error().is_none());
    stream.synchronize().unwrap();
}
