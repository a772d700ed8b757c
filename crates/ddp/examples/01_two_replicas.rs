//! Two replicas fit a line, each to samples that the other does not have. The optimizer is sharded: a rank steps its
//! part of every bucket, and the first read of the next step gathers the rest.
//!
//! Run: `cargo run -p ddp --example 01_two_replicas`

use std::error::Error;

use ddp::{
    Counters, Ddp, DdpConfig, DeclaredParam, Optimizer, OptimizerConfig, ParamBuffers, PlanConfig, Precision, Sharding,
};
use device::{
    DType, Machine, MemoryKind, Stream, View,
    ops::{Accumulate, Axpy, Factor, Finish, Gemm, Scale, Trans},
};
use pgroups::{
    Init, Key, Layout, LayoutConfig, Needs, Param, ParamClass, ParamSpec, Pass, Placement, ProcessGroups, Rank, Seed,
    Turn, Weights, Whole, local,
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Slope and offset.
const TRUTH: [f32; 2] = [2.0, -1.0];
const SAMPLES: usize = 8;
const STEPS: usize = 300;

fn main() -> Result<()> {
    println!("{}", Precision::default());
    let machine = Machine::cpu(2)?;
    let fitted = local(&machine, 2, |rank| train(&rank))?;
    for (rank, (line, counters)) in fitted.iter().enumerate() {
        println!("rank {rank}: slope {:.3}, offset {:.3}; {counters:?}", line[0], line[1]);
    }
    let off = fitted[0].0.iter().zip(TRUTH).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
    assert!(off < 1e-2, "off by {off}");
    assert_eq!(fitted[0], fitted[1], "replicas have the same bits");
    Ok(())
}

fn train(rank: &Rank) -> Result<(Vec<f32>, Counters)> {
    let layout = Layout::new(&LayoutConfig { dp: Some(2), ..LayoutConfig::default() })?;
    let groups = ProcessGroups::build(rank, &layout, &Needs::keys([Key::DP_CP, Key::MP]))?;
    let stream = rank.device.stream("compute")?;

    // Memory as a plan lays it out, data parallelism on top, the optimizer on top of that.
    let init = Init::Normal { std: 0.1 };
    let placement = Placement::whole([1, 2]);
    let spec = ParamSpec { name: "line".into(), class: ParamClass::Dense, placement, init };
    let plan = PlanConfig { sharding: Sharding::On { dense: 2, expert: 1 }, ..PlanConfig::default() };
    let buffers = ParamBuffers::allocate(rank, &layout, &[DeclaredParam::new(spec, DType::F32)], plan)?;
    buffers.fill(&stream, Seed(1))?;
    let ddp = Ddp::attach(&buffers, &groups, DdpConfig::default(), &stream)?;
    let mut optimizer = Optimizer::new(&ddp, &groups, OptimizerConfig::default(), |_| 0, &stream)?;

    let line = &buffers.params()[0];
    let batch = Batch::new(rank, &stream)?;
    for step in 0..STEPS {
        ddp.begin_microbatch(&stream)?;
        batch.forward_backward(line, &stream)?;
        ddp.end_microbatch(&stream)?;
        ddp.finish_grads()?;
        optimizer.step(&stream, &[0.1 * (1.0 - step as f32 / STEPS as f32)])?;
    }
    let value = Turn::eager(Pass::Forward).read(line, &stream)?;
    let fitted = stream.download::<f32>(&value)?.wait()?;
    rank.device.synchronize()?;
    Ok((fitted, ddp.counters()))
}

/// A rank's own samples, and room for what a pass makes of them.
struct Batch {
    /// `[SAMPLES, 2]`: x and 1.
    x: View,
    /// `[SAMPLES, 1]`.
    y: View,
    /// `[SAMPLES, 1]`.
    out: View,
}

impl Batch {
    fn new(rank: &Rank, stream: &Stream) -> Result<Batch> {
        let alloc = |label: &str, cols| rank.device.alloc(label, &[SAMPLES, cols], DType::F32, MemoryKind::Other);
        let (x, y, out) = (alloc("x", 2)?, alloc("y", 1)?, alloc("out", 1)?);
        // Rank 0 has the lower half of the line, rank 1 the upper.
        let at = |i: usize| (rank.global.0 as usize * SAMPLES + i) as f32 / SAMPLES as f32 - 1.0;
        stream.upload(&x, (0..SAMPLES).flat_map(|i| [at(i), 1.0]).collect())?;
        stream.upload(&y, (0..SAMPLES).map(|i| TRUTH[0] * at(i) + TRUTH[1]).collect())?;
        Ok(Batch { x, y, out })
    }

    fn forward_backward(&self, line: &Param, stream: &Stream) -> Result<()> {
        let Batch { x, y, out } = self;
        let mut weights = Whole::new(Turn::eager(Pass::Forward));
        let w = weights.take(line, stream)?;
        let product = |a, b, c, trans, into| Gemm { a, b, c, trans, finish: Finish::Into(into) };
        stream.launch(product(x, &w, out, Trans::Nt, Accumulate::Overwrite).op("forward")?)?;
        weights.give_back(line, stream)?;
        // Of the mean squared error: 2 (out - y) / samples.
        stream.launch(Axpy { alpha: Factor::Const(-1.0), x: y, y: out }.op("loss")?)?;
        stream.launch(Scale { x: out, factor: Factor::Const(2.0 / SAMPLES as f32), y: out }.op("loss")?)?;
        weights.enter(Pass::Backward);
        let grad = weights.grad(line, stream)?;
        let (into, how) = grad.target();
        stream.launch(product(out, x, into, Trans::Tn, how).op("backward")?)?;
        Ok(weights.grad_done(line, stream)?)
    }
}
