//! Gathers run while an earlier layer computes, and reductions while later backward operations do: on threads, by
//! operations that wait for each other and by the times of a recorded step.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use ddp::{BucketSize, Ddp, DdpConfig, DeclaredParam, Loaded, ParamBuffers, PlanConfig, Sharding};
use device::{
    Access, DType, Machine, Op, OpError, Trace, TraceEvent,
    ops::{Factor, Scale},
};
use graphcap::{GateMode, GraphConfig, GraphSet, Scope};
use pgroups::{
    Init, Key, Layout, LayoutConfig, Needs, ParamClass, ParamSpec, Pass, PgError, Placement, ProcessGroups, Rank, Seed,
    local,
};

use super::support::{Caught, floats};

/// A bucket for each layer; told apart by size.
const SIZES: [usize; 3] = [128, 256, 384];

/// What the operations of a rank tell each other.
#[derive(Default)]
struct Seen {
    armed: AtomicBool,
    first_layer_computes: AtomicBool,
    last_bucket_is_gathered: AtomicBool,
}

impl Seen {
    fn wait(&self, what: fn(&Seen) -> &AtomicBool, limit: Duration) -> Result<(), OpError> {
        let begun = Instant::now();
        while self.armed.load(SeqCst) && !what(self).load(SeqCst) {
            if begun.elapsed() > limit {
                return Err("nothing happens beside this".into());
            }
            thread::yield_now();
        }
        Ok(())
    }
}

/// The first layer ends behind the last bucket's gather, which is behind an operation that waits for the first layer to
/// compute: the last gather runs in the time of the first layer, or both wait for ever.
fn replay(rank: &Rank, gates: GateMode, limit: Duration) -> Result<(), Caught> {
    let seen = Arc::new(Seen::default());
    let layout = Layout::new(&LayoutConfig { dp: Some(2), ..LayoutConfig::default() })?;
    let groups = ProcessGroups::build(rank, &layout, &Needs::keys([Key::DP_CP, Key::DP_CP_GTP, Key::MP]))?;
    let compute = rank.device.stream("compute")?;
    let declared: Vec<DeclaredParam> = SIZES.into_iter().map(declared).collect();
    let sharding = Sharding::On { dense: 2, expert: 2 };
    let plan = PlanConfig { bucket_size: BucketSize::PerUnit, sharding, ..PlanConfig::default() };
    let buffers = ParamBuffers::allocate(rank, &layout, &declared, plan)?;
    buffers.fill(&compute, Seed(7))?;
    let told = seen.clone();
    let config = DdpConfig {
        post_gather: Some(Arc::new(move |on, values| {
            let (told, numel) = (told.clone(), values.numel());
            let behind = move |_: &mut device::Args<'_>| {
                if numel == 384 {
                    told.last_bucket_is_gathered.store(told.armed.load(SeqCst), SeqCst);
                }
                if numel == 256 { told.wait(|seen| &seen.first_layer_computes, limit) } else { Ok(()) }
            };
            Ok(on.launch(Op::host("behind a gather", "test", vec![Access::read(values)], behind))?)
        })),
        ..DdpConfig::default()
    };
    let ddp = Ddp::attach(&buffers, &groups, config, &compute)?;
    let out = floats(&rank.device, "out", 1);
    compute.upload(&out, vec![0f32])?;
    rank.device.synchronize()?;
    let mut set = GraphSet::new(&compute, GraphConfig { gates, ..GraphConfig::new(Scope::Microbatch) })?;
    let (graph, ()) = set.capture("forward", &compute, |scope| -> Result<(), Caught> {
        for (i, param) in buffers.params().iter().enumerate() {
            let mut turn = scope.turn(Pass::Forward);
            let value = turn.read(param, &compute)?;
            let seen = seen.clone();
            let forward = move |args: &mut device::Args<'_>| {
                args.write::<f32>(1)?[0] += 1.0;
                if i > 0 {
                    return Ok(());
                }
                seen.first_layer_computes.store(seen.armed.load(SeqCst), SeqCst);
                seen.wait(|seen| &seen.last_bucket_is_gathered, limit)
            };
            compute.launch(Op::host(
                "forward",
                format!("h{i}"),
                vec![Access::read(&value), Access::update(&out)],
                forward,
            ))?;
            turn.done(param, &compute)?;
        }
        Ok(())
    })?;
    ddp.load(&compute, Loaded::Shards, |bucket| {
        let (x, factor) = (&bucket.own_values, Factor::Const(0.5));
        Ok(compute.launch(Scale { x, factor, y: x }.op("load")?)?)
    })?;
    seen.armed.store(true, SeqCst);
    graph.replay(&compute, &[])?;
    assert_eq!(compute.download::<f32>(&out)?.wait()?, [3.0]);
    Ok(rank.device.synchronize()?)
}

fn declared(numel: usize) -> DeclaredParam {
    let (placement, init) = (Placement::whole([numel]), Init::Uniform { low: -1.0, high: 1.0 });
    let spec = ParamSpec { name: format!("w{numel}"), class: ParamClass::Dense, placement, init };
    DeclaredParam::new(spec, DType::F32)
}

