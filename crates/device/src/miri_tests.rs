//! The core under Miri: hand-offs, claims, arguments, joint operations, planted races, drops. Small, because Miri runs
//! some hundred times slower; what they prove is that no error here is undefined behaviour.

use std::{
    ops::Range,
    sync::{Arc, Barrier, Mutex, mpsc},
};

use crate::{testing::get, *};

fn open(machine: &Machine, rank: u32) -> (Device, Stream) {
    let device = machine.device(rank).unwrap();
    let stream = device.stream("main").unwrap();
    (device, stream)
}

fn floats(device: &Device, n: usize) -> View {
    device.alloc("v", &[n], DType::F32, MemoryKind::Other).unwrap()
}

fn set(view: &View, value: f32) -> Op {
    Op::host("set", "test", vec![Access::write(view)], move |args| {
        args.write::<f32>(0)?.fill(value);
        Ok(())
    })
}

fn add(view: &View, value: f32) -> Op {
    Op::host("add", "test", vec![Access::update(view)], move |args| {
        args.write::<f32>(0)?.iter_mut().for_each(|x| *x += value);
        Ok(())
    })
}

fn machines() -> [Machine; 3] {
    [Machine::cpu(1).unwrap(), Machine::cpu(2).unwrap(), Machine::sim(3)]
}

#[test]
fn miri_streams_hand_memory_to_each_other_through_events() {
    for machine in machines() {
        let (device, one) = open(&machine, 0);
        let (two, e, f, v) = (device.stream("two").unwrap(), device.event("e"), device.event("f"), floats(&device, 4));
        one.launch(set(&v, 0.0)).unwrap();
        for _ in 0..6 {
            one.launch(add(&v, 1.0)).unwrap();
            one.record(&e).unwrap();
            two.wait(&e, Why("test")).unwrap();
            two.launch(add(&v, 2.0)).unwrap();
            two.record(&f).unwrap();
            one.wait(&f, Why("test")).unwrap();
        }
        assert_eq!(one.download::<f32>(&v).unwrap().wait().unwrap(), [18.0; 4]);
    }
}

#[test]
fn miri_rank_threads_submit_while_workers_run() {
    let machine = Machine::cpu(2).unwrap();
    let program = |rank: u32| {
        let (device, stream) = open(&machine, rank);
        let meeting = machine.meeting("dp", &[1, 0], rank).unwrap();
        let v = floats(&device, 2);
        stream.launch(set(&v, rank as f32 + 1.0)).unwrap();
        for _ in 0..3 {
            let accesses = vec![Access::update(&v)];
            stream.joint(&meeting, Exchange::AllReduce(Reduce::Sum), "test", accesses).unwrap();
        }
        stream.download::<f32>(&v).unwrap().wait().unwrap()
    };
    let both = std::thread::scope(|s| [0, 1].map(|rank| s.spawn(move || program(rank))).map(|t| t.join().unwrap()));
    assert_eq!(both, [[12.0; 2], [12.0; 2]]);
}

#[test]
fn miri_arguments_are_typed_strided_and_taken_once() {
    for machine in machines() {
        let (device, stream) = open(&machine, 0);
        let m = device.alloc("m", &[3, 5], DType::F32, MemoryKind::Other).unwrap();
        let half = device.alloc("h", &[6], DType::Bf16, MemoryKind::Other).unwrap();
        let (left, right, tail) = (m.columns(0..2).unwrap(), m.columns(2..5).unwrap(), half.flat(3..6).unwrap());
        stream.upload(&m, (0..15).map(|x| x as f32).collect()).unwrap();
        let accesses = vec![Access::read(&left), Access::update(&right), Access::write(&tail)];
        let mix = Op::host("mix", "test", accesses, |args| {
            let from = args.rows::<f32>(0)?;
            let again = args.rows::<f32>(0)?;
            let mut to = args.rows_mut::<f32>(1)?;
            let low = args.write::<bf16>(2)?;
            for (i, low) in low.iter_mut().enumerate() {
                let sum: f32 = from.row(i).iter().chain(again.row(i)).sum();
                to.row_mut(i).iter_mut().for_each(|x| *x += sum);
                *low = bf16::from_f32(to.row(i)[0]);
            }
            assert!(
                args.rows_mut::<f32>(1).is_err() && args.write::<bf16>(2).is_err() && args.write::<f32>(1).is_err()
            );
            assert!(args.read::<f32>(0).is_err() && args.read::<i32>(0).is_err() && args.rows::<f32>(1).is_err());
            Ok(())
        });
        stream.launch(mix).unwrap();
        let low = stream.download::<bf16>(&tail).unwrap().wait().unwrap();
        assert_eq!(low.iter().map(|x| x.to_f32()).collect::<Vec<_>>(), [4.0, 29.0, 54.0]);
        let all = stream.download::<f32>(&m).unwrap().wait().unwrap();
        assert_eq!(all[5..10], [5.0, 6.0, 29.0, 30.0, 31.0]);
    }
}

