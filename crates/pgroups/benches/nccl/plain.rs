//! NCCL by its own calls, with nothing around it: what ours is measured against.

use std::{error::Error, ffi::c_void, mem::MaybeUninit, ptr};

use cudarc::{
    driver::{result::DriverError, sys as driver},
    nccl::{result, sys},
};
use device::View;

use self::comm_settings::settings;
use crate::Collective;

/// Of the driver whose groups are measured beside this.
#[path = "../../../device/src/cuda/comm_settings.rs"]
mod comm_settings;

/// A communicator of its own with a member for each rank.
pub(crate) struct Plain(Vec<Member>);

/// One rank's end, with a stream of its own on the rank's card.
pub(crate) struct Member {
    comm: sys::ncclComm_t,
    stream: driver::CUstream,
    context: driver::CUcontext,
}

// SAFETY: handles that any thread may use; each member is used by one thread at a time, that of its rank.
unsafe impl Send for Member {}
// SAFETY: as above.
unsafe impl Sync for Member {}

fn told(call: &str, error: &result::NcclError) -> Box<dyn Error + Send + Sync> {
    format!("{call}: {:?}", error.0).into()
}

impl Plain {
    /// Rank `r` is on `cards[r % cards.len()]`. NCCL and the driver must be there: whoever has a group on cards has both.
    pub(crate) fn open(ranks: u32, cards: &[u32]) -> Result<Plain, Box<dyn Error + Send + Sync>> {
        let id = result::get_uniqueid().map_err(|error| told("ncclGetUniqueId", &error))?;
        let shared = ranks as usize > cards.len();
        let on = |rank: u32| Member::on(cards[rank as usize % cards.len()]);
        let mut members = (0..ranks).map(on).collect::<Result<Vec<_>, _>>()?;
        result::group_start().map_err(|error| told("ncclGroupStart", &error))?;
        for (member, rank) in members.iter_mut().zip(0..) {
            member.bind()?;
            // With several ranks on a card one block each, as our groups have there.
            let mut config = settings(shared.then_some(1));
            // SAFETY: the handle is written at the latest when the group ends, below; the settings are copied.
            let made =
                unsafe { sys::ncclCommInitRankConfig(&mut member.comm, ranks as i32, id, rank, &mut config).result() };
            made.map_err(|error| told("ncclCommInitRankConfig", &error))?;
        }
        result::group_end().map_err(|error| told("ncclGroupEnd", &error))?;
        Ok(Plain(members))
    }

    pub(crate) fn member(&self, rank: u32) -> &Member {
        &self.0[rank as usize]
    }
}

impl Member {
    fn on(card: u32) -> Result<Member, DriverError> {
        let (mut context, mut stream) = (MaybeUninit::uninit(), ptr::null_mut());
        // SAFETY: the card is there; its context, which is also that of the machine, is kept for the rest of the
        // process. Each call writes one handle.
        unsafe {
            driver::cuDevicePrimaryCtxRetain(context.as_mut_ptr(), card as i32).result()?;
            let context = context.assume_init();
            driver::cuCtxSetCurrent(context).result()?;
            driver::cuStreamCreate(&mut stream, driver::CUstream_flags::CU_STREAM_NON_BLOCKING as u32).result()?;
            Ok(Member { comm: ptr::null_mut(), stream, context })
        }
    }

    fn bind(&self) -> Result<(), DriverError> {
        // SAFETY: the context is kept for the rest of the process.
        unsafe { driver::cuCtxSetCurrent(self.context).result() }
    }

    /// So many calls, one behind the other, and waits for all of them. Nothing else may use the views meanwhile.
    pub(crate) fn repeat(
        &self,
        what: Collective,
        source: &View,
        dest: &View,
        calls: usize,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        self.bind()?;
        let address = |view: &View| view.card_address().ok_or("the memory is not on a card");
        let (from, to) = (address(source)? as usize, address(dest)? as usize);
        let (from, to) = (ptr::without_provenance::<c_void>(from), ptr::without_provenance_mut::<c_void>(to));
        let (float, sum) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
        // SAFETY: both views are borrowed until the stream has passed, below, and have as many elements on this
        // member's card as the call reads and writes (`Tensors`).
        let call = || unsafe {
            match what {
                Collective::AllGather => {
                    sys::ncclAllGather(from, to, source.numel(), float, self.comm, self.stream.cast())
                }
                Collective::ReduceScatter => {
                    sys::ncclReduceScatter(from, to, dest.numel(), float, sum, self.comm, self.stream.cast())
                }
                Collective::AllReduce => {
                    sys::ncclAllReduce(from, to, source.numel(), float, sum, self.comm, self.stream.cast())
                }
            }
        };
        let queued = (0..calls).try_for_each(|_| call().result().map(|_| ()));
        // SAFETY: the stream lives as long as the process.
        unsafe { driver::cuStreamSynchronize(self.stream).result()? };
        queued.map_err(|error| told("a collective", &error))
    }
}
