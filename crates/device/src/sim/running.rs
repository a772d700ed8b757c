//! A launch under way: node by node, in an order that the chooser picks.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::state::Meet;
use crate::launch::LaunchBody;

pub(super) struct Running {
    pub(super) launch: Arc<LaunchBody>,
    /// By node: how many nodes it waits for.
    pending: Vec<usize>,
    /// Nodes behind nothing that is still to come, and not begun, or in a meeting.
    pub(super) ready: BTreeSet<u32>,
    pub(super) meets: BTreeMap<u32, Meet>,
    left: usize,
}

impl Running {
    pub(super) fn new(launch: Arc<LaunchBody>) -> Running {
        let pending: Vec<usize> = launch.exec.graph.nodes.iter().map(|node| node.behind.len()).collect();
        let ready = (0..pending.len() as u32).filter(|node| pending[*node as usize] == 0).collect();
        let left = pending.len();
        Running { launch, pending, ready, meets: BTreeMap::new(), left }
    }

    pub(super) fn is_over(&self) -> bool {
        self.left == 0
    }

    pub(super) fn finish(&mut self, node: u32) {
        self.ready.remove(&node);
        self.meets.remove(&node);
        self.left -= 1;
        for after in &self.launch.exec.graph.nodes[node as usize].after {
            let pending = &mut self.pending[*after as usize];
            *pending -= 1;
            if *pending == 0 {
                self.ready.insert(*after);
            }
        }
    }
}
