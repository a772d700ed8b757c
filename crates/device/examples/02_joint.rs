//! Three ranks average a buffer in one joint operation; then what each learns when one of them disagrees, fails, or
//! never comes.
//!
//! Run: `cargo run -p device --example 02_joint`

use std::time::Duration;

use device::{
    Access, DType, Departure, Device, Error, Exchange, Machine, MemoryKind, Op, Options, Reduce, Stream, View,
};

/// The members of the group, in its order.
const MEMBERS: [u32; 3] = [4, 0, 2];

/// What goes wrong, if anything.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// Rank 0 brings five elements instead of four.
    Size,
    /// An operation of rank 2 fails before it gets there.
    Failure,
    /// Rank 2 returns without coming.
    Absence,
}

fn average(device: &Device, stream: &Stream, fault: Fault) -> Result<View, Error> {
    let rank = device.rank();
    let n = if (fault, rank) == (Fault::Size, 0) { 5 } else { 4 };
    let grad = device.alloc("grad", &[n], DType::F32, MemoryKind::Grad)?;
    stream.upload(&grad, vec![rank as f32; n])?;
    if (fault, rank) == (Fault::Failure, 2) {
        stream.launch(Op::host("norm", "h3.mlp", vec![Access::update(&grad)], |_| Err("the norm is NaN".into())))?;
    }
    if (fault, rank) != (Fault::Absence, 2) {
        // All members open the place by the same name; no thread waits in it.
        let meeting = device.machine().meeting("dp", &MEMBERS, rank)?;
        stream.joint(&meeting, Exchange::AllReduce(Reduce::Avg), "grads", vec![Access::update(&grad)])?;
    }
    Ok(grad)
}

/// One rank's program, on its own thread.
fn program(machine: &Machine, rank: u32, fault: Fault) -> Result<Vec<f32>, Error> {
    let _turn = machine.enter(rank);
    let result = (|| {
        let device = machine.device(rank)?;
        let stream = device.stream("comm")?;
        let grad = average(&device, &stream, fault)?;
        stream.download::<f32>(&grad)?.wait()
    })();
    machine.leave(rank, result.as_ref().map_or_else(|e| Departure::Failed(e.chain()), |_| Departure::Returned));
    result
}

fn run(machine: &Machine, fault: Fault) -> Vec<Result<Vec<f32>, Error>> {
    machine.expect(MEMBERS);
    std::thread::scope(|scope| {
        let threads = MEMBERS.map(|rank| scope.spawn(move || program(machine, rank, fault)));
        threads.into_iter().map(|t| t.join().expect("no rank panics here")).collect()
    })
}

fn main() -> Result<(), Error> {
    let limit = Options { timeout: Duration::from_secs(5), ..Options::default() };
    let cases = [
        (Fault::None, "All come"),
        (Fault::Size, "Rank 0 brings another size"),
        (Fault::Failure, "Rank 2 fails on its way"),
        (Fault::Absence, "Rank 2 returns without coming"),
    ];
    for (fault, title) in cases {
        for machine in [Machine::cpu_with(2, limit.clone())?, Machine::sim(7)] {
            println!("{title}, on {}:", machine.driver());
            for (rank, result) in MEMBERS.iter().zip(run(&machine, fault)) {
                match result {
                    Ok(grad) => println!("  rank {rank}: {grad:?}"),
                    Err(error) => println!("  rank {rank}: {}", error.chain()),
                }
            }
        }
    }
    Ok(())
}
