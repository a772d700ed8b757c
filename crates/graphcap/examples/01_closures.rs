//! Captures closures of one's own, replays them with other arguments, and shows what a replay refuses.
//!
//! Run: `cargo run -p graphcap --example 01_closures`

use std::error::Error;

use device::{Access, DType, Device, Machine, MemoryKind, Op, Stream, View};
use graphcap::{GraphConfig, GraphSet, Scope};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Result<()> {
    let device = Machine::cpu(2)?.device(0)?;
    let (compute, side) = (device.stream("compute")?, device.stream("side")?);
    let [x, left, right, sum] = ["x", "left", "right", "sum"].map(|label| vector(&device, label));
    let (x, left, right, sum) = (x?, left?, right?, sum?);

    // Whatever the closure submits becomes the graph. Streams join by waiting, and end where they began.
    let mut set = GraphSet::new(&compute, GraphConfig::new(Scope::Layer))?;
    let (graph, ()) = set.capture("squares", &compute, |scope| -> Result<()> {
        scope.input("x", &x)?;
        scope.value("power", 2)?;
        order(&compute, &side)?;
        compute.launch(map("square", &x, &left, |x| x * x))?;
        side.launch(map("double", &x, &right, |x| 2.0 * x))?;
        order(&side, &compute)?;
        Ok(compute.launch(add(&left, &right, &sum))?)
    })?;
    println!("{}: {} nodes, arguments {:?}", graph.name(), graph.node_count(), graph.arguments());

    let given = vector(&device, "given")?;
    for start in [1.0, 10.0] {
        compute.upload(&given, (0..4).map(|i| start + i as f32).collect())?;
        graph.replay(&compute, &[("x", (&given).into()), ("power", "2".into())])?;
        println!("from {start}: {:?}", compute.download::<f32>(&sum)?.wait()?);
    }
    assert_eq!(compute.download::<f32>(&sum)?.wait()?, [120.0, 143.0, 168.0, 195.0]);

    let wrong = device.alloc("wrong", &[5], DType::F32, MemoryKind::Other)?;
    let refused = graph.replay(&compute, &[("x", (&wrong).into()), ("power", "3".into())]).unwrap_err();
    println!("{refused}");
    assert_eq!(graph.replays(), 2);

    // Whoever keeps something of a deleted graph is told.
    drop(graph);
    assert!(set.delete().is_empty());
    Ok(())
}

fn vector(device: &Device, label: &str) -> Result<View> {
    Ok(device.alloc(label, &[4], DType::F32, MemoryKind::Other)?)
}

fn order(from: &Stream, to: &Stream) -> Result<()> {
    let event = from.device().event("order");
    from.record(&event)?;
    Ok(to.wait(&event, device::Why("example.order"))?)
}

fn map(name: &'static str, x: &View, y: &View, f: fn(f32) -> f32) -> Op {
    Op::host(name, "example", vec![Access::read(x), Access::write(y)], move |args| {
        let x = args.read::<f32>(0)?;
        args.write::<f32>(1)?.iter_mut().zip(x).for_each(|(y, x)| *y = f(*x));
        Ok(())
    })
}

fn add(a: &View, b: &View, sum: &View) -> Op {
    Op::host("add", "example", vec![Access::read(a), Access::read(b), Access::write(sum)], |args| {
        let (a, b) = (args.read::<f32>(0)?, args.read::<f32>(1)?);
        args.write::<f32>(2)?.iter_mut().enumerate().for_each(|(i, sum)| *sum = a[i] + b[i]);
        Ok(())
    })
}
