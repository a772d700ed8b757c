//! A layout of one's own: weights that are cut inside a node and weights that are cut across nodes, each with a
//! look-ahead of its own. Nothing in the crates knows the axis `node`.
//!
//!     cargo run --release -p gtp --example custom_layout

use std::error::Error;

use device::{
    DType, Machine, MemoryKind, Reduce, Tick, View,
    ops::{Accumulate, Finish, Gemm, Trans},
};
use gtp::{GatherReport, Gtp, GtpConfig, GtpPlan, PassKind, ShardAxis};
use pgroups::{
    Axis, Init, Key, Layout, LayoutConfig, Needs, Param, ParamClass, ParamSet, ParamSpec, ParamTypes, Pass, Placement,
    ProcessGroups, Rank, Seed, Turn, Weights, local,
};

type Caught = Box<dyn Error + Send + Sync>;

const SAMPLES: usize = 8;

/// `[out, in]` of a chain of products. Every third one is large, and lies across the nodes.
const DIMS: [usize; 7] = [32, 32, 32, 128, 32, 32, 128];

fn is_large(i: usize) -> bool {
    DIMS[i + 1] == 128
}

/// The user's own axis.
fn node() -> Axis {
    Axis::new("node").expect("a name of lower-case letters")
}

/// Two nodes of two ranks: `gtp` varies fastest, so its peers share a node.
fn layout() -> Result<Layout, Caught> {
    let own_axes = vec![(node(), 2)];
    Ok(Layout::new(&LayoutConfig { gtp: 2, own_axes, order: "gtp-node-dp".into(), ..LayoutConfig::default() })?)
}

/// A weight is cut over one axis that gathers.
fn axis_of(i: usize) -> Axis {
    if is_large(i) { node() } else { Axis::GTP }
}

fn specs() -> Vec<ParamSpec> {
    let spec = |i: usize| ParamSpec {
        name: format!("{}{i}", if is_large(i) { "large" } else { "small" }),
        class: ParamClass::Dense,
        placement: Placement::whole([DIMS[i + 1], DIMS[i]]).cut(0, axis_of(i), 1),
        init: Init::Normal { std: 0.1 },
    };
    (0..DIMS.len() - 1).map(spec).collect()
}

/// Across nodes it takes longer: those weights are asked for two of their uses ahead, the others one.
fn settings() -> GtpConfig {
    let near = ShardAxis::new(ParamClass::Dense, Axis::GTP);
    let far = ShardAxis { look_ahead: 2, ..ShardAxis::new(ParamClass::Dense, node()) };
    GtpConfig { axes: vec![near, far], ..GtpConfig::default() }
}

/// What one rank leaves: its shard of every gradient, and the plan.
fn run(rank: &Rank) -> Result<(Vec<Vec<f32>>, GtpPlan), Caught> {
    let (layout, specs) = (layout()?, specs());
    // Groups of the user's own: the peers along `node`, and everybody who has other samples.
    let keys = [Key::GTP, Key::over([node()])];
    let groups = ProcessGroups::build(rank, &layout, &Needs::keys(keys.clone()))?;
    let params = ParamSet::allocate(rank, &layout, &specs, ParamTypes::default())?;
    let stream = rank.device.stream("compute")?;
    params.fill(&stream, Seed(1))?;
    let mut gtp = Gtp::new(rank, &layout, &groups, params.params().iter().zip(&specs), settings())?;
    let alloc = |dim: &usize| rank.device.alloc("x", &[SAMPLES, *dim], DType::F32, MemoryKind::Other);
    let x = DIMS.iter().map(alloc).collect::<Result<Vec<_>, _>>()?;
    let dx = DIMS.iter().map(alloc).collect::<Result<Vec<_>, _>>()?;
    let value = |i: usize| ((i * 7 + rank.global.0 as usize * 5) % 11) as f32 / 8.0 - 0.5;
    stream.upload(&x[0], (0..x[0].numel()).map(value).collect::<Vec<_>>())?;
    stream.upload(&dx[DIMS.len() - 1], (0..SAMPLES * DIMS[DIMS.len() - 1]).map(value).collect::<Vec<_>>())?;
    // The first pass makes the plan, the second one runs by it.
    for _ in 0..2 {
        let mut weights = gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Forward))?;
        for (i, param) in params.params().iter().enumerate() {
            let product =
                |w: &View| Gemm { a: &x[i], b: w, c: &x[i + 1], trans: Trans::Nt, finish: over() }.op("forward");
            with(&mut weights, param, &stream, |w| Ok(stream.launch(product(w)?)?))?;
        }
        weights.enter(Pass::Backward);
        for (i, param) in params.params().iter().enumerate().rev() {
            let product =
                |w: &View| Gemm { a: &dx[i + 1], b: w, c: &dx[i], trans: Trans::Nn, finish: over() }.op("backward");
            with(&mut weights, param, &stream, |w| Ok(stream.launch(product(w)?)?))?;
            let grad = weights.grad(param, &stream)?;
            let (c, into) = grad.target();
            let finish = Finish::Into(into);
            stream.launch(Gemm { a: &dx[i + 1], b: &x[i], c, trans: Trans::Tn, finish }.op("wgrad")?)?;
            weights.grad_done(param, &stream)?;
        }
        weights.finish()?;
    }
    // Gradients are means over the peers that share a weight; those along the other axis hold the same shard.
    rank.device.synchronize()?;
    for (i, param) in params.params().iter().enumerate() {
        let replicas = if is_large(i) { &keys[0] } else { &keys[1] };
        groups.get(replicas, "replicas of a shard")?.all_reduce(&stream, &param.main_grad(), Reduce::Avg)?;
    }
    let grads = params.params().iter().map(|param| Ok(stream.download::<f32>(&param.main_grad())?.wait()?));
    let grads = grads.collect::<Result<Vec<_>, Caught>>()?;
    Ok((grads, gtp.plan()?))
}

fn over() -> Finish<'static> {
    Finish::Into(Accumulate::Overwrite)
}

/// A use of a whole weight.
fn with(
    weights: &mut dyn Weights,
    param: &Param,
    stream: &device::Stream,
    body: impl FnOnce(&View) -> Result<(), Caught>,
) -> Result<(), Caught> {
    let whole = weights.take(param, stream)?;
    body(&whole)?;
    Ok(weights.give_back(param, stream)?)
}

fn main() -> Result<(), Caught> {
    let machine = Machine::cpu(2)?;
    machine.trace_start();
    let ranks = local(&machine, layout()?.world_size(), |rank| run(&rank))?;
    let trace = machine.trace_stop();
    let plan = &ranks[0].1;
    println!("{plan}\n\nwhat gathers hide behind, on rank 0");
    print!("{}", GatherReport::new(plan, &trace, 0).table(Tick::of(&machine)));
    // Peers along `gtp` (0, 1) share small weights, those along `node` (0, 2) large ones.
    for (i, spec) in specs().iter().enumerate() {
        let (peer, replica) = if is_large(i) { (2, 1) } else { (1, 2) };
        assert_eq!(ranks[0].0[i], ranks[replica].0[i], "{}: replicas of a shard agree", spec.name);
        assert_ne!(ranks[0].0[i], ranks[peer].0[i], "{}: other rows, other gradients", spec.name);
    }
    Ok(())
}
