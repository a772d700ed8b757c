//! Samples, global batches and shares.

use data::{
    Batches, BatchesConfig, Corpus, DataError, DataRank, DataRanks, Part, SampleId, Sampler, SamplerConfig, Split,
    Tokenizer,
};
use proptest::prelude::*;

fn sampler(samples: u64, global_batch: u64, consumed: u64) -> Sampler {
    Sampler::new(SamplerConfig { samples, global_batch, seed: 5, consumed }).unwrap()
}

fn corpus(tokens: usize, split: &str) -> Corpus {
    // Distinct neighbours, so that a window shifted by one is another window.
    let text: String = (0..tokens).map(|i| char::from(b'a' + (i * 7 % 23) as u8)).collect();
    Corpus::from_text(&text, Tokenizer::Bytes, split.parse::<Split>().unwrap())
}

fn config(rank: u32, ranks: u32) -> BatchesConfig {
    BatchesConfig {
        global_batch: 8,
        micro_batch: 2,
        rank: DataRank(rank),
        ranks: DataRanks(ranks),
        seed: 9,
        consumed: 0,
    }
}

#[test]
fn one_two_and_four_ranks_read_the_same_samples_at_every_step() {
    let windows = corpus(1001, "1,0").windows(Part::Train, 10).unwrap();
    let mut readers: Vec<Vec<Batches>> =
        [1u32, 2, 4].map(|n| (0..n).map(|r| Batches::new(windows.clone(), config(r, n)).unwrap()).collect()).into();
    // 100 samples, 12 batches an epoch: the 40 steps cross three ends of an epoch.
    for step in 0..40 {
        let sequences: Vec<Vec<(Vec<i32>, Vec<i32>)>> = readers
            .iter_mut()
            .map(|ranks| {
                let mut all = Vec::new();
                for rank in ranks {
                    let batch = rank.next_batch().unwrap();
                    for micro in batch.microbatches() {
                        let rows = micro.inputs.chunks(10).zip(micro.targets.chunks(10));
                        all.extend(rows.map(|(i, t)| (i.to_vec(), t.to_vec())));
                    }
                }
                all
            })
            .collect();
        assert_eq!(sequences[0].len(), 8);
        assert_eq!(sequences[0], sequences[1], "step {step}, 1 and 2 ranks");
        assert_eq!(sequences[0], sequences[2], "step {step}, 1 and 4 ranks");
    }
}

#[test]
fn targets_are_the_inputs_one_token_on_and_every_token_but_the_first_is_a_target_once() {
    let corpus = corpus(64, "1,0");
    let windows = corpus.windows(Part::Train, 9).unwrap();
    assert_eq!((windows.samples(), windows.tokens()), (7, 64));
    let stream: Vec<i32> = (0..64).map(|i| i32::from(b'a') + i * 7 % 23).collect();
    let mut targets = Vec::new();
    for id in 0..7 {
        let window: Vec<i32> = windows.window(SampleId(id)).unwrap().collect();
        assert_eq!(window.len(), 10);
        targets.extend_from_slice(&window[1..]);
    }
    assert_eq!(targets, stream[1..64]);
    let beyond = windows.window(SampleId(7)).err().unwrap();
    assert!(matches!(beyond, DataError::NoSuchSample { sample: 7, samples: 7 }), "{beyond}");

    let mut batches = Batches::new(windows, BatchesConfig { global_batch: 6, micro_batch: 3, ..config(0, 1) }).unwrap();
    assert_eq!(batches.microbatches(), 2);
    let batch = batches.next_batch().unwrap();
    assert_eq!(batch.microbatches().len(), 2);
    for micro in batch.microbatches() {
        assert_eq!((micro.inputs.len(), micro.targets.len()), (27, 27));
        for (inputs, targets) in micro.inputs.chunks(9).zip(micro.targets.chunks(9)) {
            assert_eq!(inputs[1..], targets[..8]);
        }
    }
}

#[test]
fn the_parts_share_no_token() {
    let corpus = corpus(100, "70,20,10");
    for (part, first, tokens) in [(Part::Train, 0, 70), (Part::Eval, 70, 20), (Part::Test, 90, 10)] {
        let windows = corpus.windows(part, 9).unwrap();
        assert_eq!((windows.tokens(), windows.part()), (tokens, part));
        let window: Vec<i32> = windows.window(SampleId(0)).unwrap().collect();
        assert_eq!(window[0], i32::from(b'a') + first * 7 % 23);
    }
}

