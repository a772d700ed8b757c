//! Steps of bf16 values with the rests of their masters: those of f32 masters, to the bit.

use crate::{
    DType, View, bf16,
    ops::{
        AdamRun, AdamWRuns, Hyper, join_master, split_master,
        trial::{Gaps, assert_order_free, bits, few, random, run_checked},
    },
    testing::{get, holding, put},
};

/// Rates and clip factors differ between the groups; in the last one nothing moves.
const GROUPS: [[f32; Hyper::LEN]; 3] = [[3e-3, 0.1, 0.05, 1.0], [0.7, 0.1, 0.05, 0.5], [0.0, 0.1, 0.05, 1.0]];
const DECAYS: [f64; 3] = [0.1, 0.0, 0.2];

/// What a step reads and writes beside the masters.
struct Rest {
    m: View,
    v: View,
    grad: View,
    scalars: View,
    skip: View,
    runs: Vec<AdamRun>,
}

impl Rest {
    fn new(gaps: Gaps, rows: usize, cols: usize, runs: Vec<AdamRun>) -> Rest {
        let n = rows * cols;
        Rest {
            m: gaps.holding("m", rows, cols, &random(2, n)),
            v: gaps.holding("v", rows, cols, &random(3, n).iter().map(|x| x.abs()).collect::<Vec<_>>()),
            grad: gaps.poisoned("grad", rows, cols),
            scalars: holding("scalars", &[3, Hyper::LEN], &GROUPS.concat()),
            skip: holding("skip", &[1], &[0i32]),
            runs,
        }
    }

    fn step<'a>(&'a self, param: &'a View, rest: Option<&'a View>) -> AdamWRuns<'a> {
        AdamWRuns {
            param,
            rest,
            grad: &self.grad,
            m: &self.m,
            v: &self.v,
            scalars: &self.scalars,
            skip: Some(&self.skip),
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            decays: &DECAYS,
            runs: &self.runs,
        }
    }
}

/// Values of all kinds that a step may meet, between ordinary ones.
fn masters(n: usize) -> Vec<f32> {
    let mut all = random(1, n);
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -f32::MAX, 0.0, -0.0, f32::from_bits(1)];
    let ties = [0x3F80_8000, 0x3F81_8000, 0xBF80_8000, 0x7F7F_8000, 0x7F7F_7FFF, 0x0000_8000, 0x7FFF_FFFF, 0xFFFF_8001];
    for (i, x) in odd.into_iter().chain(ties.map(f32::from_bits)).enumerate() {
        // From the end, where the last group is.
        if let Some(at) = n.checked_sub(i + 1) {
            all[at] = x;
        }
    }
    all
}

/// `masters` as values and rests.
fn halves(gaps: Gaps, rows: usize, cols: usize, masters: &[f32]) -> (View, View) {
    let (values, rests): (Vec<bf16>, Vec<i16>) = masters.iter().map(|x| split_master(*x)).unzip();
    let (value, rest) =
        (gaps.poisoned_of(DType::Bf16, "value", rows, cols), gaps.poisoned_of(DType::I16, "rest", rows, cols));
    put(&value, &values);
    put(&rest, &rests);
    (value, rest)
}

/// Their bits; one NaN is like another.
fn known(x: f32) -> u32 {
    if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
}

