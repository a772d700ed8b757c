//! From a plan and a collection of groups to everything that a step needs.

use std::sync::{Arc, Mutex, atomic::AtomicU8};

use device::{DType, Device, Error, MemoryKind, Reduce, Stream, ops::Fill};
use pgroups::{Axis, Group, Key, ParamClass, PgError, PlannedKey, ProcessGroups};

use crate::{
    Accumulation, BucketPlan, DdpConfig, DdpError, ParamBuffers, Scaling,
    agree::agree,
    core::{BucketGroup, BucketViews, Core, Counts, Peers, Phase, Staging, StepState, Tokens},
    gates::{Crowd, Gates},
    plan::BucketId,
    publication::Publisher,
    readiness::Readiness,
    reduction::Sink,
    scaling::Replication,
};

/// Builds a rank's core and attaches it to its parameters.
pub(crate) fn build(
    buffers: &ParamBuffers,
    groups: &ProcessGroups,
    config: DdpConfig,
    stream: &Stream,
) -> Result<Arc<Core>, DdpError> {
    let (device, plan) = (stream.device(), buffers.plan());
    let (dense, expert) = peers(plan, groups, &config)?;
    check_accumulation(&config, &dense)?;
    let (reduce, gather) = (device.stream("ddp.reduce")?, device.stream("ddp.gather")?);
    agree(&dense.reduce, &reduce, format!("{config:?}, {:?}", plan.config()), buffers.declared())?;
    let scalar = |label: &str| device.alloc(label, &[1], DType::F32, MemoryKind::Other);
    let tokens = Tokens {
        group: match config.scaling {
            Scaling::PerToken => everyone(groups)?,
            Scaling::Mean | Scaling::Averaging => None,
        },
        total: scalar("ddp.tokens")?,
        factor: scalar("ddp.token_factor")?,
        counted: device.event("ddp.counted"),
    };
    let params: Vec<_> = buffers.trained().iter().map(|held| held.param.clone()).collect();
    let replica = |held: &crate::buffers::Held| {
        held.map.shard(buffers.rank()).expect("BUG: a held parameter has a shard").replica
    };
    let first_read = plan.first_read_order();
    // Backward fills last what forward reads first, whatever buffers and classes the buckets belong to.
    let reduce_order: Vec<usize> = first_read.iter().rev().copied().collect();
    let members = |&group: &usize| plan.groups()[group].iter().flat_map(|&id| plan.bucket(id).params.clone()).collect();
    let state = StepState {
        readiness: Readiness::new(reduce_order.iter().map(members).collect(), params.len()),
        phase: Phase::Idle,
        microbatch: 0,
        paused: 0,
        away: None,
        owned: 0,
        used: vec![0; params.len()],
        opened: vec![0; params.len()],
        publications: vec![None; plan.groups().len()],
    };
    let core = Arc::new(Core {
        groups: bucket_groups(buffers, &device, |class| match (class, &expert) {
            (ParamClass::Expert, Some(expert)) => expert,
            _ => &dense,
        })?,
        places: if dense.sharded { places(groups, &dense.reduce) } else { Vec::new() },
        first_read,
        reduce_order,
        replicas: buffers.trained().iter().map(replica).collect(),
        params,
        staging: staging(plan, &device, &config)?,
        keep: scalar("ddp.keep")?,
        keep_set: device.event("ddp.keep_set"),
        finished: device.event("ddp.finished"),
        plan: plan.clone(),
        state: Mutex::new(state),
        counts: Counts::default(),
        omitted: AtomicU8::new(0),
        config,
        dense,
        expert,
        tokens,
        reduce,
        gather,
    });
    open_gates(&core, stream)?;
    attach(&core);
    Ok(core)
}

