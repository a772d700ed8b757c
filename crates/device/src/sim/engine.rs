//! The scheduler: queues of all streams of all ranks, and one step at a time.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, Weak, atomic::Ordering},
    thread::{self, ThreadId},
};

use super::{
    chooser::{Choice, Chooser},
    exchanging::Exchanging,
    hosts::{Host, Hosts},
};
use crate::{
    Asked, Departure, Error,
    cpu::{self, Alone},
    device::DeviceInner,
    engine::Waited,
    meeting::{Arrival, Met},
    stream::{Item, Mark, OpBody, StreamInner},
};

/// Runs operations of all ranks one after the other.
pub(crate) struct SimEngine {
    computes: bool,
    state: Mutex<State>,
    turn: Condvar,
}

/// Streams by rank, then by number.
type Key = (u32, u32);

struct State {
    chooser: Chooser,
    streams: BTreeMap<Key, Lane>,
    /// What streams that were dropped still had to wait for and to record.
    orphans: Vec<VecDeque<Item>>,
    hosts: Hosts,
    /// The thread that makes steps now. Operations run without the lock, because they may own handles whose drop
    /// comes back here; until they are done, nobody else gets past [`SimEngine::free`].
    driver: Option<ThreadId>,
    /// Counts what has run.
    step: u64,
}

/// One stream's queue.
struct Lane {
    stream: Weak<StreamInner>,
    queue: VecDeque<Item>,
    /// In a joint operation: the stream goes on when its own part is delivered.
    meet: Option<Meet>,
}

#[derive(Clone)]
enum Meet {
    /// Others are missing. The stream's `at_joint` flag falls when the meeting is given up.
    Parked,
    /// All have come.
    Here { exchange: Arc<Exchanging>, member: usize },
}

/// Something that may run now.
enum Candidate {
    Op(Arc<StreamInner>, Arc<OpBody>),
    Take(Arc<Exchanging>),
    Deliver(Arc<Exchanging>, usize),
}

fn key(stream: &StreamInner) -> Key {
    (stream.device.rank, stream.index)
}

impl SimEngine {
    pub(crate) fn new(chooser: Chooser, computes: bool) -> Self {
        let state = State {
            chooser,
            streams: BTreeMap::new(),
            orphans: Vec::new(),
            hosts: Hosts::default(),
            driver: None,
            step: 0,
        };
        SimEngine { computes, state: Mutex::new(state), turn: Condvar::new() }
    }

    pub(crate) fn computes(&self) -> bool {
        self.computes
    }

    pub(crate) fn choices(&self) -> Vec<Choice> {
        self.lock().chooser.asked().to_vec()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.turn.wait(state).unwrap_or_else(|poison| poison.into_inner())
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
        let lane = Lane { stream: Arc::downgrade(stream), queue: VecDeque::new(), meet: None };
        self.lock().streams.insert(key(stream), lane);
    }

    pub(crate) fn push(&self, stream: &Arc<StreamInner>, item: Item) {
        let mut state = self.lock();
        let lane = state.streams.get_mut(&key(stream));
        lane.expect("BUG: a stream that was never opened").queue.push_back(item);
    }

    /// Called with and without the scheduler's lock, so it only raises the stream's flag.
    pub(crate) fn resume(&self, stream: &Arc<StreamInner>) {
        stream.at_joint.store(false, Ordering::Release);
    }

    pub(crate) fn close(&self, stream: &Arc<StreamInner>) {
        let mut state = self.free();
        let Some(mut lane) = state.streams.remove(&key(stream)) else { return };
        if let Some(Meet::Here { exchange, member }) = lane.meet {
            // All have come, so it is under way: this member's part is waited for, as a running operation is.
            exchange.take(self.computes);
            exchange.deliver(member, self.computes);
            lane.queue.pop_front();
        }
        let queue: Vec<Item> = lane.queue.into();
        if stream.throw_away(&queue, 0) {
            for item in &queue {
                if let Item::Record(mark) = item {
                    let parked = mark.complete();
                    debug_assert!(parked.is_empty(), "BUG: the simulator asks marks, it never parks");
                }
            }
        } else if !queue.is_empty() {
            state.orphans.push(queue.iter().cloned().collect());
        }
        // Operations may own handles, whose drop comes back here: not under the lock.
        drop(state);
        drop(queue);
    }

    pub(crate) fn expect(&self, ranks: &[u32]) {
        let mut state = self.free();
        state.hosts.by_rank.extend(ranks.iter().map(|rank| (*rank, Host::Ready)));
        if state.hosts.turn.is_none() {
            state.hosts.pass_turn();
        }
    }

