//! 64 bits of some bytes that are the same in every build.
//!
//! Source: G. Fowler, L. C. Noll, K.-P. Vo, "The FNV non-cryptographic hash algorithm" (FNV-1a).

/// Of no bytes.
pub(super) const START: u64 = 0xcbf2_9ce4_8422_2325;

/// Of those that gave `hash`, and `bytes` behind them.
pub(super) fn add(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}
