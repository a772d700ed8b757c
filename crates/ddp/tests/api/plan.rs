//! Bucket plans: reference layouts, and laws that hold for any.

use ddp::{
    BucketId, BucketPlan, BucketSize, BusPadding, ChunkPlace, Copies, DdpError, GradOverlap, GradType, Joining,
    PlanConfig, PlannedParam, Sharding, Stored, default_bucket_numel,
};
use device::DType;
use pgroups::ParamClass;
use proptest::prelude::*;

fn param(i: usize, numel: usize) -> PlannedParam {
    PlannedParam {
        name: format!("p{i}"),
        numel,
        stored: Stored::F32,
        class: ParamClass::Dense,
        copies: Copies::None,
        unit: format!("unit{i}"),
    }
}

fn params(sizes: &[usize]) -> Vec<PlannedParam> {
    sizes.iter().enumerate().map(|(i, &numel)| param(i, numel)).collect()
}

fn sharded(dp: u32) -> PlanConfig {
    let bucket_size = BucketSize::Unlimited;
    PlanConfig { sharding: Sharding::On { dense: dp, expert: dp }, bucket_size, ..PlanConfig::default() }
}

/// A reference layout: start, end and bucket of every parameter, then the buckets and their unpadded sizes.
struct Case {
    name: &'static str,
    sizes: &'static [usize],
    bucket_size: Option<usize>,
    /// None: no sharding.
    dp: Option<u32>,
    bus: BusPadding,
    shared: &'static [usize],
    map: &'static [(usize, usize, usize)],
    buckets: &'static [(usize, usize)],
    unpadded: &'static [usize],
}

const PLAIN: Case = Case {
    name: "",
    sizes: &[100, 200, 300, 50],
    bucket_size: None,
    dp: None,
    bus: BusPadding::Off,
    shared: &[],
    map: &[],
    buckets: &[],
    unpadded: &[],
};

const CASES: &[Case] = &[
    Case {
        name: "one bucket",
        dp: Some(2),
        map: &[(640, 740, 0), (384, 584, 0), (64, 364, 0), (0, 50, 0)],
        buckets: &[(0, 768)],
        unpadded: &[740],
        ..PLAIN
    },
    Case {
        name: "closed at 300",
        bucket_size: Some(300),
        dp: Some(4),
        map: &[(640, 740, 1), (384, 584, 1), (64, 364, 0), (0, 50, 0)],
        buckets: &[(0, 384), (384, 768)],
        unpadded: &[364, 356],
        ..PLAIN
    },
    Case {
        name: "a large one closes its bucket",
        sizes: &[1000, 10, 64, 5000, 128],
        bucket_size: Some(1000),
        dp: Some(8),
        map: &[(5376, 6376, 1), (5312, 5322, 1), (5248, 5312, 1), (128, 5128, 0), (0, 128, 0)],
        buckets: &[(0, 5248), (5248, 6400)],
        unpadded: &[5128, 1128],
        ..PLAIN
    },
    Case {
        name: "shared ends",
        sizes: &[1000, 300, 300, 1000],
        bucket_size: Some(400),
        dp: Some(4),
        shared: &[0, 3],
        map: &[(1664, 2664, 2), (1344, 1644, 1), (1024, 1324, 1), (0, 1000, 0)],
        buckets: &[(0, 1024), (1024, 1664), (1664, 2688)],
        unpadded: &[1000, 620, 1000],
        ..PLAIN
    },
    Case {
        name: "shared first",
        sizes: &[1000, 300, 300],
        bucket_size: Some(400),
        dp: Some(4),
        shared: &[0],
        map: &[(640, 1640, 1), (320, 620, 0), (0, 300, 0)],
        buckets: &[(0, 640), (640, 1664)],
        unpadded: &[620, 1000],
        ..PLAIN
    },
    Case {
        name: "bus padding",
        sizes: &[70000, 100],
        dp: Some(3),
        bus: BusPadding::On,
        map: &[(128, 70128, 0), (0, 100, 0)],
        buckets: &[(0, 196_608)],
        unpadded: &[70128],
        ..PLAIN
    },
    Case {
        name: "exactly full",
        sizes: &[128, 128],
        bucket_size: Some(128),
        dp: Some(1),
        map: &[(128, 256, 1), (0, 128, 0)],
        buckets: &[(0, 128), (128, 256)],
        unpadded: &[128, 128],
        ..PLAIN
    },
    Case {
        name: "far less than a bucket",
        sizes: &[10],
        bucket_size: Some(1),
        dp: Some(3),
        map: &[(0, 10, 0)],
        buckets: &[(0, 384)],
        unpadded: &[10],
        ..PLAIN
    },
    Case {
        name: "no sharding, one bucket",
        map: &[(550, 650, 0), (350, 550, 0), (50, 350, 0), (0, 50, 0)],
        buckets: &[(0, 650)],
        unpadded: &[650],
        ..PLAIN
    },
    Case {
        name: "no sharding, closed at 300",
        bucket_size: Some(300),
        map: &[(550, 650, 1), (350, 550, 1), (50, 350, 0), (0, 50, 0)],
        buckets: &[(0, 350), (350, 650)],
        unpadded: &[350, 300],
        ..PLAIN
    },
    Case {
        name: "no sharding, closed at 350",
        bucket_size: Some(350),
        map: &[(550, 650, 1), (350, 550, 1), (50, 350, 0), (0, 50, 0)],
        buckets: &[(0, 350), (350, 650)],
        unpadded: &[350, 300],
        ..PLAIN
    },
    Case {
        name: "no sharding, one parameter",
        sizes: &[100],
        bucket_size: Some(1),
        map: &[(0, 100, 0)],
        buckets: &[(0, 100)],
        unpadded: &[100],
        ..PLAIN
    },
];

