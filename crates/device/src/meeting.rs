//! Where streams of several ranks meet: who has come, who is missing, who will never come.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, OnceLock},
};

use crate::{
    Asked, Departure, PendingJoint,
    apart::Apart,
    cuda::Lease,
    joint::{Arrival, JointRef},
};

/// What an arrival leads to.
pub(crate) enum Met {
    /// Others are missing; the stream is parked here.
    Parked,
    /// All have come and agree, in the order of the members.
    Ready(Vec<Arrival>),
    /// All have come and ask for different things.
    Disagree { arrivals: Vec<Arrival>, asked: Asked },
    /// It will never happen; the arrivals are handed back.
    Gone { arrivals: Vec<Arrival>, rank: u32, how: Departure },
}

/// The place where the members of one communicator meet, call after call.
pub(crate) struct MeetingInner {
    pub(crate) name: Arc<str>,
    /// Ranks, in the order of the group.
    pub(crate) members: Arc<[u32]>,
    /// The machine's identity. Ranks are not enough: two machines can have the same.
    pub(crate) machine: Arc<()>,
    /// By member: the number of its next call. Shared by all handles of the member, which are counted by it: queues
    /// keep finished calls for a while, and that must not keep a group open.
    next: Vec<Arc<Mutex<u64>>>,
    state: Apart<Mutex<MeetingState>>,
    /// Its communicators, on the `cuda` driver.
    pub(crate) on_card: OnceLock<Arc<Lease>>,
}

struct MeetingState {
    /// Sequence number of `calls[0]`.
    first: u64,
    calls: VecDeque<Call>,
    /// The first member that left, by rank.
    gone: Option<(u32, Departure)>,
}

/// All that happens under one number of the sequence: one joint operation, or those of a launch, in any order.
#[derive(Default)]
struct Call {
    first: Spot,
    more: Vec<Spot>,
    /// How many have been taken.
    taken: usize,
    /// How many there are, as the member with the most has it.
    of: usize,
}

/// Where the members of one joint operation meet.
#[derive(Default)]
struct Spot {
    /// By member; empty until the first comes.
    arrivals: Vec<Option<Arrival>>,
    count: usize,
    /// Handed to whoever executes it; the entry stays until earlier ones are gone.
    taken: bool,
}

impl Call {
    fn spot(&mut self, index: usize) -> &mut Spot {
        if index == 0 {
            return &mut self.first;
        }
        if self.more.len() < index {
            self.more.resize_with(index, Spot::default);
        }
        &mut self.more[index - 1]
    }

    fn spots(&self) -> impl Iterator<Item = &Spot> {
        std::iter::once(&self.first).chain(&self.more)
    }

    /// Everybody who stands here.
    fn into_arrivals(self) -> impl Iterator<Item = Arrival> {
        std::iter::once(self.first).chain(self.more).flat_map(|spot| spot.arrivals).flatten()
    }
}

impl MeetingInner {
    pub(crate) fn new(name: String, members: Vec<u32>, machine: Arc<()>, gone: Option<(u32, Departure)>) -> Self {
        let next = members.iter().map(|_| Arc::default()).collect();
        let state = Apart(Mutex::new(MeetingState { first: 0, calls: VecDeque::new(), gone }));
        MeetingInner { name: name.into(), members: members.into(), machine, next, state, on_card: OnceLock::new() }
    }

    /// Nobody has a handle, and no call is under way that could still happen: the name is free.
    pub(crate) fn is_over(&self) -> bool {
        if self.next.iter().any(|next| Arc::strong_count(next) > 1) {
            return false;
        }
        let state = self.lock();
        let happened =
            |next: &Arc<Mutex<u64>>| *next.lock().unwrap_or_else(|poison| poison.into_inner()) == state.first;
        state.gone.is_some() || self.next.iter().all(happened)
    }

    fn lock(&self) -> MutexGuard<'_, MeetingState> {
        self.state.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    pub(crate) fn arrive(&self, arrival: Arrival) -> Met {
        let (member, number, index) = (arrival.joint.body().member, arrival.joint.number(), arrival.joint.index());
        let (of, n) = (arrival.joint.of(), self.members.len());
        let mut state = self.lock();
        if let Some((rank, how)) = state.gone.clone() {
            arrival.begin();
            return Met::Gone { arrivals: vec![arrival], rank, how };
        }
        let at = (number - state.first) as usize;
        if state.calls.len() <= at {
            state.calls.resize_with(at + 1, Call::default);
        }
        let call = &mut state.calls[at];
        call.of = call.of.max(of);
        let spot = call.spot(index);
        if spot.arrivals.is_empty() {
            spot.arrivals.resize_with(n, || None);
        }
        debug_assert!(spot.arrivals[member].is_none(), "BUG: member {member} came twice to #{number}");
        spot.arrivals[member] = Some(arrival);
        spot.count += 1;
        if spot.count < n {
            return Met::Parked;
        }
        spot.taken = true;
        let arrivals: Vec<Arrival> = std::mem::take(&mut spot.arrivals).into_iter().flatten().collect();
        // With the lock: nobody who takes back what waits here counts it among what has not begun.
        arrivals.iter().for_each(Arrival::begin);
        call.taken += 1;
        while state.calls.front().is_some_and(|c| c.of > 0 && c.taken == c.of) {
            state.calls.pop_front();
            state.first += 1;
        }
        drop(state);
        // A failure becomes visible before its rank has left. What that rank brings was not computed.
        if let Some((rank, how)) = arrivals.iter().find_map(|a| a.stream.device.root_failure()) {
            return Met::Gone { arrivals, rank, how };
        }
        match arrivals.iter().find_map(|a| a.joint.differs_from(&arrivals[0].joint)) {
            None => Met::Ready(arrivals),
            Some(i) => {
                let asked = arrivals.iter().map(|a| (a.stream.device.rank, a.joint.asks(i)));
                let asked = Asked(asked.collect());
                Met::Disagree { arrivals, asked }
            }
        }
    }

