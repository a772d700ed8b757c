//! Kernels of other layers than GPT-2's on a card: RMS norm, SwiGLU, rotary positions, and the loss over shards of a
//! vocabulary; and sums over many rows.

use device::{cuda::Products, ops::*, *};

use super::card_bench::{Bench, LIES, Lie, OpenCard, SHAPES, Tensor, Want, close_by, f64s, noise, values};

fn want(what: String, values: Vec<f64>) -> Want {
    Want::new(what, values)
}

/// How the gradient past a norm comes.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Past {
    None,
    InPlace,
    Apart,
}

#[derive(Clone, Copy, Debug)]
struct Norm {
    shape: &'static [usize],
    past: Past,
    lie: Lie,
    dtype: DType,
}

const EPS: f32 = 1e-5;

impl Norm {
    fn all(dtype: DType) -> Vec<Norm> {
        let each =
            SHAPES[1..].iter().flat_map(|shape| [Past::None, Past::InPlace, Past::Apart].map(|past| (shape, past)));
        each.flat_map(|(shape, past)| LIES.map(|lie| Norm { shape, past, lie, dtype })).collect()
    }

    /// x, what is added to it, the gradient of y, what reaches the sum past the norm; and the weight.
    fn inputs(&self) -> ([Vec<f32>; 4], Vec<f32>) {
        let (n, cols) = (self.shape.iter().product(), *self.shape.last().unwrap());
        ([1, 2, 3, 4].map(|seed| values(self.dtype, seed, n)), values(self.dtype, 5, cols))
    }

    /// y, rstd, sum; dx, dweight from the sum.
    fn want(&self) -> Vec<Want> {
        let ([x, r, dy, skip], weight) = self.inputs();
        let cols = weight.len();
        let (mut y, mut rstds, mut sums, mut dx, mut dw) = (vec![], vec![], vec![], vec![], vec![0.0; cols]);
        for at in (0..x.len()).step_by(cols) {
            let part = |all: &[f32]| f64s(&all[at..at + cols]);
            let (x, r, dy, skip, w) = (part(&x), part(&r), part(&dy), part(&skip), f64s(&weight));
            let sum: Vec<f64> = x.iter().zip(&r).map(|(x, r)| x + r).collect();
            let square = |x: &[f64]| 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / cols as f64 + f64::from(EPS)).sqrt();
            let rstd = square(&sum);
            y.extend((0..cols).map(|c| sum[c] * rstd * w[c]));
            rstds.push(rstd);
            sums.extend(sum);
            // The gradient is that of the norm of x alone, so that it stands on what both sides hold exactly.
            let own = square(&x);
            let slope = (0..cols).map(|c| dy[c] * w[c] * x[c] * own).sum::<f64>() / cols as f64;
            for c in 0..cols {
                let past = if self.past == Past::None { 0.0 } else { skip[c] };
                dx.push(own * (dy[c] * w[c] - x[c] * own * slope) + past);
                dw[c] += dy[c] * x[c] * own;
            }
        }
        let named = [("y", y), ("rstd", rstds), ("sum", sums), ("dx", dx), ("dweight", dw)];
        named.map(|(name, values)| want(format!("{name} of {self:?}"), values)).into()
    }

    fn run(&self, b: &Bench) -> Vec<Tensor> {
        let ([x, r, dy, skip], weight) = self.inputs();
        let (cols, count) = (weight.len(), x.len() / weight.len());
        let make = |values: &[f32]| b.input(self.shape, self.dtype, self.lie, values);
        let made = || b.output(self.shape, self.dtype, self.lie);
        let (x, r, dy, apart) = (make(&x), make(&r), make(&dy), make(&skip));
        let weight = b.input(&[cols], self.dtype, Lie::Whole, &weight).view;
        let (y, sum, unused) = (made(), made(), made());
        let [rstd, own] = [0; 2].map(|_| b.tensor(&[count], DType::F32, Lie::Whole));
        let residual = Some(Residual { r: &r.view, sum: &sum.view });
        let norm = |y, rstd, residual| RmsNorm { x: &x.view, residual, weight: &weight, y, rstd, eps: EPS };
        b.run(norm(&y.view, &rstd.view, residual).op("test"));
        b.run(norm(&unused.view, &own.view, None).op("test"));
        let dx = if self.past == Past::InPlace { make(&skip) } else { made() };
        let skip = match self.past {
            Past::None => None,
            Past::InPlace => Some(&dx.view),
            Past::Apart => Some(&apart.view),
        };
        let (dy, x, rstd_of_x) = (&dy.view, &x.view, &own.view);
        b.run(RmsNormBackward { dy, x, weight: &weight, rstd: rstd_of_x, skip, dx: &dx.view, sums: None }.op("test"));
        let dweight = b.tensor(&[cols], DType::F32, Lie::Whole);
        let into = Accumulate::Overwrite;
        b.run(RmsNormGrad { dy, x, rstd: rstd_of_x, dweight: &dweight.view, into }.op("test"));
        vec![y, rstd, sum, dx, dweight]
    }
}

