//! Random traces: what the verifier says is what reachability says, counted out over all pairs of operations.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use device::{Label, Mode, Trace, TraceAccess, TraceEvent, TraceGraph, TraceNode, TraceNodeKind, WaitOutcome};
use graphcap::verify::{CallOrder, Finding, VerifyOptions, verify};
use proptest::prelude::*;

use super::traces::{Script, access, node};

const RANKS: u32 = 2;
const STREAMS: u32 = 3;

/// Points in time, and which of them come before which.
#[derive(Default)]
struct Points {
    after: Vec<Vec<usize>>,
}

impl Points {
    fn new_point(&mut self) -> usize {
        self.after.push(Vec::new());
        self.after.len() - 1
    }

    fn edge(&mut self, from: usize, to: usize) {
        self.after[from].push(to);
    }

    fn reached(&self, from: usize) -> Vec<bool> {
        let mut seen = vec![false; self.after.len()];
        let mut todo = vec![from];
        while let Some(at) = todo.pop() {
            if !std::mem::replace(&mut seen[at], true) {
                todo.extend(&self.after[at]);
            }
        }
        seen
    }
}

/// An operation with its first and last point.
pub(crate) struct Touching {
    pub(crate) name: String,
    pub(crate) site: String,
    span: (usize, usize),
    /// Position in the group's sequence, if it is a call.
    call: Option<u64>,
    accesses: Vec<TraceAccess>,
}

impl Touching {
    /// As random traces name their operations: calls by their place.
    fn told(&self) -> String {
        if self.call.is_some() { self.site.clone() } else { self.name.clone() }
    }
}

/// Where something ends: by rank, stream, position, node.
type Ends = BTreeMap<(u32, u32, u64, Option<u32>), usize>;

/// Group, position in its sequence, and position in a launch.
type Call = (String, u64, Option<u64>);

/// What a trace's waits say, one by one.
pub(crate) struct Oracle {
    points: Points,
    ops: Vec<Touching>,
    ends: Ends,
    /// By rank and stream: the end of the last item.
    last: BTreeMap<(u32, u32), usize>,
    /// By rank: the point behind the host's last wait.
    host: BTreeMap<u32, usize>,
    /// By rank and graph: the end of the last launch.
    launched: BTreeMap<(u32, u64), usize>,
    /// By group, position, position in a launch: member's rank, start and end.
    calls: BTreeMap<Call, Vec<(u32, usize, usize)>>,
    asked: BTreeMap<Call, (String, Vec<u32>)>,
}

impl Oracle {
    pub(crate) fn new(trace: &Trace) -> Oracle {
        let mut oracle = Oracle {
            points: Points::default(),
            ops: Vec::new(),
            ends: Ends::new(),
            last: Default::default(),
            host: Default::default(),
            launched: Default::default(),
            calls: Default::default(),
            asked: Default::default(),
        };
        trace.events.iter().for_each(|event| oracle.add(event));
        oracle.meet();
        oracle
    }

    /// First and last point of a stream's next item.
    fn item(&mut self, rank: u32, stream: u32, seq: u64) -> (usize, usize) {
        let span = (self.points.new_point(), self.points.new_point());
        self.points.edge(span.0, span.1);
        if let Some(&last) = self.last.get(&(rank, stream)) {
            self.points.edge(last, span.0);
        }
        if let Some(&host) = self.host.get(&rank) {
            self.points.edge(host, span.0);
        }
        self.last.insert((rank, stream), span.1);
        self.ends.insert((rank, stream, seq, None), span.1);
        span
    }

