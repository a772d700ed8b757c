//! A launch under way: node by node, in an order that the chooser picks.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{past::Past, state::Meet};
use crate::launch::LaunchBody;

pub(super) struct Running {
    pub(super) launch: Arc<LaunchBody>,
    /// By node: how many nodes it waits for.
    pending: Vec<usize>,
    /// Nodes behind nothing that is still to come, and not begun, or in a meeting.
    pub(super) ready: BTreeSet<u32>,
    pub(super) meets: BTreeMap<u32, Meet>,
    left: usize,
    /// In a search: what comes before the launch, and by node what comes before what is behind it.
    before: Past,
    pub(super) pasts: BTreeMap<u32, Past>,
}

impl Running {
    pub(super) fn new(launch: Arc<LaunchBody>, before: Past) -> Running {
        let pending: Vec<usize> = launch.exec.graph.nodes.iter().map(|node| node.behind.len()).collect();
        let ready = (0..pending.len() as u32).filter(|node| pending[*node as usize] == 0).collect();
        let left = pending.len();
        Running { launch, pending, ready, meets: BTreeMap::new(), left, before, pasts: BTreeMap::new() }
    }

    pub(super) fn is_over(&self) -> bool {
        self.left == 0
    }

    /// What comes before `node`, as far as it is known.
    pub(super) fn past(&self, node: u32) -> Past {
        let behind = &self.launch.exec.graph.nodes[node as usize].behind;
        behind.iter().filter_map(|node| self.pasts.get(node)).fold(self.before.clone(), Past::and)
    }

    /// What comes before whatever is behind the launch.
    pub(super) fn end(&self) -> Past {
        self.pasts.values().fold(self.before.clone(), Past::and)
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
