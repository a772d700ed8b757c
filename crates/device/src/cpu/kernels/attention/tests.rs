use crate::{
    View,
    ops::{
        Attention, AttentionBackward,
        trial::{
            Gaps, assert_close, assert_order_free, differences, few, inner, poisoned_vector, random, refusal,
            run_checked, vector, wide,
        },
    },
    testing::put,
};

#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    t: usize,
    heads: usize,
    kv_heads: usize,
    d: usize,
}

impl Sizes {
    fn rows(&self) -> usize {
        self.batch * self.t
    }

    fn q_cols(&self) -> usize {
        self.heads * self.d
    }

    fn kv_cols(&self) -> usize {
        self.kv_heads * self.d
    }

    fn scale(&self) -> f32 {
        1.0 / (self.d as f32).sqrt()
    }

    /// Outputs and log-sum-exps of a plain attention with the whole matrix of scores.
    fn reference(&self, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let Sizes { batch, t, heads, kv_heads, d } = *self;
        let mut o = vec![0.0; self.rows() * self.q_cols()];
        let mut lse = vec![0.0; batch * heads * t];
        for (at, lse) in lse.iter_mut().enumerate() {
            let (b, h, i) = (at / (heads * t), at / t % heads, at % t);
            let kv = h / (heads / kv_heads);
            let q = &q[(b * t + i) * heads * d + h * d..][..d];
            let key = |x: &[f64], j: usize, c: usize| x[((b * t + j) * kv_heads + kv) * d + c];
            let scores: Vec<f64> =
                (0..=i).map(|j| (0..d).map(|c| q[c] * key(k, j, c)).sum::<f64>() * f64::from(self.scale())).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            *lse = max + sum.ln();
            for c in 0..d {
                let mean: f64 = scores.iter().enumerate().map(|(j, s)| (s - *lse).exp() * key(v, j, c)).sum();
                o[(b * t + i) * heads * d + h * d + c] = mean;
            }
        }
        (o, lse)
    }
}

/// q, k and v as columns of one interleaved tensor, or apart.
fn inputs(s: Sizes, gaps: Gaps, [q, k, v]: [&[f32]; 3]) -> [View; 3] {
    let (n, nq, nk) = (s.rows(), s.q_cols(), s.kv_cols());
    match gaps {
        Gaps::None => [gaps.holding("q", n, nq, q), gaps.holding("k", n, nk, k), gaps.holding("v", n, nk, v)],
        Gaps::Some => {
            let all = Gaps::None.poisoned("qkv", n, nq + 2 * nk);
            let parts = [0..nq, nq..nq + nk, nq + nk..nq + 2 * nk].map(|r| all.columns(r).unwrap());
            parts.iter().zip([q, k, v]).for_each(|(part, values)| put(part, values));
            parts
        }
    }
}

fn attention<'a>(s: Sizes, [q, k, v]: &'a [View; 3], o: &'a View, lse: &'a View) -> Attention<'a> {
    Attention { q, k, v, o, lse, head_dim: s.d, seq_len: s.t, scale: s.scale() }
}

fn sizes() -> Vec<Sizes> {
    let s = |batch, t, heads, kv_heads, d| Sizes { batch, t, heads, kv_heads, d };
    vec![s(1, 1, 1, 1, 1), s(1, 3, 2, 1, 2), s(2, 3, 2, 2, 5), s(3, 17, 4, 2, 3), s(1, 65, 2, 1, 8), s(2, 9, 6, 2, 4)]
}

#[test]
fn outputs_equal_attention_with_the_whole_matrix() {
    let mut all = few(&sizes()).to_vec();
    if !cfg!(miri) {
        // Several blocks of queries and of keys, none of them full at the end.
        all.extend([
            Sizes { batch: 1, t: 300, heads: 2, kv_heads: 1, d: 16 },
            Sizes { batch: 1, t: 1100, heads: 1, kv_heads: 1, d: 8 },
        ]);
    }
    for s in all {
        for gaps in Gaps::BOTH {
            let [q, k, v] =
                [(1, s.q_cols()), (2, s.kv_cols()), (3, s.kv_cols())].map(|(seed, c)| random(seed, s.rows() * c));
            // Large scores, so that the running maximum moves.
            let q: Vec<f32> = q.iter().map(|x| x * 8.0).collect();
            let (o, lse) = (gaps.poisoned("o", s.rows(), s.q_cols()), poisoned_vector("lse", s.batch * s.heads * s.t));
            run_checked(&attention(s, &inputs(s, gaps, [&q, &k, &v]), &o, &lse).op("t").unwrap());
            let want = s.reference(&wide(&q), &wide(&k), &wide(&v));
            assert_close(&o, &want.0, 5e-6);
            assert_close(&lse, &want.1, 2e-6);
        }
    }
}