#[test]
fn miri_empty_pieces_reach_no_memory() {
    let machine = Machine::cpu(1).unwrap();
    let (device, stream) = open(&machine, 0);
    let m = device.alloc("m", &[2, 3], DType::F32, MemoryKind::Other).unwrap();
    let none = [m.columns(3..3).unwrap(), m.rows(2..2).unwrap(), m.flat(6..6).unwrap(), m.columns(1..1).unwrap()];
    let accesses = none.iter().map(Access::write).chain([Access::update(&m)]).collect();
    let touch = Op::host("touch", "test", accesses, |args| {
        for i in 0..4 {
            let mut rows = args.rows_mut::<f32>(i)?;
            (0..rows.len()).for_each(|r| assert!(rows.row_mut(r).is_empty()));
        }
        args.write::<f32>(4)?.fill(1.0);
        Ok(())
    });
    stream.launch(touch).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(get::<f32>(&m), [1.0; 6]);
}

/// Every member's buffer is one allocation of `len` floats; `accesses` cuts it for the member at a place.
fn exchange(kind: Exchange, n: u32, len: usize, accesses: impl Fn(usize, &View) -> Vec<Access>) -> Vec<Vec<Vec<f32>>> {
    let run = |machine: Machine| {
        let ranks: Vec<u32> = (0..n).rev().collect();
        let members: Vec<(Device, Stream, View)> = ranks
            .iter()
            .enumerate()
            .map(|(place, rank)| {
                let (device, stream) = open(&machine, *rank);
                let v = floats(&device, len);
                stream.upload(&v, (0..len).map(|i| (place * 100 + i) as f32).collect()).unwrap();
                let meeting = machine.meeting("g", &ranks, *rank).unwrap();
                stream.joint(&meeting, kind, "test", accesses(place, &v)).unwrap();
                (device, stream, v)
            })
            .collect();
        members.iter().map(|(_, s, v)| s.download::<f32>(v).unwrap().wait().unwrap()).collect::<Vec<_>>()
    };
    machines().map(run).into_iter().collect()
}

fn cut(view: &View, range: Range<usize>) -> View {
    view.flat(range).unwrap()
}

#[test]
fn miri_joint_operations_copy_and_reduce_in_place() {
    // Several pieces and blocks: both are small under Miri.
    let k = 40;
    for kind in [Reduce::Sum, Reduce::Avg, Reduce::Max] {
        let all = exchange(Exchange::AllReduce(kind), 2, k, |_, v| vec![Access::update(v)]);
        let scattered = exchange(Exchange::ReduceScatter(kind), 3, 3 * k, |place, v| {
            vec![Access::read(v), Access::write(&cut(v, place * k..(place + 1) * k))]
        });
        assert!(all.windows(2).all(|w| w[0] == w[1]) && scattered.windows(2).all(|w| w[0] == w[1]));
    }
    let gathered = exchange(Exchange::AllGather, 3, 3 * k, |place, v| {
        vec![Access::read(&cut(v, place * k..(place + 1) * k)), Access::write(v)]
    });
    let want: Vec<f32> = (0..3).flat_map(|p| (0..k).map(move |i| (p * 100 + p * k + i) as f32)).collect();
    gathered.into_iter().flatten().for_each(|got| assert_eq!(got, want));
}

