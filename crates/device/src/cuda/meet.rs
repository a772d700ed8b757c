//! How streams meet: lines that stand until all members of a call, or of a launch's calls, have come.
//!
//! Nothing waits in a thread. A line that must wait keeps what was submitted behind on the host; whoever comes last
//! hands the calls of all members to NCCL at once, and runs the lines that stood. So whatever is on the card waits only
//! for what is there too.

use std::sync::{
    Arc,
    atomic::{Ordering, fence},
};

use super::{
    CudaEngine, CudaError,
    card::lock,
    clique::{Lease, Turn},
    collective::copies_alone,
    engine::{record, stream_on_card},
    gang::{Entry, Gang, joints, launch_of},
    graph::{self, Unplaced},
    line::State,
    stream::{Along, Beside, StreamOnCard, on_card},
};
use crate::{
    Departure,
    cpu::disagree,
    device::DeviceInner,
    engine::Waited,
    graph::NodeKind,
    joint::{Arrival, JointCall, JointRef},
    launch::LaunchBody,
    meeting::{MeetingInner, Met},
    queue::{Item, Mark, StreamInner},
};

/// Streams whose lines the thread has to run.
pub(super) type Todo = Vec<Arc<StreamInner>>;

impl CudaEngine {
    /// Runs the line of `stream`, which this thread has, and all that it lets go on.
    pub(super) fn run_line(&self, stream: &Arc<StreamInner>, first: Item) {
        let mut todo = Todo::new();
        self.run_items(stream, Some(first), &mut todo);
        self.run_all(todo);
    }

    /// Streams of `device` that have nothing on its way give up what they worked in.
    pub(super) fn give_up_workspaces(&self, device: &Arc<DeviceInner>) {
        for stream in self.open_streams().iter().filter(|stream| Arc::ptr_eq(&stream.device, device)) {
            let on = stream_on_card(stream);
            if on.line.take() {
                on.give_up_workspaces();
                self.run_all(Todo::from([stream.clone()]));
            }
        }
    }

    fn run_all(&self, mut todo: Todo) {
        while let Some(stream) = todo.pop() {
            self.run_items(&stream, None, &mut todo);
        }
    }

    fn run_items(&self, stream: &Arc<StreamInner>, first: Option<Item>, todo: &mut Todo) {
        let on = stream_on_card(stream);
        let mut next = first.or_else(|| on.line.next());
        while let Some(item) = next {
            match &item {
                Item::Wait(_) | Item::Launch(Some(_)) if !waits_are_placed(&item) => {
                    return self.stand_at_marks(stream, on, item, todo);
                }
                Item::Launch(Some(launch)) if !launch.exec.graph.groups.is_empty() => {
                    return self.meet_in_launch(stream, on, launch, todo);
                }
                Item::Joint(call) => return self.meet_in_call(stream, on, call, todo),
                _ => {
                    let places_marks = matches!(&item, Item::Record(_) | Item::Launch(_));
                    self.put(stream, on, item);
                    if places_marks {
                        self.wake(todo);
                    }
                }
            }
            next = on.line.next();
        }
    }

    fn stand_at_marks(&self, stream: &Arc<StreamInner>, on: &StreamOnCard, item: Item, todo: &mut Todo) {
        let placed = item.clone();
        on.line.stand(State::Marks, Some(item));
        let mut standing = lock(&self.standing);
        standing.push(stream.clone());
        self.stand.store(standing.len(), Ordering::SeqCst);
        drop(standing);
        // Whoever places a mark first does that and then looks who stands; here it is the other way round.
        fence(Ordering::SeqCst);
        if waits_are_placed(&placed) {
            self.wake(todo);
        }
    }

    /// Marks may have been placed: those who stand at one look again.
    pub(super) fn wake(&self, todo: &mut Todo) {
        fence(Ordering::SeqCst);
        if self.stand.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut standing = lock(&self.standing);
        let streams = std::mem::take(&mut *standing);
        self.stand.store(0, Ordering::SeqCst);
        drop(standing);
        todo.extend(streams.into_iter().filter(|stream| stream_on_card(stream).line.look_again()));
    }

    fn meet_in_call(&self, stream: &Arc<StreamInner>, on: &StreamOnCard, call: &Arc<JointCall>, todo: &mut Todo) {
        on.line.stand(State::Joint(call.clone()), None);
        let arrival = Arrival { stream: stream.clone(), joint: JointRef::Call(call.clone()) };
        self.met(call.body.meeting.arrive(arrival), todo);
    }

