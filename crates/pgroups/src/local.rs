//! Ranks as threads of one process.

use std::{
    any::Any,
    collections::BTreeMap,
    error::Error as StdError,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
    thread,
};

use device::{Departure, Device, Machine};

use crate::{
    error::{Chain, PgError},
    rank::GlobalRank,
};

/// One rank of a running world: its number and its device. Cloning gives another handle of the same rank.
#[derive(Clone)]
pub struct Rank {
    /// Its place in the world.
    pub global: GlobalRank,
    /// Ranks in the world.
    pub world_size: u32,
    /// Its streams, events and memory.
    pub device: Device,
    /// Collections built so far, by first and last rank of their grid: part of the names of their groups, so that
    /// two collections in one process never share one. All ranks build in the same order, so they count alike.
    builds: Arc<Mutex<BTreeMap<(u32, u32), u32>>>,
}

impl Rank {
    /// One rank without the others: of a world of one, or to plan on the dry driver
    /// ([`ProcessGroups::planned`](crate::ProcessGroups::planned)).
    ///
    /// # Errors
    /// [`device::Error::RankTaken`] while another device of that rank lives.
    pub fn alone(machine: &Machine, global: GlobalRank, world_size: u32) -> Result<Rank, PgError> {
        let device = machine.device(global.0)?;
        Ok(Rank { global, world_size, device, builds: Arc::default() })
    }

    /// How many collections over the ranks `first..end` were built before.
    pub(crate) fn next_build(&self, first: u32, end: u32) -> u32 {
        let mut builds = self.builds.lock().unwrap_or_else(|poison| poison.into_inner());
        let count = builds.entry((first, end)).or_default();
        *count += 1;
        *count - 1
    }
}

/// Runs `body` as ranks `0..n`, each on a thread of its own, and gives back what they return, by rank.
///
/// A rank that returns has first waited for its device; one that fails or panics leaves its groups at once, and those
/// who wait for it fail too. Streams that `body` drops with work in them are an error: synchronize first. Ranks meet
/// through groups only, never through channels or locks of the standard library: on `sim` one of them runs at a time.
///
/// # Errors
/// [`PgError::RankFailed`] or [`PgError::RankPanicked`] of the rank that failed first, not of one that only felt it;
/// the lowest, if there are several. [`PgError::NoThread`], or [`device::Error::RankTaken`] if a device of an earlier
/// world is still alive.
pub fn local<T, E>(machine: &Machine, n: u32, body: impl Fn(Rank) -> Result<T, E> + Sync) -> Result<Vec<T>, PgError>
where
    T: Send,
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    let ranks: Vec<Rank> = (0..n).map(|rank| Rank::alone(machine, GlobalRank(rank), n)).collect::<Result<_, _>>()?;
    machine.expect(0..n);
    let body = &body;
    let outcomes: Vec<Result<T, Failure>> = thread::scope(|scope| {
        let start = |rank: Rank| {
            let global = rank.global;
            let thread = thread::Builder::new().name(format!("rank-{global}"));
            let thread = thread.spawn_scoped(scope, move || run(machine, rank, body));
            (global, thread.map_err(|error| never_started(machine, global, error)))
        };
        let threads: Vec<_> = ranks.into_iter().map(start).collect();
        let finish = |(rank, thread): (GlobalRank, Result<thread::ScopedJoinHandle<'_, _>, Failure>)| {
            thread?.join().unwrap_or_else(|panic| Err(Failure::panicked(rank, &*panic)))
        };
        threads.into_iter().map(finish).collect()
    });
    let failures = outcomes.iter().filter_map(|outcome| outcome.as_ref().err());
    // Stable: of equals, the lowest rank.
    if let Some(root) = failures.min_by_key(|failure| failure.echo) {
        return Err((*root.error).clone());
    }
    Ok(outcomes.into_iter().filter_map(Result::ok).collect())
}

/// Why a rank has no result.
struct Failure {
    /// It repeats the failure of another rank.
    echo: bool,
    error: Box<PgError>,
}

impl Failure {
    fn panicked(rank: GlobalRank, panic: &(dyn Any + Send)) -> Failure {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        let message = text.unwrap_or_else(|| "a value that is no text".to_owned());
        Failure { echo: false, error: Box::new(PgError::RankPanicked { rank, message }) }
    }

    fn failed(rank: GlobalRank, source: Box<dyn StdError + Send + Sync>) -> Failure {
        Failure { echo: false, error: Box::new(PgError::RankFailed { rank, source: Arc::from(source) }) }
    }
}

/// The life of one rank, on its thread.
fn run<T, E>(machine: &Machine, rank: Rank, body: impl Fn(Rank) -> Result<T, E>) -> Result<T, Failure>
where
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    let global = rank.global;
    let device = rank.device.clone();
    let turn = machine.enter(global.0);
    let outcome = match catch_unwind(AssertUnwindSafe(|| body(rank))) {
        Ok(Ok(value)) => match device.synchronize() {
            Ok(()) => Ok(value),
            Err(error) => Err(Failure::failed(global, Box::new(error))),
        },
        Ok(Err(error)) => Err(Failure::failed(global, error.into())),
        Err(panic) => Err(Failure::panicked(global, &*panic)),
    };
    let outcome = outcome.map_err(|failure| Failure { echo: device.error().is_some_and(|e| e.is_echo()), ..failure });
    machine.leave(global.0, departure(&outcome));
    // On `sim` the next rank runs from here on.
    drop(turn);
    outcome
}

fn departure<T>(outcome: &Result<T, Failure>) -> Departure {
    match outcome.as_ref().map_err(|failure| &*failure.error) {
        Ok(_) => Departure::Returned,
        Err(PgError::RankPanicked { .. }) => Departure::Panicked,
        Err(PgError::RankFailed { source, .. }) => Departure::Failed(Chain(&**source).to_string()),
        Err(other) => Departure::Failed(other.chain()),
    }
}

/// Leaves for a rank that has no thread: the others must not wait for it.
fn never_started(machine: &Machine, rank: GlobalRank, error: io::Error) -> Failure {
    let turn = machine.enter(rank.0);
    let error = PgError::NoThread { rank, source: Arc::new(error) };
    machine.leave(rank.0, Departure::Failed(error.chain()));
    drop(turn);
    Failure { echo: false, error: Box::new(error) }
}
