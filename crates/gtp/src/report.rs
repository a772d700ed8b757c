//! What each gather hides behind, and what of it stays in the open: a plan held against a trace.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Write},
};

use device::{Tick, Trace, TraceEvent, TraceNodeKind};
use pgroups::Pass;

use crate::{
    attached::event_name,
    plan::{GtpPlan, PassPlan},
    schedule::{GatherIndex, PassKind, UseIndex},
    weight::{ON_DEMAND, PLANNED},
    why,
};

/// A planned gather, as the passes of a trace ran it.
#[derive(Clone, PartialEq, Debug)]
pub struct HiddenGather {
    /// Which kind of pass.
    pub kind: PassKind,
    /// Its number in the plan.
    pub gather: GatherIndex,
    /// The weight.
    pub weight: String,
    /// The part of the pass that uses it first.
    pub pass: Pass,
    /// Bytes of the whole weight, padding included.
    pub bytes: usize,
    /// The use at whose begin it is issued, and the weight of that use.
    pub issued_at: (UseIndex, String),
    /// Its first use.
    pub used_at: UseIndex,
    /// Passes of the trace that have it.
    pub times: u64,
    /// Operations of the stream that uses it between its issue and its first use, of all those passes together.
    pub operations: u64,
    /// Their floating-point operations.
    pub flops: u64,
    /// How long that stream stood still for it, all passes together, in the unit of the trace; none where nothing ran.
    pub exposed: Option<u64>,
}

impl HiddenGather {
    /// Nothing is computed while it travels.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.flops == 0
    }
}

/// The gathers of one rank in a trace of passes that run as they are submitted.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct GatherReport {
    gathers: Vec<HiddenGather>,
    on_demand: u64,
    in_graphs: u64,
}

/// What a pass of the trace has told of a gather.
#[derive(Default)]
struct Seen {
    times: u64,
    operations: u64,
    flops: u64,
    exposed: Option<u64>,
}

impl GatherReport {
    /// Holds `plan` against what `rank` did in `trace`. Gathers inside captured graphs are counted, and not told apart:
    /// there a trace knows no events.
    #[must_use]
    pub fn new(plan: &GtpPlan, trace: &Trace, rank: u32) -> GatherReport {
        let mut at: BTreeMap<String, (PassKind, GatherIndex)> = BTreeMap::new();
        for pass in plan.passes() {
            for i in 0..pass.gathers().len() {
                let weight = &plan.weights()[pass.weight_of(GatherIndex(i)).0].name;
                at.insert(event_name("gathered", pass.kind(), i, weight), (pass.kind(), GatherIndex(i)));
            }
        }
        let mut seen: BTreeMap<(PassKind, GatherIndex), Seen> = BTreeMap::new();
        // A gather that several uses share is waited for by the first.
        let mut met = BTreeSet::new();
        for span in trace.wait_spans(rank) {
            let is_use = *span.why == *why::USE_AFTER_GATHER.0 && span.at.node.is_none();
            let Some(&gather) = at.get(span.event.as_str()).filter(|_| is_use) else { continue };
            if !met.insert((gather, span.generation)) {
                continue;
            }
            let Some(issued) = issued(trace, rank, &span.event, span.generation, span.index) else { continue };
            let (operations, flops) = between(trace, rank, span.at.stream, issued..span.index);
            let one = seen.entry(gather).or_default();
            one.times += 1;
            one.operations += operations;
            one.flops += flops;
            if let Some(exposed) = span.exposed() {
                one.exposed = Some(one.exposed.unwrap_or(0) + exposed);
            }
        }
        let (on_demand, in_graphs) = others(trace, rank);
        let told = |((kind, gather), seen)| told(plan, plan.pass(kind).expect("BUG: just listed"), gather, seen);
        GatherReport { gathers: seen.into_iter().map(told).collect(), on_demand, in_graphs }
    }

    /// By kind of pass, in the order of first uses; those that no pass of the trace had are left out.
    #[must_use]
    pub fn gathers(&self) -> &[HiddenGather] {
        &self.gathers
    }

    /// Gathers that no plan had foreseen.
    #[must_use]
    pub fn on_demand(&self) -> u64 {
        self.on_demand
    }

    /// Gathers inside captured graphs.
    #[must_use]
    pub fn in_graphs(&self) -> u64 {
        self.in_graphs
    }

    /// A line for each gather, means over its passes. How long it was exposed is told where the trace has a clock.
    #[must_use]
    pub fn table(&self, tick: Tick) -> String {
        let mut text = String::new();
        let name = self.gathers.iter().flat_map(|g| [g.weight.len(), g.issued_at.1.len() + 4]);
        let name = name.max().unwrap_or(0).max("its own use".len());
        let mut kind = None;
        for gather in &self.gathers {
            if kind.replace(gather.kind) != Some(gather.kind) {
                let own = || self.gathers.iter().filter(|g| g.kind == gather.kind);
                let (all, open) = (own().count(), own().filter(|g| g.is_open()).count());
                let kind = gather.kind;
                writeln!(text, "pass '{kind}': {all} gathers, {open} of them behind nothing").expect("BUG: a string");
                let exposed = if tick == Tick::Nanosecond { format!(" {:>10}", "exposed") } else { String::new() };
                writeln!(
                    text,
                    "  {:>3}  {:<name$}  {:<9} {:>9}  {:<name$}  {:>5} {:>10}{exposed}",
                    "no.", "weight", "used in", "KiB", "issued at", "ops", "MFLOP"
                )
                .expect("BUG: a string");
            }
            gather.line(&mut text, tick, name).expect("BUG: a string");
        }
        if self.on_demand > 0 {
            writeln!(text, "{} gathers that no plan had foreseen", self.on_demand).expect("BUG: a string");
        }
        if self.in_graphs > 0 {
            writeln!(text, "{} gathers inside graphs, which are not told apart", self.in_graphs)
                .expect("BUG: a string");
        }
        text
    }
}

