//! What the driver keeps of a card for stacks: for every thread that can run at a time, whether or not a kernel has one.

use cudarc::driver::sys;

use super::{
    CudaError,
    card::{Card, Function},
};

/// Bytes of a thread, at least: the driver's own default is 1024, which is 200 to 250 MiB of an H200.
const LEAST: usize = 64;

impl Card {
    /// Keeps no more than our kernels need. A kernel of a library that needs more has it made when it is first launched; that
    /// may wait for all that runs, so it is for programs of one rank, whose work waits for nothing that is still to be
    /// submitted. The context is current, and all kernels are loaded.
    pub(super) fn trim_stacks(&self) -> Result<(), CudaError> {
        let mut most = LEAST;
        for function in self.functions() {
            most = most.max(self.local_bytes(function)?);
        }
        let which = sys::CUlimit::CU_LIMIT_STACK_SIZE;
        // SAFETY: the context is current; a number.
        self.check("cuCtxSetLimit", unsafe { sys::cuCtxSetLimit(which, most) })
    }

    /// Of a thread, outside of registers.
    fn local_bytes(&self, function: Function) -> Result<usize, CudaError> {
        let which = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES;
        let mut bytes = 0;
        // SAFETY: the function is loaded; writes one integer.
        self.check("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&mut bytes, which, function.0) })?;
        Ok(bytes as usize)
    }
}
