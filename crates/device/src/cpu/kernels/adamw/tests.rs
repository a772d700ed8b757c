use crate::{
    View, bf16,
    ops::{
        AdamRun, AdamW, AdamWRuns, AdvanceAdam, Hyper,
        trial::{
            Gaps, assert_close, assert_order_free, bits, few, poisoned_vector, random, refusal, run_checked, run_now,
            vector, wide,
        },
    },
    testing::{get, holding, put},
};

const BETAS: (f64, f64) = (0.9, 0.999);
const LR: f32 = 3e-3;

struct State {
    param: View,
    m: View,
    v: View,
    scalars: View,
    step: View,
    skip: View,
}

impl State {
    fn new(gaps: Gaps, rows: usize, cols: usize) -> State {
        let zeros = vec![0.0; rows * cols];
        State {
            param: gaps.holding("param", rows, cols, &random(1, rows * cols)),
            m: gaps.holding("m", rows, cols, &zeros),
            v: gaps.holding("v", rows, cols, &zeros),
            scalars: vector("scalars", &[LR, f32::NAN, f32::NAN, 0.5]),
            step: holding("step", &[1], &[0i32]),
            skip: holding("skip", &[1], &[0i32]),
        }
    }

    fn step(&self, grad: &View, weight_decay: f64) {
        let (beta1, beta2) = BETAS;
        let (scalars, skip) = (&self.scalars, Some(&self.skip));
        run_checked(&AdvanceAdam { step: &self.step, scalars, skip, beta1, beta2 }.op("t").unwrap());
        let (param, m, v, eps) = (&self.param, &self.m, &self.v, 1e-8);
        let request = AdamW { param, rest: None, grad, m, v, scalars, skip, beta1, beta2, eps, weight_decay };
        run_checked(&request.op("t").unwrap());
    }
}

/// One parameter over several steps, all in f64.
fn reference(mut p: f64, grads: &[f64], decay: f64) -> (f64, f64, f64) {
    let ((b1, b2), lr) = (BETAS, f64::from(LR));
    let (mut m, mut v) = (0.0, 0.0);
    for (t, g) in grads.iter().enumerate() {
        let t = t as i32 + 1;
        m = b1 * m + (1.0 - b1) * g;
        v = b2 * v + (1.0 - b2) * g * g;
        let (m_hat, v_hat) = (m / (1.0 - b1.powi(t)), v / (1.0 - b2.powi(t)));
        p -= lr * decay * p;
        p -= lr * m_hat / (v_hat.sqrt() + 1e-8);
    }
    (p, m, v)
}

#[test]
fn several_steps_equal_the_f64_formula() {
    for &(rows, cols) in few(&[(1, 1), (3, 17), (1, 65), (5, 32)]) {
        for gaps in Gaps::BOTH {
            for decay in [0.0, 0.1] {
                let (state, n) = (State::new(gaps, rows, cols), rows * cols);
                let start = wide(&get(&state.param));
                let grads: Vec<Vec<f32>> = (0..4).map(|t| random(10 + t, n)).collect();
                for g in &grads {
                    state.step(&gaps.holding("grad", rows, cols, g), decay);
                }
                let all: Vec<_> = (0..n)
                    .map(|i| {
                        // The clip factor is 0.5.
                        let own: Vec<f64> = grads.iter().map(|g| 0.5 * f64::from(g[i])).collect();
                        reference(start[i], &own, decay)
                    })
                    .collect();
                assert_close(&state.param, &all.iter().map(|x| x.0).collect::<Vec<_>>(), 1e-6);
                assert_close(&state.m, &all.iter().map(|x| x.1).collect::<Vec<_>>(), 1e-6);
                assert_close(&state.v, &all.iter().map(|x| x.2).collect::<Vec<_>>(), 1e-6);
                assert_eq!(get::<i32>(&state.step), [4]);
            }
        }
    }
}

#[test]
fn a_first_step_with_decay_gives_the_known_value() {
    let state = State::new(Gaps::None, 1, 1);
    put(&state.param, &[1.0]);
    put(&state.scalars, &[0.1, 0.0, 0.0, 1.0]);
    state.step(&vector("grad", &[1.0]), 0.1);
    assert!((get::<f32>(&state.param)[0] - 0.89).abs() < 1e-6);
}

#[test]
fn a_skipped_step_changes_nothing() {
    let state = State::new(Gaps::Some, 3, 17);
    state.step(&Gaps::None.holding("grad", 3, 17, &random(2, 51)), 0.1);
    put(&state.skip, &[1]);
    let all = |s: &State| [&s.param, &s.m, &s.v, &s.scalars].map(bits);
    let before = all(&state);
    state.step(&Gaps::None.holding("grad", 3, 17, &vec![f32::NAN; 51]), 0.1);
    assert_eq!(all(&state), before);
    assert_eq!(get::<i32>(&state.step), [1]);
}

