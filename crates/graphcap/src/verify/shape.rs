//! A launched graph, prepared once for all its launches: who follows whom, and a cover by chains.

use device::TraceGraph;

/// Nodes of a chain are ordered one behind the other, so that one number says how far along it a point is.
pub(super) struct Shape {
    /// By node: its chain, from 0.
    pub(super) chain: Vec<u32>,
    /// By node: direct successors.
    pub(super) after: Vec<Vec<u32>>,
    /// By node: how many it is directly behind.
    pub(super) behind: Vec<u32>,
    /// Nodes that nothing follows.
    pub(super) last: Vec<u32>,
    pub(super) chains: u32,
}

impl Shape {
    pub(super) fn new(graph: &TraceGraph) -> Shape {
        let count = graph.nodes.len();
        let mut shape = Shape {
            chain: vec![0; count],
            after: vec![vec![]; count],
            behind: vec![0; count],
            last: vec![],
            chains: 0,
        };
        // By chain: its last node so far.
        let mut tails: Vec<usize> = Vec::new();
        for (i, node) in graph.nodes.iter().enumerate() {
            // What names a later node would never run; `verify` reports it, and here it is no edge.
            let mut behind: Vec<u32> = node.behind.iter().copied().filter(|&b| (b as usize) < i).collect();
            behind.sort_unstable();
            behind.dedup();
            let chain = tails.iter().position(|&tail| behind.contains(&(tail as u32)));
            let chain = chain.unwrap_or_else(|| {
                tails.push(i);
                tails.len() - 1
            });
            tails[chain] = i;
            shape.chain[i] = chain as u32;
            shape.behind[i] = behind.len() as u32;
            behind.iter().for_each(|&b| shape.after[b as usize].push(i as u32));
        }
        shape.last = (0..count as u32).filter(|&i| shape.after[i as usize].is_empty()).collect();
        shape.chains = tails.len() as u32;
        shape
    }
}
