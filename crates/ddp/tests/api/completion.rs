//! What follows the buckets at the end of a step.

use ddp::{BucketSize, Completion, CompletionStage, Ddp, DdpConfig, Scaling};
use device::{Reduce, TraceEvent};
use pgroups::{Key, LayoutConfig};

use crate::{
    reduction::{assert_grads, both},
    support::{Setup, declared, machines, scalar},
};

/// In the order in which they are to run, with the label of a communicator for each.
const STAGES: [(CompletionStage, &str); 5] = [
    (CompletionStage::Conditional, "conditional"),
    (CompletionStage::SequenceParallel, "norms"),
    (CompletionStage::WeightShards, "shards"),
    (CompletionStage::Embeddings, "embeddings"),
    (CompletionStage::Routers, "routers"),
];

#[test]
fn completions_run_behind_the_buckets_in_the_order_of_their_stages_whatever_order_they_are_given_in() {
    // tp = 2, dp = 2: replicas {0, 2} and {1, 3}; rank r contributes r + 1 and every completion sums over {0, 1} or
    // {2, 3}.
    let ddp = DdpConfig { scaling: Scaling::PerToken, ..DdpConfig::default() };
    let layout = LayoutConfig { tp: 2, dp: Some(2), ..LayoutConfig::default() };
    let mut setup = Setup { layout, ddp, ..Setup::new(2, declared(&[6, 5])) };
    setup.plan.bucket_size = BucketSize::Unlimited;
    for setup in both(setup) {
        for (machine, given) in machines().into_iter().zip([[4, 2, 0, 3, 1], [1, 0, 4, 2, 3], [3, 4, 1, 0, 2]]) {
            machine.trace_start();
            let run = setup.run(&machine, |one| {
                let peers = one.groups.get(&Key::MP, "the test")?;
                let completions = given.map(|i| {
                    let (stage, label) = STAGES[i];
                    let group = peers.second(label)?;
                    Ok::<_, pgroups::PgError>(Completion {
                        stage,
                        params: vec!["p0".into()],
                        group,
                        reduce: Reduce::Sum,
                    })
                });
                let completions = completions.into_iter().collect::<Result<Vec<_>, _>>()?;
                let own = Ddp::attach(&one.buffers, &one.groups, setup.ddp.clone(), &one.stream)?;
                one.device.synchronize()?;
                one.ddp = own.completing(&completions)?;
                let tokens = scalar(&one.stream, if one.rank < 2 { 2.0 } else { 3.0 })?;
                one.microbatch(|one| (0..2).rev().try_for_each(|i| one.contribute(i, (one.rank + 1) as f32)))?;
                one.ddp.finish_grads_per_token(&one.stream, &tokens)?;
                // 1 + 3 and 2 + 4 of the replicas; 10 over the peers, doubled four times more; five tokens.
                assert_grads(one, 0, 10.0 * 16.0 / 5.0)?;
                assert_grads(one, 1, if one.rank % 2 == 0 { 4.0 } else { 6.0 } / 5.0)
            });
            run.unwrap();
            let trace = machine.trace_stop();
            let mut order: Vec<&str> = trace.events.iter().filter_map(|event| step(event)).collect();
            order.dedup();
            let want = ["bucket", "conditional", "norms", "shards", "embeddings", "routers", "division"];
            assert_eq!(order, want, "given as {given:?}");
        }
    }
}

/// Which part of the end of rank 0's step an event belongs to.
fn step(event: &TraceEvent) -> Option<&'static str> {
    match event {
        TraceEvent::Joint { rank: 0, group, .. } if group.contains("/ddp_reduce") => Some("bucket"),
        TraceEvent::Joint { rank: 0, group, .. } => {
            STAGES.iter().map(|(_, label)| *label).find(|label| group.contains(&format!("/{label}")))
        }
        TraceEvent::Op { rank: 0, site, .. } if site == "ddp.per_token" => Some("division"),
        _ => None,
    }
}