#[test]
fn bf16_gradients_step_like_their_f32_values() {
    let grads: Vec<bf16> = random(5, 65).iter().map(|x| bf16::from_f32(*x)).collect();
    let exact: Vec<f32> = grads.iter().map(|x| x.to_f32()).collect();
    let (a, b) = (State::new(Gaps::None, 1, 65), State::new(Gaps::None, 1, 65));
    a.step(&holding("grad", &[1, 65], &grads), 0.0);
    b.step(&vector("grad", &exact), 0.0);
    assert_eq!(get::<f32>(&a.param), get::<f32>(&b.param));
}

#[test]
fn corrections_count_steps_in_f64() {
    let scalars = vector("scalars", &[1.0, 2.0, 3.0, 4.0]);
    let step = holding("step", &[1], &[999i32]);
    run_now(&AdvanceAdam { step: &step, scalars: &scalars, skip: None, beta1: 0.9, beta2: 0.999 }.op("t").unwrap())
        .unwrap();
    let want = [1.0, (1.0 - 0.9f64.powi(1000)) as f32, (1.0 - 0.999f64.powi(1000)) as f32, 4.0];
    assert_eq!(get::<f32>(&scalars), want);
    assert_eq!(get::<i32>(&step), [1000]);
    assert_eq!(get::<f32>(&Hyper::entry(&scalars, Hyper::CLIP).unwrap()), [4.0]);
}

#[test]
fn a_large_buffer_is_cut_with_the_same_bits_in_any_order() {
    if cfg!(miri) {
        return;
    }
    let n = 300_001;
    assert_order_free(|| {
        let [param, m, grad] = [1, 2, 3].map(|seed| vector("x", &random(seed, n)));
        let v = vector("v", &random(4, n).iter().map(|x| x.abs()).collect::<Vec<_>>());
        let (scalars, skip) = (vector("scalars", &[LR, 0.1, 0.001, 1.0]), holding("skip", &[1], &[0i32]));
        let op = AdamW {
            param: &param,
            rest: None,
            grad: &grad,
            m: &m,
            v: &v,
            scalars: &scalars,
            skip: Some(&skip),
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
        };
        (op.op("t").unwrap(), vec![param, m, v])
    });
}

/// Ends of runs and their groups: neighbours of one element, an empty run, one that a piece ends in.
fn several_runs(n: usize) -> Vec<AdamRun> {
    let ends = [(1, 0), (2, 1), (777, 0), (777, 2), (n / 2 + 5, 1), (n, 0)];
    ends.map(|(end, group)| AdamRun { end, group }).to_vec()
}

/// Rates and clip factors differ between the groups.
const GROUPS: [[f32; 4]; 3] = [[LR, 0.1, 0.05, 1.0], [1e-3, 0.1, 0.05, 0.5], [0.0, 0.1, 0.05, 1.0]];
const DECAYS: [f64; 3] = [0.1, 0.0, 0.2];

/// Param, m and v, gradients and scalars of a step of `n` elements.
fn buffers(n: usize) -> ([View; 3], View, View) {
    let [param, m, grad] = [1, 2, 3].map(|seed| vector("x", &random(seed, n)));
    let v = vector("v", &random(4, n).iter().map(|x| x.abs()).collect::<Vec<_>>());
    ([param, m, v], grad, holding("scalars", &[3, 4], &GROUPS.concat()))
}

fn step_of_runs<'a>(
    [param, m, v]: [&'a View; 3],
    grad: &'a View,
    scalars: &'a View,
    runs: &'a [AdamRun],
) -> AdamWRuns<'a> {
    let (rest, skip, (beta1, beta2), eps, decays) = (None, None, BETAS, 1e-8, &DECAYS);
    AdamWRuns { param, rest, grad, m, v, scalars, skip, beta1, beta2, eps, decays, runs }
}

