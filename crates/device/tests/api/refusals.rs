//! What is refused before it is queued: a refusal leaves the stream and the device as they were.

use device::*;

use super::{
    drivers::Driver,
    work::{copy, floats, open, set},
};

conformance! {
    every:
        handles_of_another_rank_are_refused,
        handles_of_another_machine_are_refused_for_the_same_rank,
        accesses_that_conflict_with_each_other_are_refused,
        pieces_that_do_not_overlap_are_one_operations_accesses,
        sixty_four_accesses_are_the_most,
        memory_that_cannot_be_is_refused,
        pieces_that_a_view_does_not_have_are_refused,
        a_machine_counts_the_memory_that_lives
}

#[track_caller]
fn foreign(result: Result<(), Error>, what: &str, owner: u32, used_by: u32) {
    let error = result.unwrap_err();
    let text = format!("{what} belongs to rank {owner} and was used by rank {used_by}; a handle belongs to one device");
    assert_eq!(error.to_string(), text);
}

fn refused_on(stream: &Stream, of: &Device, event: &Event, meeting: &Meeting) {
    let (owner, rank) = (of.rank(), stream.rank());
    let (theirs, mine) = (floats(of, "wte", 2), floats(&stream.device(), "mine", 2));
    foreign(stream.wait(event, Why("test")), "event 'e'", owner, rank);
    foreign(stream.record(event), "event 'e'", owner, rank);
    foreign(stream.launch(set(&theirs, 1.0)), "memory 'wte'", owner, rank);
    foreign(stream.launch(copy(&mine, &theirs)), "memory 'wte'", owner, rank);
    foreign(stream.upload(&theirs, vec![1f32; 2]), "memory 'wte'", owner, rank);
    let own = stream.device().machine().meeting("own", &[rank], rank).unwrap();
    let accesses = vec![Access::update(&theirs)];
    foreign(stream.joint(&own, Exchange::AllReduce(Reduce::Sum), "test", accesses), "memory 'wte'", owner, rank);
    let place = format!("place {} of group 'g'", meeting.place());
    foreign(stream.joint(meeting, Exchange::Barrier, "test", Vec::new()), &place, owner, rank);
    stream.synchronize().unwrap();
}

fn handles_of_another_rank_are_refused(driver: &Driver) {
    let machine = driver.machine();
    let (_zero, stream) = open(&machine, 0, "compute");
    let (one, other) = open(&machine, 1, "compute");
    let e = one.event("e");
    other.record(&e).unwrap();
    refused_on(&stream, &one, &e, &machine.meeting("g", &[0, 1], 1).unwrap());
    other.synchronize().unwrap();
}

fn handles_of_another_machine_are_refused_for_the_same_rank(driver: &Driver) {
    let (here, there) = (driver.machine(), driver.machine());
    let (_device, stream) = open(&here, 3, "compute");
    let (other, other_stream) = open(&there, 3, "compute");
    let e = other.event("e");
    other_stream.record(&e).unwrap();
    refused_on(&stream, &other, &e, &there.meeting("g", &[3], 3).unwrap());
    other_stream.synchronize().unwrap();
}

fn nothing(accesses: Vec<Access>) -> Op {
    Op::host("nothing", "h0.mlp", accesses, |_| Ok(()))
}

fn accesses_that_conflict_with_each_other_are_refused(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let m = device.alloc("qkv", &[4, 6], DType::F32, MemoryKind::Other).unwrap();
    let other = floats(&device, "other", 4);
    let left = m.columns(0..4).unwrap();
    for (a, b) in [
        (Access::read(&m), Access::write(&left)),
        (Access::write(&left), Access::update(&m.columns(3..6).unwrap())),
        (Access::update(&m), Access::update(&m)),
        (Access::write(&m.rows(1..2).unwrap()), Access::read(&left)),
    ] {
        let error = stream.launch(nothing(vec![Access::read(&other), a, b])).unwrap_err();
        assert_eq!(
            error.to_string(),
            "nothing@h0.mlp: accesses 1 and 2 both touch 'qkv' and one writes; declare one update, or make it two \
             operations"
        );
    }
    stream.launch(nothing(vec![Access::read(&m), Access::read(&left)])).unwrap();
    stream.synchronize().unwrap();
}