    fn meet_in_launch(&self, stream: &Arc<StreamInner>, on: &StreamOnCard, launch: &Arc<LaunchBody>, todo: &mut Todo) {
        // It tells that the stream has got here; so does one that is there already.
        if !on.ends_in_mark() {
            self.mark(stream);
        }
        on.line.stand(State::Launch(launch.clone()), None);
        lock(&self.gangs).enter(stream, launch);
        for (at, joint) in joints(launch).enumerate() {
            if at > 0 && !lock(&self.gangs).has(launch) {
                // It goes to the card, or never will.
                return;
            }
            let meeting = &launch.exec.graph.joint(launch.exec.graph.groups[at][0]).body.meeting;
            self.met(meeting.arrive(Arrival { stream: stream.clone(), joint }), todo);
        }
    }

    fn met(&self, met: Met, todo: &mut Todo) {
        match met {
            Met::Parked => {}
            Met::Ready(arrivals) if launch_of(&arrivals[0]).is_some() => {
                let gang = lock(&self.gangs).meet(&arrivals);
                match gang {
                    Gang::Incomplete => {}
                    Gang::Complete(entries) => self.launch_together(&entries, todo),
                    Gang::Orphaned => self.release(&arrivals, todo),
                }
            }
            Met::Ready(arrivals) => {
                self.call(&arrivals);
                self.release(&arrivals, todo);
            }
            Met::Disagree { arrivals, asked } => {
                disagree(&arrivals, asked);
                self.release(&arrivals, todo);
            }
            Met::Gone { arrivals, rank, how } => {
                arrivals[0].stream.device.machine.poison(&arrivals, rank, &how);
                self.release(&arrivals, todo);
            }
        }
    }

    /// The joint operation of `arrivals` is over on the host: on its way on the card, or failed on every member.
    fn release(&self, arrivals: &[Arrival], todo: &mut Todo) {
        let root = arrivals.iter().find_map(|arrival| arrival.stream.device.root_failure());
        for arrival in arrivals {
            match &arrival.joint {
                JointRef::Call(_) => self.go_on(&arrival.stream, todo),
                JointRef::Node(launch, _) => self.give_up(launch, root.as_ref(), todo),
            }
        }
    }

    pub(crate) fn resume(&self, arrival: &Arrival) {
        let mut todo = Todo::new();
        self.release(std::slice::from_ref(arrival), &mut todo);
        self.run_all(todo);
    }

    fn go_on(&self, stream: &Arc<StreamInner>, todo: &mut Todo) {
        if stream_on_card(stream).line.go_on() {
            todo.push(stream.clone());
        }
    }

    /// `launch` will not go to the card, nor will those that it has met.
    fn give_up(&self, launch: &Arc<LaunchBody>, root: Option<&(u32, Departure)>, todo: &mut Todo) {
        let entries = lock(&self.gangs).give_up(launch);
        for Entry { launch, stream, .. } in &entries {
            let withdrawn: Vec<Arrival> = joints(launch).filter_map(|joint| joint.withdraw()).collect();
            withdrawn.iter().for_each(Arrival::begin);
            if let (false, Some((rank, how)), Some(joint)) = (stream.device.failed(), root, joints(launch).next()) {
                let told = Arrival { stream: stream.clone(), joint };
                stream.device.machine.poison(&[told], *rank, how);
            }
            graph::lose(launch);
            stream_on_card(stream).keep_lost(Item::Launch(Some(launch.clone())));
            self.go_on(stream, todo);
        }
        self.wake(todo);
    }