/// Runs the backward pass; the gradients of q, k and v.
fn backward(s: Sizes, gaps: Gaps, values: [&[f32]; 3], d_o: &[f32]) -> [View; 3] {
    let (o, lse) = s.reference(&wide(values[0]), &wide(values[1]), &wide(values[2]));
    let narrow = |x: Vec<f64>| x.iter().map(|x| *x as f32).collect::<Vec<_>>();
    let [q, k, v] = inputs(s, gaps, values);
    let o = gaps.holding("o", s.rows(), s.q_cols(), &narrow(o));
    let d_o = gaps.holding("d_o", s.rows(), s.q_cols(), d_o);
    let lse = vector("lse", &narrow(lse));
    let nan = |cols: usize| vec![f32::NAN; s.rows() * cols];
    let [dq, dk, dv] = inputs(s, gaps, [&nan(s.q_cols()), &nan(s.kv_cols()), &nan(s.kv_cols())]);
    let request = AttentionBackward {
        q: &q,
        k: &k,
        v: &v,
        o: &o,
        d_o: &d_o,
        lse: &lse,
        dq: &dq,
        dk: &dk,
        dv: &dv,
        head_dim: s.d,
        seq_len: s.t,
        scale: s.scale(),
    };
    run_checked(&request.op("t").unwrap());
    [dq, dk, dv]
}

#[test]
fn gradients_equal_differences() {
    for &s in few(&sizes()) {
        for gaps in Gaps::BOTH {
            let [q, k, v] =
                [(1, s.q_cols()), (2, s.kv_cols()), (3, s.kv_cols())].map(|(seed, c)| random(seed, s.rows() * c));
            let d_o = random(4, s.rows() * s.q_cols());
            let grads = backward(s, gaps, [&q, &k, &v], &d_o);
            let (wq, wk, wv) = (wide(&q), wide(&k), wide(&v));
            let want = [
                differences(&wq, |q| inner(&s.reference(q, &wk, &wv).0, &d_o)),
                differences(&wk, |k| inner(&s.reference(&wq, k, &wv).0, &d_o)),
                differences(&wv, |v| inner(&s.reference(&wq, &wk, v).0, &d_o)),
            ];
            for (grad, want) in grads.iter().zip(&want) {
                // With one key the gradients of q and k are zero up to rounding.
                if s.t > 1 || want.iter().any(|w| w.abs() > 1e-3) {
                    assert_close(grad, want, 5e-6);
                }
            }
        }
    }
}

/// Gradients with the whole matrix of scores, for sizes where differences take too long.
fn analytic(s: Sizes, q: &[f64], k: &[f64], v: &[f64], d_o: &[f64]) -> [Vec<f64>; 3] {
    let (o, lse) = s.reference(q, k, v);
    let Sizes { batch, t, heads, kv_heads, d } = s;
    let scale = f64::from(s.scale());
    let [mut dq, mut dk, mut dv] = [vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]];
    for at in 0..batch * heads * t {
        let (b, h, i) = (at / (heads * t), at / t % heads, at % t);
        let own = (b * t + i) * heads * d + h * d;
        let delta: f64 = (0..d).map(|c| d_o[own + c] * o[own + c]).sum();
        for j in 0..=i {
            let other = ((b * t + j) * kv_heads + h / (heads / kv_heads)) * d;
            let score: f64 = (0..d).map(|c| q[own + c] * k[other + c]).sum::<f64>() * scale;
            let p = (score - lse[at]).exp();
            let dp: f64 = (0..d).map(|c| d_o[own + c] * v[other + c]).sum();
            let ds = p * (dp - delta) * scale;
            for c in 0..d {
                dq[own + c] += ds * k[other + c];
                dk[other + c] += ds * q[own + c];
                dv[other + c] += p * d_o[own + c];
            }
        }
    }
    [dq, dk, dv]
}

#[test]
fn gradients_over_several_blocks_equal_the_whole_matrix() {
    if cfg!(miri) {
        return;
    }
    for s in [
        Sizes { batch: 1, t: 300, heads: 2, kv_heads: 1, d: 16 },
        Sizes { batch: 2, t: 257, heads: 3, kv_heads: 3, d: 8 },
        Sizes { batch: 1, t: 700, heads: 1, kv_heads: 1, d: 24 },
    ] {
        let [q, k, v] =
            [(1, s.q_cols()), (2, s.kv_cols()), (3, s.kv_cols())].map(|(seed, c)| random(seed, s.rows() * c));
        let d_o = random(4, s.rows() * s.q_cols());
        let grads = backward(s, Gaps::Some, [&q, &k, &v], &d_o);
        let want = analytic(s, &wide(&q), &wide(&k), &wide(&v), &wide(&d_o));
        grads.iter().zip(&want).for_each(|(grad, want)| assert_close(grad, want, 5e-6));
    }
}

