//! Launches by the driver's own call, with nothing around it: what ours are measured against.

use std::{ffi::c_void, mem::MaybeUninit, ptr};

use cudarc::driver::{
    result::{self, DriverError},
    sys,
};

/// A function of as many arguments as one of a tensor has here, which does nothing.
const SOURCE: &str = "\
.version 7.0
.target sm_70
.address_size 64
.visible .entry plain(
    .param .align 8 .b8 tensor[40], .param .u64 value, .param .align 8 .b8 post[16]
) { ret; }\0";

/// The function on the first card, and a stream of its own there.
pub(crate) struct Plain {
    function: sys::CUfunction,
    stream: sys::CUstream,
}

impl Plain {
    /// The library must be there: whoever has a machine on a card has it.
    pub(crate) fn open() -> Result<Plain, DriverError> {
        result::init()?;
        let card = result::device::get(0)?;
        let [mut module, mut stream, mut function] = [ptr::null_mut::<c_void>(); 3];
        // SAFETY: the card is there; the context is kept for the rest of the process. Each call writes one handle, the
        // source ends with a zero byte, and the name is one of its functions.
        unsafe {
            let mut context = MaybeUninit::uninit();
            sys::cuDevicePrimaryCtxRetain(context.as_mut_ptr(), card).result()?;
            sys::cuCtxSetCurrent(context.assume_init()).result()?;
            sys::cuModuleLoadData((&raw mut module).cast(), SOURCE.as_ptr().cast()).result()?;
            sys::cuModuleGetFunction((&raw mut function).cast(), module.cast(), c"plain".as_ptr()).result()?;
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            sys::cuStreamCreate((&raw mut stream).cast(), flags).result()?;
        }
        Ok(Plain { function: function.cast(), stream: stream.cast() })
    }

    pub(crate) fn launch(&self, threads: u32) -> Result<(), DriverError> {
        let (mut tensor, mut value, mut post) = ([0u64; 5], 0u64, [0u64; 2]);
        let mut arguments: [*mut c_void; 3] =
            [(&raw mut tensor).cast(), (&raw mut value).cast(), (&raw mut post).cast()];
        // SAFETY: the function takes these three arguments, which the driver copies before it returns; both handles
        // live as long as the process.
        unsafe {
            let none = ptr::null_mut();
            let (function, stream, arguments) = (self.function, self.stream, arguments.as_mut_ptr());
            sys::cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, arguments, none).result()
        }
    }

    pub(crate) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: the stream lives as long as the process.
        unsafe { sys::cuStreamSynchronize(self.stream).result() }
    }
}
