//! Where parameters lie: reference values and laws.

use std::{collections::BTreeMap, sync::Arc};

use pgroups::{
    Axis, Cut, Fragment, Fragments, GlobalRank, Grid, Pin, Placement, PlanError, Replica, ShardMap, padded_cut,
};
use proptest::prelude::*;

use crate::planning_support::{axis, sized};

fn grid(axes: &[(&str, u32)]) -> Arc<Grid> {
    Arc::new(Grid::new(&sized(axes), GlobalRank(0), 1 << 16).unwrap())
}

fn offsets(map: &ShardMap, ranks: &[u32]) -> Vec<Vec<usize>> {
    let shards = ranks.iter().map(|&rank| map.shard(GlobalRank(rank)).unwrap());
    shards.map(|shard| shard.offset).collect()
}

#[test]
fn padding_has_the_reference_values() {
    let rows: Vec<(usize, usize, u32, serde_json::Value)> = serde_json::from_str(include_str!("padding.json")).unwrap();
    assert_eq!(rows.len(), 54);
    for (alignment, rows, gtp, wanted) in rows {
        let got = padded_cut(rows, gtp, alignment);
        match wanted.as_str() {
            Some("error") => assert!(matches!(got, Err(PlanError::Uneven { .. })), "{rows} {gtp}"),
            _ => {
                let wanted: (usize, usize) = serde_json::from_value(wanted).unwrap();
                assert_eq!(got, Ok(wanted), "{rows} rows, gtp {gtp}, alignment {alignment}");
            }
        }
    }
}

#[test]
fn rows_that_may_not_be_padded_name_the_next_number_that_divides() {
    let error = padded_cut(100, 8, 0).unwrap_err().to_string();
    assert!(error.contains("make it 104"), "{error}");
    let huge = padded_cut(usize::MAX, 2, 16).unwrap_err();
    assert!(matches!(huge, PlanError::PaddingOverflow { .. }), "{huge}");
    let huge = padded_cut(1, 2, usize::MAX).unwrap_err();
    assert!(matches!(huge, PlanError::PaddingOverflow { .. }), "{huge}");
}

// Ranks of a tp2 gtp2 grid, tp fastest: (tp, gtp) = (0,0) is 0, (1,0) is 1, (0,1) is 2, (1,1) is 3.
#[test]
fn the_inner_cut_varies_fastest_whatever_the_rank_order() {
    let grid = grid(&[("tp", 2), ("gtp", 2)]);
    let column = Placement::whole([64, 16]).cut(0, Axis::TP, 0).cut(0, Axis::GTP, 16);
    let map = column.on(&grid).unwrap();
    assert_eq!(map.local_shape(), [16, 16]);
    assert_eq!((map.padded_shape(), map.fragments().to_vec()), (vec![64, 16], vec![4, 1]));
    assert_eq!(offsets(&map, &[0, 2, 1, 3]), [[0, 0], [16, 0], [32, 0], [48, 0]]);
    assert_eq!(map.shard(GlobalRank(1)).unwrap().chunk, [2, 0]);

    let row = Placement::whole([64, 16]).cut(1, Axis::TP, 0).cut(0, Axis::GTP, 16);
    let map = row.on(&grid).unwrap();
    assert_eq!(map.local_shape(), [32, 8]);
    assert_eq!((map.padded_shape(), map.fragments().to_vec()), (vec![64, 16], vec![2, 2]));
    assert_eq!(offsets(&map, &[0, 2, 1, 3]), [[0, 0], [32, 0], [0, 8], [32, 8]]);
}

#[test]
fn shards_without_tp_follow_each_other() {
    let grid = grid(&[("gtp", 4)]);
    let map = Placement::whole([64, 16]).cut(0, Axis::GTP, 16).on(&grid).unwrap();
    assert_eq!(map.fragments(), [4, 1]);
    assert_eq!(offsets(&map, &[0, 1, 2, 3]), [[0, 0], [16, 0], [32, 0], [48, 0]]);
}

