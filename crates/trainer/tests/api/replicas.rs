//! Ranks that hold the same elements keep the same bits, which a run can be told to look after.

use crate::fixture::{Folder, bits, on_cards};

const TRAIN: &str = "[train]\nsteps = 4\nglobal_batch = 16\neval_interval = 2\n[optimizer]\nlr = 1e-2\n";

fn settings([tp, gtp, dp]: [u32; 3], more: &[&str]) -> Vec<String> {
    let always = ["model.dim=24", "model.heads=4", "log.sample_tokens=0", "ddp.bucket_size=3000"];
    let sizes = [format!("layout.tp={tp}"), format!("layout.gtp={gtp}"), format!("layout.dp={dp}")];
    sizes.into_iter().chain(always.iter().chain(more).map(|&set| set.to_owned())).collect()
}

#[test]
fn replicas_of_every_layout_stay_equal_over_training() {
    let folder = Folder::with_config(TRAIN);
    let layouts = [
        ([1, 1, 3], &["train.global_batch=12", "optimizer.distributed=true", "graph.scope=step"][..]),
        ([2, 1, 2], &["layout.sequence_parallel=true", "graph.scope=microbatch"]),
        ([2, 2, 1], &["model.arch=llama", "graph.scope=layer"]),
        ([1, 4, 1], &["gtp.f32_reduce=true"]),
        ([2, 2, 2], &["layout.sequence_parallel=true", "optimizer.distributed=true", "layout.order=dp-gtp-tp"]),
    ];
    let places = || [&[][..]].into_iter().chain(on_cards());
    for ((sizes, more), device) in layouts.into_iter().flat_map(|layout| places().map(move |place| (layout, place))) {
        let run = |interval: u64| {
            let set =
                [settings(sizes, &[more, device].concat()), vec![format!("train.replica_check_interval={interval}")]]
                    .concat();
            bits(&folder.train(&set.iter().map(String::as_str).collect::<Vec<_>>()))
        };
        assert_eq!(run(1), run(0), "{sizes:?} {device:?}: comparing changes nothing");
    }
}
