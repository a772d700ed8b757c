//! What simulated orders show by chance, the verifier proves from one trace: with every synchronisation there is
//! nothing to object to, and each one that is missing is noticed.

use ddp::why;
use device::{Machine, Trace};
use graphcap::verify::{Finding, Report, StaleReason, VerifyOptions, verify};
use pgroups::Turn;

use crate::{
    mutation::{LeftOut, Mutation, Program, RECORDS, leave_out, needs, nothing, run},
    support::{cpu, sim},
};

fn traced(program: Program, machine: &Machine, mutate: Mutation<'_>) -> Trace {
    machine.trace_start();
    run(program, machine, mutate).unwrap();
    machine.trace_stop()
}

fn checked(program: Program, machine: &Machine, mutate: Mutation<'_>) -> Report {
    verify(&traced(program, machine, mutate), &VerifyOptions::default())
}

#[test]
fn with_every_synchronisation_there_is_nothing_to_object_to() {
    for program in [Program::Checked, Program::Unchecked, Program::Tokens] {
        for machine in [sim(0), sim(1), cpu()] {
            let report = checked(program, &machine, &nothing);
            assert!(report.is_clean(), "{program:?} on {}: {report}", machine.driver());
            assert!(report.operations() > 300, "{report}");
        }
    }
}

#[test]
fn every_missing_wait_is_noticed_by_name() {
    for why in why::ALL.into_iter().chain([Turn::READ_AFTER_PUBLISH]) {
        let machine = sim(0);
        machine.drop_waits(why);
        let report = checked(needs(why), &machine, &nothing);
        let named =
            |finding: &Finding| matches!(finding, Finding::Race(race) if race.dropped.iter().any(|d| *d == *why.0));
        assert!(report.findings().iter().any(named), "without {why}: {report}");
    }
}

#[test]
fn every_missing_record_is_noticed() {
    for (record, program) in RECORDS {
        let report = checked(program, &sim(0), &|one| one.ddp.omit(record));
        assert!(!report.is_clean(), "without {record:?}: {report}");
    }
}

#[test]
fn a_missing_release_is_noticed() {
    let report = checked(Program::Checked, &sim(0), &|one| leave_out(one, LeftOut::Release));
    assert!(!report.is_clean(), "{report}");
}

#[test]
fn a_finding_names_step_microbatch_and_both_operations() {
    let machine = sim(0);
    machine.drop_waits(Turn::READ_AFTER_PUBLISH);
    let report = checked(Program::Checked, &machine, &nothing);
    let text = report.findings()[0].to_string();
    for part in
        ["adamw", "log", "rank ", "step 1, microbatch 1", "updates", "reads", "pgroups.read_after_publish", "bytes "]
    {
        assert!(text.contains(part), "no '{part}' in\n{text}");
    }
}

#[test]
fn a_publisher_that_lies_about_its_epochs_is_contradicted_by_the_trace() {
    let report = checked(Program::Checked, &sim(0), &|one| leave_out(one, LeftOut::IssueAndEpochs));
    let stale = report.findings().iter().any(|finding| match finding {
        Finding::Stale(stale) => matches!(stale.reason, StaleReason::NotIssued { written: 2, issued: 1 }),
        _ => false,
    });
    assert!(stale, "{report}");
}
