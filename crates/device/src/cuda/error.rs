//! What CUDA says when it cannot.

use std::{ffi::CStr, ptr};

use cudarc::driver::sys;
use thiserror::Error;

/// Why a card, the driver or the kernel compiler refused: the source of [`Error::Cuda`](crate::Error::Cuda), and of
/// [`Error::Failed`](crate::Error::Failed) where an operation asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library that cannot be opened.
    #[error("there is no {library} here ({what_for}); install it or put its folder into LD_LIBRARY_PATH")]
    Missing {
        /// Name of the library.
        library: &'static str,
        /// What it does.
        what_for: &'static str,
    },
    /// A variable that CUDA reads at its start is not set as this driver needs it.
    #[error("{variable} is {have:?} and must be {need}; call device::cuda::prepare() first in main")]
    Environment {
        /// Name of the variable.
        variable: &'static str,
        /// Its value.
        have: Option<String>,
        /// The value it must have.
        need: &'static str,
    },
    /// The program could not be started again with the variables that it needs.
    #[error("the program cannot start itself again to set {variable}: {cause}")]
    Restart {
        /// The variable.
        variable: &'static str,
        /// What the system said.
        cause: String,
    },
    /// The driver is older than this program.
    #[error("the driver is for CUDA {}.{}, this program needs {}.{}; update it", have / 1000, have % 1000 / 10, need / 1000, need % 1000 / 10)]
    OldDriver {
        /// Version of CUDA that it supports, as 1000 · major + 10 · minor.
        have: i32,
        /// Version that is needed, likewise.
        need: i32,
    },
    /// A card that this host does not have.
    #[error("card {asked} is asked for, and this host has {have}")]
    NoCard {
        /// Its number.
        asked: u32,
        /// Cards there are.
        have: u32,
    },
    /// The card cannot do what the driver is built on.
    #[error("card {card} cannot {what}")]
    Unable {
        /// Its number.
        card: u32,
        /// What it cannot do.
        what: &'static str,
    },
    /// No memory for kernels and products to work in.
    #[error("card {card} has no {bytes} bytes left that its kernels and products need to work in")]
    NoWorkspace {
        /// Its number.
        card: u32,
        /// Bytes asked for.
        bytes: usize,
    },
    /// A kernel that needs more shared memory than a block of the card can have.
    #[error("{function} needs {need} bytes of shared memory for a block, and card {card} has {have}")]
    SharedMemory {
        /// The kernel.
        function: &'static str,
        /// Number of the card.
        card: u32,
        /// Bytes needed.
        need: u32,
        /// Bytes there are.
        have: u32,
    },
    /// A kernel source that does not compile.
    #[error("{file} does not compile for {arch}: {log}")]
    Compile {
        /// The source.
        file: &'static str,
        /// Architecture.
        arch: String,
        /// What the compiler said.
        log: String,
    },
    /// NCCL is older than this program, or than what is asked of it.
    #[error("NCCL is {}, {what_for}needs {} or newer; install it or put its folder into LD_LIBRARY_PATH", library_version(*have), library_version(*need))]
    OldNccl {
        /// Version that was found, as 10000 · major + 100 · minor + patch.
        have: i32,
        /// Version that is needed, likewise.
        need: i32,
        /// What needs it.
        what_for: &'static str,
    },
    /// More blocks could wait for each other on a card than it runs at once.
    #[error(
        "card {card} has {multiprocessors} multiprocessors, of which groups may take {}: {taken} are taken by members \
         on it of groups that are open, and a group with {members} more, {ctas} blocks each, does not fit; open fewer \
         groups, put fewer ranks on the card, or set CudaOptions::ctas lower", multiprocessors - spare
    )]
    Crowded {
        /// Its number.
        card: u32,
        /// Multiprocessors it has.
        multiprocessors: u32,
        /// Those that are left to everything else.
        spare: u32,
        /// Blocks that members of open groups may take at once.
        taken: u32,
        /// Members of the new group on this card.
        members: u32,
        /// Blocks that each of them may take.
        ctas: u32,
    },
    /// A communicator was given up after a failure.
    #[error("the communicator was given up when one of its collectives failed")]
    GivenUp,
    /// A call of NCCL that failed.
    #[error("{call}: {name} ({code}){}{detail}", if detail.is_empty() { "" } else { ": " })]
    Nccl {
        /// The call.
        call: &'static str,
        /// Number of the failure.
        code: u32,
        /// Its name.
        name: String,
        /// What NCCL said last.
        detail: String,
    },
    /// cuDNN is older than this program needs.
    #[error("cuDNN is {}, this program needs {} or newer; install it or put its folder into LD_LIBRARY_PATH", library_version(*have), library_version(*need))]
    OldCudnn {
        /// Version that was found, as 10000 · major + 100 · minor + patch.
        have: i32,
        /// Version that is needed, likewise.
        need: i32,
    },
    /// A call of cuDNN that failed.
    #[error("{call}: {name} ({code}){}{detail}", if detail.is_empty() { "" } else { ": " })]
    Cudnn {
        /// The call.
        call: &'static str,
        /// Number of the failure.
        code: u32,
        /// Its name.
        name: String,
        /// What cuDNN said last.
        detail: String,
    },
    /// A call of the driver that failed.
    #[error("{call}: {name} ({code}), {text}")]
    Call {
        /// The call.
        call: &'static str,
        /// Number of the failure.
        code: u32,
        /// Its name.
        name: String,
        /// Its description.
        text: String,
    },
}

