//! What a pipeline, a schedule and a scope may not be; warm-up runs.

use std::num::NonZeroU32;

use graphcap::{
    ChunkIndex, Direction, ExpertOverlap, GraphScope, LocalWarmUp, MicrobatchIndex, PassKind, PipelinePlace,
    PipelinePlan, PipelineSetup, Schedule, ScheduleError, ScheduleViolation, Step, WhereStopped, local_warm_up,
    warm_up_iterations,
};
use pgroups::GroupRank;
use proptest::prelude::*;

use super::schedule_support::{plan, setup};

fn broken(setup: PipelineSetup) -> Vec<ScheduleViolation> {
    let violations = setup.check().unwrap_err();
    assert_eq!(PipelinePlan::of_step(setup), Err(ScheduleError::Setup { source: violations.clone() }));
    assert_eq!(PipelinePlan::for_capture(setup), Err(ScheduleError::Setup { source: violations.clone() }));
    violations.list().to_vec()
}

#[test]
fn every_rule_of_a_setup_is_told_with_the_nearest_setting_that_keeps_it() {
    let overlap = |setup| PipelineSetup { overlap: ExpertOverlap::On, ..setup };
    let cases = [
        (setup(0, 3, 1, None, None), "nearest: microbatches = 1"),
        (setup(4, 2, 0, Some(1), None), "nearest: 2, or no interleaving"),
        (setup(4, 1, 0, Some(3), None), "nearest: no interleaving, or pp = 2"),
        (setup(6, 3, 2, Some(2), Some(2)), "a group is at least as long as the pipeline; nearest: 3"),
        (setup(4, 3, 2, Some(2), Some(5)), "nearest: a group of 4, or microbatches = 5"),
        (setup(2, 3, 2, Some(2), None), "nearest: microbatches = 3"),
        (setup(9, 3, 0, Some(2), Some(4)), "nearest: microbatches = 8 or 11"),
        (overlap(setup(4, 2, 0, None, None)), "nearest: 2 chunks a stage, or no expert overlap"),
    ];
    for (setup, nearest) in cases {
        let [violation] = &broken(setup)[..] else { panic!("one rule: {setup:?}") };
        assert!(violation.to_string().ends_with(nearest), "{violation}");
    }
}

#[test]
fn all_broken_rules_are_told_at_once() {
    let two = broken(setup(0, 1, 0, Some(1), Some(9)));
    let expected = [
        ScheduleViolation::NoMicrobatches,
        ScheduleViolation::TooFewChunks { chunks: 1 },
        ScheduleViolation::InterleavedAlone { chunks: 1 },
    ];
    assert_eq!(two, expected);
    let told = setup(0, 1, 0, Some(1), Some(9)).check().unwrap_err().to_string();
    assert!(told.starts_with("(1) microbatches = 0") && told.contains("; (3) interleaved"), "{told}");
}

proptest! {
    #[test]
    fn the_numbers_of_microbatches_that_an_error_names_keep_the_rules(
        microbatches in 1u32..60, pp in 2u32..8, vpp in 2u32..5, group in 1u32..12,
    ) {
        let asked = setup(microbatches, pp, 0, Some(vpp), Some(group));
        let Err(violations) = asked.check() else { return Ok(()) };
        let text = violations.to_string();
        let (_, nearest) = text.rsplit_once("nearest: ").unwrap();
        let numbers: Vec<u32> = nearest.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect();
        prop_assert!(!numbers.is_empty());
        let keeps = |setup: PipelineSetup| setup.check().is_ok();
        let ok = match violations.list() {
            // One rule at a time: the group may then be longer than the step.
            [ScheduleViolation::GroupBelowStages { .. }] => numbers == [pp],
            [ScheduleViolation::GroupAboveMicrobatches { .. }] if nearest.starts_with("a group") => {
                keeps(PipelineSetup { interleaving: setup(1, pp, 0, Some(vpp), Some(numbers[0])).interleaving, ..asked })
                    && keeps(PipelineSetup { microbatches: numbers[1], ..asked })
            }
            _ => numbers.iter().all(|&microbatches| keeps(PipelineSetup { microbatches, ..asked })),
        };
        prop_assert!(ok, "{text}");
    }
}

