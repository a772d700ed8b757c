//! How long streams stood still at their waits, read off a trace.

use std::collections::BTreeMap;

use super::{Position, Trace, TraceEvent, TraceGraph, TraceNodeKind, WaitOutcome};
use crate::{Label, Machine};

/// A wait for an event that holds, of a stream or of a node of a launched graph.
#[derive(Clone, Debug, PartialEq)]
pub struct WaitSpan {
    /// Name of the synchronisation.
    pub why: Label,
    /// Event.
    pub event: Label,
    /// Which record of the event it is bound to.
    pub generation: u64,
    /// Where it waits.
    pub at: Position,
    /// Place of its event, or of its launch, in the trace.
    pub index: usize,
    /// End of what precedes it on its stream, earlier waits included, or of the nodes that it is behind; none before
    /// anything has run there.
    pub reached: Option<u64>,
    /// End of what it waits for; none if that did not run within the trace.
    pub done: Option<u64>,
}

impl WaitSpan {
    /// For how long nothing could run behind it: 0 if what it waits for had ended by then. In the unit of
    /// [`TraceEvent::Ran`]; none where the trace does not say.
    #[must_use]
    pub fn exposed(&self) -> Option<u64> {
        Some(self.done?.saturating_sub(self.reached?))
    }
}

/// What a trace counts time in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tick {
    /// Nanoseconds, on `cpu` and `cuda`.
    Nanosecond,
    /// Operations of all ranks that the simulator has run, one at a time.
    Step,
}

impl Tick {
    /// Of what `machine` traces.
    #[must_use]
    pub fn of(machine: &Machine) -> Tick {
        if matches!(machine.driver(), "cpu" | "cuda") { Tick::Nanosecond } else { Tick::Step }
    }

    /// A time in words.
    #[must_use]
    pub fn tell(self, ticks: u64) -> String {
        match self {
            Tick::Nanosecond => format!("{:.1} us", ticks as f64 / 1e3),
            Tick::Step => format!("{ticks} steps"),
        }
    }
}

impl Trace {
    /// All waits of a rank that hold somebody up, in the order of the trace, launched graphs opened up: none that was
    /// elided or dropped. Waits between streams that were captured together have no event, and are not among them.
    #[must_use]
    pub fn wait_spans(&self, rank: u32) -> Vec<WaitSpan> {
        let ends = Ends::new(self, rank);
        let mut spans: Vec<WaitSpan> = Vec::new();
        // By place of a stream: the end of all that it has waited for up to there. Who waits for two things is held up
        // by the later one only once, and who waits for a stream waits for what that one has waited for.
        let mut waited = Waited::default();
        for (index, event) in self.events.iter().enumerate() {
            match event {
                TraceEvent::Wait { rank: of, stream, seq, why, event, generation, on, outcome }
                    if *of == rank && *outcome == WaitOutcome::Enforced =>
                {
                    let at = Position { stream: *stream, seq: *seq, node: None };
                    let (why, event, generation) = (why.clone(), event.clone(), *generation);
                    let reached = ends.before(*stream, *seq).max(waited.before(*stream, *seq));
                    let done = ends.behind(*on).max(waited.before(on.stream, on.seq));
                    waited.add(*stream, *seq, done);
                    spans.push(WaitSpan { why, event, generation, at, index, reached, done });
                }
                TraceEvent::Launch { rank: of, stream, seq, graph, bound, .. } if *of == rank => {
                    let launched = ends.before(*stream, *seq).max(waited.before(*stream, *seq));
                    let done = |node: u32| {
                        let gate = bound.iter().find(|gate| gate.node == node);
                        let on = gate.filter(|gate| gate.outcome == WaitOutcome::Enforced)?.on?;
                        ends.behind(on).max(waited.before(on.stream, on.seq))
                    };
                    let reached = ends.reached(*stream, *seq, graph, launched, done);
                    for gate in bound.iter().filter(|gate| gate.outcome == WaitOutcome::Enforced) {
                        let node = gate.node;
                        let TraceNodeKind::Wait { why, event } = &graph.nodes[node as usize].what else { continue };
                        let at = Position { stream: *stream, seq: *seq, node: Some(node) };
                        let (why, event, generation) = (why.clone(), event.clone(), gate.generation);
                        let (reached, done) = (reached[node as usize], done(node));
                        spans.push(WaitSpan { why, event, generation, at, index, reached, done });
                    }
                }
                _ => {}
            }
        }
        spans
    }
}

