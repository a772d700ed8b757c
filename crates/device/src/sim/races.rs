//! Which orders of a run's steps would differ from it, and where a search has to turn for them.

use super::{
    guide::{Asked, Followed},
    moves::Move,
    past::Past,
};

/// A step of the run that a search is at, and what it does there.
pub(super) struct Node {
    pub(super) asked: Asked,
    /// Moves to begin with here, the picked one among them.
    turns: Vec<usize>,
    /// How many of them were taken.
    taken: usize,
}

impl Node {
    pub(super) fn new(asked: Asked) -> Node {
        Node { turns: vec![asked.picked], taken: 1, asked }
    }

    fn picked(&self) -> &Move {
        &self.asked.moves[self.asked.picked]
    }

    fn is_asleep(&self, which: usize) -> bool {
        self.asked.sleep.iter().any(|asleep| asleep.id == self.asked.moves[which].id)
    }

    /// Every move has to come next once.
    pub(super) fn turn_everywhere(&mut self) {
        let rest = (0..self.asked.moves.len()).filter(|which| !self.turns.contains(which));
        let rest: Vec<usize> = rest.collect();
        self.turns.extend(rest);
    }

    /// All runs that begin with the picked move were made: takes the next one.
    pub(super) fn next_turn(&mut self, pruning: Pruning) -> bool {
        if pruning == Pruning::Distinct {
            let done = self.picked().clone();
            self.asked.sleep.push(done);
        }
        while let Some(&next) = self.turns.get(self.taken) {
            self.taken += 1;
            if !self.is_asleep(next) {
                self.asked.picked = next;
                return true;
            }
        }
        false
    }
}

/// Which orders a search runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pruning {
    /// One of those that differ only by moves that commute.
    Distinct,
    /// Each.
    Nothing,
}

/// Lets the search turn, at every step of `path`, so that each two steps that do not commute come in the other order
/// too, where nothing else forbids that.
///
/// Source: P. Abdulla, S. Aronis, B. Jonsson, K. Sagonas, "Optimal dynamic partial order reduction", POPL 2014,
/// algorithm 1 (source sets with sleep sets).
pub(super) fn turn_at_races(path: &mut [Node]) {
    let mut before: Vec<Past> = Vec::with_capacity(path.len());
    for second in 0..path.len() {
        let mut past = Past::default();
        let mut races = Vec::new();
        for first in (0..second).rev() {
            if past.contains(first) {
                continue;
            }
            let follows = path[second].asked.past.contains(first);
            if follows || !path[first].picked().commutes_with(path[second].picked()) {
                past = past.and(&before[first]).with(first);
                if !follows {
                    races.push(first);
                }
            }
        }
        before.push(past);
        races.into_iter().for_each(|first| turn(path, &before, first, second));
    }
}

/// At `first`, something has to come next that leads to `second` before `first`.
fn turn(path: &mut [Node], before: &[Past], first: usize, second: usize) {
    let mut without: Vec<usize> = (first + 1..second).filter(|&step| !before[step].contains(first)).collect();
    without.push(second);
    let leads = |step: &usize| !without.iter().any(|earlier| before[*step].contains(*earlier));
    let leaders: Vec<_> = without.iter().filter(|step| leads(step)).map(|&step| path[step].picked().id).collect();
    let node = &mut path[first];
    let may_run = |which: &usize| leaders.contains(&node.asked.moves[*which].id);
    let leaders: Vec<usize> = (0..node.asked.moves.len()).filter(may_run).collect();
    match leaders.first() {
        _ if leaders.iter().any(|which| node.turns.contains(which) || node.is_asleep(*which)) => {}
        Some(&leader) => node.turns.push(leader),
        // What `second` waits for is not known to the end.
        None => node.turn_everywhere(),
    }
}

/// Adds a run to the path that led to it.
pub(super) fn follow(path: &mut Vec<Node>, followed: Followed, pruning: Pruning) {
    let Followed { mut steps, redundant, left_over } = followed;
    let scripted = path.len();
    steps.truncate(redundant.unwrap_or(steps.len()).max(scripted));
    for (step, asked) in steps.into_iter().enumerate() {
        match path.get_mut(step) {
            // Only now it is known what the last scripted move has come after, and whether it failed.
            Some(node) => node.asked = Asked { sleep: std::mem::take(&mut node.asked.sleep), ..asked },
            None => path.push(Node::new(asked)),
        }
    }
    if pruning == Pruning::Nothing {
        path[scripted..].iter_mut().for_each(Node::turn_everywhere);
        return;
    }
    turn_at_races(path);
    if left_over {
        // What did not run says nothing of what it would have touched.
        path.iter_mut().for_each(Node::turn_everywhere);
    }
}
