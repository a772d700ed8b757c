//! Layers on the ranks of a tensor group, their parts cut from whole values and put together again.

use std::collections::BTreeMap;

use device::{DType, Frame, Fresh, Machine, MemoryKind, Options, Stream, View};
use gtp::layers::LayerError;
use pgroups::{
    Axis, GlobalRank, Key, Layout, LayoutConfig, Needs, Param, Pass, Placement, ProcessGroups, Rank, Sequence,
    TensorParallel, Turn, Whole, local,
};

use super::rig::cards;

/// `rows` times `columns` values without a pattern, in -1..1.
pub(crate) fn values(seed: u64, numel: usize) -> Vec<f32> {
    let word = |i: usize| pgroups::philox_4x32_10([i as u32, 0, 0, 3], [seed as u32, 9])[0];
    (0..numel).map(|i| word(i) as f32 / u32::MAX as f32 * 2.0 - 1.0).collect()
}

/// One rank's side of a test.
pub(crate) struct Side {
    pub(crate) stream: Stream,
    pub(crate) frame: Frame,
    pub(crate) tensor: TensorParallel,
    layout: Layout,
}

impl Side {
    pub(crate) fn size(&self) -> usize {
        self.tensor.group().size() as usize
    }

    pub(crate) fn place(&self) -> usize {
        self.tensor.group().place().index()
    }

    pub(crate) fn weights(&self, pass: Pass) -> Whole<'static> {
        Whole::new(Turn::eager(pass)).over(&self.tensor)
    }

    /// This rank's part of a parameter; its gradient starts from 0.25, so that a contribution must be added.
    pub(crate) fn param(&self, name: &str, placement: &Placement, whole: &[f32]) -> Result<Param, LayerError> {
        let map = placement.on(self.layout.grid(pgroups::ParamClass::Dense)).unwrap();
        let shard = map.shard(GlobalRank(self.place() as u32)).unwrap();
        // Padding holds what would be noticed if it were read.
        let mut own = vec![1e3; map.local_shape().iter().product()];
        shard.each_run(&map, |global, local| {
            own[local].copy_from_slice(&whole[global.start as usize..global.end as usize]);
        });
        let value = self.put(map.local_shape(), own);
        let grad = self.put(map.local_shape(), vec![0.25; value.numel()]);
        Ok(Param::new(name, &value, &grad)?)
    }

    /// Where each of this rank's elements of a parameter's gradient belongs, and its contribution.
    pub(crate) fn grad(&self, param: &Param, placement: &Placement) -> Result<Vec<(usize, f32)>, LayerError> {
        let map = placement.on(self.layout.grid(pgroups::ParamClass::Dense)).unwrap();
        let shard = map.shard(GlobalRank(self.place() as u32)).unwrap();
        let own = self.get(&param.main_grad())?;
        let mut placed = Vec::new();
        shard.each_run(&map, |global, local| {
            placed.extend((global.start as usize..).zip(own[local].iter().map(|v| v - 0.25)));
        });
        Ok(placed)
    }

    pub(crate) fn put(&self, shape: &[usize], values: Vec<f32>) -> View {
        let view = self.stream.device().alloc("x", shape, DType::F32, MemoryKind::Other).unwrap();
        self.stream.upload(&view, values).unwrap();
        view
    }

    pub(crate) fn ids(&self, ids: &[i32]) -> View {
        let view = self.stream.device().alloc("ids", &[ids.len()], DType::I32, MemoryKind::Other).unwrap();
        self.stream.upload(&view, ids.to_vec()).unwrap();
        view
    }

    /// What a rank has of `[rows, columns]` outside parallel regions.
    pub(crate) fn rows(&self, whole: &[f32], columns: usize) -> View {
        let rows = whole.len() / columns;
        match self.tensor.sequence() {
            Sequence::Whole => self.put(&[rows, columns], whole.to_vec()),
            Sequence::Split => {
                let own = rows / self.size();
                let part = self.place() * own * columns..(self.place() + 1) * own * columns;
                self.put(&[own, columns], whole[part].to_vec())
            }
        }
    }

    pub(crate) fn get(&self, view: &View) -> Result<Vec<f32>, LayerError> {
        Ok(self.stream.download(view)?.wait()?)
    }
}

/// Values by name, each element with its place in the whole tensor.
pub(crate) type Placed = BTreeMap<&'static str, Vec<(usize, f32)>>;

