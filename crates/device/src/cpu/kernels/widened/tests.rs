//! A request over bf16 gives what its f32 twin gives of the same values, rounded once. The twins themselves are held
//! against f64 in their own tests, so that nothing but this rounding lies between bf16 and f64.

use std::cell::RefCell;

use super::*;
use crate::{
    Fresh, Op, View,
    ops::{
        Accumulate, Attention, AttentionBackward, BiasGrad, CrossEntropy, Embedding, EmbeddingGrad, Factor, Finish,
        Gelu, GeluBackward, Gemm, IGNORE, LayerNorm, LayerNormBackward, LayerNormGrad, PositionGrad, Positions,
        Residual, RmsNorm, RmsNormBackward, RmsNormGrad, Rotary, RotaryTable, SwiGlu, SwiGluBackward, Trans, Turning,
        Vocab, VocabFinish, VocabPartials,
        trial::{Gaps, assert_pieces_partition, few, pieces, random, refusal, run_checked, vector},
    },
    testing::{get, holding, put, scratch},
};

/// Views of one run. Values can be told exactly in bf16, so both types hold the same ones.
struct Desk {
    dtype: DType,
    gaps: Gaps,
    outputs: RefCell<Vec<View>>,
}

impl Desk {
    fn values(&self, seed: u64, rows: usize, cols: usize) -> View {
        let view = self.gaps.poisoned_of(self.dtype, "values", rows, cols);
        let halves: Vec<bf16> = random(seed, rows * cols).iter().map(|x| bf16::from_f32(2.0 * x)).collect();
        match self.dtype {
            DType::Bf16 => put(&view, &halves),
            _ => put(&view, &halves.iter().map(|x| x.to_f32()).collect::<Vec<_>>()),
        }
        view
    }

    fn row(&self, seed: u64, cols: usize) -> View {
        Desk { gaps: Gaps::None, dtype: self.dtype, outputs: RefCell::default() }.values(seed, 1, cols)
    }

    fn output(&self, rows: usize, cols: usize) -> View {
        self.gives(self.gaps.poisoned_of(self.dtype, "output", rows, cols))
    }

    fn updated(&self, seed: u64, rows: usize, cols: usize) -> View {
        self.gives(self.values(seed, rows, cols))
    }

    /// f32 whatever the values are.
    fn f32_output(&self, rows: usize, cols: usize) -> View {
        self.gives(self.gaps.poisoned("output", rows, cols))
    }

    fn f32_row(&self, len: usize) -> View {
        self.gives(scratch("output", &[len], DType::F32, Fresh::Poisoned))
    }

    fn gives(&self, view: View) -> View {
        self.outputs.borrow_mut().push(view.clone());
        view
    }
}

/// What `case` makes over f32 and over bf16 views gives the same results, but for one rounding.
#[track_caller]
fn assert_rounded_once(what: &str, case: impl Fn(&Desk) -> Op) {
    for gaps in Gaps::BOTH {
        let run = |dtype| {
            let desk = Desk { dtype, gaps, outputs: RefCell::default() };
            run_checked(&case(&desk));
            desk.outputs.into_inner()
        };
        let (wide, narrow) = (run(DType::F32), run(DType::Bf16));
        assert!(!wide.is_empty(), "{what}: something is compared");
        for (i, (wide, narrow)) in wide.iter().zip(&narrow).enumerate() {
            let want = get::<f32>(wide);
            assert!(want.iter().all(|x| x.is_finite()), "{what}, output {i}: the twin has values");
            match narrow.dtype() {
                DType::Bf16 => {
                    let want: Vec<bf16> = want.into_iter().map(bf16::from_f32).collect();
                    assert_eq!(get::<bf16>(narrow), want, "{what}, output {i}, {gaps:?}");
                }
                _ => assert_eq!(get::<f32>(narrow), want, "{what}, output {i}, {gaps:?}"),
            }
        }
    }
}

const SIZES: [(usize, usize); 5] = [(3, 17), (1, 1), (70, 3), (5, 65), (2, 32)];

