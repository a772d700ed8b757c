//! What the host of each rank said, in order: steps, epochs, publications, reductions.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    rc::Rc,
};

use device::{Label, Note, Trace, TraceAccess, TraceEvent, TraceNodeKind};

use super::{
    finding::{Finding, Stale, StaleReason},
    place::{OpAt, Places},
};

/// What a read must find: the state of its publisher when the host submitted it.
pub(super) struct Expected {
    /// The last write, and its place in the trace.
    pub(super) written: Option<Rc<Written>>,
    /// Place in the trace of the publication of that write.
    pub(super) issued: Option<u32>,
    /// Place in the trace of what came before that: what a newer write has behind it.
    pub(super) before: u32,
}

pub(super) struct Written {
    pub(super) epoch: u64,
    pub(super) event: u32,
    pub(super) regions: Vec<TraceAccess>,
}

/// All that notes alone decide.
#[derive(Default)]
pub(super) struct Ledger {
    /// By the note's place in the trace.
    pub(super) reads: HashMap<u32, Expected>,
    pub(super) findings: Vec<Finding>,
    /// Reads like one that was told.
    pub(super) repeats: u64,
    /// Publishers and parameters of reads that were told.
    told: BTreeSet<(Label, Label)>,
}

#[derive(Default)]
struct Publisher {
    written: Option<Rc<Written>>,
    /// Epoch and place in the trace.
    issued: Option<(u64, u32)>,
    /// The last write or publication before `written`.
    before: u32,
}

#[derive(Default)]
struct Host {
    publishers: BTreeMap<Label, Publisher>,
    microbatch: u64,
    /// Reductions of this step: bucket, place in the trace, gradients.
    reduced: Vec<(Label, u32, Vec<TraceAccess>)>,
    /// What was gathered last: parameter, write, place in the trace, memory.
    gathered: Vec<(Label, u64, u32, Vec<TraceAccess>)>,
}

impl Ledger {
    pub(super) fn new(trace: &Trace, places: &Places<'_>) -> Ledger {
        let mut ledger = Ledger::default();
        let mut hosts: BTreeMap<u32, Host> = BTreeMap::new();
        for (at, event) in (0..).zip(&trace.events) {
            if let TraceEvent::Note { rank, note, .. } = event {
                ledger.note(at, note, hosts.entry(*rank).or_default(), places);
            }
        }
        ledger.forbidden(trace, places);
        ledger
    }

    fn note(&mut self, at: u32, note: &Note, host: &mut Host, places: &Places<'_>) {
        match note {
            Note::Step(_) => {
                host.reduced.clear();
                host.microbatch = 0;
            }
            Note::Microbatch(number) => {
                if *number <= host.microbatch {
                    host.reduced.clear();
                }
                host.microbatch = *number;
            }
            Note::Written { publisher, epoch, regions } => {
                let publisher = host.publishers.entry(publisher.clone()).or_default();
                let last = publisher.written.as_ref().map_or(0, |written| written.event);
                publisher.before = publisher.issued.map_or(0, |(_, event)| event).max(last);
                publisher.written = Some(Rc::new(Written { epoch: *epoch, event: at, regions: regions.clone() }));
            }
            Note::Issued { publisher: name, epoch, .. } => {
                let publisher = host.publishers.entry(name.clone()).or_default();
                if let Some((_, first)) = publisher.issued.filter(|(issued, _)| issued == epoch) {
                    let [first, second] = [first, at].map(|event| places.note(event));
                    let publisher = name.clone();
                    self.findings.push(Finding::PublishedTwice { publisher, epoch: *epoch, first, second });
                }
                publisher.issued = Some((*epoch, at));
            }
            Note::Read { publisher: name, param, written, issued, .. } => {
                let publisher = host.publishers.entry(name.clone()).or_default();
                let newest = publisher.written.as_ref().map(|written| written.epoch);
                let done = publisher.issued.map(|(epoch, _)| epoch);
                let claimed = issued < written;
                if claimed || newest.is_some_and(|newest| done.is_none_or(|done| done < newest)) {
                    let newest = newest.filter(|_| !claimed).unwrap_or(*written);
                    // What was published before the trace is at most what the reader claims.
                    let done = done.filter(|_| !claimed).unwrap_or(*issued);
                    let (written, issued) = (newest, done.min(newest.saturating_sub(1)));
                    if !self.told.insert((name.clone(), param.clone())) {
                        self.repeats += 1;
                        return;
                    }
                    let reason = StaleReason::NotIssued { written, issued };
                    let stale = Stale { param: param.clone(), publisher: name.clone(), read: places.note(at), reason };
                    self.findings.push(Finding::Stale(stale));
                    return;
                }
                let issued = publisher.issued.map(|(_, event)| event);
                let (written, before) = (publisher.written.clone(), publisher.before);
                self.reads.insert(at, Expected { written, issued, before });
            }
            Note::Landed { param, regions } => {
                if let Some((bucket, event, _)) = host.reduced.iter().find(|(.., list)| share(list, regions)) {
                    let (param, bucket) = (param.clone(), bucket.clone());
                    let [reduced, landed] = [*event, at].map(|event| places.note(event));
                    self.findings.push(Finding::ReducedEarly { bucket, param, reduced, landed });
                }
            }
            Note::Reduced { bucket, regions, .. } => host.reduced.push((bucket.clone(), at, regions.clone())),
            Note::Gathered { param, epoch, regions } => {
                host.gathered.retain(|(.., list)| !share(list, regions));
                host.gathered.push((param.clone(), *epoch, at, regions.clone()));
            }
            Note::Used { param, epoch, regions } => self.used(at, (param, *epoch, regions), host, places),
            Note::Pass(_) | Note::Released { .. } | Note::Scope { .. } | Note::Stream { .. } => {}
        }
    }

