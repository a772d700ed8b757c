//! Layers over a tensor group against the same layers undivided.

use device::{
    DType, Machine, MemoryKind,
    ops::{Accumulate, Factor, Finish, IGNORE},
};
use gtp::layers::{
    LayerError, LearnedPositions, Linear, Losses, Norm, NormConfig, NormTags, Region, RowLinear, Then, VocabRows,
    VocabTable, cross_entropy,
};
use pgroups::{Axis, Pass, Placement, Sequence, Weights};

use super::layers_rig::{
    Placed, Side, assert_close, column, everywhere, on_groups, own_columns, own_rows, undivided, values,
};

type Body = fn(&mut Side, usize) -> Result<Placed, LayerError>;

/// Each group on samples of its own gives what the undivided layer gives on them.
fn same_as_undivided(body: Body, what: &str) {
    let want = [0, 1].map(|samples| undivided(body, samples));
    assert!(want[0] != want[1]);
    everywhere(|machine, lists, sequence| {
        let got = on_groups(machine, lists, sequence, body);
        for (got, want) in got.iter().zip(&want) {
            assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
            for (name, want) in want {
                assert_close(
                    &got[name],
                    want,
                    &format!("{what}: {name}, {lists:?}, {sequence:?} on {}", machine.driver()),
                );
            }
        }
    });
}

const ROWS: usize = 12;
const DIM: usize = 6;
const FFN: usize = 20;

/// r + second(gelu(first(x))): into the region, through both kinds of product, out of it, and back.
fn two_products(side: &mut Side, samples: usize) -> Result<Placed, LayerError> {
    let wide = column([FFN, DIM], 1);
    let wide_bias = Placement::whole([FFN]).cut(0, Axis::TP, 0);
    let narrow = Placement::whole([DIM, FFN]).cut(1, Axis::TP, 0);
    let narrow_bias = Placement::whole([DIM]);
    let params = [
        side.param("w1", &wide, &values(1, FFN * DIM))?,
        side.param("b1", &wide_bias, &values(2, FFN))?,
        side.param("w2", &narrow, &values(3, DIM * FFN))?,
        side.param("b2", &narrow_bias, &values(4, DIM))?,
    ];
    let first = Linear::new(&params[0], Some(&params[1]), "first");
    let second = RowLinear::new(&params[2], Some(&params[3]), "second");
    let seed = 100 * samples as u64;
    let (x, r) = (side.rows(&values(seed + 5, ROWS * DIM), DIM), side.rows(&values(seed + 6, ROWS * DIM), DIM));
    let dy = side.rows(&values(seed + 7, ROWS * DIM), DIM);
    let hidden = [ROWS, FFN / side.size()];

    let mut w = side.weights(Pass::Forward);
    let region = Region::of(&w);
    let on = side.stream.clone();
    let f = &mut side.frame;
    let all = region.gather(f, &x)?;
    let (pre, active) = (f.temp(&hidden, DType::F32)?, f.temp(&hidden, DType::F32)?);
    first.forward(&on, &mut w, &all, &active, Then::Gelu { pre: &pre })?;
    let y = second.forward(f, &mut w, &active, &[ROWS, DIM], Some(&r))?;
    let without = second.forward(f, &mut w, &active, &[ROWS, DIM], None)?;

    w.enter(Pass::Backward);
    let dy = region.gather(f, &dy)?;
    let dpre = f.temp(&hidden, DType::F32)?;
    second.backward_input(&on, &mut w, &dy, &dpre, Finish::GeluBackward { pre: &pre })?;
    let dx = f.temp(&[ROWS, DIM], DType::F32)?;
    first.backward_input(&on, &mut w, &dpre, &dx, Finish::Into(Accumulate::Overwrite))?;
    let dx = region.reduce(f, &dx)?;
    second.backward_weight(f, &mut w, &dy, &active)?;
    first.backward_weight(f, &mut w, &dpre, &all)?;
    Ok(Placed::from([
        ("y", own_rows(side, side.get(&y)?)),
        ("y without residual", own_rows(side, side.get(&without)?)),
        ("dx", own_rows(side, side.get(&dx)?)),
        ("dw1", side.grad(&params[0], &wide)?),
        ("db1", side.grad(&params[1], &wide_bias)?),
        ("dw2", side.grad(&params[2], &narrow)?),
        ("db2", side.grad(&params[3], &narrow_bias)?),
    ]))
}

#[test]
fn column_and_row_products_give_the_undivided_values_and_gradients() {
    same_as_undivided(two_products, "products");
}

