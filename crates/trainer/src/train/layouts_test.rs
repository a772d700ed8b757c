//! Initial values and raw gradients do not depend on how a model is laid out over ranks.

use device::{Machine, Options, View, cuda::CudaOptions};
use pgroups::{GlobalRank, Layout, ParamSpec, Rank, ShardMap};

use super::{
    plan::{any_corpus, batches, plan_run},
    rank::{RankRun, data_place, gpt_plan},
};
use crate::{Config, TrainError, cards::cards, graphs::GRAPHS};

/// 257 rows of the table divide over nothing, and few of the other sizes over four ranks: there is padding everywhere.
const MODEL: &str = "[model]\nlayers = 2\ndim = 24\nheads = 4\nseq_len = 10\nvocab = 257\n[train]\nsteps = 1\n\
                     global_batch = 16\n[optimizer]\nlr = 1e-3\n[data]\npath = \"none\"\n";

/// What a whole model has of something, by name of the parameter.
type Named = Vec<(String, Vec<f32>)>;

/// A step on all ranks, put together.
struct Together {
    losses: Vec<f32>,
    values: Named,
    grads: Named,
}

fn config(settings: &[&str]) -> Config {
    Config::parse(MODEL, "test".as_ref(), "".as_ref(), settings).expect("a valid configuration")
}

/// What one rank has of the flat buffer; NaN where it has nothing to say.
fn flat<'v>(run: &RankRun, parts: impl Iterator<Item = (usize, &'v View)>) -> Result<Vec<f32>, TrainError> {
    let mut flat = vec![f32::NAN; run.parallel.buffers.plan().buffers()[0].numel()];
    for (start, view) in parts {
        let values = run.stream.download::<f32>(view)?.wait()?;
        flat[start..start + values.len()].copy_from_slice(&values);
    }
    Ok(flat)
}

fn machines() -> Vec<Machine> {
    [Machine::sim(5)].into_iter().chain(cards(CudaOptions::default(), Options::default())).collect()
}

/// Of every rank the loss, values as they were filled and behind all steps, and gradients that it has reduced.
struct OfRank {
    loss: f32,
    filled: Vec<f32>,
    values: Vec<f32>,
    grads: Vec<f32>,
    plan: ddp::BucketPlan,
}

/// Steps of the same samples, one for each of `rates`; if the configuration has graphs, all but the first are replays.
fn ran(machine: &Machine, settings: &[&str], rates: &[f32]) -> Vec<OfRank> {
    let config = config(settings);
    let corpus = any_corpus(&config).expect("text");
    let plans = config.graph.scope().map(|_| plan_run(&config).expect("a plan").plans());
    let ranks = pgroups::local(machine, config.ranks().world_size(), |rank: Rank| -> Result<_, TrainError> {
        let mut run = RankRun::build(&rank, &config, plans.as_ref())?;
        let buckets: Vec<_> = run.parallel.buckets().collect();
        let plan = run.parallel.buffers.plan().clone();
        let ids = || plan.groups().iter().flatten();
        let start = |id: &ddp::BucketId| plan.bucket(*id).range.start;
        let all = |run: &RankRun| flat(run, ids().map(start).zip(buckets.iter().map(|bucket| &bucket.values)));
        let filled = all(&run)?;
        let place = data_place(&run.groups)?;
        let batch = batches(&config, &corpus, place)?.next_batch()?;
        // The corpus has one letter only: other tokens, which follow from their place in the global batch.
        let (count, len) = (batch.microbatches().count(), config.train.micro_batch as usize * config.model.seq_len);
        let first = |at: usize| (place as usize * count + at) * len;
        let other = |from: usize| -> Vec<i32> { (from..from + len).map(|i| (i * i * 7 + i) as i32 % 257).collect() };
        let tokens: Vec<_> = (0..count).map(|at| (other(first(at)), other(first(at) + 1))).collect();
        let microbatches: Vec<_> =
            tokens.iter().map(|(inputs, targets)| data::Microbatch { inputs, targets }).collect();
        // The first step plans what the second one gathers ahead.
        run.step(&microbatches, rates[0])?;
        run.capture(&config)?;
        rates[1..].iter().try_for_each(|rate| run.step(&microbatches, *rate))?;
        run.parallel.read_grads(&run.stream)?;
        let loss = run.stream.download::<f32>(&run.loss)?.wait()?[0];
        let shard = run.parallel.replica_place().0;
        let own = ids().map(|id| plan.buffers()[id.buffer].shard(id.bucket, shard).start);
        let grads = flat(&run, own.zip(buckets.iter().map(|bucket| &bucket.own_grads)))?;
        run.parallel.publish(&run.stream)?;
        let values = all(&run)?;
        run.meet()?;
        Ok(OfRank { loss, filled, values, grads, plan })
    });
    ranks.expect("the step")
}