/// Ends of what streams have waited for, by stream and place.
#[derive(Default)]
struct Waited(BTreeMap<(u32, u64), u64>);

impl Waited {
    /// Of all waits of a stream ahead of a place.
    fn before(&self, stream: u32, seq: u64) -> Option<u64> {
        self.0.range((stream, 0)..(stream, seq)).next_back().map(|(_, end)| *end)
    }

    fn add(&mut self, stream: u32, seq: u64, done: Option<u64>) {
        if let Some(end) = done.max(self.before(stream, seq)) {
            self.0.insert((stream, seq), end);
        }
    }
}

/// Ends of what ran on one rank: by stream, place in it and node, from 1; 0 outside of graphs.
struct Ends(BTreeMap<(u32, u64, u32), u64>);

impl Ends {
    fn new(trace: &Trace, rank: u32) -> Ends {
        let ran = trace.events.iter().filter_map(|event| match event {
            TraceEvent::Ran { rank: of, stream, seq, node, end, .. } if *of == rank => {
                Some(((*stream, *seq, node.map_or(0, |node| node + 1)), *end))
            }
            _ => None,
        });
        Ends(ran.collect())
    }

    /// Of all that precedes a place of a stream. The nodes of a launch end in any order.
    fn before(&self, stream: u32, seq: u64) -> Option<u64> {
        let (&(_, last, _), _) = self.0.range((stream, 0, 0)..(stream, seq, 0)).next_back()?;
        self.0.range((stream, last, 0)..=(stream, last, u32::MAX)).map(|(_, end)| *end).max()
    }

    /// Of what a record at `on` stands for.
    fn behind(&self, on: Position) -> Option<u64> {
        match on.node {
            None => self.before(on.stream, on.seq + 1),
            // The nodes of a chain are numbered in the order in which they may run.
            Some(node) => {
                self.0.range((on.stream, on.seq, 0)..=(on.stream, on.seq, node + 1)).map(|(_, end)| *end).max()
            }
        }
    }

