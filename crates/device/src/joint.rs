//! Joint operations: what a member asks, by a call of its own or in a launch, and where it has come to.

use std::sync::{Arc, atomic::AtomicBool};

use crate::{
    Access, Position, Site,
    exchange::{Piece, Request, pieces},
    launch::LaunchBody,
    meeting::MeetingInner,
    queue::StreamInner,
};

/// What a member asks of a joint operation.
pub(crate) struct JointBody {
    pub(crate) meeting: Arc<MeetingInner>,
    pub(crate) member: usize,
    pub(crate) request: Request,
    pub(crate) site: Site,
    pub(crate) accesses: Vec<Access>,
}

impl JointBody {
    pub(crate) fn name(&self) -> &'static str {
        self.request.name()
    }
}

/// A call that was submitted to a stream.
pub(crate) struct JointCall {
    pub(crate) body: JointBody,
    /// Position in the group's sequence: this member's calls and launches in the order of submission.
    pub(crate) number: u64,
    /// Index of the stream, and position in it.
    pub(crate) stream: u32,
    pub(crate) seq: u64,
}

/// One member's call of a joint operation.
#[derive(Clone)]
pub(crate) enum JointRef {
    Call(Arc<JointCall>),
    /// A node of a launch.
    Node(Arc<LaunchBody>, u32),
}

impl JointRef {
    pub(crate) fn body(&self) -> &JointBody {
        match self {
            JointRef::Call(call) => &call.body,
            JointRef::Node(launch, node) => &launch.exec.graph.joint(*node).body,
        }
    }

    /// Number in the group's sequence. All calls of a launch have the same.
    pub(crate) fn number(&self) -> u64 {
        match self {
            JointRef::Call(call) => call.number,
            JointRef::Node(launch, node) => launch.numbers[launch.exec.graph.joint(*node).group as usize],
        }
    }

    /// Among the calls that have this number.
    pub(crate) fn index(&self) -> usize {
        match self {
            JointRef::Call(_) => 0,
            JointRef::Node(launch, node) => launch.exec.graph.joint(*node).position as usize,
        }
    }

    /// How many calls have this number.
    fn calls(&self) -> usize {
        match self {
            JointRef::Call(_) => 1,
            JointRef::Node(launch, node) => launch.exec.graph.calls(*node).len(),
        }
    }

    /// How often a member comes with this number: with each call, but once with what goes to a card, where nothing of a
    /// launch runs before all of it may.
    pub(crate) fn of(&self) -> usize {
        match self {
            JointRef::Node(launch, _) if launch.exec.on_card.is_some() => 1,
            _ => self.calls(),
        }
    }

    pub(crate) fn position(&self) -> Position {
        match self {
            JointRef::Call(call) => Position { stream: call.stream, seq: call.seq, node: None },
            JointRef::Node(launch, node) => Position { stream: launch.stream, seq: launch.seq, node: Some(*node) },
        }
    }

    /// Call `i` of those that have this number.
    fn request(&self, i: usize) -> Option<&Request> {
        match self {
            JointRef::Call(call) => (i == 0).then_some(&call.body.request),
            JointRef::Node(launch, node) => {
                let graph = &launch.exec.graph;
                graph.calls(*node).get(i).map(|node| &graph.joint(*node).body.request)
            }
        }
    }

    /// The first of the calls with this number in which the two differ. The first call to come up compares them all,
    /// so that no later one waits for a call that the other does not make.
    pub(crate) fn differs_from(&self, other: &JointRef) -> Option<usize> {
        let in_graph = |joint: &JointRef| matches!(joint, JointRef::Node(..));
        if in_graph(self) != in_graph(other) {
            return Some(0);
        }
        let calls = if self.index() == 0 { 0..self.calls().max(other.calls()) } else { self.index()..self.index() + 1 };
        calls.into_iter().find(|i| match (self.request(*i), other.request(*i)) {
            (Some(a), Some(b)) => !a.agrees_with(b),
            _ => true,
        })
    }

    /// What it asks for, where members differ in call `i`.
    pub(crate) fn asks(&self, i: usize) -> String {
        let request = self.request(i).map_or_else(|| "nothing".to_owned(), Request::to_string);
        match self {
            JointRef::Call(_) => request,
            JointRef::Node(launch, _) => {
                format!("{request} as call {i} of {} of graph '{}'", self.calls(), launch.exec.graph.name)
            }
        }
    }

    /// Takes it back if it waits for others: then it will not happen.
    pub(crate) fn withdraw(&self) -> Option<Arrival> {
        self.body().meeting.withdraw(self)
    }
}

/// What has to move when all of `arrivals`, in the order of the members, have come and agree.
pub(crate) fn pieces_of(arrivals: &[Arrival]) -> Vec<Piece> {
    let body = |arrival: usize| arrivals[arrival].joint.body();
    let request = &body(0).request;
    let part = |i: usize| {
        let one = |at: usize| body(at).request.part(i, &body(at).accesses).1;
        let lists: Vec<&[Access]> = (0..arrivals.len()).map(one).collect();
        pieces(request.part(i, &body(0).accesses).0, &lists)
    };
    match request.len() {
        1 => part(0),
        len => (0..len).flat_map(part).collect(),
    }
}

/// A member that has come, and the stream that waits with it, or whose launch does.
pub(crate) struct Arrival {
    pub(crate) stream: Arc<StreamInner>,
    pub(crate) joint: JointRef,
}

impl Arrival {
    /// Raised while it stands in its meeting.
    pub(crate) fn at_joint(&self) -> &AtomicBool {
        match &self.joint {
            JointRef::Call(_) => &self.stream.at_joint,
            JointRef::Node(launch, node) => &launch.exec.at_joint[*node as usize],
        }
    }

    /// It happens, or never will.
    pub(crate) fn begin(&self) {
        if let JointRef::Node(launch, _) = &self.joint {
            launch.start(1);
        }
    }
}
