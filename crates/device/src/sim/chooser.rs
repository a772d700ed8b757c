//! Who is next.

/// Picks one of several things that may run. Equal choosers asked the same questions give the same answers.
pub(crate) enum Chooser {
    /// The first: by rank, then by stream.
    First,
    /// Any, by the state of a generator.
    Seeded(u64),
    /// As a search says; the first where it says nothing. Every question is written down.
    Script { script: Vec<usize>, asked: Vec<Choice> },
}

/// A question of the scheduler, and its answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Choice {
    pub(crate) picked: usize,
    pub(crate) of: usize,
}

impl Chooser {
    pub(crate) fn first() -> Chooser {
        Chooser::First
    }

    pub(crate) fn seeded(seed: u64) -> Chooser {
        Chooser::Seeded(seed)
    }

    pub(crate) fn script(script: Vec<usize>) -> Chooser {
        Chooser::Script { script, asked: Vec::new() }
    }

    /// A number below `of`, which is at least 1.
    pub(crate) fn pick(&mut self, of: usize) -> usize {
        match self {
            Chooser::First => 0,
            Chooser::Seeded(state) if of > 1 => {
                // The remainder's bias is below 2^-50 for any number of streams.
                (split_mix(state) % of as u64) as usize
            }
            Chooser::Seeded(_) => 0,
            Chooser::Script { script, asked } => {
                let picked = script.get(asked.len()).copied().unwrap_or(0).min(of - 1);
                asked.push(Choice { picked, of });
                picked
            }
        }
    }

    pub(crate) fn asked(&self) -> &[Choice] {
        match self {
            Chooser::Script { asked, .. } => asked,
            _ => &[],
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

    #[test]
    fn a_script_answers_with_the_first_when_it_ends() {
        let mut chooser = Chooser::script(vec![1]);
        assert_eq!([chooser.pick(2), chooser.pick(3)], [1, 0]);
        assert_eq!(chooser.asked(), [Choice { picked: 1, of: 2 }, Choice { picked: 0, of: 3 }]);
    }
}