#[test]
fn experts_are_a_dimension_in_front() {
    // A rank's local experts are an axis as any other to a placement.
    let grid = grid(&[("ep", 2), ("local", 2), ("gtp", 2)]);
    let map = Placement::whole([4, 32, 8])
        .cut(0, Axis::EP, 0)
        .cut(0, axis("local"), 0)
        .cut(1, Axis::GTP, 16)
        .on(&grid)
        .unwrap();
    assert_eq!((map.local_shape(), map.fragments()), (&[1, 16, 8][..], &[4, 2, 1][..]));
    for (ep, local, gtp) in [(0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 1, 1), (1, 0, 1)] {
        let rank = ep + 2 * local + 4 * gtp;
        let wanted = [2 * ep as usize + local as usize, 16 * gtp as usize, 0];
        assert_eq!(offsets(&map, &[rank]), [wanted]);
    }
}

#[test]
fn padding_belongs_to_the_last_shards_and_to_no_region() {
    for (gtp, alignment, rows, padded) in [(2, 16, 64, 128), (4, 16, 32, 128), (8, 16, 16, 128), (8, 32, 32, 256)] {
        let grid = grid(&[("gtp", gtp)]);
        let map = Placement::whole([100]).cut(0, Axis::GTP, alignment).on(&grid).unwrap();
        assert_eq!((map.local_shape(), map.padded_shape()), (&[rows][..], vec![padded]));
        let held: Vec<usize> = (0..gtp).map(|r| map.shard(GlobalRank(r)).unwrap().numel()).collect();
        assert_eq!(held.iter().sum::<usize>(), 100, "{held:?}");
        assert!(held.is_sorted_by(|a, b| a >= b), "{held:?}");
    }
}

#[test]
fn a_padded_inner_cut_leaves_the_outer_offsets_true() {
    // tp halves 100 rows into 50; gtp pads each half to 64: the second half starts at row 50, not at 64.
    let grid = grid(&[("tp", 2), ("gtp", 2)]);
    let map = Placement::whole([100]).cut(0, Axis::TP, 0).cut(0, Axis::GTP, 16).on(&grid).unwrap();
    let region = |rank| map.shard(GlobalRank(rank)).unwrap().region[0].clone();
    assert_eq!([region(0), region(2), region(1), region(3)], [0..32, 32..50, 50..82, 82..100]);
    assert_eq!(offsets(&map, &[1, 3]), [[64], [96]]);
    assert_eq!(map.owner(&[50]), Ok(GlobalRank(1)));
}

#[test]
fn replicated_entries_have_the_reference_coordinates() {
    let grid = grid(&[("tp", 2), ("gtp", 2), ("dp", 3)]);
    let map = Placement::whole([8]).on(&grid).unwrap();
    let replica = |rank| map.shard(GlobalRank(rank)).unwrap().replica;
    let at = |pipeline, model, data| Replica { pipeline, model, data };
    assert_eq!([replica(0), replica(2), replica(1), replica(3)], [at(0, 0, 0), at(0, 1, 0), at(0, 2, 0), at(0, 3, 0)]);
    assert_eq!(replica(4 + 3), at(0, 3, 1));
    let owners = (0..12).filter(|&r| map.shard(GlobalRank(r)).unwrap().is_owner());
    assert_eq!(owners.collect::<Vec<_>>(), [0]);
    assert!(!at(0, 0, 1).is_owner() && !at(0, 1, 0).is_owner() && !at(1, 0, 0).is_owner());
}

