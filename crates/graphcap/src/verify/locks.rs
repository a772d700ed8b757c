//! What never ends, and what might lock up: members that disagree or do not come, circles of waits, contradicting
//! orders of calls.

use std::collections::BTreeMap;

use device::Label;
use petgraph::{algo::tarjan_scc, graph::DiGraph};

use super::{
    CallOrder, VerifyOptions, Window,
    finding::{Blocking, Finding, Member},
    joint::Call,
    order::{Blocked, Run, Task, Visitor, asked},
    place::{OpAt, Place, Places},
    program::{ItemKind, Program},
};

/// All of it.
pub(super) fn of<V: Visitor>(run: &Run<'_, '_, V>, places: &Places<'_>, options: &VerifyOptions) -> Vec<Finding> {
    let mut findings = disagreements(run.program);
    findings.extend(stuck(run, places, options));
    if options.call_order == CallOrder::Same {
        findings.extend(contradicting(run.program, places));
    }
    findings
}

fn disagreements(program: &Program<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    for call in &program.calls.all {
        let asks = |(member, rank): (usize, &u32)| {
            let what = asked(program, call, member)?;
            Some(Member { rank: *rank, asks: Label::from(what.to_owned()) })
        };
        let asks: Vec<Member> = call.members.iter().enumerate().filter_map(asks).collect();
        if asks.iter().any(|member| member.asks != asks[0].asks) {
            found.push(Finding::Disagree { group: call.group.clone(), seq: call.seq.0, asked: asks });
        }
    }
    found
}

/// Ranks that never make a call.
fn missing(call: &Call) -> Vec<u32> {
    let absent = |(member, _): &(usize, &u32)| call.callers[*member].is_none() && !call.before_trace[*member];
    call.members.iter().enumerate().filter(absent).map(|(_, rank)| *rank).collect()
}

fn stuck<V: Visitor>(run: &Run<'_, '_, V>, places: &Places<'_>, options: &VerifyOptions) -> Vec<Finding> {
    let blocked = run.blocked();
    let mut found = Vec::new();
    let mut told = Vec::new();
    for (task, event, why) in &blocked {
        let Blocked::Call(number) = why else { continue };
        let call = &run.program.calls.all[*number as usize];
        let absent = missing(call);
        if absent.is_empty() || options.window == Window::Piece || told.contains(number) {
            continue;
        }
        told.push(*number);
        let waiting = places.op(OpAt { event: *event, node: task.node });
        found.push(Finding::Missing { group: call.group.clone(), seq: call.seq.0, waiting, missing: absent });
    }
    found.extend(circle(run, &blocked, places));
    found
}

/// One circle of tasks that wait for each other.
fn circle<V: Visitor>(run: &Run<'_, '_, V>, blocked: &[(Task, u32, Blocked)], places: &Places<'_>) -> Option<Finding> {
    let program = run.program;
    let homes = Homes::new(program);
    let mut graph: DiGraph<usize, ()> = DiGraph::new();
    let nodes: Vec<_> = (0..blocked.len()).map(|i| graph.add_node(i)).collect();
    // A stream that cannot go on holds up all that comes later on it.
    let of_stream = |stream: u32| (0..blocked.len()).filter(move |&i| blocked[i].0.stream == stream);
    for (i, (task, _, why)) in blocked.iter().enumerate() {
        let on: Vec<u32> = match why {
            Blocked::Point(point) => homes.point.get(point).copied().into_iter().collect(),
            Blocked::Host(waits) => {
                let host = program.streams[task.stream as usize].host as usize;
                let points = program.hosts[host].iter().take(*waits as usize).flatten();
                points
                    .filter(|point| run.reached(**point).is_none())
                    .filter_map(|p| homes.point.get(p).copied())
                    .collect()
            }
            Blocked::Call(call) => homes.call.get(call).cloned().unwrap_or_default(),
        };
        for other in on.into_iter().flat_map(of_stream).filter(|other| *other != i) {
            // Who waits in the same call is not who it waits for.
            if matches!((why, blocked[other].2), (Blocked::Call(a), Blocked::Call(b)) if *a == b) {
                continue;
            }
            graph.add_edge(nodes[i], nodes[other], ());
        }
    }
    let found = tarjan_scc(&graph).into_iter().find(|component| component.len() > 1)?;
    let start = found[0];
    // Shortest way round from one of them.
    let mut ways = BTreeMap::from([(start, None)]);
    let mut queue = std::collections::VecDeque::from([start]);
    let last = 'found: loop {
        let at = queue.pop_front()?;
        for next in graph.neighbors(at).filter(|next| found.contains(next)) {
            if next == start {
                break 'found at;
            }
            if let std::collections::btree_map::Entry::Vacant(entry) = ways.entry(next) {
                entry.insert(Some(at));
                queue.push_back(next);
            }
        }
    };
    let mut way = vec![last];
    while let Some(Some(before)) = ways.get(way.last()?) {
        way.push(*before);
    }
    let told = |node: &petgraph::graph::NodeIndex| {
        let (task, event, why) = &blocked[graph[*node]];
        let who = places.op(OpAt { event: *event, node: task.node });
        Blocking { who, until: until(program, why) }
    };
    Some(Finding::Circle(way.iter().rev().map(told).collect()))
}

