//! Kernels that wait for memory, in sizes that their fast ways take: the same bits as at addresses which those refuse,
//! where other tests hold them against sums in f64; and the bits of the host where it adds in the same order.

use device::{ops::*, *};

use super::card_bench::{Bench, LIES, Lie, OpenCard, REAL, Tensor, noise, values};

/// What `trial` leaves, with tensors that lie whole and with gaps between their rows.
#[track_caller]
fn alike(card: &OpenCard, trial: impl Fn(&Bench, Lie) -> Vec<Tensor>) {
    let b = card.bench();
    let bits = |tensor: &Tensor| match tensor.view.dtype() {
        DType::Bf16 => b.get::<bf16>(&tensor.view).into_iter().map(|x| x.to_bits().into()).collect(),
        _ => b.get::<f32>(&tensor.view).into_iter().map(f32::to_bits).collect::<Vec<u32>>(),
    };
    let [whole, gaps] = LIES.map(|lie| trial(&b, lie).iter().map(bits).collect::<Vec<_>>());
    assert_eq!(whole.len(), gaps.len());
    for (i, (whole, gaps)) in whole.iter().zip(&gaps).enumerate() {
        let differ = whole.iter().zip(gaps).position(|(a, b)| a != b);
        assert!(differ.is_none(), "output {i} differs at {differ:?}: {:?}", differ.map(|at| (whole[at], gaps[at])));
    }
}

/// Rows of one run, of all runs of a warp, of two and more warps, of all that are held, and wider.
const WIDTHS: [usize; 8] = [8, 256, 768, 776, 1600, 4096, 8192, 8200];

#[test]
fn norms_give_the_same_bits_whether_they_hold_their_rows_or_not() {
    let card = OpenCard::new();
    let rows = 37;
    for (dtype, cols) in REAL.into_iter().flat_map(|dtype| WIDTHS.map(|cols| (dtype, cols))) {
        alike(&card, |b, lie| {
            let shape = [rows, cols];
            let make = |seed| b.holding(&shape, dtype, lie, &values(dtype, seed, rows * cols));
            let made = || b.tensor(&shape, dtype, lie);
            let [weight, bias] = [5, 6].map(|seed| b.holding(&[cols], dtype, Lie::Whole, &values(dtype, seed, cols)));
            let (weight, bias) = (&weight.view, &bias.view);
            let (x, r, dy, skip) = (make(1), make(2), make(3), make(4));
            let [mean, rstd, own_mean, own_rstd, root] = [0; 5].map(|_| b.tensor(&[rows], DType::F32, Lie::Whole));
            let (y, sum, plain, dx, inside, rms, drms) = (made(), made(), made(), made(), make(4), made(), made());
            let norm =
                |residual, y, mean, rstd| LayerNorm { x: &x.view, residual, weight, bias, y, mean, rstd, eps: 1e-5 };
            let residual = Some(Residual { r: &r.view, sum: &sum.view });
            b.run(norm(residual, &y.view, &mean.view, &rstd.view).op("test"));
            b.run(norm(None, &plain.view, &own_mean.view, &own_rstd.view).op("test"));
            let (dy, x, mean_of_x, rstd_of_x) = (&dy.view, &x.view, &own_mean.view, &own_rstd.view);
            let stretches = [LayerNormBackward::stretches(rows), cols];
            let [dweight, dbias, scaled] = [0; 3].map(|_| b.tensor(&stretches, DType::F32, lie));
            let sums = StretchSums { dweight: &dweight.view, dbias: &dbias.view };
            for (skip, dx, sums) in [(None, &dx.view, None), (Some(&inside.view), &inside.view, Some(sums))] {
                b.run(LayerNormBackward { dy, x, weight, mean: mean_of_x, rstd: rstd_of_x, skip, dx, sums }.op("test"));
            }
            let rstd_view = &root.view;
            b.run(RmsNorm { x, residual: None, weight, y: &rms.view, rstd: rstd_view, eps: 1e-5 }.op("test"));
            let (skip, sums) = (Some(&skip.view), Some(&scaled.view));
            b.run(RmsNormBackward { dy, x, weight, rstd: rstd_view, skip, dx: &drms.view, sums }.op("test"));
            vec![y, sum, plain, dx, inside, rms, drms, mean, rstd, root, dweight, dbias, scaled]
        });
    }
}

