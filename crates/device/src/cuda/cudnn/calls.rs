//! The library's functions. Codes and names pass as numbers: a version newer than cudarc's description of it may answer
//! with more of them.

use std::{
    ffi::{CStr, c_char, c_void},
    sync::Arc,
};

use cudarc::cudnn::sys;

use crate::cuda::{CudaError, error::library_version};

/// The first whose attention is right for every length of a sequence.
pub(super) const OLDEST: i32 = 9_16_00;

pub(super) type RawHandle = *mut c_void;
pub(super) type RawDescriptor = *mut c_void;

/// What of the library is called.
pub(super) struct Calls {
    pub(super) create: unsafe extern "C" fn(*mut RawHandle) -> u32,
    pub(super) destroy: unsafe extern "C" fn(RawHandle) -> u32,
    pub(super) set_stream: unsafe extern "C" fn(RawHandle, *mut c_void) -> u32,
    pub(super) create_descriptor: unsafe extern "C" fn(u32, *mut RawDescriptor) -> u32,
    pub(super) destroy_descriptor: unsafe extern "C" fn(RawDescriptor) -> u32,
    pub(super) set_attribute: unsafe extern "C" fn(RawDescriptor, u32, u32, i64, *const c_void) -> u32,
    pub(super) get_attribute: unsafe extern "C" fn(RawDescriptor, u32, u32, i64, *mut i64, *mut c_void) -> u32,
    pub(super) finalize: unsafe extern "C" fn(RawDescriptor) -> u32,
    pub(super) execute: unsafe extern "C" fn(RawHandle, RawDescriptor, RawDescriptor) -> u32,
    error_name: unsafe extern "C" fn(u32) -> *const c_char,
    last_error: unsafe extern "C" fn(*mut c_char, usize),
    version: unsafe extern "C" fn() -> usize,
}

const MISSING: CudaError = CudaError::Missing { library: "libcudnn", what_for: "cuDNN 9, for attention of bf16" };

/// The version of the cuDNN that attention of bf16 will use, as `major.minor.patch`. Opens the library.
///
/// # Errors
/// [`CudaError::Missing`], [`CudaError::OldCudnn`].
pub fn find_cudnn() -> Result<String, CudaError> {
    let calls = Calls::open()?;
    Ok(library_version(calls.version()))
}

impl Calls {
    /// Opens the library, or says what is wrong with it.
    pub(super) fn open() -> Result<Arc<Calls>, CudaError> {
        // SAFETY: opens a library that is made to be opened this way.
        if !unsafe { sys::is_culib_present() } {
            return Err(MISSING);
        }
        // SAFETY: each is declared here as in the library's header, with enumerations as the numbers that they are.
        let calls = unsafe {
            Calls {
                create: find("cudnnCreate")?,
                destroy: find("cudnnDestroy")?,
                set_stream: find("cudnnSetStream")?,
                create_descriptor: find("cudnnBackendCreateDescriptor")?,
                destroy_descriptor: find("cudnnBackendDestroyDescriptor")?,
                set_attribute: find("cudnnBackendSetAttribute")?,
                get_attribute: find("cudnnBackendGetAttribute")?,
                finalize: find("cudnnBackendFinalize")?,
                execute: find("cudnnBackendExecute")?,
                error_name: find("cudnnGetErrorString")?,
                last_error: find("cudnnGetLastErrorString")?,
                version: find("cudnnGetVersion")?,
            }
        };
        let have = calls.version();
        if have < OLDEST {
            return Err(CudaError::OldCudnn { have, need: OLDEST });
        }
        Ok(Arc::new(calls))
    }

    /// What makes, tells and ends handles, and nothing else.
    #[cfg(test)]
    pub(super) fn of(
        create: unsafe extern "C" fn(*mut RawHandle) -> u32,
        destroy: unsafe extern "C" fn(RawHandle) -> u32,
        set_stream: unsafe extern "C" fn(RawHandle, *mut c_void) -> u32,
    ) -> Calls {
        const REFUSED: u32 = 1;
        unsafe extern "C" fn no_descriptor(_: u32, _: *mut RawDescriptor) -> u32 {
            REFUSED
        }
        unsafe extern "C" fn no_end(_: RawDescriptor) -> u32 {
            REFUSED
        }
        unsafe extern "C" fn no_set(_: RawDescriptor, _: u32, _: u32, _: i64, _: *const c_void) -> u32 {
            REFUSED
        }
        unsafe extern "C" fn no_get(_: RawDescriptor, _: u32, _: u32, _: i64, _: *mut i64, _: *mut c_void) -> u32 {
            REFUSED
        }
        unsafe extern "C" fn no_run(_: RawHandle, _: RawDescriptor, _: RawDescriptor) -> u32 {
            REFUSED
        }
        unsafe extern "C" fn no_name(_: u32) -> *const c_char {
            std::ptr::null()
        }
        unsafe extern "C" fn no_error(_: *mut c_char, _: usize) {}
        unsafe extern "C" fn no_version() -> usize {
            0
        }
        Calls {
            create,
            destroy,
            set_stream,
            create_descriptor: no_descriptor,
            destroy_descriptor: no_end,
            set_attribute: no_set,
            get_attribute: no_get,
            finalize: no_end,
            execute: no_run,
            error_name: no_name,
            last_error: no_error,
            version: no_version,
        }
    }

    fn version(&self) -> i32 {
        // SAFETY: takes nothing and gives a number.
        unsafe { (self.version)() as i32 }
    }

    /// `code` as a result, with what the library says about it.
    pub(super) fn check(&self, call: &'static str, code: u32) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut detail = [0u8; 1024];
        // SAFETY: the name lives as long as the library; of the message as much is written as there is room for, with
        // an end.
        let (name, detail) = unsafe {
            (self.last_error)(detail.as_mut_ptr().cast(), detail.len() - 1);
            let name = (self.error_name)(code);
            let name = if name.is_null() { "unknown".into() } else { CStr::from_ptr(name).to_string_lossy() };
            (name.into_owned(), CStr::from_ptr(detail.as_ptr().cast()).to_string_lossy().trim().to_owned())
        };
        Err(CudaError::Cudnn { call, code, name, detail })
    }
}

/// # Safety
/// `F` is the type of the function that the library has under that name.
unsafe fn find<F: Copy>(name: &str) -> Result<F, CudaError> {
    // SAFETY: the library was found (`open`), and stays.
    unsafe { sys::culib().get::<F>(name.as_bytes()) }.map(|found| *found).map_err(|_not_there| MISSING)
}
