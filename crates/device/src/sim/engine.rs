//! The scheduler: queues of all streams of all ranks, and one step at a time.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, atomic::Ordering},
    thread,
};

use super::{
    chooser::Chooser,
    guide::Followed,
    hosts::Host,
    state::{Candidate, Lane, Meet, State, key},
};
use crate::{
    Asked, Departure, Error,
    cpu::{self, Alone},
    device::DeviceInner,
    engine::{Awaited, Waited},
    joint::Arrival,
    machine::MachineInner,
    queue::{Item, Mark, StreamInner},
};

/// Runs operations of all ranks one after the other.
pub(crate) struct SimEngine {
    computes: bool,
    state: Mutex<State>,
    /// For whoever waits until nobody makes steps. A host that waits for its turn has a bell of its own.
    free: Condvar,
}

impl SimEngine {
    pub(crate) fn new(chooser: Chooser, computes: bool) -> Self {
        SimEngine { computes, state: Mutex::new(State::new(chooser)), free: Condvar::new() }
    }

    pub(crate) fn computes(&self) -> bool {
        self.computes
    }

    /// What a guided run has shown; once it is over.
    pub(crate) fn followed(&self) -> Option<Followed> {
        let mut state = self.lock();
        let left_over = !state.streams.values().all(Lane::is_idle);
        let guide = state.chooser.guide()?;
        if left_over {
            guide.leaves_over();
        }
        Some(guide.take())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.free.wait(state).unwrap_or_else(|poison| poison.into_inner())
    }

    /// The lock, once no other thread makes steps. An operation passes: its thread is the one that does.
    fn free(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while state.driver.is_some_and(|driver| driver != thread::current().id()) {
            state = self.wait(state);
        }
        state
    }

    pub(crate) fn open(&self, stream: &Arc<StreamInner>) {
        let mut state = self.lock();
        if let Some(guide) = state.chooser.guide() {
            guide.opened(&stream.device);
        }
        state.streams.insert(key(stream), Lane::new(stream));
    }

    pub(crate) fn push(&self, stream: &Arc<StreamInner>, item: Item) {
        let mut state = self.lock();
        let State { streams, chooser, .. } = &mut *state;
        let lane = streams.get_mut(&key(stream)).expect("BUG: a stream that was never opened");
        lane.queue.push_back(item);
        if let Some(guide) = chooser.guide() {
            lane.submitted.push_back(guide.host_past());
        }
    }

    /// Called with and without the scheduler's lock, so it only lowers the flag.
    pub(crate) fn resume(&self, arrival: &Arrival) {
        arrival.at_joint().store(false, Ordering::Release);
    }

    pub(crate) fn close(&self, stream: &Arc<StreamInner>) {
        let mut state = self.free();
        let Some(mut lane) = state.streams.remove(&key(stream)) else { return };
        if let Some(guide) = state.chooser.guide().filter(|_| !lane.is_idle()) {
            guide.leaves_over();
        }
        if let Some(Meet::Here { exchange, member }) = lane.meet {
            // All have come, so it is under way: this member's part is waited for, as a running operation is.
            exchange.take(self.computes);
            exchange.deliver(member, self.computes);
            lane.queue.pop_front();
        }
        let launched = lane.launch.take();
        if let Some(running) = &launched {
            for meet in running.meets.values() {
                if let Meet::Here { exchange, member } = meet {
                    exchange.take(self.computes);
                    exchange.deliver(*member, self.computes);
                }
            }
            if running.launch.unstarted() > 0 {
                lane.queue.push_front(Item::Launch(Some(running.launch.clone())));
            } else {
                drop(running.launch.give_up());
            }
        }
        let queue: Vec<Item> = lane.queue.into();
        if stream.throw_away(&queue, 0) {
            for item in &queue {
                let parked = item.give_up();
                debug_assert!(parked.is_empty(), "BUG: the simulator asks marks, it never parks");
            }
        } else if !queue.is_empty() {
            state.orphans.push(queue.iter().cloned().collect());
        }
        // Operations may own handles, whose drop comes back here: not under the lock.
        drop(state);
        drop((queue, launched));
    }

    pub(crate) fn expect(&self, ranks: &[u32]) {
        let mut state = self.free();
        state.hosts.by_rank.extend(ranks.iter().map(|rank| (*rank, Host::Ready)));
        if state.hosts.turn.is_none() {
            state.hosts.pass_turn();
            state.hosts.ring();
        }
    }

    pub(crate) fn enter(&self, rank: u32, machine: &MachineInner) {
        let mut state = self.free();
        state.hosts.by_rank.entry(rank).or_insert(Host::Ready);
        if state.hosts.turn.is_none() {
            state.hosts.pass_turn();
            state.hosts.ring();
        }
        state = self.await_turn(state, rank, machine);
        state.hosts.by_rank.insert(rank, Host::Running);
    }

    pub(crate) fn exit(&self, rank: u32) {
        let mut state = self.free();
        state.hosts.by_rank.remove(&rank);
        if state.hosts.turn == Some(rank) {
            state.hosts.turn = None;
            // An operation that ends its host's turn leaves the rest to the one that runs it.
            if state.driver.is_none() {
                drop(self.pass_turn(state));
            }
        }
    }