    fn add(&mut self, event: &TraceEvent) {
        match event {
            TraceEvent::Op { rank, stream, seq, name, site, accesses, .. } => {
                let span = self.item(*rank, *stream, *seq);
                self.touching([name, site], span, accesses);
            }
            TraceEvent::Record { rank, stream, seq, .. } => drop(self.item(*rank, *stream, *seq)),
            TraceEvent::Wait { rank, stream, seq, on, outcome: WaitOutcome::Enforced, .. } => {
                let span = self.item(*rank, *stream, *seq);
                let from = self.ends[&(*rank, on.stream, on.seq, on.node)];
                self.points.edge(from, span.1);
            }
            TraceEvent::HostWait { rank, on, .. } => {
                let behind = self.points.new_point();
                // The host's mark is no event of its own: it stands behind all before it.
                if let Some(&last) = self.last.get(&(*rank, on.stream)) {
                    self.points.edge(last, behind);
                }
                if let Some(host) = self.host.insert(*rank, behind) {
                    self.points.edge(host, behind);
                }
            }
            TraceEvent::Joint { rank, stream, seq, group, members, group_seq, what, site, accesses } => {
                let span = self.item(*rank, *stream, *seq);
                self.call((group, *group_seq), site, span, accesses);
                let key = (group.to_string(), *group_seq, None);
                self.asked.insert(key.clone(), (what.to_string(), members.to_vec()));
                self.calls.entry(key).or_default().push((*rank, span.0, span.1));
            }
            TraceEvent::Launch { rank, stream, seq, graph, bound, groups, .. } => {
                let whole = self.item(*rank, *stream, *seq);
                if let Some(before) = self.launched.insert((*rank, graph.id), whole.1) {
                    self.points.edge(before, whole.0);
                }
                let mut spans: Vec<(usize, usize)> = Vec::new();
                for (i, node) in (0..).zip(&graph.nodes) {
                    let span = (self.points.new_point(), self.points.new_point());
                    for (from, to) in [(whole.0, span.0), (span.0, span.1), (span.1, whole.1)] {
                        self.points.edge(from, to);
                    }
                    node.behind.iter().for_each(|b| self.points.edge(spans[*b as usize].1, span.0));
                    self.ends.insert((*rank, *stream, *seq, Some(i)), span.1);
                    match &node.what {
                        TraceNodeKind::Op { name, site, accesses, .. } => {
                            self.touching([name, site], span, accesses);
                        }
                        TraceNodeKind::Joint { group, position, what, site, accesses } => {
                            let block = groups.iter().find(|g| g.group == *group).unwrap();
                            self.call((group, block.group_seq), site, span, accesses);
                            let key = (group.to_string(), block.group_seq, Some(*position));
                            self.asked.insert(key.clone(), (what.to_string(), block.members.to_vec()));
                            self.calls.entry(key).or_default().push((*rank, span.0, span.1));
                        }
                        TraceNodeKind::Wait { .. } => {
                            let gate = bound.iter().find(|gate| gate.node == i).unwrap();
                            if let Some(on) = gate.on {
                                let from = self.ends[&(*rank, on.stream, on.seq, on.node)];
                                self.points.edge(from, span.1);
                            }
                        }
                        TraceNodeKind::Record { .. } => {}
                    }
                    spans.push(span);
                }
            }
            _ => {}
        }
    }

    fn touching(&mut self, names: [&Label; 2], span: (usize, usize), accesses: &[TraceAccess]) {
        let ([name, site], accesses) = (names.map(Label::to_string), accesses.to_vec());
        self.ops.push(Touching { name, site, span, call: None, accesses });
    }

    /// By its group and its position there.
    fn call(&mut self, at: (&Label, u64), site: &Label, span: (usize, usize), accesses: &[TraceAccess]) {
        self.touching([at.0, site], span, accesses);
        self.ops.last_mut().unwrap().call = Some(at.1);
    }

    /// Pairs of one of `first` and one of `second`, in the order of the trace, of which the first comes before the
    /// second whatever the machine does; and all pairs.
    pub(crate) fn before(
        &self,
        first: impl Fn(&Touching) -> bool,
        second: impl Fn(&Touching) -> bool,
    ) -> (usize, usize) {
        let seconds: Vec<&Touching> = self.ops.iter().filter(|op| second(op)).collect();
        let firsts = self.ops.iter().filter(|op| first(op));
        firsts.fold((0, 0), |(ordered, all), op| {
            let reached = self.points.reached(op.span.1);
            let behind = seconds.iter().filter(|second| reached[second.span.0]).count();
            (ordered + behind, all + seconds.len())
        })
    }

