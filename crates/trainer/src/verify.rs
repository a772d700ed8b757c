//! Steps of a configuration, or a trace of some, proved free of races.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    fs::File,
    io::BufReader,
    path::{Path, PathBuf},
};

use device::{Label, Machine, Trace, TraceEvent, TraceNodeKind, WaitOutcome};
use graphcap::verify::{Picture, Report, VerifyOptions, file, shrink, verify};

use crate::{Config, TrainError, VerifyArgs, VerifyOn, trace_steps};

/// Steps: one as it is, one behind a first capture, one more behind an evaluation.
const STEPS: u64 = 3;

/// Microbatches of each.
const MICROBATCHES: u64 = 2;

/// What there is to say.
pub(crate) struct Verified {
    pub(crate) is_clean: bool,
    pub(crate) text: String,
    /// To be written, with what they hold.
    pub(crate) files: Vec<(PathBuf, String)>,
}

/// Runs three steps of two microbatches, the host ahead of the device, with an evaluation behind the second one, and
/// checks the trace; on `sim` as often as there are seeds, up to the first that has findings.
pub(crate) fn verify_run(config: &Config, args: &VerifyArgs) -> Result<Verified, TrainError> {
    let mut config = config.clone();
    let per_step = config.train.micro_batch * config.layout.data_ranks() * MICROBATCHES;
    config.train.global_batch = per_step;
    (config.train.eval_interval, config.train.eval_samples) = (STEPS - 1, per_step);
    let seeds: Vec<Option<u64>> = match args.on() {
        VerifyOn::Dry if args.seeds.is_some() || args.seed.is_some() => return Err(TrainError::SeedsOnDry),
        VerifyOn::Dry => vec![None],
        VerifyOn::Sim => args.seeds().map(Some).collect(),
    };
    let mut text = String::new();
    let mut last = None;
    let mut dropped = BTreeMap::new();
    for seed in seeds {
        let (on, machine) = match seed {
            None => ("dry".to_owned(), Machine::dry()),
            Some(seed) => (format!("sim, seed {seed}"), Machine::sim(seed)),
        };
        args.drop.iter().for_each(|wait| machine.drop_waits(wait.clone()));
        let trace = trace_steps(&config, &machine, STEPS)?;
        for wait in &args.drop {
            *dropped.entry(wait).or_insert(0) += times_dropped(&trace, wait);
        }
        let report = verify(&trace, &VerifyOptions::default());
        let steps = format!("{STEPS} steps of {MICROBATCHES} microbatches, an evaluation behind the second ({on})");
        line(&mut text, &format!("{steps}\n{report}"));
        let is_clean = report.is_clean();
        if let (false, Some(seed)) = (is_clean, seed) {
            line(&mut text, &format!("this order again: {}", again(args, seed)));
        }
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
        let covered = match (report.is_clean(), times) {
            (false, _) => "",
            (true, 1) => ": it is covered by others here",
            (true, _) => ": each is covered by others here",
        };
        let waits = if times == 1 { "1 wait".to_owned() } else { format!("{times} waits") };
        let were = if times == 1 { "was" } else { "were" };
        line(&mut text, &format!("{waits} named '{wait}' {were} dropped{covered}"));
    }
    told(trace, report, text, args)
}

/// Checks a trace that was written.
pub(crate) fn verify_file(path: &Path, args: &VerifyArgs) -> Result<Verified, TrainError> {
    let opened = File::open(path).map_err(|source| TrainError::OpenTrace { path: path.to_owned(), source })?;
    let trace = file::read(BufReader::new(opened));
    let trace = trace.map_err(|source| TrainError::Trace { path: path.to_owned(), source })?;
    let report = verify(&trace, &VerifyOptions::default());
    let text = format!("trace '{}'\n{report}\n", path.display());
    told(trace, report, text, args)
}

/// With the files that are asked for.
fn told(trace: Trace, report: Report, mut text: String, args: &VerifyArgs) -> Result<Verified, TrainError> {
    let mut files = Vec::new();
    if let Some(path) = &args.trace {
        files.push((path.clone(), written(&trace)));
    }
    match (&args.picture, report.findings().first()) {
        (Some(path), Some(finding)) => files.push((path.clone(), Picture::new(&trace, finding).to_svg())),
        (Some(_), None) => line(&mut text, "no picture: there is nothing to draw"),
        (None, _) => {}
    }
    match &args.shrunk {
        Some(path) if !report.is_clean() => {
            let shrunk = shrink(&trace, &VerifyOptions::default(), 0);
            let shrunk = shrunk.map_err(|source| TrainError::Trace { path: path.clone(), source })?;
            let (before, after) = (shrunk.events_before, shrunk.trace.events.len());
            line(&mut text, &format!("{after} of {before} events have the first finding: '{}'", path.display()));
            files.push((path.clone(), written(&shrunk.trace)));
        }
        Some(_) => line(&mut text, "no smaller trace: there is no finding to keep"),
        None => {}
    }
    Ok(Verified { is_clean: report.is_clean(), text, files })
}

/// The command that runs one order of these steps.
fn again(args: &VerifyArgs, seed: u64) -> String {
    let mut words = vec!["trainer".to_owned(), "verify".to_owned()];
    words.extend(args.config.iter().map(|path| quoted(&path.to_string_lossy())));
    words.extend(args.set.iter().flat_map(|set| ["--set".to_owned(), quoted(set)]));
    words.extend(args.drop.iter().flat_map(|wait| ["--drop".to_owned(), quoted(wait)]));
    words.extend(["--seed".to_owned(), seed.to_string()]);
    words.join(" ")
}

/// As a shell takes it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn line(text: &mut String, line: &str) {
    writeln!(text, "{line}").expect("BUG: writing to a string");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_as_a_shell_needs_it() {
        let words = ["a/b.toml", "optimizer.lr=1e-3", "data.path=a b", "x='1'", ""];
        let want = ["a/b.toml", "optimizer.lr=1e-3", "'data.path=a b'", r"'x='\''1'\'''", "''"];
        assert_eq!(words.map(quoted), want);
    }
}
