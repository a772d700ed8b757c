//! Slots of sample inputs: reference plans, and laws checked against a player that knows nothing of live ranges.
//!
//! The rows come from running Megatron-LM's `_get_sample_arguments`.

use std::collections::HashMap;

use graphcap::{
    ChunkIndex, Direction, ExpertOverlap, LayerIndex, LayerOrder, MicrobatchIndex, Pairing, PassKind, PipelineSetup,
    Schedule, ScheduleError, SlotIndex, SlotPlan, WeightGrads,
};
use proptest::prelude::*;

use super::schedule_support::{from_numbers, plan, settings, setup};

/// Microbatches, stages, chunks a stage, layers by chunk, stage; entries, slots, slots by entry (empty: not told).
type Row = (u32, u32, Option<u32>, &'static [u32], u32, usize, usize, &'static [u32]);

#[rustfmt::skip]
const ROWS: &[Row] = &[
    (4, 2, None, &[2], 0, 8, 4, &[0, 1, 2, 3, 0, 1, 2, 3]),
    (4, 2, None, &[2], 1, 8, 2, &[0, 1, 0, 1, 0, 1, 0, 1]),
    (8, 2, None, &[2], 0, 16, 4, &[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]),
    (8, 2, None, &[2], 1, 16, 2, &[0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1]),
    (16, 2, None, &[4], 0, 64, 8, &[]),
    (16, 2, None, &[4], 1, 64, 4, &[]),
    (64, 2, None, &[4], 0, 256, 8, &[]),
    (64, 2, None, &[4], 1, 256, 4, &[]),
    (16, 4, None, &[2], 0, 32, 8, &[]),
    (16, 4, None, &[2], 1, 32, 6, &[]),
    (16, 4, None, &[2], 2, 32, 4, &[]),
    (16, 4, None, &[2], 3, 32, 2, &[]),
    (4, 2, Some(2), &[1, 1], 0, 8, 5, &[0, 1, 2, 3, 3, 4, 4, 0]),
    (4, 2, Some(2), &[1, 1], 1, 8, 3, &[0, 1, 2, 0, 2, 2, 1, 1]),
    (8, 2, Some(2), &[1, 1], 0, 16, 5, &[0, 1, 2, 3, 1, 4, 3, 0, 3, 4, 4, 0, 0, 2, 2, 1]),
    (8, 2, Some(2), &[1, 1], 1, 16, 3, &[0, 1, 2, 0, 1, 2, 0, 1, 2, 2, 1, 1, 0, 0, 2, 2]),
    (16, 2, Some(2), &[2, 2], 0, 64, 10, &[]),
    (16, 2, Some(2), &[2, 2], 1, 64, 6, &[]),
    (64, 2, Some(2), &[2, 2], 0, 256, 10, &[]),
    (64, 2, Some(2), &[2, 2], 1, 256, 6, &[]),
    (16, 4, Some(2), &[1, 1], 0, 32, 11, &[]),
    (16, 4, Some(2), &[1, 1], 1, 32, 9, &[]),
    (16, 4, Some(2), &[1, 1], 2, 32, 7, &[]),
    (16, 4, Some(2), &[1, 1], 3, 32, 5, &[]),
    (64, 4, Some(2), &[1, 1], 0, 128, 11, &[]),
    (64, 4, Some(2), &[1, 1], 1, 128, 9, &[]),
    (64, 4, Some(2), &[1, 1], 2, 128, 7, &[]),
    (64, 4, Some(2), &[1, 1], 3, 128, 5, &[]),
    (8, 4, Some(2), &[2, 2], 0, 32, 22, &[]),
    (8, 4, Some(2), &[2, 2], 1, 32, 18, &[]),
    (8, 4, Some(2), &[2, 2], 2, 32, 14, &[]),
    (8, 4, Some(2), &[2, 2], 3, 32, 10, &[]),
];

/// Microbatches, stages, chunks a stage, group; microbatches in flight at once, by stage.
type Peaks = (u32, u32, Option<u32>, u32, &'static [usize]);

const PEAKS: &[Peaks] = &[
    (4, 2, None, 2, &[2, 1]),
    (8, 4, None, 4, &[4, 3, 2, 1]),
    (16, 4, None, 4, &[4, 3, 2, 1]),
    (2, 4, None, 4, &[2, 2, 2, 1]),
    (4, 2, Some(2), 2, &[5, 3]),
    (8, 4, Some(2), 4, &[11, 9, 7, 5]),
    (16, 4, Some(2), 4, &[11, 9, 7, 5]),
    (8, 2, Some(2), 4, &[7, 5]),
    (6, 2, Some(3), 2, &[7, 5]),
    (5, 2, Some(2), 3, &[6, 4]),
    (3, 2, Some(2), 2, &[5, 3]),
    (64, 8, None, 8, &[8, 7, 6, 5, 4, 3, 2, 1]),
    (64, 8, Some(2), 8, &[23, 21, 19, 17, 15, 13, 11, 9]),
];

fn same(layers: &[u32]) -> Vec<Vec<&'static str>> {
    layers.iter().map(|&layers| vec!["x"; layers as usize]).collect()
}

