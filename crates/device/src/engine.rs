//! The drivers behind one door.

use std::{fmt, sync::Arc};

use crate::{
    Error, Op, PendingJoint,
    cpu::{CpuEngine, Storage},
    cuda::{CudaEngine, GraphOnCard},
    device::DeviceInner,
    graph::GraphInner,
    joint::Arrival,
    machine::MachineInner,
    memory::Backing,
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
    Cuda(CudaEngine),
}

impl Engine {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Engine::Cpu(_) => "cpu",
            Engine::Sim(sim) if sim.computes() => "sim",
            Engine::Sim(_) => "dry",
            Engine::Cuda(_) => "cuda",
        }
    }

    pub(crate) fn computes(&self) -> bool {
        match self {
            Engine::Cpu(_) | Engine::Cuda(_) => true,
            Engine::Sim(sim) => sim.computes(),
        }
    }

    pub(crate) fn open(&self, stream: &Arc<StreamInner>) -> Result<(), Error> {
        match self {
            Engine::Cpu(_) => {}
            Engine::Sim(sim) => sim.open(stream),
            Engine::Cuda(cuda) => cuda.open_on(stream)?,
        }
        Ok(())
    }

    /// Fresh memory, on drivers that have any.
    pub(crate) fn alloc(&self, device: &DeviceInner, label: &str, bytes: usize) -> Result<Option<Backing>, Error> {
        match self {
            Engine::Cuda(cuda) => cuda.alloc(device, label, bytes).map(|memory| Some(Backing::Card(memory))),
            _ if self.computes() => {
                let storage = Storage::new(bytes, device.machine.options.fresh);
                let full = || Error::OutOfMemory { label: label.to_owned(), bytes };
                storage.map(|storage| Some(Backing::Host(storage))).ok_or_else(full)
            }
            _ => Ok(None),
        }
    }

    /// Refuses an operation that this driver cannot run, before it is queued or captured.
    pub(crate) fn check_op(&self, op: &Op) -> Result<(), Error> {
        match self {
            Engine::Cuda(cuda) => cuda.check_op(op),
            Engine::Cpu(_) | Engine::Sim(_) => Ok(()),
        }
    }

    /// Refuses a group that cannot meet on this driver.
    pub(crate) fn check_group(&self, name: &str, members: &[u32]) -> Result<(), Error> {
        match self {
            Engine::Cuda(cuda) => cuda
                .check_group(members)
                .map_err(|source| Error::Cuda { what: format!("group '{name}' cannot be made"), source }),
            Engine::Cpu(_) | Engine::Sim(_) => Ok(()),
        }
    }

    /// Joint operations that all members have called and that have not ended, where hosts cannot see the rest.
    pub(crate) fn pending(&self) -> Vec<PendingJoint> {
        match self {
            Engine::Cuda(cuda) => cuda.pending(),
            Engine::Cpu(_) | Engine::Sim(_) => Vec::new(),
        }
    }

    /// Peers of a rank that has failed, in calls that they have submitted with it and that it has not computed.
    pub(crate) fn peers_of(&self, rank: u32) -> Vec<Arrival> {
        match self {
            Engine::Cuda(cuda) => cuda.peers_of(rank),
            // They stand in their meetings.
            Engine::Cpu(_) | Engine::Sim(_) => Vec::new(),
        }
    }

    /// A host of `device` has given up: what it waits for need not happen any more.
    pub(crate) fn stop_waiting_for(&self, device: &DeviceInner) {
        if let Engine::Cuda(cuda) = self {
            cuda.stop_collectives(device);
        }
    }

    /// The driver's own form of a graph, where it has one.
    pub(crate) fn instantiate(
        &self,
        device: &Arc<DeviceInner>,
        graph: &Arc<GraphInner>,
    ) -> Result<Option<GraphOnCard>, Error> {
        match self {
            Engine::Cuda(cuda) => cuda.instantiate(device, graph).map(Some),
            Engine::Cpu(_) | Engine::Sim(_) => Ok(None),
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
            Engine::Cuda(cuda) => cuda.push(stream, item),
        }
    }

    /// The joint operation that `arrival` waits in is over.
    pub(crate) fn resume(&self, arrival: &Arrival) {
        match self {
            Engine::Cpu(cpu) => cpu.resume(arrival),
            Engine::Sim(sim) => sim.resume(arrival),
            Engine::Cuda(cuda) => cuda.resume(arrival),
        }
    }

    pub(crate) fn wait_host(&self, device: &DeviceInner, mark: &Arc<Mark>, what: Awaited<'_>) -> Waited {
        match self {
            Engine::Cpu(cpu) => cpu.wait_host(device, mark),
            Engine::Sim(sim) => sim.wait_host(device, mark, what),
            Engine::Cuda(cuda) => cuda.wait_host(device, mark),
        }
    }

    /// The stream was dropped: waits until nothing of it runs, and throws away what is queued.
    pub(crate) fn close(&self, stream: &Arc<StreamInner>) {
        match self {
            Engine::Cpu(cpu) => cpu.close(stream),
            Engine::Sim(sim) => sim.close(stream),
            Engine::Cuda(cuda) => cuda.close(stream),
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
