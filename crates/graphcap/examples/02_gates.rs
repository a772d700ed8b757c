//! Two graphs on streams of their own hand values to each other through gates: one fetches, the other computes with
//! what was fetched, and each waits on the device for exactly what it needs of the other.
//!
//! Run: `cargo run -p graphcap --example 02_gates`

use std::error::Error;

use device::{Access, DType, Device, Machine, MemoryKind, Op, View, Why};
use graphcap::{GraphConfig, GraphSet, Scope};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const ROUNDS: usize = 4;

fn main() -> Result<()> {
    let device = Machine::sim(3).device(0)?;
    let (comm, compute) = (device.stream("comm")?, device.stream("compute")?);
    let [source, slot, total] = ["source", "slot", "total"].map(|label| scalar(&device, label));
    let (source, slot, total) = (source?, slot?, total?);
    comm.upload(&source, vec![1f32])?;
    compute.upload(&total, vec![0f32])?;

    // A gate waits for the last record that was issued before the launch: both exist before the first one.
    let (fetched, used) = (device.event("fetched"), device.event("used"));
    comm.record(&fetched)?;
    compute.record(&used)?;

    let mut set = GraphSet::new(&compute, GraphConfig::new(Scope::Layer))?;
    let (fetch, ()) = set.capture("fetch", &comm, |_| -> Result<()> {
        comm.launch(step("next", None, &source))?;
        // The slot is free when the last round has used it; the source is not waited for.
        comm.wait_external(&used, Why("example.slot_free"))?;
        comm.launch(step("fetch", Some(&source), &slot))?;
        Ok(comm.record_external(&fetched)?)
    })?;
    let (consume, ()) = set.capture("consume", &compute, |_| -> Result<()> {
        compute.wait_external(&fetched, Why("example.fetched"))?;
        compute.launch(step("consume", Some(&slot), &total))?;
        Ok(compute.record_external(&used)?)
    })?;

    for _ in 0..ROUNDS {
        // Issued one behind the other, they bind to each other's records; the streams run as they may.
        fetch.replay(&comm, &[])?;
        consume.replay(&compute, &[])?;
    }
    device.synchronize()?;
    let got = compute.download::<f32>(&total)?.wait()?[0];
    println!("{ROUNDS} rounds through two graphs: {got}");

    // The same, one thing after the other.
    let (mut source, mut slot, mut total) = (1f32, 0f32, 0f32);
    for _ in 0..ROUNDS {
        source = 2.0 * source + 1.0;
        slot = 2.0 * slot + source;
        total = 2.0 * total + slot;
    }
    assert_eq!(got, total);
    Ok(())
}

fn scalar(device: &Device, label: &str) -> Result<View> {
    Ok(device.alloc(label, &[1], DType::F32, MemoryKind::Other)?)
}

/// `y = 2 y + x`, or `2 y + 1`.
fn step(name: &'static str, x: Option<&View>, y: &View) -> Op {
    let accesses = [Access::update(y)].into_iter().chain(x.map(Access::read)).collect();
    Op::host(name, "example", accesses, |args| {
        let x = if args.len() > 1 { args.read::<f32>(1)?[0] } else { 1.0 };
        let y = &mut args.write::<f32>(0)?[0];
        *y = 2.0 * *y + x;
        Ok(())
    })
}
