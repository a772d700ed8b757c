//! Who is next.

use super::guide::Guide;

/// Picks one of several things that may run. Equal choosers asked the same questions give the same answers.
pub(crate) enum Chooser {
    /// The first: by rank, then by stream.
    First,
    /// Any, by the state of a generator.
    Seeded(u64),
    /// As a search says.
    Guided(Box<Guide>),
}

impl Chooser {
    pub(crate) fn first() -> Chooser {
        Chooser::First
    }

    pub(crate) fn seeded(seed: u64) -> Chooser {
        Chooser::Seeded(seed)
    }

    pub(crate) fn guided(guide: Guide) -> Chooser {
        Chooser::Guided(Box::new(guide))
    }

    /// A number below `of`, which is at least 1. A guide is asked by [`Guide::pick`].
    pub(super) fn pick(&mut self, of: usize) -> usize {
        match self {
            Chooser::Seeded(state) if of > 1 => {
                // The remainder's bias is below 2^-50 for any number of streams.
                (split_mix(state) % of as u64) as usize
            }
            Chooser::First | Chooser::Seeded(_) | Chooser::Guided(_) => 0,
        }
    }

    pub(super) fn guide(&mut self) -> Option<&mut Guide> {
        match self {
            Chooser::Guided(guide) => Some(guide),
            Chooser::First | Chooser::Seeded(_) => None,
        }
    }
}

/// SplitMix64. Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_mix_gives_the_published_sequence() {
        // First outputs of the reference implementation for seed 1234567.
        let mut state = 1_234_567;
        let got: Vec<u64> = (0..3).map(|_| split_mix(&mut state)).collect();
        assert_eq!(got, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }
}