    /// A member will not come any more, because of what happened to `root`: gives back everybody who waits here.
    pub(crate) fn depart(&self, root: u32, how: &Departure) -> Vec<Arrival> {
        let mut state = self.lock();
        state.gone.get_or_insert((root, how.clone()));
        let first = state.first + state.calls.len() as u64;
        let calls = std::mem::take(&mut state.calls);
        state.first = first;
        let arrivals: Vec<Arrival> = calls.into_iter().flat_map(Call::into_arrivals).collect();
        arrivals.iter().for_each(Arrival::begin);
        arrivals
    }

    /// Takes back an arrival that waits for others. `None` when it has not come, or has been handed to whoever
    /// completes it.
    pub(crate) fn withdraw(&self, joint: &JointRef) -> Option<Arrival> {
        let mut state = self.lock();
        let at = joint.number().checked_sub(state.first)?;
        let spot = state.calls.get_mut(at as usize)?.spot(joint.index());
        let withdrawn = spot.arrivals.get_mut(joint.body().member)?.take()?;
        spot.count -= 1;
        Some(withdrawn)
    }

    /// Calls that some have reached and others have not.
    pub(crate) fn pending(&self) -> Vec<PendingJoint> {
        let state = self.lock();
        let numbered = state.calls.iter().enumerate().flat_map(|(i, call)| call.spots().map(move |spot| (i, spot)));
        let pending = numbered.filter(|(_, spot)| !spot.taken && spot.count > 0);
        let split = |spot: &Spot, came: bool| {
            let members = self.members.iter().zip(&spot.arrivals);
            members.filter(|(_, a)| a.is_some() == came).map(|(rank, _)| *rank).collect()
        };
        pending
            .map(|(i, spot)| PendingJoint {
                group: self.name.to_string(),
                seq: state.first + i as u64,
                what: spot.arrivals.iter().flatten().next().map_or_else(String::new, |a| a.joint.asks(a.joint.index())),
                arrived: split(spot, true),
                missing: split(spot, false),
            })
            .collect()
    }
}

/// One member's handle of a meeting place: its calls are numbered in the order of submission, over all its handles.
#[derive(Clone)]
pub struct Meeting {
    pub(crate) inner: Arc<MeetingInner>,
    pub(crate) member: usize,
    pub(crate) next: Arc<Mutex<u64>>,
}

impl Meeting {
    pub(crate) fn open(inner: Arc<MeetingInner>, member: usize) -> Meeting {
        let next = inner.next[member].clone();
        Meeting { inner, member, next }
    }

    /// Ranks, in the order of the group.
    pub fn members(&self) -> &[u32] {
        &self.inner.members
    }

    /// This rank's place among the members.
    pub fn place(&self) -> u32 {
        self.member as u32
    }

    /// Name under which it was opened.
    pub fn name(&self) -> &str {
        &self.inner.name
    }
}

#[cfg(test)]
mod tests {
    use crate::{Access, DType, Departure, Error, Exchange, Machine, MemoryKind, Reduce};

    /// The moment between a failure and its rank's departure, held open: what the rank brings was not computed.
    #[test]
    fn values_of_a_rank_that_has_failed_and_not_left_yet_are_not_exchanged() {
        for machine in [Machine::cpu(2).unwrap(), Machine::sim(1)] {
            let open = |rank: u32| {
                let device = machine.device(rank).unwrap();
                let stream = device.stream("comm").unwrap();
                let v = device.alloc("v", &[1], DType::F32, MemoryKind::Other).unwrap();
                stream.upload(&v, vec![1f32]).unwrap();
                stream.synchronize().unwrap();
                let meeting = machine.meeting("dp", &[0, 1], rank).unwrap();
                (device, stream, v, meeting)
            };
            let ranks = [open(0), open(1)];
            let all_reduce = |rank: usize| {
                let (_, stream, v, meeting) = &ranks[rank];
                let accesses = vec![Access::update(v)];
                stream.joint(meeting, Exchange::AllReduce(Reduce::Sum), "test", accesses).unwrap();
            };
            all_reduce(0);
            let failure = Error::RankTaken { rank: 7 };
            assert!(ranks[0].0.inner().set_error(failure.clone()));
            all_reduce(1);
            let error = ranks[1].1.synchronize().unwrap_err();
            let Error::PeerGone { rank: 0, how: Departure::Failed(text), .. } = &error else { panic!("{error}") };
            assert_eq!(*text, failure.chain());
            assert_eq!(ranks[1].2.numel(), 1);
        }
    }
}
