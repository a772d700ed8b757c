//! Memory that a card keeps for the stacks of its threads, one for each thread that can run at a time: with the driver's
//! usual 1024 bytes 264 MiB of an H200.

use cudarc::driver::sys;

use super::{CudaError, card::Card, prepare};

/// Makes stacks as small as the kernels of `card` need them, whose context is current. A kernel of a library that needs
/// more makes all of them larger when it is launched, and waits for what runs on the card meanwhile. What runs could be a
/// collective that waits for the rank that launches, so stacks stay as they are where a process may have groups.
pub(super) fn fit(card: &Card) -> Result<(), CudaError> {
    if prepare::check_collectives().is_ok() {
        return Ok(());
    }
    // SAFETY: the context is current.
    card.check("cuCtxSetLimit", unsafe { sys::cuCtxSetLimit(sys::CUlimit::CU_LIMIT_STACK_SIZE, deepest(card)?) })
}

/// Bytes that a thread of the kernel that needs most puts aside.
fn deepest(card: &Card) -> Result<usize, CudaError> {
    let mut deepest = 0;
    for function in card.functions() {
        let (which, mut bytes) = (sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, 0);
        // SAFETY: a function of a module that lives as long as the card; writes one integer.
        card.check("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&mut bytes, which, function.0) })?;
        deepest = deepest.max(bytes as usize);
    }
    Ok(deepest)
}

#[cfg(all(test, feature = "gpu-tests"))]
mod card_tests {
    use super::*;
    use crate::cuda::card_tests::card;

    /// As the driver has it, and bytes of the card that nobody uses.
    fn now(card: &Card) -> (usize, usize) {
        let (mut stack, mut free, mut all) = (0, 0, 0);
        // SAFETY: the context is current; each call writes what it is given.
        unsafe {
            card.check("cuCtxGetLimit", sys::cuCtxGetLimit(&mut stack, sys::CUlimit::CU_LIMIT_STACK_SIZE)).unwrap();
            card.check("cuMemGetInfo", sys::cuMemGetInfo_v2(&mut free, &mut all)).unwrap();
        }
        (stack, free)
    }

    #[test]
    fn stacks_as_our_kernels_need_them_leave_memory_to_others() {
        let (card, _turn) = card();
        // Tests have what groups need.
        fit(&card).unwrap();
        let (usual, before) = now(&card);
        let deepest = deepest(&card).unwrap();
        assert!(deepest < usual, "{deepest} and {usual} bytes a thread");
        let set = |bytes| {
            // SAFETY: the context is current.
            let code = unsafe { sys::cuCtxSetLimit(sys::CUlimit::CU_LIMIT_STACK_SIZE, bytes) };
            card.check("cuCtxSetLimit", code).unwrap();
        };
        set(deepest);
        let (small, after) = now(&card);
        set(usual);
        assert!((deepest..usual).contains(&small), "{small}, {deepest} asked for");
        assert!(after > before, "{before} bytes free, then {after}");
    }
}
