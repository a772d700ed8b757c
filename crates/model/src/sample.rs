//! One token out of logits.

use pgroups::philox_4x32_10;

use crate::ModelError;

/// How a token is chosen.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Sampling {
    /// The likeliest; the lowest id of several.
    Greedy,
    /// By probability, softmax(logits / temperature): below 1 bolder, above 1 flatter.
    Temperature(f32),
}

/// What a random choice depends on, besides the logits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Draw {
    /// The run's seed.
    pub seed: u64,
    /// Number of the choice: the token's position in the sample.
    pub index: u64,
}

/// The chosen token. Equal arguments give the same token on every rank and every machine with the same `exp`.
///
/// # Errors
/// [`ModelError::NoLogits`]; [`ModelError::Logit`] for one that is not finite; [`ModelError::Temperature`].
pub fn sample(logits: &[f32], how: Sampling, draw: Draw) -> Result<usize, ModelError> {
    if let Some((token, value)) = logits.iter().enumerate().find(|(_, v)| !v.is_finite()) {
        return Err(ModelError::Logit { token, value: *value });
    }
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let greedy = logits.iter().position(|v| *v == best).ok_or(ModelError::NoLogits)?;
    match how {
        Sampling::Greedy => Ok(greedy),
        Sampling::Temperature(t) if !(t > 0.0 && t.is_finite()) => Err(ModelError::Temperature(t)),
        Sampling::Temperature(t) => {
            let weight = |v: &f32| (f64::from(v - best) / f64::from(t)).exp();
            let total: f64 = logits.iter().map(weight).sum();
            let mut left = uniform(draw) * total;
            let taken = logits.iter().position(|v| {
                left -= weight(v);
                left < 0.0
            });
            // Rounding may leave a rest behind the last token.
            Ok(taken.unwrap_or(greedy))
        }
    }
}

/// In `0..1`, from 53 random bits.
fn uniform(draw: Draw) -> f64 {
    let halves = |n: u64| [(n >> 32) as u32, n as u32];
    let ([k1, k0], [c1, c0]) = (halves(draw.seed), halves(draw.index));
    let words = philox_4x32_10([c0, c1, 0, 0], [k0, k1]);
    let bits = (u64::from(words[0]) << 32 | u64::from(words[1])) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_of_the_likeliest() {
        let draw = Draw { seed: 1, index: 0 };
        assert_eq!(sample(&[0.5, 2.0, -1.0, 2.0], Sampling::Greedy, draw).unwrap(), 1);
    }

    #[test]
    fn draws_follow_the_softmax_of_logits_over_temperature() {
        let logits = [1.0f32, 0.0, -30.0, 2.0];
        for temperature in [0.5f32, 1.0, 2.0] {
            let weights = logits.map(|v| f64::from(v / temperature).exp());
            let total: f64 = weights.iter().sum();
            let mut counts = [0u32; 4];
            let n = 20_000;
            for index in 0..n {
                counts[sample(&logits, Sampling::Temperature(temperature), Draw { seed: 9, index }).unwrap()] += 1;
            }
            for (count, weight) in counts.iter().zip(weights) {
                let (got, want) = (f64::from(*count) / n as f64, weight / total);
                // Four standard deviations of a binomial.
                let far = 4.0 * (want * (1.0 - want) / n as f64).sqrt() + 1e-9;
                assert!((got - want).abs() <= far, "temperature {temperature}: {got} of {want}");
            }
        }
    }

    #[test]
    fn a_draw_depends_on_seed_and_index_only() {
        let logits: Vec<f32> = (0..256).map(|i| (i % 7) as f32 * 0.1).collect();
        let take = |seed, index| sample(&logits, Sampling::Temperature(1.0), Draw { seed, index }).unwrap();
        assert_eq!(take(3, 4), take(3, 4));
        let series = |seed| (0..20).map(|i| take(seed, i)).collect::<Vec<_>>();
        assert_ne!(series(3), series(4));
        assert_ne!(series(3), series(3 | 1 << 32));
    }

    #[test]
    fn logits_that_are_no_numbers_are_refused_by_name() {
        let draw = Draw { seed: 0, index: 0 };
        let take = |logits: &[f32], how| sample(logits, how, draw);
        assert!(matches!(take(&[0.0, f32::NAN], Sampling::Greedy), Err(ModelError::Logit { token: 1, .. })));
        assert!(matches!(take(&[], Sampling::Greedy), Err(ModelError::NoLogits)));
        for t in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(matches!(take(&[0.0], Sampling::Temperature(t)), Err(ModelError::Temperature(_))));
        }
    }
}
