//! Proves of a trace that every order its machine may choose gives the same result, or says what is missing.
//!
//! Given that declared accesses are true, the verifier shows that accesses that conflict are ordered, that reads see the
//! newest published value, that no memory has a new tenant while the old one may still read it, that gradients are
//! complete when they are reduced, that nothing which happens once a step is in a graph that runs more often, and that
//! members of groups neither disagree nor wait for each other in circles.
//!
//! *Happens before* is: the order of a stream; a wait, behind the very record that it was bound to; the edges inside a
//! launched graph, whose launch is one item of its stream; what the host has waited for, before all that its rank
//! submits later. A joint operation orders data: what precedes the call of a source comes before the end of each member
//! that receives from it, and no member's end comes before another's. One executable never overlaps itself.

mod cells; //    who has touched which memory last
mod checks; //   what is checked while a program runs
mod clock; //    vector clocks
mod error; //    what can go wrong with a trace

pub mod file; //    traces as text
mod finding; //  what there is to say
mod hashing; //  a fast map
mod joint; //    calls of joint operations, matched over ranks
mod locks; //    what never ends, and what might lock up

mod mutation; // synchronisations taken away one by one
mod notes; //    what hosts said
mod order; //    runs a program

mod picture; //  findings drawn
mod place; //    names for places in a trace
mod program; //  a trace as a program
mod seeds; //    many orders of a program
mod shape; //    a graph as chains
mod shrink; //   a smallest failing case

use std::fmt;

use device::Trace;

use self::{checks::Checks, notes::Ledger, order::Run, place::Places, program::Program};
pub use self::{
    error::TraceError,
    finding::{Blocking, Finding, Hazard, Member, Race, Stale, StaleReason},
    mutation::{Mutant, Noticed, Score, mutate},
    picture::Picture,
    place::{Place, When},
    seeds::{OtherResult, other_result},
    shrink::{Shrunk, shrink},
};

/// How much of a program a trace holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Window {
    /// All of it: a call that some members never make is a mistake.
    #[default]
    Whole,
    /// It may end in the middle.
    Piece,
}

/// Whether ranks have to submit the calls of all groups in one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CallOrder {
    /// Yes: devices that run a few things at a time lock up otherwise.
    #[default]
    Same,
    /// Only within each group.
    Free,
}

/// What to check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyOptions {
    /// How much of a program the trace holds.
    pub window: Window,
    /// Whether ranks have to submit the calls of all groups in one order.
    pub call_order: CallOrder,
    /// So many findings are told; those of equal operations at equal places in the model count once.
    pub limit: usize,
}

impl Default for VerifyOptions {
    /// The whole program, one order of calls, at most 20 findings.
    fn default() -> Self {
        VerifyOptions { window: Window::Whole, call_order: CallOrder::Same, limit: 20 }
    }
}

/// The verdict on a trace.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Report {
    findings: Vec<Finding>,
    repeats: u64,
    operations: u64,
    ranks: usize,
}

impl Report {
    /// What was found, kind by kind, the worst first; at most [`VerifyOptions::limit`].
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Nothing was found.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }

    /// Findings like one that is told, or past the limit.
    pub fn repeats(&self) -> u64 {
        self.repeats
    }

    /// Operations and members' calls that were looked at.
    pub fn operations(&self) -> u64 {
        self.operations
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { findings, repeats, operations, ranks } = self;
        let mut number = 0;
        for kind in findings.chunk_by(|a, b| a.kind() == b.kind()) {
            writeln!(f, "{}: {}", kind[0].kind(), counted(kind.len() as u64, "finding"))?;
            for finding in kind {
                number += 1;
                writeln!(f, "{number}. {finding}")?;
            }
        }
        let (operations, ranks) = (counted(*operations, "operation"), counted(*ranks as u64, "rank"));
        write!(f, "{operations} on {ranks}: ")?;
        match (findings.len(), repeats) {
            (0, _) => f.write_str("nothing to object to"),
            (found, 0) => f.write_str(&counted(found as u64, "finding")),
            (found, repeats) => write!(f, "{}, and {repeats} more like them", counted(found as u64, "finding")),
        }
    }
}

/// Brings findings of one kind together; the kind whose first one came first leads.
fn group(findings: &mut [Finding]) {
    let mut kinds: Vec<String> = Vec::new();
    for kind in findings.iter().map(Finding::kind) {
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    findings.sort_by_cached_key(|finding| kinds.iter().position(|kind| *kind == finding.kind()));
}

/// `1 rank`, `2 ranks`.
fn counted(count: u64, what: &str) -> String {
    let ending = if count == 1 { "" } else { "s" };
    format!("{count} {what}{ending}")
}

/// Checks a trace. Takes about as long as sorting it would: clocks are compared for each access, and joined where
/// streams meet.
pub fn verify(trace: &Trace, options: &VerifyOptions) -> Report {
    let program = Program::new(trace);
    let places = Places::new(trace);
    let ledger = Ledger::new(trace, &places);
    let checks = Checks::new(&program, &ledger.reads, options.limit);
    let mut run = Run::new(&program, checks);
    run.run();
    let mut findings = locks::of(&run, &places, options);
    let operations = run.visitor.operations();
    let (races, stale, repeats) = run.visitor.take();
    findings.extend(checks::explain(races, &program, &places));
    findings.extend(stale.into_iter().map(|found| found.told(&places)));
    findings.extend(ledger.findings);
    group(&mut findings);
    let kept = findings.len().min(options.limit);
    let repeats = repeats + ledger.repeats + (findings.len() - kept) as u64;
    findings.truncate(kept);
    Report { findings, repeats, operations, ranks: program.hosts.len() }
}