/// Runs `body` on every rank of the groups `lists` and puts what the members of each give together. Elements that
/// several members have must be equal bit for bit.
pub(crate) fn on_groups(
    machine: &Machine,
    lists: &[&[u32]],
    sequence: Sequence,
    body: impl Fn(&mut Side, usize) -> Result<Placed, LayerError> + Sync,
) -> Vec<BTreeMap<&'static str, Vec<f32>>> {
    let world = lists.iter().map(|list| list.len() as u32).sum();
    let key = Key::named("tensor").unwrap();
    let members = lists.iter().map(|list| list.iter().map(|&rank| GlobalRank(rank)).collect()).collect();
    let needs = Needs { custom: vec![(key.clone(), members)], ..Needs::default() };
    let parts = local(machine, world, |rank: Rank| {
        let flat = Layout::new(&LayoutConfig { dp: Some(world), ..LayoutConfig::default() }).unwrap();
        let groups = ProcessGroups::build(&rank, &flat, &needs)?;
        let group = groups.get(&key, "the test")?.clone();
        let layout = Layout::new(&LayoutConfig { tp: group.size(), ..LayoutConfig::default() }).unwrap();
        let stream = rank.device.stream("compute")?;
        let frame = Frame::unplanned(&stream, "frame");
        let mut side = Side { stream, frame, tensor: TensorParallel::new(group, sequence), layout };
        let placed = body(&mut side, lists.iter().position(|list| list.contains(&rank.global.0)).unwrap())?;
        side.stream.synchronize()?;
        Ok::<_, LayerError>(placed)
    });
    let parts = parts.unwrap_or_else(|error| panic!("{}", error.chain()));
    lists.iter().map(|list| joined(list.iter().map(|rank| &parts[*rank as usize]))).collect()
}

fn joined<'a>(parts: impl Iterator<Item = &'a Placed>) -> BTreeMap<&'static str, Vec<f32>> {
    let mut whole: BTreeMap<&'static str, BTreeMap<usize, f32>> = BTreeMap::new();
    for (name, placed) in parts.flatten() {
        for (at, value) in placed {
            let known = whole.entry(name).or_default().insert(*at, *value);
            let same = known.is_none_or(|known| known.to_bits() == value.to_bits());
            assert!(same, "{name}[{at}] differs between members: {known:?} and {value}");
        }
    }
    let all = |(name, values): (&'static str, BTreeMap<usize, f32>)| {
        assert!(values.keys().copied().eq(0..values.len()), "{name} has gaps");
        (name, values.into_values().collect())
    };
    whole.into_iter().map(all).collect()
}

/// Elements of rows that this rank has outside parallel regions.
pub(crate) fn own_rows(side: &Side, values: Vec<f32>) -> Vec<(usize, f32)> {
    let start = if side.tensor.sequence() == Sequence::Split { side.place() * values.len() } else { 0 };
    (start..).zip(values).collect()
}

/// Elements of this rank's columns, `from` on of `columns`.
pub(crate) fn own_columns(values: &[f32], width: usize, from: usize, columns: usize) -> Vec<(usize, f32)> {
    let place = |i: usize| (i / width) * columns + from + i % width;
    values.iter().enumerate().map(|(i, v)| (place(i), *v)).collect()
}

pub(crate) fn assert_close(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let off = got.iter().zip(want).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
    // A sum over ranks rounds in another order than one sum does.
    assert!(got.iter().all(|v| v.is_finite()) && off <= 2e-6 * largest, "{what}: off by {off:e} of {largest}");
}

/// The machines, groups and sequences that a layer must give the undivided layer's values on. Groups of two with gaps
/// and of four, permuted.
pub(crate) fn everywhere(check: impl Fn(&Machine, &[&[u32]], Sequence)) {
    let poisoned = || Machine::cpu_with(2, Options { fresh: Fresh::Poisoned, ..Options::default() }).unwrap();
    let cards = cards();
    for sequence in [Sequence::Whole, Sequence::Split] {
        for lists in [&[&[0u32, 1][..]][..], &[&[2, 0, 3, 1]], &[&[3, 0], &[1, 2]]] {
            check(&poisoned(), lists, sequence);
            check(&Machine::sim(lists.len() as u64), lists, sequence);
            cards.iter().for_each(|card| check(card, lists, sequence));
        }
    }
}

/// The undivided layer: a group of one.
pub(crate) fn undivided(
    body: impl Fn(&mut Side, usize) -> Result<Placed, LayerError> + Sync,
    samples: usize,
) -> BTreeMap<&'static str, Vec<f32>> {
    on_groups(&Machine::cpu(1).unwrap(), &[&[0]], Sequence::Whole, |side, _| body(side, samples)).remove(0)
}

pub(crate) fn column(shape: [usize; 2], blocks: usize) -> Placement {
    Placement::whole(shape).cut_blocks(0, Axis::TP, 0, blocks)
}
