//! The drivers behind one door.

use std::{fmt, sync::Arc};

use crate::{
    cpu::CpuEngine,
    device::DeviceInner,
    joint::Arrival,
    machine::MachineInner,
    queue::{Item, Mark, StreamInner},
    sim::SimEngine,
};

/// How a host's wait ended.
pub(crate) enum Waited {
    Done,
    /// The machine's limit passed and nothing completed anywhere.
    NothingMoved,
}

/// What a host waits for, with its name.
#[derive(Clone, Copy)]
pub(crate) enum Awaited<'a> {
    /// All of a stream so far.
    Stream(&'a str),
    /// The last record of an event.
    Event(&'a str),
    /// A copy of this memory.
    Values(&'a str),
}

impl<'a> Awaited<'a> {
    pub(crate) fn name(self) -> &'a str {
        let (Awaited::Stream(name) | Awaited::Event(name) | Awaited::Values(name)) = self;
        name
    }
}

impl fmt::Display for Awaited<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Awaited::Stream(name) => write!(f, "stream '{name}'"),
            Awaited::Event(name) => write!(f, "event '{name}'"),
            Awaited::Values(name) => write!(f, "the values of '{name}'"),
        }
    }
}

/// A closed set, so the signatures above carry no driver.
pub(crate) enum Engine {
    Cpu(CpuEngine),
    Sim(SimEngine),
}

impl Engine {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Engine::Cpu(_) => "cpu",
            Engine::Sim(sim) if sim.computes() => "sim",
            Engine::Sim(_) => "dry",
        }
    }

    pub(crate) fn computes(&self) -> bool {
        match self {
            Engine::Cpu(_) => true,
            Engine::Sim(sim) => sim.computes(),
        }
    }

    pub(crate) fn open(&self, stream: &Arc<StreamInner>) {
        match self {
            Engine::Cpu(_) => {}
            Engine::Sim(sim) => sim.open(stream),
        }
    }

    /// The caller holds the stream's submission lock, so the order of pushes is the order of positions. It gets
    /// finished items back, for the inbox to free when the lock is let go.
    #[must_use]
    pub(crate) fn push(&self, stream: &Arc<StreamInner>, item: Item) -> Vec<Item> {
        match self {
            Engine::Cpu(cpu) => cpu.push(stream, item),
            Engine::Sim(sim) => {
                sim.push(stream, item);
                Vec::new()
            }
        }
    }

    /// The joint operation that `arrival` waits in is over.
    pub(crate) fn resume(&self, arrival: &Arrival) {
        match self {
            Engine::Cpu(cpu) => cpu.resume(arrival),
            Engine::Sim(sim) => sim.resume(arrival),
        }
    }

    pub(crate) fn wait_host(&self, device: &DeviceInner, mark: &Arc<Mark>, what: Awaited<'_>) -> Waited {
        match self {
            Engine::Cpu(cpu) => cpu.wait_host(device, mark),
            Engine::Sim(sim) => sim.wait_host(device, mark, what),
        }
    }

    /// The stream was dropped: waits until nothing of it runs, and throws away what is queued.
    pub(crate) fn close(&self, stream: &Arc<StreamInner>) {
        match self {
            Engine::Cpu(cpu) => cpu.close(stream),
            Engine::Sim(sim) => sim.close(stream),
        }
    }

    pub(crate) fn expect(&self, ranks: &[u32]) {
        if let Engine::Sim(sim) = self {
            sim.expect(ranks);
        }
    }

    pub(crate) fn enter(&self, rank: u32, machine: &MachineInner) {
        if let Engine::Sim(sim) = self {
            sim.enter(rank, machine);
        }
    }

    pub(crate) fn exit(&self, rank: u32) {
        if let Engine::Sim(sim) = self {
            sim.exit(rank);
        }
    }
}