#[test]
fn products_and_their_epilogues_are_rounded_once() {
    let keep = vector("keep", &[0.75]);
    let factors = |d: &Desk, trans: Trans, [m, n, k]: [usize; 3]| {
        let (a, b) = (if trans.a() { [k, m] } else { [m, k] }, if trans.b() { [n, k] } else { [k, n] });
        (d.values(1, a[0], a[1]), d.values(2, b[0], b[1]))
    };
    for trans in [Trans::Nn, Trans::Nt, Trans::Tn, Trans::Tt] {
        for &size in few(&[[3, 17, 5], [1, 1, 1], [17, 3, 65], [65, 33, 130]]) {
            let [m, n, _] = size;
            for into in [Accumulate::Overwrite, Accumulate::Add, Accumulate::Keep(&keep)] {
                let finish = Finish::Into(into);
                assert_rounded_once("into bf16", |d| {
                    let ((a, b), c) = (factors(d, trans, size), d.updated(3, m, n));
                    Gemm { a: &a, b: &b, c: &c, trans, finish }.op("t").unwrap()
                });
                assert_rounded_once("into f32", |d| {
                    let ((a, b), c) = (factors(d, trans, size), d.f32_output(m, n));
                    put(&c, &random(3, m * n));
                    Gemm { a: &a, b: &b, c: &c, trans, finish }.op("t").unwrap()
                });
            }
            assert_rounded_once("bias", |d| {
                let ((a, b), c) = (factors(d, trans, size), d.output(m, n));
                Gemm { a: &a, b: &b, c: &c, trans, finish: Finish::Bias(&d.row(4, n)) }.op("t").unwrap()
            });
            assert_rounded_once("bias and gelu", |d| {
                let ((a, b), c) = (factors(d, trans, size), d.output(m, n));
                let finish = Finish::BiasGelu { bias: &d.row(4, n), pre: &d.output(m, n) };
                Gemm { a: &a, b: &b, c: &c, trans, finish }.op("t").unwrap()
            });
            for with in [false, true] {
                assert_rounded_once("residual", |d| {
                    let ((a, b), c) = (factors(d, trans, size), d.output(m, n));
                    let bias = d.row(4, n);
                    let finish = Finish::Residual { bias: with.then_some(&bias), r: &d.values(5, m, n) };
                    Gemm { a: &a, b: &b, c: &c, trans, finish }.op("t").unwrap()
                });
            }
            assert_rounded_once("gelu backward", |d| {
                let ((a, b), c) = (factors(d, trans, size), d.output(m, n));
                let finish = Finish::GeluBackward { pre: &d.values(5, m, n) };
                Gemm { a: &a, b: &b, c: &c, trans, finish }.op("t").unwrap()
            });
        }
    }
}

