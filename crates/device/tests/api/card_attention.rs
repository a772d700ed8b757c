//! Attention on a card against its twin on the host and sums in f64: by cuDNN and by kernels of this crate.

use device::{
    cuda::{Attentions, CudaOptions},
    ops::*,
    *,
};

use super::{
    capture_graphs::executable,
    card_bench::{Bench, LIES, Lie, Tensor, Want, close_with, noise, values},
    drivers::{card_turn, cuda_with},
    work::held,
};

#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    seq_len: usize,
    head_dim: usize,
    rows: Rows,
    dtype: DType,
}

/// Sequences, heads, heads of keys, tokens of a sequence, width of a head.
type Sizes = (usize, usize, usize, usize, usize);

/// Where rows of q, k and v are, and those of their gradients.
#[derive(Clone, Copy, Debug)]
enum Rows {
    /// In tensors of their own.
    Apart(Lie),
    /// Side by side in one tensor, as a model has them.
    Together,
}

const LAYOUTS: [Rows; 3] = [Rows::Apart(LIES[0]), Rows::Apart(LIES[1]), Rows::Together];

impl Case {
    /// Sequences shorter than a tile, as long, and longer with a rest; heads of every width that has a function, and
    /// widths and numbers of heads that cuDNN takes.
    fn all(dtype: DType) -> Vec<Case> {
        [Case::narrow(dtype), Case::wide(dtype), Case::random(dtype)].concat()
    }

    /// Of heads that one function takes, up to 64 wide.
    fn narrow(dtype: DType) -> Vec<Case> {
        let sizes = [(2, 1, 1, 2, 8), (2, 3, 3, 5, 7), (1, 4, 2, 64, 64), (2, 2, 1, 97, 64), (1, 3, 3, 200, 33)];
        let long = [(1, 1, 1, 513, 64), (1, 2, 1, 384, 32)].map(|sizes| Case::new(sizes, Rows::Together, dtype));
        Case::of_each_layout(&sizes, dtype).chain(long).collect()
    }

    /// Of those that two others take.
    fn wide(dtype: DType) -> Vec<Case> {
        let sizes = [(1, 2, 2, 130, 96), (2, 4, 1, 150, 128), (1, 2, 1, 75, 200)];
        Case::of_each_layout(&sizes, dtype).collect()
    }

    fn of_each_layout(sizes: &[Sizes], dtype: DType) -> impl Iterator<Item = Case> {
        sizes.iter().flat_map(move |&sizes| LAYOUTS.map(|rows| Case::new(sizes, rows, dtype)))
    }

    /// Sizes that nobody chose.
    fn random(dtype: DType) -> Vec<Case> {
        let numbers = noise(7, 5 * 6);
        let pick = |x: f32, most: usize| 1 + ((x + 2.0) / 4.0 * most as f32) as usize % most;
        let of = |n: &[f32]| {
            let (kv_heads, group) = (pick(n[1], 2), pick(n[2], 3));
            let sizes = (pick(n[0], 3), kv_heads * group, kv_heads, 1 + pick(n[3], 220), 8 * pick(n[4], 16));
            Case::new(sizes, Rows::Together, dtype)
        };
        numbers.chunks_exact(5).map(of).collect()
    }

