//! Every collective against a plain reference: unequal values, odd sizes, permuted groups with gaps, all drivers.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use device::{Access, DType, Element, Op, Reduce, Stream, View, bf16};
use pgroups::{Group, GroupRank, PgError, local};

use crate::running_support::*;

/// Worlds, and the members of the groups that run in them side by side.
const GROUPS: [(u32, &[&[u32]]); 6] = [
    (1, &[&[0]]),
    (2, &[&[1, 0]]),
    (3, &[&[0, 1, 2]]),
    (4, &[&[3, 0, 2, 1]]),
    (5, &[&[0, 4, 2], &[3, 1]]),
    (5, &[&[4, 2, 0, 3, 1]]),
];

/// Odd, one, above a block of the transport, and above one of its tiles.
const NUMELS: [usize; 4] = [1, 5, 1027, 70_001];

const REDUCES: [Reduce; 3] = [Reduce::Sum, Reduce::Avg, Reduce::Max];

/// One element of the reduction of everybody's values: in the order of the members, in f32, rounded once.
fn reduced<T: Real>(members: &[u32], at: usize, reduce: Reduce) -> T {
    let all = members.iter().map(|&rank| value::<T>(rank, at).wide());
    let count = members.len() as f32;
    let sum = |all: &mut dyn Iterator<Item = f32>| all.reduce(|a, b| a + b).unwrap();
    T::of(match reduce {
        Reduce::Sum => sum(&mut all.into_iter()),
        Reduce::Avg => sum(&mut all.into_iter()) / count,
        Reduce::Max => all.reduce(f32::max).unwrap(),
    })
}

/// Runs `body` on every rank of every group on every machine, with `numel` elements a part, and compares what each
/// rank returns, bit for bit, with `want(members, place)`.
fn everywhere<T: Real>(
    what: &str,
    numels: &[usize],
    body: impl Fn(&Group, &Stream, usize) -> Result<Vec<T>, PgError> + Sync,
    want: impl Fn(&[u32], usize, usize) -> Vec<T>,
) {
    for &numel in numels {
        for (world, lists) in GROUPS {
            let large = numel > 10_000;
            if large && world != 4 {
                continue;
            }
            for machine in if large { few_machines() } else { machines() } {
                let here = format!("{what} on {}: {lists:?} x {numel} {}", machine.driver(), T::DTYPE);
                let got = local(&machine, world, |rank| {
                    let group = group_of(&rank, &custom("mine", lists), "mine")?;
                    let stream = rank.device.stream("compute")?;
                    let got = body(&group, &stream, numel)?;
                    stream.synchronize()?;
                    Ok::<_, PgError>(got)
                });
                let got = got.unwrap_or_else(|e| panic!("{here}: {}", e.chain()));
                for members in lists {
                    for (place, &rank) in members.iter().enumerate() {
                        let want = want(members, place, numel);
                        let got = &got[rank as usize];
                        let differs = (0..want.len().max(got.len())).find(|&i| got.get(i) != want.get(i));
                        assert_eq!(differs.map(|i| (i, got.get(i), want.get(i))), None, "{here}, rank {rank}");
                    }
                }
            }
        }
    }
}

/// This rank's values, on the device.
fn own<T: Real>(group: &Group, stream: &Stream, numel: usize) -> View {
    put(stream, "own", values::<T>(group.rank().0, numel))
}

fn fresh<T: Element>(stream: &Stream, numel: usize) -> View {
    alloc(&stream.device(), "fresh", numel, T::DTYPE)
}

fn n(group: &Group) -> usize {
    group.size() as usize
}

fn part(place: usize, k: usize) -> std::ops::Range<usize> {
    place * k..(place + 1) * k
}

fn gathered<T: Real>(members: &[u32], k: usize) -> Vec<T> {
    members.iter().flat_map(|&rank| values::<T>(rank, k)).collect()
}

fn all_gather<T: Real>() {
    everywhere::<T>(
        "all_gather",
        &NUMELS,
        |group, stream, k| {
            let (shard, full) = (own::<T>(group, stream, k), fresh::<T>(stream, k * n(group)));
            group.all_gather(stream, &shard, &full)?;
            Ok(get(stream, &full)?)
        },
        |members, _, k| gathered(members, k),
    );
    everywhere::<T>(
        "all_gather in place",
        &NUMELS,
        |group, stream, k| {
            let full = fresh::<T>(stream, k * n(group));
            let shard = full.flat(part(group.place().index(), k))?;
            stream.upload(&shard, values::<T>(group.rank().0, k))?;
            group.all_gather(stream, &shard, &full)?;
            Ok(get(stream, &full)?)
        },
        |members, _, k| gathered(members, k),
    );
}

