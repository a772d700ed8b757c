//! Handles of the library, one for each stream that uses it.
//!
//! A handle that is told another stream records an event in the one before, and lets the new one wait for that. The one
//! before may be gone by then, or may stand behind a rank that waits for the new one. So a handle keeps its stream until
//! that goes, and is then told one in which nothing is held up.

use std::{
    collections::HashMap,
    ptr,
    sync::{Arc, Mutex},
};

use super::calls::{Calls, RawHandle};
use crate::cuda::{
    CudaError,
    card::{RawStream, lock},
};

pub(super) struct Handles {
    calls: Arc<Calls>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By the address of their stream.
    of_streams: HashMap<usize, Arc<Mutex<Handle>>>,
    idle: Vec<Handle>,
}

/// A name that the library gives out.
pub(super) struct Handle(pub(super) RawHandle);

// SAFETY: the library takes it from any thread, one at a time.
unsafe impl Send for Handle {}

impl Handles {
    pub(super) fn new(calls: Arc<Calls>) -> Handles {
        Handles { calls, state: Mutex::default() }
    }

    /// The context is current, and no stream of this thread captures.
    pub(super) fn make(&self) -> Result<Handle, CudaError> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        self.calls.check("cudnnCreate", unsafe { (self.calls.create)(&mut handle) })?;
        Ok(Handle(handle))
    }

    /// One for what runs in no stream: an idle one, or what `make` makes.
    pub(super) fn take(&self, make: impl FnOnce() -> Result<Handle, CudaError>) -> Result<Handle, CudaError> {
        let idle = lock(&self.state).idle.pop();
        idle.map_or_else(make, Ok)
    }

    /// It waits for whoever needs one.
    pub(super) fn put_back(&self, handle: Handle) {
        lock(&self.state).idle.push(handle);
    }

    /// The handle of `stream`. If it has none, an idle one or what `make` makes; then no stream of this thread captures. The
    /// context is current.
    pub(super) fn of(
        &self,
        stream: RawStream,
        make: impl FnOnce() -> Result<Handle, CudaError>,
    ) -> Result<Arc<Mutex<Handle>>, CudaError> {
        let mut state = lock(&self.state);
        if let Some(handle) = state.of_streams.get(&(stream.0 as usize)) {
            return Ok(handle.clone());
        }
        let handle = state.idle.pop().map_or_else(make, Ok)?;
        self.tell(&handle, stream)?;
        let handle = Arc::new(Mutex::new(handle));
        state.of_streams.insert(stream.0 as usize, handle.clone());
        Ok(handle)
    }

    /// `stream` is about to go, with nothing on its way in it: its handle goes to `aside`, until another one needs it.
    pub(super) fn leave(&self, stream: RawStream, aside: RawStream) {
        let mut state = lock(&self.state);
        let Some(handle) = state.of_streams.remove(&(stream.0 as usize)) else { return };
        let handle = Arc::into_inner(handle).expect("BUG: a stream goes while it is used");
        let handle = handle.into_inner().unwrap_or_else(|poison| poison.into_inner());
        // One that cannot go is left to the process.
        if self.tell(&handle, aside).is_ok() {
            state.idle.push(handle);
        }
    }

    /// `stream` is about to go, and may never come to its end: its handle is left to the process.
    pub(super) fn abandon(&self, stream: RawStream) {
        lock(&self.state).of_streams.remove(&(stream.0 as usize));
    }

    fn tell(&self, handle: &Handle, stream: RawStream) -> Result<(), CudaError> {
        // SAFETY: nobody else has the handle; the stream and the one before live, of the card whose context is current.
        self.calls.check("cudnnSetStream", unsafe { (self.calls.set_stream)(handle.0, stream.0.cast()) })
    }

    /// Gives them back. The context is current, and nothing is on its way.
    pub(super) fn close(&self) {
        let State { of_streams, idle } = std::mem::take(&mut *lock(&self.state));
        let of_streams = of_streams.into_values().filter_map(Arc::into_inner).filter_map(|own| own.into_inner().ok());
        idle.into_iter().chain(of_streams).for_each(|handle| self.end(handle));
    }

    fn end(&self, handle: Handle) {
        // SAFETY: made by the library, and nobody else has it.
        let _ = unsafe { (self.calls.destroy)(handle.0) };
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;

    use super::*;

    /// In the library's place: a handle is the list of the streams that it was told.
    unsafe extern "C" fn create(handle: *mut RawHandle) -> u32 {
        // SAFETY: the caller has room for one handle.
        unsafe { handle.write(Box::into_raw(Box::<Vec<usize>>::default()).cast()) };
        0
    }

    unsafe extern "C" fn destroy(handle: RawHandle) -> u32 {
        // SAFETY: made by `create`.
        drop(unsafe { Box::from_raw(handle.cast::<Vec<usize>>()) });
        0
    }

    unsafe extern "C" fn set_stream(handle: RawHandle, stream: *mut c_void) -> u32 {
        // SAFETY: made by `create`, and nobody else has it.
        unsafe { (*handle.cast::<Vec<usize>>()).push(stream as usize) };
        0
    }

    fn stream(number: usize) -> RawStream {
        RawStream(ptr::without_provenance_mut(number))
    }

    /// The streams that the handle of `of` was told.
    fn told(handles: &Handles, of: usize) -> Vec<usize> {
        let handle = handles.of(stream(of), || handles.make()).unwrap();
        let handle = lock(&handle);
        // SAFETY: made by `create`, and nobody else has it.
        unsafe { (*handle.0.cast::<Vec<usize>>()).clone() }
    }

    #[test]
    fn a_handle_has_one_stream_until_that_goes_and_then_one_that_holds_nothing_up() {
        let handles = Handles::new(Arc::new(Calls::of(create, destroy, set_stream)));
        for _ in 0..2 {
            assert_eq!((told(&handles, 1), told(&handles, 2)), (vec![1], vec![2]), "each has its own");
        }
        handles.leave(stream(1), stream(9));
        assert_eq!(told(&handles, 3), [1, 9, 3], "it left while its stream was there");
        assert_eq!(told(&handles, 1), [1], "another stream at the same place");
        handles.abandon(stream(2));
        handles.leave(stream(2), stream(9));
        assert_eq!(told(&handles, 4), [4], "what may never end is asked for nothing");
        handles.close();
        assert_eq!(told(&handles, 3), [3]);
        handles.close();
    }

    #[test]
    fn what_runs_in_no_stream_takes_an_idle_one_and_leaves_it_to_the_next_stream() {
        let handles = Handles::new(Arc::new(Calls::of(create, destroy, set_stream)));
        let first = handles.take(|| handles.make()).unwrap();
        let made = first.0;
        handles.put_back(first);
        let again = handles.take(|| panic!("one is idle")).unwrap();
        assert_eq!(again.0, made);
        handles.put_back(again);
        let own = handles.of(stream(1), || panic!("one is idle")).unwrap();
        assert_eq!(lock(&own).0, made);
        drop(own);
        assert_eq!(told(&handles, 1), [1]);
        handles.close();
    }
}
