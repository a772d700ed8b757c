//! How work passes between threads: a stream's inbox, a mark that streams and hosts wait for, and the queue of
//! streams that can run. Nothing here knows what the work is, so loom can try every interleaving of it.

#[cfg(loom)]
use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};
#[cfg(not(loom))]
use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};
use std::{collections::VecDeque, mem, time::Duration};

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of these locks, and were it to, the state is still a queue.
    m.lock().unwrap_or_else(|poison| poison.into_inner())
}

/// Work submitted to one stream and not yet taken by a worker.
///
/// `scheduled` is true from the push that finds the stream idle until a worker finds the inbox empty. Between the
/// two, exactly one party owns the stream: the ready queue, a worker, or the list of whoever it waits for.
pub(crate) struct Inbox<T> {
    state: Mutex<InboxState<T>>,
}

struct InboxState<T> {
    items: Vec<T>,
    /// Finished items on their way back to the submitter. It frees them, so that reference counts and the
    /// allocator's lists stay in one core's cache.
    spent: Vec<T>,
    free: Vec<T>,
    scheduled: bool,
}

/// What a push found.
pub(crate) struct Pushed<T> {
    /// The stream was idle: the caller must put it on the ready queue.
    pub(crate) was_idle: bool,
    /// Finished items, for [`Inbox::free`].
    pub(crate) spent: Vec<T>,
}

impl<T> InboxState<T> {
    fn take_spent(&mut self) -> Vec<T> {
        if self.spent.is_empty() {
            return Vec::new();
        }
        let free = mem::take(&mut self.free);
        mem::replace(&mut self.spent, free)
    }
}

impl<T> Inbox<T> {
    pub(crate) fn new() -> Self {
        let state = InboxState { items: Vec::new(), spent: Vec::new(), free: Vec::new(), scheduled: false };
        Inbox { state: Mutex::new(state) }
    }

    #[must_use]
    pub(crate) fn push(&self, item: T) -> Pushed<T> {
        let mut state = lock(&self.state);
        state.items.push(item);
        let was_idle = !mem::replace(&mut state.scheduled, true);
        Pushed { was_idle, spent: state.take_spent() }
    }

    /// Takes what was pushed and not yet taken. The stream stays with whoever owns it.
    pub(crate) fn drain(&self) -> Vec<T> {
        mem::take(&mut lock(&self.state).items)
    }

    /// Frees finished items on this thread.
    pub(crate) fn sweep(&self) {
        let spent = lock(&self.state).take_spent();
        self.free(spent);
    }

    /// Frees what a push gave back. What an item owns may submit to this very stream when it goes, so the caller
    /// holds no lock.
    pub(crate) fn free(&self, mut spent: Vec<T>) {
        if spent.capacity() > 0 {
            spent.clear();
            lock(&self.state).free = spent;
        }
    }

    /// Swaps the finished `batch` for what has been pushed since. False: there is nothing, and the stream is idle
    /// from now on; the next push schedules it again.
    #[must_use]
    pub(crate) fn refill(&self, batch: &mut Vec<T>) -> bool {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        state.spent.append(batch);
        if state.items.is_empty() {
            state.scheduled = false;
            return false;
        }
        mem::swap(&mut state.items, batch);
        true
    }
}

/// A point in a stream that others wait for: streams by parking, hosts by blocking. Completed once.
pub(crate) struct Mark<S> {
    done: AtomicBool,
    state: Mutex<MarkState<S>>,
    host: Condvar,
}

struct MarkState<S> {
    parked: Vec<S>,
    hosts: usize,
}

