//! A model over a tensor group, each rank with its part, put together again to be compared with one rank's.

use std::{collections::BTreeMap, sync::Arc};

use device::{DType, Frame, FramePlan, Machine, MemoryKind, Reduce, Stream, View, ops::Factor};
use model::{Gpt, GptConfig, GptPlan, Microbatch, ModelError, RecomputeLayers, ShardConfig};
use pgroups::{
    GlobalRank, Group, Key, Layout, LayoutConfig, Needs, Param, Pass, ProcessGroups, Rank, Sequence, Shard, ShardMap,
    TensorParallel, Turn, Whole, local,
};

use crate::rig::Results;

pub(crate) fn over(tp: u32) -> Layout {
    Layout::new(&LayoutConfig::parse(&format!("tp={tp}")).unwrap()).unwrap()
}

/// The same work for one rank or for the ranks of a group.
#[derive(Clone)]
pub(crate) struct Work<'a> {
    pub(crate) config: GptConfig,
    pub(crate) values: &'a BTreeMap<String, Vec<f32>>,
    pub(crate) sequence: Sequence,
    pub(crate) len: usize,
    pub(crate) recompute: RecomputeLayers,
}

pub(crate) type Batches = Vec<(Vec<i32>, Vec<i32>)>;

/// What one rank has of the model.
pub(crate) struct Part {
    pub(crate) stream: Stream,
    pub(crate) plan: GptPlan,
    pub(crate) gpt: Gpt,
    params: Vec<(Param, ShardMap, Shard)>,
    pub(crate) tensor: Option<TensorParallel>,
    loss: View,
    keep: View,
}

impl Work<'_> {
    pub(crate) fn plan(&self, tp: u32) -> GptPlan {
        let shards = ShardConfig { alignment: 1, sequence: self.sequence, micro_batch: tp as usize };
        GptPlan::on(self.config.clone(), &over(tp), shards).unwrap()
    }

    /// On `rank`, at its place in `group`.
    pub(crate) fn part(&self, rank: &Rank, group: Option<&Group>) -> Result<Part, ModelError> {
        let (tp, place) = group.map_or((1, 0), |group| (group.size(), group.place().0));
        let (plan, layout, device) = (self.plan(tp), over(tp), &rank.device);
        let stream = device.stream("compute")?;
        let mut params = Vec::new();
        for p in plan.params() {
            let map = p.spec.shard_map(&layout).unwrap();
            let shard = map.shard(GlobalRank(place)).unwrap();
            let value = device.alloc(&p.spec.name, map.local_shape(), DType::F32, MemoryKind::Param)?;
            let grad = device.alloc("grad", map.local_shape(), DType::F32, MemoryKind::Grad)?;
            // Padding holds what would be noticed if it were read.
            let mut values = vec![1e3; value.numel()];
            let whole = &self.values[&p.spec.name];
            shard.each_run(&map, |global, local| {
                values[local].copy_from_slice(&whole[global.start as usize..global.end as usize]);
            });
            stream.upload(&value, values)?;
            params.push((Param::new(&p.spec.name, &value, &grad)?, map, shard));
        }
        let handles: Vec<Param> = params.iter().map(|(p, _, _)| p.clone()).collect();
        let gpt = plan.build_with(&handles, &self.recompute)?;
        let scalar = |label| device.alloc(label, &[], DType::F32, MemoryKind::Other);
        let (loss, keep) = (scalar("loss")?, scalar("keep")?);
        let tensor = group.map(|group| TensorParallel::new(group.clone(), self.sequence));
        Ok(Part { stream, plan, gpt, params, tensor, loss, keep })
    }
}

impl Part {
    pub(crate) fn weights(&self, pass: Pass) -> Whole<'static> {
        let whole = Whole::keeping(Turn::eager(pass), &self.keep);
        self.tensor.as_ref().map_or_else(|| Whole::keeping(Turn::eager(pass), &self.keep), |t| whole.over(t))
    }

    pub(crate) fn ids(&self, ids: &[i32], len: usize) -> View {
        let view = self.stream.device().alloc("ids", &[ids.len() / len, len], DType::I32, MemoryKind::Other).unwrap();
        self.stream.upload(&view, ids.to_vec()).unwrap();
        view
    }

    pub(crate) fn step(&self, f: &mut Frame, [tokens, targets]: [&View; 2], scale: f32) -> Result<(), ModelError> {
        let token_scale = Factor::Const(scale);
        let m = Microbatch { tokens, targets, loss: &self.loss, token_scale, slot: 0 };
        self.gpt.forward_loss(f, &mut self.weights(Pass::Forward), &m)?;
        self.gpt.backward(f, &mut self.weights(Pass::Backward), 0)
    }

    fn read(&self, view: &View) -> Result<Vec<f32>, ModelError> {
        Ok(self.stream.download(view)?.wait()?)
    }

    /// Losses and this rank's gradients, as whoever ends a step sees them.
    fn run(&self, batches: &Batches, len: usize, plan: Option<&Arc<FramePlan>>) -> Result<Results, ModelError> {
        let mut f = match plan {
            Some(plan) => Frame::planned(&self.stream, plan)?,
            None => Frame::unplanned(&self.stream, "frame"),
        };
        let mut losses = Vec::new();
        for (i, (tokens, targets)) in batches.iter().enumerate() {
            self.stream.upload(&self.keep, vec![if i == 0 { 0.0f32 } else { 1.0 }])?;
            let (tokens_view, targets_view) = (self.ids(tokens, len), self.ids(targets, len));
            f.restart();
            self.step(&mut f, [&tokens_view, &targets_view], 1.0 / (tokens.len() * batches.len()) as f32)?;
            losses.push(self.read(&self.loss)?[0]);
        }
        let partial = self.plan.partial_over_tp();
        let mut grads = BTreeMap::new();
        for (param, _, _) in &self.params {
            if let Some(tensor) = self.tensor.as_ref().filter(|_| partial.iter().any(|name| name == param.name())) {
                tensor.group().all_reduce(&self.stream, &param.main_grad(), Reduce::Sum)?;
            }
            grads.insert(param.name().to_owned(), self.read(&param.main_grad())?);
        }
        self.stream.synchronize()?;
        Ok((losses, grads))
    }
}

