//! Models whose layers are cut over a tensor group, against the same model on one rank.

use std::sync::Arc;

use device::{Frame, Fresh, Machine, Options, ops::IGNORE};
use model::{Arch, GptConfig, GptPlan, LlamaConfig, Output, RecomputeLayers};
use pgroups::{GlobalRank, Group, GroupsPlan, Key, Pass, ProcessGroups, Rank, Sequence, local};

use crate::{
    machines::cards,
    rig::{ids, values},
    tensor_rig::{Batches, Work, alone, assert_agree, flat, tensor_groups, together, together_in},
};

const SEQUENCES: [Sequence; 2] = [Sequence::Whole, Sequence::Split];

/// Nine tokens over four ranks leave the last one with padding only.
fn gpt2() -> GptConfig {
    let (arch, output) = (Arch::Gpt2, Output::Tied);
    GptConfig { arch, layers: 2, dim: 16, heads: 4, ffn_dim: 12, vocab: 9, vocab_rows: 9, seq_len: 7, output }
}

/// Eleven rows over two ranks: one of padding, and two that are no token's.
fn llama() -> GptConfig {
    let arch = Arch::Llama(LlamaConfig { kv_heads: 4, rope_base: 50 });
    GptConfig { arch, heads: 8, dim: 32, ffn_dim: 20, vocab_rows: 11, output: Output::Own, ..gpt2() }
}

/// A key head for two query heads, and one key head for each of two ranks.
fn grouped() -> GptConfig {
    let arch = Arch::Llama(LlamaConfig { kv_heads: 2, rope_base: 50 });
    GptConfig { arch, layers: 1, output: Output::Tied, ..gpt2() }
}

/// `n` microbatches of four sequences of `len`, each with targets that are ignored.
fn batches(config: &GptConfig, n: u64, len: usize, seed: u64) -> Batches {
    let one = |i| {
        let mut targets = ids(4 * len, config.vocab, seed + 2 * i + 1);
        targets[len / 2] = IGNORE;
        (ids(4 * len, config.vocab, seed + 2 * i), targets)
    };
    (0..n).map(|i| one(i * 10)).collect()
}

fn poisoned(workers: usize) -> Machine {
    Machine::cpu_with(workers, Options { fresh: Fresh::Poisoned, ..Options::default() }).unwrap()
}

/// On hosts, and on `cards`.
fn against_one_rank(
    config: &GptConfig,
    (tp, sequence): (u32, Sequence),
    recompute: &RecomputeLayers,
    cards: &[Machine],
) {
    let what = format!("{config:?} over {tp}, {sequence:?}, {recompute:?}");
    let values = values(&GptPlan::new(config.clone()).unwrap(), 5);
    let work = Work { config: config.clone(), values: &values, sequence, len: 7, recompute: recompute.clone() };
    let batches = batches(config, 2, 7, 1);
    let want = alone(&poisoned(1), &work, &batches);
    let members: Vec<u32> = (0..tp).collect();
    for machine in [poisoned(2), Machine::sim(u64::from(tp))].iter().chain(cards) {
        let got = together(machine, &[&members], &work, std::slice::from_ref(&batches));
        assert_agree(&got[0], &want, &format!("{what} on {}", machine.driver()));
    }
}

#[test]
fn gpt2_over_a_tensor_group_has_the_losses_and_gradients_of_one_rank() {
    let cards = cards();
    for group in [2, 4].into_iter().flat_map(|tp| SEQUENCES.map(|sequence| (tp, sequence))) {
        against_one_rank(&gpt2(), group, &RecomputeLayers::None, &cards);
    }
}

#[test]
fn llama_over_a_tensor_group_has_the_losses_and_gradients_of_one_rank() {
    let cards = cards();
    for group in [2, 4].into_iter().flat_map(|tp| SEQUENCES.map(|sequence| (tp, sequence))) {
        against_one_rank(&llama(), group, &RecomputeLayers::None, &cards);
    }
    for sequence in SEQUENCES {
        against_one_rank(&grouped(), (2, sequence), &RecomputeLayers::None, &cards);
    }
}