#[test]
fn an_epoch_deals_whole_batches_only_and_every_rank_as_many_as_the_others() {
    // 10 samples, batches of 4: two batches, then the 2 samples left are dropped.
    let mut sampler = sampler(10, 4, 0);
    let mut epochs = Vec::new();
    for _ in 0..6 {
        let batch = sampler.next_batch();
        assert_eq!(batch.ids().len(), 4);
        epochs.push((batch.epoch(), batch.first()));
        for rank in 0..4 {
            assert_eq!(batch.share(DataRank(rank), DataRanks(4)).unwrap().len(), 1);
        }
    }
    assert_eq!(epochs, [(0, 0), (0, 4), (1, 10), (1, 14), (2, 20), (2, 24)]);
    assert_eq!(sampler.consumed(), 28);
}

// 5 steps at dp = 4, save, resume at dp = 2; and 4 steps, save, resume, 4 steps, save, resume.
#[test]
fn a_resumed_run_goes_on_where_it_stopped_whatever_its_number_of_ranks() {
    let straight: Vec<_> = { (0..12).scan(sampler(1000, 8, 0), |s, _| Some(s.next_batch())).collect() };
    let mut first = sampler(1000, 8, 0);
    for _ in 0..5 {
        first.next_batch();
    }
    assert_eq!(first.consumed(), 40);
    let resumed = sampler(1000, 8, first.consumed()).next_batch();
    assert_eq!((resumed.first(), &resumed), (40, &straight[5]));
    let dealt: Vec<SampleId> =
        (0..2).flat_map(|r| resumed.share(DataRank(r), DataRanks(2)).unwrap().to_vec()).collect();
    assert_eq!(dealt, straight[5].ids());

    let mut consumed = 0;
    for _ in 0..2 {
        let mut again = sampler(1000, 8, consumed);
        for _ in 0..4 {
            again.next_batch();
        }
        consumed = again.consumed();
    }
    assert_eq!(consumed, 64);
    assert_eq!(sampler(1000, 8, consumed).next_batch(), straight[8]);
}

#[test]
fn a_batch_that_cannot_be_dealt_evenly_is_refused_with_the_multiple_it_needs() {
    let windows = corpus(1001, "1,0").windows(Part::Train, 10).unwrap();
    let error = |c: BatchesConfig| Batches::new(windows.clone(), c).unwrap_err();
    let uneven = error(config(0, 3));
    assert!(matches!(uneven, DataError::Uneven { global_batch: 8, micro_batch: 2, ranks: 3, multiple: 6 }), "{uneven}");
    assert!(matches!(error(config(2, 2)), DataError::NoSuchRank { rank: 2, ranks: 2 }));
    assert!(matches!(error(BatchesConfig { micro_batch: 0, ..config(0, 1) }), DataError::NoBatch));
    assert!(matches!(error(BatchesConfig { global_batch: 0, ..config(0, 1) }), DataError::NoBatch));
    let share = sampler(100, 8, 0).next_batch().share(DataRank(0), DataRanks(3)).unwrap_err();
    assert!(matches!(share, DataError::Uneven { global_batch: 8, ranks: 3, multiple: 3, .. }), "{share}");
}

/// (samples, global batch of at most as many, data ranks that divide it)
fn dealings() -> impl Strategy<Value = (u64, u64, u32)> {
    (1u32..6, 1u64..6).prop_flat_map(|(ranks, each)| {
        let batch = u64::from(ranks) * each;
        (batch..batch + 50).prop_map(move |samples| (samples, batch, ranks))
    })
}

proptest! {
    #[test]
    fn shares_are_disjoint_and_make_up_the_batch((samples, batch, ranks) in dealings(), start in 0u64..1000) {
        let mut sampler = sampler(samples, batch, start);
        for _ in 0..4 {
            let before = sampler.consumed();
            let global = sampler.next_batch();
            let dealt: Vec<SampleId> = (0..ranks)
                .flat_map(|r| global.share(DataRank(r), DataRanks(ranks)).unwrap().to_vec())
                .collect();
            prop_assert_eq!(&dealt, global.ids());
            let mut ids = dealt;
            ids.sort_unstable();
            ids.dedup();
            prop_assert_eq!(ids.len() as u64, batch);
            prop_assert!(ids.iter().all(|id| id.0 < samples));
            // Less than a batch is dropped, and only at the end of an epoch.
            prop_assert!(global.first() - before < batch);
            prop_assert!(global.first() == before || global.first().is_multiple_of(samples));
        }
    }
}
