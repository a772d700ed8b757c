//! An executable: the graph cut into parts that one worker runs in one go.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::AtomicBool},
};

use crate::{
    Access, Mode, Region,
    cuda::GraphOnCard,
    dataflow::Flow,
    graph::{GraphInner, NodeKind},
};

pub(crate) enum Part {
    /// Operations one behind the other, with nothing else before, behind or between them. Whoever is ordered against
    /// one of them from outside is so against all; so what conflicts with one while another runs is a race, and the
    /// memory of all is claimed together.
    Ops { nodes: Vec<u32>, claims: Vec<Access> },
    /// A joint operation, an external wait or an external record.
    Single(u32),
}

/// On lines of its own: whoever comes last reads what others launch, whose counts of handles change with each launch.
#[repr(align(128))]
pub(crate) struct ExecInner {
    pub(crate) graph: Arc<GraphInner>,
    pub(crate) parts: Vec<Part>,
    /// By node.
    part_of: Vec<u32>,
    pub(crate) flow: Flow,
    /// By node: a joint operation that stands in its meeting, for drivers that look.
    pub(crate) at_joint: Vec<AtomicBool>,
    /// What a card launches.
    pub(crate) on_card: Option<GraphOnCard>,
}

impl ExecInner {
    pub(crate) fn new(graph: Arc<GraphInner>, on_card: Option<GraphOnCard>) -> ExecInner {
        let mut parts: Vec<Part> = Vec::new();
        let mut behind: Vec<Vec<u32>> = Vec::new();
        let mut part_of: Vec<u32> = Vec::with_capacity(graph.nodes.len());
        for (at, node) in graph.nodes.iter().enumerate() {
            let at = at as u32;
            let NodeKind::Op(_) = node.kind else {
                part_of.push(parts.len() as u32);
                parts.push(Part::Single(at));
                behind.push(parts_of(&node.behind, &part_of));
                continue;
            };
            if let [before] = node.behind[..]
                && graph.nodes[before as usize].after.len() == 1
                && let Part::Ops { nodes, .. } = &mut parts[part_of[before as usize] as usize]
            {
                nodes.push(at);
                part_of.push(part_of[before as usize]);
            } else {
                part_of.push(parts.len() as u32);
                parts.push(Part::Ops { nodes: vec![at], claims: Vec::new() });
                behind.push(parts_of(&node.behind, &part_of));
            }
        }
        for part in &mut parts {
            if let Part::Ops { nodes, claims } = part {
                *claims = merged(nodes.iter().flat_map(|node| &graph.op(*node).accesses));
            }
        }
        let at_joint = graph.nodes.iter().map(|_| AtomicBool::new(false)).collect();
        ExecInner { flow: Flow::new(&behind), graph, parts, part_of, at_joint, on_card }
    }

    pub(crate) fn part_of(&self, node: u32) -> u32 {
        self.part_of[node as usize]
    }

    /// Nodes of a part.
    pub(crate) fn nodes(&self, part: u32) -> &[u32] {
        match &self.parts[part as usize] {
            Part::Ops { nodes, .. } => nodes,
            Part::Single(node) => std::slice::from_ref(node),
        }
    }
}

/// The distinct parts of `nodes`.
fn parts_of(nodes: &[u32], part_of: &[u32]) -> Vec<u32> {
    let mut parts: Vec<u32> = nodes.iter().map(|node| part_of[*node as usize]).collect();
    parts.sort_unstable();
    parts.dedup();
    parts
}

/// Each region once: read if nobody writes it.
fn merged<'a>(accesses: impl Iterator<Item = &'a Access>) -> Vec<Access> {
    let mut known: HashMap<(u32, Region), usize> = HashMap::new();
    let mut merged: Vec<Access> = Vec::new();
    for access in accesses {
        let at = *known.entry((access.view.allocation_id(), access.view.region())).or_insert(merged.len());
        match merged.get_mut(at) {
            None => merged.push(access.clone()),
            Some(first) if access.mode.writes() => first.mode = Mode::Update,
            Some(_) => {}
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Fresh, testing::scratch};

    #[test]
    fn merged_claims_conflict_with_exactly_what_the_single_ones_conflict_with() {
        let v = scratch("v", &[12], DType::F32, Fresh::Zeroed);
        let cut = |from: usize, to: usize| v.flat(from..to).unwrap();
        let all = [
            Access::read(&cut(0, 4)),
            Access::read(&cut(0, 4)),
            Access::write(&cut(4, 8)),
            Access::read(&cut(4, 8)),
            Access::update(&cut(2, 3)),
            Access::read(&cut(9, 10)),
            Access::write(&cut(9, 10)),
        ];
        let claims = merged(all.iter());
        assert_eq!(claims.len(), 4);
        for (from, to) in (0..12).flat_map(|from| (from + 1..=12).map(move |to| (from, to))) {
            for other in [Access::read(&cut(from, to)), Access::write(&cut(from, to))] {
                let single = all.iter().any(|a| a.conflicts(&other));
                assert_eq!(claims.iter().any(|a| a.conflicts(&other)), single, "{from}..{to} {:?}", other.mode);
            }
        }
    }
}
