//! Causal attention in blocks: scores of some queries against some keys at a time, with a running maximum.

use super::{
    gemm::{Factor, product},
    math::{self, exp_le0},
    wide::wide,
};
use crate::{Args, OpError, Rows, RowsMut, ops::AttentionSpec};

/// Queries of a forward block.
const QUERIES: usize = 64;
/// Keys of a forward block: with the queries, scores that fit the second-level cache.
const KEYS: usize = 512;
/// Keys of a backward block.
const BACK_KEYS: usize = 64;
/// Queries of a backward block.
const BACK_QUERIES: usize = 256;

pub(super) fn forward(spec: &AttentionSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (q, k, v) = (args.rows::<f32>(0)?, args.rows::<f32>(1)?, args.rows::<f32>(2)?);
    let (mut o, lse) = (args.rows_mut::<f32>(3)?, args.write::<f32>(4)?);
    let (heads, kv_heads) = spec.heads(q.cols(), k.cols());
    let (t, d) = (spec.seq_len, spec.head_dim);
    let mut scores = vec![0.0; QUERIES.min(t) * KEYS.min(t)];
    for (at, lse) in lse.chunks_exact_mut(t).enumerate() {
        let (b, h) = (at / heads, at % heads);
        let rows = b * t..(b + 1) * t;
        let (own, kv) = (h * d..(h + 1) * d, h / (heads / kv_heads));
        let kv = kv * d..(kv + 1) * d;
        let head = Head {
            q: q.block(rows.clone(), own.clone()),
            k: k.block(rows.clone(), kv.clone()),
            v: v.block(rows.clone(), kv),
            scale: spec.scale,
        };
        head.forward(o.block_mut(rows, own), lse, &mut scores);
    }
    Ok(())
}

/// One head of one sequence.
struct Head<'a> {
    q: Rows<'a, f32>,
    k: Rows<'a, f32>,
    v: Rows<'a, f32>,
    scale: f32,
}

impl Head<'_> {
    /// Each block of queries goes through the keys up to its own end.
    fn forward(&self, mut o: RowsMut<'_, f32>, lse: &mut [f32], scratch: &mut [f32]) {
        let (t, d) = (self.q.len(), self.q.cols());
        for q0 in (0..t).step_by(QUERIES) {
            let queries = q0..(q0 + QUERIES).min(t);
            let count = queries.len();
            let mut o = o.block_mut(queries.clone(), 0..d);
            let q = Factor::plain(self.q.block(queries.clone(), 0..d));
            let (mut max, mut sum) = ([f32::NEG_INFINITY; QUERIES], [0.0; QUERIES]);
            for k0 in (0..queries.end).step_by(KEYS) {
                let keys = k0..(k0 + KEYS).min(queries.end);
                let width = keys.len();
                let scores = &mut scratch[..count * width];
                let k = Factor::transposed(self.k.block(keys.clone(), 0..d));
                product(&mut RowsMut::of(scores, count, width), 0.0, self.scale, q, k);
                // Keys k0..=query of each query count.
                let visible = |row: usize| (q0 + row + 1).saturating_sub(k0).min(width);
                soften(scores, width, count, visible(0), &mut max, &mut sum, if k0 > 0 { Some(&mut o) } else { None });
                let p = Factor::plain(Rows::of(scores, count, width));
                let keep = if k0 > 0 { 1.0 } else { 0.0 };
                product(&mut o, keep, 1.0, p, Factor::plain(self.v.block(keys, 0..d)));
            }
            finish(o, &max, &sum, &mut lse[queries]);
        }
    }
}

wide! {
    /// Scores become exp(score − max) with the running maximum, 0 where masked; old outputs and sums are brought
    /// to the new maximum. The first row sees `first` keys, each further one more.
    fn soften(
        scores: &mut [f32],
        width: usize,
        rows: usize,
        first: usize,
        max: &mut [f32; QUERIES],
        sum: &mut [f32; QUERIES],
        old: Option<&mut RowsMut<'_, f32>>,
    ) {
        let mut old = old;
        for r in 0..rows {
            let (seen, masked) = scores[r * width..(r + 1) * width].split_at_mut((first + r).min(width));
            let largest = math::max(seen);
            let new = if largest > max[r] { largest } else { max[r] };
            seen.iter_mut().for_each(|s| *s = exp_le0(*s - new));
            masked.fill(0.0);
            let shrink = exp_le0(max[r] - new);
            sum[r] = sum[r].mul_add(shrink, math::sum(seen));
            max[r] = new;
            if let Some(o) = &mut old {
                o.row_mut(r).iter_mut().for_each(|o| *o *= shrink);
            }
        }
    }
}

wide! {
    fn finish(o: RowsMut<'_, f32>, max: &[f32], sum: &[f32], lse: &mut [f32]) {
        let mut o = o;
        for (r, lse) in lse.iter_mut().enumerate() {
            let factor = 1.0 / sum[r];
            o.row_mut(r).iter_mut().for_each(|o| *o *= factor);
            *lse = max[r] + sum[r].ln();
        }
    }
}

