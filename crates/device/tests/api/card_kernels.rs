//! Kernels on a card against their twins on the host: odd sizes, gaps between rows, poisoned outputs.
//!
//! What only moves values, or adds in the order of the host, gives equal bits. The rest is compared with sums in f64:
//! at most twice the error of the host's f32 kernel, or half a step of f32 at the largest value where the host happens
//! to be exact.

use device::{ops::*, *};

use super::card_bench::{LIES, Lie, OpenCard, REAL, SHAPES, f64s, noise};

#[test]
fn fill_and_cast_give_the_bits_of_the_host() {
    let card = OpenCard::new();
    for (shape, lie) in SHAPES.into_iter().flat_map(|shape| LIES.map(|lie| (shape, lie))) {
        let n: usize = shape.iter().product();
        let mut values = noise(n as u64, n);
        values[n / 2] = f32::NAN;
        values[n / 3] = f32::NEG_INFINITY;
        card.equal_bits(|b| {
            let mut outputs = Vec::new();
            for (dtype, value) in
                [(DType::F32, 1.003_906_3), (DType::Bf16, 1.003_906_3), (DType::I32, -7.0), (DType::I16, -7.0)]
            {
                let y = b.tensor(shape, dtype, lie);
                b.run(Fill { y: &y.view, value }.op("test"));
                outputs.push(b.bits(&y));
            }
            for (from, to) in REAL.into_iter().flat_map(|from| REAL.map(|to| (from, to))) {
                let (x, y) = (b.holding(shape, from, Lie::Whole, &values), b.tensor(shape, to, lie));
                b.run(Cast { x: &x.view, y: &y.view }.op("test"));
                outputs.push(b.bits(&y));
            }
            for whole in [DType::I32, DType::I16] {
                let (x, y) = (b.holding(shape, whole, Lie::Whole, &values), b.tensor(shape, whole, lie));
                b.run(Cast { x: &x.view, y: &y.view }.op("test"));
                outputs.push(b.bits(&y));
            }
            outputs
        });
    }
}

#[test]
fn scale_add_and_axpy_give_the_bits_of_the_host() {
    let card = OpenCard::new();
    for (shape, lie) in SHAPES.into_iter().flat_map(|shape| LIES.map(|lie| (shape, lie))) {
        let n: usize = shape.iter().product();
        let (one, two) = (noise(1, n), noise(2, n));
        card.equal_bits(|b| {
            let factor = b.vector(&[0.3]);
            let mut outputs = Vec::new();
            for dtype in REAL {
                let make = |values| b.holding(shape, dtype, lie, values);
                let (x, z, y) = (make(&one), make(&two), b.tensor(shape, dtype, lie));
                b.run(Scale { x: &x.view, factor: Factor::Device(&factor), y: &y.view }.op("test"));
                b.run(Scale { x: &z.view, factor: Factor::Const(-1.7), y: &z.view }.op("test"));
                outputs.extend([b.bits(&y), b.bits(&z)]);
                b.run(Add { a: &x.view, b: &z.view, y: &y.view }.op("test"));
                b.run(Add { a: &x.view, b: &y.view, y: &y.view }.op("test"));
                outputs.push(b.bits(&y));
                for other in REAL {
                    let y = b.holding(shape, other, lie, &two);
                    b.run(Axpy { alpha: Factor::Device(&factor), x: &x.view, y: &y.view }.op("test"));
                    outputs.push(b.bits(&y));
                }
            }
            outputs
        });
    }
}

pub(super) fn gelu(x: f64) -> f64 {
    let z = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
    0.5 * x * (1.0 + z.tanh())
}

pub(super) fn gelu_slope(x: f64) -> f64 {
    let c = (2.0 / std::f64::consts::PI).sqrt();
    let t = (c * (x + 0.044_715 * x * x * x)).tanh();
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044_715 * x * x)
}

