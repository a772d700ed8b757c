//! Keeps apart what stops a card when it happens at once: members of a group that begin one after the other, and calls of
//! the driver that wait for the card.
//!
//! The first member waits on its card for the last one. A call that waits for the card until then holds a lock of the
//! driver, which the thread needs that lets the others begin: neither goes on. So such a call and such a beginning wait for
//! each other here, where none holds the driver up. Seen with `cuGraphInstantiate` of one rank between two members' launches.

use std::{
    sync::{
        PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use super::leave;

/// How long a card is waited for when something on it stands.
pub(super) const STANDING: Duration = Duration::from_secs(2);

/// One for all cards of a machine: the driver's locks are those of the process.
#[derive(Default)]
pub(super) struct Beginnings {
    lock: RwLock<()>,
    stands: AtomicBool,
}

/// Until it is dropped, no call waits for a card.
pub(super) struct Begins<'a>(#[expect(dead_code, reason = "held until it is dropped")] RwLockWriteGuard<'a, ()>);

/// Until it is dropped, whatever has begun on a card ends by itself.
pub(super) struct MayWait<'a>(#[expect(dead_code, reason = "held until it is dropped")] RwLockReadGuard<'a, ()>);

impl Beginnings {
    /// Members of a group begin. Whoever holds it makes no call that may wait, and comes with the turn of the cliques: there
    /// is one such at a time.
    pub(super) fn begin(&self) -> Begins<'_> {
        Begins(self.lock.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Around one call of the driver that asks for memory, gives some back, or makes or ends what has some, and around
    /// nothing else: it is not to be asked for twice by one thread.
    pub(super) fn may_wait(&self) -> MayWait<'_> {
        MayWait(self.lock.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// From here on something on a card may never end: hosts have waited for it as long as they may.
    pub(super) fn stand(&self) {
        if !self.stands.swap(true, Ordering::AcqRel) {
            leave::without_waiting();
        }
    }

    /// Whether whoever waits for a card may wait for ever.
    pub(super) fn some_stand(&self) -> bool {
        self.stands.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::mpsc::{self, RecvTimeoutError},
        thread,
    };

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    /// Whether `second` gets what it asks for while `first` is held; it does when that is dropped.
    fn is_given<A, B>(first: A, second: impl FnOnce() -> B + Send) -> bool {
        let (told, tell) = mpsc::channel();
        thread::scope(|scope| {
            let first = first;
            scope.spawn(move || {
                let _held = second();
                told.send(()).unwrap();
            });
            let early = tell.recv_timeout(Duration::from_millis(100));
            drop(first);
            if early == Err(RecvTimeoutError::Timeout) {
                assert_eq!(tell.recv_timeout(LIMIT), Ok(()));
            }
            early.is_ok()
        })
    }

    #[test]
    fn calls_that_wait_are_made_before_the_first_member_or_behind_the_last() {
        let beginnings = Beginnings::default();
        assert!(!is_given(beginnings.begin(), || beginnings.may_wait()));
        assert!(!is_given(beginnings.may_wait(), || beginnings.begin()));
    }

    #[test]
    fn calls_that_wait_do_not_wait_for_each_other() {
        let beginnings = Beginnings::default();
        let first = beginnings.may_wait();
        assert!(is_given((), || beginnings.may_wait()));
        drop(first);
    }
}