    /// By node of a launch: the end of all that it is behind. `done` is the end of what a gate waits for.
    fn reached(
        &self,
        stream: u32,
        seq: u64,
        graph: &TraceGraph,
        launched: Option<u64>,
        done: impl Fn(u32) -> Option<u64>,
    ) -> Vec<Option<u64>> {
        let mut reached: Vec<Option<u64>> = Vec::with_capacity(graph.nodes.len());
        let mut ended: Vec<Option<u64>> = Vec::with_capacity(graph.nodes.len());
        for (at, node) in (0..).zip(&graph.nodes) {
            let behind = node.behind.iter().map(|before| ended[*before as usize]).max().flatten().or(launched);
            reached.push(behind);
            let ran = self.0.get(&(stream, seq, at + 1)).copied();
            let waits = matches!(node.what, TraceNodeKind::Wait { .. });
            ended.push(ran.or(if waits { behind.max(done(at)) } else { behind }));
        }
        reached
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{BoundGate, TraceNode};

    fn ran(stream: u32, seq: u64, node: Option<u32>, end: u64) -> TraceEvent {
        TraceEvent::Ran { rank: 0, stream, seq, node, name: "op".into(), start: end - 1, end }
    }

    fn wait(stream: u32, seq: u64, on: Position, outcome: WaitOutcome) -> TraceEvent {
        let (why, event) = ("test.wait".into(), "event".into());
        TraceEvent::Wait { rank: 0, stream, seq, why, event, generation: 1, on, outcome }
    }

    fn exposed(trace: &Trace) -> Vec<Option<u64>> {
        trace.wait_spans(0).iter().map(WaitSpan::exposed).collect()
    }

    #[test]
    fn a_wait_is_exposed_from_the_end_before_it_to_the_end_of_what_it_waits_for() {
        let on = Position { stream: 1, seq: 1, node: None };
        let early = vec![ran(0, 0, None, 40), ran(1, 0, None, 30), wait(0, 1, on, WaitOutcome::Enforced)];
        assert_eq!(exposed(&Trace { events: early }), [Some(0)]);
        let late_and =
            |other| vec![ran(0, 0, None, 40), ran(1, 0, None, 100), other, wait(0, 1, on, WaitOutcome::Enforced)];
        let late = late_and(ran(7, 0, None, 1));
        assert_eq!(exposed(&Trace { events: late.clone() }), [Some(60)]);
        // Another rank's numbers are its own; what was taken away holds nobody up.
        assert!(Trace { events: late }.wait_spans(1).is_empty());
        let dropped = vec![ran(1, 0, None, 100), wait(0, 1, on, WaitOutcome::Dropped)];
        let elided = vec![ran(1, 0, None, 100), wait(0, 1, on, WaitOutcome::Elided)];
        assert!(exposed(&Trace { events: dropped }).is_empty() && exposed(&Trace { events: elided }).is_empty());
        // The second wait is for something that was over when the first one was.
        let earlier = Position { stream: 2, seq: 1, node: None };
        let mut two = late_and(ran(2, 0, None, 90));
        two.push(wait(0, 2, earlier, WaitOutcome::Enforced));
        assert_eq!(exposed(&Trace { events: two }), [Some(60), Some(0)]);
        // What is recorded behind a wait is over when that is: here nothing else runs on stream 2.
        let through = vec![
            ran(0, 0, None, 40),
            ran(1, 0, None, 100),
            wait(2, 0, on, WaitOutcome::Enforced),
            wait(0, 1, Position { stream: 2, seq: 1, node: None }, WaitOutcome::Enforced),
        ];
        assert_eq!(exposed(&Trace { events: through }), [None, Some(60)]);
        let nothing_before = vec![ran(1, 0, None, 100), wait(0, 1, on, WaitOutcome::Enforced)];
        assert_eq!(exposed(&Trace { events: nothing_before }), [None]);
    }

    #[test]
    fn what_follows_the_record_on_its_stream_is_not_waited_for() {
        let on = Position { stream: 1, seq: 1, node: None };
        let events =
            vec![ran(0, 0, None, 40), ran(1, 0, None, 50), ran(1, 2, None, 90), wait(0, 1, on, WaitOutcome::Enforced)];
        assert_eq!(exposed(&Trace { events }), [Some(10)]);
    }

    #[test]
    fn a_gate_inside_a_graph_is_reached_when_the_nodes_before_it_have_ended() {
        let op = |behind| TraceNode {
            behind,
            lane: 0,
            waits: vec![],
            what: TraceNodeKind::Op { name: "op".into(), site: "".into(), flops: 0, accesses: vec![] },
        };
        let gate = TraceNodeKind::Wait { why: "test.gate".into(), event: "published".into() };
        let gate = TraceNode { behind: vec![0, 1], lane: 0, waits: vec![], what: gate };
        // Two branches meet at the gate; a second gate is behind nothing of the graph.
        let first = TraceNode { behind: vec![], ..gate.clone() };
        let nodes = vec![op(vec![]), op(vec![]), gate, op(vec![2]), first];
        let graph = Arc::new(TraceGraph { id: 1, name: "g".into(), nodes });
        let on = Some(Position { stream: 1, seq: 0, node: None });
        let bound = |node| BoundGate { node, generation: 3, on, outcome: WaitOutcome::Enforced };
        let events = vec![
            ran(0, 4, None, 10),
            ran(1, 0, None, 70),
            TraceEvent::Launch {
                rank: 0,
                stream: 0,
                seq: 5,
                graph,
                launch: 1,
                bound: vec![bound(2), bound(4)],
                groups: vec![],
            },
            ran(0, 5, Some(0), 20),
            ran(0, 5, Some(1), 45),
            ran(0, 5, Some(3), 80),
        ];
        let spans = Trace { events }.wait_spans(0);
        assert_eq!(
            spans.iter().map(|s| (s.reached, s.exposed())).collect::<Vec<_>>(),
            [(Some(45), Some(25)), (Some(10), Some(60))]
        );
        assert_eq!((spans[0].at.node, spans[0].generation), (Some(2), 3));
    }
}
