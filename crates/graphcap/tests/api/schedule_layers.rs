//! Schedules by layer: reference expansions, and laws.

use std::collections::HashMap;

use graphcap::{
    Direction, ExpertOverlap, LayerOrder, LayerStep, Pairing, PipelineSetup, Schedule, ScheduleError, WeightGrads,
};

use super::schedule_support::{from_numbers, plan, settings, setup};

fn together(schedule: &Schedule, layers: &[u32], weight_grads: WeightGrads) -> LayerOrder {
    LayerOrder::new(schedule, layers, Pairing::Together, weight_grads).unwrap()
}

fn inputs(order: &LayerOrder) -> Vec<Option<(u32, u32)>> {
    let plain = |step: &LayerStep| step.sample_inputs().map(|(chunk, layer)| (chunk.0, layer.0));
    order.steps().iter().map(plain).collect()
}

#[test]
fn what_runs_together_takes_turns_layer_by_layer() {
    let schedule = from_numbers(&[1, 2, -2, 1, -1, -1]);
    let order = together(&schedule, &[1, 2], WeightGrads::Joined);
    assert_eq!(order.order().to_string(), "[1,2,3,1,-3,-2,-1,-1]");
    let first = [Some((0, 0)), Some((1, 0)), Some((1, 1)), Some((0, 0)), None, None, None, None];
    assert_eq!(inputs(&order), first);
    assert_eq!((order.units(), order.microbatches()), (3, &[2, 1][..]));

    let schedule = from_numbers(&[1, 1, 2, -2, 2, -2, 1, -1, 1, -1, 2, -2, 2, -2, -1, -1]);
    assert_eq!(schedule.order(), plan(setup(4, 2, 1, Some(2), None)).schedule().order());
    assert_eq!(
        together(&schedule, &[2, 2], WeightGrads::Joined).order().to_string(),
        "[1,2,1,2,3,4,3,-4,4,-3,1,-4,2,-3,1,-2,2,-1,3,-2,4,-1,3,-4,4,-3,-4,-3,-2,-1,-2,-1]"
    );
    assert_eq!(together(&from_numbers(&[1, -1]), &[2], WeightGrads::Joined).order().to_string(), "[1,2,-2,-1]");
}

#[test]
fn weight_gradients_are_captured_behind_the_input_gradients_of_their_layer() {
    let order = together(&from_numbers(&[1, 2, -2, 1, -1, -1]), &[1, 2], WeightGrads::Split);
    assert_eq!(order.order().to_string(), "[1,2,3,1,-3,-3.5,-2,-2.5,-1,-1.5,-1,-1.5]");
    // A weight gradient brings no inputs of its own.
    let halves = order.steps().iter().zip(inputs(&order));
    let halves: Vec<_> = halves.filter(|(step, _)| step.direction == Direction::BackwardWeight).collect();
    assert_eq!(halves.len(), 4);
    assert!(halves.iter().all(|(_, inputs)| inputs.is_none()));
}

#[test]
fn layers_apart_run_chunk_by_chunk() {
    let schedule = from_numbers(&[1, 2, -2, 1, -1, -1]);
    let apart = LayerOrder::new(&schedule, &[1, 2], Pairing::Apart, WeightGrads::Joined).unwrap();
    assert_eq!(apart.order().to_string(), "[1,2,3,-3,-2,1,-1,-1]");
    // A chunk without captured layers is left out, and takes no number.
    let empty = LayerOrder::new(&schedule, &[0, 2], Pairing::Together, WeightGrads::Joined).unwrap();
    assert_eq!(empty.order().to_string(), "[1,2,-2,-1]");
}

#[test]
fn layers_are_given_for_every_chunk() {
    let schedule = from_numbers(&[1, 2, -2, -1]);
    for layers in [&[3][..], &[3, 1, 2]] {
        let error = LayerOrder::new(&schedule, layers, Pairing::Apart, WeightGrads::Joined).unwrap_err();
        assert_eq!(error, ScheduleError::ChunkCount { given: layers.len(), chunks: 2 });
    }
}

/// Layers of each chunk, never as many in one chunk as in the next.
fn uneven(setup: &PipelineSetup) -> Vec<u32> {
    (0..setup.chunks()).map(|chunk| [2, 1, 3, 0][(chunk + setup.microbatches) as usize % 4]).collect()
}

#[test]
fn every_layer_of_every_microbatch_runs_once_in_each_direction_and_in_its_turn() {
    for setup in settings() {
        let schedule = plan(setup).schedule();
        let layers = uneven(&setup);
        for (pairing, weight_grads, passes) in [
            (Pairing::Apart, WeightGrads::Joined, 2),
            (Pairing::Together, WeightGrads::Joined, 2),
            (Pairing::Together, WeightGrads::Split, 3),
        ] {
            let order = LayerOrder::new(&schedule, &layers, pairing, weight_grads).unwrap();
            let mut ran: HashMap<_, Vec<(usize, Direction)>> = HashMap::new();
            for (at, step) in order.steps().iter().enumerate() {
                ran.entry((step.chunk, step.microbatch, step.layer.0)).or_default().push((at, step.direction));
            }
            assert_eq!(order.units(), layers.iter().sum::<u32>() as usize);
            assert_eq!(ran.len(), order.units() * setup.microbatches as usize);
            assert_eq!(order.steps().len(), ran.len() * passes, "{setup:?}");
            for (&(chunk, microbatch, layer), steps) in &ran {
                let directions: Vec<_> = steps.iter().map(|&(_, direction)| direction).collect();
                let wanted: &[Direction] = match weight_grads {
                    WeightGrads::Joined => &[Direction::Forward, Direction::Backward],
                    WeightGrads::Split => &[Direction::Forward, Direction::BackwardInput, Direction::BackwardWeight],
                };
                assert_eq!(directions, wanted, "{setup:?}");
                // Forward after the layer before, backward before the layer before.
                if let Some(before) = layer.checked_sub(1).map(|layer| &ran[&(chunk, microbatch, layer)]) {
                    assert!(before[0].0 < steps[0].0 && steps[1].0 < before[1].0, "{setup:?}");
                }
            }
        }
    }
}

/// Running together moves every forward ahead of the backward that it is paired with: what is in flight grows by
/// exactly the microbatch that the warm-up of an overlapping pipeline counts.
#[test]
fn pairing_adds_the_microbatch_that_overlap_counts_as_warm_up() {
    let mut longer = 0;
    for base in settings() {
        let on = PipelineSetup { overlap: ExpertOverlap::On, ..base };
        if on.check().is_err() || base.place.size() == 1 {
            continue;
        }
        let counts = plan(on).counts();
        let schedule = plan(on).schedule();
        let order = together(&schedule, &vec![1; base.chunks() as usize], WeightGrads::Joined);
        let directions: Vec<_> = order.steps().iter().map(|step| step.direction).collect();
        let ahead = directions.iter().take_while(|&&direction| direction == Direction::Forward).count() as u64;
        // The warm-up, and the first pair's forward.
        assert_eq!(ahead, (counts.warm_up + 1).min(counts.total), "{base:?}");
        longer += u64::from(counts.warm_up > plan(base).counts().warm_up);
    }
    assert!(longer > 50, "{longer}");
}
