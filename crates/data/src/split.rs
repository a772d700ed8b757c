//! Which part of the token stream is trained on, and which is kept for evaluation.

use crate::error::DataError;
use std::{fmt, ops::Range, str::FromStr};

/// A part of the token stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// What the model is trained on: the beginning of the stream.
    Train,
    /// What the model is evaluated on during training.
    Eval,
    /// What is kept to the end.
    Test,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Train => "train",
            Part::Eval => "eval",
            Part::Test => "test",
        })
    }
}

/// How the token stream is cut into train, eval and test, in this order.
///
/// Read from `"train,eval"` or `"train,eval,test"`: weights of any scale (`"0.9,0.1"`, `"99,1,0"`), divided by their
/// sum. Whatever the weights, the parts do not overlap and leave nothing out.
#[derive(Clone, Debug, PartialEq)]
pub struct Split {
    text: String,
    /// Fraction of the stream at which part `i` ends; the last one is 1.
    ends: [f64; 3],
}

impl Split {
    /// The tokens of a part, of a stream of `total`.
    pub fn range(&self, part: Part, total: usize) -> Range<usize> {
        let end = |i: usize| (self.ends[i] * total as f64).round() as usize;
        match part {
            Part::Train => 0..end(0),
            Part::Eval => end(0)..end(1),
            Part::Test => end(1)..total,
        }
    }
}

impl FromStr for Split {
    type Err = DataError;

    fn from_str(text: &str) -> Result<Self, DataError> {
        let written: Vec<&str> = text.split(',').map(str::trim).collect();
        if !(2..=3).contains(&written.len()) {
            return Err(DataError::SplitParts { text: text.to_owned(), parts: written.len() });
        }
        let mut weights = [0.0f64; 3];
        for (i, weight) in written.iter().enumerate() {
            weights[i] = weight.parse().ok().filter(|w: &f64| w.is_finite() && *w >= 0.0).ok_or_else(|| {
                DataError::SplitWeight { text: text.to_owned(), position: i + 1, weight: (*weight).to_owned() }
            })?;
        }
        let largest = weights.iter().fold(0.0, |a: f64, &b| a.max(b));
        if largest == 0.0 {
            return Err(DataError::SplitEmpty { text: text.to_owned() });
        }
        // By the largest first: the sum of huge weights may not be finite.
        let weights = weights.map(|w| w / largest);
        let sum: f64 = weights.iter().sum();
        let last = weights.iter().rposition(|&w| w > 0.0).expect("BUG: a weight is above 0");
        let mut ends = [1.0; 3];
        let mut so_far = 0.0;
        // From the last part with a weight on, an end is exactly 1, so that rounding gives no token to an empty part.
        for i in 0..last {
            so_far += weights[i];
            ends[i] = so_far / sum;
        }
        Ok(Split { text: text.to_owned(), ends })
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ranges(text: &str, total: usize) -> [Range<usize>; 3] {
        let split: Split = text.parse().unwrap();
        [Part::Train, Part::Eval, Part::Test].map(|part| split.range(part, total))
    }

    #[test]
    fn weights_of_any_scale_are_fractions_of_their_sum() {
        assert_eq!(ranges("0.9,0.1", 1000), [0..900, 900..1000, 1000..1000]);
        assert_eq!(ranges("9, 1", 1000), [0..900, 900..1000, 1000..1000]);
        assert_eq!(ranges("2,1,1", 7), [0..4, 4..5, 5..7]);
        assert_eq!(ranges("1e308,1e308", 10), [0..5, 5..10, 10..10]);
    }

    #[test]
    fn a_part_of_weight_0_is_empty_wherever_it_stands() {
        assert_eq!(ranges("0,1", 11), [0..0, 0..11, 11..11]);
        assert_eq!(ranges("1,0", 11), [0..11, 11..11, 11..11]);
        assert_eq!(ranges("0.7,0,0.3", 10), [0..7, 7..7, 7..10]);
    }

    #[test]
    fn each_way_to_write_a_bad_split_is_told_apart() {
        let error = |text: &str| text.parse::<Split>().unwrap_err().to_string();
        assert!(error("0.9").contains("has 1 weights"), "{}", error("0.9"));
        assert!(error("1,1,1,1").contains("has 4 weights"));
        assert!(error("0.9,x").contains("weight 2, 'x'"));
        assert!(error("-1,2").contains("weight 1, '-1'"));
        assert!(error("1,inf").contains("weight 2, 'inf'"));
        assert!(error("0,0").contains("add up to 0"));
    }

    fn weights() -> impl Strategy<Value = String> {
        prop::collection::vec(0u32..100, 2..=3)
            .prop_filter("one weight above 0", |w| w.iter().any(|&w| w > 0))
            .prop_map(|w| w.iter().map(u32::to_string).collect::<Vec<_>>().join(","))
    }

    proptest! {
        #[test]
        fn parts_follow_each_other_and_cover_the_stream(text in weights(), total in 0usize..1 << 40) {
            let [train, eval, test] = ranges(&text, total);
            prop_assert_eq!(train.start, 0);
            prop_assert_eq!(train.end, eval.start);
            prop_assert_eq!(eval.end, test.start);
            prop_assert_eq!(test.end, total);
            prop_assert!(train.start <= train.end && eval.start <= eval.end && test.start <= test.end);
        }
    }
}
