//! What bounds a step of one rank: products and attention by the best rate of large products of several depths, the optimizer by the rate of a
//! copy that no cache holds, everything else by that of a copy of the widest activation. All are measured here, on all
//! workers, before each step, which is held against what was measured just before it.

use std::{collections::BTreeMap, thread, time::Instant};

use device::{
    DType, Machine, MemoryKind,
    ops::{Accumulate, Cast, Finish, Gemm, Trans},
};
use serde_json::Value;

use crate::{Failed, median, ours::Ours, sorted};

/// Rows and columns of the measured products: the tokens of a step.
const ROWS: usize = 2048;

/// Their depths: those of the model's products, and one that is a power of two.
const DEPTHS: [usize; 4] = [384, 512, 1152, 1536];

/// Products timed at once.
const PRODUCTS: usize = 4;

/// Elements of the copied tensor: the widest activation of the model.
const COPIED: usize = 2048 * 1536;

/// Elements of a tensor that no cache holds.
const STREAMED: usize = 1 << 26;

/// Bytes that are copied at once.
const BATCH_BYTES: usize = 8 * COPIED * 8;

/// Of one kind of kernel in a step, all launches together.
#[derive(Clone, Default)]
struct Kind {
    launches: usize,
    seconds: f64,
    flops: f64,
    bytes: f64,
}

/// Rates of this machine.
#[derive(Clone, Copy)]
struct Limits {
    flops: f64,
    bytes: f64,
    /// Of memory, not of caches.
    streamed: f64,
}

impl Limits {
    fn measure() -> Result<Limits, Failed> {
        let machine = Machine::cpu(thread::available_parallelism()?.get())?;
        let flops = product_rate(&machine)?;
        Ok(Limits { flops, bytes: copy_rate(&machine, 1, COPIED)?, streamed: copy_rate(&machine, 2, STREAMED)? })
    }

    /// Seconds that `kind` takes at best.
    fn seconds(&self, name: &str, kind: &Kind) -> f64 {
        match name {
            _ if is_product(name) => kind.flops / self.flops,
            "adamw" => kind.bytes / self.streamed,
            _ => kind.bytes / self.bytes,
        }
    }
}

/// Floating-point operations per second of products without an epilogue, at best over depths and transpositions: one
/// after the other, so that no worker waits for the host.
fn product_rate(machine: &Machine) -> Result<f64, Failed> {
    let device = machine.device(0)?;
    let stream = device.stream("product")?;
    let alloc = |label, size: [usize; 2]| device.alloc(label, &size, DType::F32, MemoryKind::Other);
    let mut rate = 0f64;
    for (depth, trans) in DEPTHS.into_iter().flat_map(|depth| [(depth, Trans::Nt), (depth, Trans::Nn)]) {
        let right = if trans == Trans::Nt { [ROWS, depth] } else { [depth, ROWS] };
        let (a, b, c) = (alloc("a", [ROWS, depth])?, alloc("b", right)?, alloc("c", [ROWS, ROWS])?);
        let finish = Finish::Into(Accumulate::Overwrite);
        let product = Gemm { a: &a, b: &b, c: &c, trans, finish }.op("product")?;
        for _ in 0..10 {
            let begin = Instant::now();
            (0..PRODUCTS).try_for_each(|_| stream.launch(product.clone()))?;
            stream.synchronize()?;
            rate = rate.max((PRODUCTS as u64 * product.flops()) as f64 / begin.elapsed().as_secs_f64());
        }
    }
    Ok(rate)
}

/// Bytes per second, read and written, of copying `numel` elements again and again, at best.
fn copy_rate(machine: &Machine, rank: u32, numel: usize) -> Result<f64, Failed> {
    let device = machine.device(rank)?;
    let stream = device.stream("copy")?;
    let alloc = |label| device.alloc(label, &[numel], DType::F32, MemoryKind::Other);
    let copy = Cast { x: &alloc("from")?, y: &alloc("to")? }.op("copy")?;
    let bytes = numel * 2 * DType::F32.size_bytes();
    let copies = (BATCH_BYTES / bytes).max(1);
    let mut best = f64::INFINITY;
    for _ in 0..10 {
        let begin = Instant::now();
        (0..copies).try_for_each(|_| stream.launch(copy.clone()))?;
        stream.synchronize()?;
        best = best.min(begin.elapsed().as_secs_f64());
    }
    Ok((copies * bytes) as f64 / best)
}

fn is_product(name: &str) -> bool {
    name.starts_with("gemm") || name.starts_with("attention")
}

/// A table of `rounds` traced steps: medians for each kind of kernel.
pub(crate) fn print(ours: &Ours, rounds: usize) -> Result<(), Failed> {
    let mut steps = Vec::new();
    for _ in 0..rounds {
        let limits = Limits::measure()?;
        steps.push((limits, read(&ours.timeline()?)?));
    }
    let of = |rate: fn(&Limits) -> f64| median(&sorted(steps.iter().map(|(limits, _)| rate(limits)).collect())) / 1e9;
    let (flops, bytes, streamed) = (of(|l| l.flops), of(|l| l.bytes), of(|l| l.streamed));
    println!("\na step of one rank, medians of {rounds}");
    println!("limits: {flops:.0} GFLOP/s; {bytes:.0} GB/s for activations, {streamed:.0} GB/s for the optimizer");
    println!("{:28}{:>9}{:>9}{:>10}{:>8}", "", "launches", "ms", "limit ms", "share");
    let mut rows: Vec<(&str, usize, Vec<[f64; 2]>)> = Vec::new();
    for (name, first) in &steps[0].1.1 {
        let pair = |(limits, (_, kinds)): &(Limits, (f64, BTreeMap<String, Kind>))| {
            let kind = kinds.get(name).cloned().unwrap_or_default();
            [kind.seconds, limits.seconds(name, &kind)]
        };
        rows.push((name, first.launches, steps.iter().map(pair).collect()));
    }
    let middle = |pairs: &[[f64; 2]], of: fn(&[f64; 2]) -> f64| median(&sorted(pairs.iter().map(of).collect()));
    rows.sort_by(|a, b| f64::total_cmp(&middle(&b.2, |p| p[0]), &middle(&a.2, |p| p[0])));
    let line = |name: &str, launches: usize, pairs: &[[f64; 2]]| {
        let (took, limit) = (middle(pairs, |p| p[0]) * 1e3, middle(pairs, |p| p[1]) * 1e3);
        println!("{name:28}{launches:9}{took:9.2}{limit:10.2}{:8.2}", middle(pairs, |p| p[1] / p[0]));
    };
    rows.iter().for_each(|(name, launches, pairs)| line(name, *launches, pairs));
    let limit = |at: usize| rows.iter().map(|(_, _, pairs)| pairs[at][1]).sum();
    let whole: Vec<[f64; 2]> = steps.iter().enumerate().map(|(at, step)| [step.1.0, limit(at)]).collect();
    line("step", rows.iter().map(|(_, launches, _)| launches).sum(), &whole);
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
