//! Captured order, loosened: of the order in which streams submitted, what operations need of each other.
//!
//! A chain of operations says more than its memory asks for: the gradient of a weight comes behind that of the layer's
//! input because it was submitted later. Here every stream's operations are dealt out to two lanes, those on which later
//! results depend and those beside them. A lane keeps the order of submission; between lanes remains what memory,
//! gates and joint operations need. No edge is made that the streams did not imply, so what is a race before is one
//! afterwards.

mod needs; // whoever touched the same bytes

use self::needs::{Needs, Touch, needs};
use crate::{
    Access, Launch,
    capture::{Draft, DraftNode},
};

/// What orders the operations of a captured graph.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum GraphOrder {
    /// The streams and the waits among them, as they were submitted.
    #[default]
    Submission,
    /// Of that order, what the operations' accesses, gates, joint operations and host functions need. Branches that
    /// this opens may run side by side, such as gradients of weights beside those of activations.
    Accesses,
}

impl GraphOrder {
    /// Both.
    pub const ALL: [GraphOrder; 2] = [GraphOrder::Submission, GraphOrder::Accesses];

    /// Its name, as in configurations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            GraphOrder::Submission => "submission",
            GraphOrder::Accesses => "accesses",
        }
    }
}

impl std::fmt::Display for GraphOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// An operation lies beside the main lane if so many more could come in front of what needs it: one operation less
/// would not pay for changing the lane and back.
const LEEWAY: u32 = 4;

/// Gives `nodes` the order of their accesses in place of that of submission.
pub(crate) fn loosen(nodes: &mut [DraftNode]) {
    let submitted = Submitted::new(nodes);
    let touches: Vec<Vec<Touch>> =
        nodes.iter().map(|node| accesses(&node.what).iter().map(Touch::from).collect()).collect();
    let needs = needs(&touches, |first, second| submitted.is_before(first, second));
    let aside = beside(nodes, &needs);
    let mut lanes = Lanes::new(submitted.lanes * 2, nodes.len());
    for at in 0..nodes.len() as u32 {
        let kind = kind(&nodes[at as usize].what);
        let (own, _) = submitted.place(at);
        let lane = own * 2 + usize::from(aside[at as usize]);
        let conflicts = &needs[at as usize].conflicts;
        // A lane is a part of a stream, so whoever of it was in front comes before whoever was not.
        let walls = (0..lanes.members.len()).filter_map(|other| {
            let all = if kind == Kind::Free { &lanes.walls[other] } else { &lanes.members[other] };
            let before = all.partition_point(|node| submitted.is_before(*node, at));
            before.checked_sub(1).map(|last| all[last])
        });
        let needed: Vec<u32> = conflicts.iter().copied().chain(walls).collect();
        let behind = lanes.add(at, lane, needed);
        if kind == Kind::Wall {
            lanes.walls[lane].push(at);
        }
        let node = &mut nodes[at as usize];
        (node.behind, node.aside) = (behind, aside[at as usize]);
    }
}

/// What a node is to those around it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Nothing but its accesses matters.
    Free,
    /// Comes behind all that was in front of it, and in front of all that was behind it.
    Wall,
    /// Comes behind all that was in front of it.
    Mark,
}

fn kind(what: &Draft) -> Kind {
    match what {
        Draft::Op(op) => match op.launch {
            Launch::Kernel(_) | Launch::Upload(_) => Kind::Free,
            Launch::Host(_) | Launch::Download(_) => Kind::Wall,
        },
        Draft::Joint { .. } | Draft::Wait { .. } => Kind::Wall,
        Draft::Record { .. } => Kind::Mark,
    }
}

fn accesses(what: &Draft) -> &[Access] {
    match what {
        Draft::Op(op) => &op.accesses,
        Draft::Joint { body, .. } => &body.accesses,
        Draft::Wait { .. } | Draft::Record { .. } => &[],
    }
}

/// The order of submission.
struct Submitted {
    lanes: usize,
    /// By node: lane, and place in it from 1.
    places: Vec<(usize, u32)>,
    /// By node: of each lane the last place that it is behind, itself included.
    clocks: Vec<Vec<u32>>,
}