/// Every gate is recorded once, so that the first step waits for nothing unrecorded.
fn open_gates(core: &Core, stream: &Stream) -> Result<(), DdpError> {
    stream.launch(Fill { y: &core.keep, value: 0.0 }.op("ddp.keep")?)?;
    for event in [&core.keep_set, &core.finished, &core.tokens.counted] {
        stream.record(event)?;
    }
    for group in &core.groups {
        let after = || pgroups::After::Stream(stream);
        for event in [&group.gates.published, &group.written, &group.reduced] {
            stream.record(event)?;
        }
        group.gates.releases.note(after())?;
        group.free.note(after())?;
    }
    Ok(())
}

fn attach(core: &Arc<Core>) {
    for (group, ids) in core.plan.groups().iter().enumerate() {
        let gates = core.groups[group].gates.clone();
        let publisher = Arc::new(Publisher { gates, core: Arc::downgrade(core), group });
        for &param in ids.iter().flat_map(|&id| &core.plan.bucket(id).params) {
            let sink = Sink { core: Arc::downgrade(core), param, keep: core.keep.clone() };
            core.params[param].attach(Some(publisher.clone()), Some(Arc::new(sink)));
        }
    }
}

fn peers(plan: &BucketPlan, groups: &ProcessGroups, config: &DdpConfig) -> Result<(Peers, Option<Peers>), DdpError> {
    let layout = groups.plan().layout();
    let has_experts = plan.buffers().iter().any(|buffer| buffer.key().class == ParamClass::Expert);
    let find = |key: &Key, who: &'static str| -> Result<Group, DdpError> {
        let group = groups.derived(key, who)?;
        Ok(group.unwrap_or_else(|| groups.single()).clone())
    };
    // Replicated weights are completed over the weight shards' axis: without the group nobody could.
    find(&Key::GTP, "gradients over the weight-shard axis")?;
    let dense = find(&Key::DP_CP, "reduction of gradients")?;
    let expert = if has_experts { Some(find(&Key::EXPT_DP, "reduction of experts' gradients")?) } else { None };
    let ranks = Replication {
        dense: dense.size(),
        expert: expert.as_ref().map_or(1, Group::size),
        weight_shards: layout.size(ParamClass::Dense, &Axis::GTP),
    };
    let open = |class, group: &Group| -> Result<Peers, DdpError> {
        let planned = plan.config().sharding.shards(class);
        if let Some(planned) = planned.filter(|&planned| planned != group.size()) {
            let (group, size) = (group.name().to_owned(), group.size());
            return Err(DdpError::ShardCount { class, planned, group, size });
        }
        Ok(Peers {
            reduce: second(group, "ddp_reduce")?,
            gather: second(group, "ddp_gather")?,
            norm: second(group, "ddp_norm")?,
            sharded: planned.is_some(),
            scaling: config.scaling.of(class, ranks)?,
        })
    };
    let expert = expert.map(|group| open(ParamClass::Expert, &group)).transpose()?;
    Ok((open(ParamClass::Dense, &dense)?, expert))
}

/// Who owns which shard, wherever lists of replicas were supplied.
fn places(groups: &ProcessGroups, replicas: &Group) -> Vec<Option<u32>> {
    let own = |entry: &&PlannedKey| entry.own().is_some_and(|own| own.members[..] == *replicas.members());
    let mut places = Vec::new();
    if let Some(entry) = groups.plan().entries().iter().find(own) {
        for index in 0..entry.group_count() {
            for (rank, place) in entry.members(index).into_iter().zip(0..) {
                let at = rank.0 as usize;
                places.resize(places.len().max(at + 1), None);
                places[at] = Some(place);
            }
        }
    }
    places
}

fn everyone(groups: &ProcessGroups) -> Result<Option<Group>, DdpError> {
    let group = groups.derived(&Key::DP_CP_GTP, "number of tokens")?;
    group.map(|group| second(group, "ddp_tokens")).transpose()
}

/// A communicator of its own. A model that is wrapped again opens another, the same on all ranks.
pub(crate) fn second(group: &Group, label: &str) -> Result<Group, DdpError> {
    let mut asked = label.to_owned();
    for again in 1u32.. {
        match group.second(&asked) {
            Err(PgError::SecondTwice { .. }) => asked = format!("{label}_{again}"),
            done => return Ok(done?),
        }
    }
    unreachable!("BUG: more communicators than numbers")
}