#[test]
fn norms_are_rounded_once_and_their_statistics_are_those_of_f32() {
    for &(rows, cols) in few(&SIZES) {
        let stats = |seed| vector("stats", &random(seed, rows).iter().map(|x| x + 1.5).collect::<Vec<_>>());
        for with in [false, true] {
            assert_rounded_once("layer norm", |d| {
                let (x, r, sum) =
                    (d.values(1, rows, cols), d.values(2, rows, cols), with.then(|| d.output(rows, cols)));
                let (weight, bias, y) = (d.row(3, cols), d.row(4, cols), d.output(rows, cols));
                let (mean, rstd) = (d.f32_row(rows), d.f32_row(rows));
                let residual = sum.as_ref().map(|sum| Residual { r: &r, sum });
                let (weight, bias) = (&weight, &bias);
                LayerNorm { x: &x, residual, weight, bias, y: &y, mean: &mean, rstd: &rstd, eps: 1e-5 }.op("t").unwrap()
            });
            assert_rounded_once("rms norm", |d| {
                let (x, r, sum) =
                    (d.values(1, rows, cols), d.values(2, rows, cols), with.then(|| d.output(rows, cols)));
                let (weight, y, rstd) = (d.row(3, cols), d.output(rows, cols), d.f32_row(rows));
                let residual = sum.as_ref().map(|sum| Residual { r: &r, sum });
                RmsNorm { x: &x, residual, weight: &weight, y: &y, rstd: &rstd, eps: 1e-5 }.op("t").unwrap()
            });
        }
        // Past the norm goes nothing, something that lies apart, or what dx holds.
        for past in 0..3 {
            let views = |d: &Desk| {
                let dx = if past == 2 { d.updated(6, rows, cols) } else { d.output(rows, cols) };
                let skip = [None, Some(d.values(5, rows, cols)), Some(dx.clone())][past].clone();
                (d.values(1, rows, cols), d.values(2, rows, cols), d.row(3, cols), dx, skip)
            };
            assert_rounded_once("layer norm backward", |d| {
                let (dy, x, weight, dx, skip) = views(d);
                let (mean, rstd, skip) = (&stats(7), &stats(8), skip.as_ref());
                LayerNormBackward { dy: &dy, x: &x, weight: &weight, mean, rstd, skip, dx: &dx, sums: None }
                    .op("t")
                    .unwrap()
            });
            assert_rounded_once("rms norm backward", |d| {
                let (dy, x, weight, dx, skip) = views(d);
                let skip = skip.as_ref();
                RmsNormBackward { dy: &dy, x: &x, weight: &weight, rstd: &stats(8), skip, dx: &dx, sums: None }
                    .op("t")
                    .unwrap()
            });
        }
        assert_rounded_once("layer norm gradient", |d| {
            let (dy, x, dweight, dbias) =
                (d.values(1, rows, cols), d.values(2, rows, cols), d.f32_row(cols), d.f32_row(cols));
            let (mean, rstd, into) = (&stats(7), &stats(8), Accumulate::Overwrite);
            LayerNormGrad { dy: &dy, x: &x, mean, rstd, dweight: &dweight, dbias: &dbias, into }.op("t").unwrap()
        });
        assert_rounded_once("rms norm gradient", |d| {
            let (dy, x, dweight) = (d.values(1, rows, cols), d.values(2, rows, cols), d.f32_row(cols));
            let into = Accumulate::Overwrite;
            RmsNormGrad { dy: &dy, x: &x, rstd: &stats(8), dweight: &dweight, into }.op("t").unwrap()
        });
        assert_rounded_once("bias gradient", |d| {
            let (dy, dbias) = (d.values(1, rows, cols), d.f32_row(cols));
            put(&dbias, &random(4, cols));
            BiasGrad { dy: &dy, dbias: &dbias, into: Accumulate::Add }.op("t").unwrap()
        });
    }
}

#[test]
fn activations_are_rounded_once_apart_and_in_place() {
    for &(rows, cols) in few(&SIZES) {
        assert_rounded_once("gelu", |d| {
            Gelu { x: &d.values(1, rows, cols), y: &d.output(rows, cols) }.op("t").unwrap()
        });
        assert_rounded_once("gelu in place", |d| {
            let x = d.updated(1, rows, cols);
            Gelu { x: &x, y: &x }.op("t").unwrap()
        });
        assert_rounded_once("gelu backward", |d| {
            let (dy, x) = (d.values(1, rows, cols), d.values(2, rows, cols));
            GeluBackward { dy: &dy, x: &x, dx: &d.output(rows, cols) }.op("t").unwrap()
        });
        assert_rounded_once("gelu backward in place", |d| {
            let dx = d.updated(1, rows, cols);
            GeluBackward { dy: &dx, x: &d.values(2, rows, cols), dx: &dx }.op("t").unwrap()
        });
        assert_rounded_once("swiglu", |d| {
            let (gate, up) = (d.values(1, rows, cols), d.values(2, rows, cols));
            SwiGlu { gate: &gate, up: &up, y: &d.output(rows, cols) }.op("t").unwrap()
        });
        assert_rounded_once("swiglu backward", |d| {
            let (gate, up, dy) = (d.values(1, rows, cols), d.values(2, rows, cols), d.values(3, rows, cols));
            let (dgate, dup) = (d.output(rows, cols), d.output(rows, cols));
            SwiGluBackward { dy: &dy, gate: &gate, up: &up, dgate: &dgate, dup: &dup }.op("t").unwrap()
        });
    }
}

#[test]
fn turning_is_rounded_once_by_angles_in_f32() {
    let (rows, cols, seq_len) = (10, 24, 5);
    let table = Gaps::None.poisoned("table", 7, 8);
    run_checked(&RotaryTable { table: &table, base: 10_000.0 }.op("t").unwrap());
    for turning in [Turning::Forward, Turning::Backward] {
        assert_rounded_once("rotary", |d| {
            let (x, y) = (d.values(1, rows, cols), d.output(rows, cols));
            Rotary { x: &x, table: &table, seq_len, turning, y: &y }.op("t").unwrap()
        });
        assert_rounded_once("rotary in place", |d| {
            let x = d.updated(1, rows, cols);
            Rotary { x: &x, table: &table, seq_len, turning, y: &x }.op("t").unwrap()
        });
    }
}