#[test]
fn a_pinned_parameter_is_on_its_stages_only() {
    let grid = grid(&[("tp", 2), ("pp", 4)]);
    let tied = Placement::whole([6, 3]).cut(0, Axis::TP, 0).pin(Axis::PP, [3, 0]);
    let map = tied.on(&grid).unwrap();
    assert_eq!(map.copies(), 2);
    for rank in 0..8u32 {
        let stage = rank / 2;
        let shard = map.shard(GlobalRank(rank));
        assert_eq!(shard.is_some(), stage == 0 || stage == 3, "rank {rank}");
        // The first stage that the pin names owns it.
        assert_eq!(shard.is_some_and(|s| s.is_owner()), stage == 3, "rank {rank}");
    }
    assert_eq!(map.holders(&[4, 0]), Ok(vec![GlobalRank(7), GlobalRank(1)]));
}

#[test]
fn placements_that_cannot_be_are_refused() {
    let grid = grid(&[("tp", 2), ("gtp", 3)]);
    let refused = |placement: Placement| placement.on(&grid).unwrap_err();
    let whole = || Placement::whole([12, 4]);
    assert!(matches!(refused(whole().cut(0, Axis::CP, 0)), PlanError::UnknownAxis { .. }));
    assert!(matches!(refused(whole().cut(2, Axis::TP, 0)), PlanError::NoSuchDim { dim: 2, dims: 2 }));
    assert!(matches!(refused(whole().cut(1, Axis::GTP, 0)), PlanError::Uneven { rows: 4, parts: 3, padded: 6, .. }));
    assert!(matches!(refused(whole().cut(0, Axis::TP, 0).cut(1, Axis::TP, 0)), PlanError::AxisUsedTwice { .. }));
    assert!(matches!(refused(whole().cut(0, Axis::TP, 0).pin(Axis::TP, [0])), PlanError::AxisUsedTwice { .. }));
    for at in [vec![], vec![3], vec![1, 1]] {
        assert!(matches!(refused(whole().pin(Axis::GTP, at)), PlanError::BadPin { size: 3, .. }));
    }
    assert!(matches!(refused(whole().pin(Axis::PP, [0])), PlanError::UnknownAxis { .. }));
    assert!(matches!(refused(Placement::whole([3, 0])), PlanError::NoElements { dim: 1 }));
    let map = whole().on(&grid).unwrap();
    for outside in [vec![12, 0], vec![0], vec![0, 0, 0]] {
        assert!(matches!(map.owner(&outside), Err(PlanError::OutsideTensor { .. })));
    }
    assert_eq!(map.shard(GlobalRank(6)), None);
}

#[test]
fn fragments_place_a_local_tensor_and_refuse_impossible_ones() {
    let at = |dim, index, count| Fragment { dim, index, count };
    let placed = Fragments::new(&[16, 8], &[at(0, 3, 4), at(1, 1, 2)]).unwrap();
    assert_eq!(placed.global, [64, 16]);
    assert_eq!(placed.offset, [48, 8]);
    assert_eq!(placed.counts, [4, 2]);
    let refused = |fragments: &[Fragment]| Fragments::new(&[16, 8], fragments).unwrap_err();
    assert!(matches!(refused(&[at(0, 2, 2)]), PlanError::BadFragment { index: 2, count: 2, .. }));
    assert!(matches!(refused(&[at(0, 0, 0)]), PlanError::BadFragment { .. }));
    assert!(matches!(refused(&[at(0, 0, 2), at(0, 1, 2)]), PlanError::BadFragment { .. }));
    assert!(matches!(refused(&[at(2, 0, 1)]), PlanError::NoSuchDim { .. }));
}

/// Grids with a shuffled order and placements that cut some of their axes, nested and padded.
fn placements() -> impl Strategy<Value = (Arc<Grid>, Placement)> {
    let sizes = prop::collection::vec(1u32..4, 5);
    let names = Just(vec!["tp", "gtp", "dp", "pp", "node"]).prop_shuffle();
    let shape = prop::collection::vec(1usize..14, 1..4);
    let uses = prop::collection::vec((0usize..4, 1usize..5), 5);
    (sizes, names, shape, uses, 0u32..3).prop_map(|(sizes, names, shape, uses, offset)| {
        let axes: Vec<(&str, u32)> = names.into_iter().zip(sizes).collect();
        let mut placement = Placement::whole(shape.clone());
        for ((name, size), (dim, alignment)) in axes.iter().zip(uses) {
            if *name == "pp" {
                let pin = Pin { axis: axis(name), at: vec![size - 1] };
                placement.pins.push(pin);
            } else if dim < shape.len() {
                placement.cuts.push(Cut { dim, axis: axis(name), alignment });
            }
        }
        let grid = Grid::new(&sized(&axes), GlobalRank(offset), 1 << 12).unwrap();
        (Arc::new(grid), placement)
    })
}