/// A fused weight of three blocks: each rank computes its columns of all three.
fn fused(side: &mut Side, samples: usize) -> Result<Placed, LayerError> {
    let (width, part) = (3 * 8, 8 / side.size());
    let placement = column([width, DIM], 3);
    let weight = side.param("qkv", &placement, &values(1, width * DIM))?;
    let linear = Linear::new(&weight, None, "qkv");
    let x = side.rows(&values(40 + samples as u64, ROWS * DIM), DIM);
    let mut w = side.weights(Pass::Forward);
    let all = Region::of(&w).gather(&mut side.frame, &x)?;
    let y = side.frame.temp(&[ROWS, 3 * part], DType::F32)?;
    linear.forward(&side.stream, &mut w, &all, &y, Then::Nothing)?;
    let y = side.get(&y)?;
    let block = |b: usize| {
        let own: Vec<f32> = y.chunks(3 * part).flat_map(|row| row[b * part..(b + 1) * part].to_vec()).collect();
        own_columns(&own, part, side.place() * part, 8)
    };
    Ok(Placed::from([("q", block(0)), ("k", block(1)), ("v", block(2))]))
}

#[test]
fn a_fused_product_gives_each_rank_its_columns_of_every_block() {
    same_as_undivided(fused, "fused");
}

/// Lookup, logits, losses and all their gradients over a table of `rows` rows for ten tokens.
fn vocabulary(side: &mut Side, samples: usize, rows: usize) -> Result<Placed, LayerError> {
    let vocab = VocabRows { size: 10, rows };
    let placement = Placement::whole([rows, DIM]).cut(0, Axis::TP, 1);
    let whole = Placement::whole([4, DIM]);
    let table = side.param("table", &placement, &values(1, rows * DIM))?;
    let output = side.param("output", &placement, &values(2, rows * DIM))?;
    let positions = side.param("positions", &whole, &values(3, 4 * DIM))?;
    let (lookup, head) = (VocabTable::new(&table, vocab, "wte"), VocabTable::new(&output, vocab, "head"));
    let id = |i: usize| ((i * 7 + 3 * samples + i / 5) % 10) as i32;
    let ids = side.ids(&(0..ROWS).map(id).collect::<Vec<_>>());
    let mut targets: Vec<i32> = (0..ROWS).map(|i| id(i + 4)).collect();
    targets[5] = IGNORE;
    let targets = side.ids(&targets);
    let site = device::Site::from("wpe");
    let learned = LearnedPositions { table: &positions, seq_len: 4, site: &site };

    let mut w = side.weights(Pass::Forward);
    let (region, on) = (Region::of(&w), side.stream.clone());
    let f = &mut side.frame;
    let x = lookup.lookup(f, &mut w, &ids, &[ROWS, DIM], Some(learned))?;
    let all = region.gather(f, &x)?;
    let logits = head.logits(f, &mut w, &all)?;
    let every = head.gather_logits(f, &w, &logits)?;
    // The gradient takes the logits' place, and a group of one gathers them by handing them back.
    let kept = f.temp(&[ROWS, 10], DType::F32)?;
    on.launch(device::ops::Cast { x: &every, y: &kept }.op("keep")?)?;
    let losses = f.temp(&[ROWS], DType::F32)?;
    let given = Losses { logits: &logits, targets: &targets, losses: &losses, vocab, scale: Factor::Const(0.5) };
    cross_entropy(f, &w, &device::Site::from("loss"), &given)?;

    w.enter(Pass::Backward);
    let dx = f.temp(&[ROWS, DIM], DType::F32)?;
    head.logits_backward_input(f, &mut w, &logits, &dx)?;
    let dx = region.reduce(f, &dx)?;
    head.logits_backward_weight(f, &mut w, &logits, &all)?;
    let dy = region.gather(f, &dx)?;
    lookup.lookup_grad(f, &mut w, &ids, &dy, Some(learned))?;
    let shard = vocab.shard(&region);
    let dlogits = side.get(&logits.columns(0..shard.valid)?)?;
    let padding = side.get(&logits.columns(shard.valid..shard.rows)?)?;
    assert!(padding.iter().all(|v| *v == 0.0), "nothing comes from padding");
    let from = (side.place() * shard.rows).min(10);
    Ok(Placed::from([
        ("x", own_rows(side, side.get(&x)?)),
        ("logits", side.get(&kept)?.into_iter().enumerate().collect()),
        ("losses", side.get(&losses)?.into_iter().enumerate().collect()),
        ("dlogits", own_columns(&dlogits, shard.valid.max(1), from, 10)),
        ("dx", own_rows(side, side.get(&dx)?)),
        ("dtable", side.grad(&table, &placement)?),
        ("doutput", side.grad(&output, &placement)?),
        ("dpositions", side.grad(&positions, &whole)?),
    ]))
}

