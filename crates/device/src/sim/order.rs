//! What comes before what in a guided run, whatever memory is touched: streams, waits, launches, joint operations and
//! the hosts' own order. What is not known here costs a search runs, never orders.

use super::{
    moves::{Move, MoveId, Part, Touch},
    past::Past,
    state::{Head, Meet, State, key},
};
use crate::{
    graph::NodeKind,
    joint::{Arrival, JointRef},
    queue::Item,
};

impl State {
    /// Which head comes next.
    pub(super) fn pick(&mut self) -> Head {
        if self.chooser.guide().is_none() {
            let of = self.heads.len();
            return self.heads[self.chooser.pick(of)];
        }
        let moves: Vec<Move> = self.heads.iter().map(|head| self.describe(*head)).collect();
        let guide = self.chooser.guide().expect("BUG: it was there");
        let step = guide.step();
        let head = self.heads[guide.pick(moves)];
        let past = self.past_of(head);
        self.chooser.guide().into_iter().for_each(|guide| guide.comes_after(past.clone()));
        self.moves_on(head, past.with(step));
        head
    }

    /// The joint operation at `head`, if all members have come to one there.
    fn meet(&self, head: Head) -> Option<&Meet> {
        let lane = &self.streams[&head.key];
        match (head.node, &lane.launch) {
            (Some(node), Some(running)) => running.meets.get(&node),
            _ => lane.meet.as_ref(),
        }
    }

    fn describe(&self, head: Head) -> Move {
        let named = |(rank, at), part, touches| Move { id: MoveId { rank, at, part }, touches, spreads: false };
        let at = |arrival: &Arrival| (arrival.stream.device.rank, arrival.joint.position());
        if let Some(Meet::Here { exchange, member }) = self.meet(head) {
            let own = &exchange.arrivals[*member];
            let of = |arrival: &Arrival, writes: bool| {
                let accesses = arrival.joint.body().accesses.iter();
                accesses.filter(|a| !writes || a.mode.writes()).map(|a| Touch::new(a, writes)).collect::<Vec<_>>()
            };
            if exchange.is_taken() {
                return named(at(own), Part::Deliver, of(own, true));
            }
            let sources = exchange.arrivals.iter().flat_map(|arrival| of(arrival, false)).collect();
            return named(at(own), Part::Take, sources);
        }
        let lane = &self.streams[&head.key];
        let of = |op: &crate::Op| op.accesses.iter().map(|a| Touch::new(a, a.mode.writes())).collect();
        let position = |stream, seq, node| (head.key.0, crate::Position { stream, seq, node });
        match (head.node, &lane.launch) {
            (Some(node), Some(running)) => {
                let launch = &running.launch;
                let NodeKind::Op(op) = &launch.exec.graph.nodes[node as usize].kind else {
                    unreachable!("BUG: node {node} has nothing to run")
                };
                named(position(launch.stream, launch.seq, Some(node)), Part::Op, of(op))
            }
            _ => match lane.queue.front() {
                Some(Item::Op(body)) => named(position(body.stream, body.seq, None), Part::Op, of(&body.op)),
                _ => unreachable!("BUG: a head of rank {} has nothing to run", head.key.0),
            },
        }
    }

    /// What comes before the next thing of a stream, or before a node of the launch there.
    fn before(&self, head: Head) -> Past {
        let Some(lane) = self.streams.get(&head.key) else { return Past::default() };
        match (head.node, &lane.launch) {
            (Some(node), Some(running)) => running.past(node),
            _ => lane.submitted.front().into_iter().fold(lane.past.clone(), Past::and),
        }
    }

    fn past_of(&self, head: Head) -> Past {
        let Some(Meet::Here { exchange, .. }) = self.meet(head) else { return self.before(head) };
        if let Some(taken) = exchange.past.get() {
            return taken.clone();
        }
        let member = |arrival: &Arrival| {
            let node = match &arrival.joint {
                JointRef::Call(_) => None,
                JointRef::Node(_, node) => Some(*node),
            };
            self.before(Head { key: key(&arrival.stream), node })
        };
        exchange.arrivals.iter().map(member).fold(Past::default(), |all, own| all.and(&own))
    }

    /// `past` comes before what is behind `head`.
    fn moves_on(&mut self, head: Head, past: Past) {
        if let Some(Meet::Here { exchange, .. }) = self.meet(head)
            && !exchange.is_taken()
        {
            exchange.past.get_or_init(|| past);
            return;
        }
        let lane = self.streams.get_mut(&head.key).expect("BUG: a key of this map");
        match (head.node, &mut lane.launch) {
            (Some(node), Some(running)) => drop(running.pasts.insert(node, past)),
            _ => lane.past.join(&past),
        }
    }
}