#[test]
fn rows_of_tables_are_rounded_once_and_their_gradients_are_f32() {
    let ids = holding("ids", &[6], &[3, 0, 3, 9, 6, 3]);
    for &cols in few(&[5, 33, 1]) {
        for vocab in [Vocab::whole(10), Vocab { size: 10, start: 3 }] {
            for with in [false, true] {
                assert_rounded_once("embedding", |d| {
                    let (table, positions) = (d.values(1, 10, cols), d.values(2, 4, cols));
                    let positions = with.then_some(Positions { table: &positions, seq_len: 3 });
                    Embedding { ids: &ids, table: &table, vocab, positions, y: &d.output(6, cols) }.op("t").unwrap()
                });
            }
            assert_rounded_once("embedding gradient", |d| {
                let (dy, dtable, into) = (d.values(1, 6, cols), d.f32_output(10, cols), Accumulate::Overwrite);
                EmbeddingGrad { ids: &ids, dy: &dy, vocab, dtable: &dtable, into }.op("t").unwrap()
            });
        }
        assert_rounded_once("position gradient", |d| {
            let (dy, dtable, into) = (d.values(1, 6, cols), d.f32_output(4, cols), Accumulate::Overwrite);
            PositionGrad { dy: &dy, seq_len: 3, dtable: &dtable, into }.op("t").unwrap()
        });
    }
}

#[test]
fn attention_is_rounded_once_behind_all_its_keys() {
    // Batch, tokens, heads, heads of key and value, columns of a head.
    for &[batch, t, heads, kv, d] in few(&[[2, 9, 6, 2, 4], [1, 1, 1, 1, 1], [1, 300, 2, 1, 5], [3, 17, 4, 2, 3]]) {
        let (rows, q_cols, kv_cols, scale) = (batch * t, heads * d, kv * d, 0.5);
        assert_rounded_once("attention", |desk| {
            let (q, k, v) =
                (desk.values(1, rows, q_cols), desk.values(2, rows, kv_cols), desk.values(3, rows, kv_cols));
            let (o, lse) = (desk.output(rows, q_cols), desk.f32_row(batch * heads * t));
            Attention { q: &q, k: &k, v: &v, o: &o, lse: &lse, head_dim: d, seq_len: t, scale }.op("t").unwrap()
        });
        let lse = vector("lse", &random(9, batch * heads * t).iter().map(|x| x + 4.0).collect::<Vec<_>>());
        assert_rounded_once("attention backward", |desk| {
            let (q, k, v) =
                (desk.values(1, rows, q_cols), desk.values(2, rows, kv_cols), desk.values(3, rows, kv_cols));
            let request = AttentionBackward {
                q: &q,
                k: &k,
                v: &v,
                o: &desk.values(4, rows, q_cols),
                d_o: &desk.values(5, rows, q_cols),
                lse: &lse,
                dq: &desk.output(rows, q_cols),
                dk: &desk.output(rows, kv_cols),
                dv: &desk.output(rows, kv_cols),
                head_dim: d,
                seq_len: t,
                scale,
            };
            request.op("t").unwrap()
        });
    }
}

#[test]
fn losses_of_bf16_logits_are_those_of_f32_and_their_gradient_is_rounded_once() {
    let scale = Factor::Const(1.0 / 24.0);
    for &(rows, vocab) in few(&[(3, 17), (1, 1), (6, 65), (2, 1100)]) {
        let ids: Vec<i32> = (0..rows).map(|i| if i % 4 == 1 { IGNORE } else { (i * 5 % vocab) as i32 }).collect();
        let targets = &holding("targets", &[rows], &ids);
        assert_rounded_once("cross-entropy", |d| {
            let (logits, dlogits, losses) = (d.values(1, rows, vocab), d.output(rows, vocab), d.f32_row(rows));
            CrossEntropy { logits: &logits, targets, losses: &losses, dlogits: &dlogits, scale }.op("t").unwrap()
        });
        assert_rounded_once("cross-entropy in place", |d| {
            let (logits, losses) = (d.updated(1, rows, vocab), d.f32_row(rows));
            CrossEntropy { logits: &logits, targets, losses: &losses, dlogits: &logits, scale }.op("t").unwrap()
        });
        let shard = Vocab { size: vocab + 3, start: 2 };
        assert_rounded_once("partials", |d| {
            let (logits, max) = (d.values(1, rows, vocab), d.f32_row(rows));
            let (sum, target) = (d.f32_row(rows), d.f32_row(rows));
            let request =
                VocabPartials { logits: &logits, targets, vocab: shard, max: &max, sum: &sum, target: &target };
            request.op("t").unwrap()
        });
        let stats = |seed| vector("stats", &random(seed, rows).iter().map(|x| x + 2.5).collect::<Vec<_>>());
        assert_rounded_once("finish", |d| {
            let (logits, losses) = (d.updated(1, rows, vocab), d.f32_row(rows));
            let (max, sum, target) = (&stats(2), &stats(3), &stats(4));
            let (losses, dlogits) = (&losses, &logits);
            let request =
                VocabFinish { logits: &logits, targets, vocab: shard, max, sum, target, losses, dlogits, scale };
            request.op("t").unwrap()
        });
    }
}