fn plan_of(case: &Case) -> BucketPlan {
    let mut params = params(case.sizes);
    case.shared.iter().for_each(|&i| params[i].copies = Copies::Shared);
    let sharding = case.dp.map_or(Sharding::Off, |dp| Sharding::On { dense: dp, expert: dp });
    let bucket_size = case.bucket_size.map_or(BucketSize::Unlimited, BucketSize::Numel);
    let config = PlanConfig { sharding, bucket_size, bus_padding: case.bus, ..PlanConfig::default() };
    BucketPlan::new(params, config).unwrap()
}

#[test]
fn every_reference_layout_is_met_to_the_element() {
    for case in CASES {
        let plan = plan_of(case);
        let map: Vec<_> = (0..case.sizes.len())
            .map(|i| plan.slot(i))
            .map(|slot| (slot.range.start, slot.range.end, slot.bucket))
            .collect();
        let buckets = plan.buffers()[0].buckets();
        let ranges: Vec<_> = buckets.iter().map(|b| (b.range.start, b.range.end)).collect();
        let unpadded: Vec<_> = buckets.iter().map(|b| b.unpadded).collect();
        assert_eq!((map.as_slice(), ranges.as_slice()), (case.map, case.buckets), "{}", case.name);
        assert_eq!(unpadded, case.unpadded, "{}", case.name);
        assert_eq!(plan.numel().1, case.buckets.last().unwrap().1, "{}", case.name);
    }
}

