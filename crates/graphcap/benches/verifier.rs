//! How long it takes to check a trace of a million operations on 64 ranks, made without computing anything: aims, on two
//! cores, under 10 s and under 4 GiB. `cargo bench -p graphcap --bench verifier [ranks] [operations]`.

use std::{error::Error, time::Instant};

use device::{
    Access, DType, Device, Event, Exchange, Machine, Meeting, MemoryKind, Op, Reduce, Stream, Trace, View, Why,
};
use graphcap::verify::{VerifyOptions, verify};

const LAYERS: usize = 24;

/// Elements of a layer's weights, on all ranks together.
const NUMEL: usize = 64 * 16;

/// One rank of a data-parallel program with four streams.
struct Rank {
    device: Device,
    compute: Stream,
    gather: Stream,
    reduce: Stream,
    optimizer: Stream,
    layers: Vec<Layer>,
    activations: Vec<View>,
    groups: [Meeting; 2],
}

struct Layer {
    values: View,
    shard: View,
    grads: View,
    own_grads: View,
    moment: View,
    published: Event,
    released: Event,
    landed: Event,
    reduced: Event,
    written: Event,
}

impl Rank {
    fn open(machine: &Machine, rank: u32, members: &[u32]) -> Result<Rank, device::Error> {
        let device = machine.device(rank)?;
        let part = NUMEL / members.len();
        let own = rank as usize * part..(rank as usize + 1) * part;
        let [compute, gather, reduce, optimizer] =
            ["compute", "gather", "reduce", "optimizer"].map(|name| device.stream(name));
        let (compute, gather, reduce, optimizer) = (compute?, gather?, reduce?, optimizer?);
        // One buffer for all layers, as buckets lie in memory.
        let alloc = |label: &str, numel: usize, kind| device.alloc(label, &[numel], DType::F32, kind);
        let (values, grads) =
            (alloc("values", LAYERS * NUMEL, MemoryKind::Param)?, alloc("grads", LAYERS * NUMEL, MemoryKind::Grad)?);
        let layer = |i: usize| -> Result<Layer, device::Error> {
            let [values, grads] = [&values, &grads].map(|all| all.flat(i * NUMEL..(i + 1) * NUMEL));
            let (values, grads) = (values?, grads?);
            let event = |what: &str| device.event(&format!("{what}.{i}"));
            let layer = Layer {
                shard: values.flat(own.clone())?,
                own_grads: grads.flat(own.clone())?,
                moment: alloc("moment", part, MemoryKind::Optimizer)?,
                published: event("published"),
                released: event("released"),
                landed: event("landed"),
                reduced: event("reduced"),
                written: event("written"),
                values,
                grads,
            };
            for event in [&layer.published, &layer.released, &layer.landed, &layer.reduced, &layer.written] {
                compute.record(event)?;
            }
            Ok(layer)
        };
        let layers = (0..LAYERS).map(layer).collect::<Result<_, _>>()?;
        let activations =
            (0..=LAYERS).map(|_| alloc("activation", 256, MemoryKind::Arena)).collect::<Result<_, _>>()?;
        let groups = ["gather", "reduce"].map(|name| machine.meeting(name, members, rank));
        let [one, two] = groups;
        Ok(Rank { device, compute, gather, reduce, optimizer, layers, activations, groups: [one?, two?] })
    }

    fn op(stream: &Stream, name: &'static str, accesses: Vec<Access>) -> Result<(), device::Error> {
        stream.launch(Op::host(name, "bench", accesses, |_| Ok(())))
    }

    /// Operations, calls included.
    fn step(&self) -> Result<usize, device::Error> {
        for (i, layer) in self.layers.iter().enumerate() {
            self.gather.wait(&layer.written, Why("bench.gather_after_write"))?;
            let accesses = vec![Access::read(&layer.shard), Access::write(&layer.values)];
            self.gather.joint(&self.groups[0], Exchange::AllGather, "bench", accesses)?;
            self.gather.record(&layer.published)?;
            self.compute.wait(&layer.published, Why("bench.read_after_publish"))?;
            let [x, y] = [&self.activations[i], &self.activations[i + 1]];
            Rank::op(&self.compute, "gemm", vec![Access::read(x), Access::read(&layer.values), Access::write(y)])?;
            Rank::op(&self.compute, "gelu", vec![Access::update(y)])?;
        }
        for (i, layer) in self.layers.iter().enumerate().rev() {
            let [x, y] = [&self.activations[i], &self.activations[i + 1]];
            Rank::op(&self.compute, "wgrad", vec![Access::read(x), Access::read(y), Access::update(&layer.grads)])?;
            Rank::op(&self.compute, "dgrad", vec![Access::read(&layer.values), Access::read(y), Access::update(x)])?;
            self.compute.record(&layer.released)?;
            self.compute.record(&layer.landed)?;
            self.reduce.wait(&layer.landed, Why("bench.reduce_after_landed"))?;
            let accesses = vec![Access::read(&layer.grads), Access::write(&layer.own_grads)];
            self.reduce.joint(&self.groups[1], Exchange::ReduceScatter(Reduce::Sum), "bench", accesses)?;
            self.reduce.record(&layer.reduced)?;
        }
        for layer in &self.layers {
            self.optimizer.wait(&layer.reduced, Why("bench.step_after_reduce"))?;
            self.optimizer.wait(&layer.released, Why("bench.write_after_read"))?;
            self.optimizer.wait(&layer.published, Why("bench.write_after_publish"))?;
            let accesses =
                vec![Access::update(&layer.shard), Access::read(&layer.own_grads), Access::update(&layer.moment)];
            Rank::op(&self.optimizer, "adamw", accesses)?;
            self.optimizer.record(&layer.written)?;
            // The next step's gradients overwrite what this one's optimizer reads.
            self.compute.wait(&layer.written, Why("bench.grad_after_free"))?;
        }
        Ok(7 * LAYERS)
    }
}

fn traced(ranks: u32, operations: usize) -> Result<(Trace, usize), device::Error> {
    let machine = Machine::dry();
    let members: Vec<u32> = (0..ranks).collect();
    machine.trace_start();
    let opened = members.iter().map(|rank| Rank::open(&machine, *rank, &members)).collect::<Result<Vec<_>, _>>()?;
    let mut submitted = 0;
    while submitted < operations {
        for rank in &opened {
            submitted += rank.step()?;
        }
        for rank in &opened {
            rank.device.synchronize()?;
        }
    }
    Ok((machine.trace_stop(), submitted))
}

/// The most memory that this process has had, where the system tells.
fn peak_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    Some(line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()? / 1024)
}

fn main() -> Result<(), Box<dyn Error>> {
    let numbers: Vec<usize> = std::env::args().filter_map(|word| word.parse().ok()).collect();
    let (ranks, operations) = (numbers.first().copied().unwrap_or(64), numbers.get(1).copied().unwrap_or(1_000_000));
    let start = Instant::now();
    let (trace, submitted) = traced(ranks as u32, operations)?;
    println!("{submitted} operations on {ranks} ranks, {} events, made in {:.1?}", trace.events.len(), start.elapsed());
    let told = |peak: Option<u64>| peak.map_or("unknown".to_owned(), |mib| format!("{mib} MiB"));
    println!("peak memory with the trace: {}", told(peak_mib()));
    for _ in 0..3 {
        let start = Instant::now();
        let report = verify(&trace, &VerifyOptions::default());
        let took = start.elapsed();
        let each = took.as_nanos() as f64 / submitted as f64;
        println!("verified in {took:.2?}, {each:.0} ns an operation, peak memory {}: {report}", told(peak_mib()));
    }
    Ok(())
}
