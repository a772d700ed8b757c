//! NCCL: what of it is called, and what it says when it cannot.

use std::{
    ffi::{CStr, c_char, c_void},
    mem::MaybeUninit,
    ptr,
    sync::Arc,
};

use cudarc::nccl::sys;

use super::{
    CudaError,
    card::{Card, RawStream},
    comm_settings::settings,
    error::library_version,
};
use crate::{DType, Reduce};

/// Older ones are refused: nothing here was tried with them.
pub(super) const OLDEST: i32 = 2_29_00;
/// The first that lets several members of a communicator use one card.
pub(super) const OLDEST_SHARING: i32 = 2_30_00;

/// One member's end of a communicator. Not closed when it is dropped: that is a matter of all members
/// ([`Clique`](super::clique::Clique)).
#[derive(Clone, Copy)]
pub(super) struct Comm(sys::ncclComm_t);

// SAFETY: NCCL takes a communicator from any thread, one at a time; whoever calls holds the turn of the cliques.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// What the members of a new communicator find each other by.
#[derive(Clone, Copy)]
pub(super) struct Id(sys::ncclUniqueId);

/// Opens the library, or says that it is missing. Its version.
pub(super) fn open() -> Result<i32, CudaError> {
    // SAFETY: opens a library that is made to be opened this way.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::Missing { library: "libnccl", what_for: "NCCL, for groups of more than one rank" });
    }
    let mut version = 0;
    // SAFETY: the library is there; writes one integer.
    check("ncclGetVersion", None, unsafe { sys::ncclGetVersion(&mut version) })?;
    if version < OLDEST {
        return Err(CudaError::OldNccl { have: version, need: OLDEST, what_for: "this program " });
    }
    Ok(version)
}

/// The version of the NCCL that groups of several ranks will use, as `major.minor.patch`. Opens the library.
///
/// # Errors
/// [`CudaError::Missing`], [`CudaError::OldNccl`].
pub fn find_nccl() -> Result<String, CudaError> {
    open().map(library_version)
}

impl Id {
    pub(super) fn new() -> Result<Id, CudaError> {
        let mut id = MaybeUninit::uninit();
        // SAFETY: writes one id.
        check("ncclGetUniqueId", None, unsafe { sys::ncclGetUniqueId(id.as_mut_ptr()) })?;
        // SAFETY: just written.
        Ok(Id(unsafe { id.assume_init() }))
    }
}

/// All calls that `queue` makes, of any number of communicators, as one: none waits for a later one of them.
pub(super) fn group(queue: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
    // SAFETY: begins a group of this thread, which ends below on every way out.
    check("ncclGroupStart", None, unsafe { sys::ncclGroupStart() })?;
    let queued = queue();
    // SAFETY: as above.
    let ended = check("ncclGroupEnd", None, unsafe { sys::ncclGroupEnd() });
    queued.and(ended)
}

/// Makes a communicator of as many members as `cards`, member `i` on card `i`. `ctas` is the most blocks of a card
/// that one call of one member takes.
pub(super) fn comms(id: &Id, cards: &[Arc<Card>], ctas: Option<u32>) -> Result<Vec<Comm>, CudaError> {
    let mut raw: Vec<sys::ncclComm_t> = vec![ptr::null_mut(); cards.len()];
    let n = cards.len() as i32;
    // Each handle is written at the latest when the group ends.
    group(|| {
        raw.iter_mut().zip(cards).zip(0..).try_for_each(|((comm, card), member)| {
            card.bind()?;
            // Uses in graphs are ordered by us (`uses`). A library that does not know the setting orders them once more.
            let mut config = sys::ncclConfig_t { graphUsageMode: 1, ..settings(ctas) };
            // SAFETY: the handle outlives the group; the settings are copied.
            let code = unsafe { sys::ncclCommInitRankConfig(comm, n, id.0, member, &mut config) };
            check("ncclCommInitRankConfig", None, code)
        })
    })?;
    Ok(raw.into_iter().map(Comm).collect())
}

impl Comm {
    /// What went wrong in the background.
    pub(super) fn failure(self) -> Option<CudaError> {
        let mut code = sys::ncclResult_t::ncclSuccess;
        // SAFETY: a live communicator; writes one code.
        let asked =
            check("ncclCommGetAsyncError", Some(self), unsafe { sys::ncclCommGetAsyncError(self.0, &mut code) });
        asked.and_then(|()| check("a collective", Some(self), code)).err()
    }

    /// Ends it when all its calls are over. In a [`group`] with the other members.
    pub(super) fn close(self) -> Result<(), CudaError> {
        // SAFETY: the last use of the handle; nothing of it is under way (`Clique`).
        check("ncclCommDestroy", None, unsafe { sys::ncclCommDestroy(self.0) })
    }