    pub(crate) fn enter(&self, rank: u32) {
        let mut state = self.free();
        state.hosts.by_rank.entry(rank).or_insert(Host::Ready);
        if state.hosts.turn.is_none() {
            state.hosts.pass_turn();
        }
        while state.hosts.turn != Some(rank) {
            state = self.wait(state);
        }
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

    pub(crate) fn wait_host(&self, device: &DeviceInner, mark: &Arc<Mark>, what: &str) -> Waited {
        let rank = device.rank;
        let mut state = self.free();
        if state.driver.is_some() {
            // What this would wait for cannot run before the operation that waits for it is over.
            let waiting = Asked(vec![(rank, format!("inside an operation to wait for '{what}'"))]);
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
                (state, moved) = self.step(state);
                if !moved {
                    state.deadlock(&[device], Asked(vec![(rank, format!("to wait for '{what}'"))]));
                }
            }
            state.driver = None;
            self.turn.notify_all();
            return Waited::Done;
        }
        let what = what.to_owned();
        state.hosts.by_rank.insert(rank, Host::Blocked { mark: mark.clone(), what });
        state.hosts.turn = None;
        state = self.pass_turn(state);
        while state.hosts.turn != Some(rank) {
            state = self.wait(state);
        }
        state.hosts.by_rank.insert(rank, Host::Running);
        Waited::Done
    }

    /// Runs operations until some host can go on, and gives it the turn.
    fn pass_turn<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.driver = Some(thread::current().id());
        while !state.hosts.by_rank.is_empty() && !state.hosts.pass_turn() {
            let moved;
            (state, moved) = self.step(state);
            if !moved {
                let devices = state.devices_of_hosts();
                let devices: Vec<&DeviceInner> = devices.iter().map(|d| &**d).collect();
                state.deadlock(&devices, Asked(Vec::new()));
            }
        }
        state.driver = None;
        self.turn.notify_all();
        state
    }

    /// Runs one thing, or settles what costs no time; false if nothing can move.
    fn step<'a>(&'a self, mut state: MutexGuard<'a, State>) -> (MutexGuard<'a, State>, bool) {
        let (mut candidates, settled) = state.settle_all();
        if candidates.is_empty() || (settled && state.hosts.can_pass()) {
            return (state, settled);
        }
        let picked = state.chooser.pick(candidates.len());
        let candidate = candidates.swap_remove(picked);
        state.step += 1;
        let step = state.step;
        if let Candidate::Op(stream, _) = &candidate {
            // `candidate` keeps it.
            state.lane(stream).queue.pop_front();
        }
        drop(state);
        drop(candidates);
        self.run(candidate, step);
        (self.lock(), true)
    }

    /// Without the lock.
    fn run(&self, candidate: Candidate, step: u64) {
        match candidate {
            Candidate::Op(stream, body) => {
                if cpu::run_op(&stream, &body, &Alone, self.computes) {
                    cpu::trace_run(&stream.device, (body.stream, body.seq, body.op.name), step, step);
                }
            }
            Candidate::Take(exchange) => exchange.take(self.computes),
            Candidate::Deliver(exchange, member) => {
                exchange.deliver(member, self.computes);
                let (body, stream) = (&exchange.arrivals[member].body, &exchange.arrivals[member].stream);
                cpu::trace_run(&stream.device, (body.stream, body.seq, body.name()), step, step);
                stream.at_joint.store(false, Ordering::Release);
                let mut state = self.lock();
                let lane = state.lane(stream);
                lane.meet = None;
                lane.queue.pop_front();
            }
        }
    }
}

impl State {
    fn lane(&mut self, stream: &StreamInner) -> &mut Lane {
        self.streams.get_mut(&key(stream)).expect("BUG: a stream that was never opened")
    }

    /// Does what costs no time everywhere. Returns what may run then, and whether anything was done.
    fn settle_all(&mut self) -> (Vec<Candidate>, bool) {
        let mut settled = false;
        loop {
            let mut candidates = Vec::new();
            let keys: Vec<Key> = self.streams.keys().copied().collect();
            let mut moved = false;
            for key in keys {
                moved |= self.settle(key, &mut candidates);
            }
            moved |= self.settle_orphans();
            if !moved {
                return (candidates, settled);
            }
            settled = true;
        }
    }

