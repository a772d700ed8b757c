//! Causal attention in blocks: scores of some queries against some keys at a time, with a running maximum.

use std::ops::Range;

use super::{
    gemm::{Factor, product},
    lanes::WIDTH,
    math::{self, exp_or_zero, exp_or_zero_of},
    wide::wide,
};
use crate::{Args, OpError, Rows, RowsMut, ops::AttentionSpec};

/// Queries of a forward block: few, because half of the last block is masked; a multiple of 6, the rows of the
/// product's kernel, and of a vector.
const QUERIES: usize = 48;
/// Keys of a forward block: with the queries, scores that fit the second-level cache.
const KEYS: usize = 512;
/// Keys of a backward block, for the same reasons.
const BACK_KEYS: usize = 48;
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
                let place = Place { query: q0, key: k0, width };
                soften(scores, place, count, &mut max, &mut sum, if k0 > 0 { Some(&mut o) } else { None });
                let p = Factor::plain(Rows::of(scores, count, width));
                let keep = if k0 > 0 { 1.0 } else { 0.0 };
                product(&mut o, keep, 1.0, p, Factor::plain(self.v.block(keys, 0..d)));
            }
            finish(o, &max, &sum, &mut lse[queries]);
        }
    }
}

/// Where a block of scores is: its first query and key, and how many keys it has.
#[derive(Clone, Copy)]
struct Place {
    query: usize,
    key: usize,
    width: usize,
}

impl Place {
    /// The scores of row `r` that its query may see: keys up to its own.
    #[inline(always)]
    fn seen(self, r: usize) -> Range<usize> {
        let count = (self.query + r + 1).saturating_sub(self.key).min(self.width);
        r * self.width..r * self.width + count
    }
}

wide! {
    /// Scores become exp(score − max) with the running maximum, 0 where masked; old outputs and sums are brought
    /// to the new maximum.
    fn soften(
        scores: &mut [f32],
        place: Place,
        rows: usize,
        max: &mut [f32; QUERIES],
        sum: &mut [f32; QUERIES],
        old: Option<&mut RowsMut<'_, f32>>,
    ) {
        let mut old = old;
        let seen = |r: usize| place.seen(r);
        // All maxima first: the way through one row is a chain of waits, and rows do not wait for each other.
        let mut new = *max;
        for r in 0..rows {
            let largest = math::max::<V>(&scores[seen(r)]);
            new[r] = if largest > max[r] { largest } else { max[r] };
        }
        for r in 0..rows {
            let own = math::exp_and_sum::<V>(&mut scores[seen(r)], None, new[r]);
            scores[seen(r).end..(r + 1) * place.width].fill(0.0);
            let shrink = exp_or_zero_of(max[r] - new[r]);
            sum[r] = sum[r].mul_add(shrink, own);
            if let Some(o) = &mut old {
                o.row_mut(r).iter_mut().for_each(|o| *o *= shrink);
            }
        }
        *max = new;
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
                let place = Place { query: q0, key: k0, width };
                probabilities(p, ds, place, &lse[queries.clone()], delta, self.scale);
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
            *delta = math::sums([d_o.row(i), o.row(i)], |[d_o, o]: [V; 2]| [d_o * o])[0];
        }
    }
}

wide! {
    /// Scores in `p` become probabilities, products in `ds` the gradient of the scores before their scale, both 0
    /// where masked.
    fn probabilities(
        p: &mut [f32],
        ds: &mut [f32],
        place: Place,
        lse: &[f32],
        delta: &[f32],
        scale: f32,
    ) {
        for (r, (&lse, &delta)) in lse.iter().zip(delta).enumerate() {
            let (lse, delta) = (V::splat(lse), V::splat(delta));
            let (seen, end) = (place.seen(r), (r + 1) * place.width);
            for at in seen.clone().step_by(WIDTH) {
                let part = at..(at + WIDTH).min(seen.end);
                let e = exp_or_zero(V::load_first(&p[part.clone()], f32::NEG_INFINITY) - lse);
                let d = e * (V::load_first(&ds[part.clone()], 0.0) - delta) * V::splat(scale);
                e.store_first(&mut p[part.clone()]);
                d.store_first(&mut ds[part]);
            }
            p[seen.end..end].fill(0.0);
            ds[seen.end..end].fill(0.0);
        }
    }
}

#[cfg(test)]
mod tests;
