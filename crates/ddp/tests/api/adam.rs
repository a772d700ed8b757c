//! The optimizer against a plain f64 AdamW.

use ddp::{Adam, AdamConfig, DdpError, DecayRange};
use device::{DType, Fresh, Machine, MemoryKind, Options, Stream, View};

fn machines() -> Vec<Machine> {
    let options = Options { fresh: Fresh::Poisoned, ..Options::default() };
    vec![Machine::cpu_with(2, options.clone()).unwrap(), Machine::sim_with(3, options)]
}

struct Buffers {
    stream: Stream,
    values: View,
    grads: View,
}

fn buffers(machine: &Machine, values: &[f32]) -> Buffers {
    let device = machine.device(0).unwrap();
    let stream = device.stream("compute").unwrap();
    let alloc = |label, kind| device.alloc(label, &[values.len()], DType::F32, kind).unwrap();
    let (v, g) = (alloc("values", MemoryKind::Param), alloc("grads", MemoryKind::Grad));
    stream.upload(&v, values.to_vec()).unwrap();
    Buffers { stream, values: v, grads: g }
}

fn get(stream: &Stream, view: &View) -> Vec<f32> {
    stream.download(view).unwrap().wait().unwrap()
}

/// Decoupled weight decay Adam in f64.
/// Source: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2.
pub(crate) fn reference(w: &mut [f64], steps: &[(f64, Vec<f64>)], decay: impl Fn(usize) -> f64, config: AdamConfig) {
    let (mut m, mut v) = (vec![0.0; w.len()], vec![0.0; w.len()]);
    for (t, (lr, grads)) in steps.iter().enumerate() {
        let norm = grads.iter().map(|g| g * g).sum::<f64>().sqrt();
        let factor = if config.clip > 0.0 { (config.clip / (norm + 1e-6)).min(1.0) } else { 1.0 };
        for i in 0..w.len() {
            let g = grads[i] * factor;
            m[i] = config.beta1 * m[i] + (1.0 - config.beta1) * g;
            v[i] = config.beta2 * v[i] + (1.0 - config.beta2) * g * g;
            let t = t as i32 + 1;
            let (c1, c2) = (1.0 - config.beta1.powi(t), 1.0 - config.beta2.powi(t));
            w[i] -= lr * decay(i) * w[i];
            w[i] -= lr * (m[i] / c1) / ((v[i] / c2).sqrt() + config.eps);
        }
    }
}

#[test]
fn steps_agree_with_a_plain_reference_in_f64() {
    let n = 1000;
    let start: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
    let decays = [DecayRange { range: 0..401, weight_decay: 0.1 }, DecayRange { range: 401..n, weight_decay: 0.0 }];
    let steps: Vec<(f64, Vec<f64>)> = (1..=5)
        .map(|t| {
            (0.01 * f64::from(t), (0..n).map(|i| ((i as f64 * 1.3 + f64::from(t)).cos() * 0.1) as f32 as f64).collect())
        })
        .collect();
    for clip in [0.0, 1.0] {
        let config = AdamConfig { clip, ..AdamConfig::default() };
        let mut want: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
        let lr_as_f32: Vec<_> = steps.iter().map(|(lr, g)| (f64::from(*lr as f32), g.clone())).collect();
        reference(&mut want, &lr_as_f32, |i| if i < 401 { 0.1 } else { 0.0 }, config);
        for machine in machines() {
            let b = buffers(&machine, &start);
            let adam = Adam::new(&b.stream, &b.values, &b.grads, &decays, config).unwrap();
            for (lr, grads) in &steps {
                b.stream.upload(&b.grads, grads.iter().map(|g| *g as f32).collect()).unwrap();
                adam.step(&b.stream, *lr as f32).unwrap();
            }
            let got = get(&b.stream, &b.values);
            let worst = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-6, "clip {clip}: {worst}");
        }
    }
}

#[test]
fn creating_the_optimizer_is_not_a_step() {
    // Before training w = 1 and no step is counted; one step with gradient 1, lr 0.1 and decay 0.1 gives 0.89.
    for machine in machines() {
        let b = buffers(&machine, &[1.0]);
        let config = AdamConfig { clip: 0.0, ..AdamConfig::default() };
        let decay = [DecayRange { range: 0..1, weight_decay: 0.1 }];
        let adam = Adam::new(&b.stream, &b.values, &b.grads, &decay, config).unwrap();
        assert_eq!(get(&b.stream, &b.values), [1.0]);
        assert_eq!(b.stream.download::<i32>(adam.steps()).unwrap().wait().unwrap(), [0]);
        b.stream.upload(&b.grads, vec![1f32]).unwrap();
        adam.step(&b.stream, 0.1).unwrap();
        assert!((get(&b.stream, &b.values)[0] - 0.89).abs() < 1e-6);
        assert_eq!(b.stream.download::<i32>(adam.steps()).unwrap().wait().unwrap(), [1]);
    }
}

#[test]
fn a_step_with_a_gradient_that_is_not_finite_changes_nothing() {
    for machine in machines() {
        let b = buffers(&machine, &[1.0, 2.0, 3.0]);
        let decay = [DecayRange { range: 0..3, weight_decay: 0.5 }];
        let adam = Adam::new(&b.stream, &b.values, &b.grads, &decay, AdamConfig::default()).unwrap();
        b.stream.upload(&b.grads, vec![0.5f32, -0.25, 0.125]).unwrap();
        adam.step(&b.stream, 0.1).unwrap();
        let before: Vec<Vec<f32>> = [&b.values, adam.moments()[0], adam.moments()[1]].map(|v| get(&b.stream, v)).into();
        for bad in [f32::NAN, f32::INFINITY] {
            b.stream.upload(&b.grads, vec![1.0, bad, 1.0]).unwrap();
            adam.step(&b.stream, 0.1).unwrap();
            let after: Vec<Vec<f32>> =
                [&b.values, adam.moments()[0], adam.moments()[1]].map(|v| get(&b.stream, v)).into();
            assert_eq!(after, before);
            assert_eq!(b.stream.download::<i32>(adam.skipped()).unwrap().wait().unwrap(), [1]);
            assert_eq!(b.stream.download::<i32>(adam.steps()).unwrap().wait().unwrap(), [1]);
        }
    }
}

#[test]
fn settings_and_ranges_that_do_not_fit_are_refused() {
    let machine = Machine::dry();
    let b = buffers(&machine, &[0.0; 10]);
    let new = |decays: &[DecayRange], config| Adam::new(&b.stream, &b.values, &b.grads, decays, config).err();
    let decay = |range, weight_decay| DecayRange { range, weight_decay };
    let gap = new(&[decay(0..4, 0.0), decay(5..10, 0.0)], AdamConfig::default()).unwrap();
    assert!(matches!(gap, DdpError::DecayRange { expected: 4, numel: 10, .. }), "{gap}");
    let short = new(&[decay(0..4, 0.0)], AdamConfig::default()).unwrap();
    assert!(matches!(short, DdpError::DecayRange { .. }), "{short}");
    let beta = new(&[decay(0..10, 0.0)], AdamConfig { beta1: 1.0, ..AdamConfig::default() }).unwrap();
    assert_eq!(beta.to_string(), "optimizer setting beta1 is 1; it must be at least 0 and under 1");
}