#[test]
fn attention_is_cut_by_sequence_and_key_head_with_the_same_bits_in_any_order() {
    if cfg!(miri) {
        return;
    }
    // Each is cut differently: one key head, two of four, whole sequences.
    for s in [
        Sizes { batch: 2, t: 256, heads: 4, kv_heads: 2, d: 64 },
        Sizes { batch: 2, t: 192, heads: 4, kv_heads: 4, d: 32 },
        Sizes { batch: 40, t: 64, heads: 2, kv_heads: 2, d: 16 },
    ] {
        let [q, k, v] =
            [(1, s.q_cols()), (2, s.kv_cols()), (3, s.kv_cols())].map(|(seed, c)| random(seed, s.rows() * c));
        let views = || inputs(s, Gaps::Some, [&q, &k, &v]);
        assert_order_free(|| {
            let (o, lse) =
                (Gaps::None.poisoned("o", s.rows(), s.q_cols()), poisoned_vector("lse", s.batch * s.heads * s.t));
            (attention(s, &views(), &o, &lse).op("t").unwrap(), vec![o, lse])
        });
        assert_order_free(|| {
            let ([q, k, v], [dq, dk, dv]) = (views(), views());
            let [o, d_o] =
                [5, 6].map(|seed| Gaps::None.holding("o", s.rows(), s.q_cols(), &random(seed, s.rows() * s.q_cols())));
            let lse = vector("lse", &vec![6.0; s.batch * s.heads * s.t]);
            let request = AttentionBackward {
                q: &q,
                k: &k,
                v: &v,
                o: &o,
                d_o: &d_o,
                lse: &lse,
                dq: &dq,
                dk: &dk,
                dv: &dv,
                head_dim: s.d,
                seq_len: s.t,
                scale: s.scale(),
            };
            (request.op("t").unwrap(), vec![dq, dk, dv])
        });
    }
}

#[test]
fn later_keys_do_not_reach_earlier_queries_even_as_nan() {
    let s = Sizes { batch: 1, t: 9, heads: 1, kv_heads: 1, d: 4 };
    let [q, mut k, v] = [1, 2, 3].map(|seed| random(seed, 36));
    k[32..].fill(f32::NAN);
    let (o, lse) = (Gaps::None.poisoned("o", 9, 4), poisoned_vector("lse", 9));
    run_checked(&attention(s, &inputs(s, Gaps::None, [&q, &k, &v]), &o, &lse).op("t").unwrap());
    let want = s.reference(&wide(&q), &wide(&k), &wide(&v)).0;
    assert_close(&o.rows(0..8).unwrap(), &want[..32], 2e-6);
}

#[test]
fn wrong_sizes_are_told_with_both_shapes() {
    let view = |rows, cols| Gaps::None.poisoned("x", rows, cols);
    let (q, k, lse) = (view(6, 8), view(6, 4), poisoned_vector("lse", 12));
    let good = Attention { q: &q, k: &k, v: &k, o: &q, lse: &lse, head_dim: 4, seq_len: 3, scale: 0.5 };
    let (o, short, wide, other) = (view(6, 8), view(5, 4), view(6, 12), poisoned_vector("lse", 6));
    let good = Attention { o: &o, ..good };
    assert!(good.op("t").is_ok());
    for (request, want) in [
        (Attention { v: &short, ..good }, "k is [6, 4] and v is [5, 4]"),
        (Attention { k: &wide, v: &wide, ..good }, "q is [6, 8] and k is [6, 12]; heads of k must divide heads of q"),
        (Attention { lse: &other, ..good }, "q is [6, 8] and lse is [6]"),
        (Attention { head_dim: 3, ..good }, "head_dim is 3, it must divide the columns of q and of k"),
        (Attention { seq_len: 4, ..good }, "seq_len is 4, it must divide the number of rows"),
        (Attention { o: &k, ..good }, "q is [6, 8] and o is [6, 4]"),
    ] {
        let text = refusal(request.op("h0.attn"));
        assert!(text.starts_with("attention@h0.attn: ") && text.contains(want), "{text}");
    }
}