#[test]
fn gelu_and_its_gradient_are_as_exact_as_on_the_host() {
    let card = OpenCard::new();
    for (shape, lie) in SHAPES.into_iter().flat_map(|shape| LIES.map(|lie| (shape, lie))) {
        let n: usize = shape.iter().product();
        let (x, dy): (Vec<f32>, _) = (noise(3, n).iter().map(|x| 3.0 * x).collect(), noise(4, n));
        let y: Vec<f64> = f64s(&x).into_iter().map(gelu).collect();
        let dx: Vec<f64> = f64s(&x).into_iter().zip(&dy).map(|(x, dy)| gelu_slope(x) * f64::from(*dy)).collect();
        card.close(&[y.clone(), y, dx.clone(), dx], |b| {
            let make = |values: &[f32]| b.holding(shape, DType::F32, lie, values);
            let (input, own, apart) = (make(&x), make(&x), b.tensor(shape, DType::F32, lie));
            b.run(Gelu { x: &input.view, y: &apart.view }.op("test"));
            b.run(Gelu { x: &own.view, y: &own.view }.op("test"));
            let (grad, dx) = (make(&dy), b.tensor(shape, DType::F32, lie));
            b.run(GeluBackward { dy: &grad.view, x: &input.view, dx: &dx.view }.op("test"));
            b.run(GeluBackward { dy: &grad.view, x: &input.view, dx: &grad.view }.op("test"));
            vec![apart, own, dx, grad]
        });
    }
}

/// Where the exponential leaves f32, where arguments are cut off, and beyond.
pub(super) const FAR: [f32; 12] = [9.5, 10.0, 10.05, 10.07, 10.5, 11.0, 16.0, 19.9, 20.5, 100.0, 1e4, f32::INFINITY];

/// The slope of GELU at those and at their negatives.
pub(super) fn far_slopes() -> (Vec<f32>, Vec<f64>) {
    let slope = |x: f32| if x.is_infinite() { f64::from(u8::from(x > 0.0)) } else { gelu_slope(x.into()) };
    FAR.into_iter().flat_map(|x| [x, -x]).map(|x| (x, slope(x))).unzip()
}

#[test]
fn the_slope_of_gelu_far_from_zero_is_0_or_1() {
    let card = OpenCard::new();
    let (x, slopes) = far_slopes();
    let n = x.len();
    let dy = noise(5, n);
    let dx: Vec<f64> = slopes.iter().zip(&dy).map(|(slope, dy)| slope * f64::from(*dy)).collect();
    card.close(&[dx], |b| {
        let make = |values: &[f32]| b.holding(&[1, n], DType::F32, Lie::Whole, values);
        let (x, dy) = (make(&x), make(&dy));
        b.run(GeluBackward { dy: &dy.view, x: &x.view, dx: &dy.view }.op("test"));
        vec![dy]
    });
}

/// Rows of `values`.
fn rows(values: &[f32], cols: usize) -> impl Iterator<Item = &[f32]> {
    values.chunks_exact(cols)
}

/// Mean and one over the standard deviation of a row.
fn moments(row: &[f64], eps: f64) -> (f64, f64) {
    let mean = row.iter().sum::<f64>() / row.len() as f64;
    let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / row.len() as f64;
    (mean, 1.0 / (variance + eps).sqrt())
}

