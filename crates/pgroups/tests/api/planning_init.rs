//! Initial values: the same bits in every layout.

use pgroups::{Axis, GlobalRank, Init, InitStream, Layout, ParamClass, ParamSpec, Placement, PlanError, Seed};

use crate::planning_support::{config, layout};

fn spec(placement: Placement, init: Init) -> ParamSpec {
    ParamSpec { name: "h0.fc1.weight".into(), class: ParamClass::Dense, placement, init }
}

/// Puts the shards of all ranks together, from each rank's own values only.
fn assembled(layout: &Layout, spec: &ParamSpec, seed: Seed) -> Vec<u32> {
    let map = spec.shard_map(layout).unwrap();
    let mut whole = vec![None; spec.placement.global.iter().product()];
    for rank in (0..layout.world_size()).map(GlobalRank) {
        let mut local = vec![f32::NAN; map.local_shape().iter().product()];
        let stream = spec.init_stream(seed);
        stream.fill_shard(&map, rank, &mut local).unwrap();
        let mut own = vec![false; local.len()];
        map.shard(rank).unwrap().each_run(&map, |global, at| {
            for (global, at) in global.zip(at) {
                let bits = local[at].to_bits();
                let before = whole[global as usize].replace(bits);
                assert!(before.is_none_or(|b| b == bits), "replicas differ at {global}");
                own[at] = true;
            }
        });
        let padding = local.iter().zip(own).filter(|(_, own)| !own);
        assert!(padding.into_iter().all(|(v, _)| v.to_bits() == 0), "padding is 0");
    }
    whole.into_iter().map(|bits| bits.expect("every element is held")).collect()
}

#[test]
fn shards_of_every_layout_are_parts_of_the_same_tensor() {
    let seed = Seed(0x1234_5678_9abc_def0);
    for init in [Init::Normal { std: 0.02 }, Init::Uniform { low: -0.5, high: 1.5 }, Init::Constant(0.25)] {
        let stream = InitStream::new(seed, "h0.fc1.weight", init);
        let full: Vec<u32> = (0..37 * 12).map(|i| stream.value(i).to_bits()).collect();
        for (text, world) in [("", 1), ("tp=2", 2), ("gtp=4", 4), ("tp=2,gtp=2,dp=2", 8), ("tp=3,gtp=2", 6)] {
            let layout = layout(world, text);
            let column = Placement::whole([37, 12]).cut(0, Axis::TP, 1).cut(0, Axis::GTP, 4);
            assert_eq!(assembled(&layout, &spec(column, init), seed), full, "{text}, column");
            let row = Placement::whole([37, 12]).cut(1, Axis::TP, 1).cut(0, Axis::GTP, 16);
            assert_eq!(assembled(&layout, &spec(row, init), seed), full, "{text}, row");
            let fused = Placement::whole([37, 12]).cut_blocks(1, Axis::TP, 1, 3).cut(0, Axis::GTP, 4);
            assert_eq!(assembled(&layout, &spec(fused, init), seed), full, "{text}, blocks of the last dimension");
            let fused = Placement::whole([111, 4]).cut_blocks(0, Axis::TP, 2, 3).cut(0, Axis::GTP, 4);
            assert_eq!(assembled(&layout, &spec(fused, init), seed), full, "{text}, blocks of the first");
        }
    }
}

#[test]
fn values_depend_on_seed_name_and_index_and_on_nothing_else() {
    let of = |seed, name: &str, index| InitStream::new(Seed(seed), name, Init::Normal { std: 1.0 }).value(index);
    assert_eq!(of(1, "a", 9).to_bits(), of(1, "a", 9).to_bits());
    let others = [of(2, "a", 9), of(1 << 32, "a", 9), of(1, "b", 9), of(1, "a", 10), of(1, "a", 9 + (1 << 36))];
    for other in others {
        assert_ne!(of(1, "a", 9).to_bits(), other.to_bits());
    }
}

#[test]
fn any_run_equals_the_single_values() {
    let stream = InitStream::new(Seed(3), "w", Init::Uniform { low: 0.0, high: 1.0 });
    for start in [0, 1, 2, 3, 4, 1_000_001] {
        for len in [0, 1, 2, 5, 9] {
            let mut run = vec![-1.0; len];
            stream.fill(start, &mut run);
            let single: Vec<f32> = (start..start + len as u64).map(|i| stream.value(i)).collect();
            assert_eq!(run, single, "{len} from {start}");
        }
    }
}

#[test]
fn the_distributions_have_their_moments() {
    let sample = |init| {
        let mut values = vec![0.0; 200_000];
        InitStream::new(Seed(11), "wte", init).fill(7, &mut values);
        values
    };
    let mean = |values: &[f32], power: i32| {
        let powers = values.iter().map(|&v| f64::from(v).powi(power));
        powers.sum::<f64>() / values.len() as f64
    };
    // Bounds are five standard errors of each moment at 200,000 samples.
    let normal = sample(Init::Normal { std: 2.0 });
    assert!(mean(&normal, 1).abs() < 0.0224, "{}", mean(&normal, 1));
    assert!((mean(&normal, 2) - 4.0).abs() < 0.0633, "{}", mean(&normal, 2));
    assert!(mean(&normal, 3).abs() < 0.347, "{}", mean(&normal, 3));
    assert!((mean(&normal, 4) - 48.0).abs() < 1.753 * 3.0, "{}", mean(&normal, 4));
    let neighbours = normal.windows(2).map(|w| f64::from(w[0]) * f64::from(w[1]));
    let correlation = neighbours.sum::<f64>() / normal.len() as f64 / 4.0;
    assert!(correlation.abs() < 0.0112, "{correlation}");

    let uniform = sample(Init::Uniform { low: -1.0, high: 3.0 });
    assert!(uniform.iter().all(|v| (-1.0..3.0).contains(v)));
    assert!((mean(&uniform, 1) - 1.0).abs() < 0.013, "{}", mean(&uniform, 1));
    assert!((mean(&uniform, 2) - 7.0 / 3.0).abs() < 0.028, "{}", mean(&uniform, 2));
    assert!(sample(Init::Constant(0.5)).iter().all(|&v| v == 0.5));
}

#[test]
fn buffers_of_another_size_and_ranks_without_a_shard_are_refused() {
    let layout = Layout::new(&config(4, "tp=2,pp=2")).unwrap();
    let placement = Placement::whole([8]).cut(0, Axis::TP, 0).pin(Axis::PP, [1]);
    let spec = spec(placement, Init::Constant(1.0));
    let map = spec.shard_map(&layout).unwrap();
    let stream = spec.init_stream(Seed(0));
    let short = stream.fill_shard(&map, GlobalRank(2), &mut [0.0; 3]).unwrap_err();
    assert_eq!(short, PlanError::ShardNumel { rank: GlobalRank(2), got: 3, wanted: 4 });
    let elsewhere = stream.fill_shard(&map, GlobalRank(1), &mut [0.0; 4]).unwrap_err();
    assert_eq!(elsewhere, PlanError::NoShard { rank: GlobalRank(1) });
}