/// Loss and whole gradients of each of `lists`, the members of tensor groups in group order, on its own batches.
pub(crate) fn together(machine: &Machine, lists: &[&[u32]], work: &Work<'_>, batches: &[Batches]) -> Vec<Results> {
    together_in(machine, lists, work, batches, &[])
}

/// As [`together`], in frames of these plans, by place.
pub(crate) fn together_in(
    machine: &Machine,
    lists: &[&[u32]],
    work: &Work<'_>,
    batches: &[Batches],
    plans: &[Arc<FramePlan>],
) -> Vec<Results> {
    let world = lists.iter().map(|list| list.len() as u32).sum();
    let needs = tensor_groups(lists);
    let parts = local(machine, world, |rank| {
        let groups = ProcessGroups::build(&rank, &flat(world), &needs)?;
        let group = groups.get(&Key::named("tensor").unwrap(), "the test")?;
        let list = lists.iter().position(|list| list.contains(&rank.global.0)).unwrap();
        let part = work.part(&rank, Some(group))?;
        let (losses, grads) = part.run(&batches[list], work.len, plans.get(group.place().index()))?;
        let held = part.params.iter().map(|(p, map, shard)| (p.name().to_owned(), map.clone(), shard.clone()));
        Ok::<_, ModelError>((losses, grads, held.collect::<Vec<_>>()))
    });
    let parts = parts.unwrap_or_else(|error| panic!("{}", error.chain()));
    let one = |list: &&[u32]| {
        let members = list.iter().map(|rank| &parts[*rank as usize]);
        let losses = parts[list[0] as usize].0.clone();
        let mut whole: BTreeMap<String, Vec<Option<f32>>> = BTreeMap::new();
        for (own, grads, held) in members {
            assert_eq!(*own, losses, "members disagree about the loss");
            for (name, map, shard) in held {
                let numel = map.global_shape().iter().product();
                let whole = whole.entry(name.clone()).or_insert_with(|| vec![None; numel]);
                shard.each_run(map, |global, local| {
                    for (at, value) in (global.start as usize..).zip(&grads[name][local]) {
                        let known = whole[at].replace(*value);
                        let same = known.is_none_or(|known| known.to_bits() == value.to_bits());
                        assert!(same, "{name}[{at}] differs between members: {known:?} and {value}");
                    }
                });
            }
        }
        let all = |v: Vec<Option<f32>>| v.into_iter().map(|v| v.expect("somebody has it")).collect();
        (losses, whole.into_iter().map(|(name, v)| (name, all(v))).collect())
    };
    lists.iter().map(one).collect()
}

pub(crate) fn flat(world: u32) -> Layout {
    Layout::new(&LayoutConfig { dp: Some(world), ..LayoutConfig::default() }).unwrap()
}

pub(crate) fn tensor_groups(lists: &[&[u32]]) -> Needs {
    let lists = lists.iter().map(|list| list.iter().map(|&rank| GlobalRank(rank)).collect());
    Needs { custom: vec![(Key::named("tensor").unwrap(), lists.collect())], ..Needs::default() }
}

/// The whole work on one rank.
pub(crate) fn alone(machine: &Machine, work: &Work<'_>, batches: &Batches) -> Results {
    let work = Work { sequence: Sequence::Whole, ..work.clone() };
    let results = local(machine, 1, |rank| work.part(&rank, None)?.run(batches, work.len, None));
    results.unwrap().remove(0)
}

/// Invariant 13: losses to 2e-6, gradients to 2e-6 of their tensor's largest, with a floor of 2e-7 of the model's.
pub(crate) fn assert_agree(got: &Results, want: &Results, what: &str) {
    let largest = |v: &[f32]| v.iter().fold(0.0f32, |m, g| m.max(g.abs()));
    assert_eq!(got.0.len(), want.0.len());
    for (got, want) in got.0.iter().zip(&want.0) {
        assert!((got - want).abs() <= 2e-6 * want.abs(), "{what}: loss {got}, one rank has {want}");
    }
    let floor = 2e-7 * want.1.values().map(|v| largest(v)).fold(0.0, f32::max);
    assert_eq!(got.1.keys().collect::<Vec<_>>(), want.1.keys().collect::<Vec<_>>());
    for (name, want) in &want.1 {
        let off: Vec<f32> = got.1[name].iter().zip(want).map(|(a, b)| a - b).collect();
        assert!(got.1[name].iter().all(|v| v.is_finite()), "{what}: {name} is not finite");
        let bound = (2e-6 * largest(want)).max(floor);
        assert!(largest(&off) <= bound, "{what}: {name} is off by {:e}, the bound is {bound:e}", largest(&off));
    }
}
