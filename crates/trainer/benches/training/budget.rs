//! What bounds a step of one rank: products and attention by the rate of a large product, everything else by the rate of
//! a copy, both measured here, on all workers.

use std::{collections::BTreeMap, thread, time::Instant};

use device::{DType, Machine, MemoryKind, ops::Cast};
use serde_json::Value;
use trainer::product_peak;

use crate::{Failed, median, ours::Ours, sorted};

/// Elements of the copied tensor: the widest activation of the model.
const COPIED: usize = 2048 * 1536;

/// Copies timed at once.
const COPIES: usize = 8;

/// Of one kind of kernel in a step, all launches together.
#[derive(Clone, Default)]
struct Kind {
    launches: usize,
    seconds: f64,
    flops: f64,
    bytes: f64,
}

/// Rates of this machine.
struct Limits {
    flops: f64,
    bytes: f64,
}

impl Limits {
    fn measure() -> Result<Limits, Failed> {
        let machine = Machine::cpu(thread::available_parallelism()?.get())?;
        let flops = product_peak(&machine, 0)?.ok_or("this driver computes nothing")?;
        let device = machine.device(1)?;
        let stream = device.stream("copy")?;
        let alloc = |label| device.alloc(label, &[COPIED], DType::F32, MemoryKind::Other);
        let copy = Cast { x: &alloc("from")?, y: &alloc("to")? }.op("copy")?;
        let mut best = f64::INFINITY;
        for _ in 0..20 {
            let begin = Instant::now();
            (0..COPIES).try_for_each(|_| stream.launch(copy.clone()))?;
            stream.synchronize()?;
            best = best.min(begin.elapsed().as_secs_f64());
        }
        Ok(Limits { flops, bytes: (COPIES * COPIED * 2 * DType::F32.size_bytes()) as f64 / best })
    }

    /// Seconds that `kind` takes at best.
    fn seconds(&self, name: &str, kind: &Kind) -> f64 {
        if is_product(name) { kind.flops / self.flops } else { kind.bytes / self.bytes }
    }
}

fn is_product(name: &str) -> bool {
    name.starts_with("gemm") || name.starts_with("attention")
}

/// A table of `rounds` traced steps: medians for each kind of kernel.
pub(crate) fn print(ours: &Ours, rounds: usize) -> Result<(), Failed> {
    let mut steps = Vec::new();
    let mut limits = Limits { flops: 0.0, bytes: 0.0 };
    for _ in 0..rounds {
        // What a machine with other work could do at its best moment.
        let now = Limits::measure()?;
        limits = Limits { flops: limits.flops.max(now.flops), bytes: limits.bytes.max(now.bytes) };
        steps.push(read(&ours.timeline()?)?);
    }
    let (gflops, gbytes) = (limits.flops / 1e9, limits.bytes / 1e9);
    println!("\na step of one rank, medians of {rounds}; limits: {gflops:.0} GFLOP/s, {gbytes:.0} GB/s");
    println!("{:28}{:>9}{:>9}{:>10}{:>8}", "", "launches", "ms", "limit ms", "share");
    let names: Vec<&String> = steps[0].1.keys().collect();
    let mut rows: Vec<(&str, usize, f64, f64)> = Vec::new();
    for name in names {
        let of = |step: &(f64, BTreeMap<String, Kind>)| step.1.get(name).cloned().unwrap_or_default();
        let seconds = median(&sorted(steps.iter().map(|step| of(step).seconds).collect()));
        let kind = of(&steps[0]);
        rows.push((name, kind.launches, seconds, limits.seconds(name, &kind)));
    }
    rows.sort_by(|a, b| f64::total_cmp(&b.2, &a.2));
    let line = |name: &str, launches: usize, seconds: f64, limit: f64| {
        println!("{name:28}{launches:9}{:9.2}{:10.2}{:8.2}", seconds * 1e3, limit * 1e3, limit / seconds);
    };
    rows.iter().for_each(|&(name, launches, seconds, limit)| line(name, launches, seconds, limit));
    let whole = median(&sorted(steps.iter().map(|step| step.0).collect()));
    line("step", rows.iter().map(|row| row.1).sum(), whole, rows.iter().map(|row| row.3).sum());
    Ok(())
}

/// Seconds from the first slice's begin to the last one's end, and what ran between, by name.
fn read(timeline: &str) -> Result<(f64, BTreeMap<String, Kind>), Failed> {
    let picture: Value = serde_json::from_str(timeline)?;
    let events = picture["traceEvents"].as_array().ok_or("a timeline has events")?;
    let (mut kinds, mut begin, mut end) = (BTreeMap::<String, Kind>::new(), f64::INFINITY, 0.0f64);
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let number = |value: &Value| value.as_f64().ok_or("a slice has numbers");
        let (start, took) = (number(&event["ts"])? / 1e6, number(&event["dur"])? / 1e6);
        (begin, end) = (begin.min(start), end.max(start + took));
        let name = event["name"].as_str().and_then(|name| name.split('@').next()).ok_or("a slice has a name")?;
        let kind = kinds.entry(name.to_owned()).or_default();
        kind.launches += 1;
        kind.seconds += took;
        kind.flops += event["args"]["flops"].as_f64().unwrap_or(0.0);
        kind.bytes += number(&event["args"]["bytes_read"])? + number(&event["args"]["bytes_written"])?;
    }
    Ok((end - begin, kinds))
}
