//! Operations that fail or panic: the first error stays, everything else goes on without computing.

use std::error::Error as _;

use device::*;

use super::{
    drivers::Driver,
    ranks::run_ranks,
    work::{Counter, Gate, failing, floats, op_of, open, set},
};

conformance! {
    every:
        a_healthy_device_has_no_error;
    computing:
        a_failed_operation_is_named_and_stays,
        a_panic_is_an_error_with_its_text,
        the_first_failure_wins,
        what_follows_a_failure_does_not_run_on_any_stream,
        events_complete_behind_a_failure,
        a_failed_device_refuses_new_work,
        other_devices_of_the_machine_go_on,
        memory_is_reached_only_as_declared,
        a_failed_rank_takes_its_groups_with_it_and_stays_the_root,
        joint_operations_complete_behind_a_failure
}

fn a_healthy_device_has_no_error(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    stream.launch(set(&floats(&device, "v", 1), 1.0)).unwrap();
    device.synchronize().unwrap();
    assert!(device.error().is_none());
}

fn a_failed_operation_is_named_and_stays(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 7, "backward");
    stream.launch(set(&floats(&device, "v", 1), 1.0)).unwrap();
    stream.launch(failing("h3.mlp", "the loss is NaN")).unwrap();
    let error = stream.synchronize().unwrap_err();
    let want = OpRef { name: "fail", site: "h3.mlp".into(), rank: 7, stream: "backward".into(), seq: 1, node: None };
    assert_eq!(op_of(&error), &want);
    assert_eq!(error.chain(), "fail@h3.mlp (rank 7, stream 'backward', #1) failed: the loss is NaN");
    assert_eq!(error.source().unwrap().to_string(), "the loss is NaN");
    for again in [stream.synchronize().unwrap_err(), device.synchronize().unwrap_err(), device.error().unwrap()] {
        assert_eq!(op_of(&again), &want);
    }
}

fn a_panic_is_an_error_with_its_text(driver: &Driver) {
    let machine = driver.machine();
    let fixed = Op::host("fixed", "a", Vec::new(), |_| panic!("a fixed text"));
    let made = Op::host("made", "b", Vec::new(), |args| panic!("{} accesses", args.len()));
    let odd = Op::host("odd", "c", Vec::new(), |_| std::panic::panic_any(5));
    for (rank, op, text) in [(0, fixed, "a fixed text"), (1, made, "0 accesses"), (2, odd, "a value that is no text")] {
        let (_device, stream) = open(&machine, rank, "compute");
        stream.launch(op).unwrap();
        let error = stream.synchronize().unwrap_err();
        assert!(matches!(&error, Error::Panicked { message, .. } if message == text), "{error}");
        assert_eq!((op_of(&error).rank, op_of(&error).seq), (rank, 0));
    }
}

fn the_first_failure_wins(driver: &Driver) {
    let (device, one) = open(&driver.machine(), 0, "one");
    let (two, e) = (device.stream("two").unwrap(), device.event("e"));
    one.launch(failing("first", "first")).unwrap();
    // Submitting may be refused from here on, and what is submitted all the same must not win.
    let _ = one.launch(failing("second", "second"));
    let _ = one.record(&e);
    let _ = two.wait(&e, Why("test"));
    let _ = two.launch(failing("third", "third"));
    assert_eq!(op_of(&device.synchronize().unwrap_err()).site, "first");
    assert_eq!(op_of(&one.synchronize().unwrap_err()).site, "first");
    assert_eq!(op_of(&two.synchronize().unwrap_err()).site, "first");
}

/// A program that is submitted before its first operation can fail.
fn submitted_whole(stream: &Stream, program: impl FnOnce()) {
    let gate = Gate::before(stream);
    program();
    gate.open();
}

fn what_follows_a_failure_does_not_run_on_any_stream(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, e) = (device.stream("two").unwrap(), device.event("e"));
    let (before, behind) = (Counter::default(), Counter::default());
    submitted_whole(&one, || {
        one.launch(before.op(Vec::new())).unwrap();
        one.launch(failing("here", "it fails")).unwrap();
        one.record(&e).unwrap();
        two.wait(&e, Why("test")).unwrap();
        for stream in [&one, &two] {
            (0..5).for_each(|_| stream.launch(behind.op(Vec::new())).unwrap());
        }
    });
    let error = two.synchronize().unwrap_err();
    assert_eq!(op_of(&error).site, "here");
    drop((one, two));
    assert_eq!((before.get(), behind.get()), (1, 0));
    assert_eq!(op_of(&device.error().unwrap()).site, "here", "dropping the streams must not hide the root");
}

fn events_complete_behind_a_failure(driver: &Driver) {
    let machine = driver.machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, e, f) = (device.stream("two").unwrap(), device.event("e"), device.event("f"));
    submitted_whole(&one, || {
        one.launch(failing("here", "it fails")).unwrap();
        one.record(&e).unwrap();
        two.wait(&e, Why("test")).unwrap();
        two.record(&f).unwrap();
    });
    assert_eq!(op_of(&f.synchronize().unwrap_err()).site, "here");
    assert!(e.is_done() && f.is_done());
}