#[test]
fn all_gather_gives_everyone_all_shards_in_member_order() {
    all_gather::<f32>();
    all_gather::<bf16>();
}

fn reduce_scatter<T: Real>(reduce: Reduce) {
    let want =
        |members: &[u32], place: usize, k: usize| part(place, k).map(|at| reduced::<T>(members, at, reduce)).collect();
    everywhere::<T>(
        "reduce_scatter",
        &NUMELS,
        |group, stream, k| {
            let (full, shard) = (own::<T>(group, stream, k * n(group)), fresh::<T>(stream, k));
            group.reduce_scatter(stream, &full, &shard, reduce)?;
            assert_eq!(get::<T>(stream, &full)?, values::<T>(group.rank().0, k * n(group)), "the source has changed");
            Ok(get(stream, &shard)?)
        },
        want,
    );
    everywhere::<T>(
        "reduce_scatter in place",
        &NUMELS[..3],
        |group, stream, k| {
            let full = own::<T>(group, stream, k * n(group));
            let shard = full.flat(part(group.place().index(), k))?;
            group.reduce_scatter(stream, &full, &shard, reduce)?;
            Ok(get(stream, &shard)?)
        },
        want,
    );
}

#[test]
fn reduce_scatter_gives_each_its_part_reduced_in_member_order() {
    for reduce in REDUCES {
        reduce_scatter::<f32>(reduce);
        reduce_scatter::<bf16>(reduce);
    }
}

fn all_reduce<T: Real>(reduce: Reduce) {
    let want =
        |members: &[u32], _: usize, k: usize| (0..k).map(|at| reduced::<T>(members, at, reduce)).collect::<Vec<_>>();
    everywhere::<T>(
        "all_reduce",
        &NUMELS,
        |group, stream, k| {
            let data = own::<T>(group, stream, k);
            group.all_reduce(stream, &data, reduce)?;
            Ok(get(stream, &data)?)
        },
        want,
    );
    everywhere::<T>(
        "all_reduce_into",
        &NUMELS[..3],
        |group, stream, k| {
            let (source, dest) = (own::<T>(group, stream, k), fresh::<T>(stream, k));
            // Some members in place, some not: the same to the others.
            if group.place().0 == 1 {
                group.all_reduce(stream, &source, reduce)?;
                return Ok(get(stream, &source)?);
            }
            group.all_reduce_into(stream, &source, &dest, reduce)?;
            assert_eq!(get::<T>(stream, &source)?, values::<T>(group.rank().0, k), "the source has changed");
            Ok(get(stream, &dest)?)
        },
        want,
    );
}

#[test]
fn all_reduce_gives_everyone_the_same_bits() {
    for reduce in REDUCES {
        all_reduce::<f32>(reduce);
        all_reduce::<bf16>(reduce);
    }
}

fn broadcast_and_all_to_all<T: Real>() {
    for root in 0..5 {
        let root_of = |size: usize| root % size;
        everywhere::<T>(
            "broadcast",
            &NUMELS[1..3],
            |group, stream, k| {
                let data = own::<T>(group, stream, k);
                group.broadcast(stream, &data, GroupRank(root_of(n(group)) as u32))?;
                Ok(get(stream, &data)?)
            },
            |members, _, k| values(members[root_of(members.len())], k),
        );
    }
    everywhere::<T>(
        "all_to_all",
        &NUMELS,
        |group, stream, k| {
            let (source, dest) = (own::<T>(group, stream, k * n(group)), fresh::<T>(stream, k * n(group)));
            group.all_to_all(stream, &source, &dest)?;
            Ok(get(stream, &dest)?)
        },
        |members, place, k| {
            let theirs = |&rank: &u32| part(place, k).map(move |at| value::<T>(rank, at));
            members.iter().flat_map(theirs).collect()
        },
    );
}

#[test]
fn broadcast_and_all_to_all_move_what_they_say() {
    broadcast_and_all_to_all::<f32>();
    broadcast_and_all_to_all::<bf16>();
}

fn ring<T: Real>() {
    everywhere::<T>(
        "send and recv",
        &NUMELS,
        |group, stream, k| {
            if n(group) == 1 {
                return Ok(values(group.rank().0, k));
            }
            let next = GroupRank((group.place().0 + 1) % group.size());
            let before = GroupRank((group.place().0 + group.size() - 1) % group.size());
            let sending = stream.device().stream("send")?;
            let (source, dest) = (own::<T>(group, &sending, k), fresh::<T>(stream, k));
            group.send(&sending, &source, next)?;
            group.recv(stream, &dest, before)?;
            sending.synchronize()?;
            Ok(get(stream, &dest)?)
        },
        |members, place, k| values(members[(place + members.len() - 1) % members.len()], k),
    );
}

