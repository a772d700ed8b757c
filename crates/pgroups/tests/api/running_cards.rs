//! Collectives of ranks that share a card, through NCCL: against exact sums, replayed against eager, traced.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use device::{DType, Element, Machine, Reduce, Stream, View, Why, bf16};
use pgroups::{Group, GroupRank, Needs, PgError, ProcessGroups, Rank, local};

use crate::{running_cards_support::*, running_support::*};

/// Members in orders of their own.
const MEMBERS: [&[u32]; 4] = [&[1, 0], &[2, 0, 1], &[3, 0, 2, 1], &[5, 0, 3, 7, 1, 6, 2, 4]];

/// Odd, one, and some that NCCL cuts into pieces.
const NUMELS: [usize; 4] = [1, 5, 1027, 70_001];

const REDUCES: [Reduce; 3] = [Reduce::Sum, Reduce::Avg, Reduce::Max];

/// Exact reductions of elements `of`, with the sums of their magnitudes.
fn reduced<T: Real>(members: &[u32], of: std::ops::Range<usize>, reduce: Reduce) -> (Vec<f64>, Vec<f64>) {
    let n = members.len() as f64;
    of.map(|at| {
        let all = || members.iter().map(|&rank| f64::from(value::<T>(rank, at).wide()));
        let (sum, magnitude) = (all().sum::<f64>(), all().map(f64::abs).sum::<f64>());
        match reduce {
            Reduce::Sum => (sum, magnitude),
            Reduce::Avg => (sum / n, magnitude / n),
            Reduce::Max => (all().fold(f64::MIN, f64::max), 0.0),
        }
    })
    .unzip()
}

fn own<T: Real>(group: &Group, stream: &Stream, numel: usize) -> View {
    put(stream, "own", values::<T>(group.rank().0, numel))
}

fn fresh<T: Element>(stream: &Stream, numel: usize) -> View {
    alloc(&stream.device(), "fresh", numel, T::DTYPE)
}

/// What a rank got from collectives that move values, and from those that reduce.
struct Got<T> {
    gathered: [Vec<T>; 2],
    reduced: Vec<Vec<T>>,
    scattered: Vec<Vec<T>>,
    root: Vec<T>,
    exchanged: Vec<T>,
    passed: Vec<T>,
}

/// Every collective, in place where it can be and not.
fn everything<T: Real>(group: &Group, stream: &Stream, k: usize) -> Result<Got<T>, PgError> {
    let (n, place) = (group.size() as usize, group.place().index());
    let part = place * k..(place + 1) * k;
    let shard = own::<T>(group, stream, k);
    let (apart, within) = (fresh::<T>(stream, n * k), fresh::<T>(stream, n * k));
    group.all_gather(stream, &shard, &apart)?;
    stream.upload(&within.flat(part.clone())?, values::<T>(group.rank().0, k))?;
    group.all_gather(stream, &within.flat(part.clone())?, &within)?;
    let (mut reduced, mut scattered) = (Vec::new(), Vec::new());
    for reduce in REDUCES {
        let (data, dest) = (own::<T>(group, stream, k), fresh::<T>(stream, k));
        group.all_reduce_into(stream, &data, &dest, reduce)?;
        group.all_reduce(stream, &data, reduce)?;
        reduced.extend([get::<T>(stream, &dest)?, get::<T>(stream, &data)?]);
        let (full, piece) = (own::<T>(group, stream, n * k), fresh::<T>(stream, k));
        group.reduce_scatter(stream, &full, &piece, reduce)?;
        group.reduce_scatter(stream, &full, &full.flat(part.clone())?, reduce)?;
        scattered.extend([get::<T>(stream, &piece)?, get::<T>(stream, &full.flat(part.clone())?)?]);
    }
    let root = own::<T>(group, stream, k);
    group.broadcast(stream, &root, GroupRank(n as u32 - 1))?;
    let (source, dest) = (own::<T>(group, stream, n * k), fresh::<T>(stream, n * k));
    group.all_to_all(stream, &source, &dest)?;
    group.barrier(stream)?;
    let (sending, passed) = (stream.device().stream("send")?, fresh::<T>(stream, k));
    let sent = own::<T>(group, &sending, k);
    group.send(&sending, &sent, GroupRank(((place + 1) % n) as u32))?;
    group.recv(stream, &passed, GroupRank(((place + n - 1) % n) as u32))?;
    sending.synchronize()?;
    Ok(Got {
        gathered: [get(stream, &apart)?, get(stream, &within)?],
        reduced,
        scattered,
        root: get(stream, &root)?,
        exchanged: get(stream, &dest)?,
        passed: get(stream, &passed)?,
    })
}

