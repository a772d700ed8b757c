//! What launches cost the host on a card: operations one by one beside plain calls of the driver, and graphs with gates
//! and collectives beside their budget. Times are those until the call returns, not until the work is done.
//!
//! `cargo bench -p device --bench launches`; `-- --on cpu` runs the same on a host, without plain calls.

mod plain;

use std::{
    error::Error,
    process::ExitCode,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use device::{
    Access, DType, Departure, Device, Event, Exchange, Executable, Machine, MemoryKind, Op, Options, Reduce, Stream,
    View, Why, cuda, cuda::CudaOptions, ops::Fill,
};
use plain::Plain;

/// Launches in a row: fewer than a card's queue holds, so that the host never waits for room.
const BURST: usize = 256;
/// Measurements; their median counts.
const ROUNDS: usize = 41;
/// Operations of a graph beside its gates and collectives.
const NODES: usize = 200;
/// Elements: too few for the card to fall behind the host.
const NUMEL: usize = 256;
/// Microseconds that a launch of a graph may take, and how many more for each collective and each gate.
const BUDGET: (f64, f64, f64) = (10.0, 2.5, 1.0);
/// Times as long as a plain call that an operation may take.
const TIMES: f64 = 1.1;

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Microseconds of one of `count` calls.
fn micros<E>(count: usize, mut call: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    let begin = Instant::now();
    for _ in 0..count {
        call()?;
    }
    Ok(begin.elapsed().as_secs_f64() * 1e6 / count as f64)
}

struct Bench {
    device: Device,
    stream: Stream,
    view: View,
}

impl Bench {
    fn new(device: &Device) -> Result<Bench, device::Error> {
        let stream = device.stream("compute")?;
        let view = device.alloc("v", &[NUMEL], DType::F32, MemoryKind::Other)?;
        Ok(Bench { device: device.clone(), stream, view })
    }

    fn op(&self) -> Result<Op, device::Error> {
        Fill { y: &self.view, value: 1.0 }.op("bench")
    }

    fn capture(&self, body: impl FnOnce() -> Result<(), device::Error>) -> Result<Executable, device::Error> {
        self.stream.begin_capture("bench")?;
        body()?;
        self.stream.end_capture()?.instantiate()
    }

    /// Operations with as many of `between` among them, spread evenly.
    fn spread(
        &self,
        count: usize,
        mut between: impl FnMut(usize) -> Result<(), device::Error>,
    ) -> Result<(), device::Error> {
        for node in 0..NODES {
            for at in node * count / NODES..(node + 1) * count / NODES {
                between(at)?;
            }
            self.stream.launch(self.op()?)?;
        }
        Ok(())
    }
}

/// Microseconds of an operation that is made and submitted, of one that was made before, and of a plain call.
fn eager(bench: &Bench, plain: Option<&Plain>) -> Result<[f64; 3], Box<dyn Error>> {
    let made = bench.op()?;
    let (mut whole, mut submitted, mut called) = (Vec::new(), Vec::new(), Vec::new());
    // In turns, so that all see the machine alike.
    for _ in 0..=ROUNDS {
        whole.push(micros(BURST, || bench.stream.launch(bench.op()?))?);
        bench.stream.synchronize()?;
        submitted.push(micros(BURST, || bench.stream.launch(made.clone()))?);
        bench.stream.synchronize()?;
        if let Some(plain) = plain {
            called.push(micros(BURST, || plain.launch(256))?);
            plain.synchronize()?;
        }
    }
    let called = if called.is_empty() { f64::NAN } else { median(called.split_off(1)) };
    Ok([median(whole.split_off(1)), median(submitted.split_off(1)), called])
}

/// Microseconds of a launch of a graph with so many gates, half of them waits and half records.
fn gated(bench: &Bench, gates: usize) -> Result<f64, device::Error> {
    let events: Vec<Event> = (0..gates).map(|_| bench.device.event("gate")).collect();
    let publisher = bench.device.stream("publisher")?;
    for event in events.iter().step_by(2) {
        publisher.record(event)?;
    }
    publisher.synchronize()?;
    let graph = bench.capture(|| {
        bench.spread(gates, |at| match at % 2 {
            0 => bench.stream.wait_external(&events[at], Why("bench.gate")),
            _ => bench.stream.record_external(&events[at]),
        })
    })?;
    let mut all = Vec::new();
    for _ in 0..=ROUNDS {
        all.push(micros(1, || bench.stream.launch_graph(&graph))?);
        bench.stream.synchronize()?;
    }
    // The first launch uploads the graph.
    Ok(median(all.split_off(1)))
}

/// Looks of a rank at the barrier before it lets others run: more than what is measured takes.
const LOOKS: usize = 4_000;

/// Where ranks wait for each other without sleeping: waking up takes longer than what is measured, and so may yielding.
struct Together {
    ranks: usize,
    came: AtomicUsize,
}

impl Together {
    fn wait(&self) {
        let turn = self.came.fetch_add(1, Ordering::AcqRel) / self.ranks;
        let mut looks = 0;
        while self.came.load(Ordering::Acquire) / self.ranks <= turn {
            looks += 1;
            if looks < LOOKS { std::hint::spin_loop() } else { thread::yield_now() }
        }
    }
}

/// Microseconds until both ranks have launched a graph with so many collectives, from when both may; and the same with
/// nothing launched.
fn joint(machine: &Machine, collectives: usize) -> Result<[f64; 2], Box<dyn Error>> {
    let ranks = [0u32, 1];
    machine.expect(ranks);
    let together = Together { ranks: ranks.len(), came: AtomicUsize::new(0) };
    let program = |device: &Device| -> Result<[f64; 2], device::Error> {
        let bench = Bench::new(device)?;
        let meeting = machine.meeting("dp", &ranks, device.rank())?;
        let sum = || {
            bench.stream.joint(&meeting, Exchange::AllReduce(Reduce::Sum), "bench", vec![Access::update(&bench.view)])
        };
        // Eagerly first: communicators are made when a group first needs them.
        sum()?;
        bench.stream.synchronize()?;
        let graph = bench.capture(|| bench.spread(collectives, |_| sum()))?;
        let (mut all, mut alone) = (Vec::new(), Vec::new());
        for _ in 0..=ROUNDS {
            together.wait();
            let begin = Instant::now();
            together.wait();
            alone.push(begin.elapsed().as_secs_f64() * 1e6);
            let begin = Instant::now();
            bench.stream.launch_graph(&graph)?;
            together.wait();
            all.push(begin.elapsed().as_secs_f64() * 1e6);
            bench.stream.synchronize()?;
        }
        Ok([all, alone].map(|mut times| median(times.split_off(1))))
    };
    let one = |rank: u32| {
        let _turn = machine.enter(rank);
        let ended = machine.device(rank).and_then(|device| program(&device));
        if let Err(error) = &ended {
            // The other rank may stand at the barrier, which nobody else would come to.
            tell(error);
            std::process::exit(1);
        }
        machine.leave(rank, Departure::Returned);
        ended
    };
    let ended: Vec<_> = thread::scope(|scope| {
        let threads = ranks.map(|rank| scope.spawn(move || one(rank)));
        threads.map(|thread| thread.join().expect("BUG: a rank panicked")).into()
    });
    Ok(ended.into_iter().collect::<Result<Vec<_>, _>>()?.swap_remove(0))
}

fn run(on_card: bool) -> Result<(), Box<dyn Error>> {
    let options = || Options { timeout: Duration::from_secs(10), ..Options::default() };
    let open = || if on_card { Machine::cuda_with(CudaOptions::default(), options()) } else { Machine::cpu(2) };
    let machine = open()?;
    let bench = Bench::new(&machine.device(0)?)?;
    let plain = on_card.then(Plain::open).transpose()?;
    let [whole, submitted, called] = eager(&bench, plain.as_ref())?;
    println!("| launch | µs | limit, µs | |\n|---|---:|---:|---|");
    let row = |what: &str, took: f64, limit: f64| match took <= limit {
        _ if limit.is_nan() => println!("| {what} | {took:.2} | | |"),
        true => println!("| {what} | {took:.2} | {limit:.2} | within |"),
        false => println!("| {what} | {took:.2} | {limit:.2} | over |"),
    };
    if plain.is_some() {
        println!("| plain call of the driver | {called:.2} | | |");
    }
    row("operation made before", submitted, TIMES * called);
    row("operation made and submitted", whole, TIMES * called);
    for gates in [0, 8, 24, 48] {
        let limit = BUDGET.0 + BUDGET.2 * gates as f64;
        row(&format!("graph of {NODES} operations, {gates} gates"), gated(&bench, gates)?, limit);
    }
    drop((bench, machine));
    let mut alone = f64::NAN;
    for collectives in [1, 8, 32] {
        let limit = BUDGET.0 + BUDGET.1 * collectives as f64;
        let took;
        [took, alone] = joint(&open()?, collectives)?;
        // Ranks that share a card have one thread launch for all of them, one graph after the other.
        row(&format!("2 such graphs, {collectives} collectives, until both ranks have launched"), took, f64::NAN);
        row("each of the two", took / 2.0, limit);
    }
    row("2 ranks that meet and launch nothing", alone, f64::NAN);
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let result = match &words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => cuda::prepare().map_err(Into::into).and_then(|_| run(true)),
        ["--on", "cpu"] => run(false),
        other => Err(format!("what is {}? There is --on cpu, and nothing for a card", other.join(" ")).into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(&*error);
            ExitCode::FAILURE
        }
    }
}

fn tell(error: &dyn Error) {
    eprintln!("error: {error}");
    let mut source = error.source();
    while let Some(cause) = source {
        eprintln!("  because {cause}");
        source = cause.source();
    }
}
