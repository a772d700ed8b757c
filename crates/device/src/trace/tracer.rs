//! Collects events while tracing is on; one load when it is off.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use super::{Note, Trace, TraceEvent};

/// Ranks share a buffer with every sixteenth other one, so that their threads rarely meet there.
const BUFFERS: usize = 16;

/// Events in the order of their numbers, in pieces that are freed one by one: a recording that ends must not take its
/// memory twice.
type Buffer = VecDeque<Vec<(u64, TraceEvent)>>;

/// Events in a piece.
const PIECE: usize = 128;

/// Numbers events over all ranks, and keeps them by rank until the recording ends.
pub(crate) struct Tracer {
    on: AtomicBool,
    made: Instant,
    /// Nanoseconds from `made` to the start of the recording.
    began: AtomicU64,
    next: AtomicU64,
    buffers: [Mutex<Buffer>; BUFFERS],
}

impl Tracer {
    pub(crate) fn new() -> Self {
        Tracer {
            on: AtomicBool::new(false),
            made: Instant::now(),
            began: AtomicU64::new(0),
            next: AtomicU64::new(0),
            buffers: std::array::from_fn(|_| Mutex::default()),
        }
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Which recording goes on; none when tracing is off.
    #[inline]
    pub(crate) fn recording(&self) -> Option<u64> {
        self.is_on().then(|| self.began.load(Ordering::Relaxed))
    }

    pub(crate) fn start(&self) {
        self.buffers.iter().for_each(|buffer| lock(buffer).clear());
        self.next.store(0, Ordering::Relaxed);
        self.began.store(self.elapsed(), Ordering::Relaxed);
        self.on.store(true, Ordering::Release);
    }

    pub(crate) fn stop(&self) -> Trace {
        self.on.store(false, Ordering::Release);
        let taken = self.buffers.iter().map(|buffer| std::mem::take(&mut *lock(buffer)));
        let mut heads: Vec<_> = taken.map(|buffer| buffer.into_iter().flatten().peekable()).collect();
        let mut events = Vec::new();
        // The next event of all is the next one of some buffer.
        while let Some(head) = heads
            .iter_mut()
            .filter_map(|head| Some((head.peek()?.0, head)))
            .min_by_key(|(number, _)| *number)
            .map(|(_, head)| head)
        {
            events.extend(head.next().map(|(_, event)| event));
        }
        events.shrink_to_fit();
        Trace { events }
    }

    /// `event` is made only when tracing is on. What one thread adds before it hands something over comes before what
    /// others add because of it.
    #[inline]
    pub(crate) fn add(&self, rank: u32, event: impl FnOnce() -> TraceEvent) {
        if !self.on.load(Ordering::Acquire) {
            return;
        }
        let event = event();
        let mut buffer = lock(&self.buffers[rank as usize % BUFFERS]);
        // Numbered under the lock: `stop` misses no event whose number a later one of this buffer exceeds.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        match buffer.back_mut().filter(|piece| piece.len() < PIECE) {
            Some(piece) => piece.push((number, event)),
            None => {
                let mut piece = Vec::with_capacity(PIECE);
                piece.push((number, event));
                buffer.push_back(piece);
            }
        }
    }

    pub(crate) fn note(&self, rank: u32, at: Option<(u32, u64)>, note: impl FnOnce() -> Note) {
        self.add(rank, || TraceEvent::Note { rank, at, note: note() });
    }

    /// Nanoseconds since tracing began; 0 when it is off.
    pub(crate) fn now(&self) -> u64 {
        if !self.is_on() {
            return 0;
        }
        self.elapsed().saturating_sub(self.began.load(Ordering::Relaxed))
    }

    fn elapsed(&self) -> u64 {
        u64::try_from(self.made.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|poison| poison.into_inner())
}