fn norms_are_close(dtype: DType) {
    let cases = Norm::all(dtype);
    let want: Vec<Want> = cases.iter().flat_map(Norm::want).collect();
    close_by(Products::CuBlasLt, &want, |b| cases.iter().flat_map(|case| case.run(b)).collect());
}

#[test]
fn rms_norm_and_its_gradients_are_as_exact_as_on_the_host() {
    norms_are_close(DType::F32);
}

#[test]
fn rms_norm_of_bf16_and_its_gradients_are_those_of_f32_rounded() {
    norms_are_close(DType::Bf16);
}

fn swiglu_is_close(dtype: DType) {
    let cases: Vec<_> = SHAPES.into_iter().flat_map(|shape| LIES.map(|lie| (shape, lie))).collect();
    let inputs = |shape: &[usize]| {
        let n = shape.iter().product();
        let wide = values(dtype, 1, n).into_iter().map(|x| 4.0 * x).collect::<Vec<_>>();
        [wide, values(dtype, 2, n), values(dtype, 3, n)]
    };
    let wants = |shape: &[usize], lie: Lie| {
        let [gate, up, dy] = inputs(shape);
        let (mut y, mut dgate, mut dup) = (vec![], vec![], vec![]);
        for i in 0..gate.len() {
            let [g, u, d] = [gate[i], up[i], dy[i]].map(f64::from);
            let s = 1.0 / (1.0 + (-g).exp());
            y.push(g * s * u);
            dgate.push(d * u * (s + g * s * (1.0 - s)));
            dup.push(d * g * s);
        }
        [("y", y), ("dgate", dgate), ("dup", dup)]
            .map(|(name, values)| want(format!("{name} of {shape:?} {lie:?}"), values))
    };
    let want: Vec<Want> = cases.iter().flat_map(|(shape, lie)| wants(shape, *lie)).collect();
    close_by(Products::CuBlasLt, &want, |b| {
        let run = |(shape, lie): &(&[usize], Lie)| {
            let [gate, up, dy] = inputs(shape).map(|values| b.input(shape, dtype, *lie, &values));
            let [y, dgate, dup] = [0; 3].map(|_| b.output(shape, dtype, *lie));
            b.run(SwiGlu { gate: &gate.view, up: &up.view, y: &y.view }.op("test"));
            let (gate, up, dy) = (&gate.view, &up.view, &dy.view);
            b.run(SwiGluBackward { dy, gate, up, dgate: &dgate.view, dup: &dup.view }.op("test"));
            [y, dgate, dup]
        };
        cases.iter().flat_map(run).collect()
    });
}

#[test]
fn swiglu_and_its_gradients_are_as_exact_as_on_the_host() {
    swiglu_is_close(DType::F32);
}

#[test]
fn swiglu_of_bf16_and_its_gradients_are_those_of_f32_rounded() {
    swiglu_is_close(DType::Bf16);
}

