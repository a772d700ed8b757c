//! Which sample comes at which position.
//!
//! Position `p` of the training stream lies in epoch `p / samples`; there, a permutation that depends on the seed and
//! the epoch only says which sample it is. The permutation is a function, not a table: a Feistel network over the
//! smallest even number of bits that can count the samples, applied again while its result is not a sample
//! ("cycle walking"; at most four times as many values as samples, so fewer than four rounds on average).

/// Number of a sample within a part, `0..samples`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SampleId(pub u64);

/// Enough for halves of one bit, too: with 4 rounds small epochs would show their structure.
const ROUNDS: usize = 8;

/// The endless order of samples: every epoch holds each sample once, every epoch in another order.
///
/// A pure function of samples, seed and position: who resumes at a position sees what an uninterrupted run sees, and
/// the number of data ranks has no say in it.
///
/// Source: Black and Rogaway, "Ciphers with arbitrary finite domains" (2002), for cycle walking and the generalised
/// Feistel construction.
#[derive(Clone, Debug)]
pub struct SampleOrder {
    samples: u64,
    seed: u64,
}

impl SampleOrder {
    /// An order of samples `0..samples`.
    ///
    /// # Panics
    /// `BUG:` if there are no samples, which [`Windows`](crate::Windows) and [`Sampler`](crate::Sampler) rule out.
    pub fn new(samples: u64, seed: u64) -> SampleOrder {
        assert!(samples > 0, "BUG: an order of no samples");
        SampleOrder { samples, seed }
    }

    /// Samples per epoch.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The epoch of a position, from 0.
    pub fn epoch(&self, position: u64) -> u64 {
        position / self.samples
    }

    /// The sample at a position.
    pub fn at(&self, position: u64) -> SampleId {
        let keys = round_keys(self.seed, self.epoch(position));
        let half = half_bits(self.samples);
        let mut value = position % self.samples;
        // Ends: the network permutes a finite set, so the walk comes back to `value` itself, which is a sample.
        loop {
            value = feistel(value, half, &keys);
            if value < self.samples {
                return SampleId(value);
            }
        }
    }
}

/// Bits of half a value, such that two halves can count `samples`.
fn half_bits(samples: u64) -> u32 {
    let bits = u64::BITS - (samples - 1).leading_zeros();
    bits.div_ceil(2).max(1)
}

fn feistel(value: u64, half: u32, keys: &[u64; ROUNDS]) -> u64 {
    let mask = (1u64 << half) - 1;
    let (mut left, mut right) = (value >> half, value & mask);
    for key in keys {
        (left, right) = (right, left ^ (mix(right.wrapping_add(*key)) & mask));
    }
    left << half | right
}

fn round_keys(seed: u64, epoch: u64) -> [u64; ROUNDS] {
    // Mixed in turn, so that (seed 1, epoch 2) and (seed 2, epoch 1) are unrelated.
    let stream = mix(mix(seed).wrapping_add(epoch));
    std::array::from_fn(|round| mix(stream.wrapping_add((round as u64 + 1).wrapping_mul(GOLDEN))))
}

/// 2^64 divided by the golden ratio: multiples of it are spread evenly.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A bijection of 64 bits in which every input bit reaches every output bit.
///
/// Source: the finaliser of SplitMix64, constants by David Stafford ("Mix13").
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(GOLDEN);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn epoch(order: &SampleOrder, epoch: u64) -> Vec<u64> {
        (0..order.samples()).map(|i| order.at(epoch * order.samples() + i).0).collect()
    }

    proptest! {
        #[test]
        fn every_epoch_holds_each_sample_once(samples in 1u64..3000, seed: u64, at in 0u64..1 << 40) {
            let mut ids = epoch(&SampleOrder::new(samples, seed), at);
            ids.sort_unstable();
            prop_assert!(ids.into_iter().eq(0..samples));
        }

        #[test]
        fn huge_parts_are_ordered_without_a_table(samples in 1u64 << 40..=u64::MAX, seed: u64, position: u64) {
            let order = SampleOrder::new(samples, seed);
            prop_assert!(order.at(position).0 < samples);
            // Distinct positions of one epoch hold distinct samples.
            let other = if position % samples + 1 < samples { position.checked_add(1) } else { None };
            if let Some(other) = other {
                prop_assert_ne!(order.at(position), order.at(other));
            }
        }
    }

    #[test]
    fn epochs_and_seeds_have_orders_of_their_own() {
        let (a, b) = (SampleOrder::new(500, 1), SampleOrder::new(500, 2));
        let orders = [epoch(&a, 0), epoch(&a, 1), epoch(&a, 2), epoch(&b, 0), epoch(&b, 1), (0..500).collect()];
        for (i, x) in orders.iter().enumerate() {
            for y in &orders[i + 1..] {
                // Two unrelated permutations agree in one place on average.
                let agreeing = x.iter().zip(y).filter(|(x, y)| x == y).count();
                assert!(agreeing < 10, "{agreeing} of 500 places agree");
            }
        }
    }

    #[test]
    fn each_sample_is_equally_likely_at_each_place_even_in_tiny_epochs() {
        for samples in [2u64, 3, 5, 16, 37] {
            let order = SampleOrder::new(samples, 7);
            let epochs = 2000 * samples;
            let mut counts = vec![0u32; (samples * samples) as usize];
            for e in 0..epochs {
                for (place, id) in epoch(&order, e).into_iter().enumerate() {
                    counts[place * samples as usize + id as usize] += 1;
                }
            }
            // Expected 2000 each with a deviation of at most 45; 5 deviations leave a fair order alone.
            let (low, high) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            assert!(*low > 2000 - 225 && *high < 2000 + 225, "{samples} samples: counts from {low} to {high}");
        }
    }

    #[test]
    fn neighbours_in_the_text_are_not_neighbours_in_the_order() {
        let ids = epoch(&SampleOrder::new(1000, 3), 0);
        let followed = ids.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
        assert!(followed < 8, "{followed} of 999 pairs follow each other; a fair order has about 1");
    }

    // A saved run holds a position only: if this order changes, resumed runs read other text.
    #[test]
    fn the_order_is_the_one_that_saved_runs_were_made_with() {
        let first: Vec<u64> = (0..12).map(|p| SampleOrder::new(10, 42).at(p).0).collect();
        assert_eq!(first, [1, 7, 3, 4, 2, 5, 6, 8, 9, 0, 2, 0]);
        let far = [0, 999, 1000, 123_456_789].map(|p| SampleOrder::new(1000, 0).at(p).0);
        assert_eq!(far, [935, 526, 448, 221]);
    }
}