#[test]
fn a_stage_lies_inside_its_pipeline() {
    assert_eq!(PipelinePlace::new(4, GroupRank(3)).unwrap().stages_after(), 0);
    for (size, index) in [(4, GroupRank(4)), (0, GroupRank(0))] {
        assert_eq!(PipelinePlace::new(size, index), Err(ScheduleError::OutsidePipeline { size, index }));
    }
}

fn step(chunk: u32, microbatch: u32, direction: Direction) -> Step {
    Step { chunk: ChunkIndex(chunk), microbatch: MicrobatchIndex(microbatch), direction }
}

#[test]
fn a_schedule_of_ones_own_runs_everything_once_and_in_its_turn() {
    use Direction::{Backward, BackwardInput, BackwardWeight, Forward};
    let out_of_turn = |steps: &[(u32, u32, Direction)], at: usize, after: WhereStopped| {
        let steps: Vec<Step> = steps.iter().map(|&(c, mb, direction)| step(c, mb, direction)).collect();
        let wanted = ScheduleError::OutOfTurn { at, step: steps[at], after };
        assert_eq!(Schedule::new(steps), Err(wanted));
    };
    out_of_turn(&[(0, 0, Backward)], 0, WhereStopped::Nothing);
    out_of_turn(&[(0, 0, Forward), (0, 0, Forward)], 1, WhereStopped::Forward);
    out_of_turn(&[(0, 0, Forward), (0, 0, BackwardWeight)], 1, WhereStopped::Forward);
    out_of_turn(&[(0, 0, Forward), (0, 0, BackwardInput), (0, 0, Backward)], 2, WhereStopped::BackwardInput);
    out_of_turn(&[(0, 0, Forward), (0, 0, Backward), (0, 0, Backward)], 2, WhereStopped::Backward);
    let zero_bubble =
        [(1, 0, Forward), (0, 0, Forward), (1, 0, BackwardInput), (0, 0, Backward), (1, 0, BackwardWeight)];
    let schedule = Schedule::new(zero_bubble.map(|(c, mb, d)| step(c, mb, d)).to_vec()).unwrap();
    assert_eq!(schedule.order().to_string(), "[2,1,-2,-1,-2.5]");
    assert!(!schedule.is_forward_only());
}

#[test]
fn a_schedule_leaves_out_no_number_and_no_backward() {
    use Direction::{Backward, BackwardInput, Forward};
    let new = |steps: &[(u32, u32, Direction)]| Schedule::new(steps.iter().map(|&(c, mb, d)| step(c, mb, d)).collect());
    let unfinished = |microbatch, after| {
        let (chunk, microbatch) = (ChunkIndex(0), MicrobatchIndex(microbatch));
        Err(ScheduleError::Unfinished { chunk, microbatch, after })
    };
    assert_eq!(new(&[(0, 0, Forward), (0, 1, Forward), (0, 0, Backward)]), unfinished(1, WhereStopped::Forward));
    assert_eq!(new(&[(0, 0, Forward), (0, 0, BackwardInput)]), unfinished(0, WhereStopped::BackwardInput));
    let gap = |chunk, microbatch, later_chunk, later| {
        let (chunk, later_chunk) = (ChunkIndex(chunk), ChunkIndex(later_chunk));
        let (microbatch, later) = (MicrobatchIndex(microbatch), MicrobatchIndex(later));
        Err(ScheduleError::Gap { chunk, microbatch, later_chunk, later })
    };
    assert_eq!(new(&[(0, 1, Forward)]), gap(0, 0, 0, 1));
    assert_eq!(new(&[(0, 0, Forward), (0, 3, Forward)]), gap(0, 1, 0, 3));
    assert_eq!(new(&[(0, 0, Forward), (2, 0, Forward)]), gap(1, 0, 2, 0));
}

