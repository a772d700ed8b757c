//! Text that is too short is told at once, with what is there and what is needed.

use data::{Batches, BatchesConfig, Corpus, DataError, DataRank, DataRanks, Part, Sampler, SamplerConfig, Tokenizer};

fn corpus(tokens: usize, split: &str) -> Corpus {
    Corpus::from_text(&"x".repeat(tokens), Tokenizer::Bytes, split.parse().unwrap())
}

#[test]
fn a_split_shorter_than_a_sample_is_an_error_with_the_tokens_it_needs() {
    let error = corpus(10, "99,1,0").windows(Part::Train, 1024).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the train split has 10 tokens (of 10, split \"99,1,0\"), but one sample of seq_len 1024 needs 1025: add text, \
         shorten seq_len or give the split more"
    );
    let empty = corpus(10, "99,1,0").windows(Part::Test, 4).unwrap_err();
    assert!(matches!(empty, DataError::TooFewTokens { part: Part::Test, available: 0, needed: 5, .. }), "{empty}");
    assert!(matches!(corpus(0, "1,0").windows(Part::Train, 1), Err(DataError::TooFewTokens { available: 0, .. })));
}

#[test]
fn one_token_less_than_a_sample_is_too_little_and_exactly_one_sample_is_enough() {
    assert!(corpus(16, "1,0").windows(Part::Train, 16).is_err());
    assert_eq!(corpus(17, "1,0").windows(Part::Train, 16).unwrap().samples(), 1);
    assert!(matches!(corpus(17, "1,0").windows(Part::Train, 0), Err(DataError::NoSeqLen)));
    assert!(corpus(17, "1,0").windows(Part::Train, usize::MAX).is_err());
}

#[test]
fn a_split_shorter_than_a_global_batch_is_an_error_with_the_tokens_it_needs() {
    let windows = corpus(100, "0.5,0.5").windows(Part::Eval, 10).unwrap();
    let config =
        BatchesConfig { global_batch: 6, micro_batch: 3, rank: DataRank(1), ranks: DataRanks(2), seed: 0, consumed: 0 };
    let error = Batches::new(windows.clone(), config).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the eval split has 50 tokens, which is 4 samples of seq_len 10, but a global batch of 6 needs 61 tokens: add \
         text, shorten seq_len or lower global_batch to at most 4"
    );
    let enough = BatchesConfig { global_batch: 4, micro_batch: 2, ..config };
    Batches::new(windows, enough).unwrap().next_batch().unwrap();
}

#[test]
fn a_sampler_never_starts_on_what_would_never_end() {
    let config = SamplerConfig { samples: 3, global_batch: 4, seed: 0, consumed: 0 };
    let error = Sampler::new(config).unwrap_err();
    assert!(matches!(error, DataError::BatchAboveSamples { samples: 3, global_batch: 4 }), "{error}");
    assert!(Sampler::new(SamplerConfig { samples: 0, ..config }).is_err());
    assert!(matches!(Sampler::new(SamplerConfig { global_batch: 0, ..config }), Err(DataError::NoBatch)));
}
