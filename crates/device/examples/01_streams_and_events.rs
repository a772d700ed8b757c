//! Two streams hand a buffer to each other: with the wait in every order the same, without it shown by a search, told
//! as a race where threads meet.
//!
//! Run: `cargo run -p device --example 01_streams_and_events`

use device::{
    Access, Args, DType, Device, Error, Machine, MemoryKind, Op, OpError, Options, Stream, View, Why, explore,
};

/// Every wait has a name; tests can drop it.
const WRITTEN: Why = Why("example.written");

fn open(machine: &Machine) -> Result<(Device, Stream, Stream), Error> {
    let device = machine.device(0)?;
    let (writer, reader) = (device.stream("writer")?, device.stream("reader")?);
    Ok((device, writer, reader))
}

fn floats(device: &Device, label: &str) -> Result<View, Error> {
    device.alloc(label, &[4], DType::F32, MemoryKind::Other)
}

/// An operation declares what it touches, and reaches nothing else.
fn square(x: &View, y: &View) -> Op {
    let run = |args: &mut Args<'_>| -> Result<(), OpError> {
        let x = args.read::<f32>(0)?;
        args.write::<f32>(1)?.iter_mut().zip(x).for_each(|(y, x)| *y = x * x);
        Ok(())
    };
    Op::host("square", "example", vec![Access::read(x), Access::write(y)], run)
}

/// One stream writes `x`, the other squares it.
fn hand_over(machine: &Machine) -> Result<Vec<i32>, Error> {
    let (device, writer, reader) = open(machine)?;
    let (x, y, written) = (floats(&device, "x")?, floats(&device, "y")?, device.event("written"));
    writer.upload(&x, vec![1f32, 2.0, 3.0, 4.0])?;
    writer.record(&written)?;
    reader.wait(&written, WRITTEN)?;
    reader.launch(square(&x, &y))?;
    device.synchronize()?;
    Ok(reader.download::<f32>(&y)?.wait()?.into_iter().map(|y| y as i32).collect())
}

fn main() -> Result<(), Error> {
    println!("cpu, two workers:  {:?}", hand_over(&Machine::cpu(2)?)?);
    println!("sim, seed 1:       {:?}", hand_over(&Machine::sim(1))?);

    let all = explore(1000, &Options::default(), hand_over)?;
    println!("every order:       {:?} in {} runs", all.results.keys().collect::<Vec<_>>(), all.runs);
    let all = explore(1000, &Options::default(), |machine| {
        machine.drop_waits(WRITTEN);
        hand_over(machine)
    })?;
    println!("without the wait:  {:?} in {} runs", all.results.keys().collect::<Vec<_>>(), all.runs);

    // On threads the same mistake is an error when the two meet: here the reader starts while the writer runs.
    let machine = Machine::cpu(2)?;
    let (device, writer, reader) = open(&machine)?;
    let (x, y) = (floats(&device, "x")?, floats(&device, "y")?);
    let (begun, begin) = std::sync::mpsc::sync_channel(1);
    writer.launch(Op::host("fill", "example", vec![Access::write(&x)], move |args| {
        begun.send(())?;
        std::thread::sleep(std::time::Duration::from_millis(50));
        args.write::<f32>(0)?.fill(5.0);
        Ok(())
    }))?;
    begin.recv().expect("the writer has begun");
    reader.launch(square(&x, &y))?;
    match device.synchronize() {
        Err(race @ Error::Race { .. }) => println!("\nForgotten on cpu:  {race}"),
        other => println!("\nThe reader came too late to meet the writer: {other:?}"),
    }

    // The same program without memory: what would be asked of a device.
    let machine = Machine::dry();
    machine.trace_start();
    let (device, writer, reader) = open(&machine)?;
    let (x, y, written) = (floats(&device, "x")?, floats(&device, "y")?, device.event("written"));
    writer.upload(&x, vec![1f32, 2.0, 3.0, 4.0])?;
    writer.record(&written)?;
    reader.wait(&written, WRITTEN)?;
    reader.launch(square(&x, &y))?;
    device.synchronize()?;
    print!("\nThe trace of a dry run:\n{}", machine.trace_stop().to_text());
    Ok(())
}
