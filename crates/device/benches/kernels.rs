//! Time and rate of each kernel on one worker. `cargo bench -p device --bench kernels`.

mod cases;

use cases::{Bench, Case, Limit};
use device::Machine;
use divan::{
    Bencher,
    counter::{BytesCount, ItemsCount},
};

fn main() {
    divan::main();
}

fn bench() -> Bench {
    let machine = Machine::cpu(1).expect("one worker");
    Bench::new(machine.device(0).expect("the first device")).expect("a stream")
}

fn named(limit: Limit) -> Vec<&'static str> {
    let all = bench().cases().expect("sizes fit");
    all.iter().filter(|case| case.limit == limit).map(|case| case.name).collect()
}

fn find(bench: &Bench, name: &str) -> Case {
    bench.cases().expect("sizes fit").into_iter().find(|case| case.name == name).expect("a listed case")
}

/// Items are floating-point operations.
#[divan::bench(args = named(Limit::Product), max_time = 1)]
fn products(bencher: Bencher<'_, '_>, name: &str) {
    let bench = bench();
    let case = find(&bench, name);
    let bencher = bencher.counter(ItemsCount::new(case.flops()));
    bencher.bench(|| bench.run(&case.op, 1).expect("the kernel runs"));
}

#[divan::bench(args = named(Limit::Copy), max_time = 1)]
fn streaming(bencher: Bencher<'_, '_>, name: &str) {
    let bench = bench();
    let case = find(&bench, name);
    let bencher = bencher.counter(BytesCount::new(case.bytes()));
    bencher.bench(|| bench.run(&case.op, 1).expect("the kernel runs"));
}