/// Rows of two sequences of 5, heads of 6.
fn rotary_is_close(dtype: DType) {
    let (rows, heads, head_dim, seq_len, base) = (10, 3, 6, 5, 10_000.0f64);
    let half = head_dim / 2;
    let x = values(dtype, 1, rows * heads * head_dim);
    let mut table = vec![0.0; 8 * head_dim];
    for (t, i) in (0..8).flat_map(|t| (0..half).map(move |i| (t, i))) {
        let angle = t as f64 * base.powf(-(i as f64) / half as f64);
        (table[t * head_dim + i], table[t * head_dim + half + i]) = (angle.cos(), angle.sin());
    }
    let turned = |sign: f64| {
        let mut y = vec![0.0; x.len()];
        for (at, y) in y.iter_mut().enumerate() {
            let (row, c) = (at / (heads * head_dim), at % head_dim);
            let (t, low) = (row % seq_len, at - c + c % half);
            // Angles as the table holds them.
            let [cos, sin] = [c % half, half + c % half].map(|i| f64::from(table[t * head_dim + i] as f32));
            let (a, b) = (f64::from(x[low]), f64::from(x[low + half]));
            *y = if c < half { a * cos - sign * b * sin } else { b * cos + sign * a * sin };
        }
        y
    };
    let wants = [("table", table.clone()), ("forward", turned(1.0)), ("backward", turned(-1.0))];
    let wants: Vec<Want> =
        LIES.iter().flat_map(|lie| wants.clone().map(|(name, v)| want(format!("{name} {lie:?}"), v))).collect();
    close_by(Products::CuBlasLt, &wants, |b| {
        let run = |lie: &Lie| {
            let table = b.tensor(&[8, head_dim], DType::F32, *lie);
            b.run(RotaryTable { table: &table.view, base }.op("test"));
            let shape = [rows, heads * head_dim];
            let (own, x, y) =
                (b.input(&shape, dtype, *lie, &x), b.input(&shape, dtype, *lie, &x), b.output(&shape, dtype, *lie));
            let turn = |x, y, turning| Rotary { x, table: &table.view, seq_len, turning, y };
            b.run(turn(&own.view, &own.view, Turning::Forward).op("test"));
            b.run(turn(&x.view, &y.view, Turning::Backward).op("test"));
            [table, own, y]
        };
        LIES.iter().flat_map(run).collect()
    });
}

#[test]
fn rotary_positions_are_as_exact_as_on_the_host() {
    rotary_is_close(DType::F32);
}

#[test]
fn rotary_positions_of_bf16_are_those_of_f32_rounded() {
    rotary_is_close(DType::Bf16);
}

/// Two shards of a vocabulary of 300, their partial results combined on the host.
#[test]
fn the_loss_over_shards_of_a_vocabulary_is_as_exact_as_on_the_host() {
    let (rows, size, cut) = (7, 300, 131);
    let logits: Vec<f32> = noise(1, rows * size).iter().map(|x| 6.0 * x).collect();
    let targets: Vec<i32> = (0..rows).map(|i| if i == 3 { IGNORE } else { (i * 97 % size) as i32 }).collect();
    let columns = |from: usize, to: usize| (0..rows).flat_map(move |r| r * size + from..r * size + to);
    let shards = [(0, cut), (cut, size)];
    let mut wants = Vec::new();
    for (from, to) in shards {
        let (mut maxima, mut sums, mut owns, mut losses, mut grads) = (vec![], vec![], vec![], vec![], vec![]);
        for (row, target) in logits.chunks_exact(size).zip(&targets) {
            let (whole, part) = (f64s(row), f64s(&row[from..to]));
            let most = |x: &[f64]| x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum = |x: &[f64], most: f64| x.iter().map(|x| (x - most).exp()).sum::<f64>();
            maxima.push(most(&part));
            sums.push(sum(&part, most(&part)));
            let id = usize::try_from(*target).ok();
            owns.push(id.filter(|id| (from..to).contains(id)).map_or(0.0, |id| whole[id]));
            let (top, total) = (most(&whole), sum(&whole, most(&whole)));
            losses.push(id.map_or(0.0, |id| top + total.ln() - whole[id]));
            let onehot = |c: usize| if Some(c) == id { 1.0 } else { 0.0 };
            grads.extend(
                (from..to).map(|c| if id.is_none() { 0.0 } else { 0.5 * ((whole[c] - top).exp() / total - onehot(c)) }),
            );
        }
        let named = [("max", maxima), ("sum", sums), ("target", owns), ("losses", losses), ("gradient", grads)];
        wants.extend(named.map(|(name, values)| want(format!("{name} of {from}..{to}"), values)));
    }
    close_by(Products::CuBlasLt, &wants, |b| {
        let ids = b.ids(&targets);
        let mut outputs = Vec::new();
        let vector = || b.tensor(&[rows], DType::F32, Lie::Whole);
        for (from, to) in shards {
            let vocab = Vocab { size, start: from };
            let values: Vec<f32> = columns(from, to).map(|at| logits[at]).collect();
            let part = b.holding(&[rows, to - from], DType::F32, Lie::Gaps, &values);
            let (max, sum, target, losses) = (vector(), vector(), vector(), vector());
            let (m, s, t) = (&max.view, &sum.view, &target.view);
            b.run(VocabPartials { logits: &part.view, targets: &ids, vocab, max: m, sum: s, target: t }.op("test"));
            // What the shards would have found together, rounded to f32 as they hold it.
            let mut all = [vec![], vec![], vec![]];
            for (row, id) in logits.chunks_exact(size).zip(&targets) {
                let row = f64s(row);
                let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                all[0].push(top as f32);
                all[1].push(row.iter().map(|x| (x - top).exp()).sum::<f64>() as f32);
                all[2].push(usize::try_from(*id).map_or(0.0, |id| row[id] as f32));
            }
            let [m, s, t] = all.map(|values| b.vector(&values));
            let (logits, losses_view, scale) = (&part.view, &losses.view, Factor::Const(0.5));
            let finish = VocabFinish {
                logits,
                targets: &ids,
                vocab,
                max: &m,
                sum: &s,
                target: &t,
                losses: losses_view,
                dlogits: logits,
                scale,
            };
            b.run(finish.op("test"));
            outputs.extend([max, sum, target, losses, part]);
        }
        outputs
    });
    OpenCard::new().close(&[vec![0.5 * (-1.5f64).exp(), 3.0]], |b| {
        let (local, global) = (b.vector(&[1.0, -2.0]), b.vector(&[2.5, -2.0]));
        let sum = b.holding(&[2], DType::F32, Lie::Whole, &[0.5, 3.0]);
        b.run(VocabRescale { local: &local, global: &global, sum: &sum.view }.op("test"));
        vec![sum]
    });
}

