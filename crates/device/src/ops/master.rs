//! f32 masters beside bf16 values: a value is the upper half of its master, the rest 16 bits.

use crate::bf16;

/// The bf16 value that is nearest to an f32 master, and the rest of the master: its lower 16 bits.
///
/// Both together are the master, bit for bit: [`join_master`] gives it back. For that ties go away from zero, where other
/// conversions take them to even: to even a rest of exactly half a step could be above an even value or below it, and a
/// 17th bit would have to tell. A finite master beyond bf16's greatest has an infinite value, as under other
/// conversions, and is still finite when it is joined. An infinite one stays what it is. A NaN stays a NaN; of its payload
/// the upper half is kept.
#[must_use]
#[inline(always)]
pub fn split_master(master: f32) -> (bf16, i16) {
    let bits = master.to_bits();
    let halves = if master.is_nan() {
        // Rounding could carry a NaN's payload into the sign.
        (bits | 0x0040_0000) & 0xFFFF_0000
    } else {
        // The rest is signed: where it is negative, the value was rounded up.
        (bits.wrapping_add(0x8000) & 0xFFFF_0000) | (bits & 0xFFFF)
    };
    (bf16::from_bits((halves >> 16) as u16), halves as u16 as i16)
}

/// The f32 master that [`split_master`] has taken apart. With a rest of 0 it is the value itself.
#[must_use]
#[inline(always)]
pub fn join_master(value: bf16, rest: i16) -> f32 {
    f32::from_bits((u32::from(value.to_bits()) << 16).wrapping_add(i32::from(rest) as u32))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All kinds of numbers; proptest's own floats are rarely at the ends of these.
    fn bits() -> impl Strategy<Value = u32> {
        let ends = prop::sample::select(vec![0u32, 0x7FFF, 0x8000, 0x8001, 0xFFFF]);
        // Zero, subnormal, one, the greatest of bf16, infinite, NaN with little and with all of a payload.
        let uppers = prop::sample::select(vec![0u32, 1, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF]);
        let edge = (uppers, ends, any::<bool>())
            .prop_map(|(upper, lower, negative)| u32::from(negative) << 31 | upper << 16 | lower);
        prop_oneof![any::<u32>(), edge]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn a_master_is_the_sum_of_its_halves_to_the_bit(bits in bits()) {
            let master = f32::from_bits(bits);
            let (value, rest) = split_master(master);
            let joined = join_master(value, rest);
            if master.is_nan() {
                prop_assert!(value.is_nan() && joined.is_nan() && rest == 0);
                prop_assert_eq!(value.to_bits(), bf16::from_f32(master).to_bits());
            } else {
                prop_assert_eq!(joined.to_bits(), bits);
            }
        }

        #[test]
        fn a_value_is_the_nearest_one_and_ties_go_away_from_zero(bits in bits()) {
            let master = f32::from_bits(bits);
            let (value, _) = split_master(master);
            if bits & 0xFFFF == 0x8000 && !master.is_nan() {
                prop_assert_eq!(u32::from(value.to_bits()), (bits >> 16) + 1);
            } else {
                prop_assert_eq!(value.to_bits(), bf16::from_f32(master).to_bits());
            }
        }

        #[test]
        fn without_a_rest_a_master_is_its_value(bits in any::<u16>()) {
            let value = bf16::from_bits(bits);
            prop_assert_eq!(join_master(value, 0).to_bits(), u32::from(bits) << 16);
            if !value.is_nan() {
                prop_assert_eq!(split_master(value.to_f32()), (value, 0));
            }
        }
    }
}