/// Every element from whoever holds it: all who do have the same bits, and somebody does.
fn together(layout: &Layout, specs: &[ParamSpec], ranks: &[(&[f32], &ddp::BucketPlan)]) -> Named {
    let whole = |(i, spec): (usize, &ParamSpec)| -> (String, Vec<f32>) {
        let map: ShardMap = spec.shard_map(layout).expect("a map");
        let mut whole = vec![f32::NAN; spec.placement.global.iter().product()];
        for (rank, (flat, plan)) in (0..).zip(ranks) {
            let local = &flat[plan.slot(i).range.clone()];
            map.shard(GlobalRank(rank)).expect("on the grid").each_run(&map, |global, at| {
                let own = &mut whole[global.start as usize..global.end as usize];
                for (own, value) in own.iter_mut().zip(&local[at]).filter(|(_, value)| !value.is_nan()) {
                    let same = own.is_nan() || own.to_bits() == value.to_bits();
                    assert!(same, "{}: rank {rank} has {value}, another one {own}", spec.name);
                    *own = *value;
                }
            });
        }
        assert!(whole.iter().all(|value| !value.is_nan()), "{}: nobody has some elements", spec.name);
        (spec.name.clone(), whole)
    };
    specs.iter().enumerate().map(whole).collect()
}

/// At a rate of 0 both steps have the same weights.
fn step(machine: &Machine, settings: &[&str]) -> Together {
    let (ranks, config) = (ran(machine, settings, &[0.0; 2]), config(settings));
    let (layout, specs) = (config.ranks(), gpt_plan(&config).expect("a plan").specs());
    let (values, grads): (Vec<_>, Vec<_>) =
        ranks.iter().map(|rank| ((&rank.filled[..], &rank.plan), (&rank.grads[..], &rank.plan))).unzip();
    Together {
        losses: ranks.iter().map(|rank| rank.loss).collect(),
        values: together(&layout, &specs, &values),
        grads: together(&layout, &specs, &grads),
    }
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |max, v| max.max(v.abs()))
}

/// Invariant 13 for one layout.
fn assert_same(machine: &Machine, settings: &[&str], want: &Together) {
    let got = step(machine, settings);
    for loss in &got.losses {
        let one = want.losses[0];
        assert!((loss - one).abs() <= 2e-6 * one, "{settings:?}: {loss} and {one}");
    }
    assert!(got.values == want.values, "{settings:?}: another model");
    let floor = 2e-7 * want.grads.iter().map(|(_, grad)| largest(grad)).fold(0.0, f32::max);
    for ((name, a), (wanted, b)) in got.grads.iter().zip(&want.grads) {
        assert_eq!((name, a.len()), (wanted, b.len()));
        let off = a.iter().zip(b).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
        let bound = (2e-6 * largest(b)).max(floor);
        assert!(off <= bound, "{settings:?}: {name} differs by {off} of {}", largest(b));
    }
}

const ARCHS: [&[&str]; 2] = [&["model.arch=gpt2"], &["model.arch=llama", "model.kv_heads=2", "model.tied=false"]];

/// Sizes along tp, gtp and dp.
const LAYOUTS: [[u32; 3]; 7] = [[2, 1, 1], [1, 2, 1], [2, 2, 1], [1, 4, 1], [2, 1, 2], [1, 2, 2], [2, 2, 2]];