fn check<T: Real>(card: &Card, members: &[u32], k: usize) {
    let n = members.len();
    let got = card.run(n as u32, |rank, group| everything::<T>(group, &rank.device.stream("compute")?, k), members);
    for (place, &rank) in members.iter().enumerate() {
        let (got, here) = (&got[rank as usize], format!("{members:?} x {k} {}, place {place}", T::DTYPE));
        let all: Vec<T> = members.iter().flat_map(|&rank| values::<T>(rank, k)).collect();
        assert!(got.gathered.iter().all(|gathered| *gathered == all), "all_gather of {here}");
        for (i, reduce) in REDUCES.into_iter().enumerate() {
            let (exact, magnitudes) = reduced::<T>(members, 0..k, reduce);
            for (got, how) in got.reduced[2 * i..2 * i + 2].iter().zip(["apart", "in place"]) {
                expect_sums(&format!("all_reduce({reduce:?}) {how} of {here}"), got, &exact, &magnitudes, n);
            }
            let (exact, magnitudes) = reduced::<T>(members, place * k..(place + 1) * k, reduce);
            expect_sums(
                &format!("reduce_scatter({reduce:?}) of {here}"),
                &got.scattered[2 * i],
                &exact,
                &magnitudes,
                n,
            );
            let in_place = &got.scattered[2 * i + 1];
            assert!(*in_place == got.scattered[2 * i], "reduce_scatter({reduce:?}) in place of {here}");
        }
        assert!(got.root == values::<T>(members[n - 1], k), "broadcast of {here}");
        let parts = members.iter().flat_map(|&rank| (place * k..(place + 1) * k).map(move |at| value::<T>(rank, at)));
        assert!(got.exchanged == parts.collect::<Vec<_>>(), "all_to_all of {here}");
        assert!(got.passed == values::<T>(members[(place + n - 1) % n], k), "send and recv of {here}");
    }
    // Whatever order NCCL adds in, members hold the same bits.
    let first = &got[members[0] as usize].reduced;
    assert!(members.iter().all(|rank| got[*rank as usize].reduced == *first), "{members:?} x {k}: members differ");
}

#[test]
fn every_collective_on_a_card_moves_and_sums_what_it_says() {
    let card = card();
    for members in MEMBERS {
        for k in NUMELS {
            check::<f32>(&card, members, k);
            check::<bf16>(&card, members, k);
        }
    }
}

#[test]
fn whole_numbers_are_summed_exactly_on_a_card() {
    let card = card();
    for members in MEMBERS {
        let n = members.len() as i32;
        let got = card.run(
            n as u32,
            |rank, group| {
                let stream = rank.device.stream("compute")?;
                let big = 16_777_217 + rank.global.0 as i32;
                let (sum, max) = (put(&stream, "sum", vec![big; 3]), put(&stream, "max", vec![-big; 3]));
                group.all_reduce(&stream, &sum, Reduce::Sum)?;
                group.all_reduce(&stream, &max, Reduce::Max)?;
                Ok([get::<i32>(&stream, &sum)?, get::<i32>(&stream, &max)?])
            },
            members,
        );
        let sum = 16_777_217i32.wrapping_mul(n).wrapping_add(n * (n - 1) / 2);
        assert!(got.iter().all(|got| *got == [vec![sum; 3], vec![-16_777_217; 3]]), "{got:?}");
    }
}