impl CudaError {
    /// Nothing works in this context any more: some kernel broke it.
    pub(crate) fn is_fatal(&self) -> bool {
        // Illegal addresses, instructions and the like, and what stands for them afterwards.
        matches!(self, CudaError::Call { code: 214 | 700 | 702 | 709 | 710 | 714..=719 | 999, .. })
    }

    /// cuDNN has nothing for what it was asked.
    pub(crate) fn is_unsupported(&self) -> bool {
        matches!(self, CudaError::Cudnn { code: 3000..=3999, .. })
    }

    /// The card has not that much memory left.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        matches!(self, CudaError::Call { code: 2, .. } | CudaError::NoWorkspace { .. })
    }
}

/// A version of NCCL or cuDNN as people write it.
pub(super) fn library_version(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100)
}

/// A driver call's code as a result.
#[inline]
pub(super) fn check(call: &'static str, code: sys::CUresult) -> Result<(), CudaError> {
    if code == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failure(call, code)) }
}

#[cold]
fn failure(call: &'static str, code: sys::CUresult) -> CudaError {
    let text = |get: unsafe fn(sys::CUresult, *mut *const std::ffi::c_char) -> sys::CUresult| {
        let mut text = ptr::null();
        // SAFETY: `get` writes a pointer to a text that lives as long as the library, or leaves null.
        unsafe {
            let known = get(code, &mut text) == sys::CUresult::CUDA_SUCCESS && !text.is_null();
            if known { CStr::from_ptr(text).to_string_lossy().into_owned() } else { "unknown".to_owned() }
        }
    };
    let (name, text) = (text(sys::cuGetErrorName), text(sys::cuGetErrorString));
    CudaError::Call { call, code: code as u32, name, text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_told_as_people_write_them() {
        let text = CudaError::OldDriver { have: 11080, need: 12040 }.to_string();
        assert_eq!(text, "the driver is for CUDA 11.8, this program needs 12.4; update it");
    }

    #[test]
    fn a_crowded_card_is_refused_with_the_numbers() {
        let error =
            CudaError::Crowded { card: 0, multiprocessors: 132, spare: 8, taken: 120, members: 8, ctas: 1 }.to_string();
        let text = "card 0 has 132 multiprocessors, of which groups may take 124: 120 are taken by members on it of \
                    groups that are open, and a group with 8 more, 1 blocks each, does not fit; open fewer groups, put \
                    fewer ranks on the card, or set CudaOptions::ctas lower";
        assert_eq!(error, text);
        let error = CudaError::OldNccl { have: 22_805, need: 23_000, what_for: "several ranks on a card " }.to_string();
        let text = "NCCL is 2.28.5, several ranks on a card needs 2.30.0 or newer; install it or put its folder into \
                    LD_LIBRARY_PATH";
        assert_eq!(error, text);
    }

    #[test]
    fn only_a_broken_context_is_fatal() {
        let call = |code| CudaError::Call { call: "x", code, name: String::new(), text: String::new() };
        assert!([700, 715, 716, 719].into_iter().all(|code| call(code).is_fatal()));
        assert!(![1, 2, 101, 201, 400, 600].into_iter().any(|code| call(code).is_fatal()));
    }
}
