//! AdamW on a card against its twin on the host, in f64 and in the host's bits.

use device::{ops::*, *};

use super::card_bench::{LIES, Lie, OpenCard, REAL, SHAPES, f64s, noise};

#[test]
fn adamw_takes_the_steps_of_the_host() {
    let card = OpenCard::new();
    let (beta1, beta2, eps, weight_decay) = (0.9, 0.95, 1e-8, 0.1);
    for (shape, dtype) in SHAPES.into_iter().flat_map(|s| REAL.map(|dtype| (s, dtype))) {
        let n: usize = shape.iter().product();
        let grads: Vec<Vec<f32>> = (0..3).map(|i| noise(20 + i, n)).collect();
        let start = noise(30, n);
        let (lr, clip) = (3e-3f32, 0.5f32);
        let (mut p, mut m, mut v) = (f64s(&start), vec![0.0; n], vec![0.0; n]);
        for (t, grad) in grads.iter().enumerate() {
            let corrections = [beta1, beta2].map(|beta: f64| 1.0 - beta.powi(t as i32 + 1));
            for i in 0..n {
                let g = if dtype == DType::Bf16 { bf16::from_f32(grad[i]).to_f32() } else { grad[i] };
                let g = f64::from(g) * f64::from(clip);
                m[i] = beta1 * m[i] + (1.0 - beta1) * g;
                v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
                p[i] -= f64::from(lr) * weight_decay * p[i];
                p[i] -= f64::from(lr) / corrections[0] * m[i] / ((v[i] / corrections[1]).sqrt() + eps);
            }
        }
        card.close(&[p, m, v], |b| {
            let zeros = vec![0.0; n];
            let make = |values: &[f32]| b.holding(shape, DType::F32, Lie::Whole, values);
            let (param, m, v) = (make(&start), make(&zeros), make(&zeros));
            let (scalars, step) = (b.vector(&[lr, 0.0, 0.0, clip]), b.ids(&[0]));
            // The second time everything is skipped.
            for (t, skip) in [(0, 0), (1, 1), (1, 0), (2, 0)] {
                let (skip, grad) = (b.ids(&[skip]), b.holding(shape, dtype, Lie::Whole, &grads[t]));
                let skip = Some(&skip);
                b.run(AdvanceAdam { step: &step, scalars: &scalars, skip, beta1, beta2 }.op("test"));
                let adamw = AdamW {
                    param: &param.view,
                    rest: None,
                    grad: &grad.view,
                    m: &m.view,
                    v: &v.view,
                    scalars: &scalars,
                    skip,
                    beta1,
                    beta2,
                    eps,
                    weight_decay,
                };
                b.run(adamw.op("test"));
            }
            assert_eq!(b.get::<i32>(&step), [3]);
            vec![param, m, v]
        });
    }
}

/// More runs than a launch takes, of one element and of many, and one that is empty; f32 values, and bf16 ones with the
/// rests of their masters, at addresses that runs of four can be moved at and at others.
#[test]
fn adamw_of_many_runs_takes_the_steps_of_the_host() {
    let card = OpenCard::new();
    let (beta1, beta2, eps, decays) = (0.9, 0.95, 1e-8, [0.1, 0.0, 0.3]);
    let cases = [(1000, DType::F32), (40_007, DType::F32), (40_007, DType::Bf16)];
    for ((n, dtype), stored, lie) in cases.into_iter().flat_map(|case| {
        let lies = LIES.map(|lie| (case, DType::Bf16, lie));
        [(case, DType::F32, Lie::Whole)].into_iter().chain(lies)
    }) {
        let mut runs: Vec<AdamRun> = (0..150).map(|i| AdamRun { end: i * i * n / 22_500, group: i % 3 }).collect();
        runs.push(AdamRun { end: n, group: 1 });
        card.equal_bits(|b| {
            let (param, rest) = (b.holding(&[n], stored, lie, &noise(1, n)), b.tensor(&[n], DType::I16, lie));
            let rests = (0..n).map(|i| (i * 7919) as i16).collect();
            b.stream.upload::<i16>(&rest.view, rests).unwrap();
            let m = b.vector(&noise(2, n));
            let v = b.vector(&noise(3, n).iter().map(|x| x * x).collect::<Vec<_>>());
            let grad = b.holding(&[n], dtype, Lie::Whole, &noise(4, n));
            let scalars = b.vector(&[3e-3, 0.19, 0.0975, 0.5, 1e-3, 0.19, 0.0975, 1.0, 0.0, 0.19, 0.0975, 0.25]);
            let request = AdamWRuns {
                param: &param.view,
                rest: (stored == DType::Bf16).then_some(&rest.view),
                grad: &grad.view,
                m: &m,
                v: &v,
                scalars: &scalars,
                skip: None,
                beta1,
                beta2,
                eps,
                decays: &decays,
                runs: &runs,
            };
            b.run(request.op("test"));
            let bits = |view| b.get::<f32>(view).into_iter().map(f32::to_bits).collect();
            vec![b.bits(&param), b.bits(&rest), bits(&m), bits(&v)]
        });
    }
}

