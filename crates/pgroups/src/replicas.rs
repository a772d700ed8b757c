//! Ranks that hold the same elements of a parameter compare them.

use std::collections::HashMap;

use device::{DType, MemoryKind, Stream, View, bf16};

use crate::{
    error::PgError,
    group::Group,
    layout::Layout,
    param::Param,
    philox::{fnv1a_64, split},
    placement::ParamSpec,
    plan_error::PlanError,
    rank::{GlobalRank, GroupRank},
    shard_map::{Shard, ShardMap},
    turn::{Pass, Turn},
};

/// Who holds the same elements of a model: replicas. Peers that hold other shards are none.
#[derive(Clone, Debug)]
pub struct Replicas {
    params: Vec<(String, ShardMap)>,
}

impl Replicas {
    /// Of all parameters of a model, on all ranks.
    ///
    /// # Errors
    /// Those of the placements.
    pub fn new(layout: &Layout, specs: &[ParamSpec]) -> Result<Replicas, PlanError> {
        let of = |spec: &ParamSpec| Ok((spec.name.clone(), spec.shard_map(layout)?));
        Ok(Replicas { params: specs.iter().map(of).collect::<Result<_, _>>()? })
    }

    /// Compares the values of every parameter, bit for bit, over those members of `everyone` that hold the same
    /// elements. Padding does not count.
    ///
    /// Values are read as forward reads them, behind their publication. All members call it, each with all of its
    /// `params`, and the host waits. On `dry` there are no values.
    ///
    /// # Errors
    /// [`PgError::ReplicasDiffer`], on every member; [`PgError::ParamNotGiven`]; [`PgError::Stale`]; the device's.
    pub fn compare(&self, everyone: &Group, stream: &Stream, params: &[Param]) -> Result<(), PgError> {
        if self.params.is_empty() || !stream.device().machine().computes() {
            return Ok(());
        }
        let held: HashMap<&str, &Param> = params.iter().map(|param| (param.name(), param)).collect();
        let rank = everyone.rank();
        let mut own = Vec::with_capacity(2 * self.params.len());
        for (name, map) in &self.params {
            let hash = match map.shard(rank) {
                None => 0,
                Some(shard) => {
                    let param = held.get(name.as_str());
                    let param = param.ok_or_else(|| PgError::ParamNotGiven { param: name.clone(), rank })?;
                    hash(param, &shard, map, stream)?
                }
            };
            own.extend(split(hash).map(u32::cast_signed));
        }
        self.judge(everyone, &gather(everyone, stream, own)?)
    }

    /// `words` are the hashes of all members, by place, two words each.
    fn judge(&self, everyone: &Group, words: &[i32]) -> Result<(), PgError> {
        let mut first = None;
        let mut differing = 0;
        for (i, (name, map)) in self.params.iter().enumerate() {
            let mut by_chunk: HashMap<Vec<usize>, (GlobalRank, &[i32])> = HashMap::new();
            let mut differs = None;
            for (place, words) in (0..).zip(words.chunks_exact(2 * self.params.len())) {
                let member = everyone.member(GroupRank(place)).expect("BUG: a place of this group");
                let Some(shard) = map.shard(member) else { continue };
                let words = &words[2 * i..2 * i + 2];
                let (holder, known) = *by_chunk.entry(shard.chunk).or_insert((member, words));
                if known != words {
                    differs = differs.or(Some((holder, member)));
                }
            }
            if let Some((rank, other)) = differs {
                differing += 1;
                first = first.or_else(|| Some((name.clone(), rank, other)));
            }
        }
        let params = self.params.len();
        first.map_or(Ok(()), |(param, rank, other)| {
            Err(PgError::ReplicasDiffer { param, rank, other, differing, params })
        })
    }
}

/// Of the elements that `shard` has, in their order.
fn hash(param: &Param, shard: &Shard, map: &ShardMap, stream: &Stream) -> Result<u64, PgError> {
    let mut turn = Turn::eager(Pass::Forward);
    let value = turn.read(param, stream)?;
    let bytes: Vec<u8> = match value.dtype() {
        DType::Bf16 => own(&stream.download::<bf16>(&value)?.wait()?, shard, map, |v| v.to_bits().to_le_bytes()),
        _ => own(&stream.download::<f32>(&value)?.wait()?, shard, map, |v| v.to_bits().to_le_bytes()),
    };
    turn.done(param, stream)?;
    Ok(fnv1a_64(bytes))
}

/// The bytes of a shard's elements, without padding.
fn own<T: Copy, const N: usize>(values: &[T], shard: &Shard, map: &ShardMap, bits: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(N * shard.numel());
    shard.each_run(map, |_, local| bytes.extend(values[local].iter().flat_map(|value| bits(*value))));
    bytes
}

/// Everybody's words, by place.
fn gather(everyone: &Group, stream: &Stream, own: Vec<i32>) -> Result<Vec<i32>, PgError> {
    let alloc = |label: &str, numel| -> Result<View, device::Error> {
        stream.device().alloc(label, &[numel], DType::I32, MemoryKind::Other)
    };
    let numel = own.len();
    let (part, all) = (alloc("pgroups.hashes", numel)?, alloc("pgroups.all_hashes", numel * everyone.size() as usize)?);
    stream.upload(&part, own)?;
    everyone.all_gather(stream, &part, &all)?;
    Ok(stream.download::<i32>(&all)?.wait()?)
}