#[test]
fn steps_of_halves_are_those_of_f32_masters() {
    for &(rows, cols) in few(&[(1, 1), (3, 17), (1, 257), (5, 32)]) {
        for gaps in Gaps::BOTH {
            for group in 0..3 {
                let n = rows * cols;
                let runs = vec![AdamRun { end: n, group }];
                let start = masters(n);
                let master = gaps.holding("master", rows, cols, &start);
                let (value, rest) = halves(gaps, rows, cols, &start);
                let [wide, narrow] = [(); 2].map(|()| Rest::new(gaps, rows, cols, runs.clone()));
                for step in 0..4 {
                    for state in [&wide, &narrow] {
                        put(&state.grad, &random(10 + step, n));
                        put(&state.skip, &[i32::from(step == 2)]);
                    }
                    run_checked(&wide.step(&master, None).op("t").unwrap());
                    run_checked(&narrow.step(&value, Some(&rest)).op("t").unwrap());
                    let masters = get::<f32>(&master);
                    let joined: Vec<u32> = get::<bf16>(&value)
                        .into_iter()
                        .zip(get::<i16>(&rest))
                        .map(|(value, rest)| known(join_master(value, rest)))
                        .collect();
                    assert_eq!(joined, masters.iter().map(|x| known(*x)).collect::<Vec<_>>(), "step {step}");
                    // A value is what readers would have made of the master.
                    let values = masters.into_iter().map(|x| split_master(x).0.to_f32());
                    assert!(get::<bf16>(&value).into_iter().map(|x| known(x.to_f32())).eq(values.map(known)));
                    assert_eq!([&wide.m, &wide.v].map(bits), [&narrow.m, &narrow.v].map(bits));
                }
            }
        }
    }
}

#[test]
fn small_steps_add_up_below_what_a_value_shows() {
    // 2e-4 a step: bf16 has steps of 2^-8 from 1 to 2, and would stay where it is.
    let state = Rest::new(Gaps::None, 1, 1, vec![AdamRun { end: 1, group: 1 }]);
    put(&state.scalars, &[[0.0; 4], [2e-4, 1.0, 1.0, 1.0], [0.0; 4]].concat());
    let (value, rest) = (holding("value", &[1], &[bf16::ONE]), holding("rest", &[1], &[0i16]));
    for _ in 0..100 {
        for (view, x) in [(&state.m, 1.0), (&state.v, 1.0), (&state.grad, 1.0)] {
            put(view, &[x]);
        }
        run_checked(&state.step(&value, Some(&rest)).op("t").unwrap());
    }
    let master = join_master(get::<bf16>(&value)[0], get::<i16>(&rest)[0]);
    assert!((master - 0.98).abs() < 1e-5, "{master}");
    assert_eq!(get::<bf16>(&value), [bf16::from_f32(master)]);
}

#[test]
fn several_runs_of_halves_are_cut_with_the_same_bits_in_any_order() {
    if cfg!(miri) {
        return;
    }
    let n = 300_001;
    let ends = [(1, 0), (2, 1), (777, 0), (777, 2), (n / 2 + 5, 1), (n, 0)];
    let runs = ends.map(|(end, group)| AdamRun { end, group }).to_vec();
    assert_order_free(|| {
        let state = Rest::new(Gaps::None, 1, n, runs.clone());
        put(&state.grad, &random(4, n));
        let (value, rest) = halves(Gaps::None, 1, n, &random(1, n));
        let op = state.step(&value, Some(&rest)).op("t").unwrap();
        (op, vec![value, rest, state.m, state.v])
    });
}

#[test]
fn a_nan_stays_one_and_the_infinite_stays_infinite() {
    let start = [f32::NAN, -f32::NAN, f32::from_bits(0x7FFF_FFFF), f32::INFINITY, f32::NEG_INFINITY, f32::MAX];
    let state = Rest::new(Gaps::None, 1, 6, vec![AdamRun { end: 6, group: 2 }]);
    put(&state.grad, &[0.0; 6]);
    let (value, rest) = halves(Gaps::None, 1, 6, &start);
    run_checked(&state.step(&value, Some(&rest)).op("t").unwrap());
    let values: Vec<f32> = get::<bf16>(&value).into_iter().map(bf16::to_f32).collect();
    assert!(values[..3].iter().all(|x| x.is_nan()), "{values:?}");
    // The greatest f32 is beyond the greatest bf16: its value is infinite, the master is not.
    assert_eq!(values[3..], [f32::INFINITY, f32::NEG_INFINITY, f32::INFINITY]);
    let joined = join_master(bf16::from_f32(values[5]), get::<i16>(&rest)[5]);
    assert_eq!(joined, f32::MAX);
}
