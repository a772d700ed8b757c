//! The queues of all streams: what stands at their heads, what costs no time, what may run.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Bound,
    sync::{Arc, Weak, atomic::Ordering},
    thread::ThreadId,
};

use super::{chooser::Chooser, exchanging::Exchanging, hosts::Hosts, past::Past, running::Running};
use crate::{
    Asked, Departure, Error, cpu,
    device::DeviceInner,
    graph::NodeKind,
    joint::{Arrival, JointRef},
    meeting::Met,
    queue::{Item, OpAt, StreamInner},
};

/// Streams by rank, then by number.
pub(super) type Key = (u32, u32);

/// Something that may run: at the head of a stream, or a node of the launch there.
#[derive(Clone, Copy)]
pub(super) struct Head {
    pub(super) key: Key,
    pub(super) node: Option<u32>,
}

/// All that the lock guards.
pub(super) struct State {
    pub(super) chooser: Chooser,
    pub(super) streams: BTreeMap<Key, Lane>,
    /// What streams that were dropped still had to wait for and to record.
    pub(super) orphans: Vec<VecDeque<Item>>,
    /// Where something may run, as last settled.
    pub(super) heads: Vec<Head>,
    /// Launches that have ended.
    pub(super) spent: Vec<Running>,
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
    /// A launch under way: the stream goes on when it has ended.
    pub(super) launch: Option<Running>,
    /// In a search: what comes before the head of the queue, and by item what came before its submission.
    pub(super) past: Past,
    pub(super) submitted: VecDeque<Past>,
}

impl Lane {
    pub(super) fn new(stream: &Arc<StreamInner>) -> Lane {
        let (queue, submitted) = (VecDeque::new(), VecDeque::new());
        Lane { stream: Arc::downgrade(stream), queue, meet: None, launch: None, past: Past::default(), submitted }
    }

    /// Nothing is queued, and nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.launch.is_none()
    }

    fn look(&self) -> Look {
        let waits_if = |waits| if waits { Look::Waits } else { Look::Settle };
        match &self.meet {
            _ if self.launch.is_some() => Look::Settle,
            Some(Meet::Parked) => {
                waits_if(self.stream.upgrade().is_some_and(|stream| stream.at_joint.load(Ordering::Acquire)))
            }
            Some(Meet::Here { exchange, member }) if *member == 0 || exchange.is_taken() => Look::MayRun,
            Some(Meet::Here { .. }) => Look::Waits,
            None => match self.queue.front() {
                None => Look::Waits,
                Some(Item::Wait(mark)) => waits_if(!mark.is_done()),
                Some(Item::Op(_)) => Look::MayRun,
                Some(Item::Record(_) | Item::Joint(_) | Item::Launch(_)) => Look::Settle,
            },
        }
    }

    /// Takes the next item, which has come to its end or begins.
    pub(super) fn next(&mut self) -> Option<Item> {
        if let Some(past) = self.submitted.pop_front() {
            self.past.join(&past);
        }
        self.queue.pop_front()
    }
}

/// What there is to do at the head of a stream.
enum Look {
    /// Nothing, until something else has run.
    Waits,
    /// To run what is there.
    MayRun,
    /// What costs no time, or a launch.
    Settle,
}

/// Where a stream is in a joint operation.
pub(super) enum Meet {
    /// Others are missing. The `at_joint` flag falls when the meeting is given up.
    Parked,
    /// All have come.
    Here { exchange: Arc<Exchanging>, member: usize },
}

