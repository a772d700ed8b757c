//! Short forms for tests that run ranks.

use std::time::Duration;

use device::{DType, Device, Element, Error, Machine, MemoryKind, Options, Stream, View, bf16};
use pgroups::{GlobalRank, Group, Key, Layout, LayoutConfig, Needs, PgError, ProcessGroups, Rank};

/// Machines on which values must agree bit for bit: several numbers of workers, several orders.
pub(crate) fn machines() -> Vec<Machine> {
    let cpu = [1, 2, 4].map(cpu);
    let sim = [1, 2, 3].map(Machine::sim);
    cpu.into_iter().chain(sim).collect()
}

/// For large tensors, where the simulator is slow.
pub(crate) fn few_machines() -> Vec<Machine> {
    vec![cpu(1), cpu(2), cpu(4), Machine::sim(1)]
}

/// Gives up after a while without progress, so that no test hangs, also on a busy machine.
pub(crate) fn cpu(workers: usize) -> Machine {
    Machine::cpu_with(workers, waiting(30)).unwrap()
}

/// For tests whose error is that the limit was reached.
pub(crate) fn impatient(workers: usize) -> Machine {
    Machine::cpu_with(workers, waiting(1)).unwrap()
}

pub(crate) fn waiting(seconds: u64) -> Options {
    Options { timeout: Duration::from_secs(seconds), ..Options::default() }
}

/// A layout of `world` data ranks: whatever groups a test wants are custom ones.
pub(crate) fn flat(world: u32) -> Layout {
    Layout::new(&LayoutConfig { dp: Some(world), ..LayoutConfig::default() }).unwrap()
}

/// One custom key with these member lists.
pub(crate) fn custom(name: &str, lists: &[&[u32]]) -> Needs {
    let lists = lists.iter().map(|list| list.iter().map(|&rank| GlobalRank(rank)).collect());
    Needs { custom: vec![(Key::named(name).unwrap(), lists.collect())], ..Needs::default() }
}

/// The group of `key`, over a flat layout.
pub(crate) fn group_of(rank: &Rank, needs: &Needs, key: &str) -> Result<Group, PgError> {
    let groups = ProcessGroups::build(rank, &flat(rank.world_size), needs)?;
    Ok(groups.get(&Key::named(key).unwrap(), "a test")?.clone())
}

/// A test's element types.
pub(crate) trait Real: Element {
    fn of(value: f32) -> Self;
    fn wide(self) -> f32;
}

impl Real for f32 {
    fn of(value: f32) -> f32 {
        value
    }
    fn wide(self) -> f32 {
        self
    }
}

impl Real for bf16 {
    fn of(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

/// One of the values of [`values`].
pub(crate) fn value<T: Real>(rank: u32, at: usize) -> T {
    T::of(((rank as usize * 7919 + at * 31) % 1009) as f32 / 97.0 - 5.0)
}

/// `numel` values that differ between ranks and elements and have no short binary form.
pub(crate) fn values<T: Real>(rank: u32, numel: usize) -> Vec<T> {
    (0..numel).map(|at| value(rank, at)).collect()
}

pub(crate) fn alloc(device: &Device, label: &str, numel: usize, dtype: DType) -> View {
    device.alloc(label, &[numel], dtype, MemoryKind::Other).unwrap()
}

/// Fresh memory that holds `values` behind what `stream` has.
pub(crate) fn put<T: Element>(stream: &Stream, label: &str, values: Vec<T>) -> View {
    let view = alloc(&stream.device(), label, values.len(), T::DTYPE);
    stream.upload(&view, values).unwrap();
    view
}

pub(crate) fn get<T: Element>(stream: &Stream, view: &View) -> Result<Vec<T>, Error> {
    stream.download(view)?.wait()
}
