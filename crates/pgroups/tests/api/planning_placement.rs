//! Where parameters lie: reference values and laws.

use std::{collections::BTreeMap, sync::Arc};

use pgroups::{
    Axis, Cut, Fragment, Fragments, GlobalRank, Grid, Pin, Placement, PlanError, Replica, Shard, ShardMap, Span,
    padded_cut,
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
    let wanted = [0..32, 32..50, 50..82, 82..100].map(|global| [Span { local: 0..global.len(), global }]);
    assert_eq!([region(0), region(2), region(1), region(3)], wanted);
    assert_eq!(offsets(&map, &[1, 3]), [[64], [96]]);
    assert_eq!(map.owner(&[50]), Ok(GlobalRank(1)));
}

#[test]
fn a_fused_weight_is_cut_block_by_block() {
    // Queries 0..6, keys 6..12, values 12..18: every rank has a third of each.
    let grid = grid(&[("tp", 3), ("gtp", 2)]);
    let fused = Placement::whole([18, 4]).cut_blocks(0, Axis::TP, 0, 3);
    let map = fused.on(&grid).unwrap();
    assert_eq!((map.local_shape(), map.fragments()), (&[6, 4][..], &[3, 1][..]));
    let rows = |map: &ShardMap, rank| -> Vec<(usize, usize)> {
        let spans = map.shard(GlobalRank(rank)).unwrap().region[0].clone();
        spans.into_iter().flat_map(|span| span.local.zip(span.global)).collect()
    };
    assert_eq!(rows(&map, 0), [(0, 0), (1, 1), (2, 6), (3, 7), (4, 12), (5, 13)]);
    assert_eq!(rows(&map, 2), [(0, 4), (1, 5), (2, 10), (3, 11), (4, 16), (5, 17)]);
    assert_eq!(map.owner(&[11, 3]), Ok(GlobalRank(2)));
    // An inner cut sees the six local rows, padded to eight: a span of two blocks, and padding at the end.
    let map = fused.cut(0, Axis::GTP, 4).on(&grid).unwrap();
    assert_eq!((map.local_shape(), map.fragments()), (&[4, 4][..], &[6, 1][..]));
    assert_eq!(rows(&map, 1), [(0, 2), (1, 3), (2, 8), (3, 9)]);
    assert_eq!(rows(&map, 1 + 3), [(0, 14), (1, 15)]);
    assert_eq!(map.holders(&[15, 0]), Ok(vec![GlobalRank(4)]));
}

#[test]
fn blocks_are_padded_one_by_one() {
    // Two blocks of five rows over two ranks: three and two of each, the second rank's third row of each is padding.
    let map = Placement::whole([10]).cut_blocks(0, Axis::TP, 1, 2).on(&grid(&[("tp", 2)])).unwrap();
    assert_eq!(map.local_shape(), [6]);
    let region = |rank| map.shard(GlobalRank(rank)).unwrap().region[0].clone();
    let span = |global, local| Span { global, local };
    assert_eq!(region(0), [span(0..3, 0..3), span(5..8, 3..6)]);
    assert_eq!(region(1), [span(3..5, 0..2), span(8..10, 3..5)]);
}

#[test]
fn blocks_that_cannot_be_are_refused_with_the_way_out() {
    let grid = grid(&[("tp", 2), ("gtp", 3)]);
    let refused = |placement: Placement| placement.on(&grid).unwrap_err();
    let uneven = refused(Placement::whole([16]).cut_blocks(0, Axis::TP, 1, 3));
    assert_eq!(uneven, PlanError::UnevenBlocks { dim: 0, rows: 16, blocks: 3 });
    assert!(uneven.to_string().contains("make it a multiple of 3"), "{uneven}");
    assert!(matches!(refused(Placement::whole([16]).cut_blocks(0, Axis::TP, 1, 0)), PlanError::UnevenBlocks { .. }));
    let inner = refused(Placement::whole([18, 2]).cut(0, Axis::GTP, 0).cut_blocks(0, Axis::TP, 0, 3));
    assert_eq!(inner, PlanError::InnerBlocks { dim: 0, axis: Axis::TP, blocks: 3 });
    // Behind a cut of another dimension it is the first of its own.
    Placement::whole([18, 3]).cut(1, Axis::GTP, 0).cut_blocks(0, Axis::TP, 0, 3).on(&grid).unwrap();
    let odd = refused(Placement::whole([18]).cut_blocks(0, Axis::TP, 0, 6));
    assert!(matches!(odd, PlanError::Uneven { rows: 3, parts: 2, .. }), "a block divides, not the dimension: {odd}");
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
    let uses = prop::collection::vec((0usize..4, 1usize..5, 1usize..4), 5);
    (sizes, names, shape, uses, 0u32..3).prop_map(|(sizes, names, shape, uses, offset)| {
        let axes: Vec<(&str, u32)> = names.into_iter().zip(sizes).collect();
        let mut placement = Placement::whole(shape.clone());
        for ((name, size), (dim, alignment, blocks)) in axes.iter().zip(uses) {
            if *name == "pp" {
                let pin = Pin { axis: axis(name), at: vec![size - 1] };
                placement.pins.push(pin);
            } else if dim < shape.len() {
                // Blocks only where they can be: in the first cut of a dimension that they divide.
                let is_first = placement.cuts.iter().all(|cut| cut.dim != dim);
                let blocks = if is_first && shape[dim].is_multiple_of(blocks) { blocks } else { 1 };
                placement.cuts.push(Cut { dim, axis: axis(name), alignment, blocks });
            }
        }
        let grid = Grid::new(&sized(&axes), GlobalRank(offset), 1 << 12).unwrap();
        (Arc::new(grid), placement)
    })
}

/// Every element that a shard has: its index in the global tensor and in the shard, in the order of both.
fn held(shard: &Shard) -> Vec<(Vec<usize>, Vec<usize>)> {
    shard.region.iter().fold(vec![(vec![], vec![])], |all, spans| {
        let pairs: Vec<_> = spans.iter().flat_map(|span| span.global.clone().zip(span.local.clone())).collect();
        let longer = |(global, local): &(Vec<usize>, Vec<usize>)| -> Vec<_> {
            let both = pairs.iter().map(|(g, l)| ([&global[..], &[*g]].concat(), [&local[..], &[*l]].concat()));
            both.collect()
        };
        all.iter().flat_map(longer).collect()
    })
}

fn row_major(index: &[usize], shape: &[usize]) -> usize {
    index.iter().zip(shape).fold(0, |at, (i, n)| at * n + i)
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
                for span in &shard.region[dim] {
                    prop_assert_eq!(span.global.len(), span.local.len());
                    prop_assert!(!span.global.is_empty() && span.local.end <= map.local_shape()[dim]);
                }
                prop_assert!(shard.offset[dim] + map.local_shape()[dim] <= map.padded_shape()[dim]);
            }
            for (index, _) in held(&shard) {
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
            let wanted: Vec<(u64, usize)> = held(&shard)
                .iter()
                .map(|(g, l)| (row_major(g, map.global_shape()) as u64, row_major(l, map.local_shape())))
                .collect();
            prop_assert_eq!(globals.into_iter().zip(locals).collect::<Vec<_>>(), wanted);
        }
    }
}
