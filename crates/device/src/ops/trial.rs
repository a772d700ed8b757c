//! Runs operations on this thread, for tests of kernels.

use crate::{
    Access, Args, DType, Error, Fresh, Kernel, Launch, Mode, Op, OpError, View, bf16,
    testing::{get, holding, put, scratch},
};

/// Runs `op` as the scheduler does, piece by piece, but last piece first: results may not depend on the order.
pub(crate) fn run_now(op: &Op) -> Result<(), OpError> {
    match &op.launch {
        Launch::Kernel(kernel) => pieces(op).iter().rev().try_for_each(|piece| run_piece(op.name, kernel, piece)),
        launch => {
            let run = launch.on_host().expect("no kernel");
            exclude_conflicts(op.name, &op.accesses);
            // SAFETY: the views are the test's own and no other thread knows them; conflicts were excluded above.
            run(&mut unsafe { Args::new(&op.accesses) })
        }
    }
}

/// Runs `op` first piece first.
pub(crate) fn run_in_order(op: &Op) {
    let Launch::Kernel(kernel) = &op.launch else { panic!("not a kernel") };
    pieces(op).iter().try_for_each(|piece| run_piece(op.name, kernel, piece)).expect("the kernel runs");
}

fn run_piece(name: &str, kernel: &Kernel, accesses: &[Access]) -> Result<(), OpError> {
    exclude_conflicts(name, accesses);
    // SAFETY: the views are the test's own and no other thread knows them; conflicts were excluded above.
    kernel.run(&mut unsafe { Args::new(accesses) })
}

fn exclude_conflicts(name: &str, accesses: &[Access]) {
    for (i, a) in accesses.iter().enumerate() {
        assert!(accesses[i + 1..].iter().all(|b| !a.conflicts(b)), "{name}: accesses conflict");
    }
}

/// The accesses of each piece.
pub(crate) fn pieces(op: &Op) -> Vec<Vec<Access>> {
    let Launch::Kernel(kernel) = &op.launch else { panic!("not a kernel") };
    match kernel.tiles(&op.accesses) {
        1 => vec![op.accesses.clone()],
        n => (0..n).map(|i| kernel.tile(&op.accesses, i)).collect(),
    }
}

/// The pieces of `op` ask for nothing but what it declares, write disjoint bytes and together all of them.
pub(crate) fn assert_pieces_partition(op: &Op) {
    let pieces = pieces(op);
    for (at, whole) in op.accesses.iter().enumerate() {
        let parts: Vec<&Access> = pieces.iter().map(|piece| &piece[at]).collect();
        for part in &parts {
            assert_eq!(part.mode, whole.mode, "{}: mode of access {at}", op.name);
            let (inner, outer) = (part.view.region(), whole.view.region());
            assert!(inner.is_empty() || inner.start >= outer.start && inner.end() <= outer.end(), "{}: {at}", op.name);
        }
        if whole.mode == Mode::Read {
            continue;
        }
        let bytes: usize = parts.iter().map(|part| part.view.bytes()).sum();
        assert_eq!(bytes, whole.view.bytes(), "{}: pieces of access {at} cover it", op.name);
        for (i, a) in parts.iter().enumerate() {
            assert!(parts[i + 1..].iter().all(|b| !a.conflicts(b)), "{}: pieces of access {at} are disjoint", op.name);
        }
    }
}

/// Checks the cut of `op`, then runs it.
pub(crate) fn run_checked(op: &Op) {
    assert_pieces_partition(op);
    run_now(op).expect("the kernel runs");
}

/// `n` values in −1..1 that depend on the seed only.
pub(crate) fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// The first two cases only under Miri, which takes a thousand times as long for each.
pub(crate) fn few<T>(cases: &[T]) -> &[T] {
    if cfg!(miri) { &cases[..2] } else { cases }
}

/// Whether a test's matrices have gaps between their rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Gaps {
    None,
    Some,
}