/// Workers for everything that waits on either rank, and more.
fn run(gates: GateMode, limit: Duration) -> Result<(), PgError> {
    let machine = Machine::cpu(6).unwrap();
    local(&machine, 2, |rank| replay(&rank, gates, limit)).map(drop)
}

#[test]
fn a_later_bucket_is_gathered_while_the_first_layer_of_a_graph_computes() {
    run(GateMode::InGraph, Duration::from_secs(30)).unwrap();
    // Where the launch waits for all buckets, neither can be beside the other.
    let apart = run(GateMode::BeforeReplay, Duration::from_millis(200)).unwrap_err();
    assert!(format!("{apart:?}").contains("nothing happens beside this"), "{apart:?}");
}

/// How long the last backward operation of a step takes: a reduction of a few hundred bytes fits many times.
const LAST_BACKWARD: Duration = Duration::from_millis(40);

/// Backward of a graph, layer by layer from the last one, then the step's reductions.
fn reduce(rank: &Rank, gates: GateMode, bucket_size: BucketSize, steps: usize) -> Result<(), Caught> {
    let layout = Layout::new(&LayoutConfig { dp: Some(2), ..LayoutConfig::default() })?;
    let groups = ProcessGroups::build(rank, &layout, &Needs::keys([Key::DP_CP, Key::DP_CP_GTP, Key::MP]))?;
    let compute = rank.device.stream("compute")?;
    let declared: Vec<DeclaredParam> = SIZES.into_iter().map(declared).collect();
    let plan = PlanConfig { bucket_size, ..PlanConfig::default() };
    let buffers = ParamBuffers::allocate(rank, &layout, &declared, plan)?;
    buffers.fill(&compute, Seed(7))?;
    let ddp = Ddp::attach(&buffers, &groups, DdpConfig::default(), &compute)?;
    rank.device.synchronize()?;
    let mut set = GraphSet::new(&compute, GraphConfig { gates, ..GraphConfig::new(Scope::Microbatch) })?;
    let (graph, ()) = set.capture("backward", &compute, |scope| -> Result<(), Caught> {
        for (i, param) in buffers.params().iter().enumerate().rev() {
            let mut turn = scope.turn(Pass::Backward);
            turn.open(param, &compute)?;
            let backward = move |args: &mut device::Args<'_>| {
                args.write::<f32>(0)?.iter_mut().for_each(|grad| *grad += 1.0);
                if i == 0 {
                    thread::sleep(LAST_BACKWARD);
                }
                Ok(())
            };
            let grad = vec![Access::update(&param.main_grad())];
            compute.launch(Op::host("backward", format!("h{i}"), grad, backward))?;
            turn.landed(param, &compute)?;
        }
        Ok(())
    })?;
    for _ in 0..steps {
        ddp.begin_microbatch(&compute)?;
        graph.replay(&compute, &[])?;
        ddp.end_microbatch(&compute)?;
        ddp.finish_grads()?;
        ddp.read_grads(&compute)?;
        ddp.done_grads(&compute)?;
        rank.device.synchronize()?;
    }
    Ok(())
}

/// Reductions that ran, at least in part, in the time of some last backward operation of their rank.
fn beside_the_last_backward(trace: &Trace) -> usize {
    let calls = trace.events.iter().filter_map(|event| match event {
        TraceEvent::Joint { rank, stream, seq, .. } => Some((*rank, *stream, *seq)),
        _ => None,
    });
    let calls: Vec<_> = calls.collect();
    let ran = |of_rank: u32, joint: bool| {
        trace
            .events
            .iter()
            .filter_map(move |event| match event {
                TraceEvent::Ran { rank, stream, seq, name, start, end, .. } if *rank == of_rank => {
                    Some((*stream, *seq, name.as_str() == "backward", *start, *end))
                }
                _ => None,
            })
            .filter(move |(_, _, backward, ..)| *backward != joint)
            .collect::<Vec<_>>()
    };
    let of = |rank: u32| {
        let long = LAST_BACKWARD.as_nanos() as u64;
        let last = ran(rank, false).into_iter().filter(|(_, _, _, start, end)| end - start >= long).collect::<Vec<_>>();
        let reductions = ran(rank, true).into_iter().filter(|(stream, seq, ..)| calls.contains(&(rank, *stream, *seq)));
        reductions.filter(|(.., start, end)| last.iter().any(|(.., from, to)| start < to && from < end)).count()
    };
    of(0) + of(1)
}

fn recorded(gates: GateMode, bucket_size: BucketSize, steps: usize) -> usize {
    let machine = Machine::cpu(6).unwrap();
    machine.trace_start();
    local(&machine, 2, |rank| reduce(&rank, gates, bucket_size, steps)).unwrap();
    beside_the_last_backward(&machine.trace_stop())
}

#[test]
fn reductions_of_later_layers_run_while_the_first_layer_is_still_in_backward() {
    for gates in [GateMode::InGraph, GateMode::BeforeReplay] {
        // A thread may get no core in the time of one step; in none of twenty it would be something else.
        let ran = (0..20).any(|_| recorded(gates, BucketSize::PerUnit, 1) > 0);
        assert!(ran, "{gates}");
        assert_eq!(recorded(gates, BucketSize::Unlimited, 3), 0, "{gates}: one bucket waits for the whole pass");
    }
}