#[test]
fn small_terms_of_a_long_sum_are_not_lost() {
    // Each of the 256 alone is below half a step of bf16 at 1.
    let mut terms = vec![bf16::from_f32(1.0)];
    terms.extend([bf16::from_f32(1.0 / 512.0); 256]);
    let (a, b) = (holding("a", &[1, 257], &terms), holding("b", &[257, 1], &[bf16::ONE; 257]));
    let c = scratch("c", &[1, 1], DType::Bf16, Fresh::Poisoned);
    let finish = Finish::Into(Accumulate::Overwrite);
    run_checked(&Gemm { a: &a, b: &b, c: &c, trans: Trans::Nn, finish }.op("t").unwrap());
    assert_eq!(get::<bf16>(&c), [bf16::from_f32(1.5)]);
}

#[test]
fn pieces_of_a_large_bf16_product_are_its_f32_pieces() {
    if cfg!(miri) {
        return;
    }
    let op = |dtype| {
        let desk = Desk { dtype, gaps: Gaps::Some, outputs: RefCell::default() };
        let (a, b, c) = (desk.values(1, 1200, 130), desk.values(2, 130, 300), desk.output(1200, 300));
        let finish = Finish::Into(Accumulate::Overwrite);
        (Gemm { a: &a, b: &b, c: &c, trans: Trans::Nn, finish }.op("t").unwrap(), c)
    };
    let ((wide, _), (narrow, _)) = (op(DType::F32), op(DType::Bf16));
    assert!(pieces(&wide).len() > 1);
    assert_eq!(pieces(&narrow).len(), pieces(&wide).len());
    assert_pieces_partition(&narrow);
    assert_rounded_once("large", |d| {
        let (a, b, c) = (d.values(1, 1200, 130), d.values(2, 130, 300), d.output(1200, 300));
        let finish = Finish::Into(Accumulate::Overwrite);
        Gemm { a: &a, b: &b, c: &c, trans: Trans::Nn, finish }.op("t").unwrap()
    });
}

#[test]
fn values_of_two_types_in_one_request_are_told_by_name() {
    let wide = Gaps::None.poisoned("w", 3, 3);
    let half = Gaps::None.poisoned_of(DType::Bf16, "h", 3, 3);
    let (row, trans) = (wide.rows(0..1).unwrap(), Trans::Nn);
    let into = Finish::Into(Accumulate::Overwrite);
    let gemm = |a, b, c, finish| refusal(Gemm { a, b, c, trans, finish }.op("t"));
    assert_eq!(gemm(&half, &wide, &half, into), "gemm@t: b is f32, needs bf16");
    assert_eq!(gemm(&wide, &wide, &half, into), "gemm@t: c is bf16, needs f32");
    assert_eq!(gemm(&half, &half, &half, Finish::Bias(&row)), "gemm@t: bias is f32, needs bf16");
    assert_eq!(gemm(&half, &half, &wide, Finish::Bias(&row)), "gemm@t: c is f32, needs bf16");
    assert_eq!(refusal(Gelu { x: &wide, y: &half }.op("t")), "gelu@t: y is bf16, needs f32");
    let half_row = half.rows(0..1).unwrap();
    let grad = BiasGrad { dy: &half, dbias: &half_row, into: Accumulate::Overwrite };
    assert_eq!(refusal(grad.op("t")), "bias_grad@t: dbias is bf16, needs f32");
}
