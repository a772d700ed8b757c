//! What the user may have meant: the nearest word, divisor or multiple.

/// The candidate with the fewest edits (insert, delete, replace, swap neighbours) from `word`; of equals the first.
///
/// None if every candidate is so far away that it would be a guess: more than half of the longer word.
pub(crate) fn nearest_word<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    nearest_words(word, candidates, 2).first().copied()
}

/// All candidates with the fewest edits from `word`; none if that is more than one in `letters` of the longer word.
pub(crate) fn nearest_words<'c>(
    word: &str,
    candidates: impl IntoIterator<Item = &'c str>,
    letters: usize,
) -> Vec<&'c str> {
    let near: Vec<(usize, &str)> = candidates
        .into_iter()
        .map(|candidate| (edits(word, candidate), candidate))
        .filter(|(edits, candidate)| letters * edits <= word.chars().count().max(candidate.chars().count()))
        .collect();
    let fewest = near.iter().map(|(edits, _)| *edits).min();
    near.into_iter().filter(|(edits, _)| Some(*edits) == fewest).map(|(_, candidate)| candidate).collect()
}

/// Whether two keys have a word in common (`batch_size`, `global_batch`), or `known` contains all of `key`.
pub(crate) fn shares_word(key: &str, known: &str) -> bool {
    // One or two letters are in many keys by chance.
    let contained = key.chars().count() > 2 && known.contains(key);
    contained || key.split('_').any(|word| !word.is_empty() && known.split('_').any(|other| other == word))
}

/// Edit distance with swaps of neighbours ("optimal string alignment").
fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

/// The divisors of `n` nearest to `wanted`, below and above it (both, one, or itself if it divides). `n` is above 0.
pub(crate) fn nearest_divisors(n: u64, wanted: u64) -> Vec<u64> {
    let divisors = divisors(n);
    if divisors.contains(&wanted) {
        return vec![wanted];
    }
    let below = divisors.iter().copied().rfind(|&d| d < wanted);
    let above = divisors.iter().copied().find(|&d| d > wanted);
    below.into_iter().chain(above).collect()
}

/// All divisors of `n`, which is above 0, smallest first.
pub(crate) fn divisors(n: u64) -> Vec<u64> {
    let mut divisors: Vec<u64> = (1..=n.isqrt()).filter(|&d| n.is_multiple_of(d)).collect();
    let large: Vec<u64> = divisors.iter().rev().map(|d| n / d).filter(|&d| d * d > n).collect();
    divisors.extend(large);
    divisors
}

/// The multiples of `step`, which is above 0, around `wanted`: itself if it is one, else the one below unless that is
/// 0, and the one above.
pub(crate) fn nearest_multiples(step: u64, wanted: u64) -> Vec<u64> {
    if wanted > 0 && wanted.is_multiple_of(step) {
        return vec![wanted];
    }
    let below = wanted / step * step;
    [Some(below).filter(|&m| m > 0), below.checked_add(step)].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_slip_of_the_finger_finds_its_word_and_a_strange_word_finds_none() {
        let keys = ["lr", "min_lr", "warmup_steps", "weight_decay", "beta1", "beta2"];
        let nearest = |word| nearest_word(word, keys);
        assert_eq!(nearest("warm_up_steps"), Some("warmup_steps"));
        assert_eq!(nearest("weigth_decay"), Some("weight_decay"));
        assert_eq!(nearest("rl"), Some("lr"));
        assert_eq!(nearest("beta"), Some("beta1"));
        assert_eq!(nearest("pipeline"), None);
        assert_eq!(nearest(""), None);
    }

    #[test]
    fn of_words_that_are_equally_near_all_are_told_and_fewer_edits_are_allowed_where_the_limit_is_lower() {
        let keys = ["beta1", "beta2", "eps", "order"];
        assert_eq!(nearest_words("beta", keys, 2), ["beta1", "beta2"]);
        assert_eq!(nearest_words("workers", keys, 2), ["order"]);
        assert!(nearest_words("workers", keys, 4).is_empty());
    }

    #[test]
    fn keys_share_whole_words_or_contain_more_than_two_letters() {
        assert!(shares_word("batch", "global_batch") && shares_word("batch_size", "micro_batch"));
        assert!(shares_word("tp_size", "tp") && shares_word("product", "measure_products"));
        assert!(!shares_word("momentum", "moments") && !shares_word("at", "path") && !shares_word("", "path"));
        assert!(!shares_word("a__b", "c__d"));
    }

    #[test]
    fn edits_are_counted_as_by_hand() {
        let counted =
            [("", "abc", 3), ("kitten", "sitting", 3), ("ab", "ba", 1), ("abcd", "acbd", 1), ("größe", "grösse", 2)];
        for (a, b, count) in counted {
            assert_eq!(edits(a, b), count, "{a} {b}");
            assert_eq!(edits(b, a), count, "{b} {a}");
        }
    }

    proptest! {
        #[test]
        fn nearest_divisors_divide_and_none_lies_between(n in 1u64..5000, wanted in 0u64..6000) {
            let near = nearest_divisors(n, wanted);
            prop_assert!(!near.is_empty() && near.iter().all(|&d| n % d == 0));
            let (low, high) = (near[0].min(wanted), near[near.len() - 1].max(wanted));
            let between = (low..=high).filter(|&d| d > 0 && n % d == 0).count();
            prop_assert_eq!(between, near.len());
        }

        #[test]
        fn divisors_are_all_of_them_in_order(n in 1u64..3000) {
            let all: Vec<u64> = (1..=n).filter(|d| n % d == 0).collect();
            prop_assert_eq!(divisors(n), all);
        }

        #[test]
        fn nearest_multiples_surround_the_wanted_number(step in 1u64..100, wanted in 0u64..10_000) {
            let near = nearest_multiples(step, wanted);
            prop_assert!(!near.is_empty() && near.iter().all(|&m| m > 0 && m % step == 0));
            prop_assert!(near.iter().all(|&m| m.abs_diff(wanted) < step || wanted == 0));
        }
    }
}