fn slots(plan: &SlotPlan) -> Vec<u32> {
    plan.entries().iter().map(|entry| entry.slot.0).collect()
}

#[test]
fn slots_are_the_reference_values() {
    for &(microbatches, pp, vpp, layers, stage, entries, distinct, wanted) in ROWS {
        let schedule = plan(setup(microbatches, pp, stage, vpp, None)).schedule();
        let slots_of = SlotPlan::by_chunk(&schedule, &same(layers)).unwrap();
        let context = format!("M{microbatches} pp{pp} vpp{vpp:?} {layers:?} stage {stage}");
        assert_eq!((slots_of.entries().len(), slots_of.distinct()), (entries, distinct), "{context}");
        if !wanted.is_empty() {
            assert_eq!(slots(&slots_of), wanted, "{context}");
        }
    }
    assert_eq!((ROWS.len(), ROWS.iter().filter(|row| !row.7.is_empty()).count()), (32, 8));
}

#[test]
fn one_microbatch_on_one_stage_has_a_slot_a_layer() {
    let schedule = plan(setup(1, 1, 0, None, None)).schedule();
    assert_eq!(schedule.order().to_string(), "[1,-1]");
    let plan = SlotPlan::by_chunk(&schedule, &same(&[3])).unwrap();
    assert_eq!((slots(&plan), plan.distinct()), (vec![0, 1, 2], 3));
}

#[test]
fn layers_with_other_signatures_share_no_slot() {
    let schedule = plan(setup(4, 2, 0, Some(2), None)).schedule();
    let plan = SlotPlan::by_chunk(&schedule, &[vec!["hidden"], vec!["hidden, mask"]]).unwrap();
    assert_eq!((slots(&plan), plan.distinct()), (vec![0, 1, 2, 3, 4, 5, 4, 5], 6));
}

#[test]
fn a_layer_has_as_many_slots_as_microbatches_are_in_flight() {
    for &(microbatches, pp, vpp, group, peaks) in PEAKS {
        let refused = setup(microbatches, pp, 0, vpp, Some(group)).check().is_err();
        assert_eq!(refused, microbatches == 3, "only that row breaks a rule");
        if refused {
            continue;
        }
        let distinct = (0..pp).map(|stage| {
            let schedule = plan(setup(microbatches, pp, stage, vpp, Some(group))).schedule();
            let plan = SlotPlan::by_chunk(&schedule, &same(&vec![1; schedule.chunks()])).unwrap();
            plan.distinct()
        });
        assert_eq!(distinct.collect::<Vec<_>>(), peaks, "M{microbatches} pp{pp} vpp{vpp:?}");
    }
    // The row that a plan refuses, as a pipeline of one's own.
    let orders = [&[1, 1, 2, 2, 1, -2, 2, -2, -1, -1, -2, -1][..], &[1, 1, 2, -2, 2, -2, 1, -1, 2, -1, -2, -1]];
    let peaks = orders.map(|order| SlotPlan::by_chunk(&from_numbers(order), &same(&[1, 1])).unwrap().distinct());
    assert_eq!(peaks, [5, 3]);
}

#[test]
fn slots_do_not_grow_with_the_number_of_microbatches() {
    for base in settings() {
        let plan = plan(base);
        let counts = plan.counts();
        let chunks = base.chunks() as usize;
        for layers in 1..=3 {
            let slots = SlotPlan::by_chunk(&plan.schedule(), &same(&vec![layers; chunks])).unwrap();
            let in_flight = (counts.warm_up + 1).min(counts.total);
            assert_eq!(slots.distinct() as u64, in_flight * u64::from(layers), "{base:?}");
        }
    }
}

/// One step as the player sees it: which graphs start or end there.
type Played = (Direction, Vec<(ChunkIndex, MicrobatchIndex, LayerIndex)>);