    /// A gathered weight is used: nothing else was gathered there in between, and its bytes come from that gather.
    fn used(
        &mut self,
        at: u32,
        (param, epoch, regions): (&Label, u64, &[TraceAccess]),
        host: &Host,
        places: &Places<'_>,
    ) {
        let last = host.gathered.iter().rfind(|(.., list)| share(list, regions));
        match last {
            Some((there, of, event, list)) if (there, *of) == (param, epoch) && list.len() == regions.len() => {
                let written = Written { epoch, event: *event, regions: Vec::new() };
                let expected = Expected { written: Some(Rc::new(written)), issued: Some(*event), before: *event };
                self.reads.insert(at, expected);
            }
            _ if !self.told.insert(("a gather".into(), param.clone())) => self.repeats += 1,
            last => {
                let there = last.map(|(there, of, ..)| (there.clone(), *of));
                let (param, used) = (param.clone(), places.note(at));
                self.findings.push(Finding::NotGathered { param, epoch, used, there });
            }
        }
    }

    /// Publications and reductions inside graphs that are smaller than a step.
    fn forbidden(&mut self, trace: &Trace, places: &Places<'_>) {
        let mut scopes: BTreeMap<(u32, u64), &Label> = BTreeMap::new();
        let mut groups: BTreeMap<&Label, &'static str> = BTreeMap::new();
        for event in &trace.events {
            match event {
                TraceEvent::Note { rank, note: Note::Scope { graph, scope }, .. } => {
                    scopes.insert((*rank, *graph), scope);
                }
                TraceEvent::Note { note: Note::Issued { group, .. }, .. } if !group.is_empty() => {
                    groups.insert(group, "publication");
                }
                TraceEvent::Note { note: Note::Reduced { group, .. }, .. } if !group.is_empty() => {
                    groups.insert(group, "data-parallel reduction");
                }
                _ => {}
            }
        }
        let mut seen = BTreeSet::new();
        for (at, event) in (0..).zip(&trace.events) {
            let TraceEvent::Launch { rank, graph, bound, .. } = event else { continue };
            for gate in bound.iter().filter(|gate| gate.on.is_none()) {
                if let Some(TraceNodeKind::Wait { why, event }) = graph.nodes.get(gate.node as usize).map(|n| &n.what) {
                    let (why, event) = (why.clone(), event.clone());
                    self.findings.push(Finding::ForeignWait {
                        why,
                        event,
                        at: places.op(OpAt { event: at, node: Some(gate.node) }),
                    });
                }
            }
            let scope = scopes.get(&(*rank, graph.id)).map_or("", |scope| scope.as_str());
            if scope == "step" || !seen.insert((*rank, graph.id)) {
                continue;
            }
            for (node, what) in (0..).zip(graph.nodes.iter().map(|node| &node.what)) {
                let TraceNodeKind::Joint { group, .. } = what else { continue };
                let Some(act) = groups.get(group) else { continue };
                let at = places.op(OpAt { event: at, node: Some(node) });
                let (graph, scope) = (graph.name.clone(), Label::from(scope.to_owned()));
                self.findings.push(Finding::ForbiddenInGraph { act, graph, scope, at });
            }
        }
    }
}

fn share(some: &[TraceAccess], others: &[TraceAccess]) -> bool {
    some.iter().any(|a| others.iter().any(|b| overlap(a, b)))
}

pub(super) fn overlap(a: &TraceAccess, b: &TraceAccess) -> bool {
    (a.rank, a.allocation) == (b.rank, b.allocation) && a.region.overlaps(&b.region)
}
