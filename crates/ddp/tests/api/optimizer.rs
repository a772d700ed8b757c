//! The optimizer: one decision for all ranks, every element stepped by its owner, whatever the sharding.

use ddp::{
    AdamConfig, BucketSize, Ddp, DdpError, Dispatch, GradCheck, GradOverlap, LossScaleConfig, Optimizer,
    OptimizerConfig, ParamGroup,
};
use device::{DType, TraceEvent};
use pgroups::{LayoutConfig, ParamClass};

use crate::{
    adam::reference,
    reordered::beyond_reordering,
    support::{Caught, One, Setup, bits, cards, constant, declared, get, hosts, machines, ours, sim, wide},
};

pub(crate) const SIZES: [usize; 4] = [200, 70, 301, 33];

/// A gradient of no short binary form: of a sample of a step.
pub(crate) fn gradient(step: usize, sample: usize, param: usize, numel: usize) -> Vec<f32> {
    (0..numel).map(|i| ((i * 31 + step * 17 + sample * 7 + param * 3) as f32 * 0.37).sin() * 0.1).collect()
}

/// Steps with `samples` samples each, dealt out over the replicas, each one a microbatch. Values by parameter.
fn train(one: &mut One, config: OptimizerConfig, steps: usize, samples: usize) -> Result<Vec<Vec<f32>>, Caught> {
    let mut optimizer = one.optimizer(config)?;
    let side = one.device.stream("optimizer")?;
    let replicas = one.ddp.replicas(ParamClass::Dense);
    let (place, own) = (replicas.place().index(), samples / replicas.size() as usize);
    let params = one.buffers.params().to_vec();
    for step in 0..steps {
        let stream = one.stream.clone();
        let backward = |ddp: &ddp::Ddp, sample: usize| -> Result<(), Caught> {
            ddp.begin_microbatch(&stream)?;
            for (i, param) in params.iter().enumerate().rev() {
                // Mean over the microbatches of a rank; the replicas' mean is the reduction's.
                let mut grad = gradient(step, place * own + sample, i, param.numel());
                grad.iter_mut().for_each(|g| *g /= own as f32);
                crate::support::contribute(param, &stream, grad)?;
            }
            Ok(ddp.end_microbatch(&stream)?)
        };
        {
            let paused = one.ddp.no_sync();
            (0..own - 1).try_for_each(|sample| backward(&paused, sample))?;
        }
        backward(&one.ddp, own - 1)?;
        one.ddp.finish_grads()?;
        optimizer.step(&side, &[RATE])?;
        (0..params.len()).try_for_each(|i| one.read(i).map(drop))?;
    }
    (0..params.len()).map(|i| one.read(i)).collect()
}

pub(crate) const STEPS: usize = 10;
pub(crate) const RATE: f32 = 0.01;

/// The values on every rank of hosts, which all agree to the bit. So do the ranks of a card; with more than two replicas, or
/// with a norm, it sums in an order of its own, and is as far from hosts as that allows.
fn trained(setup: &Setup, config: &OptimizerConfig, samples: usize) -> Vec<Vec<f32>> {
    let run = |machine| setup.run(&machine, |one| train(one, config.clone(), STEPS, samples)).unwrap();
    let mut results: Vec<_> = hosts().into_iter().flat_map(run).collect();
    let as_bits = |values: &Vec<Vec<f32>>| values.iter().map(|v| bits(v)).collect::<Vec<_>>();
    let first = as_bits(&results[0]);
    assert!(results.iter().all(|values| as_bits(values) == first), "ranks, drivers and orders agree to the bit");
    let host = results.remove(0);
    for card in cards() {
        let ranks = run(card);
        let own = as_bits(&ranks[0]);
        assert!(ranks.iter().all(|values| as_bits(values) == own), "ranks of a card agree to the bit");
        if setup.replica_count() <= 2 && config.adam.clip == 0.0 {
            assert!(own == first, "a sum of two has no order");
        } else {
            assert_eq!(beyond_reordering(&ranks[0].concat(), &host.concat(), setup, config, samples), None);
        }
    }
    host
}