    /// # Safety
    /// `from` and `to` are addresses of live memory of the member's card, of as many elements as the operation says,
    /// until the stream has passed; the stream is of that card. Of all calls below.
    pub(super) unsafe fn all_reduce(self, ends: Ends, op: Reduce, stream: RawStream) -> Result<(), CudaError> {
        let Ends { from, to, count, dtype } = ends;
        // SAFETY: the caller's promise.
        check("ncclAllReduce", Some(self), unsafe {
            sys::ncclAllReduce(source(from), dest(to), count, dtype.0, operator(op), self.0, stream.0.cast())
        })
    }

    /// `count` is that of a shard.
    ///
    /// # Safety
    /// See [`Comm::all_reduce`].
    pub(super) unsafe fn reduce_scatter(self, ends: Ends, op: Reduce, stream: RawStream) -> Result<(), CudaError> {
        let Ends { from, to, count, dtype } = ends;
        // SAFETY: the caller's promise.
        check("ncclReduceScatter", Some(self), unsafe {
            sys::ncclReduceScatter(source(from), dest(to), count, dtype.0, operator(op), self.0, stream.0.cast())
        })
    }

    /// `count` is that of a shard.
    ///
    /// # Safety
    /// See [`Comm::all_reduce`].
    pub(super) unsafe fn all_gather(self, ends: Ends, stream: RawStream) -> Result<(), CudaError> {
        let Ends { from, to, count, dtype } = ends;
        // SAFETY: the caller's promise.
        check("ncclAllGather", Some(self), unsafe {
            sys::ncclAllGather(source(from), dest(to), count, dtype.0, self.0, stream.0.cast())
        })
    }

    /// # Safety
    /// See [`Comm::all_reduce`].
    pub(super) unsafe fn broadcast(self, ends: Ends, root: u32, stream: RawStream) -> Result<(), CudaError> {
        let Ends { from, to, count, dtype } = ends;
        // SAFETY: the caller's promise.
        check("ncclBroadcast", Some(self), unsafe {
            sys::ncclBroadcast(source(from), dest(to), count, dtype.0, root as i32, self.0, stream.0.cast())
        })
    }

    /// # Safety
    /// See [`Comm::all_reduce`].
    pub(super) unsafe fn send(self, from: u64, part: Part, to: usize, stream: RawStream) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        check("ncclSend", Some(self), unsafe {
            sys::ncclSend(source(from), part.count, part.dtype.0, to as i32, self.0, stream.0.cast())
        })
    }

    /// # Safety
    /// See [`Comm::all_reduce`].
    pub(super) unsafe fn recv(self, to: u64, part: Part, from: usize, stream: RawStream) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        check("ncclRecv", Some(self), unsafe {
            sys::ncclRecv(dest(to), part.count, part.dtype.0, from as i32, self.0, stream.0.cast())
        })
    }
}

/// An element type.
#[derive(Clone, Copy)]
pub(super) struct Type(sys::ncclDataType_t);

impl Type {
    pub(super) fn of(dtype: DType) -> Type {
        Type(match dtype {
            DType::F32 => sys::ncclDataType_t::ncclFloat32,
            DType::Bf16 => sys::ncclDataType_t::ncclBfloat16,
            DType::I32 => sys::ncclDataType_t::ncclInt32,
        })
    }
}

/// Addresses of both ends of a call, and elements.
#[derive(Clone, Copy)]
pub(super) struct Ends {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) count: usize,
    pub(super) dtype: Type,
}

/// Elements that go from one member to another.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) count: usize,
    pub(super) dtype: Type,
}

fn source(address: u64) -> *const c_void {
    ptr::without_provenance(address as usize)
}

fn dest(address: u64) -> *mut c_void {
    ptr::without_provenance_mut(address as usize)
}

fn operator(op: Reduce) -> sys::ncclRedOp_t {
    match op {
        Reduce::Sum => sys::ncclRedOp_t::ncclSum,
        Reduce::Avg => sys::ncclRedOp_t::ncclAvg,
        Reduce::Max => sys::ncclRedOp_t::ncclMax,
    }
}

/// A call's code as a result, with what NCCL tells beside it.
fn check(call: &'static str, comm: Option<Comm>, code: sys::ncclResult_t) -> Result<(), CudaError> {
    if matches!(code, sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress) {
        return Ok(());
    }
    let text = |text: *const c_char| {
        // SAFETY: null, or a text that lives at least until the thread's next call of NCCL.
        let text = if text.is_null() { None } else { Some(unsafe { CStr::from_ptr(text) }) };
        text.map_or_else(String::new, |text| text.to_string_lossy().trim().to_owned())
    };
    // SAFETY: both take any code and any live communicator or none.
    let (name, detail) = unsafe {
        let of = comm.map_or(ptr::null_mut(), |comm| comm.0);
        (text(sys::ncclGetErrorString(code)), text(sys::ncclGetLastError(of)))
    };
    Err(CudaError::Nccl { call, code: code as u32, name, detail })
}
