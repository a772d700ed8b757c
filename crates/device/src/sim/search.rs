//! Every order in which a small program can run.

use std::collections::BTreeMap;

use super::{
    chooser::Chooser,
    guide::Guide,
    races::{Node, Pruning, follow},
};
use crate::{Error, Machine, Options, engine::Engine};

/// What a search found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explored<T: Ord> {
    /// Every result, with the first schedule that gave it (the scheduler's picks, in order).
    pub results: BTreeMap<T, Vec<usize>>,
    /// Schedules that ran.
    pub runs: usize,
    /// The search is at its end; false if the limit came first.
    pub complete: bool,
}

/// Runs `program` on fresh `sim` machines until every result is known that an order of its operations can give, at most
/// `limit` times. Of orders that differ only by operations that commute one is run: those that no wait orders, and
/// neither of which writes what the other touches. Once something has failed, every order counts.
///
/// The program must do the same on each run: what it submits and returns may depend on nothing but the results of its
/// own operations, not on [`Event::is_done`](crate::Event::is_done) or a trace, and operations touch nothing but the
/// memory that they declare. [`explore_every_order`] asks less.
///
/// # Errors
/// The first error of the program.
pub fn explore<T: Ord>(
    limit: usize,
    options: &Options,
    program: impl Fn(&Machine) -> Result<T, Error>,
) -> Result<Explored<T>, Error> {
    search(limit, options, Pruning::Distinct, program)
}

/// As [`explore`], and runs each order once, those that differ only by operations that commute too: for programs whose
/// operations touch what they do not declare.
///
/// # Errors
/// The first error of the program.
pub fn explore_every_order<T: Ord>(
    limit: usize,
    options: &Options,
    program: impl Fn(&Machine) -> Result<T, Error>,
) -> Result<Explored<T>, Error> {
    search(limit, options, Pruning::Nothing, program)
}

fn search<T: Ord>(
    limit: usize,
    options: &Options,
    pruning: Pruning,
    program: impl Fn(&Machine) -> Result<T, Error>,
) -> Result<Explored<T>, Error> {
    let mut explored = Explored { results: BTreeMap::new(), runs: 0, complete: false };
    let mut path: Vec<Node> = Vec::new();
    while explored.runs < limit {
        let script = path.iter().map(|node| node.asked.picked).collect();
        let sleep = path.last().map_or_else(Vec::new, |node| node.asked.sleep.clone());
        let machine = Machine::scripted(Chooser::guided(Guide::new(script, sleep)), options.clone());
        let result = program(&machine);
        let Engine::Sim(sim) = &machine.0.engine else { unreachable!("BUG: scripted machines simulate") };
        let followed = sim.followed().expect("BUG: scripted machines are guided");
        let picks = || followed.steps.iter().map(|asked| asked.picked).collect();
        explored.runs += 1;
        explored.results.entry(result?).or_insert_with(picks);
        follow(&mut path, followed, pruning);
        while path.last_mut().is_some_and(|node| !node.next_turn(pruning)) {
            path.pop();
        }
        if path.is_empty() {
            explored.complete = true;
            break;
        }
    }
    Ok(explored)
}
