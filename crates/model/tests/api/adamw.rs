//! AdamW on given gradients, against what PyTorch computed; `scripts/adamw.py` says how.

use ddp::{Adam, AdamConfig, DecayRange};
use device::{DType, Machine, MemoryKind};
use serde_json::Value;

const NUMEL: usize = 24;
/// The first ones decay.
const DECAYED: usize = 15;
const STEPS: u64 = 12;
const LR: f32 = 0.02;

/// In −1..1, exact in f32.
fn draw(stream: u64, index: usize) -> f32 {
    let bits = (index as u32).wrapping_mul(2_654_435_761).wrapping_add((stream as u32).wrapping_mul(40_503) + 12_345);
    let bits = (bits ^ (bits >> 15)).wrapping_mul(2_246_822_519);
    ((bits >> 9) as f32 - (1u32 << 22) as f32) / (1u32 << 22) as f32
}

/// Of very unequal sizes; some are 0, some in every step.
fn gradient(step: u64, index: usize) -> f32 {
    if index == 7 || (index as u64 + step).is_multiple_of(5) {
        return 0.0;
    }
    draw(step, index) * 2f32.powi((index * 7 % 23) as i32 - 16)
}

#[test]
fn adamw_on_given_gradients_is_that_of_pytorch() {
    let golden: Value = serde_json::from_str(include_str!("../golden/adamw.json")).unwrap();
    for (case, clip) in [("plain", 0.0), ("clipped", 0.5)] {
        let device = Machine::cpu(2).unwrap().device(0).unwrap();
        let stream = device.stream("compute").unwrap();
        let flat = |label, kind| device.alloc(label, &[NUMEL], DType::F32, kind).unwrap();
        let (values, grads) = (flat("values", MemoryKind::Param), flat("grads", MemoryKind::Grad));
        stream.upload(&values, (0..NUMEL).map(|i| draw(0, i)).collect::<Vec<f32>>()).unwrap();
        let decays = [
            DecayRange { range: 0..DECAYED, weight_decay: 0.1 },
            DecayRange { range: DECAYED..NUMEL, weight_decay: 0.0 },
        ];
        let config = AdamConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, clip };
        let adam = Adam::new(&stream, &values, &grads, &decays, config).unwrap();
        let mut compared = 0;
        for step in 1..=STEPS {
            stream.upload(&grads, (0..NUMEL).map(|i| gradient(step, i)).collect::<Vec<f32>>()).unwrap();
            adam.step(&stream, LR / step as f32).unwrap();
            let Some(want) = golden[case].get(step.to_string()) else { continue };
            let got: Vec<f32> = stream.download(&values).unwrap().wait().unwrap();
            for (i, (got, want)) in got.iter().zip(want.as_array().unwrap()).enumerate() {
                let (off, want) = ((f64::from(*got) - want.as_f64().unwrap()).abs(), want.as_f64().unwrap());
                // Relative to the parameters, which lie in −1..1: one f32 rounding a step is 6e-8 of them.
                assert!(off <= 1e-6, "{case}, step {step}: parameter {i} is {got}, not {want}");
                compared += 1;
            }
        }
        assert_eq!(compared, 4 * NUMEL);
    }
}