impl HiddenGather {
    fn line(&self, text: &mut String, tick: Tick, name: usize) -> fmt::Result {
        let HiddenGather { gather, weight, pass, bytes, issued_at, used_at, times, operations, flops, exposed, .. } =
            self;
        let mean = |sum: u64| sum / times;
        let issued = match issued_at.0 == *used_at {
            true => "its own use".to_owned(),
            false => format!("{:>3} {}", issued_at.0.0, issued_at.1),
        };
        let exposed = match tick {
            Tick::Nanosecond => format!(" {:>10}", exposed.map_or("-".to_owned(), |sum| tick.tell(mean(sum)))),
            Tick::Step => String::new(),
        };
        let (kib, mflop) = (*bytes as f64 / 1024.0, mean(*flops) as f64 / 1e6);
        let pass = pass.name();
        writeln!(
            text,
            "  {:>3}  {weight:<name$}  {pass:<9} {kib:>9.1}  {issued:<name$}  {:>5} {mflop:>10.3}{exposed}",
            gather.0,
            mean(*operations)
        )
    }
}

fn told(plan: &GtpPlan, pass: &PassPlan, gather: GatherIndex, seen: Seen) -> HiddenGather {
    let planned = &pass.gathers()[gather.0];
    let uses = pass.schedule().uses();
    let name = |at: UseIndex| plan.weights()[uses[at.0].weight.0].name.clone();
    let used_at = planned.uses[0];
    HiddenGather {
        kind: pass.kind(),
        gather,
        weight: name(used_at),
        pass: uses[used_at.0].pass,
        bytes: planned.slot.numel * planned.slot.dtype.size_bytes(),
        issued_at: (planned.issued_at, name(planned.issued_at)),
        used_at,
        times: seen.times,
        operations: seen.operations,
        flops: seen.flops,
        exposed: seen.exposed,
    }
}

/// Place in the trace of the gather that a record of its event is behind; none if that is no planned gather.
fn issued(trace: &Trace, rank: u32, event: &str, generation: u64, before: usize) -> Option<usize> {
    let recorded = trace.events[..before].iter().rposition(|one| {
        matches!(one, TraceEvent::Record { rank: of, event: own, generation: g, .. }
            if *of == rank && *own == *event && *g == generation)
    })?;
    let TraceEvent::Record { stream: on, .. } = &trace.events[recorded] else { return None };
    trace.events[..recorded].iter().rposition(|one| match one {
        TraceEvent::Joint { rank: of, stream, group, .. } => *of == rank && stream == on && is_of(group, PLANNED),
        _ => false,
    })
}

/// Operations of a stream, and their floating-point operations, between two places of the trace.
fn between(trace: &Trace, rank: u32, on: u32, places: std::ops::Range<usize>) -> (u64, u64) {
    trace.events[places].iter().fold((0, 0), |(operations, sum), event| match event {
        TraceEvent::Op { rank: of, stream, flops, .. } if *of == rank && *stream == on => (operations + 1, sum + flops),
        TraceEvent::Joint { rank: of, stream, .. } if *of == rank && *stream == on => (operations + 1, sum),
        _ => (operations, sum),
    })
}

/// Gathers on demand, and planned ones inside graphs.
fn others(trace: &Trace, rank: u32) -> (u64, u64) {
    trace.events.iter().fold((0, 0), |(on_demand, in_graphs), event| match event {
        TraceEvent::Joint { rank: of, group, .. } if *of == rank && is_of(group, ON_DEMAND) => {
            (on_demand + 1, in_graphs)
        }
        TraceEvent::Launch { rank: of, graph, .. } if *of == rank => {
            let is_gather =
                |kind: &TraceNodeKind| matches!(kind, TraceNodeKind::Joint { group, .. } if is_of(group, PLANNED));
            let inside = graph.nodes.iter().filter(|node| is_gather(&node.what)).count();
            (on_demand, in_graphs + inside as u64)
        }
        _ => (on_demand, in_graphs),
    })
}

/// Whether a communicator was opened under `label`, or under that and the number of another model.
fn is_of(group: &str, label: &str) -> bool {
    let own = group.rsplit_once('/').and_then(|(_, own)| own.strip_prefix(label));
    own.is_some_and(|rest| rest.is_empty() || rest.strip_prefix('_').is_some_and(|n| n.parse::<u32>().is_ok()))
}