    fn meet(&mut self) {
        for (key, came) in &self.calls {
            let (what, members) = &self.asked[key];
            assert_eq!(came.len(), members.len(), "all members call");
            let is_source = |rank: u32| match what.split(' ').next().unwrap() {
                "broadcast(root" => rank == members[1],
                "send_recv" => rank == members[0],
                _ => true,
            };
            let all_to_all = came.iter().all(|(rank, ..)| is_source(*rank));
            for (source, start, _) in came.iter().filter(|(rank, ..)| is_source(*rank)) {
                for (consumer, _, end) in came.iter().filter(|(rank, ..)| all_to_all || !is_source(*rank)) {
                    if source != consumer {
                        self.points.edge(*start, *end);
                    }
                }
            }
        }
    }

    /// Pairs of operations with a conflict that nothing orders, and the memory.
    fn races(&self) -> BTreeSet<(String, String, u32, u32)> {
        let reached: Vec<Vec<bool>> = self.ops.iter().map(|op| self.points.reached(op.span.1)).collect();
        let mut found = BTreeSet::new();
        for (i, a) in self.ops.iter().enumerate() {
            for (j, b) in self.ops.iter().enumerate().skip(i + 1) {
                if reached[i][b.span.0] || reached[j][a.span.0] {
                    continue;
                }
                for x in &a.accesses {
                    for y in &b.accesses {
                        let same = (x.rank, x.allocation) == (y.rank, y.allocation);
                        if same && x.region.overlaps(&y.region) && x.mode.conflicts(y.mode) {
                            let mut names = [a.told(), b.told()];
                            names.sort();
                            let [first, second] = names;
                            found.insert((first, second, x.rank, x.allocation));
                        }
                    }
                }
            }
        }
        found
    }
}

/// One thing that the host does; numbers are reduced to what there is.
pub(crate) type Act = (u8, u8, u8, u8, u8);

fn touched(rank: u32, number: u32, bits: u8) -> TraceAccess {
    let mode = [Mode::Read, Mode::Read, Mode::Write, Mode::Update][(bits & 3) as usize];
    let start = usize::from(bits >> 2 & 7);
    let mut access = access(rank, number, mode, start..start + 1 + usize::from(bits >> 5));
    if bits & 0x44 == 0x44 {
        // Two columns of a matrix whose rows are six bytes.
        access.region = device::Region { start, row_bytes: 2, rows: 2, pitch: 6 };
    }
    access
}

/// A graph for all ranks: operations, gates and calls, each behind some of the nodes before it.
fn graph(rank: u32, id: u64, acts: &[Act], launch: usize) -> TraceGraph {
    let mut nodes: Vec<TraceNode> = Vec::new();
    let mut calls = 0;
    for (i, &(kind, a, b, c, _)) in acts.iter().enumerate() {
        let behind: Vec<u32> = (0..i as u32).filter(|j| b >> (j % 7) & 1 == 1).collect();
        let name = format!("g{id}.{launch}.{rank}.{i}");
        let what = match kind % 6 {
            0..=2 => TraceNodeKind::Op {
                name: name.into(),
                site: "graph".into(),
                flops: 0,
                accesses: vec![touched(rank, u32::from(a % 2), c)],
            },
            3 => TraceNodeKind::Wait { why: "in".into(), event: format!("e{}", a % 3).into() },
            4 => TraceNodeKind::Record { event: format!("e{}", a % 3).into() },
            _ => {
                calls += 1;
                let what = ["all_reduce(Sum) of 1 f32", "broadcast(root 1) of 1 f32"][usize::from(a % 2)];
                TraceNodeKind::Joint {
                    group: "inside".into(),
                    position: calls - 1,
                    what: what.into(),
                    site: name.into(),
                    accesses: vec![touched(rank, 0, c)],
                }
            }
        };
        nodes.push(node(&behind, what));
    }
    TraceGraph { id, name: format!("g{id}").into(), nodes }
}