#[test]
fn layer_norm_is_as_exact_as_on_the_host() {
    let card = OpenCard::new();
    let eps = 1e-5f32;
    for ((shape, residual), lie) in
        SHAPES[1..].iter().flat_map(|s| [false, true].map(|r| (s, r))).flat_map(|s| LIES.map(|lie| (s, lie)))
    {
        let (n, cols) = (shape.iter().product::<usize>(), *shape.last().unwrap());
        let (x, r): (Vec<f32>, _) = (noise(5, n).iter().map(|x| x + 3.0).collect(), noise(6, n));
        let (weight, bias) = (noise(7, cols), noise(8, cols));
        let sum: Vec<f32> = x.iter().zip(&r).map(|(x, r)| if residual { x + r } else { *x }).collect();
        let (mut y, mut means, mut rstds) = (Vec::new(), Vec::new(), Vec::new());
        for row in rows(&sum, cols) {
            let row = f64s(row);
            let (mean, rstd) = moments(&row, eps.into());
            y.extend((0..cols).map(|c| (row[c] - mean) * rstd * f64::from(weight[c]) + f64::from(bias[c])));
            means.push(mean);
            rstds.push(rstd);
        }
        let count = n / cols;
        card.close(&[y, means, rstds, f64s(&sum)], |b| {
            let make = |values: &[f32]| b.holding(shape, DType::F32, lie, values);
            let (tx, tr, sum, y) =
                (make(&x), make(&r), b.tensor(shape, DType::F32, lie), b.tensor(shape, DType::F32, lie));
            let [mean, rstd] = [0; 2].map(|_| b.tensor(&[count], DType::F32, Lie::Whole));
            let (weight, bias) = (b.vector(&weight), b.vector(&bias));
            let residual = residual.then_some(Residual { r: &tr.view, sum: &sum.view });
            let has_sum = residual.is_some();
            let (mean_view, rstd_view) = (&mean.view, &rstd.view);
            let norm = LayerNorm {
                x: &tx.view,
                residual,
                weight: &weight,
                bias: &bias,
                y: &y.view,
                mean: mean_view,
                rstd: rstd_view,
                eps,
            };
            b.run(norm.op("test"));
            vec![y, mean, rstd, if has_sum { sum } else { tx }]
        });
    }
}

/// How the gradient past the norm comes.
#[derive(Clone, Copy, PartialEq)]
enum Past {
    None,
    InPlace,
    Apart,
}

#[test]
fn the_gradients_of_layer_norm_are_as_exact_as_on_the_host() {
    let card = OpenCard::new();
    for ((shape, past), lie) in SHAPES[1..]
        .iter()
        .flat_map(|s| [Past::None, Past::InPlace, Past::Apart].map(|p| (s, p)))
        .flat_map(|s| LIES.map(|lie| (s, lie)))
    {
        let (n, cols) = (shape.iter().product::<usize>(), *shape.last().unwrap());
        let (x, dy, skip, weight) = (noise(9, n), noise(10, n), noise(11, n), noise(12, cols));
        let stats: Vec<(f64, f64)> = rows(&x, cols).map(|row| moments(&f64s(row), 1e-5)).collect();
        // Both take what the forward pass left, which is f32.
        let stats: Vec<(f32, f32)> = stats.iter().map(|(mean, rstd)| (*mean as f32, *rstd as f32)).collect();
        let (mut dx, mut dw, mut db) = (Vec::new(), vec![0.0; cols], vec![0.5; cols]);
        for (i, (x, dy)) in rows(&x, cols).zip(rows(&dy, cols)).enumerate() {
            let (mean, rstd) = (f64::from(stats[i].0), f64::from(stats[i].1));
            let hat: Vec<f64> = f64s(x).iter().map(|x| (x - mean) * rstd).collect();
            let g: Vec<f64> = dy.iter().zip(&weight).map(|(dy, w)| f64::from(*dy) * f64::from(*w)).collect();
            let shift = g.iter().sum::<f64>() / cols as f64;
            let slope = g.iter().zip(&hat).map(|(g, h)| g * h).sum::<f64>() / cols as f64;
            for c in 0..cols {
                let more = if past == Past::None { 0.0 } else { f64::from(skip[i * cols + c]) };
                dx.push(rstd * (g[c] - shift - hat[c] * slope) + more);
                dw[c] += f64::from(dy[c]) * hat[c];
                db[c] += f64::from(dy[c]);
            }
        }
        card.close(&[dx, dw, db], |b| {
            let make = |values: &[f32]| b.holding(shape, DType::F32, lie, values);
            let (tx, tdy, tskip) = (make(&x), make(&dy), make(&skip));
            let mean = b.vector(&stats.iter().map(|s| s.0).collect::<Vec<_>>());
            let rstd = b.vector(&stats.iter().map(|s| s.1).collect::<Vec<_>>());
            let (weight, keep) = (b.vector(&weight), b.vector(&[0.0]));
            let out = if past == Past::InPlace { make(&skip) } else { b.tensor(shape, DType::F32, lie) };
            let skip = match past {
                Past::None => None,
                Past::InPlace => Some(&out.view),
                Past::Apart => Some(&tskip.view),
            };
            let (dy, x, dx) = (&tdy.view, &tx.view, &out.view);
            b.run(
                LayerNormBackward { dy, x, weight: &weight, mean: &mean, rstd: &rstd, skip, dx, sums: None }.op("test"),
            );
            // A factor of 0 overwrites poison; then the sum of the rows is added to a half.
            let [dweight, poisoned] = [0; 2].map(|_| b.tensor(&[cols], DType::F32, Lie::Whole));
            let dbias = b.holding(&[cols], DType::F32, Lie::Whole, &vec![0.5; cols]);
            let (mean, rstd) = (&mean, &rstd);
            let grad = |dbias, into| LayerNormGrad { dy, x, mean, rstd, dweight: &dweight.view, dbias, into };
            b.run(grad(&poisoned.view, Accumulate::Keep(&keep)).op("test"));
            b.run(BiasGrad { dy, dbias: &dbias.view, into: Accumulate::Add }.op("test"));
            vec![out, dweight, dbias]
        });
    }
}