#[test]
fn shard_fragments_are_those_of_the_reference() {
    let plan = plan_of(&CASES[1]);
    // Bucket, place, then for each fragment: parameter, in the buffer, in the bucket, in the shard, in the parameter.
    type Fragment = (usize, [(usize, usize); 4]);
    let want: &[(usize, u32, &[Fragment])] = &[
        (0, 0, &[(3, [(0, 50), (0, 50), (0, 50), (0, 50)]), (2, [(64, 96), (64, 96), (64, 96), (0, 32)])]),
        (0, 1, &[(2, [(96, 192), (96, 192), (0, 96), (32, 128)])]),
        (0, 2, &[(2, [(192, 288), (192, 288), (0, 96), (128, 224)])]),
        (0, 3, &[(2, [(288, 364), (288, 364), (0, 76), (224, 300)])]),
        (1, 0, &[(1, [(384, 480), (0, 96), (0, 96), (0, 96)])]),
        (1, 1, &[(1, [(480, 576), (96, 192), (0, 96), (96, 192)])]),
        (1, 2, &[(1, [(576, 584), (192, 200), (0, 8), (192, 200)]), (0, [(640, 672), (256, 288), (64, 96), (0, 32)])]),
        (1, 3, &[(0, [(672, 740), (288, 356), (0, 68), (32, 100)])]),
    ];
    for &(bucket, place, fragments) in want {
        let got: Vec<_> = plan
            .fragments(BucketId { buffer: 0, bucket }, place)
            .into_iter()
            .map(|f| (f.param, [f.world, f.in_bucket, f.local, f.in_param].map(|r| (r.start, r.end))))
            .collect();
        assert_eq!(got, fragments, "bucket {bucket}, place {place}");
    }
    assert_eq!(plan.buffers()[0].shard(1, 2), 576..672);
}

#[test]
fn the_default_bucket_grows_with_the_replicas() {
    let millions = [1, 8, 40, 41, 64, 1024].map(|dp| default_bucket_numel(dp) / 1_000_000);
    assert_eq!(millions, [40, 40, 40, 41, 64, 1024]);
    let size = BucketSize::Numel(7);
    assert_eq!(size.for_chunk(GradOverlap::Overlapped, ChunkPlace::First), size);
    assert_eq!(size.for_chunk(GradOverlap::AtFinish, ChunkPlace::First), BucketSize::Unlimited);
    assert_eq!(size.for_chunk(GradOverlap::Overlapped, ChunkPlace::Later), BucketSize::Unlimited);
    let plan =
        BucketPlan::new(params(&[41_000_000, 10]), PlanConfig { bucket_size: BucketSize::Default, ..sharded(2) });
    assert_eq!(plan.unwrap().buffers()[0].buckets().len(), 1, "closed by the parameter that reaches the size");
}

#[test]
fn a_unit_of_the_model_has_a_bucket_of_its_own() {
    let mut params = params(&[10, 20, 30, 40, 50]);
    for (p, unit) in params.iter_mut().zip(["wte", "h0", "h0", "h1", "h1"]) {
        p.unit = unit.into();
    }
    for sharding in [Sharding::Off, Sharding::On { dense: 3, expert: 1 }] {
        let config = PlanConfig { bucket_size: BucketSize::PerUnit, sharding, ..PlanConfig::default() };
        let plan = BucketPlan::new(params.clone(), config).unwrap();
        let members: Vec<_> = plan.buffers()[0].buckets().iter().map(|b| b.params.clone()).collect();
        assert_eq!(members, [vec![4, 3], vec![2, 1], vec![0]]);
        assert_eq!(plan.first_read_order(), [2, 1, 0]);
    }
}

#[test]
fn parameters_share_a_buffer_by_type_gradient_type_and_class() {
    let mut params = params(&[10; 4]);
    for p in &mut params[..3] {
        p.stored = Stored::Bf16;
    }
    params[2].class = ParamClass::Expert;
    let keys = |grad| {
        let plan = BucketPlan::new(params.clone(), PlanConfig { grad, ..PlanConfig::default() }).unwrap();
        let key = |b: &ddp::BufferPlan| {
            let mut members: Vec<usize> = b.slots().iter().map(|s| s.param).collect();
            members.sort_unstable();
            (b.key().stored, b.key().grad, b.key().class, members)
        };
        plan.buffers().iter().map(key).collect::<Vec<_>>()
    };
    use ParamClass::{Dense, Expert};
    let want = |narrow| {
        vec![
            (Stored::Bf16, narrow, Dense, vec![0, 1]),
            (Stored::Bf16, narrow, Expert, vec![2]),
            (Stored::F32, DType::F32, Dense, vec![3]),
        ]
    };
    assert_eq!(keys(GradType::AsStored), want(DType::Bf16));
    assert_eq!(keys(GradType::F32), want(DType::F32));
    // Quantised weights count as one byte each, with gradients of their own.
    params[1].stored = Stored::OneByte;
    assert_eq!(keys_of(&params), [Stored::Bf16, Stored::OneByte, Stored::Bf16, Stored::F32]);
}