impl Submitted {
    fn new(nodes: &[DraftNode]) -> Submitted {
        let mut streams: Vec<u32> = nodes.iter().map(|node| node.lane).collect();
        streams.sort_unstable();
        streams.dedup();
        let mut submitted = Submitted { lanes: streams.len(), places: Vec::new(), clocks: Vec::new() };
        for node in nodes {
            let lane = streams.binary_search(&node.lane).expect("BUG: a stream of this graph");
            let mut clock = vec![0; streams.len()];
            for before in &node.behind {
                join(&mut clock, &submitted.clocks[*before as usize]);
            }
            clock[lane] = clock[lane].max(node.place);
            submitted.places.push((lane, node.place));
            submitted.clocks.push(clock);
        }
        submitted
    }

    fn place(&self, node: u32) -> (usize, u32) {
        self.places[node as usize]
    }

    fn is_before(&self, first: u32, second: u32) -> bool {
        let (lane, place) = self.place(first);
        first < second && self.clocks[second as usize][lane] >= place
    }
}

fn join(clock: &mut [u32], other: &[u32]) {
    clock.iter_mut().zip(other).for_each(|(own, other)| *own = (*own).max(*other));
}

/// Which nodes lie beside the main lane: those whose longest way from the first to the last operation, by what is read
/// of what was written, is shorter than the longest of all by [`LEEWAY`].
fn beside(nodes: &[DraftNode], needs: &[Needs]) -> Vec<bool> {
    let mut from = vec![0u32; nodes.len()];
    for at in 0..nodes.len() {
        from[at] = needs[at].reads.iter().map(|before| from[*before as usize] + 1).max().unwrap_or(0);
    }
    let mut to = vec![0u32; nodes.len()];
    for at in (0..nodes.len()).rev() {
        for before in &needs[at].reads {
            to[*before as usize] = to[*before as usize].max(to[at] + 1);
        }
    }
    let longest = from.iter().zip(&to).map(|(from, to)| from + to).max().unwrap_or(0);
    let is_aside = |at: usize| kind(&nodes[at].what) == Kind::Free && from[at] + to[at] + LEEWAY <= longest;
    (0..nodes.len()).map(is_aside).collect()
}

/// Lanes in the making.
struct Lanes {
    /// By lane, in order.
    members: Vec<Vec<u32>>,
    /// Those of them that all later ones come behind.
    walls: Vec<Vec<u32>>,
    /// By node: lane and place in it, from 1.
    places: Vec<(usize, u32)>,
    /// By node: of each lane the last place that it is behind, itself included.
    clocks: Vec<Vec<u32>>,
}

impl Lanes {
    fn new(lanes: usize, nodes: usize) -> Lanes {
        let (places, clocks) = (Vec::with_capacity(nodes), Vec::with_capacity(nodes));
        Lanes { members: vec![Vec::new(); lanes], walls: vec![Vec::new(); lanes], places, clocks }
    }

    /// Adds `node` behind the last one of `lane` and all of `needed`; returns those that no other one is behind.
    fn add(&mut self, node: u32, lane: usize, needed: Vec<u32>) -> Vec<u32> {
        // A lane keeps its order, so its last one stands for all of it.
        let mut last = vec![None; self.members.len()];
        for before in needed.into_iter().chain(self.members[lane].last().copied()) {
            let own = &mut last[self.places[before as usize].0];
            *own = (*own).max(Some(before));
        }
        let mut behind: Vec<u32> = last.into_iter().flatten().collect();
        behind.sort_unstable();
        let covered = |first: u32, second: u32| {
            let (lane, place) = self.places[first as usize];
            first != second && self.clocks[second as usize][lane] >= place
        };
        let all = behind.clone();
        behind.retain(|first| !all.iter().any(|second| covered(*first, *second)));
        let mut clock = vec![0; self.members.len()];
        behind.iter().for_each(|before| join(&mut clock, &self.clocks[*before as usize]));
        self.members[lane].push(node);
        let place = self.members[lane].len() as u32;
        clock[lane] = place;
        self.places.push((lane, place));
        self.clocks.push(clock);
        behind
    }
}
