//! Times on a card.

use std::{
    ptr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::sys;

use super::{
    CudaError,
    card::{Card, RawEvent},
};

/// How long the end is waited for before the card is given up.
const LIMIT: Duration = Duration::from_secs(20);

/// Two events that keep their times.
pub(super) struct Stopwatch {
    pub(super) begin: RawEvent,
    pub(super) end: RawEvent,
    card: Arc<Card>,
}

impl Stopwatch {
    /// The context is current.
    pub(super) fn new(card: &Arc<Card>) -> Result<Stopwatch, CudaError> {
        let none = RawEvent(ptr::null_mut());
        let mut clock = Stopwatch { begin: none, end: none, card: card.clone() };
        for event in [&mut clock.begin, &mut clock.end] {
            let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
            // SAFETY: the context is current; writes one handle.
            card.check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event.0, flags) })?;
        }
        Ok(clock)
    }

    /// Seconds between its records, when the second is reached.
    pub(super) fn read(&self) -> Result<f64, CudaError> {
        let (card, begin) = (&self.card, Instant::now());
        while !card.is_reached(self.end)? {
            if begin.elapsed() > LIMIT {
                return Err(CudaError::Unable { card: card.ordinal, what: "finish a launch in 20 s" });
            }
            thread::yield_now();
        }
        self.milliseconds_to(self.end).map(|milliseconds| milliseconds / 1e3)
    }

    /// From its first record to that of `event`, which has been reached: 0 if that was before.
    pub(super) fn nanoseconds_to(&self, event: RawEvent) -> Result<u64, CudaError> {
        self.card.bind()?;
        self.milliseconds_to(event).map(|milliseconds| (milliseconds * 1e6) as u64)
    }

    /// The context is current.
    fn milliseconds_to(&self, event: RawEvent) -> Result<f64, CudaError> {
        let mut milliseconds = 0.0f32;
        // SAFETY: both events are of this card and have been reached; writes one number.
        let code = unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, self.begin.0, event.0) };
        self.card.check("cuEventElapsedTime", code).map(|()| f64::from(milliseconds))
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        if self.card.bind().is_err() {
            return;
        }
        for event in [self.begin, self.end].into_iter().filter(|event| !event.0.is_null()) {
            // SAFETY: made in `new`, destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(event.0) };
        }
    }
}