fn keys_of(params: &[PlannedParam]) -> Vec<Stored> {
    let plan = BucketPlan::new(params.to_vec(), PlanConfig::default()).unwrap();
    plan.buffers().iter().map(|b| b.key().stored).collect()
}

/// Buckets of one parameter each: `small` of one byte, then `wide` of bf16.
fn mixed(small: usize, wide: usize, joining: Joining) -> Result<Vec<Vec<BucketId>>, DdpError> {
    let mut params = params(&vec![8; small + wide]);
    params.iter_mut().for_each(|p| p.stored = Stored::Bf16);
    params[..small].iter_mut().for_each(|p| p.stored = Stored::OneByte);
    let config = PlanConfig { bucket_size: BucketSize::Numel(1), joining, ..PlanConfig::default() };
    Ok(BucketPlan::new(params, config)?.groups().to_vec())
}

#[test]
fn wide_buckets_join_the_last_one_byte_bucket() {
    let id = |buffer, bucket| BucketId { buffer, bucket };
    let singles = |ids: &[BucketId]| ids.iter().map(|&id| vec![id]).collect::<Vec<_>>();
    let [b0, b1, b2] = [0, 1, 2].map(|b| id(0, b));
    assert_eq!(mixed(0, 3, Joining::Separate).unwrap(), singles(&[b0, b1, b2]));
    let [q0, q1, q2, w0, w1] = [id(0, 0), id(0, 1), id(0, 2), id(1, 0), id(1, 1)];
    assert_eq!(mixed(3, 2, Joining::Separate).unwrap(), [vec![q0], vec![q1], vec![q2, w0, w1]]);
    assert_eq!(mixed(3, 2, Joining::NeverJoin).unwrap(), singles(&[q0, q1, q2, w0, w1]));
    assert_eq!(mixed(2, 1, Joining::One).unwrap(), [vec![q0, q1, w0]]);
    assert!(BucketPlan::new(Vec::new(), PlanConfig::default()).unwrap().groups().is_empty());
}

#[test]
fn parameters_that_cannot_be_laid_out_are_refused() {
    let refused = |params, config| BucketPlan::new(params, config).unwrap_err().to_string();
    let twice = vec![param(1, 3), param(2, 3), param(1, 3)];
    let twice = refused(twice, PlanConfig::default());
    assert_eq!(twice, "parameter 'p1' is declared twice, at 0 and 2: names are unique in a model");
    let empty = refused(params(&[3, 0]), PlanConfig::default());
    assert_eq!(empty, "parameter 'p1' has no elements: leave it out of the plan");
    assert!(refused(params(&[3]), sharded(0)).contains("dense buckets are cut into 0 shards"));
}

#[test]
fn a_layout_for_another_model_or_group_is_told_apart() {
    let ours = BucketPlan::new(params(&[10, 20]), sharded(2)).unwrap();
    let differs = |other: BucketPlan| ours.agrees_with(&other).unwrap_err().to_string();
    assert!(ours.agrees_with(&BucketPlan::new(params(&[10, 20]), sharded(2)).unwrap()).is_ok());
    let longer = differs(BucketPlan::new(params(&[10, 20, 5]), sharded(2)).unwrap());
    assert!(longer.contains("parameter 2 is PlannedParam") && longer.contains("nothing in the model"), "{longer}");
    let resized = differs(BucketPlan::new(params(&[10, 21]), sharded(2)).unwrap());
    assert!(resized.contains("parameter 1") && resized.contains("numel: 21"), "{resized}");
    let shards = differs(BucketPlan::new(params(&[10, 20]), sharded(4)).unwrap());
    assert!(shards.contains("sharding is On { dense: 4"), "{shards}");
    let whole = differs(BucketPlan::new(params(&[10, 20]), PlanConfig::default()).unwrap());
    assert!(whole.contains("place of 'p0'"), "{whole}");
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![1usize..200, 1000usize..5000], 1..12)
}