    pub(super) fn turn(&self) -> Turn<'_> {
        self.cliques.turn()
    }

    /// The communicators of a group, made by the first who needs them.
    pub(super) fn lease(&self, meeting: &MeetingInner) -> Result<Arc<Lease>, CudaError> {
        let turn = self.turn();
        if let Some(lease) = meeting.on_card.get() {
            return Ok(lease.clone());
        }
        let lease = self.cliques.lease(&turn, &meeting.members)?;
        // With the turn, so nobody else has made one.
        Ok(meeting.on_card.get_or_init(|| lease).clone())
    }

    /// Queues a joint operation of all its members.
    fn call(&self, arrivals: &[Arrival]) {
        for arrival in arrivals {
            self.mark(&arrival.stream);
        }
        let queued = self.queue_timed(arrivals);
        let (intervals, failed) = match queued {
            Ok(intervals) => (intervals, None),
            Err(source) => (Vec::new(), Some(source)),
        };
        let mut intervals = intervals.into_iter();
        for arrival in arrivals {
            if let JointRef::Call(call) = &arrival.joint {
                stream_on_card(&arrival.stream).keep(Item::Joint(call.clone()), intervals.next().flatten());
            }
            self.mark(&arrival.stream);
        }
        tell_failures(arrivals);
        if let Some(source) = failed {
            // Some members may be on their way and wait for the others.
            if let Some(lease) = arrivals[0].joint.body().meeting.on_card.get() {
                lease.give_up();
            }
            for arrival in arrivals {
                self.fail_joint(&arrival.stream.device, &arrival.joint, &source);
            }
        }
    }

    /// As [`CudaEngine::queue_call`], with what each member's stream is to keep beside it.
    fn queue_timed(&self, arrivals: &[Arrival]) -> Result<Vec<Beside>, CudaError> {
        let begin = |arrival: &Arrival| {
            let on = stream_on_card(&arrival.stream);
            on.card.bind().and_then(|()| self.begin_interval(&arrival.stream, on))
        };
        let begun = arrivals.iter().map(begin).collect::<Result<Vec<_>, _>>()?;
        self.queue_call(arrivals)?;
        let ended = arrivals.iter().zip(begun).map(|(arrival, interval)| {
            let on = stream_on_card(&arrival.stream);
            on.card.bind().and_then(|()| Along::timed(interval, on))
        });
        ended.collect()
    }

    fn queue_call(&self, arrivals: &[Arrival]) -> Result<(), CudaError> {
        let body = arrivals[0].joint.body();
        if let [alone] = arrivals {
            let on = stream_on_card(&alone.stream);
            on.card.bind()?;
            return copies_alone(body).into_iter().try_for_each(|copy| copy.queue(&on.card, on.raw));
        }
        let lease = self.lease(&body.meeting)?;
        let turn = self.turn();
        let calls: Vec<_> =
            arrivals.iter().map(|arrival| (arrival.joint.body(), stream_on_card(&arrival.stream).raw)).collect();
        let clique = lease.clique()?;
        clique.call_all(&turn, &calls)?;
        arrivals.iter().try_for_each(|arrival| {
            let (on, mark) = (stream_on_card(&arrival.stream), Arc::new(Mark::new()));
            on.card.bind().and_then(|()| record(on, &mark))?;
            drop(clique.seats[arrival.joint.body().member].used(on.raw, &mark));
            Ok(())
        })
    }

    /// A point that tells how far the stream is.
    pub(super) fn mark(&self, stream: &Arc<StreamInner>) {
        let (on, mark) = (stream_on_card(stream), Arc::new(Mark::new()));
        match on.card.bind().and_then(|()| record(on, &mark)) {
            Ok(()) => drop(on.keep(Item::Record(mark), None)),
            Err(error) => self.fail_item(stream, &Item::Record(mark), error),
        }
    }

    /// Launches of ranks that share a card go there when those that they launched together before have ended: the driver
    /// may wait for room, which there may not be before a member goes on that is launched behind.
    fn let_last_end(&self, entries: &[Entry]) -> Result<(), CudaError> {
        if !entries.iter().any(|entry| on_card(&entry.launch).on_one_card) {
            return Ok(());
        }
        for Entry { stream, .. } in entries {
            let last = lock(&self.last_met).get(&stream.device.rank).cloned();
            let Some(last) = last.filter(|last| !last.is_done()) else { continue };
            if let Waited::NothingMoved = self.wait_host(&stream.device, &last) {
                let what = "end what ranks launched together before within the time-out: something stands still on it";
                return Err(CudaError::Unable { card: stream_on_card(stream).card.ordinal, what });
            }
        }
        lock(&self.last_met).extend(entries.iter().map(|entry| (entry.stream.device.rank, entry.launch.end.clone())));
        Ok(())
    }

    fn launch_together(&self, entries: &[Entry], todo: &mut Todo) {
        let last_ended = self.let_last_end(entries);
        // One order of all launches with collectives, on all ranks.
        let turn = self.turn();
        let begins = stream_on_card(&entries[0].stream).card.beginnings.begin();
        let send = |Entry { launch, stream, .. }: &Entry| {
            let on = stream_on_card(stream);
            last_ended.clone().and_then(|()| on.card.bind()).and_then(|()| self.send_launch(stream, on, launch))
        };
        // Streams share queues of the card: a wait for the first member's end, submitted before the last one is there, may be
        // what that one stands behind. So their marks are placed together.
        let (sent, unplaced): (Vec<_>, Vec<_>) = entries.iter().map(send).map(apart).unzip();
        drop((unplaced, begins, turn));
        let any_failed = sent.iter().any(Result::is_err);
        for (Entry { launch, stream, .. }, sent) in entries.iter().zip(sent) {
            let (item, on) = (Item::Launch(Some(launch.clone())), stream_on_card(stream));
            match sent {
                Ok(along) => drop(on.keep(item, along)),
                Err(error) => {
                    self.fail_item(stream, &item, error);
                    on.keep_lost(item);
                }
            }
        }
        if entries.iter().any(|entry| entry.stream.device.failed()) {
            let arrivals: Vec<Arrival> = entries.iter().filter_map(Entry::arrival).collect();
            tell_failures(&arrivals);
        }
        for Entry { launch, stream, .. } in entries {
            if any_failed {
                on_card(launch).give_up_collectives();
            }
            self.go_on(stream, todo);
        }
        self.wake(todo);
    }

    /// The stream was dropped: what it holds back, and what others must do for that to go on, will not happen.
    pub(super) fn take_back(&self, stream: &Arc<StreamInner>) {
        let on = stream_on_card(stream);
        let mut todo = Todo::new();
        match on.line.state() {
            State::Idle | State::Running => return,
            State::Marks => self.throw_away(stream, on.line.give_up_at_marks(), 0),
            State::Joint(call) => {
                if JointRef::Call(call).withdraw().is_none() {
                    // All have come: whoever completes it lets the line go on.
                    return;
                }
                self.throw_away(stream, on.line.give_up(), 1);
            }
            State::Launch(launch) => {
                // In no meeting any more, so it cannot happen while the others are told that it did not.
                let withdrawn: Vec<Arrival> = joints(&launch).filter_map(|joint| joint.withdraw()).collect();
                if !lock(&self.gangs).has(&launch) {
                    return;
                }
                let own = Item::Launch(Some(launch.clone()));
                stream.throw_away(on.line.held().iter().chain([&own]), 0);
                withdrawn.iter().for_each(Arrival::begin);
                let root = stream.device.root_failure();
                // The line goes on, skipping.
                self.give_up(&launch, root.as_ref(), &mut todo);
            }
        }
        self.wake(&mut todo);
        self.run_all(todo);
    }

    fn throw_away(&self, stream: &Arc<StreamInner>, items: Vec<Item>, taken_back: usize) {
        stream.throw_away(&items, taken_back);
        for item in items {
            match &item {
                Item::Record(mark) => mark.lose(),
                Item::Launch(Some(launch)) => graph::lose(launch),
                Item::Op(_) | Item::Wait(_) | Item::Joint(_) | Item::Launch(None) => {}
            }
            stream_on_card(stream).keep_lost(item);
        }
    }
}