impl<S> Mark<S> {
    pub(crate) fn new() -> Self {
        Mark {
            done: AtomicBool::new(false),
            state: Mutex::new(MarkState { parked: Vec::new(), hosts: 0 }),
            host: Condvar::new(),
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Leaves `stream` with the mark, which gives it back when it completes; `Err` gives it back at once when the
    /// mark is done already.
    pub(crate) fn park(&self, stream: S) -> Result<(), S> {
        if self.is_done() {
            return Err(stream);
        }
        let mut state = lock(&self.state);
        if self.done.load(Ordering::Relaxed) {
            return Err(stream);
        }
        state.parked.push(stream);
        Ok(())
    }

    /// The streams that waited; the caller schedules them.
    #[must_use]
    pub(crate) fn complete(&self) -> Vec<S> {
        let mut state = lock(&self.state);
        self.done.store(true, Ordering::Release);
        if state.hosts > 0 {
            self.host.notify_all();
        }
        mem::take(&mut state.parked)
    }

    /// Blocks this thread until the mark is done or `limit` has passed; tells whether it is done.
    pub(crate) fn wait_host(&self, limit: Duration) -> bool {
        let mut state = lock(&self.state);
        if self.done.load(Ordering::Relaxed) {
            return true;
        }
        state.hosts += 1;
        let (mut state, _) = self.host.wait_timeout(state, limit).unwrap_or_else(|poison| poison.into_inner());
        state.hosts -= 1;
        self.done.load(Ordering::Relaxed)
    }
}

/// What an idle worker may take: whole streams first, and only without any, tiles of a large operation.
pub(crate) struct Ready<S, H> {
    state: Mutex<ReadyState<S, H>>,
    wake: Condvar,
    /// Entries in both queues: lets an idle worker look without the lock.
    len: AtomicUsize,
}

struct ReadyState<S, H> {
    streams: VecDeque<S>,
    helps: VecDeque<H>,
    asleep: usize,
    closed: bool,
}

/// Taken from [`Ready`].
pub(crate) enum Work<S, H> {
    Stream(S),
    Help(H),
    /// The machine is closing.
    Close,
}

impl<S, H> Ready<S, H> {
    /// How often an idle worker looks before it sleeps: about what waking it would cost.
    const LOOKS: usize = if cfg!(any(loom, miri)) { 0 } else { 2_000 };

    pub(crate) fn new() -> Self {
        let state = ReadyState { streams: VecDeque::new(), helps: VecDeque::new(), asleep: 0, closed: false };
        Ready { state: Mutex::new(state), wake: Condvar::new(), len: AtomicUsize::new(0) }
    }

    pub(crate) fn push(&self, stream: S) {
        let mut state = lock(&self.state);
        state.streams.push_back(stream);
        self.len.fetch_add(1, Ordering::Relaxed);
        if state.asleep > 0 {
            self.wake.notify_one();
        }
    }

    /// Offers `job` to as many as `count` idle workers.
    pub(crate) fn ask_help(&self, job: &H, count: usize)
    where
        H: Clone,
    {
        let mut state = lock(&self.state);
        state.helps.extend(std::iter::repeat_n(job, count).cloned());
        self.len.fetch_add(count, Ordering::Relaxed);
        if state.asleep > 0 {
            self.wake.notify_all();
        }
    }

    /// Takes back the offers of `job` that nobody took.
    pub(crate) fn end_help(&self, same: impl Fn(&H) -> bool) {
        let mut state = lock(&self.state);
        let before = state.helps.len();
        state.helps.retain(|h| !same(h));
        self.len.fetch_sub(before - state.helps.len(), Ordering::Relaxed);
    }

    /// Whether something may wait for a worker: one load.
    pub(crate) fn may_wait(&self) -> bool {
        self.len.load(Ordering::Relaxed) > 0
    }

    /// Whether a stream waits for a worker.
    pub(crate) fn has_streams(&self) -> bool {
        !lock(&self.state).streams.is_empty()
    }

    /// Blocks until there is something to do.
    pub(crate) fn take(&self) -> Work<S, H> {
        for look in 0..Self::LOOKS {
            if self.len.load(Ordering::Relaxed) > 0 {
                break;
            }
            if look % 64 == 63 {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        let mut state = lock(&self.state);
        loop {
            if let Some(stream) = state.streams.pop_front() {
                self.len.fetch_sub(1, Ordering::Relaxed);
                return Work::Stream(stream);
            }
            if let Some(help) = state.helps.pop_front() {
                self.len.fetch_sub(1, Ordering::Relaxed);
                return Work::Help(help);
            }
            if state.closed {
                return Work::Close;
            }
            state.asleep += 1;
            state = self.wake.wait(state).unwrap_or_else(|poison| poison.into_inner());
            state.asleep -= 1;
        }
    }

    pub(crate) fn close(&self) {
        lock(&self.state).closed = true;
        self.wake.notify_all();
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{sync::Arc, thread};

    use super::*;

    type Stream = Arc<Inbox<u32>>;

    /// A worker as the cpu driver has it, until it has seen `want` items.
    fn work(ready: &Ready<Stream, ()>, want: usize) -> Vec<u32> {
        let mut seen = Vec::new();
        while seen.len() < want {
            let Work::Stream(stream) = ready.take() else { break };
            let mut batch = Vec::new();
            while stream.refill(&mut batch) {
                seen.extend_from_slice(&batch);
            }
        }
        seen
    }

    #[test]
    fn loom_no_push_is_lost_between_refill_and_idle() {
        loom::model(|| {
            let (ready, stream) = (Arc::new(Ready::new()), Arc::new(Inbox::new()));
            let worker = thread::spawn({
                let ready = ready.clone();
                move || work(&ready, 2)
            });
            for item in [1, 2] {
                if stream.push(item).was_idle {
                    ready.push(stream.clone());
                }
            }
            assert_eq!(worker.join().unwrap(), [1, 2]);
        });
    }

    #[test]
    fn loom_a_stream_is_never_owned_by_two_workers() {
        let mut model = loom::model::Builder::new();
        // Every schedule with at most two preemptions; all of them take minutes and find no more.
        model.preemption_bound = Some(2);
        model.check(|| {
            let (ready, stream) = (Arc::new(Ready::<Stream, ()>::new()), Arc::new(Inbox::new()));
            let running = Arc::new(AtomicBool::new(false));
            let worker = || {
                let (ready, running) = (ready.clone(), running.clone());
                thread::spawn(move || {
                    while let Work::Stream(stream) = ready.take() {
                        let mut batch = Vec::new();
                        while stream.refill(&mut batch) {
                            assert!(!running.swap(true, Ordering::AcqRel), "two owners");
                            running.store(false, Ordering::Release);
                        }
                    }
                })
            };
            let workers = [worker(), worker()];
            for item in [1, 2] {
                if stream.push(item).was_idle {
                    ready.push(stream.clone());
                }
            }
            ready.close();
            workers.into_iter().for_each(|w| w.join().unwrap());
        });
    }

    #[test]
    fn loom_a_parked_stream_is_given_back_exactly_once() {
        loom::model(|| {
            let mark = Arc::new(Mark::new());
            let waiter = thread::spawn({
                let mark = mark.clone();
                move || mark.park(7).err()
            });
            let given = mark.complete();
            let at_once = waiter.join().unwrap();
            assert_eq!(given.len() + usize::from(at_once.is_some()), 1);
        });
    }

    #[test]
    fn loom_a_host_wait_ends_when_the_mark_completes() {
        loom::model(|| {
            let mark = Arc::new(Mark::<u32>::new());
            let host = thread::spawn({
                let mark = mark.clone();
                move || while !mark.wait_host(Duration::from_secs(1)) {}
            });
            assert!(mark.complete().is_empty());
            host.join().unwrap();
        });
    }

    #[test]
    fn loom_closing_wakes_every_sleeping_worker() {
        loom::model(|| {
            let ready = Arc::new(Ready::<u32, ()>::new());
            let workers: Vec<_> = (0..2)
                .map(|_| {
                    let ready = ready.clone();
                    thread::spawn(move || assert!(matches!(ready.take(), Work::Close)))
                })
                .collect();
            ready.close();
            workers.into_iter().for_each(|w| w.join().unwrap());
        });
    }
}