impl Gaps {
    pub(crate) const BOTH: [Gaps; 2] = [Gaps::None, Gaps::Some];

    /// A matrix full of NaN.
    pub(crate) fn poisoned(self, label: &str, rows: usize, cols: usize) -> View {
        self.poisoned_of(DType::F32, label, rows, cols)
    }

    /// The same of another type.
    pub(crate) fn poisoned_of(self, dtype: DType, label: &str, rows: usize, cols: usize) -> View {
        match self {
            Gaps::None => scratch(label, &[rows, cols], dtype, Fresh::Poisoned),
            Gaps::Some => {
                let wide = scratch(label, &[rows, cols + 5], dtype, Fresh::Poisoned);
                wide.columns(2..2 + cols).expect("inside")
            }
        }
    }

    /// A matrix that holds `values`.
    pub(crate) fn holding(self, label: &str, rows: usize, cols: usize, values: &[f32]) -> View {
        let view = self.poisoned(label, rows, cols);
        put(&view, values);
        view
    }
}

/// A vector that holds `values`.
pub(crate) fn vector(label: &str, values: &[f32]) -> View {
    holding(label, &[values.len()], values)
}

/// A vector full of NaN.
pub(crate) fn poisoned_vector(label: &str, len: usize) -> View {
    scratch(label, &[len], DType::F32, Fresh::Poisoned)
}

/// Every element of `view` is within `tolerance` of the wanted one, relative to the largest wanted.
#[track_caller]
pub(crate) fn assert_close(view: &View, want: &[f64], tolerance: f64) {
    let got = get::<f32>(view);
    assert_eq!(got.len(), want.len(), "{view:?}");
    let largest = want.iter().fold(1e-30_f64, |m, w| m.max(w.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let off = (f64::from(*got) - want).abs();
        assert!(off <= tolerance * largest, "{view:?}[{i}]: {got}, not {want}; off by {:.1e}", off / largest);
    }
}

/// Gradient of `f` at `x` by central differences.
pub(crate) fn differences(x: &[f64], mut f: impl FnMut(&[f64]) -> f64) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let old = x[i];
            x[i] = old + STEP;
            let above = f(&x);
            x[i] = old - STEP;
            let below = f(&x);
            x[i] = old;
            (above - below) / (2.0 * STEP)
        })
        .collect()
}

/// The same values in f64.
pub(crate) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// Σ a·b.
pub(crate) fn inner(a: &[f64], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * f64::from(*b)).sum()
}

/// `make` builds an operation on fresh memory and names its outputs; both orders of its pieces give the same bits.
pub(crate) fn assert_order_free(make: impl Fn() -> (Op, Vec<View>)) {
    let bits = |views: &[View]| -> Vec<u32> { views.iter().flat_map(bits).collect() };
    let (op, outputs) = make();
    assert!(pieces(&op).len() > 1, "{}: large enough to be cut", op.name);
    assert_pieces_partition(&op);
    run_now(&op).expect("the kernel runs");
    let (again, outputs_again) = make();
    run_in_order(&again);
    assert!(bits(&outputs) == bits(&outputs_again), "{}: bits depend on the order of pieces", op.name);
}

/// The bits of every element.
pub(crate) fn bits(view: &View) -> Vec<u32> {
    match view.dtype() {
        DType::F32 => get::<f32>(view).into_iter().map(f32::to_bits).collect(),
        DType::Bf16 => get::<bf16>(view).into_iter().map(|x| x.to_bits().into()).collect(),
        DType::I32 => get::<i32>(view).into_iter().map(|x| x as u32).collect(),
        DType::I16 => get::<i16>(view).into_iter().map(|x| x as u32).collect(),
    }
}

/// The message of a request that is refused.
#[track_caller]
pub(crate) fn refusal(request: Result<Op, Error>) -> String {
    request.err().expect("a request that does not fit is refused").to_string()
}
