//! Two models with different collections in one process: each capture, warm-up and replay uses the one it was given.

use std::collections::BTreeSet;

use device::{Trace, TraceEvent, TraceNodeKind};
use graphcap::{
    CaptureScope, GraphConfig, GraphSet, Scope,
    verify::{VerifyOptions, verify},
};
use pgroups::{GlobalRank, Key, Layout, LayoutConfig, Needs, ProcessGroups, local};

use super::support::*;

/// Groups of joint operations that were launched inside graphs of this name: members, by name.
fn groups_inside(trace: &Trace, graph_name: &str) -> BTreeSet<(String, Vec<u32>)> {
    let mut found = BTreeSet::new();
    for event in &trace.events {
        let TraceEvent::Launch { graph, groups, .. } = event else { continue };
        if graph.name.as_str() != graph_name {
            continue;
        }
        for node in &graph.nodes {
            if let TraceNodeKind::Joint { group, .. } = &node.what {
                let members = groups.iter().find(|known| known.group == *group).unwrap().members.to_vec();
                found.insert((group.to_string(), members));
            }
        }
    }
    found
}

#[test]
fn collectives_of_a_graph_belong_to_the_collection_that_was_passed() {
    // One collection as a layout makes it; one by hand, permuted and not contiguous.
    for machine in [cpu(), sim(1), sim(2)] {
        machine.trace_start();
        let sums = local(&machine, 4, |rank| -> Result<Vec<f32>, Caught> {
            let layout = Layout::new(&LayoutConfig { dp: Some(4), ..LayoutConfig::default() })?;
            let made = ProcessGroups::build(&rank, &layout, &Needs::keys([Key::DP_CP]))?;
            let lists = [[2, 0], [3, 1]].map(|list: [u32; 2]| list.map(GlobalRank).to_vec()).to_vec();
            let by_hand = Needs { custom: vec![(Key::named("pairs")?, lists)], ..Needs::default() };
            let by_hand = ProcessGroups::build(&rank, &layout, &by_hand)?;
            let mut all = Vec::new();
            for (name, groups, key) in [("made", made, Key::DP_CP), ("by hand", by_hand, Key::named("pairs")?)] {
                let (compute, group) = (rank.device.stream(name)?, groups.get(&key, "a test")?.clone());
                let sum = floats(&rank.device, name, NUMEL);
                let own = 1.0 + rank.global.0 as f32;
                compute.upload(&sum, vec![own; NUMEL])?;
                let mut set = GraphSet::new(&compute, GraphConfig::new(Scope::Layer))?;
                let body = |_: &mut CaptureScope<'_>| group.all_reduce(&compute, &sum, device::Reduce::Sum);
                let (graph, ()) = set.capture(name, &compute, body)?;
                set.warm_up(&compute, 2)?;
                graph.replay(&compute, &[])?;
                graph.replay(&compute, &[])?;
                all.push(get::<f32>(&compute, &sum)[0]);
            }
            rank.device.synchronize()?;
            Ok(all)
        });
        // Twice: the sum of all four times four; of a pair times two.
        assert_eq!(sums.unwrap(), [[40.0, 8.0], [40.0, 12.0], [40.0, 8.0], [40.0, 12.0]]);
        let trace = machine.trace_stop();
        let members = |name: &str| -> Vec<Vec<u32>> {
            groups_inside(&trace, name).into_iter().map(|(_, members)| members).collect()
        };
        assert_eq!(members("made"), [vec![0, 1, 2, 3]]);
        assert_eq!(members("by hand"), [vec![2, 0], vec![3, 1]]);
        let names =
            |name: &str| groups_inside(&trace, name).into_iter().map(|(group, _)| group).collect::<BTreeSet<_>>();
        assert!(names("made").is_disjoint(&names("by hand")));
        assert!(verify(&trace, &VerifyOptions::default()).is_clean());
    }
}
