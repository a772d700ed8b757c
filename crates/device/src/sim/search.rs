//! Every order in which a small program can run.

use std::collections::BTreeMap;

use super::{Chooser, chooser::Choice};
use crate::{Error, Machine, Options, engine::Engine};

/// What a search found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explored<T: Ord> {
    /// Every result, with the first schedule that gave it (the scheduler's picks, in order).
    pub results: BTreeMap<T, Vec<usize>>,
    /// Schedules that ran.
    pub runs: usize,
    /// All schedules ran; false if the limit came first.
    pub complete: bool,
}

/// Runs `program` on a fresh `sim` machine once for every order in which its operations can run, at most `limit`
/// times. The program must do the same on each run: what it submits may depend on nothing but the results of its
/// own operations.
///
/// # Errors
/// The first error of the program.
pub fn explore<T: Ord>(
    limit: usize,
    options: &Options,
    program: impl Fn(&Machine) -> Result<T, Error>,
) -> Result<Explored<T>, Error> {
    let mut explored = Explored { results: BTreeMap::new(), runs: 0, complete: false };
    let mut script = Vec::new();
    while explored.runs < limit {
        let machine = Machine::scripted(Chooser::script(script), options.clone());
        let result = program(&machine)?;
        let Engine::Sim(sim) = &machine.0.engine else { unreachable!("BUG: scripted machines simulate") };
        let asked = sim.choices();
        explored.runs += 1;
        explored.results.entry(result).or_insert_with(|| asked.iter().map(|c| c.picked).collect());
        match next_script(&asked) {
            Some(next) => script = next,
            None => {
                explored.complete = true;
                break;
            }
        }
    }
    Ok(explored)
}

/// The last pick that has an alternative left takes it; what follows starts over. `None` after the last schedule.
fn next_script(asked: &[Choice]) -> Option<Vec<usize>> {
    let last = asked.iter().rposition(|c| c.picked + 1 < c.of)?;
    let mut script: Vec<usize> = asked[..=last].iter().map(|c| c.picked).collect();
    script[last] += 1;
    Some(script)
}