/// The bound of reordered sums is one: it holds for another number of replicas, and not for another rate.
#[test]
fn steps_of_other_sums_over_the_replicas_are_as_far_apart_as_their_roundings_allow() {
    let setup = Setup::new(4, declared(&SIZES));
    let [four, two] = [4, 2].map(|dp| trained(&Setup::new(dp, declared(&SIZES)), &no_clip(), 12).concat());
    // Means over the samples of a rank round as well: three additions and divisions, no more than twice as many again.
    let many = Setup::new(12, declared(&SIZES));
    assert_eq!(beyond_reordering(&two, &four, &many, &no_clip(), 12), None);
    let mut moved = four.clone();
    moved[3] += 1e-4;
    let noticed = beyond_reordering(&moved, &four, &setup, &no_clip(), 12);
    assert!(noticed.is_some_and(|miss| miss.starts_with("element 3:")), "1e-4 is within the bound");
}

pub(crate) fn no_clip() -> OptimizerConfig {
    OptimizerConfig { adam: AdamConfig { clip: 0.0, ..AdamConfig::default() }, ..OptimizerConfig::default() }
}

fn worst(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn sharding_changes_no_bit_and_with_clipping_only_the_order_of_the_norms_sum() {
    for dp in 1..=4 {
        for bucket_size in [BucketSize::Unlimited, BucketSize::PerUnit, BucketSize::Numel(250)] {
            let mut setup = Setup::new(dp, declared(&SIZES));
            setup.plan.bucket_size = bucket_size;
            let (off, on) = (setup.clone(), setup.sharded());
            let samples = dp as usize;
            let [a, b] = [&off, &on].map(|setup| trained(setup, &no_clip(), samples));
            assert_eq!(worst(&a, &b), 0.0, "dp {dp}, {bucket_size:?}");
            let clipped = OptimizerConfig::default();
            let [a, b] = [&off, &on].map(|setup| trained(setup, &clipped, samples));
            assert!(worst(&a, &b) < 1e-6, "dp {dp}: {}", worst(&a, &b));
        }
    }
}

#[test]
fn the_same_samples_give_the_same_step_on_any_number_of_replicas() {
    let config = no_clip();
    let single = trained(&Setup::new(1, declared(&SIZES)), &config, 12);
    for dp in [2, 3, 4] {
        for setup in [Setup::new(dp, declared(&SIZES)), Setup::new(dp, declared(&SIZES)).sharded()] {
            let other = trained(&setup, &config, 12);
            // f32 sums over ranks are reordered, and the moments' ratio keeps the relative error.
            assert!(worst(&single, &other) < 2e-5, "dp {dp}: {}", worst(&single, &other));
        }
    }
}

#[test]
fn permuted_groups_with_gaps_step_as_contiguous_ones() {
    let mut setup = Setup::new(4, declared(&SIZES));
    setup.replicas = vec![vec![3, 1], vec![0, 2]];
    let contiguous = trained(&Setup::new(2, declared(&SIZES)), &no_clip(), 4);
    for setup in [setup.clone(), setup.sharded()] {
        assert_eq!(worst(&contiguous, &trained(&setup, &no_clip(), 4)), 0.0);
    }
}

#[test]
fn no_schedule_of_reductions_or_publications_changes_a_bit() {
    let plain = trained(&Setup::new(3, declared(&SIZES)).sharded(), &no_clip(), 6);
    for dispatch in [Dispatch::Chain, Dispatch::Aligned, Dispatch::WithOptimizer, Dispatch::AtStep] {
        for overlap in [GradOverlap::Overlapped, GradOverlap::AtFinish] {
            let mut setup = Setup::new(3, declared(&SIZES)).sharded();
            (setup.ddp.dispatch, setup.ddp.overlap) = (dispatch, overlap);
            for check in [GradCheck::Always, GradCheck::WithClip] {
                let config = OptimizerConfig { check, ..no_clip() };
                assert_eq!(worst(&plain, &trained(&setup, &config, 6)), 0.0, "{dispatch:?} {overlap:?} {check:?}");
            }
        }
    }
}

#[test]
fn steps_agree_with_a_plain_reference_in_f64_also_with_bf16_values() {
    let decay = |name: &str| usize::from(name == "p1" || name == "p3");
    for stored in [DType::F32, DType::Bf16] {
        let mut setup = Setup::new(2, declared(&SIZES)).sharded();
        setup.plan.bucket_size = BucketSize::Unlimited;
        setup.declared.iter_mut().for_each(|param| param.stored = stored);
        let group =
            |name: &str, weight_decay| ParamGroup { name: name.into(), weight_decay, max_lr: 0.01, min_lr: 0.0 };
        let groups = vec![group("decayed", 0.1), group("plain", 0.0)];
        let config = OptimizerConfig { groups, ..OptimizerConfig::default() };
        let run = setup.run(&sim(1), |one| {
            let mut optimizer = Optimizer::new(&one.ddp, &one.groups, config.clone(), decay, &one.stream)?;
            let start: Vec<Vec<f32>> = (0..4).map(|i| one.read(i)).collect::<Result<_, _>>()?;
            for step in 0..4 {
                one.microbatch(|one| {
                    (0..4).rev().try_for_each(|i| {
                        one.contribute_on(&one.stream, i, gradient(step, one.rank as usize, i, SIZES[i]))
                    })
                })?;
                one.ddp.finish_grads()?;
                optimizer.step(&one.stream, &[0.01, 0.01])?;
            }
            let end: Vec<Vec<f32>> = (0..4).map(|i| one.read(i)).collect::<Result<_, _>>()?;
            Ok((start, end))
        });
        let (start, end) = run.unwrap().remove(0);
        let mut want: Vec<f64> = start.iter().flatten().map(|&w| f64::from(w)).collect();
        let mean = |step: usize| {
            let both = [0, 1].map(|rank| (0..4).flat_map(move |i| gradient(step, rank, i, SIZES[i])));
            let [a, b] = both;
            a.zip(b).map(|(a, b)| (f64::from(a) + f64::from(b)) / 2.0).collect()
        };
        let steps: Vec<(f64, Vec<f64>)> = (0..4).map(|step| (f64::from(0.01f32), mean(step))).collect();
        let plain = |i: usize| (200..270).contains(&i) || i >= 571;
        reference(&mut want, &steps, |i| if plain(i) { 0.0 } else { 0.1 }, config.adam);
        let got = end.iter().flatten().zip(&want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max);
        // bf16 has 8 bits: half a unit in the last place of values up to 1.
        let tolerance = if stored == DType::F32 { 2e-6 } else { 2f64.powi(-8) / 2.0 + 1e-6 };
        assert!(got < tolerance, "{stored}: {got}");
    }
}

#[test]
fn f32_masters_are_the_values_and_bf16_ones_are_not() {
    for (stored, same) in [(DType::F32, true), (DType::Bf16, false)] {
        let mut setup = Setup::new(2, declared(&SIZES)).sharded();
        setup.declared.iter_mut().for_each(|param| param.stored = stored);
        setup
            .run(&sim(1), |one| {
                let optimizer = one.optimizer(OptimizerConfig::default())?;
                for (memory, [master, m, v]) in one.ddp.buckets().zip(optimizer.state()) {
                    assert_eq!(master.same_as(&memory.own_values), same);
                    assert_eq!((master.dtype(), m.numel(), v.numel()), (DType::F32, master.numel(), master.numel()));
                    assert_eq!(memory.own_values.numel() * 2, memory.values.numel());
                    assert_eq!(wide(&one.stream, master)?, wide(&one.stream, &memory.own_values)?);
                }
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn creating_the_state_is_no_step() {
    // AdamW at rate 0.1 with decay 0.1, w = 1: before any step w = 1 and no step is counted, then w = 0.89 and one.
    let group = ParamGroup { name: "all".into(), weight_decay: 0.1, max_lr: 0.1, min_lr: 0.0 };
    let config = OptimizerConfig { groups: vec![group], ..no_clip() };
    for setup in
        [Setup::new(2, vec![constant("w", &[3], 1.0)]), Setup::new(2, vec![constant("w", &[3], 1.0)]).sharded()]
    {
        for machine in machines() {
            setup
                .run(&machine, |one| {
                    for _ in 0..3 {
                        one.optimizer(config.clone())?;
                    }
                    let mut optimizer = one.optimizer(config.clone())?;
                    assert_eq!(one.read(0)?, [1.0; 3]);
                    assert_eq!(get::<i32>(&one.stream, optimizer.steps(0))?, [0]);
                    one.microbatch(|one| one.contribute(0, 1.0))?;
                    one.ddp.finish_grads()?;
                    optimizer.step(&one.stream, &[0.1])?;
                    assert!(one.read(0)?.iter().all(|w| (w - 0.89).abs() < 1e-6));
                    assert_eq!(get::<i32>(&one.stream, optimizer.steps(0))?, [1]);
                    Ok(())
                })
                .unwrap();
        }
    }
}

#[test]
fn groups_that_differ_in_their_bounds_only_keep_their_own_rates() {
    let group = |name: &str, max_lr| ParamGroup { name: name.into(), weight_decay: 0.0, max_lr, min_lr: 0.0 };
    let config = OptimizerConfig { groups: vec![group("fast", 1e-3), group("slow", 1e-4)], ..no_clip() };
    let setup = Setup::new(2, vec![constant("a", &[70], 1.0), constant("b", &[70], 1.0)]).sharded();
    setup
        .run(&sim(1), |one| {
            let slow = |name: &str| usize::from(name == "b");
            let mut optimizer = Optimizer::new(&one.ddp, &one.groups, config.clone(), slow, &one.stream)?;
            let rates: Vec<f32> = optimizer.config().groups.iter().map(|group| group.max_lr as f32).collect();
            for _ in 0..5 {
                one.microbatch(|one| (0..2).rev().try_for_each(|i| one.contribute(i, 1.0)))?;
                one.ddp.finish_grads()?;
                optimizer.step(&one.stream, &rates)?;
            }
            let (a, b) = (one.read(0)?[3], one.read(1)?[3]);
            assert!((a - (1.0 - 5e-3)).abs() < 1e-6 && (b - (1.0 - 5e-4)).abs() < 1e-6, "{a} {b}");
            assert_eq!([0, 1].map(|g| get::<i32>(&one.stream, optimizer.steps(g)).unwrap()[0]), [5, 5]);
            assert!(matches!(optimizer.step(&one.stream, &[0.1]), Err(DdpError::Rates { got: 1, want: 2 })));
            let lost = Optimizer::new(&one.ddp, &one.groups, config.clone(), |_| 2, &one.stream).err().unwrap();
            assert!(matches!(lost, DdpError::NoSuchGroup { group: 2, groups: 2, .. }), "{lost}");
            Ok(())
        })
        .unwrap();
}

/// Sites of the operations that rank 0 submits to its optimizer stream in a step.
pub(crate) fn step_sites(setup: &Setup, config: &OptimizerConfig) -> Vec<String> {
    let machine = sim(1);
    machine.trace_start();
    let streams = setup.run(&machine, |one| {
        let side = one.device.stream("optimizer")?;
        let mut optimizer = one.optimizer(config.clone())?;
        let params = one.buffers.params().len();
        one.microbatch(|one| (0..params).rev().try_for_each(|i| one.contribute(i, 1.0)))?;
        one.ddp.finish_grads()?;
        optimizer.step(&side, &[0.1])?;
        side.synchronize()?;
        Ok(side.index())
    });
    let stream_of_rank_0 = streams.unwrap()[0];
    let trace = machine.trace_stop();
    let sites = trace.events.iter().filter_map(|event| match event {
        TraceEvent::Op { rank: 0, stream, site, name, accesses, .. } if *stream == stream_of_rank_0 => {
            let what = if name == "adamw" { format!("{site}@{}", accesses[0].region.start) } else { site.to_string() };
            Some(what)
        }
        _ => None,
    });
    sites.collect()
}

#[test]
fn a_step_measures_then_clips_then_counts_then_updates_in_first_read_order() {
    // Unsharded, so that addresses are plain: p3 lies at 0, p0 at the end.
    let setup = Setup::new(2, declared(&SIZES));
    let mut sites = step_sites(&setup, &OptimizerConfig::default());
    sites.dedup();
    let start = |before: usize| format!("ddp.update@{}", 4 * before);
    let [p0, p1, p2, p3] = [404, 334, 33, 0].map(start);
    assert_eq!(
        sites[1..],
        [
            "ddp.norm".to_owned(),
            "ddp.clip".into(),
            "ddp.advance".into(),
            p0.clone(),
            p1.clone(),
            p2.clone(),
            p3.clone()
        ]
    );
    // Nothing to decide: as the buckets are reduced, the last layer's first.
    let mut sites = step_sites(&setup, &OptimizerConfig { check: GradCheck::WithClip, ..no_clip() });
    sites.dedup();
    assert_eq!(sites[1..], ["ddp.advance".to_owned(), p3, p2, p1, p0]);
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let refused = |config: OptimizerConfig| {
        let run = Setup::new(1, declared(&[4])).run(&sim(1), |one| Ok(one.optimizer(config.clone()).map(drop)?));
        ours(&run.unwrap_err()).to_string()
    };
    let adam = |adam| refused(OptimizerConfig { adam, ..OptimizerConfig::default() });
    let plain = AdamConfig::default();
    let beta = adam(AdamConfig { beta1: 1.0, ..plain });
    assert_eq!(beta, "optimizer setting beta1 is 1; it must be at least 0 and under 1");
    assert!(adam(AdamConfig { beta2: f64::NAN, ..plain }).starts_with("optimizer setting beta2 is NaN"));
    assert_eq!(adam(AdamConfig { eps: 0.0, ..plain }), "optimizer setting eps is 0; it must be over 0");
    assert!(adam(AdamConfig { clip: -1.0, ..plain }).ends_with("it must not be negative; 0 turns clipping off"));
    let groups = refused(OptimizerConfig { groups: Vec::new(), ..OptimizerConfig::default() });
    assert_eq!(groups, "optimizer setting groups is 0; there must be at least one");
    let group = ParamGroup { name: "all".into(), weight_decay: 0.0, max_lr: 0.1, min_lr: 0.2 };
    let bounds = refused(OptimizerConfig { groups: vec![group], ..OptimizerConfig::default() });
    assert_eq!(bounds, "optimizer setting max_lr is 0.1; it must not be under min_lr");
    let scale = LossScaleConfig { growth: 1.0, ..LossScaleConfig::default() };
    let growth = refused(OptimizerConfig { loss_scale: Some(scale), ..OptimizerConfig::default() });
    assert_eq!(growth, "optimizer setting loss_scale.growth is 1; it must be over 1");
}

#[test]
fn an_active_weight_shard_axis_without_its_group_is_an_error() {
    let layout = LayoutConfig { tp: 2, gtp: 2, dp: Some(2), ..LayoutConfig::default() };
    let setup = Setup { layout, ..Setup::new(2, declared(&[4])) };
    let text = format!("{:?}", setup.run(&sim(1), |_| Ok(())).unwrap_err());
    assert!(text.contains("MissingGroup") && text.contains("gradients over the weight-shard axis"), "{text}");
}

#[test]
fn one_rank_of_many_is_planned_alone_without_memory() {
    use pgroups::{GlobalRank, GroupsPlan, Key, Layout, Needs, ProcessGroups, Rank, Seed};
    let machine = device::Machine::dry();
    let world = 64;
    let layout = Layout::new(&LayoutConfig { dp: Some(world), ..LayoutConfig::default() }).unwrap();
    let rank = Rank::alone(&machine, GlobalRank(5), world).unwrap();
    let needs = Needs::keys([Key::DP_CP, Key::MP]);
    let groups = ProcessGroups::planned(&rank, GroupsPlan::new(&layout, &needs, rank.global).unwrap()).unwrap();
    let stream = rank.device.stream("compute").unwrap();
    let setup = Setup::new(world, declared(&[1_000_000, 5_000_000])).sharded();
    let buffers = ddp::ParamBuffers::allocate(&rank, &layout, &setup.declared, setup.plan).unwrap();
    buffers.fill(&stream, Seed(1)).unwrap();
    machine.trace_start();
    let ddp = Ddp::attach(&buffers, &groups, setup.ddp, &stream).unwrap();
    let mut optimizer = Optimizer::new(&ddp, &groups, OptimizerConfig::default(), |_| 0, &stream).unwrap();
    for _ in 0..2 {
        ddp.begin_microbatch(&stream).unwrap();
        for param in buffers.params().iter().rev() {
            crate::support::contribute(param, &stream, Vec::new()).unwrap();
        }
        ddp.end_microbatch(&stream).unwrap();
        ddp.finish_grads().unwrap();
        optimizer.step(&stream, &[0.1]).unwrap();
        ddp.publish(&stream).unwrap();
    }
    rank.device.synchronize().unwrap();
    let memory = rank.device.memory_by_kind();
    let padded: usize = buffers.plan().numel().1;
    assert_eq!(memory[&device::MemoryKind::Param], 4 * padded);
    let moments: usize = optimizer.state().map(|[_, m, v]| m.bytes() + v.bytes()).sum();
    assert_eq!(moments, 8 * padded / world as usize);
    let trace = machine.trace_stop();
    let count = |wanted: &str| {
        let is_it = |event: &&TraceEvent| matches!(event, TraceEvent::Op { name, .. } if *name == *wanted);
        trace.events.iter().filter(is_it).count()
    };
    assert_eq!(["reduce_scatter", "all_gather"].map(count), [4, 4]);
}