#[test]
fn several_runs_in_one_pass_give_the_bits_of_a_pass_for_each() {
    let n = if cfg!(miri) { 1000 } else { 300_001 };
    let runs = several_runs(n);
    let (eps, (beta1, beta2)) = (1e-8, BETAS);
    let ([param, m, v], grad, scalars) = buffers(n);
    let (p, g, s) = (&param, &grad, &scalars);
    let at_once = step_of_runs([p, &m, &v], g, s, &runs);
    run_checked(&at_once.op("t").unwrap());
    let ([param, m2, v2], grad, scalars) = buffers(n);
    let mut from = 0;
    for AdamRun { end, group } in runs {
        let part = |view: &View| view.flat(from..end).unwrap();
        let [param, grad, m, v] = [&param, &grad, &m2, &v2].map(part);
        let (scalars, weight_decay) = (scalars.rows(group..group + 1).unwrap(), DECAYS[group]);
        let (p, g, s) = (&param, &grad, &scalars);
        let one = AdamW {
            param: p,
            rest: None,
            grad: g,
            m: &m,
            v: &v,
            scalars: s,
            skip: None,
            beta1,
            beta2,
            eps,
            weight_decay,
        };
        run_checked(&one.op("t").unwrap());
        from = end;
    }
    for (one, other) in [(p, &param), (&m, &m2), (&v, &v2)] {
        assert!(bits(one) == bits(other));
    }
}

#[test]
fn several_runs_are_cut_with_the_same_bits_in_any_order() {
    if cfg!(miri) {
        return;
    }
    let n = 300_001;
    assert_order_free(|| {
        let ([param, m, v], grad, scalars) = buffers(n);
        let runs = several_runs(n);
        let request = step_of_runs([&param, &m, &v], &grad, &scalars, &runs);
        (request.op("t").unwrap(), vec![param, m, v])
    });
}

#[test]
fn runs_that_do_not_fit_are_told() {
    let [p, m, v] = [4; 3].map(|n| poisoned_vector("x", n));
    let (scalars, wide) = (poisoned_vector("scalars", 8), Gaps::Some.poisoned("x", 2, 2));
    let run = |end, group| AdamRun { end, group };
    let good = AdamWRuns {
        param: &p,
        rest: None,
        grad: &p,
        m: &m,
        v: &v,
        scalars: &scalars,
        skip: None,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        decays: &[0.0, 0.1],
        runs: &[run(1, 1), run(4, 0)],
    };
    assert!(good.op("t").is_ok());
    for (request, want) in [
        (AdamWRuns { runs: &[run(1, 1), run(3, 0)], ..good }, "runs is 3, the last one must end where param does"),
        (AdamWRuns { runs: &[], ..good }, "runs is 0, the last one must end where param does"),
        (AdamWRuns { runs: &[run(3, 0), run(1, 0), run(4, 0)], ..good }, "a run must not end before the one in front"),
        (AdamWRuns { runs: &[run(1, 2), run(4, 0)], ..good }, "runs is 2, there is no such group"),
        (AdamWRuns { decays: &[0.0], runs: &[run(4, 0)], ..good }, "it must have Hyper::LEN elements for each group"),
        (AdamWRuns { param: &wide, grad: &wide, m: &wide, v: &wide, ..good }, "x"),
    ] {
        let text = refusal(request.op("opt"));
        assert!(text.contains(want), "{text}");
    }
}

#[test]
fn wrong_sizes_and_settings_are_told() {
    let [p, m, v, g, scalars] = [4, 4, 4, 3, 4].map(|n| poisoned_vector("x", n));
    let (half, short) = (holding("half", &[4], &[bf16::ONE; 4]), holding("short", &[3], &[0i16; 3]));
    let good = AdamW {
        param: &p,
        rest: None,
        grad: &p,
        m: &m,
        v: &v,
        scalars: &scalars,
        skip: None,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.0,
    };
    assert!(good.op("t").is_ok());
    for (request, want) in [
        (AdamW { grad: &g, ..good }, "param is [4] and grad is [3]"),
        (AdamW { scalars: &g, ..good }, "it must have Hyper::LEN elements"),
        (AdamW { rest: Some(&m), ..good }, "param is f32, needs bf16"),
        (AdamW { param: &half, ..good }, "param is bf16, needs f32"),
        (AdamW { param: &half, rest: Some(&m), ..good }, "rest is f32, needs i16"),
        (AdamW { param: &half, rest: Some(&short), ..good }, "param is [4] and rest is [3]"),
        (AdamW { skip: Some(&g), ..good }, "skip is f32, needs i32"),
        (AdamW { beta2: 1.0, ..good }, "beta2 is 1, it must be at least 0 and under 1"),
        (AdamW { eps: 0.0, ..good }, "eps is 0, it must be over 0"),
        (AdamW { weight_decay: -0.1, ..good }, "weight_decay is -0.1, it must not be negative"),
    ] {
        let text = refusal(request.op("opt"));
        assert!(text.starts_with("adamw@opt: ") && text.contains(want), "{text}");
    }
}