/// Plays a pipeline with the planned slots. Every forward writes its name into its slot; every later step of that
/// graph must still find it there. Gives back the most graphs in flight, by signature.
fn play(plan: &SlotPlan, steps: &[Played], signature: impl Fn(ChunkIndex, LayerIndex) -> u32) -> HashMap<u32, usize> {
    let mut memory: HashMap<SlotIndex, (ChunkIndex, MicrobatchIndex, LayerIndex)> = HashMap::new();
    let mut made_for: HashMap<SlotIndex, u32> = HashMap::new();
    let (mut live, mut peak): (HashMap<u32, usize>, HashMap<u32, usize>) = Default::default();
    for (at, (direction, graphs)) in steps.iter().enumerate() {
        for &graph in graphs {
            let (chunk, microbatch, layer) = graph;
            let entry = plan.entry(chunk, microbatch, layer).unwrap();
            let kind = signature(chunk, layer);
            assert!(entry.live.contains(&at), "{entry:?} at {at}");
            if *direction == Direction::Forward {
                assert_eq!(*entry.live.start(), at);
                assert_eq!(memory.insert(entry.slot, graph), None, "{entry:?} takes a slot that is in use");
                assert_eq!(*made_for.entry(entry.slot).or_insert(kind), kind, "{entry:?} has a slot of another kind");
                *live.entry(kind).or_default() += 1;
                let most = peak.entry(kind).or_default();
                *most = (*most).max(live[&kind]);
            } else {
                assert_eq!(memory.get(&entry.slot), Some(&graph), "{entry:?} lost its slot");
            }
        }
        let forward_only = steps.iter().all(|(direction, _)| *direction == Direction::Forward);
        if direction.is_last() || forward_only {
            for &(chunk, microbatch, layer) in graphs {
                let entry = plan.entry(chunk, microbatch, layer).unwrap();
                assert_eq!(*entry.live.end(), at);
                memory.remove(&entry.slot);
                *live.get_mut(&signature(chunk, layer)).unwrap() -= 1;
            }
        }
    }
    assert!(memory.is_empty());
    peak
}

fn played_by_chunk(schedule: &Schedule, layers: &[u32]) -> Vec<Played> {
    let graphs = |step: &graphcap::Step| {
        let of = |layer| (step.chunk, step.microbatch, LayerIndex(layer));
        (step.direction, (0..layers[step.chunk.index()]).map(of).collect())
    };
    schedule.steps().iter().map(graphs).collect()
}

fn played_by_layer(order: &LayerOrder) -> Vec<Played> {
    let graph = |step: &graphcap::LayerStep| (step.direction, vec![(step.chunk, step.microbatch, step.layer)]);
    order.steps().iter().map(graph).collect()
}

/// No slot has two live owners, and none is there for nothing.
fn check(plan: &SlotPlan, steps: &[Played], signatures: &[Vec<u32>]) {
    let peak = play(plan, steps, |chunk, layer| signatures[chunk.index()][layer.index()]);
    assert_eq!(plan.distinct(), peak.values().sum::<usize>(), "as many slots as are in use at once");
    let used: std::collections::BTreeSet<_> = plan.entries().iter().map(|entry| entry.slot.0).collect();
    assert!(used.into_iter().eq(0..plan.distinct() as u32), "slots count from 0 without gaps");
}

#[test]
fn no_slot_has_two_live_owners_in_any_pipeline_of_hundreds() {
    for base in settings() {
        for pass in [PassKind::Training, PassKind::ForwardOnly] {
            let schedule = plan(PipelineSetup { pass, ..base }).schedule();
            let layers: Vec<u32> = (0..base.chunks()).map(|chunk| (chunk + base.microbatches) % 4).collect();
            let signatures: Vec<Vec<u32>> = (0..base.chunks())
                .map(|chunk| (0..layers[chunk as usize]).map(|layer| layer * chunk % 2).collect())
                .collect();
            check(
                &SlotPlan::by_chunk(&schedule, &signatures).unwrap(),
                &played_by_chunk(&schedule, &layers),
                &signatures,
            );
            for (pairing, weight_grads) in [
                (Pairing::Apart, WeightGrads::Joined),
                (Pairing::Together, WeightGrads::Joined),
                (Pairing::Together, WeightGrads::Split),
            ] {
                let order = LayerOrder::new(&schedule, &layers, pairing, weight_grads).unwrap();
                check(&SlotPlan::by_layer(&order, &signatures).unwrap(), &played_by_layer(&order), &signatures);
            }
        }
    }
}