    fn new(sizes: Sizes, rows: Rows, dtype: DType) -> Case {
        let (batch, heads, kv_heads, seq_len, head_dim) = sizes;
        Case { batch, heads, kv_heads, seq_len, head_dim, rows, dtype }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    fn count(&self) -> usize {
        self.batch * self.seq_len
    }

    /// Columns of queries and of keys.
    fn cols(&self) -> [usize; 2] {
        [self.heads * self.head_dim, self.kv_heads * self.head_dim]
    }

    /// q, k, v and the gradient of o.
    fn inputs(&self) -> [Vec<f32>; 4] {
        let [q, k] = self.cols();
        [(1, q), (2, k), (3, k), (4, q)].map(|(seed, cols)| values(self.dtype, seed, self.count() * cols))
    }

    /// o, lse, dq, dk, dv.
    fn want(&self) -> Vec<Want> {
        let ([q, k, v, d_o], [wide, narrow]) = (self.inputs(), self.cols());
        let (rows, t, d) = (self.count(), self.seq_len, self.head_dim);
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

    /// q, k and v, or where their gradients go.
    fn three(&self, b: &Bench) -> [Tensor; 3] {
        let [wide, narrow] = self.cols();
        let widths = [wide, narrow, narrow];
        match self.rows {
            Rows::Apart(lie) => widths.map(|cols| b.output(&[self.count(), cols], self.dtype, lie)),
            Rows::Together => {
                let all = b.output(&[self.count(), wide + 2 * narrow], self.dtype, Lie::Whole).view;
                let begins = [0, wide, wide + narrow];
                [0, 1, 2].map(|at| {
                    let view = all.columns(begins[at]..begins[at] + widths[at]).unwrap();
                    Tensor { all: view.clone(), view, left: 0 }
                })
            }
        }
    }

    /// What it works on, with inputs in place.
    fn tensors(&self, b: &Bench) -> Tensors {
        let inputs = self.inputs();
        let ([q, k, v], [dq, dk, dv]) = (self.three(b), self.three(b));
        let lie = if let Rows::Apart(lie) = self.rows { lie } else { Lie::Whole };
        let [o, d_o] = [(); 2].map(|()| b.output(&[self.count(), self.cols()[0]], self.dtype, lie));
        let lse = b.tensor(&[self.batch, self.heads, self.seq_len], DType::F32, Lie::Whole);
        for (tensor, values) in [&q, &k, &v, &d_o].into_iter().zip(&inputs) {
            b.put(tensor, values);
        }
        Tensors { case: *self, q, k, v, d_o, o, lse, dq, dk, dv }
    }

    fn run(&self, b: &Bench) -> Vec<Tensor> {
        let tensors = self.tensors(b);
        tensors.launch(b);
        let Tensors { o, lse, dq, dk, dv, .. } = tensors;
        vec![o, lse, dq, dk, dv]
    }
}

struct Tensors {
    case: Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    o: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
}

impl Tensors {
    /// Both passes, one behind the other.
    fn launch(&self, b: &Bench) {
        let Tensors { case, q, k, v, d_o, o, lse, dq, dk, dv } = self;
        let (head_dim, seq_len, scale) = (case.head_dim, case.seq_len, case.scale());
        let (q, k, v, o, lse) = (&q.view, &k.view, &v.view, &o.view, &lse.view);
        b.run(Attention { q, k, v, o, lse, head_dim, seq_len, scale }.op("test"));
        let (d_o, dq, dk, dv) = (&d_o.view, &dq.view, &dk.view, &dv.view);
        b.run(AttentionBackward { q, k, v, o, d_o, lse, dq, dk, dv, head_dim, seq_len, scale }.op("test"));
    }

    /// o, dq, dk, dv as they are now.
    fn results(&self, b: &Bench) -> [Vec<u32>; 4] {
        [&self.o, &self.dq, &self.dk, &self.dv].map(|tensor| b.bits(tensor))
    }
}

const BY_CUDNN: Attentions = Attentions::CuDnn;

fn options(attentions: Attentions, deterministic: bool) -> CudaOptions {
    CudaOptions { attentions, deterministic, ..CudaOptions::default() }
}

fn are_close(cases: Vec<Case>, ways: &[CudaOptions]) {
    let want: Vec<Want> = cases.iter().flat_map(Case::want).collect();
    for options in ways {
        close_with(options.clone(), &want, |b| cases.iter().flat_map(|case| case.run(b)).collect());
    }
}

#[test]
fn attention_of_narrow_heads_and_its_gradients_are_as_exact_as_on_the_host() {
    are_close(Case::narrow(DType::F32), &[CudaOptions::default()]);
}

#[test]
fn attention_of_wide_heads_and_its_gradients_are_as_exact_as_on_the_host() {
    are_close(Case::wide(DType::F32), &[CudaOptions::default()]);
}

#[test]
fn attention_of_random_sizes_and_its_gradients_are_as_exact_as_on_the_host() {
    are_close(Case::random(DType::F32), &[CudaOptions::default()]);
}

#[test]
fn attention_of_bf16_of_narrow_heads_by_our_kernels_and_its_gradients_are_those_of_f32_rounded() {
    are_close(Case::narrow(DType::Bf16), &[options(Attentions::Own, true)]);
}

#[test]
fn attention_of_bf16_of_wide_heads_by_our_kernels_and_its_gradients_are_those_of_f32_rounded() {
    are_close(Case::wide(DType::Bf16), &[options(Attentions::Own, true)]);
}

#[test]
fn attention_of_bf16_of_random_sizes_by_our_kernels_and_its_gradients_are_those_of_f32_rounded() {
    are_close(Case::random(DType::Bf16), &[options(Attentions::Own, true)]);
}

#[test]
fn attention_of_bf16_by_cudnn_and_its_gradients_are_those_of_f32_rounded() {
    are_close(Case::all(DType::Bf16), &[options(BY_CUDNN, true), options(BY_CUDNN, false)]);
}

/// As large as a layer of GPT-2, and one with fewer key heads.
fn large() -> [Case; 2] {
    [(2, 12, 12, 1024, 64), (1, 8, 2, 640, 128)].map(|sizes| Case::new(sizes, Rows::Together, DType::Bf16))
}

fn on_card<T>(options: CudaOptions, trial: impl Fn(&Bench) -> T) -> T {
    let _turn = card_turn();
    let machine = cuda_with(options).machine();
    trial(&Bench::new(&machine))
}

#[test]
fn cudnn_is_its_twins_of_this_crate_at_the_sizes_of_a_model() {
    for case in large() {
        let results = |attentions, deterministic| {
            on_card(options(attentions, deterministic), |b| {
                let tensors = case.tensors(b);
                tensors.launch(b);
                tensors.results(b)
            })
        };
        let own = results(Attentions::Own, true);
        let number = |bits: &u32| bf16::from_bits(*bits as u16).to_f32();
        for deterministic in [true, false] {
            let library = results(BY_CUDNN, deterministic);
            assert_ne!(own[0], library[0], "{case:?}: the kernels of this crate were compared with themselves");
            for (name, (own, library)) in ["o", "dq", "dk", "dv"].into_iter().zip(own.iter().zip(&library)) {
                let largest = own.iter().map(number).fold(0.0f32, |most, x| most.max(x.abs()));
                let apart = own.iter().zip(library).map(|(a, b)| (number(a) - number(b)).abs());
                let apart = apart.fold(0.0f32, |most, x| if x > most || x.is_nan() { x } else { most });
                // Two values of 8 bits, of which each may be rounded the other way.
                assert!(apart <= largest / 128.0, "{name} of {case:?}: {apart} apart, largest value {largest}");
            }
        }
    }
}

#[test]
fn attention_has_the_same_bits_whenever_it_runs() {
    for (case, attentions) in large().into_iter().flat_map(|case| [(case, Attentions::Own), (case, BY_CUDNN)]) {
        on_card(options(attentions, true), |b| {
            let tensors = case.tensors(b);
            tensors.launch(b);
            let first = tensors.results(b);
            for _ in 0..5 {
                tensors.launch(b);
                assert!(tensors.results(b) == first, "{case:?} by {attentions:?}");
            }
        });
    }
}

#[test]
fn attention_in_a_graph_has_the_bits_of_its_eager_twin() {
    for (case, attentions) in large().into_iter().flat_map(|case| [(case, Attentions::Own), (case, BY_CUDNN)]) {
        on_card(options(attentions, true), |b| {
            let (eager, captured) = (case.tensors(b), case.tensors(b));
            // Not launched before: a graph needs no eager run of its operations.
            let exec = executable(&b.stream, || captured.launch(b));
            for _ in 0..2 {
                b.stream.launch_graph(&exec).unwrap();
            }
            let replayed = captured.results(b);
            eager.launch(b);
            assert!(eager.results(b) == replayed, "{case:?} by {attentions:?}");
        });
    }
}

#[test]
fn attention_of_one_stream_waits_for_no_other_and_for_none_that_is_gone() {
    let [case, _] = large();
    on_card(options(BY_CUDNN, true), |b| {
        let tensors = case.tensors(b);
        let run = |b: &Bench, tensors: &Tensors| {
            tensors.launch(b);
            tensors.results(b)
        };
        let want = run(b, &tensors);
        for turn in 0..3 {
            let other = Bench { stream: b.device.stream("other").unwrap(), device: b.device.clone(), side: b.side };
            let behind = case.tensors(&other);
            // The first one asks for memory, which waits for whatever is held up.
            assert!(run(&other, &behind) == want, "turn {turn}, first");
            let (op, _begun, go) = held(Vec::new());
            other.stream.launch(op).unwrap();
            behind.launch(&other);
            assert!(run(b, &tensors) == want, "turn {turn}");
            go.send(()).unwrap();
            assert!(behind.results(&other) == want, "turn {turn}, what was held up");
            // Then the other stream goes, and whatever comes to its place is another one.
        }
        let exec = executable(&b.stream, || tensors.launch(b));
        b.stream.launch_graph(&exec).unwrap();
        assert!(tensors.results(b) == want, "captured");
    });
}