pub(super) fn backward(spec: &AttentionSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let (q, k, v) = (args.rows::<f32>(0)?, args.rows::<f32>(1)?, args.rows::<f32>(2)?);
    let (o, d_o, lse) = (args.rows::<f32>(3)?, args.rows::<f32>(4)?, args.read::<f32>(5)?);
    let (mut dq, mut dk, mut dv) = (args.rows_mut::<f32>(6)?, args.rows_mut::<f32>(7)?, args.rows_mut::<f32>(8)?);
    let (heads, kv_heads) = spec.heads(q.cols(), k.cols());
    let (t, d) = (spec.seq_len, spec.head_dim);
    let group = heads / kv_heads;
    let size = BACK_QUERIES.min(t) * BACK_KEYS.min(t);
    let mut scratch = Scratch { delta: vec![0.0; t], p: vec![0.0; size], ds: vec![0.0; size] };
    for (at, lse) in lse.chunks_exact(t).enumerate() {
        let (b, h) = (at / heads, at % heads);
        let rows = b * t..(b + 1) * t;
        let own = h * d..(h + 1) * d;
        let kv = h / group * d..(h / group + 1) * d;
        let head = Head {
            q: q.block(rows.clone(), own.clone()),
            k: k.block(rows.clone(), kv.clone()),
            v: v.block(rows.clone(), kv.clone()),
            scale: spec.scale,
        };
        let d_o = d_o.block(rows.clone(), own.clone());
        deltas(d_o, o.block(rows.clone(), own.clone()), &mut scratch.delta);
        let mut grads = Grads {
            dq: dq.block_mut(rows.clone(), own),
            dk: dk.block_mut(rows.clone(), kv.clone()),
            dv: dv.block_mut(rows, kv),
            // The first query head of a group overwrites, the others add.
            old: if h % group == 0 { 0.0 } else { 1.0 },
        };
        head.backward(d_o, lse, &mut grads, &mut scratch);
    }
    Ok(())
}

/// Buffers that one head after the other uses.
struct Scratch {
    delta: Vec<f32>,
    p: Vec<f32>,
    ds: Vec<f32>,
}

struct Grads<'a> {
    dq: RowsMut<'a, f32>,
    dk: RowsMut<'a, f32>,
    dv: RowsMut<'a, f32>,
    old: f32,
}

impl Head<'_> {
    /// Each block of keys goes through the queries from its own start on, so that the sums over queries, which are
    /// the long ones, are inner dimensions of products.
    fn backward(&self, d_o: Rows<'_, f32>, lse: &[f32], grads: &mut Grads<'_>, scratch: &mut Scratch) {
        let (t, d) = (self.q.len(), self.q.cols());
        for k0 in (0..t).step_by(BACK_KEYS) {
            let keys = k0..(k0 + BACK_KEYS).min(t);
            let width = keys.len();
            let (k, v) = (self.k.block(keys.clone(), 0..d), self.v.block(keys.clone(), 0..d));
            let mut dk = grads.dk.block_mut(keys.clone(), 0..d);
            let mut dv = grads.dv.block_mut(keys, 0..d);
            for q0 in (k0..t).step_by(BACK_QUERIES) {
                let queries = q0..(q0 + BACK_QUERIES).min(t);
                let count = queries.len();
                let (p, ds) = (&mut scratch.p[..count * width], &mut scratch.ds[..count * width]);
                let q = self.q.block(queries.clone(), 0..d);
                let d_o = d_o.block(queries.clone(), 0..d);
                product(&mut RowsMut::of(p, count, width), 0.0, self.scale, Factor::plain(q), Factor::transposed(k));
                product(&mut RowsMut::of(ds, count, width), 0.0, 1.0, Factor::plain(d_o), Factor::transposed(v));
                let delta = &scratch.delta[queries.clone()];
                probabilities(p, ds, width, q0 + 1 - k0, &lse[queries.clone()], delta, self.scale);
                let (p, ds) = (Rows::of(p, count, width), Rows::of(ds, count, width));
                let old = if q0 == k0 { grads.old } else { 1.0 };
                product(&mut dv, old, 1.0, Factor::transposed(p), Factor::plain(d_o));
                product(&mut dk, old, 1.0, Factor::transposed(ds), Factor::plain(q));
                let old = if k0 == 0 { 0.0 } else { 1.0 };
                let mut dq = grads.dq.block_mut(queries, 0..d);
                product(&mut dq, old, 1.0, Factor::plain(ds), Factor::plain(k));
            }
        }
    }
}

wide! {
    /// Σ over a head's columns of d_o·o, for each query.
    fn deltas(d_o: Rows<'_, f32>, o: Rows<'_, f32>, delta: &mut [f32]) {
        for (i, delta) in delta.iter_mut().enumerate() {
            *delta = math::dot(d_o.row(i), o.row(i));
        }
    }
}

wide! {
    /// Scores in `p` become probabilities, products in `ds` the gradient of the scores before their scale, both 0
    /// where masked. The first row sees `first` keys, each further one more.
    fn probabilities(
        p: &mut [f32],
        ds: &mut [f32],
        width: usize,
        first: usize,
        lse: &[f32],
        delta: &[f32],
        scale: f32,
    ) {
        for (r, (&lse, &delta)) in lse.iter().zip(delta).enumerate() {
            let row = r * width..(r + 1) * width;
            let seen = (first + r).min(width);
            let (p, p_masked) = p[row.clone()].split_at_mut(seen);
            let (ds, ds_masked) = ds[row].split_at_mut(seen);
            for (p, ds) in p.iter_mut().zip(ds) {
                *p = exp_le0(*p - lse);
                *ds = *p * (*ds - delta) * scale;
            }
            p_masked.fill(0.0);
            ds_masked.fill(0.0);
        }
    }
}

#[cfg(test)]
mod tests;