/// A rank of `arrivals` may have failed while they were in no meeting and not yet kept by their streams: nobody has
/// told the others then.
fn tell_failures(arrivals: &[Arrival]) {
    let machine = &arrivals[0].stream.device.machine;
    if let Some((rank, how)) = arrivals.iter().find_map(|arrival| arrival.stream.device.root_failure()) {
        machine.poison(arrivals, rank, &how);
    }
}

/// What came of a launch, and what is to be done when the others are there.
fn apart(sent: Result<(Beside, Unplaced), CudaError>) -> (Result<Beside, CudaError>, Option<Unplaced>) {
    match sent {
        Ok((along, unplaced)) => (Ok(along), Some(unplaced)),
        Err(error) => (Err(error), None),
    }
}

/// Whether all that `item` waits for is on its card.
fn waits_are_placed(item: &Item) -> bool {
    match item {
        Item::Wait(mark) => mark.is_placed(),
        Item::Launch(Some(launch)) => {
            let (graph, gates) = (&launch.exec.graph, launch.gates());
            let is_wait = |node: &u32| matches!(graph.nodes[*node as usize].kind, NodeKind::Wait(..));
            let mut waits = graph.gates.iter().zip(&*gates).filter(|(node, _)| is_wait(node));
            waits.all(|(_, mark)| mark.as_ref().is_none_or(|mark| mark.is_placed()))
        }
        _ => true,
    }
}
