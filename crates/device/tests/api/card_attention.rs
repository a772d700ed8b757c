//! Attention on a card against its twin on the host and sums in f64.

use device::{cuda::Products, ops::*, *};

use super::card_bench::{Bench, LIES, Lie, Tensor, Want, close_by, values};

#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    seq_len: usize,
    head_dim: usize,
    lie: Lie,
    dtype: DType,
}

impl Case {
    /// Sequences shorter than a tile, as long, and longer with a rest; heads of every width that has a function.
    fn all(dtype: DType) -> Vec<Case> {
        let sizes = [
            (2, 1, 1, 2, 8),
            (2, 3, 3, 5, 7),
            (1, 4, 2, 64, 64),
            (2, 2, 1, 97, 64),
            (1, 3, 3, 200, 33),
            (1, 2, 2, 130, 96),
            (2, 4, 1, 150, 128),
            (1, 2, 1, 75, 200),
        ];
        let each = sizes.into_iter().flat_map(|sizes| LIES.map(|lie| (sizes, lie)));
        let case = |((batch, heads, kv_heads, seq_len, head_dim), lie)| Case {
            batch,
            heads,
            kv_heads,
            seq_len,
            head_dim,
            lie,
            dtype,
        };
        each.map(case).collect()
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    fn rows(&self) -> usize {
        self.batch * self.seq_len
    }

    /// Columns of queries and of keys.
    fn cols(&self) -> [usize; 2] {
        [self.heads * self.head_dim, self.kv_heads * self.head_dim]
    }

    /// q, k, v and the gradient of o.
    fn inputs(&self) -> [Vec<f32>; 4] {
        let [q, k] = self.cols();
        [(1, q), (2, k), (3, k), (4, q)].map(|(seed, cols)| values(self.dtype, seed, self.rows() * cols))
    }

    /// o, lse, dq, dk, dv.
    fn want(&self) -> Vec<Want> {
        let ([q, k, v, d_o], [wide, narrow]) = (self.inputs(), self.cols());
        let (rows, t, d) = (self.rows(), self.seq_len, self.head_dim);
        let mut o = vec![0.0; rows * wide];
        let mut lse = Vec::new();
        let (mut dq, mut dk, mut dv) = (vec![0.0; rows * wide], vec![0.0; rows * narrow], vec![0.0; rows * narrow]);
        let scale = f64::from(self.scale());
        for (b, h, i) in (0..self.batch).flat_map(|b| (0..self.heads).flat_map(move |h| (0..t).map(move |i| (b, h, i))))
        {
            let own = (b * t + i) * wide + h * d;
            let other = |j: usize| (b * t + j) * narrow + h / (self.heads / self.kv_heads) * d;
            let dot = |x: &[f32], at: usize, y: &[f32], to: usize| -> f64 {
                (0..d).map(|c| f64::from(x[at + c]) * f64::from(y[to + c])).sum()
            };
            let scores: Vec<f64> = (0..=i).map(|j| scale * dot(&q, own, &k, other(j))).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - most).exp()).sum();
            lse.push(most + sum.ln());
            let p: Vec<f64> = scores.iter().map(|s| (s - most).exp() / sum).collect();
            let dp: Vec<f64> = (0..=i).map(|j| dot(&d_o, own, &v, other(j))).collect();
            let delta: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
            for (j, (p, dp)) in p.iter().zip(&dp).enumerate() {
                let ds = p * (dp - delta) * scale;
                for c in 0..d {
                    o[own + c] += p * f64::from(v[other(j) + c]);
                    dv[other(j) + c] += p * f64::from(d_o[own + c]);
                    dq[own + c] += ds * f64::from(k[other(j) + c]);
                    dk[other(j) + c] += ds * f64::from(q[own + c]);
                }
            }
        }
        let named = [("o", o), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv)];
        // Factors of bf16 are rounded to it before they are multiplied: probabilities, and gradients of scores. That is as
        // large an error as that of rounding a result.
        let times = if self.dtype == DType::Bf16 { 4.0 } else { 2.0 };
        named.map(|(name, values)| Want::new(format!("{name} of {self:?}"), values).within(times)).into()
    }

    fn run(&self, b: &Bench) -> Vec<Tensor> {
        let (rows, [wide, narrow], lie) = (self.rows(), self.cols(), self.lie);
        let [q, k, v, d_o] = self.inputs();
        let make = |cols, values: &[f32]| b.input(&[rows, cols], self.dtype, lie, values);
        let (q, k, v, d_o) = (make(wide, &q), make(narrow, &k), make(narrow, &v), make(wide, &d_o));
        let made = |cols| b.output(&[rows, cols], self.dtype, lie);
        let (o, dq, dk, dv) = (made(wide), made(wide), made(narrow), made(narrow));
        let lse = b.tensor(&[self.batch, self.heads, self.seq_len], DType::F32, Lie::Whole);
        let (head_dim, seq_len, scale) = (self.head_dim, self.seq_len, self.scale());
        let forward =
            Attention { q: &q.view, k: &k.view, v: &v.view, o: &o.view, lse: &lse.view, head_dim, seq_len, scale };
        b.run(forward.op("test"));
        let backward = AttentionBackward {
            q: &q.view,
            k: &k.view,
            v: &v.view,
            o: &o.view,
            d_o: &d_o.view,
            lse: &lse.view,
            dq: &dq.view,
            dk: &dk.view,
            dv: &dv.view,
            head_dim,
            seq_len,
            scale,
        };
        b.run(backward.op("test"));
        vec![o, lse, dq, dk, dv]
    }
}

fn all_are_close(dtype: DType) {
    let cases = Case::all(dtype);
    let want: Vec<Want> = cases.iter().flat_map(Case::want).collect();
    close_by(Products::CuBlasLt, &want, |b| cases.iter().flat_map(|case| case.run(b)).collect());
}

#[test]
fn attention_and_its_gradients_are_as_exact_as_on_the_host() {
    all_are_close(DType::F32);
}

#[test]
fn attention_of_bf16_and_its_gradients_are_those_of_f32_rounded() {
    all_are_close(DType::Bf16);
}