#[test]
fn miri_joint_operations_move_between_ranks() {
    let k = 5;
    let all = exchange(Exchange::AllToAll, 3, 6 * k, |_, v| {
        vec![Access::read(&cut(v, 0..3 * k)), Access::write(&cut(v, 3 * k..6 * k))]
    });
    assert_eq!(all[0][1][3 * k..4 * k], [5.0, 6.0, 7.0, 8.0, 9.0]);
    let sent = exchange(Exchange::Broadcast { root: 1 }, 3, k, |place, v| {
        vec![if place == 1 { Access::read(v) } else { Access::write(v) }]
    });
    assert!(all.windows(2).all(|w| w[0] == w[1]) && sent.windows(2).all(|w| w[0] == w[1]));
    let want = vec![vec![100.0, 101.0, 102.0, 103.0, 104.0]; 3];
    assert_eq!(sent[0], want);
}

/// Says that it has begun, then touches all of the first argument.
fn touch(args: &mut Args<'_>, begun: impl FnOnce() -> Result<(), OpError>) -> Result<(), OpError> {
    match args.rows_mut::<f32>(0) {
        Ok(mut rows) => {
            begun()?;
            (0..rows.len()).for_each(|i| rows.row_mut(i).fill(3.0));
        }
        Err(_) => {
            let rows = args.rows::<f32>(0)?;
            begun()?;
            assert!((0..rows.len()).flat_map(|i| rows.row(i)).all(|x| *x >= 0.0));
        }
    }
    Ok(())
}

/// Launches `first`, and `second` once that has begun: were both to run, nothing would order their touches, and Miri
/// would call it a data race.
fn overlap(first: Vec<Access>, second: Vec<Access>, device: &Device) -> Option<Error> {
    let (one, two) = (device.stream("one").unwrap(), device.stream("two").unwrap());
    let ((begun, begin), (go, wait)) = (mpsc::channel(), mpsc::channel());
    let ends = Mutex::new((begun, wait));
    let held = Op::host("held", "test", first, move |args| {
        let ends = ends.lock().unwrap();
        touch(args, || Ok(ends.0.send(())?))?;
        Ok(ends.1.recv()?)
    });
    one.launch(held).unwrap();
    begin.recv().unwrap();
    two.launch(Op::host("second", "test", second, |args| touch(args, || Ok(())))).unwrap();
    let error = two.synchronize().err();
    go.send(()).unwrap();
    assert_eq!(one.synchronize().is_err(), error.is_some());
    error
}

#[test]
fn miri_planted_races_are_errors_and_touch_nothing() {
    let machine = Machine::cpu(2).unwrap();
    let modes = [(Mode::Write, Mode::Write), (Mode::Write, Mode::Read), (Mode::Read, Mode::Update)];
    for (rank, (first, second)) in modes.into_iter().enumerate() {
        let (device, _stream) = open(&machine, rank as u32);
        let m = device.alloc("m", &[3, 4], DType::F32, MemoryKind::Other).unwrap();
        let piece = m.columns(2..4).unwrap();
        let error = overlap(vec![Access { view: m, mode: first }], vec![Access { view: piece, mode: second }], &device);
        assert!(
            matches!(&error, Some(Error::Race { first, second, .. }) if (first.name, second.name) == ("held", "second"))
        );
    }
}

#[test]
fn miri_readers_and_neighbouring_columns_run_side_by_side() {
    let machine = Machine::cpu(2).unwrap();
    let (device, stream) = open(&machine, 0);
    let m = device.alloc("m", &[3, 4], DType::F32, MemoryKind::Other).unwrap();
    let (left, right) = (m.columns(0..2).unwrap(), m.columns(2..4).unwrap());
    assert!(overlap(vec![Access::read(&m)], vec![Access::read(&left)], &device).is_none());
    assert!(overlap(vec![Access::write(&left)], vec![Access::update(&right)], &device).is_none());
    assert_eq!(stream.download::<f32>(&m).unwrap().wait().unwrap(), [3.0; 12]);
}