/// So many that they are summed in runs, which are added afterwards.
#[test]
fn gradients_over_many_rows_are_as_exact_as_on_the_host() {
    let card = OpenCard::new();
    let (rows, cols) = (3001, 70);
    let (x, dy, old) = (noise(1, rows * cols), noise(2, rows * cols), noise(3, cols));
    let (mean, rstd) = (noise(4, rows), noise(5, rows));
    let (mut dw, mut db) = (vec![0.0; cols], vec![0.0; cols]);
    for at in 0..rows * cols {
        let (row, c) = (at / cols, at % cols);
        let [x, dy, mean, rstd] = [x[at], dy[at], mean[row], rstd[row]].map(f64::from);
        dw[c] += dy * ((x - mean) * rstd);
        db[c] += dy;
    }
    let added: Vec<f64> = db.iter().zip(&old).map(|(db, old)| db + f64::from(*old)).collect();
    card.close(&[dw, db, added], |b| {
        let make = |values: &[f32]| b.holding(&[rows, cols], DType::F32, Lie::Gaps, values);
        let (x, dy) = (make(&x), make(&dy));
        let (mean, rstd) = (b.vector(&mean), b.vector(&rstd));
        let [dweight, dbias] = [0; 2].map(|_| b.tensor(&[cols], DType::F32, Lie::Whole));
        let added = b.holding(&[cols], DType::F32, Lie::Whole, &old);
        let (dy, x, into) = (&dy.view, &x.view, Accumulate::Overwrite);
        let (dw, db) = (&dweight.view, &dbias.view);
        b.run(LayerNormGrad { dy, x, mean: &mean, rstd: &rstd, dweight: dw, dbias: db, into }.op("test"));
        b.run(BiasGrad { dy, dbias: &added.view, into: Accumulate::Add }.op("test"));
        vec![dweight, dbias, added]
    });
}

/// More rows than a block looks at together, and ids that come again far behind.
#[test]
fn the_gradient_of_a_long_embedding_gives_the_bits_of_the_host() {
    let card = OpenCard::new();
    let (rows, cols, size) = (3000, 37, 400);
    let ids: Vec<i32> = (0..rows).map(|i| (i * i % 7919 % size) as i32).collect();
    let dy = noise(1, rows * cols);
    card.equal_bits(|b| {
        let (ids, dy) = (b.ids(&ids), b.holding(&[rows, cols], DType::F32, Lie::Gaps, &dy));
        let dtable = b.tensor(&[size, cols], DType::F32, Lie::Gaps);
        let (vocab, into) = (Vocab { size, start: 0 }, Accumulate::Overwrite);
        b.run(EmbeddingGrad { ids: &ids, dy: &dy.view, vocab, dtable: &dtable.view, into }.op("test"));
        vec![b.bits(&dtable)]
    });
}
