//! What a launched graph costs beside the same operations one by one, apart from their work: aim under 0.5 µs a node.
//! Times are per run; the item rate is per operation. `cargo bench -p device --bench replay`.

use device::*;
use divan::{Bencher, counter::ItemsCount};

fn main() {
    divan::main();
}

const NODES: usize = 1_000;

struct Setup {
    device: Device,
    one: Stream,
    two: Stream,
    view: View,
}

fn setup(workers: usize) -> Setup {
    let device = Machine::cpu(workers).expect("a machine").device(0).expect("a free rank");
    let (one, two) = (device.stream("one").expect("healthy"), device.stream("two").expect("healthy"));
    let view = device.alloc("v", &[64], DType::F32, MemoryKind::Other).expect("memory");
    Setup { device, one, two, view }
}

fn nothing(view: &View) -> Op {
    Op::host("nothing", "bench", vec![Access::update(view)], |_| Ok(()))
}

fn executable(origin: &Stream, body: impl FnOnce()) -> Executable {
    origin.begin_capture("bench").expect("healthy");
    body();
    origin.end_capture().expect("a whole capture").instantiate().expect("healthy")
}

fn submit(stream: &Stream, view: &View) {
    (0..NODES).for_each(|_| stream.launch(nothing(view)).expect("healthy"));
}

fn launch(stream: &Stream, executable: &Executable) {
    stream.launch_graph(executable).expect("healthy");
    stream.synchronize().expect("healthy");
}

/// The slow twin: made, submitted, claimed, run and waited for, one by one.
#[divan::bench(args = [1, 2], sample_count = 1_000)]
fn eager_chain(bencher: Bencher<'_, '_>, workers: usize) {
    let s = setup(workers);
    bencher.counter(ItemsCount::new(NODES)).bench(|| {
        submit(&s.one, &s.view);
        s.one.synchronize().expect("healthy");
    });
}

/// One chain: one claim, and no hand-over between nodes.
#[divan::bench(args = [1, 2], sample_count = 1_000)]
fn replayed_chain(bencher: Bencher<'_, '_>, workers: usize) {
    let s = setup(workers);
    let chain = executable(&s.one, || submit(&s.one, &s.view));
    bencher.counter(ItemsCount::new(NODES)).bench(|| launch(&s.one, &chain));
}

/// A fork and a join at every second operation, so that nothing is a chain.
fn ladder(s: &Setup) {
    let (fork, join) = (s.device.event("fork"), s.device.event("join"));
    for _ in 0..NODES / 2 {
        s.one.record(&fork).expect("healthy");
        s.two.wait(&fork, Why("bench.fork")).expect("healthy");
        s.one.launch(nothing(&s.view.flat(0..32).expect("in range"))).expect("healthy");
        s.two.launch(nothing(&s.view.flat(32..64).expect("in range"))).expect("healthy");
        s.two.record(&join).expect("healthy");
        s.one.wait(&join, Why("bench.join")).expect("healthy");
    }
}

/// Two streams that wait for each other all the time.
#[divan::bench(args = [1, 2], sample_count = 300)]
fn eager_ladder(bencher: Bencher<'_, '_>, workers: usize) {
    let s = setup(workers);
    bencher.counter(ItemsCount::new(NODES)).bench(|| {
        ladder(&s);
        s.device.synchronize().expect("healthy");
    });
}

/// The same as a graph: every node is a part, and half of them are handed to another worker.
#[divan::bench(args = [1, 2], sample_count = 300)]
fn replayed_ladder(bencher: Bencher<'_, '_>, workers: usize) {
    let s = setup(workers);
    let graph = executable(&s.one, || ladder(&s));
    bencher.counter(ItemsCount::new(NODES)).bench(|| launch(&s.one, &graph));
}

/// A launch of one node, and the wait for it: what does not depend on the size of the graph.
#[divan::bench(args = [1, 2], sample_count = 2_000)]
fn launch_of_one_node(bencher: Bencher<'_, '_>, workers: usize) {
    let s = setup(workers);
    let graph = executable(&s.one, || s.one.launch(nothing(&s.view)).expect("healthy"));
    bencher.bench(|| launch(&s.one, &graph));
}

/// A launch whose 48 gates are open, 24 in and 24 out, beside 200 operations.
#[divan::bench(args = [1, 2], sample_count = 1_000)]
fn launch_with_48_gates(bencher: Bencher<'_, '_>, workers: usize) {
    let s = setup(workers);
    let gates: Vec<(Event, Event)> = (0..24).map(|_| (s.device.event("in"), s.device.event("out"))).collect();
    gates.iter().for_each(|(gate, _)| s.two.record(gate).expect("healthy"));
    let graph = executable(&s.one, || {
        for (i, (gate, out)) in gates.iter().enumerate() {
            s.one.wait_external(gate, Why("bench.gate")).expect("healthy");
            (0..if i < 8 { 9 } else { 8 }).for_each(|_| s.one.launch(nothing(&s.view)).expect("healthy"));
            s.one.record_external(out).expect("healthy");
        }
    });
    bencher.bench(|| launch(&s.one, &graph));
}
