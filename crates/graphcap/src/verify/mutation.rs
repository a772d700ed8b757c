//! Synchronisations taken away one by one: the verifier has to notice each.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use device::{Label, Trace, TraceEvent, TraceNodeKind};

use super::{Finding, Report, VerifyOptions, verify};

/// What became of a program without a synchronisation.
#[derive(Clone, Debug, PartialEq)]
pub enum Noticed {
    /// The verifier objects; the first finding, preferably one that names the synchronisation.
    Found(Box<Finding>),
    /// The program itself refuses to go on.
    Refused(String),
    /// Nobody objects to its absence alone, because another one covers it; without both there is a finding.
    Covered {
        /// The other one.
        by: Label,
        /// Without both.
        without_both: Box<Finding>,
    },
    /// Nobody objects.
    Missed,
}

/// A program without one synchronisation.
#[derive(Clone, Debug, PartialEq)]
pub struct Mutant {
    /// What was taken away.
    pub why: Label,
    /// What became of it.
    pub noticed: Noticed,
}

/// How many of all were noticed.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// The program as it is.
    pub whole: Report,
    /// By name of the synchronisation.
    pub mutants: Vec<Mutant>,
}

impl Score {
    /// Mutants that somebody objects to.
    pub fn noticed(&self) -> usize {
        self.mutants.iter().filter(|mutant| mutant.noticed != Noticed::Missed).count()
    }

    /// The program as it is has no finding, and every mutant is noticed.
    pub fn is_full(&self) -> bool {
        self.whole.is_clean() && self.noticed() == self.mutants.len()
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.whole.is_clean() {
            writeln!(f, "with every synchronisation: {}", self.whole)?;
        }
        for Mutant { why, noticed } in &self.mutants {
            match noticed {
                Noticed::Found(_) => writeln!(f, "{why}: found")?,
                Noticed::Refused(error) => writeln!(f, "{why}: refused ({error})")?,
                Noticed::Covered { by, .. } => writeln!(f, "{why}: covered by {by}")?,
                Noticed::Missed => writeln!(f, "{why}: MISSED")?,
            }
        }
        write!(f, "noticed {} / {}", self.noticed(), self.mutants.len())
    }
}

/// Runs a program as it is, then once without each synchronisation that its trace names.
///
/// `run` makes a machine, takes away the waits it is given ([`Machine::drop_waits`](device::Machine::drop_waits)), runs
/// the program and returns its trace. `covered` excuses synchronisations by naming the one that covers each: then both
/// are taken away, and that must be noticed.
///
/// # Errors
/// The program's, as it is.
pub fn mutate<E: fmt::Display>(
    run: impl Fn(&[Label]) -> Result<Trace, E>,
    covered: &[(Label, Label)],
    options: &VerifyOptions,
) -> Result<Score, E> {
    let trace = run(&[])?;
    let covered: BTreeMap<&Label, &Label> = covered.iter().map(|(why, by)| (why, by)).collect();
    let found = |without: &[Label]| match run(without) {
        Err(error) => Noticed::Refused(error.to_string()),
        Ok(trace) => {
            let report = verify(&trace, options);
            let names =
                |finding: &&Finding| matches!(finding, Finding::Race(race) if race.dropped.contains(&without[0]));
            let finding = report.findings().iter().find(names).or(report.findings().first());
            finding.map_or(Noticed::Missed, |finding| Noticed::Found(Box::new(finding.clone())))
        }
    };
    let mutants = synchronisations(&trace).into_iter().map(|why| {
        let noticed = match (found(std::slice::from_ref(&why)), covered.get(&why)) {
            (Noticed::Missed, Some(&by)) => match found(&[why.clone(), by.clone()]) {
                Noticed::Found(without_both) => Noticed::Covered { by: by.clone(), without_both },
                other => other,
            },
            (noticed, _) => noticed,
        };
        Mutant { why, noticed }
    });
    Ok(Score { mutants: mutants.collect(), whole: verify(&trace, options) })
}

/// Names of all waits, those inside graphs among them.
pub(super) fn synchronisations(trace: &Trace) -> BTreeSet<Label> {
    let mut names = BTreeSet::new();
    for event in &trace.events {
        match event {
            TraceEvent::Wait { why, .. } => drop(names.insert(why.clone())),
            TraceEvent::Launch { graph, .. } => {
                for node in &graph.nodes {
                    names.extend(node.waits.iter().map(|wait| wait.why.clone()));
                    if let TraceNodeKind::Wait { why, .. } = &node.what {
                        names.insert(why.clone());
                    }
                }
            }
            _ => {}
        }
    }
    names
}
