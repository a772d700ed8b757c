//! The way out of a process on whose card something may never end. Of the one C library that the driver is made for.

use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::Once,
};

unsafe extern "C" {
    fn fflush(file: *mut c_void) -> c_int;
    fn _exit(status: c_int) -> !;
    fn on_exit(last: extern "C" fn(c_int, *mut c_void), with: *mut c_void) -> c_int;
}

/// From here on the process ends without the driver's own last steps, which wait for the card.
pub(super) fn without_waiting() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler lives as long as the process. Handlers run last first, and the driver's is there already.
        let _ = unsafe { on_exit(end, ptr::null_mut()) };
    });
}

extern "C" fn end(status: c_int, _with: *mut c_void) {
    // SAFETY: writes what other languages have in their buffers, and does not come back.
    unsafe {
        fflush(ptr::null_mut());
        _exit(status)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        env,
        process::{self, Command},
        thread,
        time::{Duration, Instant},
    };

    use super::*;

    const INNER: &str = "WARPWEFT_TEST_LEAVES";

    unsafe extern "C" {
        fn atexit(last: extern "C" fn()) -> c_int;
    }

    extern "C" fn wait_for_ever() {
        thread::sleep(Duration::from_secs(600));
    }

    #[test]
    fn a_process_ends_with_its_status_though_the_driver_would_wait() {
        if env::var_os(INNER).is_some() {
            // SAFETY: the handler lives as long as the process.
            unsafe { atexit(wait_for_ever) };
            without_waiting();
            without_waiting();
            process::exit(7);
        }
        let name = "cuda::leave::tests::a_process_ends_with_its_status_though_the_driver_would_wait";
        let mut child =
            Command::new(env::current_exe().unwrap()).args(["--exact", name]).env(INNER, "1").spawn().unwrap();
        let begin = Instant::now();
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None if begin.elapsed() > Duration::from_secs(20) => child.kill().unwrap(),
                None => thread::sleep(Duration::from_millis(10)),
            }
        };
        assert_eq!(status.code(), Some(7));
    }
}
