//! Every collective against a plain reference.

use device::{Element, Machine, Reduce};
use pgroups::{GroupRank, PgError, local};

use crate::running_support::*;

/// Members of one group and of another one that runs beside it.
const GROUPS: [(u32, &[&[u32]]); 6] = [
    (1, &[&[0]]),
    (2, &[&[1, 0]]),
    (3, &[&[0, 1, 2]]),
    (4, &[&[3, 0, 2, 1]]),
    (5, &[&[0, 4, 2], &[3, 1]]),
    (5, &[&[4, 2, 0, 3, 1]]),
];

/// Odd, below and above a block, and above a tile.
const NUMELS: [usize; 4] = [1, 5, 1027, 70_001];

const REDUCES: [Reduce; 3] = [Reduce::Sum, Reduce::Avg, Reduce::Max];

/// In the order of the members, in f32, rounded once.
fn reduced<T: Real>(members: &[u32], at: usize, numel: usize, reduce: Reduce) -> T {
    let mut all = members.iter().map(|&rank| values::<T>(rank, numel)[at].wide());
    let first = all.next().unwrap();
    match reduce {
        Reduce::Sum => T::of(all.fold(first, |a, b| a + b)),
        Reduce::Avg => T::of(all.fold(first, |a, b| a + b) / members.len() as f32),
        Reduce::Max => T::of(all.fold(first, f32::max)),
    }
}

fn bits<T: Real>(values: &[T]) -> Vec<u32> {
    values.iter().map(|value| value.wide().to_bits()).collect()
}

/// Runs `body` on every rank of every group on every machine: members, and what they compute, as bits by rank.
fn everywhere<T: Real>(
    numel: usize,
    body: impl Fn(&pgroups::Group, &device::Stream) -> Result<Vec<T>, PgError> + Sync,
    want: impl Fn(&[u32], usize) -> Vec<T>,
) {
    for (world, lists) in GROUPS {
        for machine in machines() {
            let got = local(&machine, world, |rank| {
                let group = group_of(&rank, &custom("mine", lists), "mine")?;
                let stream = rank.device.stream("compute")?;
                let got = body(&group, &stream)?;
                stream.synchronize()?;
                Ok::<_, PgError>(got)
            });
            let got = got.unwrap_or_else(|e| panic!("{}: {lists:?} x {numel}: {}", machine.driver(), e.chain()));
            for members in lists {
                for (place, &rank) in members.iter().enumerate() {
                    let want = want(members, place);
                    let here = format!("{} {members:?} place {place} x {numel} {}", machine.driver(), T::DTYPE);
                    assert_eq!(bits(&got[rank as usize]), bits(&want), "{here}");
                }
            }
        }
    }
}

fn all_gather_gives_every_shard<T: Real>() {
    for numel in NUMELS {
        everywhere::<T>(
            numel,
            |group, stream| {
                let shard = put(stream, "shard", values::<T>(group.rank().0, numel));
                let full = alloc(&stream.device(), "full", numel * group.size() as usize, T::DTYPE);
                group.all_gather(stream, &shard, &full)?;
                Ok(get(stream, &full)?)
            },
            |members, _| members.iter().flat_map(|&rank| values::<T>(rank, numel)).collect(),
        );
    }
}

#[test]
fn all_gather_gives_every_member_all_shards_in_member_order() {
    all_gather_gives_every_shard::<f32>();
    all_gather_gives_every_shard::<device::bf16>();
}