/// Of so many rows that a block has several for each warp; the last stretch is not whole.
#[test]
fn sums_over_stretches_of_rows_add_up_to_the_gradients_as_exactly_as_on_the_host() {
    let card = OpenCard::new();
    let (rows, cols) = (5003, 72);
    let [x, dy] = [1, 2].map(|seed| noise(seed, rows * cols));
    let (mean, rstd, weight) = (noise(3, rows), noise(4, rows), noise(5, cols));
    let mut want = vec![vec![0.0; cols]; 3];
    for at in 0..rows * cols {
        let (row, c) = (at / cols, at % cols);
        let [x, dy, mean, rstd] = [x[at], dy[at], mean[row], rstd[row]].map(f64::from);
        want[0][c] += dy * (x - mean) * rstd;
        want[1][c] += dy;
        want[2][c] += dy * x * rstd;
    }
    card.close(&want, |b| {
        let make = |values: &[f32]| b.holding(&[rows, cols], DType::F32, Lie::Whole, values);
        let (x, dy, dx) = (make(&x), make(&dy), b.tensor(&[rows, cols], DType::F32, Lie::Whole));
        let (mean, rstd, weight) = (&b.vector(&mean), &b.vector(&rstd), &b.vector(&weight));
        let stretches = [LayerNormBackward::stretches(rows), cols];
        let sums = [0; 3].map(|_| b.tensor(&stretches, DType::F32, Lie::Whole).view);
        let (dy, x, dx, skip) = (&dy.view, &x.view, &dx.view, None);
        let both = Some(StretchSums { dweight: &sums[0], dbias: &sums[1] });
        b.run(LayerNormBackward { dy, x, weight, mean, rstd, skip, dx, sums: both }.op("test"));
        b.run(RmsNormBackward { dy, x, weight, rstd, skip, dx, sums: Some(&sums[2]) }.op("test"));
        let [dweight, dbias, scaled] = [0; 3].map(|_| b.tensor(&[cols], DType::F32, Lie::Whole));
        let grad = |dy, dbias| BiasGrad { dy, dbias, into: Accumulate::Overwrite };
        b.run(BiasGrads { each: [grad(&sums[0], &dweight.view), grad(&sums[1], &dbias.view)] }.op("test"));
        b.run(grad(&sums[2], &scaled.view).op("test"));
        vec![dweight, dbias, scaled]
    });
}

/// One group of rows, few, and so many that they are summed in stretches.
#[test]
fn sums_of_columns_give_the_same_bits_whether_they_take_whole_runs_or_not() {
    let card = OpenCard::new();
    for (dtype, rows) in REAL.into_iter().flat_map(|dtype| [5, 300, 5000].map(|rows| (dtype, rows))) {
        for cols in [8, 264, 768] {
            alike(&card, |b, lie| {
                let make = |seed| b.holding(&[rows, cols], dtype, lie, &values(dtype, seed, rows * cols));
                let (x, dy) = (make(1), make(2));
                let [mean, rstd] = [3, 4].map(|seed| b.vector(&values(DType::F32, seed, rows)));
                let [dweight, dbias, scaled, fresh] = [0; 4].map(|_| b.tensor(&[cols], DType::F32, Lie::Whole));
                let added = b.holding(&[cols], DType::F32, Lie::Whole, &values(DType::F32, 5, cols));
                let pair =
                    [6, 7].map(|seed| b.holding(&[cols], DType::F32, Lie::Whole, &values(DType::F32, seed, cols)));
                let (dy, x, mean, rstd, into) = (&dy.view, &x.view, &mean, &rstd, Accumulate::Overwrite);
                let (dw, db) = (&dweight.view, &dbias.view);
                b.run(LayerNormGrad { dy, x, mean, rstd, dweight: dw, dbias: db, into }.op("test"));
                b.run(RmsNormGrad { dy, x, rstd, dweight: &scaled.view, into }.op("test"));
                b.run(BiasGrad { dy, dbias: &fresh.view, into }.op("test"));
                b.run(BiasGrad { dy, dbias: &added.view, into: Accumulate::Add }.op("test"));
                let of = |dy, dbias, into| BiasGrad { dy, dbias, into };
                let each = [of(x, &pair[0].view, into), of(dy, &pair[1].view, Accumulate::Add)];
                b.run(BiasGrads { each }.op("test"));
                let [first, second] = pair;
                vec![dweight, dbias, scaled, fresh, added, first, second]
            });
        }
    }
}

/// Ids of several blocks, one of them more often than a warp looks at together; some of other shards.
#[test]
fn embeddings_of_many_rows_and_their_gradients_give_the_bits_of_the_host() {
    let card = OpenCard::new();
    let (rows, size, start, held, seq_len) = (5000, 1000, 100, 800, 10);
    let ids: Vec<i32> = (0..rows).map(|i| if i % 9 == 0 { 333 } else { i * 7919 % size }).collect();
    let (rows, vocab) = (rows as usize, Vocab { size: size as usize, start });
    for (dtype, cols) in REAL.into_iter().flat_map(|dtype| [8, 264, 1104].map(|cols| (dtype, cols))) {
        card.equal_bits(|b| {
            let make = |rows, seed| b.holding(&[rows, cols], dtype, Lie::Whole, &values(dtype, seed, rows * cols));
            let (ids, table, positions, dy) = (b.ids(&ids), make(held, 1), make(seq_len, 2), make(rows, 3));
            let mut outputs = Vec::new();
            for positions in [None, Some(Positions { table: &positions.view, seq_len })] {
                let y = b.tensor(&[rows, cols], dtype, Lie::Whole);
                b.run(Embedding { ids: &ids, table: &table.view, vocab, positions, y: &y.view }.op("test"));
                outputs.push(b.bits(&y));
            }
            let old = |rows| b.holding(&[rows, cols], DType::F32, Lie::Whole, &values(DType::F32, 4, rows * cols));
            let (dtable, dpositions, dy, into) = (old(held), old(seq_len), &dy.view, Accumulate::Add);
            b.run(EmbeddingGrad { ids: &ids, dy, vocab, dtable: &dtable.view, into }.op("test"));
            b.run(PositionGrad { dy, seq_len, dtable: &dpositions.view, into }.op("test"));
            outputs.extend([b.bits(&dtable), b.bits(&dpositions)]);
            outputs
        });
    }
}
