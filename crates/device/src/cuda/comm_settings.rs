//! Settings of a communicator of NCCL. Whoever measures NCCL called directly (`pgroups/benches/nccl`) includes this file.

use std::ptr;

use cudarc::nccl::sys;

/// All as NCCL thinks best; `ctas` is the most blocks of a card that one call of one member takes.
pub(super) fn settings(ctas: Option<u32>) -> sys::ncclConfig_t {
    const UNDEFINED: i32 = i32::MIN;
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 2_30_00,
        blocking: 1,
        cgaClusterSize: UNDEFINED,
        minCTAs: ctas.map_or(UNDEFINED, |_| 1),
        maxCTAs: ctas.map_or(UNDEFINED, |ctas| ctas as i32),
        netName: ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}
