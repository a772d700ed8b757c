//! Each kernel of a GPT-2 step on a card against what bounds it, measured in the same run: products and attention
//! against a product of 8192³, everything else against a copy. Rates count what must move or be computed at least.
//!
//! `cargo bench -p device --bench card -- [--batch 32] [--seq 1024] [--dim 768] [--heads 12] [--vocab 50304] [names]`
//!
//! Measured are graphs of many launches, on buffers that take turns so that a cache does not hold them.

mod cases;
mod rig;

use std::{error::Error, process::ExitCode, time::Instant};

use cases::{Case, Limit};
use device::{Machine, Op, Stream, cuda};
use rig::{Rig, Sizes};

/// Sets of buffers that take turns.
const SETS: usize = 3;
/// Measurements of a case; the median counts.
const ROUNDS: usize = 7;
/// Seconds that a graph should take.
const GRAPH: f64 = 5e-3;

/// Median seconds of one of `ops`, which are the same on other buffers.
fn seconds(stream: &Stream, ops: &[Op]) -> Result<f64, device::Error> {
    let once = || -> Result<f64, device::Error> {
        let start = Instant::now();
        ops.iter().try_for_each(|op| stream.launch(op.clone()))?;
        stream.synchronize()?;
        Ok(start.elapsed().as_secs_f64() / ops.len() as f64)
    };
    once()?;
    let count = ((GRAPH / once()?).ceil() as usize).clamp(2, 400).next_multiple_of(ops.len());
    stream.begin_capture("bench")?;
    ops.iter().cycle().take(count).try_for_each(|op| stream.launch(op.clone()))?;
    let graph = stream.end_capture()?.instantiate()?;
    let mut all = Vec::new();
    for round in 0..=ROUNDS {
        let start = Instant::now();
        stream.launch_graph(&graph)?;
        stream.synchronize()?;
        // The first launch uploads the graph.
        if round > 0 {
            all.push(start.elapsed().as_secs_f64() / count as f64);
        }
    }
    all.sort_by(f64::total_cmp);
    Ok(all[all.len() / 2])
}

/// A case's time for each operation, and the bytes or floating-point operations of one.
fn measure(rig: &Rig, case: &Case, sizes: &Sizes) -> Result<(f64, f64), device::Error> {
    let ops = (0..SETS).map(|_| (case.make)(rig, sizes)).collect::<Result<Vec<Op>, _>>()?;
    let work = match case.limit {
        Limit::Product => cases::flops(&ops[0]),
        Limit::Copy => case.bytes.map_or_else(|| cases::bytes(&ops[0]), |bytes| bytes(sizes)),
    };
    Ok((seconds(&rig.stream, &ops)?, work))
}

fn run() -> Result<(), Box<dyn Error>> {
    let (sizes, names) = Sizes::from_words(std::env::args().skip(1))?;
    let machine = Machine::cuda()?;
    let rig = Rig::new(machine.device(0)?)?;
    let rate = |case: &Case| measure(&rig, case, &sizes).map(|(time, work)| work / time);
    let (copy, product) = (rate(&cases::COPY)?, rate(&cases::PRODUCT)?);
    println!("{sizes}");
    println!("copy {:.2} TB/s, product {:.0} TFLOP/s; share: of these rates", copy / 1e12, product / 1e12);
    println!("{:34} {:>10} {:>15} {:>6}", "kernel", "µs", "rate", "share");
    for case in cases::CASES {
        if !names.is_empty() && !names.iter().any(|name| case.name.contains(name.as_str())) {
            continue;
        }
        let (time, work) = measure(&rig, case, &sizes)?;
        let (limit, unit) = if case.limit == Limit::Product { (product, "TFLOP/s") } else { (copy, "TB/s") };
        let rate = work / time;
        println!("{:34} {:10.1} {:7.2} {unit:7} {:6.2}", case.name, time * 1e6, rate / 1e12, rate / limit);
    }
    Ok(())
}

fn main() -> ExitCode {
    let result = cuda::prepare().map_err(Into::into).and_then(|_| run());
    let Err(error) = result else { return ExitCode::SUCCESS };
    eprintln!("error: {error}");
    let mut source = error.source();
    while let Some(cause) = source {
        eprintln!("  because {cause}");
        source = cause.source();
    }
    ExitCode::FAILURE
}