#[test]
fn scopes_above_a_chunk_take_one_stage_and_scopes_that_part_an_overlap_are_refused() {
    use GraphScope::{Chunk, Layer, Microbatch, None, Step};
    let matrix = [
        // Scope; one stage, two stages, one stage and overlap, two stages and overlap.
        (None, [true, true, true, true]),
        (Layer, [true, true, true, true]),
        (Chunk, [true, true, false, false]),
        (Microbatch, [true, false, false, false]),
        (Step, [true, false, true, false]),
    ];
    assert_eq!(matrix.map(|(scope, _)| scope), GraphScope::ALL);
    for (scope, allowed) in matrix {
        for (at, allowed) in allowed.into_iter().enumerate() {
            let overlap = [ExpertOverlap::Off, ExpertOverlap::On][at / 2];
            let base = if at % 2 == 0 {
                setup(4, 1, 0, Option::None, Option::None)
            } else {
                setup(4, 2, 1, Some(2), Option::None)
            };
            let setup = PipelineSetup { overlap, ..base };
            plan(setup); // the pipeline itself keeps the rules
            let checked = scope.check(&setup);
            assert_eq!(checked.is_ok(), allowed, "{scope} with {setup:?}: {checked:?}");
        }
    }
    let everything = PipelineSetup { overlap: ExpertOverlap::On, ..setup(4, 2, 1, Some(2), Option::None) };
    let told = Microbatch.check(&everything).unwrap_err();
    let both = [
        ScheduleViolation::ScopeAcrossStages { scope: Microbatch, pp: 2 },
        ScheduleViolation::ScopeAcrossOverlap { scope: Microbatch },
    ];
    assert_eq!(told.list(), both);
    assert!(told.list()[0].to_string().ends_with("nearest: 'chunk', or pp = 1"), "{told}");
    assert!(told.list()[1].to_string().ends_with("nearest: 'layer', or no expert overlap"), "{told}");
}

#[test]
fn scopes_are_written_as_they_are_read_and_other_words_are_refused() {
    for scope in GraphScope::ALL {
        assert_eq!(scope.to_string().parse(), Ok(scope));
    }
    for word in ["Layer", "full", "", "steps"] {
        let error = word.parse::<GraphScope>().unwrap_err();
        assert_eq!(error, ScheduleError::UnknownScope { text: word.into() });
        assert!(error.to_string().contains("'microbatch'"), "{error}");
    }
}

#[test]
fn warm_up_runs_fill_up_to_ten_a_layer_and_are_never_none() {
    // Steps before, microbatches of a step, captured microbatches; runs.
    let reference = [((3, 1, 1), 7), ((3, 4, 1), 1), ((0, 8, 8), 2), ((3, 16, 16), 1), ((1, 4, 4), 2), ((2, 3, 3), 2)];
    for ((steps, microbatches, captured), runs) in reference {
        let captured = NonZeroU32::new(captured).unwrap();
        assert_eq!(warm_up_iterations(steps, microbatches, captured), runs, "{steps} {microbatches} {captured}");
    }
    assert_eq!(warm_up_iterations(u32::MAX, u32::MAX, NonZeroU32::MAX), 1);
}

proptest! {
    #[test]
    fn with_its_warm_up_a_layer_has_run_ten_times_and_not_once_more_than_needed(
        steps in 0u32..12, microbatches in 1u32..12, captured in 1u32..12,
    ) {
        let runs = warm_up_iterations(steps, microbatches, NonZeroU32::new(captured).unwrap());
        let total = |runs: u32| steps * microbatches + runs * captured;
        prop_assert!(runs >= 1 && total(runs) >= 10);
        prop_assert!(runs == 1 || total(runs - 1) < 10);
    }
}

#[test]
fn a_part_captured_by_itself_runs_as_often_as_its_purpose_takes() {
    let runs = |purpose| [0, 1, 2, 5].map(|configured| local_warm_up(configured, purpose));
    assert_eq!(runs(LocalWarmUp::Plain), [0, 1, 2, 5]);
    assert_eq!(runs(LocalWarmUp::FindsRecompute), [1, 1, 2, 5]);
    assert_eq!(runs(LocalWarmUp::BuildsChain), [2, 2, 2, 5]);
}

#[test]
fn a_forward_only_setup_keeps_the_same_rules() {
    let setup = PipelineSetup { pass: PassKind::ForwardOnly, ..setup(3, 2, 0, Some(2), None) };
    assert_eq!(broken(setup), [ScheduleViolation::LastGroup { microbatches: 3, group: 2, rest: 1, pp: 2 }]);
}
