//! Where streams of several ranks meet: who has come, who is missing, who will never come.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, Weak},
};

use crate::{
    Access, Asked, Departure, PendingJoint, Site,
    exchange::{Piece, Request, pieces},
    machine::MachineInner,
    stream::StreamInner,
};

/// One member's call of a joint operation.
pub(crate) struct JointBody {
    pub(crate) meeting: Arc<MeetingInner>,
    pub(crate) member: usize,
    /// Position in the group's sequence: this member's calls in the order of submission.
    pub(crate) group_seq: u64,
    pub(crate) request: Request,
    pub(crate) site: Site,
    pub(crate) accesses: Vec<Access>,
    /// Index of the stream, and position in it.
    pub(crate) stream: u32,
    pub(crate) seq: u64,
}

impl JointBody {
    pub(crate) fn name(&self) -> &'static str {
        self.request.name()
    }
}

/// What has to move when all of `arrivals`, in the order of the members, have come and agree.
pub(crate) fn pieces_of(arrivals: &[Arrival]) -> Vec<Piece> {
    let request = &arrivals[0].body.request;
    let part = |i: usize| {
        let lists: Vec<&[Access]> = arrivals.iter().map(|a| a.body.request.part(i, &a.body.accesses).1).collect();
        pieces(request.part(i, &arrivals[0].body.accesses).0, &lists)
    };
    match request.len() {
        1 => part(0),
        len => (0..len).flat_map(part).collect(),
    }
}

/// A member that has come, and the stream that waits with it.
pub(crate) struct Arrival {
    pub(crate) stream: Arc<StreamInner>,
    pub(crate) body: Arc<JointBody>,
}

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
    /// Ranks are not enough: two machines can have the same.
    pub(crate) machine: Weak<MachineInner>,
    /// By member: the number of its next call. Shared by all handles of the member, which are counted by it: queues
    /// keep finished calls for a while, and that must not keep a group open.
    next: Vec<Arc<Mutex<u64>>>,
    state: Mutex<MeetingState>,
}

struct MeetingState {
    /// Sequence number of `calls[0]`.
    first: u64,
    calls: VecDeque<Call>,
    /// The first member that left, by rank.
    gone: Option<(u32, Departure)>,
}

struct Call {
    arrivals: Vec<Option<Arrival>>,
    count: usize,
    /// Handed to whoever executes it; the entry stays until earlier ones are gone.
    taken: bool,
}

impl MeetingInner {
    pub(crate) fn new(
        name: String,
        members: Vec<u32>,
        machine: Weak<MachineInner>,
        gone: Option<(u32, Departure)>,
    ) -> Self {
        let next = members.iter().map(|_| Arc::default()).collect();
        let state = Mutex::new(MeetingState { first: 0, calls: VecDeque::new(), gone });
        MeetingInner { name: name.into(), members: members.into(), machine, next, state }
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
        let (member, seq) = (arrival.body.member, arrival.body.group_seq);
        let n = self.members.len();
        let mut state = self.lock();
        if let Some((rank, how)) = state.gone.clone() {
            return Met::Gone { arrivals: vec![arrival], rank, how };
        }
        let at = (seq - state.first) as usize;
        while state.calls.len() <= at {
            let arrivals = std::iter::repeat_with(|| None).take(n).collect();
            state.calls.push_back(Call { arrivals, count: 0, taken: false });
        }
        let call = &mut state.calls[at];
        debug_assert!(call.arrivals[member].is_none(), "BUG: member {member} came twice to #{seq}");
        call.arrivals[member] = Some(arrival);
        call.count += 1;
        if call.count < n {
            return Met::Parked;
        }
        call.taken = true;
        let arrivals: Vec<Arrival> = call.arrivals.iter_mut().filter_map(Option::take).collect();
        while state.calls.front().is_some_and(|c| c.taken) {
            state.calls.pop_front();
            state.first += 1;
        }
        drop(state);
        // A failure becomes visible before its rank has left. What that rank brings was not computed.
        if let Some((rank, how)) = arrivals.iter().find_map(|a| a.stream.device.root_failure()) {
            return Met::Gone { arrivals, rank, how };
        }
        let want = &arrivals[0].body.request;
        if arrivals.iter().all(|a| a.body.request.agrees_with(want)) {
            Met::Ready(arrivals)
        } else {
            let asked = arrivals.iter().map(|a| (a.stream.device.rank, a.body.request.to_string()));
            let asked = Asked(asked.collect());
            Met::Disagree { arrivals, asked }
        }
    }

    /// `leaver` will not come any more, because of what happened to `root`: gives back everybody who waits here.
    pub(crate) fn depart(&self, leaver: u32, root: u32, how: &Departure) -> Vec<Arrival> {
        if !self.members.contains(&leaver) {
            return Vec::new();
        }
        let mut state = self.lock();
        state.gone.get_or_insert((root, how.clone()));
        let first = state.first + state.calls.len() as u64;
        let calls = std::mem::take(&mut state.calls);
        state.first = first;
        calls.into_iter().flat_map(|call| call.arrivals).flatten().collect()
    }

    /// Takes back an arrival that waits for others. False when it has been handed to whoever completes it.
    pub(crate) fn withdraw(&self, body: &JointBody) -> bool {
        let mut state = self.lock();
        let Some(at) = body.group_seq.checked_sub(state.first) else { return false };
        let Some(call) = state.calls.get_mut(at as usize) else { return false };
        let withdrawn = call.arrivals[body.member].take().is_some();
        call.count -= usize::from(withdrawn);
        withdrawn
    }

    /// Calls that some have reached and others have not.
    pub(crate) fn pending(&self) -> Vec<PendingJoint> {
        let state = self.lock();
        let pending = state.calls.iter().enumerate().filter(|(_, call)| !call.taken && call.count > 0);
        let split = |call: &Call, came: bool| {
            let members = self.members.iter().zip(&call.arrivals);
            members.filter(|(_, a)| a.is_some() == came).map(|(rank, _)| *rank).collect()
        };
        pending
            .map(|(i, call)| PendingJoint {
                group: self.name.to_string(),
                seq: state.first + i as u64,
                what: call.arrivals.iter().flatten().next().map_or_else(String::new, |a| a.body.request.to_string()),
                arrived: split(call, true),
                missing: split(call, false),
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