fn check_accumulation(config: &DdpConfig, dense: &Peers) -> Result<(), DdpError> {
    if config.accumulation == Accumulation::F32 {
        if !dense.sharded {
            return Err(DdpError::F32Accumulation { rule: "sums a shard at its owner: turn sharding on" });
        }
        if dense.scaling.reduce != Reduce::Sum {
            return Err(DdpError::F32Accumulation { rule: "sums: choose the mean by pre-scale, not averages" });
        }
    }
    Ok(())
}

fn bucket_groups<'p>(
    buffers: &ParamBuffers,
    device: &Device,
    peers: impl Fn(ParamClass) -> &'p Peers,
) -> Result<Vec<BucketGroup>, DdpError> {
    let plan = buffers.plan();
    let order = plan.first_read_order();
    let next = |group: usize| {
        let at = order.iter().position(|&other| other == group)?;
        order.get(at + 1).copied()
    };
    let views = |id: BucketId| -> Result<BucketViews, Error> {
        let (buffer, flat) = (&plan.buffers()[id.buffer], &buffers.flats()[id.buffer]);
        let range = buffer.buckets()[id.bucket].range.clone();
        let own = buffer.shard(id.bucket, peers(buffer.key().class).reduce.place().0);
        Ok(BucketViews {
            id,
            values: flat.values.flat(range.clone())?,
            grads: flat.grads.flat(range)?,
            own_values: flat.values.flat(own.clone())?,
            own_grads: flat.grads.flat(own)?,
        })
    };
    let group = |(i, ids): (usize, &Vec<BucketId>)| -> Result<BucketGroup, DdpError> {
        let first = plan.bucket(ids[0]).params.last().map_or("", |&param| plan.params()[param].name.as_str());
        let name = format!("bucket group {i} ('{first}' on)");
        let event = |what: &str| device.event(&format!("ddp.{what}.{i}"));
        let class = plan.buffers()[ids[0].buffer].key().class;
        // A trace knows a publisher by this name. No other communicator of the process has the name of this one, so
        // two models with equal parameters stay apart, and so do the wrappers of a model that is wrapped again.
        let published = device.event(&format!("ddp.published.{first}@{}", peers(class).gather.name()));
        Ok(BucketGroup {
            class,
            buckets: ids.iter().map(|&id| views(id)).collect::<Result<_, _>>()?,
            next: next(i),
            gates: Arc::new(Gates::new(published, &format!("ddp.{i}"))),
            written: event("written"),
            landed: Crowd::new(format!("ddp.landed.{i}")),
            reduced: event("reduced"),
            free: Crowd::new(format!("ddp.free.{i}")),
            name,
        })
    };
    plan.groups().iter().enumerate().map(group).collect()
}

/// Only bf16 gradients need room: f32 ones are summed in f32 anyway.
fn staging(plan: &BucketPlan, device: &Device, config: &DdpConfig) -> Result<Option<Staging>, DdpError> {
    if config.accumulation != Accumulation::F32 {
        return Ok(None);
    }
    let narrow = plan.buffers().iter().filter(|buffer| buffer.key().grad == DType::Bf16);
    let sizes = narrow.flat_map(|buffer| {
        let shards = buffer.shards().unwrap_or(1) as usize;
        buffer.buckets().iter().map(move |bucket| (bucket.range.len(), bucket.range.len() / shards))
    });
    let (whole, piece) = sizes.fold((0, 0), |(a, b), (whole, piece)| (a.max(whole), b.max(piece)));
    let alloc = |label, numel, dtype| device.alloc(label, &[numel], dtype, MemoryKind::Grad);
    Ok(Some(Staging { pieces: alloc("ddp.pieces", whole, DType::Bf16)?, sum: alloc("ddp.sum", piece, DType::F32)? }))
}