#[test]
fn an_uneven_vocabulary_gives_the_undivided_losses_and_gradients() {
    same_as_undivided(|side, samples| vocabulary(side, samples, 10), "ten rows");
    same_as_undivided(|side, samples| vocabulary(side, samples, 11), "a row that is no token's");
}

#[test]
fn a_rank_with_nothing_but_padding_takes_part() {
    // Sixteen rows over four ranks: tokens end in the third part, the fourth holds none.
    same_as_undivided(|side, samples| vocabulary(side, samples, 16), "sixteen rows");
    // Rows of padding are no parameter's elements, yet what is there must be kept: contributions of 0.
    let padding = on_groups(&Machine::cpu(2).unwrap(), &[&[0, 1, 2, 3]], Sequence::Whole, |side, _| {
        let placement = Placement::whole([9, DIM]).cut(0, Axis::TP, 1);
        let table = side.param("table", &placement, &values(1, 9 * DIM))?;
        let vocab = VocabRows { size: 9, rows: 9 };
        let head = VocabTable::new(&table, vocab, "head");
        let x = side.rows(&values(2, ROWS * DIM), DIM);
        let targets = side.ids(&(0..ROWS as i32).map(|i| i % 9).collect::<Vec<_>>());
        let mut w = side.weights(Pass::Backward);
        let logits = head.logits(&mut side.frame, &mut w, &x)?;
        assert_eq!(logits.shape(), [ROWS, 3], "every member multiplies as many rows");
        let losses = side.frame.temp(&[ROWS], DType::F32)?;
        let given = Losses { logits: &logits, targets: &targets, losses: &losses, vocab, scale: Factor::Const(0.5) };
        cross_entropy(&mut side.frame, &w, &device::Site::from("loss"), &given)?;
        let dx = side.frame.temp(&[ROWS, DIM], DType::F32)?;
        head.logits_backward_input(&mut side.frame, &mut w, &logits, &dx)?;
        head.logits_backward_weight(&mut side.frame, &mut w, &logits, &x)?;
        let (grad, dx) = (side.get(&table.main_grad())?, side.get(&dx)?);
        assert_eq!(grad.iter().all(|v| *v == 0.25), side.place() == 3);
        assert_eq!(dx.iter().all(|v| *v == 0.0), side.place() == 3);
        Ok(Placed::new())
    });
    assert!(padding[0].is_empty());
}

/// B56: the replicated bias of a row-parallel layer is added once.
#[test]
fn a_row_parallel_bias_is_added_once() {
    everywhere(|machine, lists, sequence| {
        let y = on_groups(machine, lists, sequence, |side, _| {
            let weight = side.param("w", &Placement::whole([3, 8]).cut(1, Axis::TP, 0), &values(1, 24))?;
            let bias = side.param("b", &Placement::whole([3]), &[1.0; 3])?;
            let linear = RowLinear::new(&weight, Some(&bias), "proj");
            let x = side.put(&[4, 8 / side.size()], vec![0.0; 32 / side.size()]);
            let mut w = side.weights(Pass::Forward);
            let y = linear.forward(&mut side.frame, &mut w, &x, &[4, 3], None)?;
            Ok(Placed::from([("y", own_rows(side, side.get(&y)?))]))
        });
        assert!(y.iter().all(|y| y["y"] == [1.0; 12]), "{lists:?}, {sequence:?}: {y:?}");
    });
}

const NORM: NormConfig = NormConfig {
    eps: 1e-5,
    tags: NormTags { x: "x", y: "y", mean: "mean", rstd: "rstd", dweight: "dweight", dbias: "dbias" },
};

