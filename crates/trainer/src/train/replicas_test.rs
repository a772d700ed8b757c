//! Replicas that have come apart are noticed, whatever the layout.

use device::{Machine, Options, cuda::CudaOptions};
use pgroups::{Pass, PgError, Rank, Replicas, Turn};

use super::rank::{RankRun, gpt_plan};
use crate::{Config, TrainError, cards::cards};

const MODEL: &str = "[model]\nlayers = 2\ndim = 24\nheads = 4\nseq_len = 10\nvocab = 257\n[train]\nsteps = 1\n\
                     global_batch = 16\n[optimizer]\nlr = 1e-3\n[data]\npath = \"none\"\n";

/// What the ranks of a layout are told when `rank` has another first element of parameter `name`.
fn told(machine: &Machine, layout: &[&str], rank: u32, name: &str) -> Vec<Result<(), TrainError>> {
    let config = Config::parse(MODEL, "test".as_ref(), "".as_ref(), layout).expect("a valid configuration");
    let ranks = pgroups::local(machine, config.ranks().world_size(), |own: Rank| -> Result<_, TrainError> {
        let run = RankRun::build(&own, &config, None)?;
        let replicas = Replicas::new(&config.ranks(), &gpt_plan(&config)?.specs())?;
        run.compare_replicas(&replicas)?;
        if own.global.0 == rank {
            let param = run.parallel.buffers.params().iter().find(|param| param.name() == name).expect("it is there");
            let value = Turn::eager(Pass::Backward).read(param, &run.stream)?;
            run.stream.upload(&value.reshape(&[value.numel()])?.flat(0..1)?, vec![0.5f32])?;
        }
        let compared = run.compare_replicas(&replicas);
        run.meet()?;
        Ok(compared)
    });
    ranks.expect("only comparisons fail")
}

#[test]
fn a_replica_that_has_come_apart_is_named_on_all_ranks() {
    for machine in [Machine::sim(3)].into_iter().chain(cards(CudaOptions::default(), Options::default())) {
        // tp fastest, then gtp, then dp: norms are on all ranks, a matrix's shard of rank 5 is on rank 1 as well.
        for (layout, rank, other, name) in [
            (&["layout.tp=2", "layout.gtp=2", "layout.dp=2"][..], 5, 1, "h.1.mlp.c_fc.weight"),
            (&["layout.tp=2", "layout.gtp=2"], 2, 0, "h.0.ln_1.weight"),
            (&["layout.dp=3", "optimizer.distributed=true", "train.global_batch=12"], 2, 0, "wte"),
        ] {
            for told in told(&machine, layout, rank, name) {
                let Err(TrainError::Group(PgError::ReplicasDiffer {
                    param,
                    rank: first,
                    other: second,
                    differing,
                    ..
                })) = told
                else {
                    panic!("{layout:?} on {}: {told:?}", machine.driver())
                };
                assert_eq!((param.as_str(), first.0, second.0, differing), (name, other, rank, 1), "{layout:?}");
            }
        }
        // Nobody else has the shard.
        assert!(told(&machine, &["layout.gtp=4"], 2, "h.0.attn.c_attn.weight").iter().all(Result::is_ok));
    }
}
