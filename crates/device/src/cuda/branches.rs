//! Which nodes of a graph may work in the same memory: those of which one is behind the other.

use std::sync::Arc;

use super::{CudaError, card::Card, steps::Launchable, workspace::Workspace};
use crate::graph::GraphInner;

/// The workspaces of a graph, and which of them a node has.
pub(super) struct Branches {
    pub(super) workspaces: Vec<Workspace>,
    /// By node.
    of: Vec<Option<usize>>,
}

impl Branches {
    /// As few as the order of the nodes allows, each as large as its nodes need. The context is current.
    pub(super) fn new(
        card: &Arc<Card>,
        graph: &GraphInner,
        settled: &[Vec<Launchable>],
    ) -> Result<Branches, CudaError> {
        let needs: Vec<Option<usize>> =
            settled.iter().map(|steps| steps.iter().filter_map(Launchable::scratch).max()).collect();
        let behind: Vec<&[u32]> = graph.nodes.iter().map(|node| &node.behind[..]).collect();
        let (of, sizes) = share(&behind, &needs);
        let workspaces = sizes.into_iter().map(|bytes| Workspace::new(card, bytes)).collect::<Result<_, _>>()?;
        Ok(Branches { workspaces, of })
    }

    pub(super) fn of(&self, node: usize) -> Option<&Workspace> {
        self.of[node].map(|at| &self.workspaces[at])
    }
}

/// The place of each node that needs one, and the sizes of the places. `behind`: the earlier nodes that each is behind.
fn share(behind: &[&[u32]], needs: &[Option<usize>]) -> (Vec<Option<usize>>, Vec<usize>) {
    let (mut of, mut sizes) = (Vec::with_capacity(needs.len()), Vec::<usize>::new());
    // By place: how many nodes have had it; and how many of those a node knows to be over.
    let mut had = Vec::<u32>::new();
    let mut over = Vec::<Vec<u32>>::with_capacity(needs.len());
    for (need, before) in needs.iter().zip(behind) {
        let mut known = vec![0; had.len()];
        for node in *before {
            for (known, over) in known.iter_mut().zip(&over[*node as usize]) {
                *known = (*known).max(*over);
            }
        }
        let place = need.map(|bytes| {
            let free = (0..had.len()).filter(|place| known[*place] == had[*place]);
            // The smallest that is large enough, else the largest, which then grows by least.
            let place = free.min_by_key(|place| match sizes[*place] {
                size if size >= bytes => (0, size),
                size => (1, bytes - size),
            });
            let place = place.unwrap_or_else(|| {
                had.push(0);
                sizes.push(0);
                known.push(0);
                had.len() - 1
            });
            had[place] += 1;
            known[place] = had[place];
            sizes[place] = sizes[place].max(bytes);
            place
        });
        of.push(place);
        over.push(known);
    }
    (of, sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_share_memory_only_if_one_is_behind_the_other() {
        // 0 - 1 - 3, 0 - 2 - 3, and 4 beside all of them.
        let behind: [&[u32]; 5] = [&[], &[0], &[0], &[1, 2], &[]];
        let (of, sizes) = share(&behind, &[Some(10), Some(20), Some(30), Some(5), Some(1)]);
        assert_eq!(of, [Some(0), Some(0), Some(1), Some(0), Some(2)]);
        assert_eq!(sizes, [20, 30, 1]);
    }

    #[test]
    fn a_large_need_takes_the_place_that_is_large_already() {
        // Two branches, one with a large need, twice; behind them one of each kind again.
        let behind: [&[u32]; 5] = [&[], &[], &[0, 1], &[0, 1], &[2, 3]];
        let (of, sizes) = share(&behind, &[Some(4), Some(90), Some(90), Some(3), Some(80)]);
        assert_eq!(of, [Some(0), Some(1), Some(1), Some(0), Some(1)]);
        assert_eq!(sizes, [4, 90]);
        // Of those that are large enough the smallest is taken.
        assert_eq!(share(&[&[], &[], &[0, 1]], &[Some(90), Some(40), Some(30)]).0[2], Some(1));
        // Nothing is large enough: the largest grows.
        assert_eq!(share(&[&[], &[], &[0, 1]], &[Some(4), Some(7), Some(9)]).1, [4, 9]);
    }

    #[test]
    fn a_node_without_need_passes_on_what_is_over() {
        let behind: [&[u32]; 3] = [&[], &[0], &[1]];
        assert_eq!(share(&behind, &[Some(8), None, Some(8)]), (vec![Some(0), None, Some(0)], vec![8]));
    }

    #[test]
    fn a_place_that_a_branch_has_taken_over_is_not_free_to_its_sibling() {
        // 1 takes over what 0 had; 2 is behind 0 as well, but beside 1.
        let behind: [&[u32]; 3] = [&[], &[0], &[0]];
        assert_eq!(share(&behind, &[Some(8); 3]).0, [Some(0), Some(0), Some(1)]);
    }
}
