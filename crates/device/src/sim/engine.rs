//! The scheduler: queues of all streams of all ranks, and one step at a time.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, Weak, atomic::Ordering},
};

use super::{
    chooser::{Choice, Chooser},
    hosts::{Host, Hosts},
};
use crate::{
    Asked, Departure, Error,
    cpu::{self, Alone},
    device::DeviceInner,
    engine::Waited,
    exchange::Piece,
    meeting::{Arrival, Met, pieces_of},
    stream::{Item, Mark, OpBody, StreamInner},
};

/// Runs operations of all ranks one after the other.
pub(crate) struct SimEngine {
    computes: bool,
    state: Mutex<State>,
    turn: Condvar,
}

struct State {
    chooser: Chooser,
    streams: BTreeMap<(u32, u32), Lane>,
    hosts: Hosts,
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

/// A joint operation under way: sources are taken at once, destinations written member by member.
struct Exchanging {
    arrivals: Vec<Arrival>,
    pieces: Vec<Piece>,
    /// By piece, then by source; empty until taken, and always on `dry`.
    taken: Mutex<Option<Vec<Vec<Vec<u8>>>>>,
}

/// Something that may run now.
enum Candidate {
    Op(Arc<StreamInner>, Arc<OpBody>),
    Take(Arc<Exchanging>),
    Deliver(Arc<Exchanging>, usize),
}

impl SimEngine {
    pub(crate) fn new(chooser: Chooser, computes: bool) -> Self {
        let state = State { chooser, streams: BTreeMap::new(), hosts: Hosts::default(), step: 0 };
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

    pub(crate) fn open(&self, stream: &Arc<StreamInner>) {
        let lane = Lane { stream: Arc::downgrade(stream), queue: VecDeque::new(), meet: None };
        self.lock().streams.insert((stream.device.rank, stream.index), lane);
    }

    pub(crate) fn push(&self, stream: &Arc<StreamInner>, item: Item) {
        let mut state = self.lock();
        match state.streams.get_mut(&(stream.device.rank, stream.index)) {
            Some(lane) => lane.queue.push_back(item),
            // Closed, and kept alive by peers that have not got their part of a joint operation yet: it is empty.
            None => {
                if let Item::Record(mark) = item {
                    drop(mark.complete());
                }
            }
        }
    }

    /// Called with and without the scheduler's lock, so it only raises the stream's flag.
    pub(crate) fn resume(&self, stream: &Arc<StreamInner>) {
        stream.at_joint.store(false, Ordering::Release);
    }

    pub(crate) fn close(&self, stream: &Arc<StreamInner>) {
        let lane = self.lock().streams.remove(&(stream.device.rank, stream.index));
        for item in lane.into_iter().flat_map(|lane| lane.queue) {
            match item {
                Item::Op(_) | Item::Joint(_) => {
                    cpu::cancelled(stream);
                }
                Item::Record(mark) => drop(mark.complete()),
                Item::Wait(_) => {}
            }
        }
    }

    pub(crate) fn expect(&self, ranks: impl IntoIterator<Item = u32>) {
        let mut state = self.lock();
        state.hosts.by_rank.extend(ranks.into_iter().map(|rank| (rank, Host::Ready)));
        if state.hosts.turn.is_none() {
            state.hosts.pass_turn();
        }
    }

    pub(crate) fn enter(&self, rank: u32) {
        let mut state = self.lock();
        state.hosts.by_rank.entry(rank).or_insert(Host::Ready);
        if state.hosts.turn.is_none() {
            state.hosts.pass_turn();
        }
        while state.hosts.turn != Some(rank) {
            state = self.turn.wait(state).unwrap_or_else(|poison| poison.into_inner());
        }
        state.hosts.by_rank.insert(rank, Host::Running);
    }

    pub(crate) fn exit(&self, rank: u32) {
        let mut state = self.lock();
        state.hosts.by_rank.remove(&rank);
        if state.hosts.turn == Some(rank) {
            state.hosts.turn = None;
            self.pass_turn(&mut state);
        }
    }

    pub(crate) fn wait_host(&self, device: &DeviceInner, mark: &Arc<Mark>, what: &str) -> Waited {
        let mut state = self.lock();
        let rank = device.rank;
        if state.hosts.turn != Some(rank) {
            // Nobody told the scheduler of hosts, so this thread is the only one.
            while !mark.is_done() {
                if !self.step(&mut state) {
                    state.deadlock(&[device], Asked(vec![(rank, format!("to wait for '{what}'"))]));
                }
            }
            return Waited::Done;
        }
        let what = what.to_owned();
        state.hosts.by_rank.insert(rank, Host::Blocked { mark: mark.clone(), what });
        state.hosts.turn = None;
        self.pass_turn(&mut state);
        while state.hosts.turn != Some(rank) {
            state = self.turn.wait(state).unwrap_or_else(|poison| poison.into_inner());
        }
        state.hosts.by_rank.insert(rank, Host::Running);
        Waited::Done
    }

    /// Runs operations until some host can go on, and gives it the turn.
    fn pass_turn(&self, state: &mut State) {
        while !state.hosts.by_rank.is_empty() && !state.hosts.pass_turn() {
            if !self.step(state) {
                let ranks: Vec<u32> = state.hosts.by_rank.keys().copied().collect();
                let streams = state.streams.values().filter_map(|lane| lane.stream.upgrade());
                let mut devices: Vec<Arc<DeviceInner>> = streams.map(|s| s.device.clone()).collect();
                devices.retain(|d| ranks.contains(&d.rank));
                devices.dedup_by_key(|d| d.rank);
                let devices: Vec<&DeviceInner> = devices.iter().map(|d| &**d).collect();
                state.deadlock(&devices, Asked(Vec::new()));
            }
        }
        self.turn.notify_all();
    }

    /// Runs one thing, or settles what costs no time; false if nothing can move.
    fn step(&self, state: &mut State) -> bool {
        let mut candidates = Vec::new();
        let mut settled = false;
        loop {
            let keys: Vec<(u32, u32)> = state.streams.keys().copied().collect();
            let mut moved = false;
            candidates.clear();
            for key in keys {
                moved |= state.settle(key, &mut candidates);
            }
            if !moved {
                break;
            }
            settled = true;
        }
        if candidates.is_empty() || (settled && state.hosts.can_pass()) {
            return settled;
        }
        let picked = state.chooser.pick(candidates.len());
        let candidate = candidates.swap_remove(picked);
        state.step += 1;
        self.run(state, candidate);
        true
    }

    fn run(&self, state: &mut State, candidate: Candidate) {
        let step = state.step;
        match candidate {
            Candidate::Op(stream, body) => {
                state.lane(&stream).queue.pop_front();
                cpu::run_op(&stream, &body, &Alone, self.computes);
                cpu::trace_run(&stream.device, (body.stream, body.seq, body.op.name), step, step);
            }
            Candidate::Take(exchange) => {
                let take = |piece: &Piece| piece.sources.iter().map(|(_, view)| cpu::snapshot(view)).collect();
                let taken = if self.computes { exchange.pieces.iter().map(take).collect() } else { Vec::new() };
                *exchange.taken.lock().unwrap_or_else(|poison| poison.into_inner()) = Some(taken);
            }
            Candidate::Deliver(exchange, member) => {
                let arrival = &exchange.arrivals[member];
                if self.computes {
                    exchange.deliver(member);
                }
                let (body, stream) = (&arrival.body, &arrival.stream);
                cpu::trace_run(&stream.device, (body.stream, body.seq, body.name()), step, step);
                stream.at_joint.store(false, Ordering::Release);
                let lane = state.lane(stream);
                lane.meet = None;
                lane.queue.pop_front();
            }
        }
    }
}

impl State {
    fn lane(&mut self, stream: &StreamInner) -> &mut Lane {
        let lane = self.streams.get_mut(&(stream.device.rank, stream.index));
        lane.expect("BUG: a stream that was never opened")
    }