/// Of all kinds: halves of f32 masters step as the masters do on the same card.
#[test]
fn bf16_values_with_their_rests_take_the_steps_of_f32_masters() {
    let card = OpenCard::new();
    let n = 40_007;
    let mut start = noise(5, n);
    let odd =
        [0x7F80_0000u32, 0xFF80_0000, 0x7F7F_FFFF, 0x7F7F_8000, 0x3F80_8000, 0x3F81_8000, 0x8000_0000, 0x0000_8000];
    let nans = [0x7FC0_0000u32, 0x7FFF_FFFF, 0xFFFF_8001, 0x7F80_0001];
    for (i, bits) in odd.into_iter().chain(nans).enumerate() {
        start[1000 * i + 7] = f32::from_bits(bits);
    }
    let grads: Vec<Vec<f32>> = (0..3).map(|t| noise(20 + t, n)).collect();
    let known = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    for lie in LIES {
        card.equal_bits(|b| {
            let (values, rests): (Vec<bf16>, Vec<i16>) = start.iter().map(|x| split_master(*x)).unzip();
            let master = b.vector(&start);
            let (value, rest) = (b.tensor(&[n], DType::Bf16, lie), b.tensor(&[n], DType::I16, lie));
            b.stream.upload(&value.view, values).unwrap();
            b.stream.upload(&rest.view, rests).unwrap();
            let scalars = b.vector(&[3e-3, 0.19, 0.0975, 0.5]);
            let state = || [6, 7].map(|seed| b.vector(&noise(seed, n).iter().map(|x| x * x).collect::<Vec<_>>()));
            let [wide, narrow] = [(); 2].map(|()| state());
            for (t, skip) in [(0, 0), (1, 1), (1, 0), (2, 0)] {
                let (skip, grad) = (b.ids(&[skip]), b.vector(&grads[t]));
                let step = |param, rest, [m, v]: &[View; 2]| {
                    let (skip, beta1, beta2, eps, weight_decay) = (Some(&skip), 0.9, 0.95, 1e-8, 0.1);
                    let (grad, scalars) = (&grad, &scalars);
                    b.run(AdamW { param, rest, grad, m, v, scalars, skip, beta1, beta2, eps, weight_decay }.op("test"));
                };
                step(&master, None, &wide);
                step(&value.view, Some(&rest.view), &narrow);
                let (values, rests) = (b.get::<bf16>(&value.view), b.get::<i16>(&rest.view));
                let joined: Vec<u32> = values.iter().zip(rests).map(|(v, r)| known(join_master(*v, r))).collect();
                let masters: Vec<u32> = b.get::<f32>(&master).into_iter().map(known).collect();
                assert!(joined == masters, "{:?}", joined.iter().zip(&masters).position(|(a, b)| a != b));
            }
            vec![b.get::<bf16>(&value.view).into_iter().map(|x| known(x.to_f32())).collect()]
        });
    }
}
