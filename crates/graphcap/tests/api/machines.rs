//! Programs on machines: what the verifier says of one trace, against what many orders give.

use std::collections::BTreeSet;

use device::{
    Access, DType, Device, Event, Exchange, Fresh, Label, Machine, MemoryKind, Op, Options, Reduce, Stream, Trace,
    View, Why, explore,
};
use graphcap::verify::{CallOrder, Finding, Noticed, VerifyOptions, mutate, other_result, verify};
use proptest::prelude::*;

const BUFFERS: usize = 3;

/// What the host of a rank submits: numbers are reduced to what there is.
type Act = (u8, u8, u8, u8);

struct Rank {
    device: Device,
    streams: [Stream; 2],
    events: [Event; 2],
    buffers: Vec<View>,
    meeting: device::Meeting,
}

fn open(machine: &Machine, rank: u32, ranks: &[u32]) -> Rank {
    let device = machine.device(rank).unwrap();
    let streams = ["a", "b"].map(|name| device.stream(name).unwrap());
    let alloc = |i: usize| device.alloc(&format!("b{i}"), &[2], DType::I32, MemoryKind::Other).unwrap();
    let buffers: Vec<View> = (0..BUFFERS).map(alloc).collect();
    for (i, buffer) in buffers.iter().enumerate() {
        streams[0].upload(buffer, vec![i as i32 + 3, 10 * (rank as i32 + 1)]).unwrap();
    }
    streams[0].synchronize().unwrap();
    let events = ["e", "f"].map(|name| device.event(name));
    for (stream, event) in streams.iter().zip(&events) {
        stream.record(event).unwrap();
    }
    let meeting = machine.meeting("all", ranks, rank).unwrap();
    Rank { device, streams, events, buffers, meeting }
}

/// Changes a buffer by what it does, so that orders show: no two steps commute.
fn step(name: &'static str, salt: i32, from: &View, to: &View) -> Op {
    let accesses = match from.same_as(to) {
        true => vec![Access::update(to)],
        false => vec![Access::update(to), Access::read(from)],
    };
    Op::host(name, format!("{salt}"), accesses, move |args| {
        let read = if args.len() > 1 { args.read::<i32>(1)?[0] } else { 7 };
        let value = &mut args.write::<i32>(0)?[0];
        *value = value.wrapping_mul(31).wrapping_add(read.wrapping_mul(17)) ^ salt;
        Ok(())
    })
}

/// Plays the acts on both ranks; what all buffers hold in the end.
fn play(machine: &Machine, acts: &[Act]) -> Vec<i32> {
    let ranks = [0, 1];
    let opened: Vec<Rank> = ranks.iter().map(|rank| open(machine, *rank, &ranks)).collect();
    for (salt, &(kind, a, b, c)) in (1..).zip(acts) {
        let rank = &opened[usize::from(a >> 1 & 1)];
        let (stream, event) = (&rank.streams[usize::from(a & 1)], &rank.events[usize::from(b & 1)]);
        match kind % 8 {
            0..=2 => {
                let [from, to] = [b, c].map(|i| &rank.buffers[usize::from(i) % BUFFERS]);
                stream.launch(step("step", salt, from, to)).unwrap();
            }
            3 => stream.record(event).unwrap(),
            4 | 5 => stream.wait(event, Why("test.wait")).unwrap(),
            6 => stream.synchronize().unwrap_or_else(|error| unreachable!("{error}")),
            _ => {
                for rank in &opened {
                    let accesses = vec![Access::update(&rank.buffers[usize::from(b) % BUFFERS])];
                    let exchange = Exchange::AllReduce(Reduce::Sum);
                    rank.streams[usize::from(a & 1)]
                        .joint(&rank.meeting, exchange, format!("{salt}"), accesses)
                        .unwrap();
                }
            }
        }
    }
    opened.iter().for_each(|rank| rank.device.synchronize().unwrap());
    let values = opened.iter().flat_map(|rank| rank.buffers.iter().map(move |buffer| (rank, buffer)));
    values.flat_map(|(rank, buffer)| rank.streams[0].download::<i32>(buffer).unwrap().wait().unwrap()).collect()
}

fn options() -> VerifyOptions {
    VerifyOptions { call_order: CallOrder::Free, ..VerifyOptions::default() }
}

fn traced(machine: &Machine, acts: &[Act]) -> Trace {
    machine.trace_start();
    play(machine, acts);
    machine.trace_stop()
}