/// One step of a rank: two groups of two axes and a second communicator, on two streams.
struct Step {
    rows: Group,
    columns: Group,
    again: Group,
    streams: [Stream; 2],
    x: View,
    full: View,
    y: View,
}

impl Step {
    /// Ranks in rows of `width`.
    fn new(rank: &Rank, width: u32) -> Result<Step, PgError> {
        let n = rank.world_size;
        let rows: Vec<Vec<u32>> = (0..n / width).map(|row| (row * width..(row + 1) * width).rev().collect()).collect();
        let columns: Vec<Vec<u32>> = (0..width).map(|first| (first..n).step_by(width as usize).collect()).collect();
        let lists = |lists: &[Vec<u32>]| {
            let lists: Vec<&[u32]> = lists.iter().map(Vec::as_slice).collect();
            custom("g", &lists).custom.remove(0).1
        };
        let key = |name| pgroups::Key::named(name).unwrap();
        let needs =
            Needs { custom: vec![(key("rows"), lists(&rows)), (key("columns"), lists(&columns))], ..Needs::default() };
        let groups = ProcessGroups::build(rank, &flat(n), &needs)?;
        let (rows, columns) = (groups.get(&key("rows"), "a test")?.clone(), groups.get(&key("columns"), "a test")?);
        let (a, b) = (rank.device.stream("a")?, rank.device.stream("b")?);
        let x = put(&a, "x", values::<f32>(rank.global.0, 257));
        let full = alloc(&rank.device, "full", 257 * rows.size() as usize, DType::F32);
        let y = put(&a, "y", values::<bf16>(rank.global.0, 1024));
        Ok(Step { again: columns.second("again")?, columns: columns.clone(), rows, streams: [a, b], x, full, y })
    }

    fn submit(&self) -> Result<(), PgError> {
        let [a, b] = &self.streams;
        let (fork, join) = (a.device().event("fork"), a.device().event("join"));
        a.record(&fork)?;
        b.wait(&fork, Why("test.fork"))?;
        self.rows.all_gather(a, &self.x, &self.full)?;
        self.columns.all_reduce(b, &self.y, Reduce::Avg)?;
        self.again.all_reduce(b, &self.y, Reduce::Max)?;
        self.rows.reduce_scatter(a, &self.full, &self.x, Reduce::Avg)?;
        self.rows.batch().all_reduce(&self.x, Reduce::Max).submit(a)?;
        self.columns.barrier(b)?;
        b.record(&join)?;
        Ok(a.wait(&join, Why("test.join"))?)
    }

