//! Each kernel against what bounds it, measured in turn in one run: products against a large square product,
//! everything else against a copy that moves as many bytes. `cargo bench -p device --bench limits [workers] [name]`.

mod cases;

use std::time::Instant;

use cases::{Bench, Limit};
use device::{
    Error, Machine, Op,
    ops::{Accumulate, Cast, Finish, Gemm, Trans},
};

/// Pairs of measurements; the median ratio counts.
const PAIRS: usize = 15;

/// Seconds of one run, from as many as take about 4 ms.
fn seconds(bench: &Bench, op: &Op, times: usize) -> Result<f64, Error> {
    let start = Instant::now();
    bench.run(op, times)?;
    Ok(start.elapsed().as_secs_f64() / times as f64)
}

/// The limit for products.
fn square(bench: &Bench) -> Result<Op, Error> {
    let [a, b, c] = [bench.f32(&[1536, 1536])?, bench.f32(&[1536, 1536])?, bench.f32(&[1536, 1536])?];
    let finish = Finish::Into(Accumulate::Overwrite);
    Gemm { a: &a, b: &b, c: &c, trans: Trans::Nt, finish }.op("limit")
}

/// The limit for everything else: a copy that moves `bytes`, half read, half written.
fn copy(bench: &Bench, bytes: usize) -> Result<Op, Error> {
    let [x, y] = [bench.f32(&[bytes / 8])?, bench.f32(&[bytes / 8])?];
    Cast { x: &x, y: &y }.op("limit")
}

fn times_for(bench: &Bench, op: &Op) -> Result<usize, Error> {
    bench.run(op, 3)?;
    Ok((4e-3 / seconds(bench, op, 3)?).ceil().max(1.0) as usize)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Error> {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let workers = words.iter().find_map(|word| word.parse().ok()).unwrap_or(1);
    let wanted: Vec<&String> = words.iter().filter(|word| word.parse::<usize>().is_err()).collect();
    let machine = Machine::cpu(workers)?;
    let bench = Bench::new(machine.device(0)?)?;
    let square = square(&bench)?;
    let device::Launch::Kernel(kernel) = &square.launch else { unreachable!("a product is a kernel") };
    let square_flops = kernel.flops(&square.accesses) as f64;
    let square_times = times_for(&bench, &square)?;
    println!(
        "{workers} worker(s); ratio: rate over the rate of the limit, median of {PAIRS} pairs; best: of the fastest"
    );
    println!("{:28} {:>10} {:>15} {:>15} {:>6} {:>6}", "kernel", "µs", "rate", "limit", "ratio", "best");
    for case in bench.cases()? {
        if !wanted.is_empty() && !wanted.iter().any(|word| case.name.contains(word.as_str())) {
            continue;
        }
        let (limit, limit_times, work, limit_work, unit) = match case.limit {
            Limit::Product => (square.clone(), square_times, case.flops() as f64, square_flops, "GFLOP/s"),
            Limit::Copy => {
                let copy = copy(&bench, case.bytes())?;
                let times = times_for(&bench, &copy)?;
                (copy, times, case.bytes() as f64, case.bytes() as f64, "GB/s")
            }
        };
        let times = times_for(&bench, &case.op)?;
        let (mut own, mut other, mut ratios) = (vec![], vec![], vec![]);
        for _ in 0..PAIRS {
            let (a, b) = (seconds(&bench, &case.op, times)?, seconds(&bench, &limit, limit_times)?);
            own.push(a);
            other.push(b);
            ratios.push(work / a / (limit_work / b));
        }
        let (time, limit_time) = (median(&mut own), median(&mut other));
        // Sorted by now: on a machine with other work the fastest runs are the least disturbed.
        let best = work / own[0] / (limit_work / other[0]);
        let (rate, limit_rate) = (work / time / 1e9, limit_work / limit_time / 1e9);
        let ratio = median(&mut ratios);
        let time = time * 1e6;
        println!("{:28} {time:10.1} {rate:7.1} {unit:7} {limit_rate:7.1} {unit:7} {ratio:6.2} {best:6.2}", case.name);
    }
    Ok(())
}