#[test]
fn miri_neighbouring_columns_are_written_at_the_same_time() {
    let machine = Machine::cpu(2).unwrap();
    let (device, _stream) = open(&machine, 0);
    let m = device.alloc("m", &[4, 4], DType::F32, MemoryKind::Other).unwrap();
    let both = Arc::new(Barrier::new(2));
    let streams = [0..1, 1..4].map(|columns| {
        let (stream, both) = (device.stream("s").unwrap(), both.clone());
        let fill = Op::host("fill", "test", vec![Access::write(&m.columns(columns).unwrap())], move |args| {
            let mut rows = args.rows_mut::<f32>(0)?;
            both.wait();
            (0..rows.len()).for_each(|i| rows.row_mut(i).fill(i as f32));
            Ok(())
        });
        stream.launch(fill).unwrap();
        stream
    });
    streams.iter().for_each(|s| s.synchronize().unwrap());
    assert_eq!(get::<f32>(&m)[12..], [3.0; 4]);
}

#[test]
fn miri_memory_of_another_machine_is_refused_and_not_raced_for() {
    let (here, there) = (Machine::cpu(1).unwrap(), Machine::cpu(1).unwrap());
    let ((device, stream), (_other, other)) = (open(&here, 0), open(&there, 0));
    let v = floats(&device, 4);
    stream.launch(set(&v, 1.0)).unwrap();
    assert!(matches!(other.launch(set(&v, 2.0)), Err(Error::Foreign { .. })));
    assert_eq!(stream.download::<f32>(&v).unwrap().wait().unwrap(), [1.0; 4]);
}

#[test]
fn miri_failures_and_panics_release_their_memory() {
    for machine in machines() {
        for (rank, panics) in [(0, false), (1, true)] {
            let (device, stream) = open(&machine, rank);
            let v = floats(&device, 2);
            let fail = Op::host("fail", "test", vec![Access::update(&v)], move |args| {
                args.write::<f32>(0)?[0] = 1.0;
                assert!(!panics, "a planted panic");
                Err("planted".into())
            });
            stream.launch(fail).unwrap();
            assert!(matches!(stream.synchronize(), Err(Error::Failed { .. } | Error::Panicked { .. })));
            drop(stream);
            assert_eq!(get::<f32>(&v)[0], 1.0);
        }
    }
}

#[test]
fn miri_handles_are_dropped_with_work_queued() {
    for machine in machines() {
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
            let (device, one) = open(&machine, 0);
            let (two, e, v) = (device.stream("two").unwrap(), device.event("e"), floats(&device, 4));
            one.launch(set(&v, 1.0)).unwrap();
            one.record(&e).unwrap();
            two.wait(&e, Why("test")).unwrap();
            two.launch(add(&v, 1.0)).unwrap();
            let stuck = machine.meeting("stuck", &[0, 9], 0).unwrap();
            two.joint(&stuck, Exchange::AllReduce(Reduce::Sum), "test", vec![Access::update(&v)]).unwrap();
            let mut handles: [Option<Box<dyn std::any::Any>>; 4] =
                [Some(Box::new(one)), Some(Box::new(two)), Some(Box::new((v, e))), Some(Box::new((device, stuck)))];
            order.iter().for_each(|i| drop(handles[*i].take()));
        }
    }
}

#[test]
fn miri_an_operation_owns_the_last_handles_of_another_stream() {
    for machine in machines() {
        let (device, one) = open(&machine, 0);
        let (two, v) = (device.stream("two").unwrap(), floats(&device, 2));
        let owned = Mutex::new(Some((two, device)));
        let own = Op::host("own", "test", vec![Access::write(&v)], move |args| {
            args.write::<f32>(0)?.fill(2.0);
            drop(owned.lock().unwrap().take());
            Ok(())
        });
        one.launch(own).unwrap();
        assert_eq!(one.download::<f32>(&v).unwrap().wait().unwrap(), [2.0; 2]);
    }
}

#[test]
fn miri_a_peer_that_fails_leaves_nobody_behind() {
    for machine in machines() {
        let ((device, stream), (_other, other)) = (open(&machine, 0), open(&machine, 1));
        let v = floats(&device, 3);
        let meeting = machine.meeting("g", &[0, 1], 0).unwrap();
        stream.joint(&meeting, Exchange::AllReduce(Reduce::Sum), "test", vec![Access::update(&v)]).unwrap();
        stream.launch(add(&v, 1.0)).unwrap();
        other.launch(Op::host("fail", "test", Vec::new(), |_| Err("planted".into()))).unwrap();
        assert!(matches!(other.synchronize(), Err(Error::Failed { .. })));
        assert!(matches!(stream.synchronize(), Err(Error::PeerGone { rank: 1, .. })));
    }
}
