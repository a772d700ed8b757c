//! What keeps gathers behind publications, taken away: the simulator shows stale values, the verifier says so of every
//! order.

use device::{Machine, Trace};
use graphcap::{
    GateMode, Scope,
    verify::{Finding, Report, VerifyOptions, verify},
};
use pgroups::{PgError, Turn, local};

use super::{
    program::Program,
    support::{Caught, MODES, sim},
    worker::Worker,
};
use crate::captured::left_out::{LeftOut, leave_out_of};

/// What every rank has, and the trace, of a few steps; `change` happens to each rank before the first.
fn run(
    program: &Program,
    machine: &Machine,
    change: impl Fn(&Worker) + Sync,
) -> Result<(Vec<Vec<u32>>, Trace), PgError> {
    machine.trace_start();
    let ran = local(machine, program.world(), |rank| -> Result<_, Caught> {
        let mut worker = Worker::prepared(&rank, program, "m")?;
        change(&worker);
        (1..4).try_for_each(|step| worker.step(step))?;
        worker.finish()
    });
    let trace = machine.trace_stop();
    Ok((ran?, trace))
}

fn checked(trace: &Trace) -> Report {
    verify(trace, &VerifyOptions { limit: 1_000, ..VerifyOptions::default() })
}

/// Eagerly, and from graphs of layers, whose replays read one layer ahead.
fn programs() -> Vec<Program> {
    let eager = Program { microbatches: 1, ..Program::on(1, 2, 2) };
    let graphs = MODES.map(|gates| eager.clone().captured(Scope::Layer, gates));
    [eager].into_iter().chain(graphs).collect()
}

const SEEDS: u64 = 12;

#[test]
fn a_gather_that_is_not_ordered_behind_the_publication_reads_old_values() {
    for program in programs() {
        let (want, whole) = run(&program, &sim(0), |_| ()).unwrap();
        assert!(checked(&whole).is_clean());
        let mut stale = 0;
        for seed in 0..SEEDS {
            let machine = sim(seed);
            machine.drop_waits(Turn::READ_AFTER_PUBLISH);
            let (got, trace) = run(&program, &machine, |_| ()).unwrap();
            stale += usize::from(got != want);
            // A gather of shards that reads beside the gather that publishes them.
            let named = |finding: &Finding| match finding {
                Finding::Race(race) => race.dropped.iter().any(|dropped| *dropped == *Turn::READ_AFTER_PUBLISH.0),
                _ => false,
            };
            let report = checked(&trace);
            assert!(report.findings().iter().any(named), "{:?}, seed {seed}: {report}", program.graphs);
        }
        assert!(stale > 0, "{:?}: no order of {SEEDS} shows it", program.graphs);
    }
}

#[test]
fn a_gather_whose_publication_nobody_has_started_reads_old_values() {
    for program in programs() {
        let (want, _) = run(&program, &sim(0), |_| ()).unwrap();
        for seed in 0..SEEDS / 2 {
            // Publishers that start nothing, and whoever asks is told that they have.
            let lie = |worker: &Worker| leave_out_of(worker.buffers.params(), LeftOut::IssueAndEpochs);
            let (got, trace) = run(&program, &sim(seed), lie).unwrap();
            assert!(got != want, "{:?}, seed {seed}", program.graphs);
            let report = checked(&trace);
            let told = report.findings().iter().any(|finding| matches!(finding, Finding::Stale(_)));
            assert!(told, "{:?}, seed {seed}: {report}", program.graphs);
            // Honest about it, they are refused: never silent.
            let honest = |worker: &Worker| leave_out_of(worker.buffers.params(), LeftOut::Issue);
            let refused = run(&program, &sim(seed), honest).unwrap_err();
            assert!(format!("{refused:?}").contains("Stale"), "{refused:?}");
        }
    }
}

#[test]
fn a_replay_in_a_graph_gate_mode_waits_where_it_reads_and_not_before() {
    // The last block's weights are published while the first one computes: in-graph leaves that open, the other does not.
    let launches = |gates: GateMode| {
        let program = Program { microbatches: 1, ..Program::on(1, 2, 2) }.captured(Scope::Microbatch, gates);
        let (_, trace) = run(&program, &sim(1), |_| ()).unwrap();
        let eager = |event: &device::TraceEvent| match event {
            device::TraceEvent::Wait { why, .. } => why.as_str() == Turn::READ_AFTER_PUBLISH.0,
            _ => false,
        };
        trace.events.iter().filter(|event| eager(event)).count()
    };
    assert!(launches(GateMode::BeforeReplay) > launches(GateMode::InGraph));
}