    fn bits(&self) -> Result<Vec<u32>, PgError> {
        let mut bits: Vec<u32> = get::<f32>(&self.streams[0], &self.full)?.iter().map(|v| v.to_bits()).collect();
        bits.extend(get::<f32>(&self.streams[0], &self.x)?.iter().map(|v| v.to_bits()));
        bits.extend(get::<bf16>(&self.streams[0], &self.y)?.iter().map(|v| u32::from(v.to_bits())));
        Ok(bits)
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Exec {
    Eager,
    Replayed,
}

fn steps(machine: &Machine, (world, width): (u32, u32), exec: Exec) -> Vec<Vec<u32>> {
    let ran = local(machine, world, |rank| {
        let step = Step::new(&rank, width)?;
        let [a, b] = &step.streams;
        a.synchronize()?;
        if exec == Exec::Eager {
            (0..6).try_for_each(|_| step.submit())?;
        } else {
            a.begin_capture("step")?;
            step.submit()?;
            let graph = a.end_capture()?;
            let lanes = [graph.instantiate()?, graph.instantiate()?];
            for i in 0..6 {
                // On two lanes, each behind the one before.
                let (lane, before) = if i % 2 == 0 { (a, b) } else { (b, a) };
                let event = rank.device.event("before");
                before.record(&event)?;
                lane.wait(&event, Why("test.lane"))?;
                lane.launch_graph(&lanes[i % 2])?;
            }
            b.synchronize()?;
        }
        step.bits()
    });
    ran.unwrap_or_else(|error| panic!("world {world}, rows of {width}: {}", error.chain()))
}

#[test]
fn replayed_collectives_of_several_groups_give_the_bits_of_eager_ones() {
    let card = card();
    for (world, width) in [(2, 2), (4, 2), (8, 2), (8, 4)] {
        let eager = steps(&card.machine, (world, width), Exec::Eager);
        assert_eq!(eager, steps(&card.machine, (world, width), Exec::Replayed), "world {world}, rows of {width}");
    }
}

/// Joint operations and launches, in words: all but where memory lies.
fn told(machine: &Machine, exec: Exec) -> Vec<String> {
    machine.trace_start();
    drop(steps(machine, (4, 2), exec));
    let text = machine.trace_stop().to_text();
    let mut lines: Vec<String> = text
        .lines()
        .filter(|line| ["joint ", "launch ", "wait ", "record "].iter().any(|kind| line.starts_with(kind)))
        .map(str::to_owned)
        .collect();
    lines.sort();
    lines
}

#[test]
fn traces_of_a_card_tell_collectives_as_those_of_hosts_do() {
    let card = card();
    for exec in [Exec::Eager, Exec::Replayed] {
        let (on_card, on_host) = (told(&card.machine, exec), told(&cpu(2), exec));
        assert!(on_host.len() > 40, "{}", on_host.len());
        assert_eq!(on_card, on_host);
    }
}

/// What is made asks the driver for memory, which waits for the card; launches of members come one after the other.
#[test]
fn ranks_that_launch_together_go_on_while_others_make_graphs_memory_and_streams() {
    let (card, ended) = (card(), AtomicU32::new(0));
    let ran = local(&card.machine, 8, |rank| -> Result<_, PgError> {
        let rows = custom("rows", &[&[3, 2, 1, 0], &[7, 6, 5, 4]]);
        let group = group_of(&rank, &rows, "rows")?;
        let (stream, side) = (rank.device.stream("compute")?, rank.device.stream("side")?);
        let data = put(&stream, "data", values::<f32>(rank.global.0, 5000));
        let graph = |calls: usize| -> Result<_, PgError> {
            stream.begin_capture("calls")?;
            (0..calls).try_for_each(|_| {
                let (fork, join) = (rank.device.event("fork"), rank.device.event("join"));
                stream.record(&fork)?;
                side.wait(&fork, Why("test.fork"))?;
                group.all_reduce(&side, &data, Reduce::Max)?;
                side.record(&join)?;
                stream.wait(&join, Why("test.join"))?;
                group.all_reduce(&stream, &data, Reduce::Max)
            })?;
            Ok(stream.end_capture()?.instantiate()?)
        };
        group.barrier(&stream)?;
        stream.synchronize()?;
        let (mut made, begin) = (0, Instant::now());
        if rank.global.0 < 4 {
            let graphs = [graph(3)?, graph(8)?];
            for at in 0..600 {
                stream.launch_graph(&graphs[at % 2])?;
                if at % 50 == 49 {
                    stream.synchronize()?;
                }
            }
            ended.fetch_add(1, Ordering::SeqCst);
        } else {
            // Of ranks that fail it hears nothing.
            while ended.load(Ordering::SeqCst) < 4 && begin.elapsed() < Duration::from_secs(30) {
                drop(graph(1 + made % 16)?);
                let (_stream, numel) = (rank.device.stream("more")?, (made % 64 + 1) << 12);
                drop(alloc(&rank.device, "more", numel, DType::F32));
                made += 1;
            }
        }
        Ok((get::<f32>(&stream, &data)?, made))
    });
    let ran = ran.unwrap_or_else(|error| panic!("{}", error.chain()));
    let most = |at: usize| (0..4).map(|rank| value::<f32>(rank, at)).fold(f32::MIN, f32::max);
    let want: Vec<f32> = (0..5000).map(most).collect();
    for (rank, (got, made)) in ran.iter().enumerate() {
        assert!(if rank < 4 { got == &want } else { *made > 0 }, "rank {rank}, {made} made");
    }
}