#[test]
fn a_ring_of_sends_on_their_own_streams_moves_everything_one_place() {
    ring::<f32>();
    ring::<bf16>();
}

#[test]
fn sends_of_a_pair_arrive_in_their_order_whatever_else_the_group_does() {
    for machine in machines() {
        let got = local(&machine, 3, |rank| {
            let group = group_of(&rank, &custom("mine", &[&[2, 0, 1]]), "mine")?;
            let (stream, side) = (rank.device.stream("compute")?, rank.device.stream("side")?);
            let noise = put(&side, "noise", vec![1f32; 3]);
            let mut got = Vec::new();
            for round in 0..20 {
                group.all_reduce(&side, &noise, Reduce::Max)?;
                let data = put(&stream, "data", vec![round; 3]);
                match group.place().0 {
                    0 => group.send(&stream, &data, GroupRank(2))?,
                    2 => {
                        group.recv(&stream, &data, GroupRank(0))?;
                        got.push(get::<i32>(&stream, &data)?[1]);
                    }
                    _ => {}
                }
            }
            [stream, side].iter().try_for_each(Stream::synchronize)?;
            Ok::<_, PgError>(got)
        });
        assert_eq!(got.unwrap()[1], (0..20).collect::<Vec<_>>());
    }
}

#[test]
fn nobody_passes_a_barrier_before_all_have_come() {
    for machine in machines() {
        let come = Arc::new(AtomicU32::new(0));
        let seen = local(&machine, 4, |rank| {
            let group = group_of(&rank, &custom("mine", &[&[1, 3, 0, 2]]), "mine")?;
            let stream = rank.device.stream("compute")?;
            let seen = put(&stream, "seen", vec![0i32]);
            let (mine, all) = (come.clone(), come.clone());
            stream.launch(Op::host("come", "test", Vec::new(), move |_| {
                mine.fetch_add(1, Ordering::SeqCst);
                Ok(())
            }))?;
            group.barrier(&stream)?;
            stream.launch(Op::host("look", "test", vec![Access::write(&seen)], move |args| {
                args.write::<i32>(0)?[0] = all.load(Ordering::SeqCst) as i32;
                Ok(())
            }))?;
            Ok::<_, PgError>(get::<i32>(&stream, &seen)?)
        });
        assert_eq!(seen.unwrap(), [[4]; 4], "{}", machine.driver());
    }
}

#[test]
fn whole_numbers_are_summed_and_refuse_an_average() {
    let machine = cpu(2);
    let got = local(&machine, 3, |rank| {
        let group = group_of(&rank, &custom("mine", &[&[0, 1, 2]]), "mine")?;
        let stream = rank.device.stream("compute")?;
        let data = put(&stream, "data", vec![rank.global.0 as i32 + 1; 3]);
        let refused = group.all_reduce(&stream, &data, Reduce::Avg).unwrap_err();
        assert!(matches!(refused, PgError::Refused { op: "all_reduce", .. }), "{refused}");
        group.all_reduce(&stream, &data, Reduce::Sum)?;
        Ok::<_, PgError>(get::<i32>(&stream, &data)?)
    });
    assert_eq!(got.unwrap(), [[6, 6, 6], [6, 6, 6], [6, 6, 6]]);
}

#[test]
fn a_group_of_one_copies_at_most() {
    for machine in machines() {
        machine.trace_start();
        local(&machine, 1, |rank| {
            let group = group_of(&rank, &custom("mine", &[&[0]]), "mine")?;
            let stream = rank.device.stream("compute")?;
            let data = put(&stream, "data", vec![1f32, 2.0, 3.0]);
            let other = alloc(&rank.device, "other", 3, DType::F32);
            for reduce in REDUCES {
                group.all_reduce(&stream, &data, reduce)?;
                group.reduce_scatter(&stream, &data, &data.flat(0..3)?, reduce)?;
            }
            group.all_gather(&stream, &data, &data)?;
            group.broadcast(&stream, &data, GroupRank(0))?;
            group.barrier(&stream)?;
            group.all_gather(&stream, &data, &other)?;
            assert_eq!(get::<f32>(&stream, &other)?, [1.0, 2.0, 3.0]);
            Ok::<_, PgError>(())
        })
        .unwrap();
        let trace = machine.trace_stop().to_text();
        assert!(!trace.contains("joint"), "{trace}");
        assert_eq!(
            trace.lines().filter(|line| line.starts_with("op ")).count(),
            3,
            "upload, one copy, download: {trace}"
        );
    }
}