fn pieces_that_do_not_overlap_are_one_operations_accesses(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let m = device.alloc("qkv", &[4, 6], DType::F32, MemoryKind::Other).unwrap();
    let columns = [0..2, 2..4, 4..6].map(|c| Access::write(&m.columns(c).unwrap()));
    stream.launch(nothing(columns.to_vec())).unwrap();
    let rows = [0..1, 1..4].map(|r| Access::update(&m.rows(r).unwrap()));
    stream.launch(nothing(rows.to_vec())).unwrap();
    stream.synchronize().unwrap();
}

fn sixty_four_accesses_are_the_most(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let v = floats(&device, "v", 100);
    let many = |n: usize| (0..n).map(|i| Access::update(&v.flat(i..i + 1).unwrap())).collect::<Vec<_>>();
    let all = Op::host("all", "test", many(64), |args| {
        (0..64).try_for_each(|i| -> Result<(), OpError> {
            args.write::<f32>(i)?[0] = i as f32;
            Ok(())
        })
    });
    stream.launch(all).unwrap();
    let error = stream.launch(nothing(many(65))).unwrap_err();
    assert_eq!(error.to_string(), "nothing@h0.mlp: 65 accesses, at most 64 are possible");
    stream.synchronize().unwrap();
}

fn memory_that_cannot_be_is_refused(driver: &Driver) {
    let (device, _stream) = open(&driver.machine(), 0, "compute");
    let alloc = |dims: &[usize]| device.alloc("big", dims, DType::Bf16, MemoryKind::Other);
    for dims in [&[1, 1, 1, 1, 1][..], &[usize::MAX], &[usize::MAX, 2], &[1 << 32, 1 << 32], &[usize::MAX, 8, 0]] {
        let error = alloc(dims).unwrap_err();
        assert!(matches!(&error, Error::Reshape { to, .. } if to == dims), "{dims:?}: {error}");
    }
    let v = alloc(&[2, 3]).unwrap();
    assert!(v.reshape(&[6, usize::MAX, usize::MAX]).is_err());
    assert!(v.reshape(&[3, 2]).is_ok());
    assert!(device.error().is_none());
}

fn pieces_that_a_view_does_not_have_are_refused(driver: &Driver) {
    let (device, _stream) = open(&driver.machine(), 0, "compute");
    let scalar = device.alloc("loss", &[], DType::F32, MemoryKind::Other).unwrap();
    assert_eq!(scalar.numel(), 1);
    for range in [0..0, 0..1] {
        assert!(matches!(scalar.rows(range.clone()), Err(Error::OutOfRange { .. })), "rows {range:?}");
        assert!(matches!(scalar.columns(range.clone()), Err(Error::OutOfRange { .. })), "columns {range:?}");
    }
    let m = device.alloc("m", &[2, 3], DType::F32, MemoryKind::Other).unwrap();
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    let reversed = 2..1;
    for range in [0..3, 2..3, reversed, usize::MAX - 1..usize::MAX] {
        assert!(m.rows(range).is_err());
    }
    assert!(m.columns(0..4).is_err() && m.flat(0..7).is_err());
    assert_eq!(m.rows(2..2).unwrap().numel() + m.columns(3..3).unwrap().numel(), 0);
}

fn a_machine_counts_the_memory_that_lives(driver: &Driver) {
    let (device, _stream) = open(&driver.machine(), 0, "compute");
    let weights = device.alloc("w", &[3, 5], DType::Bf16, MemoryKind::Param).unwrap();
    let grads = device.alloc("g", &[3, 5], DType::F32, MemoryKind::Grad).unwrap();
    let ids = device.alloc("ids", &[7], DType::I32, MemoryKind::Other).unwrap();
    let labels = |d: &Device| d.memory().into_iter().map(|m| (m.id, m.label, m.bytes)).collect::<Vec<_>>();
    assert_eq!(labels(&device), [(0, "w".into(), 30), (1, "g".into(), 60), (2, "ids".into(), 28)]);
    let piece = grads.rows(1..2).unwrap();
    drop((weights, grads, ids));
    // A piece keeps the whole.
    assert_eq!(device.memory_by_kind().into_iter().collect::<Vec<_>>(), [(MemoryKind::Grad, 60)]);
    drop(piece);
    assert!(device.memory().is_empty());
}

#[test]
fn a_machine_without_workers_is_refused() {
    for workers in [0, 1025] {
        let error = Machine::cpu(workers).err().unwrap();
        assert_eq!(error.to_string(), format!("machine setting workers is {workers}, from 1 to 1024"));
    }
}