#[test]
fn embeddings_and_their_gradients_give_the_bits_of_the_host() {
    let card = OpenCard::new();
    let ids = [3, 0, 3, 8, 5, 3, 10, 1, 0, 10];
    for (cols, lie) in [1, 37, 300].into_iter().flat_map(|cols| LIES.map(|lie| (cols, lie))) {
        card.equal_bits(|b| {
            let (id_view, keep) = (b.ids(&ids), b.vector(&[0.25]));
            // Rows 2 to 7 of a vocabulary of 11.
            let vocab = Vocab { size: 11, start: 2 };
            let table = b.holding(&[6, cols], DType::F32, lie, &noise(13, 6 * cols));
            let positions = b.holding(&[6, cols], DType::F32, lie, &noise(14, 6 * cols));
            let dy = b.holding(&[10, cols], DType::F32, lie, &noise(15, 10 * cols));
            let mut outputs = Vec::new();
            for seq_len in [None, Some(5)] {
                let y = b.tensor(&[10, cols], DType::F32, lie);
                let positions = seq_len.map(|seq_len| Positions { table: &positions.view, seq_len });
                b.run(Embedding { ids: &id_view, table: &table.view, vocab, positions, y: &y.view }.op("test"));
                outputs.push(b.bits(&y));
            }
            for into in [Accumulate::Overwrite, Accumulate::Add, Accumulate::Keep(&keep)] {
                let fresh = matches!(into, Accumulate::Overwrite);
                let make = |seed| match fresh {
                    true => b.tensor(&[6, cols], DType::F32, lie),
                    false => b.holding(&[6, cols], DType::F32, lie, &noise(seed, 6 * cols)),
                };
                let (dtable, dpositions) = (make(16), make(17));
                let (ids, dy) = (&id_view, &dy.view);
                b.run(EmbeddingGrad { ids, dy, vocab, dtable: &dtable.view, into }.op("test"));
                b.run(PositionGrad { dy, seq_len: 5, dtable: &dpositions.view, into }.op("test"));
                outputs.extend([b.bits(&dtable), b.bits(&dpositions)]);
            }
            outputs
        });
    }
}