#[test]
fn recomputed_layers_over_a_tensor_group_have_the_same_gradients() {
    let cards = cards();
    for sequence in SEQUENCES {
        against_one_rank(&gpt2(), (2, sequence), &RecomputeLayers::All, &cards);
        against_one_rank(&llama(), (2, sequence), &RecomputeLayers::These(vec![1]), &cards);
    }
}

#[test]
fn short_sequences_are_split_across_their_ends() {
    // Four sequences of three tokens over four ranks and of five over two: no part begins where a sequence does.
    for (tp, len) in [(4, 3), (2, 5)] {
        let config = gpt2();
        let values = values(&GptPlan::new(config.clone()).unwrap(), 8);
        let (sequence, recompute) = (Sequence::Split, RecomputeLayers::These(vec![0]));
        let work = Work { config: config.clone(), values: &values, sequence, len, recompute };
        let batches = batches(&config, 1, len, 3);
        let want = alone(&poisoned(1), &work, &batches);
        let members: Vec<u32> = (0..tp).collect();
        let got = together(&poisoned(2), &[&members], &work, std::slice::from_ref(&batches));
        assert_agree(&got[0], &want, &format!("{len} tokens over {tp}"));
    }
}

#[test]
fn permuted_groups_with_gaps_work_side_by_side_on_their_own_samples() {
    let machines: Vec<_> = [poisoned(2), Machine::sim(3)].into_iter().chain(cards()).collect();
    for (config, sequence) in [(gpt2(), Sequence::Split), (llama(), Sequence::Whole), (llama(), Sequence::Split)] {
        let values = values(&GptPlan::new(config.clone()).unwrap(), 6);
        let work = Work { config: config.clone(), values: &values, sequence, len: 7, recompute: RecomputeLayers::None };
        let samples = [batches(&config, 1, 7, 20), batches(&config, 1, 7, 60)];
        let want = samples.each_ref().map(|batches| alone(&poisoned(1), &work, batches));
        for machine in &machines {
            let got = together(machine, &[&[3, 0], &[1, 2]], &work, &samples);
            for (got, want) in got.iter().zip(&want) {
                assert_agree(got, want, &format!("{sequence:?} on {}", machine.driver()));
            }
        }
    }
}

#[test]
fn every_driver_and_order_gives_a_tensor_group_the_same_bits() {
    for (config, sequence) in [(gpt2(), Sequence::Split), (llama(), Sequence::Whole)] {
        let values = values(&GptPlan::new(config.clone()).unwrap(), 7);
        let work = Work { config: config.clone(), values: &values, sequence, len: 7, recompute: RecomputeLayers::None };
        let batches = [batches(&config, 1, 7, 2)];
        let want = together(&poisoned(1), &[&[0, 1]], &work, &batches);
        for machine in [poisoned(2), Machine::sim(0), Machine::sim(1), Machine::sim(2)] {
            let got = together(&machine, &[&[0, 1]], &work, &batches);
            assert_eq!(crate::twins::differing(&got[0], &want[0]), [""; 0], "{}", machine.driver());
        }
    }
}

#[test]
fn a_planned_frame_over_a_tensor_group_is_the_twin_of_an_unplanned_one() {
    for (sequence, recompute) in
        [(Sequence::Split, RecomputeLayers::These(vec![1])), (Sequence::Whole, RecomputeLayers::None)]
    {
        for config in [gpt2(), llama()] {
            let values = values(&GptPlan::new(config.clone()).unwrap(), 7);
            let work = Work { config: config.clone(), values: &values, sequence, len: 7, recompute: recompute.clone() };
            let batches = [batches(&config, 2, 7, 2)];
            let plans = [0, 1].map(|place| dry_plan(&work, place, &batches[0]));
            let planned = together_in(&poisoned(2), &[&[0, 1]], &work, &batches, &plans);
            let unplanned = together(&poisoned(2), &[&[0, 1]], &work, &batches);
            assert_eq!(crate::twins::differing(&planned[0], &unplanned[0]), [""; 0], "{sequence:?}");
        }
    }
}

