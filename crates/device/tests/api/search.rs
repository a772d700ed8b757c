//! Every order of a small program, against the orders that can be counted by hand.

use std::collections::BTreeSet;

use device::*;

use super::work::{copy, failing, floats, open, set, step, stepped};

/// A stream's steps, each a factor and a term.
type Steps<'a> = &'a [(f32, f32)];

fn search<T: Ord>(program: impl Fn(&Machine) -> Result<T, Error>) -> Explored<T> {
    let found = explore(10_000, &Options::default(), program).unwrap();
    assert!(found.complete, "not complete after {} runs", found.runs);
    found
}

/// Streams that each take steps `(factor, term)` on one value that starts at 1, with no order between them.
fn unordered(machine: &Machine, streams: &[Steps<'_>]) -> Result<u32, Error> {
    let (device, main) = open(machine, 0, "main");
    let v = floats(&device, "v", 1);
    main.launch(set(&v, 1.0))?;
    main.synchronize()?;
    let opened = streams.iter().map(|_| device.stream("s")).collect::<Result<Vec<_>, _>>()?;
    for (stream, steps) in opened.iter().zip(streams) {
        steps.iter().try_for_each(|(factor, term)| stream.launch(step(&v, *factor, *term)))?;
    }
    device.synchronize()?;
    Ok(main.download::<f32>(&v)?.wait()?[0] as u32)
}

/// The results of all interleavings, and how many there are.
fn interleavings(value: f32, streams: &[Steps<'_>]) -> (BTreeSet<u32>, usize) {
    if streams.iter().all(|s| s.is_empty()) {
        return (BTreeSet::from([value as u32]), 1);
    }
    let mut all = (BTreeSet::new(), 0);
    for (i, steps) in streams.iter().enumerate().filter(|(_, s)| !s.is_empty()) {
        let mut rest = streams.to_vec();
        rest[i] = &steps[1..];
        let (results, count) = interleavings(stepped(value, steps[0].0, steps[0].1), &rest);
        all.0.extend(results);
        all.1 += count;
    }
    all
}

#[test]
fn a_search_runs_each_interleaving_exactly_once() {
    let programs: [(&[Steps<'_>], usize); 4] = [
        (&[&[(2.0, 0.0)], &[(1.0, 3.0)]], 2),
        (&[&[(2.0, 0.0), (3.0, 1.0)], &[(1.0, 3.0), (5.0, 2.0)]], 6),
        (&[&[(2.0, 0.0)], &[(1.0, 3.0)], &[(7.0, 1.0)]], 6),
        (&[&[(2.0, 1.0), (3.0, 1.0), (5.0, 1.0)], &[(1.0, 3.0), (7.0, 2.0)], &[(11.0, 4.0)]], 60),
    ];
    for (streams, count) in programs {
        let (results, runs) = interleavings(1.0, streams);
        assert_eq!(runs, count);
        let found = search(|machine| unordered(machine, streams));
        assert_eq!(found.runs, count);
        assert_eq!(found.results.into_keys().collect::<BTreeSet<_>>(), results);
    }
}

/// Three streams, each ordered behind the one before by a wait of its own name.
fn chain(machine: &Machine) -> Result<u32, Error> {
    let (device, main) = open(machine, 0, "main");
    let v = floats(&device, "v", 1);
    main.launch(set(&v, 1.0))?;
    main.synchronize()?;
    let names = ["test.first", "test.second", "test.third"];
    let mut streams = vec![main.clone()];
    for (i, why) in names.into_iter().enumerate() {
        let (before, stream, e) = (&streams[i], device.stream(why)?, device.event(why));
        before.launch(step(&v, 2.0, i as f32))?;
        before.record(&e)?;
        stream.wait(&e, Why(why))?;
        stream.launch(step(&v, 3.0, i as f32))?;
        streams.push(stream);
    }
    device.synchronize()?;
    Ok(main.download::<f32>(&v)?.wait()?[0] as u32)
}

#[test]
fn an_ordered_program_has_one_result_and_each_wait_is_needed_for_it() {
    let whole = search(chain);
    assert_eq!((whole.results.len(), whole.runs), (1, 1));
    for why in ["test.first", "test.second", "test.third"] {
        let without = search(|machine| {
            machine.drop_waits(Why(why));
            chain(machine)
        });
        assert!(without.results.len() > 1, "{why} is not needed");
        assert!(without.results.keys().any(|r| whole.results.contains_key(r)));
    }
}

/// Three weights pass through two slots, twice: one stream copies a weight into a slot, another uses it. Each wait has
/// a name of its own.
fn prefetching(machine: &Machine) -> Result<u32, Error> {
    const GATHERED: [&str; 6] = ["gathered 0", "gathered 1", "gathered 2", "gathered 3", "gathered 4", "gathered 5"];
    const RELEASED: [&str; 4] = ["released 0", "released 1", "released 2", "released 3"];
    let (device, compute) = open(machine, 0, "compute");
    let comm = device.stream("comm")?;
    let weights: Vec<View> = (0..3).map(|_| floats(&device, "weight", 1)).collect();
    let slots = [floats(&device, "slot", 1), floats(&device, "slot", 1)];
    let sum = floats(&device, "sum", 1);
    for (i, weight) in weights.iter().enumerate() {
        compute.launch(set(weight, 2.0 + i as f32))?;
    }
    slots.iter().chain([&sum]).try_for_each(|v| compute.launch(set(v, 1.0)))?;
    compute.synchronize()?;
    let mut released = Vec::new();
    for (use_of, gathered) in GATHERED.into_iter().enumerate() {
        let slot = &slots[use_of % 2];
        if use_of >= 2 {
            comm.wait(&released[use_of - 2], Why(RELEASED[use_of - 2]))?;
        }
        comm.launch(copy(&weights[use_of % 3], slot))?;
        let (ready, free) = (device.event("ready"), device.event("free"));
        comm.record(&ready)?;
        compute.wait(&ready, Why(gathered))?;
        let accesses = vec![Access::read(slot), Access::update(&sum)];
        compute.launch(Op::host("use", "test", accesses, |args| {
            let weight = args.read::<f32>(0)?[0];
            args.write::<f32>(1)?.iter_mut().for_each(|x| *x = stepped(*x, 3.0, weight));
            Ok(())
        }))?;
        compute.record(&free)?;
        released.push(free);
    }
    device.synchronize()?;
    Ok(compute.download::<f32>(&sum)?.wait()?[0] as u32)
}

#[test]
fn a_prefetching_program_needs_each_of_its_waits() {
    let whole = search(prefetching);
    let want = (0..6).fold(1.0, |x, i| stepped(x, 3.0, 2.0 + (i % 3) as f32));
    assert_eq!(whole.results.keys().copied().collect::<Vec<_>>(), [want as u32]);
    assert_eq!(whole.runs, 1, "all that conflicts is ordered");
    let trace = || {
        let machine = Machine::sim(0);
        machine.trace_start();
        prefetching(&machine).map(|_| machine.trace_stop())
    };
    let waits = trace().unwrap().events.into_iter().filter_map(|e| match e {
        TraceEvent::Wait { why, .. } => Some(why),
        _ => None,
    });
    let waits: BTreeSet<Label> = waits.collect();
    assert_eq!(waits.len(), 10);
    for why in waits {
        let without = search(|machine| {
            machine.drop_waits(why.clone());
            prefetching(machine)
        });
        assert!(without.results.len() > 1, "{why} is not needed: {without:?}");
    }
}

/// Rank 1 receives from rank 0 on one stream and copies on another, with or without a wait.
fn receive(machine: &Machine, waits: bool) -> Result<u32, Error> {
    let (zero, sender) = open(machine, 0, "comm");
    let (one, receiver) = open(machine, 1, "comm");
    let (compute, e) = (one.stream("compute")?, one.event("received"));
    let (x, y, z) = (floats(&zero, "x", 1), floats(&one, "y", 1), floats(&one, "z", 1));
    sender.launch(set(&x, 5.0))?;
    receiver.launch(set(&y, 4.0))?;
    zero.synchronize()?;
    one.synchronize()?;
    let meeting = |rank| machine.meeting("pp", &[0, 1], rank);
    sender.joint(&meeting(0)?, Exchange::SendRecv, "test", vec![Access::read(&x)])?;
    receiver.joint(&meeting(1)?, Exchange::SendRecv, "test", vec![Access::write(&y)])?;
    receiver.record(&e)?;
    if waits {
        compute.wait(&e, Why("test.received"))?;
    }
    compute.launch(copy(&y, &z))?;
    // The sender overwrites what it has sent: its part is over before the receiver's is.
    sender.launch(set(&x, 6.0))?;
    zero.synchronize()?;
    one.synchronize()?;
    Ok(compute.download::<f32>(&z)?.wait()?[0] as u32)
}

#[test]
fn members_complete_one_by_one_and_a_receiver_must_wait_for_its_own_part() {
    let found = search(|machine| receive(machine, true));
    assert_eq!(found.results.into_keys().collect::<Vec<_>>(), [5]);
    let every = explore_every_order(10_000, &Options::default(), |machine| receive(machine, true)).unwrap();
    assert_eq!(every.results.into_keys().collect::<Vec<_>>(), [5]);
    assert!(every.runs > 1, "the sender's next operation may run before or after the receiver's part");
    let found = search(|machine| receive(machine, false));
    assert_eq!(found.results.into_keys().collect::<Vec<_>>(), [4, 5]);
}

#[test]
fn a_search_of_rank_threads_is_complete_too() {
    let program = |machine: &Machine| -> Result<Vec<u32>, Error> {
        let got = super::ranks::all_well(machine, &[0, 1], |device| {
            let (stream, other) = (device.stream("a")?, device.stream("b")?);
            let v = floats(device, "v", 1);
            stream.launch(set(&v, 1.0))?;
            stream.synchronize()?;
            stream.launch(step(&v, 2.0, device.rank() as f32))?;
            other.launch(step(&v, 3.0, 1.0))?;
            device.synchronize()?;
            Ok(stream.download::<f32>(&v)?.wait()?[0] as u32)
        });
        Ok(got)
    };
    let found = search(program);
    // (2x + r, then 3x + 1) or the other way round, on each of two ranks: 1 -> 7 + 3r or 8 + r.
    let want = [[7, 9], [7, 10], [8, 9], [8, 10]].map(|r| r.to_vec());
    assert_eq!(found.results.into_keys().collect::<Vec<_>>(), want);
}

#[test]
fn a_search_that_ends_early_says_so() {
    let steps: &[Steps<'_>] = &[&[(2.0, 0.0), (3.0, 1.0)], &[(1.0, 3.0), (5.0, 2.0)]];
    for (limit, complete) in [(0, false), (1, false), (5, false), (6, true), (7, true)] {
        let found = explore(limit, &Options::default(), |machine| unordered(machine, steps)).unwrap();
        assert_eq!((found.runs, found.complete), (limit.min(6), complete));
    }
}

#[test]
fn a_search_gives_back_the_programs_error() {
    let program = |machine: &Machine| {
        let (_device, stream) = open(machine, 0, "main");
        stream.launch(failing("here", "it fails"))?;
        stream.synchronize()
    };
    let error = explore(10, &Options::default(), program).unwrap_err();
    assert!(matches!(error, Error::Failed { .. }));
}

#[test]
fn a_search_finds_the_order_in_which_groups_lock() {
    // Two groups on two streams of each rank: no order of theirs can lock. On one stream, every order locks.
    let program = |streams: usize| {
        move |machine: &Machine| -> Result<bool, Error> {
            let ranks = [0, 1].map(|rank| machine.device(rank).unwrap());
            let mut opened = Vec::new();
            for device in &ranks {
                let own: Vec<Stream> = (0..streams).map(|_| device.stream("s")).collect::<Result<_, _>>()?;
                let order = if device.rank() == 0 { ["a", "b"] } else { ["b", "a"] };
                for (i, group) in order.iter().enumerate() {
                    let meeting = machine.meeting(group, &[0, 1], device.rank())?;
                    own[i % streams].joint(&meeting, Exchange::Barrier, "test", Vec::new())?;
                }
                opened.push(own);
            }
            match ranks[0].synchronize() {
                Ok(()) => Ok(true),
                Err(Error::Deadlock { .. }) => Ok(false),
                Err(other) => Err(other),
            }
        }
    };
    assert_eq!(search(program(2)).results.into_keys().collect::<Vec<_>>(), [true]);
    assert_eq!(search(program(1)).results.into_keys().collect::<Vec<_>>(), [false]);
}
