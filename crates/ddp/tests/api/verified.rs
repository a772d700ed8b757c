//! What simulated orders show by chance, the verifier proves from one trace: with every synchronisation there is
//! nothing to object to, and each one that is missing is noticed.

use std::collections::BTreeSet;

use ddp::{Ddp, OptimizerConfig, Record, why};
use device::{Access, Machine, Trace, TraceAccess, View};
use graphcap::verify::{Finding, Report, StaleReason, VerifyOptions, verify};
use pgroups::Turn;

use crate::{
    mutation::{LeftOut, Mutation, Program, RECORDS, leave_out, needs, nothing, run},
    support::{Caught, One, Setup, cpu, declared, sim},
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

/// One step of a model, and a forward read of all that it has written.
fn step_and_read(one: &One, optimizer: &mut ddp::Optimizer) -> Result<(), Caught> {
    one.microbatch(|one| (0..2).try_for_each(|i| one.contribute(i, 0.5 + one.rank as f32)))?;
    one.ddp.finish_grads()?;
    optimizer.step(&one.stream, &[0.1])?;
    (0..2).try_for_each(|i| one.read(i).map(drop))
}

/// The trace of two twins in turns, the second one changed by `mutate`, and which memory is the second one's.
fn twins(machine: &Machine, mutate: Mutation<'_>) -> (Trace, BTreeSet<(u32, u32)>) {
    let setup = Setup::new(2, declared(&[6, 10])).sharded();
    machine.trace_start();
    let memories = setup.run(machine, |one| {
        // Equal in everything: names, sizes, members, device.
        let other = setup.on(&one.handle)?;
        let mut optimizers = [one.optimizer(OptimizerConfig::default())?, other.optimizer(OptimizerConfig::default())?];
        one.device.synchronize()?;
        mutate(&other);
        // The first one is a step ahead, so that equal epochs of both come at different times.
        step_and_read(one, &mut optimizers[0])?;
        for _ in 0..2 {
            step_and_read(&other, &mut optimizers[1])?;
            step_and_read(one, &mut optimizers[0])?;
        }
        let memory = |view: &View| TraceAccess::from(&Access::read(view));
        let memories = other.ddp.buckets().map(|bucket| memory(&bucket.values));
        Ok(memories.map(|access| (access.rank, access.allocation)).collect::<Vec<_>>())
    });
    (machine.trace_stop(), memories.unwrap().into_iter().flatten().collect())
}

#[test]
fn two_models_with_equal_names_and_members_are_told_apart() {
    for machine in [sim(0), sim(1), cpu()] {
        let (trace, _) = twins(&machine, &nothing);
        let report = verify(&trace, &VerifyOptions::default());
        assert!(report.is_clean(), "on {}: {report}", machine.driver());
    }
}

#[test]
fn what_one_of_two_equal_models_leaves_out_is_found_in_its_own_memory_only() {
    let seconds = BTreeSet::from([0, 1].map(|i| format!("ddp.published.p{i}@dp_cp[0]@0..2#1/ddp_gather")));
    let (trace, memory) = twins(&sim(0), &|other| other.ddp.omit(Record::Published));
    let report = verify(&trace, &VerifyOptions::default());
    assert!(!report.is_clean());
    for finding in report.findings() {
        match finding {
            Finding::Race(race) => assert!(memory.contains(&(race.first.rank, race.allocation)), "{finding}"),
            Finding::Stale(stale) => assert!(seconds.contains(stale.publisher.as_str()), "{finding}"),
            other => panic!("{other}"),
        }
    }

    let (trace, _) = twins(&sim(0), &|other| leave_out(other, LeftOut::IssueAndEpochs));
    let report = verify(&trace, &VerifyOptions::default());
    let publisher = |finding: &Finding| match finding {
        Finding::Stale(stale) => stale.publisher.to_string(),
        other => panic!("{other}"),
    };
    assert_eq!(report.findings().iter().map(publisher).collect::<BTreeSet<_>>(), seconds);
}

#[test]
fn a_model_that_is_wrapped_again_begins_its_epochs_anew() {
    let setup = Setup::new(2, declared(&[6, 10])).sharded();
    let machine = sim(0);
    machine.trace_start();
    let done = setup.run(&machine, |one| {
        for _ in 0..3 {
            let mut optimizer = one.optimizer(OptimizerConfig::default())?;
            step_and_read(one, &mut optimizer)?;
            one.ddp = Ddp::attach(&one.buffers, &one.groups, setup.ddp.clone(), &one.stream)?;
        }
        Ok(())
    });
    done.unwrap();
    let report = verify(&machine.trace_stop(), &VerifyOptions::default());
    assert!(report.is_clean(), "{report}");
}