fn bucket_sizes() -> impl Strategy<Value = BucketSize> {
    let numel = (1usize..4000).prop_map(BucketSize::Numel);
    prop_oneof![Just(BucketSize::Unlimited), Just(BucketSize::PerUnit), Just(BucketSize::Default), numel]
}

proptest! {
    #[test]
    fn fragments_tile_every_parameter_once_and_no_padding(
        sizes in sizes(),
        bucket_size in bucket_sizes(),
        dp in 0u32..7,
        experts in 0usize..4,
        shared in 0usize..4,
    ) {
        let mut params = params(&sizes);
        for (i, p) in params.iter_mut().enumerate() {
            p.class = if i % 4 < experts { ParamClass::Expert } else { ParamClass::Dense };
            p.copies = if i % 5 < shared { Copies::Shared } else { Copies::None };
        }
        let sharding = if dp == 0 { Sharding::Off } else { Sharding::On { dense: dp, expert: dp.div_ceil(2) } };
        let plan = BucketPlan::new(params, PlanConfig { bucket_size, sharding, ..PlanConfig::default() }).unwrap();
        let mut owners: Vec<Vec<u32>> = sizes.iter().map(|&numel| vec![0; numel]).collect();
        for (buffer, b) in plan.buffers().iter().enumerate() {
            let mut end = 0;
            for (bucket, range) in b.buckets().iter().map(|bucket| bucket.range.clone()).enumerate() {
                prop_assert_eq!(range.start, end);
                end = range.end;
                let shards = b.shards().unwrap_or(1);
                prop_assert_eq!(range.len() % shards as usize, 0);
                for place in 0..shards {
                    let shard = b.shard(bucket, place);
                    for f in plan.fragments(BucketId { buffer, bucket }, place) {
                        let slot = &plan.slot(f.param).range;
                        let len = f.world.len();
                        prop_assert!(len > 0 && [&f.in_bucket, &f.local, &f.in_param].iter().all(|r| r.len() == len));
                        prop_assert!(slot.start <= f.world.start && f.world.end <= slot.end);
                        prop_assert_eq!(f.in_param.start, f.world.start - slot.start);
                        prop_assert_eq!(f.in_bucket.start, f.world.start - range.start);
                        prop_assert_eq!(f.local.start, f.world.start - shard.start);
                        prop_assert!(f.local.end <= shard.len());
                        owners[f.param][f.in_param].iter_mut().for_each(|n| *n += 1);
                    }
                }
            }
            prop_assert_eq!(end, b.numel());
        }
        prop_assert!(owners.iter().flatten().all(|&n| n == 1));
    }

    #[test]
    fn every_parameter_is_in_one_bucket_last_declared_first(sizes in sizes(), bucket_size in bucket_sizes()) {
        let plan = BucketPlan::new(params(&sizes), PlanConfig { bucket_size, ..sharded(3) }).unwrap();
        let order = plan.buffers()[0].buckets().iter().flat_map(|b| b.params.clone());
        prop_assert!(order.eq((0..sizes.len()).rev()));
        if let BucketSize::Numel(limit) = bucket_size {
            // All but the last are full, and would not be without their last parameter.
            let (last, full) = plan.buffers()[0].buckets().split_last().unwrap();
            for b in full {
                prop_assert!(b.unpadded >= limit);
                let before = b.unpadded - sizes[*b.params.last().unwrap()];
                prop_assert!(before <= limit.next_multiple_of(64)); // its start was padded
            }
            prop_assert!(!last.params.is_empty());
        }
    }
}
