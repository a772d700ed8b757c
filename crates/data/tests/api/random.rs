//! Random tokens in place of text.

use data::{Corpus, DataError, Part, SampleId, Split};

fn tokens(vocab: usize, seed: u64) -> Vec<i32> {
    let corpus = Corpus::random(40_001, vocab, seed, "1,0".parse::<Split>().unwrap()).unwrap();
    let windows = corpus.windows(Part::Train, 40_000).unwrap();
    windows.window(SampleId(0)).unwrap().collect()
}

#[test]
fn every_id_is_about_as_frequent_as_any_other_and_none_is_outside_the_vocabulary() {
    let mut counts = [0usize; 7];
    tokens(7, 3).into_iter().for_each(|id| counts[usize::try_from(id).unwrap()] += 1);
    // 40 001 / 7 = 5714, standard deviation 70: five of them.
    assert!(counts.iter().all(|count| count.abs_diff(5714) < 350), "{counts:?}");
}

#[test]
fn they_follow_from_seed_and_place_and_windows_overlap_by_a_token() {
    assert_eq!(tokens(50_257, 1), tokens(50_257, 1));
    assert_ne!(tokens(50_257, 1), tokens(50_257, 2));
    let corpus = Corpus::random(1_000, 50_257, 1, "1,1".parse::<Split>().unwrap()).unwrap();
    let windows = corpus.windows(Part::Train, 10).unwrap();
    let [first, second] = [0, 1].map(|id| windows.window(SampleId(id)).unwrap().collect::<Vec<_>>());
    assert_eq!((first.len(), first[10]), (11, second[0]));
    assert_eq!(first, tokens(50_257, 1)[..11]);
}

#[test]
fn a_vocabulary_without_ids_or_of_more_than_ids_can_tell_is_refused() {
    for vocab in [0, (1 << 31) + 1] {
        let refused = Corpus::random(10, vocab, 1, "1,0".parse::<Split>().unwrap()).unwrap_err();
        assert!(matches!(refused, DataError::Vocab { vocab: asked } if asked == vocab), "{refused}");
    }
    assert!(tokens(1, 5).iter().all(|id| *id == 0));
}
