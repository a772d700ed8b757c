//! Raw gradients of a step do not depend on how data parallelism is set up.

use device::Machine;
use pgroups::Rank;

use super::{
    plan::{any_corpus, batches},
    rank::RankRun,
};
use crate::{Config, TrainError};

const SMALL: &str = "[model]\nlayers = 2\ndim = 24\nheads = 3\nseq_len = 9\n[train]\nsteps = 1\nglobal_batch = 8\n\
                     [optimizer]\nlr = 1e-3\n[data]\npath = \"none\"\n";

/// What one rank has of the gradients: parts of the flat buffer, with their starts.
type Parts = Vec<(usize, Vec<f32>)>;

fn parts(run: &RankRun, place: u32) -> Result<Parts, TrainError> {
    let plan = run.parallel.buffers.plan();
    let [buffer] = plan.buffers() else { panic!("one type of parameters") };
    let memory = run.parallel.buckets().zip(plan.groups().iter().flatten());
    let part = |(bucket, id): (ddp::BucketMemory, &ddp::BucketId)| {
        let values = run.stream.download::<f32>(&bucket.own_grads)?.wait()?;
        Ok((buffer.shard(id.bucket, place).start, values))
    };
    memory.map(part).collect()
}

/// The loss of every rank and the gradient of every parameter by name, put together from the ranks' shards.
fn gradients(settings: &[&str]) -> (Vec<f32>, Vec<(String, Vec<f32>)>) {
    let config = Config::parse(SMALL, "test".as_ref(), "".as_ref(), settings).expect("a valid configuration");
    let corpus = any_corpus(&config).expect("text");
    let ranks = pgroups::local(&Machine::sim(11), config.layout.dp, |rank: Rank| -> Result<_, TrainError> {
        let mut run = RankRun::build(&rank, &config, None)?;
        let batch = batches(&config, &corpus, rank.global.0)?.next_batch()?;
        // The corpus has one letter only: other tokens, which follow from their place in the global batch.
        let (count, len) = (batch.microbatches().count(), config.train.micro_batch as usize * config.model.seq_len);
        let first = |at: usize| (rank.global.0 as usize * count + at) * len;
        let other = |from: usize| -> Vec<i32> { (from..from + len).map(|i| (i * i * 7 + i) as i32 % 251).collect() };
        let tokens: Vec<_> = (0..count).map(|at| (other(first(at)), other(first(at) + 1))).collect();
        let microbatches: Vec<_> =
            tokens.iter().map(|(inputs, targets)| data::Microbatch { inputs, targets }).collect();
        // The first step counts gradients and reduces at its end; the second reduces beside backward. At a rate of 0 both
        // have the same weights.
        (0..2).try_for_each(|_| run.step(&microbatches, 0.0))?;
        run.parallel.read_grads(&run.stream)?;
        let loss = run.stream.download::<f32>(&run.loss)?.wait()?[0];
        let plan = run.parallel.buffers.plan().clone();
        let parts = parts(&run, rank.global.0)?;
        run.meet()?;
        Ok((loss, plan, parts))
    });
    let ranks = ranks.expect("the step");
    let plan = &ranks[0].1;
    let mut flat = vec![f32::NAN; plan.buffers()[0].numel()];
    for (start, values) in ranks.iter().flat_map(|(_, _, parts)| parts) {
        flat[*start..start + values.len()].copy_from_slice(values);
    }
    let gradient = |i: usize| flat[plan.slot(i).range.clone()].to_vec();
    let named = plan.params().iter().enumerate().map(|(i, param)| (param.name.clone(), gradient(i))).collect();
    (ranks.iter().map(|rank| rank.0).collect(), named)
}

#[test]
fn gradients_are_those_of_one_rank_on_any_number_of_them_sharded_or_not() {
    let (loss, want) = gradients(&[]);
    let largest = |values: &[f32]| values.iter().fold(0f32, |max, v| max.max(v.abs()));
    let floor = 2e-7 * want.iter().map(|(_, grad)| largest(grad)).fold(0.0, f32::max);
    assert!(want.iter().all(|(_, grad)| largest(grad) > 0.0), "every parameter learns");
    for dp in ["layout.dp=1", "layout.dp=2", "layout.dp=4"] {
        for distributed in ["optimizer.distributed=false", "optimizer.distributed=true"] {
            for bucket in ["ddp.bucket_size=1", "ddp.bucket_size=9000", "ddp.bucket_size=40000000"] {
                for micro in ["train.micro_batch=1", "train.micro_batch=2"] {
                    let settings = [dp, distributed, bucket, micro];
                    let (losses, got) = gradients(&settings);
                    for other in &losses {
                        assert!((other - loss[0]).abs() <= 2e-6 * loss[0], "{settings:?}: {other} and {}", loss[0]);
                    }
                    for ((name, a), (wanted, b)) in got.iter().zip(&want) {
                        assert_eq!(name, wanted);
                        let off = a.iter().zip(b).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
                        let bound = (2e-6 * largest(b)).max(floor);
                        assert!(off <= bound, "{settings:?}: {name} differs by {off} of {}", largest(b));
                    }
                }
            }
        }
    }
}
