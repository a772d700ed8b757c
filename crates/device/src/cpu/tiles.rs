//! A large operation cut into pieces that idle workers help with.

use std::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::{Access, OpError};

/// Runs piece `i`.
type RunTile = dyn Fn(usize) -> Result<(), OpError> + Send + Sync;

/// Pieces `0..count`, each run once, by whoever comes first. What a piece computes depends on its number only.
pub(crate) struct TileJob {
    run: Box<RunTile>,
    count: usize,
    next: AtomicUsize,
    state: Mutex<TileState>,
    all_done: Condvar,
}

struct TileState {
    done: usize,
    /// The failure of the lowest piece that failed.
    error: Option<(usize, OpError)>,
}

impl TileJob {
    pub(crate) fn new(count: usize, run: impl Fn(usize) -> Result<(), OpError> + Send + Sync + 'static) -> Self {
        TileJob {
            run: Box::new(run),
            count,
            next: AtomicUsize::new(0),
            state: Mutex::new(TileState { done: 0, error: None }),
            all_done: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, TileState> {
        self.state.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Runs pieces until none is left to begin.
    pub(crate) fn work(&self) {
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= self.count {
                return;
            }
            let result = catch(|| (self.run)(i));
            let mut state = self.lock();
            state.done += 1;
            if let Err(error) = result
                && state.error.as_ref().is_none_or(|(first, _)| i < *first)
            {
                state.error = Some((i, error));
            }
            if state.done == self.count {
                self.all_done.notify_all();
            }
        }
    }

    /// Blocks until every piece is done.
    pub(crate) fn finish(&self) -> Result<(), OpError> {
        let mut state = self.lock();
        while state.done < self.count {
            let limit = Duration::from_secs(1);
            (state, _) = self.all_done.wait_timeout(state, limit).unwrap_or_else(|poison| poison.into_inner());
        }
        state.error.take().map_or(Ok(()), |(_, error)| Err(error))
    }
}

/// Refuses a piece while another one that it conflicts with runs: a cut that overlaps is our own fault, and must
/// not become undefined behaviour.
pub(crate) struct TileClaims {
    running: Mutex<Vec<usize>>,
}

impl TileClaims {
    pub(crate) fn new() -> Self {
        TileClaims { running: Mutex::default() }
    }

    pub(crate) fn with<T>(&self, tiles: &[Vec<Access>], i: usize, run: impl FnOnce() -> T) -> T {
        let lock = || self.running.lock().unwrap_or_else(|poison| poison.into_inner());
        {
            let mut running = lock();
            for &other in running.iter() {
                let apart = tiles[i].iter().all(|a| !tiles[other].iter().any(|b| a.conflicts(b)));
                assert!(apart, "BUG: tiles {other} and {i} overlap");
            }
            running.push(i);
        }
        let out = run();
        lock().retain(|&other| other != i);
        out
    }
}

/// A panic of an operation.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct OpPanic(pub(crate) String);

/// Turns a panic into an error: a worker must survive the operations it runs.
pub(crate) fn catch(run: impl FnOnce() -> Result<(), OpError>) -> Result<(), OpError> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(Box::new(OpPanic(text.unwrap_or_else(|| "a value that is no text".into()))))
    })
}