    /// Does what costs no time at the head of a stream, and adds what may run there to `candidates`. True if
    /// anything changed that other streams may wait for.
    fn settle(&mut self, key: (u32, u32), candidates: &mut Vec<Candidate>) -> bool {
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
        let body = arrival.body.clone();
        let let_go = |arrivals: &[Arrival]| {
            arrivals.iter().for_each(|a| a.stream.at_joint.store(false, Ordering::Release));
        };
        match body.meeting.arrive(arrival) {
            Met::Parked => {}
            Met::Ready(arrivals) => {
                let pieces = pieces_of(&arrivals);
                let exchange = Arc::new(Exchanging { arrivals, pieces, taken: Mutex::new(None) });
                for (member, a) in exchange.arrivals.iter().enumerate() {
                    self.lane(&a.stream).meet = Some(Meet::Here { exchange: exchange.clone(), member });
                }
            }
            Met::Disagree { arrivals, asked } => {
                cpu::disagree(&arrivals, asked);
                let_go(&arrivals);
            }
            Met::Gone { arrival, rank, how } => {
                let arrivals = [arrival];
                arrivals[0].stream.device.machine.poison(&arrivals, rank, &how);
                let_go(&arrivals);
            }
        }
    }

    /// Nothing can run: every device of `devices` fails with what all wait for, so that everything queued is
    /// skipped.
    fn deadlock(&self, devices: &[&DeviceInner], mut waiting: Asked) {
        waiting.0.extend(self.hosts.waiting().0);
        let pending = devices[0].machine.pending();
        let error = Error::Deadlock { waiting, pending };
        let how = Departure::Failed(error.chain());
        let first: Vec<_> = devices.iter().filter(|d| d.set_error(error.clone())).collect();
        assert!(!first.is_empty(), "BUG: a failed device has work that cannot be skipped");
        first.iter().for_each(|d| d.machine.depart(d.rank, how.clone()));
    }
}

impl Exchanging {
    fn is_taken(&self) -> bool {
        self.taken.lock().unwrap_or_else(|poison| poison.into_inner()).is_some()
    }

    /// Writes what `member` receives.
    fn deliver(&self, member: usize) {
        let taken = self.taken.lock().unwrap_or_else(|poison| poison.into_inner());
        let taken = taken.as_ref().expect("BUG: delivered before the sources were taken");
        for (piece, sources) in self.pieces.iter().zip(taken) {
            for (_, dest) in piece.dests.iter().filter(|(m, _)| *m == member) {
                cpu::deliver(piece, sources, dest);
            }
        }
    }
}
