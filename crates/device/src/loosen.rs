//! Captured order, loosened: of the order in which streams submitted, what operations need of each other.
//!
//! A chain of operations says more than its memory asks for: the gradient of a weight comes behind that of the layer's
//! input because it was submitted later. Here every stream's operations are dealt out to two lanes, those on which later
//! results depend and those beside them. A lane keeps the order of submission; between lanes remains what memory,
//! gates and joint operations need. No edge is made that the streams did not imply, so what is a race before is one
//! afterwards.

use std::collections::HashMap;

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
    let needs = needs(nodes, &submitted);
    let aside = beside(nodes, &needs);
    let mut lanes = Lanes::new(submitted.lanes * 2, nodes.len());
    for at in 0..nodes.len() as u32 {
        let kind = kind(&nodes[at as usize].what);
        let (own, _) = submitted.place(at);
        let lane = own * 2 + usize::from(aside[at as usize]);
        let mut needed: Vec<u32> = needs[at as usize].conflicts.clone();
        for other in 0..lanes.members.len() {
            let before = |node: &&u32| submitted.is_before(**node, at);
            let all = if kind == Kind::Free { &lanes.walls[other] } else { &lanes.members[other] };
            needed.extend(all.iter().rev().find(before));
        }
        let behind = lanes.add(at, lane, &needed);
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

/// What a node needs of earlier ones.
#[derive(Clone, Default)]
struct Needs {
    /// Those that touch the same memory, one of the two writing. Who is in front of one of these may be left out.
    conflicts: Vec<u32>,
    /// Those of which it reads what they wrote.
    reads: Vec<u32>,
}

fn needs(nodes: &[DraftNode], submitted: &Submitted) -> Vec<Needs> {
    // By allocation: accesses that no later one has covered.
    let mut open: HashMap<u32, Vec<(u32, &Access)>> = HashMap::new();
    let mut all = Vec::with_capacity(nodes.len());
    for (at, node) in (0..).zip(nodes) {
        let mut own = Needs::default();
        for access in accesses(&node.what) {
            let known = open.entry(access.view.allocation_id()).or_default();
            known.retain(|(before, touched)| {
                if *before == at || !submitted.is_before(*before, at) || !touched.conflicts(access) {
                    return true;
                }
                own.conflicts.push(*before);
                if touched.mode.writes() && access.mode != crate::Mode::Write {
                    own.reads.push(*before);
                }
                !(access.mode.writes() && covers(access, touched))
            });
            known.push((at, access));
        }
        for list in [&mut own.conflicts, &mut own.reads] {
            list.sort_unstable();
            list.dedup();
        }
        all.push(own);
    }
    all
}

/// Every byte of `inner` is one of `outer`; may be false where it is so.
fn covers(outer: &Access, inner: &Access) -> bool {
    let (outer, inner) = (outer.view.region(), inner.view.region());
    outer == inner || (outer.rows == 1 && outer.start <= inner.start && inner.end() <= outer.end())
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
    fn add(&mut self, node: u32, lane: usize, needed: &[u32]) -> Vec<u32> {
        let mut behind: Vec<u32> = needed.iter().chain(self.members[lane].last()).copied().collect();
        behind.sort_unstable();
        behind.dedup();
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
