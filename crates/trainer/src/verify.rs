//! Steps of a configuration, proved free of races.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
};

use device::{Label, Machine, Trace, TraceEvent, TraceNodeKind, WaitOutcome};
use graphcap::verify::{Picture, Report, VerifyOptions, file, verify};

use crate::{Config, TrainError, VerifyArgs, VerifyOn, trace_steps};

/// Steps: one as it is, one behind a first capture, one more behind an evaluation.
const STEPS: u64 = 3;

/// Microbatches of each.
const MICROBATCHES: u64 = 2;

/// What there is to say.
pub(crate) struct Verified {
    pub(crate) is_clean: bool,
    pub(crate) text: String,
    /// As a file, if it is asked for.
    pub(crate) trace: Option<String>,
    /// Of the first finding, if there is one.
    pub(crate) picture: Option<String>,
}

/// Runs three steps of two microbatches, the host ahead of the device, with an evaluation behind the second one, and
/// checks the trace; on `sim` as often as there are seeds, up to the first that has findings.
pub(crate) fn verify_run(config: &Config, args: &VerifyArgs) -> Result<Verified, TrainError> {
    let mut config = config.clone();
    let per_step = config.train.micro_batch * config.layout.data_ranks() * MICROBATCHES;
    config.train.global_batch = per_step;
    (config.train.eval_interval, config.train.eval_samples) = (STEPS - 1, per_step);
    let machines: Vec<(String, Machine)> = match args.on() {
        VerifyOn::Dry => vec![("dry".to_owned(), Machine::dry())],
        VerifyOn::Sim => {
            (0..args.seeds.unwrap_or(1)).map(|seed| (format!("sim, seed {seed}"), Machine::sim(seed))).collect()
        }
    };
    let mut text = String::new();
    let mut last = None;
    let mut dropped = BTreeMap::new();
    for (on, machine) in machines {
        args.drop.iter().for_each(|wait| machine.drop_waits(wait.clone()));
        let trace = trace_steps(&config, &machine, STEPS)?;
        for wait in &args.drop {
            *dropped.entry(wait).or_insert(0) += times_dropped(&trace, wait);
        }
        let report = verify(&trace, &VerifyOptions::default());
        let steps = format!("{STEPS} steps of {MICROBATCHES} microbatches, an evaluation behind the second ({on})");
        writeln!(text, "{steps}\n{report}").expect("BUG: writing to a string");
        let is_clean = report.is_clean();
        last = Some((trace, report));
        if !is_clean {
            break;
        }
    }
    let (trace, report) = last.expect("BUG: there is a machine to run on");
    for (wait, times) in dropped {
        if times == 0 {
            return Err(TrainError::NothingDropped { wait: wait.clone(), waits: waits(&trace) });
        }
        let covered = if report.is_clean() { ": each is covered by others here" } else { "" };
        writeln!(text, "{times} waits named '{wait}' were dropped{covered}").expect("BUG: writing to a string");
    }
    if report.is_clean() && args.picture.is_some() {
        text.push_str("no picture: there is nothing to draw\n");
    }
    Ok(Verified {
        is_clean: report.is_clean(),
        text,
        trace: args.trace.as_ref().map(|_| written(&trace)),
        picture: drawn(&trace, &report),
    })
}

/// Waits in a trace with what became of each: those of streams, of launched graphs, and inside them.
fn all_waits(trace: &Trace) -> impl Iterator<Item = (&Label, WaitOutcome)> {
    trace.events.iter().flat_map(|event| match event {
        TraceEvent::Wait { why, outcome, .. } => vec![(why, *outcome)],
        TraceEvent::Launch { graph, bound, .. } => {
            let gates = bound.iter().filter_map(|gate| match &graph.nodes[gate.node as usize].what {
                TraceNodeKind::Wait { why, .. } => Some((why, gate.outcome)),
                _ => None,
            });
            let inner = graph.nodes.iter().flat_map(|node| node.waits.iter().map(|wait| (&wait.why, wait.outcome)));
            gates.chain(inner).collect()
        }
        _ => Vec::new(),
    })
}

fn times_dropped(trace: &Trace, wait: &str) -> usize {
    all_waits(trace).filter(|(why, outcome)| why.as_str() == wait && *outcome == WaitOutcome::Dropped).count()
}

/// Names of all waits, each once.
fn waits(trace: &Trace) -> Vec<String> {
    let names: BTreeSet<&str> = all_waits(trace).map(|(why, _)| why.as_str()).collect();
    names.into_iter().map(str::to_owned).collect()
}

fn written(trace: &Trace) -> String {
    let mut bytes = Vec::new();
    file::write(trace, &mut bytes).expect("BUG: writing to memory");
    String::from_utf8(bytes).expect("BUG: a trace is text")
}

fn drawn(trace: &Trace, report: &Report) -> Option<String> {
    report.findings().first().map(|finding| Picture::new(trace, finding).to_svg())
}
