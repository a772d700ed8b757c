//! Long failing traces and their smallest cases.

use std::collections::BTreeSet;

use device::{Mode, TraceEvent, WaitOutcome};
use graphcap::verify::{Finding, TraceError, VerifyOptions, shrink, verify};

use super::traces::{Script, access};

const RANKS: u32 = 8;
const WEIGHTS: u32 = 24;

/// Eight ranks gather weights and use them; one weight's wait is missing on one rank.
fn gathered(missing: (u32, u32)) -> Script {
    let mut script = Script::default();
    let members: Vec<u32> = (0..RANKS).rev().collect();
    for weight in 0..WEIGHTS {
        for rank in 0..RANKS {
            let [shard, whole] =
                [access(rank, 100 + weight, Mode::Read, 0..8), access(rank, weight, Mode::Write, 0..64)];
            script.op_named(rank, 0, "adamw", vec![access(rank, 100 + weight, Mode::Write, 0..8)]);
            script.joint(rank, 0, ("dp", &members), "all_gather of 2 f32", vec![shard, whole]);
            script.record(rank, 0, "published");
            let is_missing = (rank, weight) == missing;
            let outcome = if is_missing { WaitOutcome::Dropped } else { WaitOutcome::Enforced };
            script.wait(rank, 1, "published", "test.read_after_publish", outcome);
            script.op_named(rank, 1, "gemm", vec![access(rank, weight, Mode::Read, 0..64)]);
        }
    }
    script
}

#[test]
fn a_mistake_among_eight_ranks_and_many_weights_shrinks_to_one_of_each() {
    let options = VerifyOptions::default();
    let script = gathered((5, 17));
    assert!(verify(&gathered((RANKS, 0)).trace, &options).is_clean());
    let shrunk = shrink(&script.trace, &options, 0).unwrap();
    let Finding::Race(race) = &shrunk.finding else { panic!("{}", shrunk.finding) };
    assert_eq!((race.first.rank, race.allocation, race.dropped.len()), (5, 17, 1));
    assert_eq!(shrunk.events_before, script.trace.events.len());
    let text = shrunk.trace.to_text();
    assert!(shrunk.trace.events.len() <= 4, "{text}");
    let ranks: BTreeSet<&str> = text.lines().filter_map(|line| line.split([' ', '.']).nth(1)).collect();
    assert_eq!(ranks.into_iter().collect::<Vec<_>>(), ["5"]);
    // What is left says the same when it is checked again.
    assert_eq!(verify(&shrunk.trace, &options).findings(), [shrunk.finding]);
}

#[test]
fn a_smallest_case_keeps_what_orders_everything_else() {
    let mut script = Script::default();
    // The read is behind the first write, and not behind the second one.
    script.op_named(0, 0, "first", vec![access(0, 0, Mode::Write, 0..8)]);
    script.record(0, 0, "e");
    script.wait(0, 1, "e", "test.wait", WaitOutcome::Enforced);
    script.op_named(0, 1, "read", vec![access(0, 0, Mode::Read, 0..8)]);
    script.op_named(0, 0, "second", vec![access(0, 0, Mode::Write, 0..8)]);
    let shrunk = shrink(&script.trace, &VerifyOptions::default(), 0).unwrap();
    let names: Vec<String> = shrunk
        .trace
        .events
        .iter()
        .map(|event| match event {
            TraceEvent::Op { name, .. } => name.to_string(),
            other => other.to_string(),
        })
        .collect();
    assert_eq!(names, ["read", "second"]);
}

#[test]
fn calls_that_contradict_each_other_shrink_to_two_of_them() {
    let mut script = Script::default();
    for rank in 0..4u32 {
        for call in 0..10 {
            let swapped = rank == 2 && call == 6;
            for group in if swapped { ["b", "a"] } else { ["a", "b"] } {
                script.joint(rank, 0, (group, &[0, 1, 2, 3]), "barrier", vec![]);
            }
        }
    }
    let options = VerifyOptions::default();
    let report = verify(&script.trace, &options);
    let circle = report.findings().iter().position(|finding| matches!(finding, Finding::Circle(_))).unwrap();
    let shrunk = shrink(&script.trace, &options, circle).unwrap();
    assert_eq!(shrunk.trace.events.len(), 4, "{}", shrunk.trace.to_text());
    assert!(matches!(shrink(&script.trace, &options, 9), Err(TraceError::NoSuchFinding { asked: 9, .. })));
}