pub(crate) fn played(acts: &[Act]) -> Trace {
    let mut script = Script::default();
    let members = [1, 0];
    for rank in 0..RANKS {
        (0..3).for_each(|e| script.record(rank, e, &format!("e{e}")));
    }
    for (at, &(kind, a, b, c, d)) in acts.iter().enumerate() {
        let (rank, stream) = (u32::from(a) % RANKS, u32::from(b) % STREAMS);
        let event = format!("e{}", c % 3);
        match kind % 12 {
            0..=3 => script.op(rank, stream, vec![touched(rank, u32::from(c % 2), d)]),
            4 | 5 => script.record(rank, stream, &event),
            6 | 7 => script.wait(rank, stream, &event, "test.wait", WaitOutcome::Enforced),
            8 => script.wait(rank, stream, &event, "test.dropped", WaitOutcome::Dropped),
            9 => script.host_wait(rank, stream),
            10 => {
                let what = ["all_gather of 1 f32", "broadcast(root 1) of 1 f32", "send_recv of 1 f32"];
                for rank in 0..RANKS {
                    let accesses = vec![touched(rank, u32::from(c % 2), d.rotate_left(rank))];
                    let on = (stream + u32::from(d) * rank) % STREAMS;
                    script.joint(rank, on, ("g", &members), what[usize::from(c % 3)], accesses);
                }
            }
            _ => {
                // The nodes are told by what comes next; both ranks launch, twice, maybe on different streams.
                let nodes = &acts[at + 1..(at + 6).min(acts.len())];
                if nodes.is_empty() {
                    continue;
                }
                let id = at as u64;
                let graphs: Vec<Arc<TraceGraph>> =
                    (0..RANKS).map(|rank| Arc::new(graph(rank, id, nodes, at))).collect();
                for round in 0..=u32::from(d % 2) {
                    for rank in 0..RANKS {
                        script.launch(
                            rank,
                            (stream + round * u32::from(c)) % STREAMS,
                            &graphs[rank as usize],
                            &members,
                        );
                    }
                }
            }
        }
    }
    script.trace
}

fn options() -> VerifyOptions {
    VerifyOptions { limit: 10_000, call_order: CallOrder::Free, ..VerifyOptions::default() }
}

fn pair(race: &graphcap::verify::Race) -> (String, String, u32, u32) {
    let name = |place: &graphcap::verify::Place| {
        let is_call = !place.name.starts_with("op") && !place.name.starts_with('g');
        if is_call { place.site.to_string() } else { place.name.to_string() }
    };
    let mut names = [name(&race.first), name(&race.second)];
    names.sort();
    let [first, second] = names;
    (first, second, race.first.rank, race.allocation)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]
    #[test]
    fn a_race_is_found_exactly_where_nothing_orders_a_conflict(acts in prop::collection::vec(any::<Act>(), 1..40)) {
        let trace = played(&acts);
        let want = Oracle::new(&trace).races();
        let report = verify(&trace, &options());
        let mut found = BTreeSet::new();
        for finding in report.findings() {
            let Finding::Race(race) = finding else { panic!("{finding}") };
            found.insert(pair(race));
        }
        prop_assert!(found.is_subset(&want), "not a race: {:?}\n{}", found.difference(&want), trace.to_text());
        let memory = |races: &BTreeSet<(String, String, u32, u32)>| -> BTreeSet<(u32, u32)> {
            races.iter().map(|race| (race.2, race.3)).collect()
        };
        prop_assert_eq!(memory(&found), memory(&want), "{}\n{:?}", trace.to_text(), want);
    }
}