#[test]
fn cross_entropy_is_as_exact_as_on_the_host() {
    let card = OpenCard::new();
    // Rows that shared memory holds and rows that it does not; as many as blocks and more.
    let sizes = [(1, 2), (5, 257), (3, 5003), (2, 30_011), (2500, 24)];
    for ((rows_count, cols), lie) in sizes.into_iter().flat_map(|s| LIES.map(|lie| (s, lie))) {
        let logits: Vec<f32> = noise(18, rows_count * cols).iter().map(|x| 8.0 * x).collect();
        let targets: Vec<i32> =
            (0..rows_count).map(|i| if i == 2 { IGNORE } else { ((i * 7919 + 1) % cols) as i32 }).collect();
        let scale = 0.125f32;
        let (mut losses, mut d) = (Vec::new(), Vec::new());
        for (row, target) in rows(&logits, cols).zip(&targets) {
            let row = f64s(row);
            let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = row.iter().map(|x| (x - most).exp()).sum();
            let Ok(target) = usize::try_from(*target) else {
                losses.push(0.0);
                d.extend(vec![0.0; cols]);
                continue;
            };
            losses.push(most + sum.ln() - row[target]);
            let onehot = |c| if c == target { 1.0 } else { 0.0 };
            d.extend((0..cols).map(|c| f64::from(scale) * ((row[c] - most).exp() / sum - onehot(c))));
        }
        card.close(&[losses.clone(), d.clone(), losses, d], |b| {
            let make = || b.holding(&[rows_count, cols], DType::F32, lie, &logits);
            let (input, own, apart) = (make(), make(), b.tensor(&[rows_count, cols], DType::F32, lie));
            let [l1, l2] = [0; 2].map(|_| b.tensor(&[rows_count], DType::F32, Lie::Whole));
            let (targets, factor) = (b.ids(&targets), b.vector(&[scale]));
            for (logits, dlogits, losses, scale) in
                [(&input, &apart, &l1, Factor::Const(scale)), (&own, &own, &l2, Factor::Device(&factor))]
            {
                let (logits, dlogits, losses, targets) = (&logits.view, &dlogits.view, &losses.view, &targets);
                b.run(CrossEntropy { logits, targets, losses, dlogits, scale }.op("test"));
            }
            vec![l1, apart, l2, own]
        });
    }
}

#[test]
fn sums_and_norms_are_as_exact_as_on_the_host() {
    let card = OpenCard::new();
    for n in [1usize, 1000, 600_011] {
        let x = noise(19, n);
        let pieces = SquaredNorm::partials(n);
        let total: f64 = f64s(&x).iter().sum::<f64>() * 0.5;
        let squares: f64 = f64s(&x).iter().map(|x| x * x).sum();
        card.close(&[vec![total], vec![squares]], |b| {
            let input = b.vector(&x);
            let partials = b.tensor(&[pieces], DType::F32, Lie::Whole);
            let [sum, squared] = [0; 2].map(|_| b.tensor(&[1], DType::F32, Lie::Whole));
            b.run(Sum { x: &input, factor: Factor::Const(0.5), total: &sum.view }.op("test"));
            b.run(SquaredNorm { x: &input, partials: &partials.view }.op("test"));
            b.run(Sum { x: &partials.view, factor: Factor::Const(1.0), total: &squared.view }.op("test"));
            vec![sum, squared]
        });
    }
    for squared in [9.0, 0.25, 0.0, f32::INFINITY, f32::NAN] {
        card.equal_bits(|b| {
            let input = b.vector(&[squared]);
            let mut outputs = Vec::new();
            for limit in [0.0, 1.5] {
                let [norm, factor] = [0; 2].map(|_| b.tensor(&[1], DType::F32, Lie::Whole));
                let nonfinite = b.tensor(&[1], DType::I32, Lie::Whole);
                let clip = ClipFactor {
                    squared: &input,
                    limit,
                    norm: &norm.view,
                    factor: &factor.view,
                    nonfinite: &nonfinite.view,
                };
                b.run(clip.op("test"));
                outputs.extend([b.bits(&factor), b.bits(&nonfinite)]);
                // A NaN's payload is nobody's promise.
                outputs
                    .push(b.get::<f32>(&norm.view).iter().map(|x| if x.is_nan() { 0 } else { x.to_bits() }).collect());
            }
            outputs
        });
    }
}
