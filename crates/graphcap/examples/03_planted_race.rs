//! Plants a race: a graph whose gate is taken away. One trace is enough for the verifier to find it, whatever the
//! machine did; then a simulated order shows the wrong number.
//!
//! Run: `cargo run -p graphcap --example 03_planted_race [PICTURE.svg]`

use std::error::Error;

use device::{Access, DType, Machine, MemoryKind, Op, Options, Why};
use graphcap::{
    GraphConfig, GraphSet, Scope,
    verify::{Picture, VerifyOptions, other_result, verify},
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const GATHERED: Why = Why("example.gathered");

fn main() -> Result<()> {
    let machine = Machine::sim(0);
    machine.trace_start();
    program(&machine)?;
    println!("With its gate:    {}", verify(&machine.trace_stop(), &VerifyOptions::default()));

    let machine = Machine::sim(0);
    machine.drop_waits(GATHERED);
    machine.trace_start();
    program(&machine)?;
    let trace = machine.trace_stop();
    let report = verify(&trace, &VerifyOptions::default());
    println!("\nWithout its gate:\n{report}");
    let [finding] = report.findings() else { return Err("one race was planted".into()) };
    if let Some(path) = std::env::args().nth(1) {
        std::fs::write(path, Picture::new(&trace, finding).to_svg())?;
    }

    let planted = |machine: &Machine| {
        machine.drop_waits(GATHERED);
        program(machine)
    };
    let replay = |seed: u64| format!("Machine::sim({seed})");
    let shown = other_result(0..100, &Options::default(), planted, replay)?;
    println!("\nAnd to see it: {}", shown.ok_or("no order shows the race")?);
    Ok(())
}

/// A weight is gathered on one stream and used by a graph on another.
fn program(machine: &Machine) -> Result<f32> {
    let device = machine.device(0)?;
    let (comm, compute) = (device.stream("comm")?, device.stream("compute")?);
    let alloc = |label: &str| device.alloc(label, &[1], DType::F32, MemoryKind::Other);
    let (weight, y, gathered) = (alloc("weight")?, alloc("y")?, device.event("gathered"));
    let mut set = GraphSet::new(&compute, GraphConfig::new(Scope::Layer))?;
    let (graph, ()) = set.capture("layer", &compute, |_| -> Result<()> {
        compute.wait_external(&gathered, GATHERED)?;
        let accesses = vec![Access::read(&weight), Access::write(&y)];
        Ok(compute.launch(Op::host("use", "h0.fc1", accesses, |args| {
            let weight = args.read::<f32>(0)?[0];
            args.write::<f32>(1)?[0] = 10.0 * weight;
            Ok(())
        }))?)
    })?;
    comm.launch(Op::host("gather", "h0.fc1", vec![Access::write(&weight)], |args| {
        args.write::<f32>(0)?[0] = 7.0;
        Ok(())
    }))?;
    comm.record(&gathered)?;
    graph.replay(&compute, &[])?;
    device.synchronize()?;
    Ok(compute.download::<f32>(&y)?.wait()?[0])
}