/// The frame of one of two ranks, planned alone.
fn dry_plan(work: &Work<'_>, place: u32, batches: &Batches) -> Arc<device::FramePlan> {
    let machine = Machine::dry();
    let rank = Rank::alone(&machine, GlobalRank(place), 2).unwrap();
    let plan = GroupsPlan::new(&flat(2), &tensor_groups(&[&[0, 1]]), GlobalRank(place)).unwrap();
    let groups = ProcessGroups::planned(&rank, plan).unwrap();
    let part = work.part(&rank, Some(groups.get(&Key::named("tensor").unwrap(), "the test").unwrap())).unwrap();
    let mut f = Frame::recording(&part.stream, "frame");
    let (tokens, targets) = (part.ids(&batches[0].0, work.len), part.ids(&batches[0].1, work.len));
    machine.trace_start();
    part.step(&mut f, [&tokens, &targets], 1.0).unwrap();
    Arc::new(f.plan(&machine.trace_stop()).unwrap())
}

#[test]
fn a_group_of_one_submits_what_no_group_does() {
    for config in [gpt2(), llama()] {
        let values = values(&GptPlan::new(config.clone()).unwrap(), 7);
        let trace = |sequence, with_group: bool| {
            let recompute = RecomputeLayers::These(vec![0]);
            let work = Work { config: config.clone(), values: &values, sequence, len: 7, recompute };
            let machine = Machine::dry();
            let rank = Rank::alone(&machine, GlobalRank(0), 1).unwrap();
            let plan = GroupsPlan::new(&flat(1), &tensor_groups(&[&[0]]), GlobalRank(0)).unwrap();
            let groups = ProcessGroups::planned(&rank, plan).unwrap();
            let group = groups.get(&Key::named("tensor").unwrap(), "the test").unwrap();
            let part = work.part(&rank, with_group.then_some(group)).unwrap();
            let batches = batches(&config, 1, 7, 2);
            let (tokens, targets) = (part.ids(&batches[0].0, 7), part.ids(&batches[0].1, 7));
            let mut f = Frame::recording(&part.stream, "frame");
            machine.trace_start();
            part.step(&mut f, [&tokens, &targets], 1.0).unwrap();
            let mut f = Frame::recording(&part.stream, "sampling");
            part.gpt.logits(&mut f, &mut part.weights(Pass::Forward), &tokens, 3).unwrap();
            machine.trace_stop().to_text()
        };
        let plain = trace(Sequence::Whole, false);
        assert!(plain.lines().count() > 60, "{plain}");
        for sequence in SEQUENCES {
            assert_eq!(trace(sequence, true), plain, "{sequence:?}");
        }
    }
}

#[test]
fn sampling_gets_the_whole_vocabulary_on_every_rank() {
    for (config, tp) in [(gpt2(), 2), (gpt2(), 4), (llama(), 2), (llama(), 4)] {
        let values = values(&GptPlan::new(config.clone()).unwrap(), 9);
        // Twenty-one tokens, which no group here could split.
        let tokens = ids(3 * 7, config.vocab, 12);
        let logits = |work: &Work<'_>, rank: &Rank, group: Option<&Group>| {
            let part = work.part(rank, group)?;
            let mut f = Frame::unplanned(&part.stream, "frame");
            let view = part.gpt.logits(&mut f, &mut part.weights(Pass::Forward), &part.ids(&tokens, 7), 4)?;
            assert_eq!(view.shape(), [3, 9]);
            Ok::<Vec<f32>, model::ModelError>(part.stream.download(&view)?.wait()?)
        };
        for sequence in SEQUENCES {
            let work =
                Work { config: config.clone(), values: &values, sequence, len: 7, recompute: RecomputeLayers::None };
            let single = Work { sequence: Sequence::Whole, ..work.clone() };
            let want = local(&poisoned(1), 1, |rank| logits(&single, &rank, None)).unwrap().remove(0);
            let members: Vec<u32> = (0..tp).collect();
            let got = local(&poisoned(2), tp, |rank| {
                let groups = ProcessGroups::build(&rank, &flat(tp), &tensor_groups(&[&members]))?;
                logits(&work, &rank, Some(groups.get(&Key::named("tensor").unwrap(), "the test")?))
            });
            let got = got.unwrap_or_else(|error| panic!("{}", error.chain()));
            let largest = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            for own in &got {
                assert_eq!(*own, got[0], "members disagree");
                let off = own.iter().zip(&want).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(off <= 2e-6 * largest, "{tp} ranks, {sequence:?}: off by {off:e}");
            }
        }
    }
}
