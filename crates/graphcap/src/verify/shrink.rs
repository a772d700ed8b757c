//! A smallest trace that still has a finding.
//!
//! Ranks go first, then halves, quarters, and so on down to single events, then nodes of launched graphs in the same way;
//! calls of one joint operation go together.
//! A smaller trace counts only if it has the finding and no other kind of finding than the whole one: so what orders the
//! operations that are left stays, and a wait does not go before what it orders. Source for the order of attempts:
//! A. Zeller, R. Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE TSE 28(2), 2002.

mod nodes; // graphs without some of their nodes

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use device::{Label, Note, Trace, TraceEvent, TraceNodeKind};

use super::{
    Finding, StaleReason, VerifyOptions,
    place::{Place, position},
    verify,
};
use crate::verify::TraceError;

/// See [`shrink`].
#[derive(Clone, Debug, PartialEq)]
pub struct Shrunk {
    /// The smaller trace. Positions and generations are those of the whole one; nodes of graphs are numbered anew.
    pub trace: Trace,
    /// The finding, as the smaller trace has it.
    pub finding: Finding,
    /// Events of the whole trace.
    pub events_before: usize,
}

/// Shrinks `trace` to what finding number `which` of its report needs, from 0.
///
/// # Errors
/// [`TraceError::NoSuchFinding`].
pub fn shrink(trace: &Trace, options: &VerifyOptions, which: usize) -> Result<Shrunk, TraceError> {
    let told = verify(trace, options);
    let findings = told.findings().len();
    let asked = which;
    let target = told.findings().get(which).ok_or(TraceError::NoSuchFinding { findings, asked })?;
    let all = VerifyOptions { limit: usize::MAX, ..options.clone() };
    let attempt = Attempt {
        target: kind_of(target),
        known: verify(trace, &all).findings().iter().map(kind_of).collect(),
        options: all,
    };
    let mut best = Trace { events: trace.events.iter().filter(|event| !is_plain(event)).cloned().collect() };
    let ranks: BTreeSet<u32> = best.events.iter().map(rank_of).collect();
    for rank in ranks {
        if let Some(less) = without_rank(&best, rank).filter(|less| attempt.has(less).is_some()) {
            best = less;
        }
    }
    // Without a node, some event outside may say nothing any more.
    loop {
        let size = size_of(&best);
        best = fewest(best, &attempt, units, without);
        best = fewest(best, &attempt, nodes::units, nodes::without);
        if size_of(&best) == size {
            break;
        }
    }
    let finding = attempt.has(&best).unwrap_or_else(|| target.clone());
    Ok(Shrunk { trace: best, finding, events_before: trace.events.len() })
}

/// What decides about a smaller trace.
struct Attempt {
    target: String,
    known: BTreeSet<String>,
    options: VerifyOptions,
}

impl Attempt {
    /// The finding, if it is there and nothing new is.
    fn has(&self, trace: &Trace) -> Option<Finding> {
        let report = verify(trace, &self.options);
        let kinds: Vec<String> = report.findings().iter().map(kind_of).collect();
        if kinds.iter().any(|kind| !self.known.contains(kind)) {
            return None;
        }
        let at = kinds.iter().position(|kind| *kind == self.target)?;
        Some(report.findings()[at].clone())
    }
}

/// What makes two findings the same mistake: not where on a stream, in which step or on which rank.
fn kind_of(finding: &Finding) -> String {
    let short = |place: &Place| format!("{}@{}", place.name, place.site);
    match finding {
        Finding::Race(race) => {
            let (a, b) = (short(&race.first), short(&race.second));
            format!("race {a} {b} {} {:?} {:?}", race.buffer, race.modes, race.dropped)
        }
        Finding::Stale(stale) => {
            let reason = match &stale.reason {
                StaleReason::NotIssued { .. } => "not issued".to_owned(),
                StaleReason::NotThere { writer, .. } => writer.as_ref().map_or(String::new(), |writer| short(writer)),
            };
            format!("stale {} {} {reason}", stale.param, stale.publisher)
        }
        Finding::PublishedTwice { publisher, .. } => format!("twice {publisher}"),
        Finding::ReducedEarly { bucket, param, .. } => format!("early {bucket} {param}"),
        Finding::ForbiddenInGraph { act, graph, at, .. } => format!("forbidden {act} {graph} {}", short(at)),
        Finding::ForeignWait { why, event, .. } => format!("foreign {why} {event}"),
        Finding::Disagree { group, .. } => format!("disagree {group}"),
        Finding::Missing { group, .. } => format!("missing {group}"),
        Finding::Circle(_) => "circle".to_owned(),
        Finding::CallOrder(_) => "call order".to_owned(),
    }
}

/// Says nothing about order.
fn is_plain(event: &TraceEvent) -> bool {
    matches!(event, TraceEvent::Ran { .. } | TraceEvent::Note { note: Note::Released { .. }, .. })
}

fn rank_of(event: &TraceEvent) -> u32 {
    match event {
        TraceEvent::HostWait { rank, .. } | TraceEvent::Note { rank, .. } => *rank,
        other => position(other).map_or(0, |(rank, ..)| rank),
    }
}