/// B56: the gradients of a norm's weights are those of a rank's rows, and their sum over the group is the gradient.
#[test]
fn norm_gradients_under_a_sequence_split_are_partial_and_sum_to_the_whole() {
    let norm = |side: &mut Side| {
        let whole = Placement::whole([DIM]);
        let (weight, bias) = (side.param("w", &whole, &values(1, DIM))?, side.param("b", &whole, &values(2, DIM))?);
        let norm = Norm::new(&weight, Some(&bias), "norm", NORM);
        let (x, dy) = (side.rows(&values(3, ROWS * DIM), DIM), side.rows(&values(4, ROWS * DIM), DIM));
        let mut w = side.weights(Pass::Forward);
        let y = norm.forward(&mut side.frame, &mut w, &x, None)?;
        w.enter(Pass::Backward);
        let dx = norm.backward_input(&mut side.frame, &mut w, &dy, None)?;
        norm.backward_weight(&mut side.frame, &mut w)?;
        let rows = [("y", own_rows(side, side.get(&y)?)), ("dx", own_rows(side, side.get(&dx)?))];
        Ok::<_, LayerError>((rows, side.grad(&weight, &whole)?, side.grad(&bias, &whole)?))
    };
    let want = undivided(
        |side, _| {
            let (rows, dw, db) = norm(side)?;
            Ok(rows.into_iter().chain([("dw", dw), ("db", db)]).collect())
        },
        0,
    );
    let offset = |place: usize, grad: Vec<(usize, f32)>| grad.into_iter().map(move |(at, v)| (place * DIM + at, v));
    for members in [&[0u32, 1][..], &[2, 0, 3, 1]] {
        let got = on_groups(&Machine::cpu(2).unwrap(), &[members], Sequence::Split, |side, _| {
            let (rows, dw, db) = norm(side)?;
            let (dw, db) = (offset(side.place(), dw).collect(), offset(side.place(), db).collect());
            Ok(rows.into_iter().chain([("dw", dw), ("db", db)]).collect())
        });
        for name in ["y", "dx"] {
            assert_eq!(got[0][name], want[name], "rows are independent: {name}");
        }
        for name in ["dw", "db"] {
            let parts = &got[0][name];
            let sum: Vec<f32> = (0..DIM).map(|i| parts.iter().skip(i).step_by(DIM).sum()).collect();
            assert_close(&sum, &want[name], name);
            assert!(parts[..DIM] != parts[DIM..2 * DIM] && parts[..DIM] != want[name][..], "{name} is partial");
        }
    }
}

#[test]
fn what_does_not_fit_the_group_is_refused_with_both_sizes_and_the_way_out() {
    let refused = on_groups(&Machine::cpu(2).unwrap(), &[&[0, 1]], Sequence::Split, |side, _| {
        let weight = side.param("w", &Placement::whole([3, 8]).cut(1, Axis::TP, 0), &values(1, 24))?;
        let mut w = side.weights(Pass::Forward);
        let x = side.put(&[5, 4], vec![0.0; 20]);
        let error = RowLinear::new(&weight, None, "proj").forward(&mut side.frame, &mut w, &x, &[5, 3], None);
        let text = error.unwrap_err().to_string();
        assert!(text.contains("5 rows do not divide over its 2 members"), "{text}");
        assert!(text.contains("make sequences x tokens a multiple of 2"), "{text}");

        let y = side.put(&[5, 3], vec![0.0; 15]);
        let gelu = Linear::new(&weight, None, "fc").forward(&side.stream, &mut w, &x, &y, Then::Gelu { pre: &y });
        let text = gelu.unwrap_err().to_string();
        assert!(text.contains("'w' has no bias") && text.contains("ops::Gelu"), "{text}");

        // A table that every rank holds whole.
        let table = side.param("wte", &Placement::whole([10, 4]), &values(2, 40))?;
        let head = VocabTable::new(&table, VocabRows { size: 10, rows: 10 }, "head");
        let text = head.logits(&mut side.frame, &mut w, &x).unwrap_err().to_string();
        assert!(text.contains("'wte' has 10 rows here; 10 rows over a tensor group of 2 leave 5 each"), "{text}");
        Ok(Placed::new())
    });
    assert_eq!(refused.len(), 1);
}

#[test]
fn a_target_outside_the_vocabulary_fails_on_every_member() {
    let failed = std::panic::catch_unwind(|| {
        on_groups(&Machine::cpu(2).unwrap(), &[&[0, 1]], Sequence::Whole, |side, _| {
            let w = side.weights(Pass::Forward);
            let logits = side.put(&[2, 3], values(1, 6));
            let targets = side.ids(&[1, 6]);
            let losses = side.stream.device().alloc("losses", &[2], DType::F32, MemoryKind::Other)?;
            let vocab = VocabRows { size: 6, rows: 6 };
            let given =
                Losses { logits: &logits, targets: &targets, losses: &losses, vocab, scale: Factor::Const(1.0) };
            cross_entropy(&mut side.frame, &w, &device::Site::from("loss"), &given)?;
            side.stream.synchronize()?;
            Ok(Placed::new())
        })
    });
    let panic = failed.expect_err("position 1 has no target");
    let text = panic.downcast_ref::<String>().expect("a text");
    assert!(text.contains('6') && text.contains("position 1"), "{text}");
}
