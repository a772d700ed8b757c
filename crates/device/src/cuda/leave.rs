//! The way out of a process on whose card something may never end. Of the one C library that the driver is made for.
#![cfg_attr(not(target_env = "gnu"), expect(dead_code, unused_imports, reason = "there is no driver there"))]

use std::{
    ffi::{c_int, c_void},
    ptr,
};

unsafe extern "C" {
    fn fflush(file: *mut c_void) -> c_int;
    fn _exit(status: c_int) -> !;
    #[cfg(target_env = "gnu")]
    fn on_exit(last: extern "C" fn(c_int, *mut c_void), with: *mut c_void) -> c_int;
}

/// From here on the process ends without the driver's own last steps, which wait for the card.
pub(super) fn without_waiting() {
    // SAFETY: the handler lives as long as the process. Handlers run last first, and the driver's is there already.
    #[cfg(target_env = "gnu")]
    let _ = unsafe { on_exit(end, ptr::null_mut()) };
}

extern "C" fn end(status: c_int, _with: *mut c_void) {
    // SAFETY: writes what other languages have in their buffers, and does not come back.
    unsafe {
        fflush(ptr::null_mut());
        _exit(status)
    }
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use std::{
        env,
        process::{self, Command},
        thread,
        time::{Duration, Instant},
    };

    use super::*;

    const LEAVE: &str = "leave-with-seven";

    unsafe extern "C" {
        fn atexit(last: extern "C" fn()) -> c_int;
    }

    extern "C" fn wait_for_ever() {
        thread::sleep(Duration::from_secs(600));
    }

    #[test]
    fn a_process_ends_with_its_status_though_the_driver_would_wait() {
        if env::args().any(|arg| arg == LEAVE) {
            // SAFETY: the handler lives as long as the process.
            unsafe { atexit(wait_for_ever) };
            without_waiting();
            process::exit(7);
        }
        let own = "cuda::leave::tests::a_process_ends_with_its_status_though_the_driver_would_wait";
        let mut inner = Command::new(env::current_exe().unwrap()).args(["--exact", own, LEAVE]).spawn().unwrap();
        let begin = Instant::now();
        let status = loop {
            match inner.try_wait().unwrap() {
                Some(status) => break status,
                None if begin.elapsed() > Duration::from_secs(20) => inner.kill().unwrap(),
                None => thread::sleep(Duration::from_millis(10)),
            }
        };
        assert_eq!(status.code(), Some(7));
    }
}