fn fresh() -> Options {
    Options { fresh: Fresh::Zeroed, ..Options::default() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn a_program_without_a_race_gives_the_same_in_every_order(acts in prop::collection::vec(any::<Act>(), 1..24)) {
        let report = verify(&traced(&Machine::sim(0), &acts), &options());
        let results: BTreeSet<Vec<i32>> = (0..40).map(|seed| play(&Machine::sim(seed), &acts)).collect();
        if report.is_clean() {
            prop_assert_eq!(results.len(), 1, "{:?}", results);
        }
    }

    #[test]
    fn the_verdict_does_not_depend_on_the_order_that_was_traced(acts in prop::collection::vec(any::<Act>(), 1..24)) {
        let verdicts: BTreeSet<bool> =
            (0..4).map(|seed| verify(&traced(&Machine::sim(seed), &acts), &options()).is_clean()).collect();
        prop_assert_eq!(verdicts.len(), 1);
    }

    #[test]
    fn a_program_with_a_race_gives_something_else_in_some_order(
        acts in prop::collection::vec((0u8..6, any::<u8>(), any::<u8>(), any::<u8>()), 1..8),
    ) {
        let report = verify(&traced(&Machine::sim(0), &acts), &options());
        let found = explore(20_000, &fresh(), |machine| Ok(play(machine, &acts))).unwrap();
        prop_assert!(found.complete);
        prop_assert_eq!(report.is_clean(), found.results.len() == 1, "{}\n{:?}", report, found.results.keys());
    }
}

/// Weights copied ahead on one stream and used on another, two slots: two kinds of wait, and one that is not needed.
fn prefetching(machine: &Machine) -> Result<(), device::Error> {
    let device = machine.device(0)?;
    let (comm, compute) = (device.stream("comm")?, device.stream("compute")?);
    let alloc = |label: &str| device.alloc(label, &[1], DType::I32, MemoryKind::Other);
    let (weight, sum) = (alloc("weight")?, alloc("sum")?);
    let slots = [alloc("slot 0")?, alloc("slot 1")?];
    let (ready, free) = (device.event("ready"), device.event("free"));
    compute.record(&free)?;
    for i in 0..6 {
        let slot = &slots[i % 2];
        comm.wait(&free, Why("test.slot_free"))?;
        comm.launch(step("copy", 1, &weight, slot))?;
        comm.record(&ready)?;
        compute.wait(&ready, Why("test.gathered"))?;
        compute.wait(&ready, Why("test.again"))?;
        compute.launch(step("use", 2, slot, &sum))?;
        compute.record(&free)?;
    }
    device.synchronize()
}

fn without(whys: &[Label], program: impl Fn(&Machine) -> Result<(), device::Error>) -> Result<Trace, device::Error> {
    let machine = Machine::sim(1);
    whys.iter().for_each(|why| machine.drop_waits(why.clone()));
    machine.trace_start();
    program(&machine)?;
    Ok(machine.trace_stop())
}

#[test]
fn every_synchronisation_taken_away_is_noticed_or_covered_by_another() {
    let run = |whys: &[Label]| without(whys, prefetching);
    let bare = mutate(run, &[], &VerifyOptions::default()).unwrap();
    assert!(bare.whole.is_clean() && !bare.is_full());
    assert_eq!(bare.to_string(), "test.again: MISSED\ntest.gathered: MISSED\ntest.slot_free: found\nnoticed 1 / 3");
    let each_covers_the_other =
        [("test.again".into(), "test.gathered".into()), ("test.gathered".into(), "test.again".into())];
    let score = mutate(run, &each_covers_the_other, &VerifyOptions::default()).unwrap();
    assert!(score.is_full(), "{score}");
    let Noticed::Covered { without_both, .. } = &score.mutants[0].noticed else { panic!("{score}") };
    let Finding::Race(race) = &**without_both else { panic!("{without_both}") };
    assert_eq!(race.dropped.len(), 2);
    // One that covers nothing is no excuse.
    let wrong = mutate(run, &[("test.again".into(), "test.nothing".into())], &VerifyOptions::default()).unwrap();
    assert_eq!(wrong.noticed(), 1);
}

#[test]
fn a_seed_that_gives_another_result_is_told_with_the_command_that_runs_it_again() {
    let program = |machine: &Machine| -> Result<i32, device::Error> {
        let device = machine.device(0)?;
        let sum = device.alloc("sum", &[1], DType::I32, MemoryKind::Other)?;
        let streams = [device.stream("a")?, device.stream("b")?];
        streams[0].upload(&sum, vec![1])?;
        streams[0].synchronize()?;
        for (salt, stream) in (1..).zip(&streams) {
            stream.launch(step("step", salt, &sum, &sum))?;
        }
        device.synchronize()?;
        Ok(streams[0].download::<i32>(&sum)?.wait()?[0])
    };
    let replay = |seed: u64| format!("trainer verify --seed {seed}");
    let found = other_result(5..100, &fresh(), program, replay).unwrap().unwrap();
    let (_, want) = found.first;
    let (seed, got) = found.other;
    assert_eq!((program(&Machine::sim(5)).unwrap(), program(&Machine::sim(seed)).unwrap()), (want, got));
    assert!(found.to_string().ends_with(&format!("trainer verify --seed {seed}")), "{found}");
    let alone = |machine: &Machine| Ok::<_, device::Error>(machine.driver());
    assert_eq!(other_result(0..3, &fresh(), alone, replay).unwrap(), None);
}
