//! Random numbers by counter: the block at any counter without the ones before it.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Philox 4x32 with ten rounds: four random words from a counter and a key.
///
/// Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#[must_use]
pub fn philox_4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut words, mut key) = (counter, key);
    for _ in 0..ROUNDS {
        let [high_0, low_0] = wide_product(MULTIPLIERS[0], words[0]);
        let [high_1, low_1] = wide_product(MULTIPLIERS[1], words[2]);
        words = [high_1 ^ words[1] ^ key[0], low_1, high_0 ^ words[3] ^ key[1], low_0];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    words
}

fn wide_product(a: u32, b: u32) -> [u32; 2] {
    split(u64::from(a) * u64::from(b))
}

/// The high and the low word.
pub(crate) fn split(wide: u64) -> [u32; 2] {
    [(wide >> 32) as u32, wide as u32] // the cast keeps the low word
}

/// A name or a dump as a number that no compiler or library version changes.
///
/// Source: Fowler, Noll and Vo, FNV-1a, 64 bits.
pub(crate) fn fnv1a_64(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes
        .into_iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Source: Random123 1.14, `tests/kat_vectors`, lines `philox4x32 10`.
    #[test]
    fn philox_gives_the_published_known_answers() {
        let known = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, answer) in known {
            assert_eq!(philox_4x32_10(counter, key), answer, "counter {counter:x?}");
        }
    }

    /// Source: the FNV reference's test vectors for "", "a" and "foobar".
    #[test]
    fn fnv_gives_the_published_known_answers() {
        assert_eq!(fnv1a_64(*b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a_64(*b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a_64(*b"foobar"), 0x8594_4171_f739_67e8);
    }
}