    pub(crate) fn wait_host(&self, device: &DeviceInner, mark: &Arc<Mark>, what: Awaited<'_>) -> Waited {
        let rank = device.rank;
        let mut state = self.free();
        if state.driver.is_some() {
            // What this would wait for cannot run before the operation that waits for it is over.
            let waiting = Asked(vec![(rank, format!("inside an operation to wait for {what}"))]);
            drop(state);
            let pending = device.machine.pending();
            device.machine.fail(device, Error::Deadlock { waiting, pending });
            return Waited::Done;
        }
        if state.hosts.turn != Some(rank) {
            // Nobody told the scheduler of hosts, so this thread is the only one.
            state.driver = Some(thread::current().id());
            while !mark.is_done() {
                let moved;
                (state, moved) = self.step(state, Some(mark));
                if !moved {
                    state.deadlock(&[device], Asked(vec![(rank, format!("to wait for {what}"))]));
                }
            }
            state.driver = None;
            state.chooser.guide().into_iter().for_each(|guide| guide.host_waited(mark));
            self.free.notify_all();
            return Waited::Done;
        }
        let what = what.to_string();
        state.hosts.by_rank.insert(rank, Host::Blocked { mark: mark.clone(), what });
        state.hosts.turn = None;
        state = self.pass_turn(state);
        state = self.await_turn(state, rank, &device.machine);
        state.hosts.by_rank.insert(rank, Host::Running);
        state.chooser.guide().into_iter().for_each(|guide| guide.host_waited(mark));
        Waited::Done
    }

    /// Blocks until it is the turn of `rank`. A rank that was announced and whose thread does not enter holds the turn
    /// of all: after the machine's limit it has left its groups, and the others go on without it.
    fn await_turn<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        rank: u32,
        machine: &MachineInner,
    ) -> MutexGuard<'a, State> {
        let bell = state.hosts.bell(rank);
        while state.hosts.turn != Some(rank) {
            let holder = state.hosts.absent();
            let limit = machine.options.timeout;
            let waited = bell.wait_timeout(state, limit).unwrap_or_else(|poison| poison.into_inner());
            let over;
            (state, over) = (waited.0, waited.1.timed_out());
            let Some(absent) = holder.filter(|_| over && state.hosts.absent() == holder) else { continue };
            state.hosts.by_rank.remove(&absent);
            state.hosts.turn = None;
            drop(state);
            machine.depart(absent, Departure::NeverEntered);
            state = self.free();
            if state.hosts.turn.is_none() {
                state = self.pass_turn(state);
            }
        }
        state
    }

    /// Runs operations until some host can go on, and gives it the turn.
    fn pass_turn<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.driver = Some(thread::current().id());
        while !state.hosts.by_rank.is_empty() && !state.hosts.pass_turn() {
            let moved;
            (state, moved) = self.step(state, None);
            if !moved {
                let devices = state.devices_of_hosts();
                let devices: Vec<&DeviceInner> = devices.iter().map(|d| &**d).collect();
                state.deadlock(&devices, Asked(Vec::new()));
            }
        }
        state.driver = None;
        self.free.notify_all();
        state.hosts.ring();
        state
    }

    /// Runs one thing, or settles what costs no time; false if nothing can move. `awaited` is what the only host waits
    /// for, if no host is registered: once it is done, that host goes on before anything else runs.
    fn step<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        awaited: Option<&Arc<Mark>>,
    ) -> (MutexGuard<'a, State>, bool) {
        let mut settled = state.settle_all();
        while !state.spent.is_empty() {
            // They may own the last handles of streams, whose drop comes back here: not under the lock.
            let spent = std::mem::take(&mut state.spent);
            drop(state);
            drop(spent);
            state = self.lock();
            settled |= state.settle_all();
        }
        let can_go_on = state.hosts.can_pass() || awaited.is_some_and(|mark| mark.is_done());
        if state.heads.is_empty() || (settled && can_go_on) {
            return (state, settled);
        }
        let head = state.pick();
        let candidate = state.candidate(head);
        state.step += 1;
        let step = state.step;
        drop(state);
        self.run(candidate, step);
        (self.lock(), true)
    }

    /// Without the lock.
    fn run(&self, candidate: Candidate, step: u64) {
        match candidate {
            Candidate::Op(stream, op) => {
                let (device, at, name) = (&stream.device, op.position(), op.op().name);
                cpu::run_op(device, &op, &Alone, self.computes, || cpu::trace_run(device, at, name, step, step));
                if let Some(node) = op.position().node {
                    self.lock().finish(&stream, Some(node));
                }
            }
            Candidate::Take(exchange) => exchange.take(self.computes),
            Candidate::Deliver(exchange, member) => {
                exchange.deliver(member, self.computes);
                let arrival = &exchange.arrivals[member];
                let (joint, stream) = (&arrival.joint, &arrival.stream);
                cpu::trace_run(&stream.device, joint.position(), joint.body().name(), step, step);
                arrival.at_joint().store(false, Ordering::Release);
                self.lock().finish(stream, joint.position().node);
            }
        }
    }
}
