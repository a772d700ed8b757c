//! AdamW on given gradients, against what PyTorch computed; `scripts/adamw.py` says how.

use std::ops::Range;

use ddp::{
    AdamConfig, BucketSize, Ddp, DdpConfig, DeclaredParam, Loaded, Optimizer, OptimizerConfig, ParamBuffers,
    ParamGroup, PlanConfig, Sharding,
};
use device::{Access, DType, Machine, Op, Stream, View};
use pgroups::{
    Init, Key, Layout, LayoutConfig, Needs, Param, ParamClass, ParamSpec, Pass, Placement, ProcessGroups, Rank, Seed,
    Turn, Weights, Whole, local,
};
use serde_json::Value;

type Caught = Box<dyn std::error::Error + Send + Sync>;

/// Sizes of the parameters, 24 elements together; the first two decay.
const SIZES: [usize; 3] = [4, 11, 9];
const NUMEL: usize = 24;
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

/// The elements of a parameter among all.
fn elements(param: usize) -> Range<usize> {
    let start = SIZES[..param].iter().sum();
    start..start + SIZES[param]
}

fn declared() -> Vec<DeclaredParam> {
    let spec = |i: usize| ParamSpec {
        name: format!("p{i}"),
        class: ParamClass::Dense,
        placement: Placement::whole([SIZES[i]]),
        init: Init::Constant(0.0),
    };
    (0..SIZES.len()).map(|i| DeclaredParam::new(spec(i), DType::F32)).collect()
}

/// Copies `values` over what is there.
fn write(stream: &Stream, view: &View, values: Vec<f32>) -> Result<(), Caught> {
    let op = Op::host("write", "test", vec![Access::write(view)], move |args| {
        args.write::<f32>(0)?.copy_from_slice(&values);
        Ok(())
    });
    Ok(stream.launch(op)?)
}

/// Contributes `values` to a gradient that holds nothing of this step.
fn contribute(stream: &Stream, param: &Param, values: Vec<f32>) -> Result<(), Caught> {
    let mut weights = Whole::new(Turn::eager(Pass::Backward));
    let out = weights.grad(param, stream)?;
    write(stream, out.target().0, values)?;
    Ok(weights.grad_done(param, stream)?)
}

/// All values behind each step, on one rank of `ranks`; the optimizer is sharded over them. Every rank contributes the
/// same gradients: a mean of equal numbers has their bits.
fn train(rank: &Rank, ranks: u32, clip: f64) -> Result<Vec<Vec<f32>>, Caught> {
    let layout = Layout::new(&LayoutConfig { dp: Some(ranks), ..LayoutConfig::default() })?;
    let groups = ProcessGroups::build(rank, &layout, &Needs::keys([Key::DP_CP, Key::MP]))?;
    let stream = rank.device.stream("compute")?;
    let plan = PlanConfig {
        bucket_size: BucketSize::Numel(12),
        sharding: if ranks > 1 { Sharding::On { dense: ranks, expert: 1 } } else { Sharding::Off },
        ..PlanConfig::default()
    };
    let buffers = ParamBuffers::allocate(rank, &layout, &declared(), plan)?;
    buffers.fill(&stream, Seed(0))?;
    let ddp = Ddp::attach(&buffers, &groups, DdpConfig::default(), &stream)?;
    load(&ddp, &stream)?;
    let group = |name: &str, weight_decay| ParamGroup { name: name.into(), weight_decay, max_lr: 0.1, min_lr: 0.0 };
    let config = OptimizerConfig {
        adam: AdamConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, clip },
        groups: vec![group("decayed", 0.1), group("plain", 0.0)],
        ..OptimizerConfig::default()
    };
    let mut optimizer = Optimizer::new(&ddp, &groups, config, |name| usize::from(name == "p2"), &stream)?;
    let mut seen = Vec::new();
    for step in 1..=STEPS {
        ddp.begin_microbatch(&stream)?;
        for (i, param) in buffers.params().iter().enumerate().rev() {
            contribute(&stream, param, elements(i).map(|at| gradient(step, at)).collect())?;
        }
        ddp.end_microbatch(&stream)?;
        ddp.finish_grads()?;
        let rate = LR / step as f32;
        optimizer.step(&stream, &[rate, rate])?;
        let mut values = Vec::new();
        for param in buffers.params() {
            let mut turn = Turn::eager(Pass::Forward);
            let value = turn.read(param, &stream)?;
            values.extend(stream.download::<f32>(&value)?.wait()?);
            turn.done(param, &stream)?;
        }
        seen.push(values);
    }
    rank.device.synchronize()?;
    Ok(seen)
}

/// Initial values, the same on every rank.
fn load(ddp: &Ddp, stream: &Stream) -> Result<(), Caught> {
    let plan = ddp.plan();
    let ids: Vec<_> = plan.groups().iter().flatten().copied().collect();
    let mut at = 0;
    ddp.load(stream, Loaded::Whole, |memory| {
        let bucket = plan.bucket(ids[at]);
        at += 1;
        for &param in &bucket.params {
            let place = plan.slot(param).range.clone();
            let place = place.start - bucket.range.start..place.end - bucket.range.start;
            stream.upload(&memory.values.flat(place)?, elements(param).map(|i| draw(0, i)).collect::<Vec<f32>>())?;
        }
        Ok(())
    })?;
    Ok(())
}

#[test]
fn adamw_on_given_gradients_is_that_of_pytorch() {
    let golden: Value = serde_json::from_str(include_str!("../golden/adamw.json")).unwrap();
    for (case, clip) in [("plain", 0.0), ("clipped", 0.5)] {
        for ranks in [1, 2] {
            for got in local(&Machine::cpu(2).unwrap(), ranks, |rank| train(&rank, ranks, clip)).unwrap() {
                let mut compared = 0;
                for (step, got) in (1..).zip(&got) {
                    let Some(want) = golden[case].get(step.to_string()) else { continue };
                    for (i, (got, want)) in got.iter().zip(want.as_array().unwrap()).enumerate() {
                        let (off, want) = ((f64::from(*got) - want.as_f64().unwrap()).abs(), want.as_f64().unwrap());
                        // Relative to the parameters, which lie in −1..1: one f32 rounding a step is 6e-8 of them.
                        assert!(off <= 1e-6, "{case}, {ranks} ranks, step {step}: {i} is {got}, not {want}");
                        compared += 1;
                    }
                }
                assert_eq!(compared, 4 * NUMEL);
            }
        }
    }
}