    fn settle_orphans(&mut self) -> bool {
        let before: usize = self.orphans.iter().map(VecDeque::len).sum();
        for queue in &mut self.orphans {
            while let Some(item) = queue.front() {
                match item {
                    Item::Wait(mark) if !mark.is_done() => break,
                    Item::Record(mark) => drop(mark.complete()),
                    Item::Wait(_) | Item::Op(_) | Item::Joint(_) => {}
                }
                queue.pop_front();
            }
        }
        self.orphans.retain(|queue| !queue.is_empty());
        self.orphans.iter().map(VecDeque::len).sum::<usize>() < before
    }

    /// Does what costs no time at the head of a stream, and adds what may run there to `candidates`. True if
    /// anything changed that other streams may wait for.
    fn settle(&mut self, key: Key, candidates: &mut Vec<Candidate>) -> bool {
        let mut moved = false;
        loop {
            let lane = self.streams.get_mut(&key).expect("BUG: a key of this map");
            let Some(stream) = lane.stream.upgrade() else { return moved };
            match lane.meet.clone() {
                Some(Meet::Parked) if stream.at_joint.load(Ordering::Acquire) => return moved,
                Some(Meet::Parked) => {
                    lane.meet = None;
                    lane.queue.pop_front();
                }
                Some(Meet::Here { exchange, member }) => {
                    if exchange.is_taken() {
                        candidates.push(Candidate::Deliver(exchange, member));
                    } else if member == 0 {
                        candidates.push(Candidate::Take(exchange));
                    }
                    return moved;
                }
                None => match lane.queue.front().cloned() {
                    None => return moved,
                    Some(Item::Wait(mark)) if !mark.is_done() => return moved,
                    Some(Item::Wait(_)) => drop(lane.queue.pop_front()),
                    Some(Item::Record(mark)) => {
                        let parked = mark.complete();
                        debug_assert!(parked.is_empty(), "BUG: the simulator asks marks, it never parks");
                        lane.queue.pop_front();
                    }
                    Some(Item::Op(body)) => {
                        candidates.push(Candidate::Op(stream, body));
                        return moved;
                    }
                    Some(Item::Joint(body)) => {
                        stream.at_joint.store(true, Ordering::Release);
                        lane.meet = Some(Meet::Parked);
                        self.arrive(Arrival { stream, body });
                    }
                },
            }
            moved = true;
        }
    }

    fn arrive(&mut self, arrival: Arrival) {
        let (machine, meeting) = (arrival.stream.device.machine.clone(), arrival.body.meeting.clone());
        let let_go = |arrivals: &[Arrival]| {
            arrivals.iter().for_each(|a| a.stream.at_joint.store(false, Ordering::Release));
        };
        match meeting.arrive(arrival) {
            Met::Parked => {}
            Met::Ready(arrivals) => {
                let exchange = Arc::new(Exchanging::new(arrivals));
                for (member, a) in exchange.arrivals.iter().enumerate() {
                    self.lane(&a.stream).meet = Some(Meet::Here { exchange: exchange.clone(), member });
                }
            }
            Met::Disagree { arrivals, asked } => {
                cpu::disagree(&arrivals, asked);
                let_go(&arrivals);
            }
            Met::Gone { arrivals, rank, how } => {
                machine.poison(&arrivals, rank, &how);
                let_go(&arrivals);
            }
        }
    }

    /// The devices of all hosts that have streams.
    fn devices_of_hosts(&self) -> Vec<Arc<DeviceInner>> {
        let streams = self.streams.values().filter_map(|lane| lane.stream.upgrade());
        let mut devices: Vec<Arc<DeviceInner>> = streams.map(|s| s.device.clone()).collect();
        devices.retain(|d| self.hosts.by_rank.contains_key(&d.rank));
        devices.dedup_by_key(|d| d.rank);
        devices
    }

    /// Nothing can run: every device of `devices` fails with what all wait for, so that everything queued is
    /// skipped.
    fn deadlock(&self, devices: &[&DeviceInner], mut waiting: Asked) {
        waiting.0.extend(self.hosts.waiting().0);
        let machine = &devices.first().expect("BUG: a host waits for a stream that is gone").machine;
        let error = Error::Deadlock { waiting, pending: machine.pending() };
        let how = Departure::Failed(error.chain());
        let first: Vec<_> = devices.iter().filter(|d| d.set_error(error.clone())).collect();
        assert!(!first.is_empty(), "BUG: a failed device has work that cannot be skipped");
        first.iter().for_each(|d| d.machine.depart(d.rank, how.clone()));
    }
}
