//! Programs of several ranks, a host thread each.

use std::panic::{AssertUnwindSafe, catch_unwind};

use device::{Departure, Device, Error, Machine};

/// How a rank's program ended; `None` is a panic.
pub(crate) type Ended<T> = Option<Result<T, Error>>;

/// Runs `program` for every rank of `ranks` in a thread of its own, as a launcher would: whoever returns leaves.
pub(crate) fn run_ranks<T: Send>(
    machine: &Machine,
    ranks: &[u32],
    program: impl Fn(&Device) -> Result<T, Error> + Sync,
) -> Vec<Ended<T>> {
    machine.expect(ranks.iter().copied());
    let one = |rank: u32| {
        let _turn = machine.enter(rank);
        let ended = catch_unwind(AssertUnwindSafe(|| machine.device(rank).and_then(|device| program(&device))));
        let how = match &ended {
            Ok(Ok(_)) => Departure::Returned,
            Ok(Err(error)) => Departure::Failed(error.chain()),
            Err(_) => Departure::Panicked,
        };
        machine.leave(rank, how);
        ended.ok()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(|| one(*rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// All ranks must end well.
pub(crate) fn all_well<T: Send>(
    machine: &Machine,
    ranks: &[u32],
    program: impl Fn(&Device) -> Result<T, Error> + Sync,
) -> Vec<T> {
    let ended = run_ranks(machine, ranks, program);
    ended.into_iter().map(|e| e.expect("a rank panicked").expect("a rank failed")).collect()
}
