//! What captures take is told.

use device::{DType, MemoryKind};
use graphcap::{GateMode, GraphError};

use super::support::*;

#[test]
fn a_set_tells_how_many_graphs_it_has_what_they_took_and_that_they_allocate_nothing() {
    for machine in machines() {
        let rig = Rig::new(&machine, &[1, 1]);
        let mut set = rig.set(GateMode::InGraph);
        assert_eq!(set.cost(), None, "nothing was captured");
        let failed = set.capture("failed", &rig.compute, |_| Err::<(), Caught>("planted".into()));
        assert!(matches!(failed, Err(GraphError::Body { .. })));
        assert_eq!(set.cost(), None, "a failed capture leaves nothing");
        let nodes: usize = [0, 1].map(|i| rig.reading(&mut set, &format!("{i}"), &[i]).node_count()).iter().sum();
        let cost = set.cost().unwrap();
        assert!(nodes >= 4 && !cost.time.is_zero());
        assert_eq!((cost.graphs, cost.nodes, cost.grown_bytes), (2, nodes, 0));
        let told = cost.to_string();
        assert!(told.starts_with(&format!("2 graphs of {nodes} nodes captured in ")), "{told}");
        assert!(told.ends_with(" ms, no memory allocated"), "{told}");
        // What was allocated since the set was made is found behind the next capture.
        let kept = rig.device.alloc("kept", &[100], DType::F32, MemoryKind::Other).unwrap();
        rig.reading(&mut set, "again", &[0]);
        let cost = set.cost().unwrap();
        assert_eq!((cost.graphs, cost.grown_bytes), (3, 400));
        assert!(cost.to_string().ends_with(" ms, memory grown by 400 bytes"), "{cost}");
        drop(kept);
    }
}