/// Settings of a layout and of what must not matter on it; `microbatches` of a step.
fn settings([tp, gtp, dp]: [u32; 3], microbatches: u32, more: &[&str]) -> Vec<String> {
    let micro = 16 / (gtp * dp * microbatches);
    let mut all: Vec<String> =
        [("layout.tp", tp), ("layout.gtp", gtp), ("layout.dp", dp), ("train.micro_batch", micro)]
            .into_iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
    all.extend(more.iter().map(|setting| (*setting).to_owned()));
    all
}

#[test]
fn values_and_gradients_are_those_of_one_rank_on_every_layout() {
    for (machine, arch) in machines().iter().flat_map(|machine| ARCHS.map(|arch| (machine, arch))) {
        let (want, mut turn) = (step(machine, arch), 0);
        assert!(want.grads.iter().all(|(_, grad)| largest(grad) > 0.0), "every parameter learns");
        for layout @ [tp, gtp, dp] in LAYOUTS {
            let split: &[_] =
                if tp > 1 { &["layout.sequence_parallel=false", "layout.sequence_parallel=true"] } else { &[""] };
            let sharded: &[_] =
                if dp > 1 { &["optimizer.distributed=false", "optimizer.distributed=true"] } else { &[""] };
            for (split, sharded) in split.iter().flat_map(|split| sharded.iter().map(move |sharded| (split, sharded))) {
                let all = [(1, "none"), (1, "block"), (4, "none"), (4, "block")];
                turn += 1;
                // On a card one of them.
                let ways = if machine.driver() == "cuda" { &all[turn % 4..=turn % 4] } else { &all[..] };
                for &(microbatches, recompute) in ways {
                    let recompute = format!("train.recompute={recompute}");
                    let narrow = if gtp > 1 && microbatches > 1 { "gtp.alignment=3" } else { "" };
                    let more = [*split, *sharded, narrow, "ddp.bucket_size=5000", &recompute];
                    let more = [arch, &more.into_iter().filter(|m| !m.is_empty()).collect::<Vec<_>>()].concat();
                    let all = settings(layout, microbatches, &more);
                    assert_same(machine, &all.iter().map(String::as_str).collect::<Vec<_>>(), &want);
                }
            }
        }
    }
}

/// On four and eight ranks along one axis, and on eight along two.
const MORE: [[u32; 3]; 3] = [[4, 1, 1], [1, 4, 2], [1, 1, 8]];

#[test]
fn values_and_gradients_are_those_of_one_rank_on_tensor_groups_of_four_and_on_eight_ranks() {
    for machine in machines() {
        let want = step(&machine, ARCHS[0]);
        for layout in MORE {
            let all = settings(layout, 1, &["model.arch=gpt2", "optimizer.distributed=true", "ddp.bucket_size=5000"]);
            assert_same(&machine, &all.iter().map(String::as_str).collect::<Vec<_>>(), &want);
        }
    }
}

#[test]
fn replays_of_every_scope_in_both_modes_give_the_bits_of_eager_steps_on_every_layout() {
    for machine in machines() {
        for (at, layout) in LAYOUTS.into_iter().chain(MORE).enumerate() {
            let run = |graphs: &[&str]| -> Vec<Vec<u32>> {
                let sharded = if layout[2] > 1 { &["optimizer.distributed=true"][..] } else { &[] };
                let more = [&["model.arch=gpt2", "ddp.bucket_size=5000"][..], sharded, graphs].concat();
                let all = settings(layout, if layout[1] * layout[2] > 4 { 1 } else { 2 }, &more);
                let ranks = ran(&machine, &all.iter().map(String::as_str).collect::<Vec<_>>(), &[1e-3; 4]);
                let of = |rank: OfRank| [vec![rank.loss], rank.values, rank.grads].concat();
                ranks.into_iter().map(|rank| of(rank).into_iter().map(f32::to_bits).collect()).collect()
            };
            let want = run(&[]);
            // All of them where all axes are, and two by turns on other layouts.
            let picked = |way: usize| layout == [2, 2, 2] || way == at % 6 || (way == 6 && machine.driver() == "cuda");
            for (_, graphs) in GRAPHS[1..].iter().enumerate().filter(|(way, _)| picked(*way)) {
                assert!(run(graphs) == want, "{layout:?}, {graphs:?} on {}", machine.driver());
            }
        }
    }
}
