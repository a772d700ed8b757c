//! Many orders of a program, until one gives another result.

use std::{fmt, ops::Range};

use device::{Machine, Options};

/// An order that gives another result than the first one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherResult<T> {
    /// The first seed, and what it gives.
    pub first: (u64, T),
    /// The seed that gives something else, and what.
    pub other: (u64, T),
    /// What to type to run that order again.
    pub replay: String,
}

impl<T: fmt::Debug> fmt::Display for OtherResult<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ((first, want), (other, got)) = (&self.first, &self.other);
        write!(f, "seed {other} gives {got:?}, seed {first} gives {want:?}; run it again with\n  {}", self.replay)
    }
}

/// Runs `program` on simulated machines with one seed after the other, until one gives another result than the first.
/// `None`: all agree. `replay` makes the command that runs one seed again.
///
/// # Errors
/// The first error of the program.
pub fn other_result<T: PartialEq, E>(
    seeds: Range<u64>,
    options: &Options,
    program: impl Fn(&Machine) -> Result<T, E>,
    replay: impl Fn(u64) -> String,
) -> Result<Option<OtherResult<T>>, E> {
    let run = |seed| program(&Machine::sim_with(seed, options.clone()));
    let Some(first) = seeds.clone().next() else { return Ok(None) };
    let want = run(first)?;
    for seed in seeds.skip(1) {
        let got = run(seed)?;
        if got != want {
            return Ok(Some(OtherResult { first: (first, want), other: (seed, got), replay: replay(seed) }));
        }
    }
    Ok(None)
}