fn until(program: &Program<'_>, why: &Blocked) -> String {
    match why {
        Blocked::Point(_) => "for its record".to_owned(),
        Blocked::Host(_) => "for its host, which waits for a stream".to_owned(),
        Blocked::Call(call) => {
            let call = &program.calls.all[*call as usize];
            format!("for the others in call {} of group '{}' {:?}", call.seq.0, call.group, call.members)
        }
    }
}

/// On which streams points and calls are.
struct Homes {
    point: BTreeMap<u32, u32>,
    call: BTreeMap<u32, Vec<u32>>,
}

impl Homes {
    fn new(program: &Program<'_>) -> Homes {
        let mut homes = Homes { point: BTreeMap::new(), call: BTreeMap::new() };
        for (stream, items) in (0..).zip(&program.streams) {
            for item in &items.items {
                homes.point.extend(item.point.map(|point| (point, stream)));
                match item.kind {
                    ItemKind::Joint(call) => homes.call.entry(call).or_default().push(stream),
                    ItemKind::Launch(launch) => {
                        let launched = &program.launches[launch as usize];
                        homes.point.extend(launched.points.values().map(|point| (*point, stream)));
                        for call in launched.calls() {
                            homes.call.entry(call).or_default().push(stream);
                        }
                    }
                    _ => {}
                }
            }
        }
        homes
    }
}

/// Calls that ranks submit in orders that contradict each other; one circle of them.
///
/// Calls of one launch have no order among each other here: they are what the graph's branches make of them.
fn contradicting(program: &Program<'_>, places: &Places<'_>) -> Option<Finding> {
    let calls = &program.calls.all;
    // By rank: its calls in the order of submission, those of one launch together.
    let mut submitted: BTreeMap<u32, Vec<(u32, Vec<u32>)>> = BTreeMap::new();
    for (number, call) in (0..).zip(calls) {
        for (member, caller) in call.callers.iter().enumerate() {
            let Some(caller) = caller else { continue };
            submitted.entry(call.members[member]).or_default().push((caller.event, vec![number]));
        }
    }
    // Calls first, then one node for each gap between two submissions of a rank.
    let mut before = vec![0u32; calls.len()];
    let mut after: Vec<Vec<u32>> = vec![Vec::new(); calls.len()];
    for list in submitted.values_mut() {
        list.sort_unstable_by_key(|(event, _)| *event);
        let mut gap: Option<usize> = None;
        for batch in list.chunk_by(|a, b| a.0 == b.0) {
            let batch = batch.iter().flat_map(|(_, calls)| calls);
            let next = after.len();
            after.push(Vec::new());
            before.push(0);
            for &call in batch {
                if let Some(gap) = gap {
                    after[gap].push(call);
                    before[call as usize] += 1;
                }
                after[call as usize].push(next as u32);
                before[next] += 1;
            }
            gap = Some(next);
        }
    }
    let mut free: Vec<u32> = (0..after.len() as u32).filter(|&node| before[node as usize] == 0).collect();
    while let Some(node) = free.pop() {
        for &next in &after[node as usize] {
            before[next as usize] -= 1;
            if before[next as usize] == 0 {
                free.push(next);
            }
        }
    }
    let left = |node: &u32| before[*node as usize] > 0;
    // Backwards from what is left one always gets to something that is left: in the end round a circle.
    let mut into: BTreeMap<u32, u32> = BTreeMap::new();
    for node in (0..after.len() as u32).filter(left) {
        after[node as usize].iter().filter(|next| left(next)).for_each(|&next| {
            into.insert(next, node);
        });
    }
    let mut way: Vec<u32> = Vec::new();
    let mut at = *into.keys().next()?;
    while !way.contains(&at) {
        way.push(at);
        at = into[&at];
    }
    way.drain(..way.iter().position(|node| *node == at)?);
    way.reverse();
    let told = |number: u32| -> Option<Place> {
        let call = calls.get(number as usize)?;
        let caller = call.callers.iter().flatten().next()?;
        Some(places.op(OpAt { event: caller.event, node: caller.node }))
    };
    Some(Finding::CallOrder(way.into_iter().filter_map(told).collect()))
}