/// A pipeline of someone's own: any order in which each pass comes after what it needs.
fn own_schedule() -> impl Strategy<Value = Schedule> {
    let counts = prop::collection::vec(1u32..5, 1..4);
    let with_seed = (counts, prop::collection::vec(any::<prop::sample::Index>(), 48), any::<u64>());
    with_seed.prop_map(|(microbatches, picks, split)| {
        let mut left: Vec<(u32, u32, Vec<Direction>)> = Vec::new();
        for (chunk, &count) in (0..).zip(&microbatches) {
            for microbatch in 0..count {
                let halves = [Direction::Forward, Direction::BackwardInput, Direction::BackwardWeight];
                let whole = [Direction::Forward, Direction::Backward];
                let in_two = split >> (left.len() % 64) & 1 == 1;
                left.push((chunk, microbatch, if in_two { halves.to_vec() } else { whole.to_vec() }));
            }
        }
        let mut steps = Vec::new();
        for pick in picks.iter().cycle() {
            if left.is_empty() {
                break;
            }
            let at = pick.index(left.len());
            let (chunk, microbatch, rest) = &mut left[at];
            let (chunk, microbatch) = (ChunkIndex(*chunk), MicrobatchIndex(*microbatch));
            steps.push(graphcap::Step { chunk, microbatch, direction: rest.remove(0) });
            if rest.is_empty() {
                left.remove(at);
            }
        }
        Schedule::new(steps).unwrap()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_slot_has_two_live_owners_in_a_pipeline_of_ones_own(
        schedule in own_schedule(),
        kinds in prop::collection::vec(prop::collection::vec(0u32..3, 0..4), 3),
    ) {
        let signatures = kinds[..schedule.chunks()].to_vec();
        let layers: Vec<u32> = signatures.iter().map(|chunk| chunk.len() as u32).collect();
        check(&SlotPlan::by_chunk(&schedule, &signatures).unwrap(), &played_by_chunk(&schedule, &layers), &signatures);
        for pairing in [Pairing::Apart, Pairing::Together] {
            let order = LayerOrder::new(&schedule, &layers, pairing, WeightGrads::Split).unwrap();
            check(&SlotPlan::by_layer(&order, &signatures).unwrap(), &played_by_layer(&order), &signatures);
        }
    }
}

/// Chunk 0's weight gradients run late: until then its inputs are needed.
#[test]
fn a_slot_is_kept_until_the_weight_gradients_that_read_it() {
    use Direction::{Backward, BackwardInput, BackwardWeight, Forward};
    let step = |microbatch, direction| graphcap::Step {
        chunk: ChunkIndex(0),
        microbatch: MicrobatchIndex(microbatch),
        direction,
    };
    let steps = |late: &[graphcap::Step]| [&[step(0, Forward), step(0, BackwardInput)], late].concat();
    let early = [step(0, BackwardWeight), step(1, Forward), step(1, Backward)];
    let late = [step(1, Forward), step(0, BackwardWeight), step(1, Backward)];
    let distinct = [&early, &late].map(|rest| {
        let schedule = Schedule::new(steps(rest)).unwrap();
        SlotPlan::by_chunk(&schedule, &same(&[1])).unwrap().distinct()
    });
    assert_eq!(distinct, [1, 2]);
}

#[test]
fn a_layer_by_layer_plan_gives_back_each_layer_by_itself() {
    // Two microbatches together: layer 2's slot is free for the forward while layer 1 still waits for its backward.
    let overlap = plan(PipelineSetup { overlap: ExpertOverlap::On, ..setup(2, 1, 0, None, None) }).schedule();
    let order = LayerOrder::new(&overlap, &[2], Pairing::Together, WeightGrads::Joined).unwrap();
    assert_eq!(order.order().to_string(), "[1,2,1,-2,2,-1,-2,-1]");
    let plan = SlotPlan::by_layer(&order, &same(&[2])).unwrap();
    assert_eq!((slots(&plan), plan.distinct()), (vec![0, 1, 2, 1], 3));
}

#[test]
fn signatures_are_given_for_every_chunk_and_layer() {
    let schedule = from_numbers(&[1, 2, -2, -1]);
    let wrong = ScheduleError::ChunkCount { given: 1, chunks: 2 };
    assert_eq!(SlotPlan::by_chunk(&schedule, &same(&[1])), Err(wrong.clone()));
    let order = LayerOrder::new(&schedule, &[1, 2], Pairing::Apart, WeightGrads::Joined).unwrap();
    assert_eq!(SlotPlan::by_layer(&order, &same(&[1])), Err(wrong));
    let wrong = ScheduleError::SignatureCount { chunk: ChunkIndex(1), layers: 2, given: 3 };
    assert_eq!(SlotPlan::by_layer(&order, &same(&[1, 3])), Err(wrong));
    let plan = SlotPlan::by_layer(&order, &same(&[1, 2])).unwrap();
    for (chunk, microbatch, layer, known) in
        [(0, 0, 0, true), (1, 0, 1, true), (0, 0, 1, false), (0, 1, 0, false), (2, 0, 0, false)]
    {
        let entry = plan.entry(ChunkIndex(chunk), MicrobatchIndex(microbatch), LayerIndex(layer));
        assert_eq!(entry.is_some(), known, "{chunk} {microbatch} {layer}");
    }
}
