//! The queues of all streams: what stands at their heads, what costs no time, what may run.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Bound,
    sync::{Arc, Weak, atomic::Ordering},
    thread::ThreadId,
};

use super::{chooser::Chooser, exchanging::Exchanging, hosts::Hosts};
use crate::{
    Asked, Departure, Error, cpu,
    device::DeviceInner,
    meeting::{Arrival, Met},
    stream::{Item, OpBody, StreamInner},
};

/// Streams by rank, then by number.
pub(super) type Key = (u32, u32);

/// All that the lock guards.
pub(super) struct State {
    pub(super) chooser: Chooser,
    pub(super) streams: BTreeMap<Key, Lane>,
    /// What streams that were dropped still had to wait for and to record.
    pub(super) orphans: Vec<VecDeque<Item>>,
    /// Streams at whose head something may run, as last settled.
    pub(super) heads: Vec<Key>,
    pub(super) hosts: Hosts,
    /// The thread that makes steps now. Operations run without the lock, because they may own handles whose drop
    /// comes back here; until they are done, nobody else gets past `SimEngine::free`.
    pub(super) driver: Option<ThreadId>,
    /// Counts what has run.
    pub(super) step: u64,
}

/// One stream's queue.
pub(super) struct Lane {
    pub(super) stream: Weak<StreamInner>,
    pub(super) queue: VecDeque<Item>,
    /// In a joint operation: the stream goes on when its own part is delivered.
    pub(super) meet: Option<Meet>,
}

/// Where a stream is in a joint operation.
pub(super) enum Meet {
    /// Others are missing. The stream's `at_joint` flag falls when the meeting is given up.
    Parked,
    /// All have come.
    Here { exchange: Arc<Exchanging>, member: usize },
}

/// Something that may run now.
pub(super) enum Candidate {
    Op(Arc<StreamInner>, Arc<OpBody>),
    Take(Arc<Exchanging>),
    Deliver(Arc<Exchanging>, usize),
}

pub(super) fn key(stream: &StreamInner) -> Key {
    (stream.device.rank, stream.index)
}

impl State {
    pub(super) fn new(chooser: Chooser) -> State {
        State {
            chooser,
            streams: BTreeMap::new(),
            orphans: Vec::new(),
            heads: Vec::new(),
            hosts: Hosts::default(),
            driver: None,
            step: 0,
        }
    }

    pub(super) fn lane(&mut self, stream: &StreamInner) -> &mut Lane {
        self.streams.get_mut(&key(stream)).expect("BUG: a stream that was never opened")
    }

    /// Does what costs no time everywhere. Leaves in `heads` what may run then; true if anything was done.
    pub(super) fn settle_all(&mut self) -> bool {
        let mut settled = false;
        loop {
            self.heads.clear();
            let mut moved = false;
            let mut next = self.streams.first_key_value().map(|(key, _)| *key);
            while let Some(key) = next {
                moved |= self.settle(key);
                let above = (Bound::Excluded(key), Bound::Unbounded);
                next = self.streams.range(above).next().map(|(key, _)| *key);
            }
            moved |= self.settle_orphans();
            if !moved {
                return settled;
            }
            settled = true;
        }
    }

    /// What stands at the head of a stream, taken out of its queue if it is an operation.
    pub(super) fn candidate(&mut self, key: Key) -> Candidate {
        let lane = self.streams.get_mut(&key).expect("BUG: a key of this map");
        match &lane.meet {
            Some(Meet::Here { exchange, member }) if exchange.is_taken() => {
                Candidate::Deliver(exchange.clone(), *member)
            }
            Some(Meet::Here { exchange, .. }) => Candidate::Take(exchange.clone()),
            _ => {
                let stream = lane.stream.upgrade().expect("BUG: a lane goes with its stream's last handle");
                match lane.queue.pop_front() {
                    Some(Item::Op(body)) => Candidate::Op(stream, body),
                    _ => unreachable!("BUG: stream '{}' has nothing to run", stream.name),
                }
            }
        }
    }

    fn settle_orphans(&mut self) -> bool {
        if self.orphans.is_empty() {
            return false;
        }
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

    /// Does what costs no time at the head of a stream, and adds it to `heads` if something may run there. True if
    /// anything changed that other streams may wait for.
    fn settle(&mut self, key: Key) -> bool {
        let mut moved = false;
        loop {
            let lane = self.streams.get_mut(&key).expect("BUG: a key of this map");
            match &lane.meet {
                Some(Meet::Parked) => {
                    if lane.stream.upgrade().is_some_and(|stream| stream.at_joint.load(Ordering::Acquire)) {
                        return moved;
                    }
                    lane.meet = None;
                    lane.queue.pop_front();
                }
                Some(Meet::Here { exchange, member }) => {
                    if *member == 0 || exchange.is_taken() {
                        self.heads.push(key);
                    }
                    return moved;
                }
                None => match lane.queue.front() {
                    None => return moved,
                    Some(Item::Wait(mark)) if !mark.is_done() => return moved,
                    Some(Item::Wait(_)) => drop(lane.queue.pop_front()),
                    Some(Item::Record(mark)) => {
                        let parked = mark.complete();
                        debug_assert!(parked.is_empty(), "BUG: the simulator asks marks, it never parks");
                        lane.queue.pop_front();
                    }
                    Some(Item::Op(_)) => {
                        self.heads.push(key);
                        return moved;
                    }
                    Some(Item::Joint(body)) => {
                        let body = body.clone();
                        let stream = lane.stream.upgrade().expect("BUG: a lane goes with its stream's last handle");
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
    pub(super) fn devices_of_hosts(&self) -> Vec<Arc<DeviceInner>> {
        let streams = self.streams.values().filter_map(|lane| lane.stream.upgrade());
        let mut devices: Vec<Arc<DeviceInner>> = streams.map(|s| s.device.clone()).collect();
        devices.retain(|d| self.hosts.by_rank.contains_key(&d.rank));
        devices.dedup_by_key(|d| d.rank);
        devices
    }

    /// Nothing can run: every device of `devices` fails with what all wait for, so that everything queued is
    /// skipped.
    pub(super) fn deadlock(&self, devices: &[&DeviceInner], mut waiting: Asked) {
        waiting.0.extend(self.hosts.waiting().0);
        let machine = &devices.first().expect("BUG: a host waits for a stream that is gone").machine;
        let error = Error::Deadlock { waiting, pending: machine.pending() };
        let how = Departure::Failed(error.chain());
        let first: Vec<_> = devices.iter().filter(|d| d.set_error(error.clone())).collect();
        assert!(!first.is_empty(), "BUG: a failed device has work that cannot be skipped");
        first.iter().for_each(|d| d.machine.depart(d.rank, how.clone()));
    }
}
