//! Whether anything orders two operations of a trace: asked of the verifier, by letting both write the same memory.

use std::sync::Arc;

use device::{MemoryKind, Mode, Region, Trace, TraceAccess, TraceEvent, TraceNodeKind};
use graphcap::verify::{Finding, VerifyOptions, verify};

/// An operation: event of the trace, and node if it is in a launch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct At {
    pub(crate) event: usize,
    pub(crate) node: Option<usize>,
}

/// Memory that no program has.
const PLANTED: u32 = 1_000_000;

pub(crate) fn are_unordered(trace: &Trace, pair: [At; 2]) -> bool {
    let mut planted = trace.clone();
    for at in pair {
        let rank = match &trace.events[at.event] {
            TraceEvent::Op { rank, .. } | TraceEvent::Joint { rank, .. } | TraceEvent::Launch { rank, .. } => *rank,
            other => panic!("no operation: {other}"),
        };
        let (label, kind, region) = ("planted".into(), MemoryKind::Other, Region::contiguous(0, 4));
        let access = TraceAccess { rank, allocation: PLANTED, label, kind, region, mode: Mode::Write };
        match (&mut planted.events[at.event], at.node) {
            (TraceEvent::Op { accesses, .. } | TraceEvent::Joint { accesses, .. }, None) => accesses.push(access),
            (TraceEvent::Launch { graph, .. }, Some(node)) => match &mut Arc::make_mut(graph).nodes[node].what {
                TraceNodeKind::Op { accesses, .. } | TraceNodeKind::Joint { accesses, .. } => accesses.push(access),
                other => panic!("no operation: {other:?}"),
            },
            (other, node) => panic!("no operation {node:?} of {other}"),
        }
    }
    let report = verify(&planted, &VerifyOptions { limit: 1_000, ..VerifyOptions::default() });
    let is_planted = |finding: &Finding| matches!(finding, Finding::Race(race) if race.allocation == PLANTED);
    report.findings().iter().any(is_planted)
}