/// Events, and nodes of launches.
fn size_of(trace: &Trace) -> usize {
    let size = |event: &TraceEvent| match event {
        TraceEvent::Launch { graph, .. } => 1 + graph.nodes.len(),
        _ => 1,
    };
    trace.events.iter().map(size).sum()
}

/// Smaller and smaller pieces are taken away, as long as any can be.
fn fewest<U: Ord + Copy>(
    mut best: Trace,
    attempt: &Attempt,
    units: impl Fn(&Trace) -> Vec<Vec<U>>,
    without: impl Fn(&Trace, &BTreeSet<U>) -> Option<Trace>,
) -> Trace {
    let mut size = units(&best).len().div_ceil(2).max(1);
    loop {
        let mut less = false;
        let mut from = 0;
        loop {
            let units = units(&best);
            if from >= units.len() {
                break;
            }
            let gone: BTreeSet<U> = units[from..units.len().min(from + size)].iter().flatten().copied().collect();
            match without(&best, &gone).filter(|less| attempt.has(less).is_some()) {
                Some(smaller) => (best, less) = (smaller, true),
                None => from += size,
            }
        }
        if size == 1 && !less {
            return best;
        }
        size = if less { size.min(units(&best).len().max(1)) } else { size / 2 }.max(1);
    }
}

/// Events that go together, by place: calls of one joint operation, and launches that meet in one. Last first, because
/// waits come behind what they wait for.
fn units(trace: &Trace) -> Vec<Vec<usize>> {
    let mut units: BTreeMap<(Label, u64), Vec<usize>> = BTreeMap::new();
    let mut single: Vec<Vec<usize>> = Vec::new();
    for (at, event) in trace.events.iter().enumerate() {
        match event {
            TraceEvent::Joint { group, group_seq, .. } => {
                units.entry((group.clone(), *group_seq)).or_default().push(at);
            }
            TraceEvent::Launch { groups, .. } if !groups.is_empty() => {
                units.entry((groups[0].group.clone(), groups[0].group_seq)).or_default().push(at);
            }
            _ => single.push(vec![at]),
        }
    }
    single.extend(units.into_values());
    single.sort_by_key(|unit| std::cmp::Reverse(unit[0]));
    single
}

/// `None` if what is left would wait for what is gone.
fn without(trace: &Trace, gone: &BTreeSet<usize>) -> Option<Trace> {
    let places: BTreeMap<(u32, u32, u64), usize> = (0..)
        .zip(&trace.events)
        .filter_map(|(at, event)| match event {
            TraceEvent::Record { .. } | TraceEvent::Launch { .. } => Some((position(event)?, at)),
            _ => None,
        })
        .collect();
    let is_gone =
        |rank: u32, on: &device::Position| places.get(&(rank, on.stream, on.seq)).is_some_and(|at| gone.contains(at));
    let left: Vec<&TraceEvent> =
        trace.events.iter().enumerate().filter(|(at, _)| !gone.contains(at)).map(|(_, event)| event).collect();
    let fits = left.iter().all(|event| match event {
        TraceEvent::Wait { rank, on, .. } => !is_gone(*rank, on),
        TraceEvent::Launch { rank, bound, .. } => {
            bound.iter().filter_map(|gate| gate.on).all(|on| !is_gone(*rank, &on))
        }
        _ => true,
    });
    fits.then(|| Trace { events: left.into_iter().cloned().collect() })
}

/// The other ranks alone, in groups without it. `None` where a graph gives it a part that only it can have.
fn without_rank(trace: &Trace, gone: u32) -> Option<Trace> {
    let mut events = Vec::new();
    for event in trace.events.iter().filter(|event| rank_of(event) != gone) {
        let mut event = event.clone();
        match &mut event {
            TraceEvent::Joint { members, what, .. } if members.contains(&gone) => match smaller(what, members, gone) {
                Some(asked) => (*what, *members) = (asked, fewer(members, gone)),
                None => continue,
            },
            TraceEvent::Launch { groups, graph, .. } if groups.iter().any(|g| g.members.contains(&gone)) => {
                let rooted = |what: &TraceNodeKind| matches!(what, TraceNodeKind::Joint { what, .. } if what.contains("root") || what.contains("send_recv"));
                if graph.nodes.iter().any(|node| rooted(&node.what)) {
                    return None;
                }
                groups.iter_mut().for_each(|group| group.members = fewer(&group.members, gone));
            }
            _ => {}
        }
        events.push(event);
    }
    Some(Trace { events })
}

fn fewer(members: &Arc<[u32]>, gone: u32) -> Arc<[u32]> {
    members.iter().copied().filter(|member| *member != gone).collect()
}

/// What is asked in a group without `gone`; `None` if nothing is left of the call.
fn smaller(what: &Label, members: &[u32], gone: u32) -> Option<Label> {
    if members.len() <= 1 || what.contains("send_recv") {
        return None;
    }
    let mut parts = Vec::new();
    for part in what.split(" + ") {
        let Some(rest) = part.strip_prefix("broadcast(root ") else {
            parts.push(part.to_owned());
            continue;
        };
        let (root, rest) = rest.split_once(')')?;
        let root = *members.get(root.parse::<usize>().ok()?)?;
        let place = members.iter().filter(|member| **member != gone).position(|member| *member == root)?;
        parts.push(format!("broadcast(root {place}){rest}"));
    }
    Some(parts.join(" + ").into())
}