/// Something that may run now.
pub(super) enum Candidate {
    Op(Arc<StreamInner>, OpAt),
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
            spent: Vec::new(),
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
            let mut next = self.look_on(Bound::Unbounded);
            while let Some(key) = next {
                moved |= self.settle(key);
                next = self.look_on(Bound::Excluded(key));
            }
            moved |= self.settle_orphans();
            if !moved {
                return settled;
            }
            settled = true;
        }
    }

    /// The first stream above where there is something to settle; adds to `heads` those on the way there where something may
    /// run. A step changes few of all ranks' streams, so this is what every step pays for the others.
    fn look_on(&mut self, above: Bound<Key>) -> Option<Key> {
        let State { streams, heads, .. } = self;
        streams.range((above, Bound::Unbounded)).find_map(|(key, lane)| match lane.look() {
            Look::Waits => None,
            Look::MayRun => {
                heads.push(Head { key: *key, node: None });
                None
            }
            Look::Settle => Some(*key),
        })
    }

    /// What may run at `head`, taken out of its queue or its launch if it is an operation.
    pub(super) fn candidate(&mut self, head: Head) -> Candidate {
        let lane = self.streams.get_mut(&head.key).expect("BUG: a key of this map");
        let stream = || lane.stream.upgrade().expect("BUG: a lane goes with its stream's last handle");
        let meet = match (head.node, &lane.launch) {
            (Some(node), Some(running)) => running.meets.get(&node),
            _ => lane.meet.as_ref(),
        };
        if let Some(Meet::Here { exchange, member }) = meet {
            return match exchange.is_taken() {
                true => Candidate::Deliver(exchange.clone(), *member),
                false => Candidate::Take(exchange.clone()),
            };
        }
        match (head.node, &mut lane.launch) {
            (Some(node), Some(running)) => {
                running.ready.remove(&node);
                running.launch.start(1);
                Candidate::Op(stream(), OpAt::Node(running.launch.clone(), node))
            }
            _ => {
                let stream = stream();
                match lane.next() {
                    Some(Item::Op(body)) => Candidate::Op(stream, OpAt::Eager(body)),
                    _ => unreachable!("BUG: stream '{}' has nothing to run", stream.name),
                }
            }
        }
    }

    /// A joint operation is over for this member, or an operation of a launch has run.
    pub(super) fn finish(&mut self, stream: &StreamInner, node: Option<u32>) {
        // An operation may drop the last handle of its own stream.
        let Some(lane) = self.streams.get_mut(&key(stream)) else { return };
        match (node, &mut lane.launch) {
            (Some(node), Some(running)) => running.finish(node),
            _ => {
                lane.meet = None;
                lane.next();
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
                    Item::Wait(_) | Item::Op(_) | Item::Joint(_) | Item::Launch(_) => {}
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
            if lane.launch.is_some() {
                moved |= self.settle_launch(key);
                if self.streams[&key].launch.is_some() {
                    return moved;
                }
                continue;
            }
            match &lane.meet {
                Some(Meet::Parked) => {
                    if lane.stream.upgrade().is_some_and(|stream| stream.at_joint.load(Ordering::Acquire)) {
                        return moved;
                    }
                    lane.meet = None;
                    lane.next();
                }
                Some(Meet::Here { exchange, member }) => {
                    if *member == 0 || exchange.is_taken() {
                        self.heads.push(Head { key, node: None });
                    }
                    return moved;
                }
                None => match lane.queue.front() {
                    None => return moved,
                    Some(Item::Wait(mark)) if !mark.is_done() => return moved,
                    Some(Item::Wait(mark)) => {
                        if let Some(guide) = self.chooser.guide() {
                            lane.past.join(&guide.past_of(mark));
                        }
                        lane.next();
                    }
                    Some(Item::Record(mark)) => {
                        let (parked, mark) = (mark.complete(), mark.clone());
                        debug_assert!(parked.is_empty(), "BUG: the simulator asks marks, it never parks");
                        lane.next();
                        if let Some(guide) = self.chooser.guide() {
                            guide.reached(&mark, lane.past.clone());
                        }
                    }
                    Some(Item::Op(_)) => {
                        self.heads.push(Head { key, node: None });
                        return moved;
                    }
                    Some(Item::Joint(call)) => {
                        let joint = JointRef::Call(call.clone());
                        let stream = lane.stream.upgrade().expect("BUG: a lane goes with its stream's last handle");
                        lane.meet = Some(Meet::Parked);
                        self.arrive(Arrival { stream, joint });
                    }
                    Some(Item::Launch(launch)) => {
                        let launch = launch.clone().expect("BUG: a launch that has begun begins again");
                        lane.next();
                        lane.launch = Some(Running::new(launch, lane.past.clone()));
                    }
                },
            }
            moved = true;
        }
    }

    /// Does what costs no time in a launch, and adds to `heads` what may run there. True if anything changed.
    fn settle_launch(&mut self, key: Key) -> bool {
        let mut settled = false;
        loop {
            let mut moved = false;
            let ready: Vec<u32> =
                self.streams[&key].launch.iter().flat_map(|running| &running.ready).copied().collect();
            for node in &ready {
                moved |= self.settle_node(key, *node);
            }
            let lane = self.streams.get_mut(&key).expect("BUG: a key of this map");
            if let Some(running) = lane.launch.take_if(|running| running.is_over()) {
                let parked = running.launch.finish();
                debug_assert!(parked.is_empty(), "BUG: the simulator asks marks, it never parks");
                if let Some(guide) = self.chooser.guide() {
                    lane.past = running.end();
                    guide.reached(&running.launch.end, lane.past.clone());
                }
                self.spent.push(running);
                return true;
            }
            settled |= moved;
            if !moved {
                break;
            }
        }
        let running = self.streams[&key].launch.as_ref().expect("BUG: it is not over");
        let may_run = |node: &&u32| match running.meets.get(node) {
            Some(Meet::Here { exchange, member }) => *member == 0 || exchange.is_taken(),
            Some(Meet::Parked) => false,
            None => matches!(running.launch.exec.graph.nodes[**node as usize].kind, NodeKind::Op(_)),
        };
        self.heads.extend(running.ready.iter().filter(may_run).map(|node| Head { key, node: Some(*node) }));
        settled
    }

    /// Settles a ready node of a launch if that costs no time. True if anything changed.
    fn settle_node(&mut self, key: Key, node: u32) -> bool {
        let lane = self.streams.get_mut(&key).expect("BUG: a key of this map");
        let Some(running) = &mut lane.launch else { return false };
        let launch = running.launch.clone();
        match launch.exec.graph.nodes[node as usize].kind {
            NodeKind::Op(_) => false,
            NodeKind::Wait(gate, _) => {
                let open = launch.gate(gate).is_none_or(|mark| mark.is_done());
                if open {
                    if let Some(guide) = self.chooser.guide() {
                        let gate = launch.gate(gate).map(|mark| guide.past_of(&mark)).unwrap_or_default();
                        running.pasts.insert(node, running.past(node).and(&gate));
                    }
                    launch.start(1);
                    running.finish(node);
                }
                open
            }
            NodeKind::Record(gate) => {
                let mark = launch.gate(gate).expect("BUG: a record without a mark");
                let parked = mark.complete();
                debug_assert!(parked.is_empty(), "BUG: the simulator asks marks, it never parks");
                if let Some(guide) = self.chooser.guide() {
                    let past = running.past(node);
                    guide.reached(&mark, past.clone());
                    running.pasts.insert(node, past);
                }
                launch.start(1);
                running.finish(node);
                true
            }
            NodeKind::Joint(_) => match running.meets.get(&node) {
                Some(Meet::Here { .. }) => false,
                Some(Meet::Parked) => {
                    let over = !launch.exec.at_joint[node as usize].load(Ordering::Acquire);
                    if over {
                        running.finish(node);
                    }
                    over
                }
                None => {
                    running.meets.insert(node, Meet::Parked);
                    let stream = lane.stream.upgrade().expect("BUG: a lane goes with its stream's last handle");
                    self.arrive(Arrival { stream, joint: JointRef::Node(launch, node) });
                    true
                }
            },
        }
    }

    fn arrive(&mut self, arrival: Arrival) {
        let machine = arrival.stream.device.machine.clone();
        let meeting = arrival.joint.body().meeting.clone();
        arrival.at_joint().store(true, Ordering::Release);
        let let_go = |arrivals: &[Arrival]| {
            arrivals.iter().for_each(|a| a.at_joint().store(false, Ordering::Release));
        };
        match meeting.arrive(arrival) {
            Met::Parked => {}
            Met::Ready(arrivals) => {
                let exchange = Arc::new(Exchanging::new(arrivals));
                for (member, a) in exchange.arrivals.iter().enumerate() {
                    let (lane, exchange) = (self.lane(&a.stream), exchange.clone());
                    let meet = Meet::Here { exchange, member };
                    match (a.joint.position().node, &mut lane.launch) {
                        (Some(node), Some(running)) => drop(running.meets.insert(node, meet)),
                        _ => lane.meet = Some(meet),
                    }
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