/// Every global index of a shape, last dimension fastest.
fn indices(shape: &[usize]) -> Vec<Vec<usize>> {
    shape.iter().fold(vec![vec![]], |all, &n| {
        let longer =
            |index: &Vec<usize>| -> Vec<Vec<usize>> { (0..n).map(|i| [index.as_slice(), &[i]].concat()).collect() };
        all.iter().flat_map(longer).collect()
    })
}

proptest! {
    #[test]
    fn every_element_has_exactly_one_owner_and_known_replicas((grid, placement) in placements()) {
        let map = placement.on(&grid).unwrap();
        let first = grid.offset().0;
        let mut holders: BTreeMap<Vec<usize>, Vec<GlobalRank>> = BTreeMap::new();
        let mut owners: BTreeMap<Vec<usize>, Vec<GlobalRank>> = BTreeMap::new();
        for rank in (first..first + grid.size()).map(GlobalRank) {
            let Some(shard) = map.shard(rank) else { continue };
            for dim in 0..shard.region.len() {
                prop_assert!(shard.region[dim].len() <= map.local_shape()[dim]);
                prop_assert!(shard.offset[dim] + map.local_shape()[dim] <= map.padded_shape()[dim]);
            }
            let sizes: Vec<usize> = shard.region.iter().map(ExactSizeIterator::len).collect();
            for local in indices(&sizes) {
                let index: Vec<usize> = local.iter().zip(&shard.region).map(|(i, r)| i + r.start).collect();
                holders.entry(index.clone()).or_default().push(rank);
                if shard.is_owner() {
                    owners.entry(index).or_default().push(rank);
                }
            }
        }
        for index in indices(&placement.global) {
            prop_assert_eq!(owners.get(&index), Some(&vec![map.owner(&index).unwrap()]));
            let mut known = map.holders(&index).unwrap();
            prop_assert_eq!(known[0], map.owner(&index).unwrap());
            prop_assert_eq!(known.len(), map.copies() as usize);
            known.sort_unstable();
            prop_assert_eq!(holders.get(&index), Some(&known));
        }
        let elements: usize = placement.global.iter().product();
        prop_assert_eq!(holders.len(), elements, "nothing outside the tensor is held");
    }

    #[test]
    fn runs_visit_each_element_of_a_shard_once_in_order((grid, placement) in placements()) {
        let map = placement.on(&grid).unwrap();
        let first = grid.offset().0;
        for rank in (first..first + grid.size()).map(GlobalRank) {
            let Some(shard) = map.shard(rank) else { continue };
            let (mut globals, mut locals) = (Vec::new(), Vec::new());
            shard.each_run(&map, |global, local| {
                globals.extend(global);
                locals.extend(local);
            });
            prop_assert_eq!(globals.len(), shard.numel());
            prop_assert!(globals.is_sorted_by(|a, b| a < b));
            prop_assert!(locals.is_sorted_by(|a, b| a < b));
            let row_major = |index: &Vec<usize>| {
                index.iter().zip(map.global_shape()).fold(0, |at, (i, n)| at * *n as u64 + *i as u64)
            };
            let inside = |index: &&Vec<usize>| index.iter().zip(&shard.region).all(|(i, r)| r.contains(i));
            let all = indices(map.global_shape());
            let wanted: Vec<u64> = all.iter().filter(inside).map(row_major).collect();
            prop_assert_eq!(globals, wanted);
        }
    }
}