fn a_failed_device_refuses_new_work(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let (e, v) = (device.event("e"), floats(&device, "v", 1));
    stream.record(&e).unwrap();
    stream.launch(failing("here", "it fails")).unwrap();
    stream.synchronize().unwrap_err();
    let refused = [
        stream.launch(set(&v, 1.0)).unwrap_err(),
        stream.record(&e).unwrap_err(),
        stream.wait(&e, Why("test")).unwrap_err(),
        stream.upload(&v, vec![1f32]).unwrap_err(),
        stream.download::<f32>(&v).err().unwrap(),
        device.stream("more").err().unwrap(),
        device.alloc("more", &[1], DType::F32, MemoryKind::Other).err().unwrap(),
    ];
    refused.iter().for_each(|error| assert_eq!(op_of(error).site, "here"));
}

fn other_devices_of_the_machine_go_on(driver: &Driver) {
    let machine = driver.machine();
    let (_zero, bad) = open(&machine, 0, "compute");
    let (one, good) = open(&machine, 1, "compute");
    bad.launch(failing("here", "it fails")).unwrap();
    bad.synchronize().unwrap_err();
    let v = floats(&one, "v", 1);
    good.launch(set(&v, 4.0)).unwrap();
    assert_eq!(good.download::<f32>(&v).unwrap().wait().unwrap(), [4.0]);
}

fn memory_is_reached_only_as_declared(driver: &Driver) {
    let machine = driver.machine();
    type Body = fn(&mut Args<'_>) -> Result<(), OpError>;
    let cases: [(Body, ArgError); 7] = [
        (|a| Ok(a.read::<f32>(3).map(drop)?), ArgError::Index { index: 3, have: 3 }),
        (|a| Ok(a.read::<i32>(0).map(drop)?), ArgError::DType { index: 0, declared: DType::F32, asked: DType::I32 }),
        (|a| Ok(a.read::<f32>(1).map(drop)?), ArgError::Mode { index: 1, declared: Mode::Update, asked: "read only" }),
        (|a| Ok(a.write::<f32>(0).map(drop)?), ArgError::Mode { index: 0, declared: Mode::Read, asked: "write" }),
        (
            |a| {
                a.write::<f32>(1)?;
                Ok(a.rows_mut::<f32>(1).map(drop)?)
            },
            ArgError::Taken { index: 1 },
        ),
        (|a| Ok(a.write::<f32>(2).map(drop)?), ArgError::Strided { index: 2 }),
        (|a| Ok(a.dtype(9).map(drop)?), ArgError::Index { index: 9, have: 3 }),
    ];
    for (rank, (body, want)) in cases.into_iter().enumerate() {
        let (device, stream) = open(&machine, rank as u32, "compute");
        let (r, u) = (floats(&device, "r", 2), floats(&device, "u", 2));
        let m = device.alloc("m", &[2, 4], DType::F32, MemoryKind::Other).unwrap();
        let accesses = vec![Access::read(&r), Access::update(&u), Access::write(&m.columns(1..3).unwrap())];
        stream.launch(Op::host("reach", "test", accesses, body)).unwrap();
        let error = stream.synchronize().unwrap_err();
        let Error::Failed { source, .. } = &error else { panic!("{error}") };
        assert_eq!(source.downcast_ref(), Some(&want), "{}", error.chain());
    }
}

fn a_failed_rank_takes_its_groups_with_it_and_stays_the_root(driver: &Driver) {
    let machine = driver.machine();
    // 1 waits for 0 and 2 waits for 1, so 2 never meets the rank that failed.
    let ended = run_ranks(&machine, &[0, 1, 2], |device| {
        let stream = device.stream("compute")?;
        let join = |name: &str, members: &[u32]| -> Result<(), Error> {
            let meeting = device.machine().meeting(name, members, device.rank())?;
            stream.joint(&meeting, Exchange::Barrier, "test", Vec::new())
        };
        match device.rank() {
            0 => {
                stream.launch(failing("embed", "token 70000 of 50257"))?;
                join("a", &[1, 0])?;
            }
            1 => {
                join("a", &[1, 0])?;
                join("b", &[2, 1])?;
            }
            _ => join("b", &[2, 1])?,
        }
        stream.synchronize()
    });
    let errors: Vec<Error> = ended.into_iter().map(|e| e.unwrap().unwrap_err()).collect();
    assert_eq!(op_of(&errors[0]).site, "embed");
    assert!(!errors[0].is_echo());
    let cause = errors[0].chain();
    for error in &errors[1..] {
        let Error::PeerGone { rank: 0, how: Departure::Failed(text), .. } = error else { panic!("{error}") };
        assert_eq!(text, &cause);
        assert!(error.is_echo());
    }
}

fn joint_operations_complete_behind_a_failure(driver: &Driver) {
    let machine = driver.machine();
    let ended = run_ranks(&machine, &[0, 1, 2, 3], |device| {
        let stream = device.stream("compute")?;
        let meeting = device.machine().meeting("all", &[3, 1, 0, 2], device.rank())?;
        for i in 0..20 {
            if (i, device.rank()) == (13, 2) {
                stream.launch(failing("step 13", "overflow"))?;
            }
            stream.joint(&meeting, Exchange::Barrier, "test", Vec::new())?;
        }
        stream.synchronize()
    });
    let errors: Vec<Error> = ended.into_iter().map(|e| e.unwrap().unwrap_err()).collect();
    assert_eq!(op_of(&errors[2]).site, "step 13");
    assert_eq!(errors.iter().filter(|e| matches!(e, Error::PeerGone { rank: 2, .. })).count(), 3);
}
