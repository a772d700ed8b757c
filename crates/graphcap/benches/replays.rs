//! What a replay costs apart from its work: aims, on two cores, under 0.5 µs a node and under 20 ns for the look at
//! what is published already. Times are per replay; the item rate is per node. `cargo bench -p graphcap --bench replays`.

use std::sync::Arc;

use device::{Access, DType, Device, Event, Machine, MemoryKind, Op, Stream, View};
use divan::{Bencher, counter::ItemsCount};
use graphcap::{CaptureScope, GateMode, Graph, GraphConfig, GraphSet, Scope};
use pgroups::{After, Epochs, Param, Pass, PgError, Publish, Quiet, Turn};

fn main() {
    divan::main();
}

const NODES: usize = 1_000;

/// Published once and for all.
struct Published {
    event: Event,
    quiet: Quiet,
}

impl Publish for Published {
    fn epochs(&self) -> Epochs {
        Epochs { written: 1, issued: 1 }
    }

    fn issue(&self) -> Result<(), PgError> {
        Ok(())
    }

    fn quiet(&self) -> Option<Quiet> {
        Some(self.quiet.clone())
    }

    fn event(&self) -> &Event {
        &self.event
    }

    fn done(&self, _: After<'_>) -> Result<(), PgError> {
        Ok(())
    }
}

struct Setup {
    device: Device,
    stream: Stream,
    view: View,
    params: Vec<Param>,
}

impl Setup {
    /// With so many parameters, each with a publisher of its own.
    fn new(params: usize) -> Setup {
        let device = Machine::cpu(1).expect("a machine").device(0).expect("a free rank");
        let stream = device.stream("compute").expect("healthy");
        let view = vector(&device);
        let param = |i: usize| {
            let param = Param::new(&format!("w{i}"), &vector(&device), &vector(&device)).expect("equal sizes");
            let event = device.event("published");
            stream.record(&event).expect("healthy");
            param.attach(Some(Arc::new(Published { event, quiet: Quiet::new(true) })), None);
            param
        };
        let params = (0..params).map(param).collect();
        Setup { device, stream, view, params }
    }

    /// `nodes` operations, each behind a read of the next parameter as long as there are any.
    fn graph(&self, gates: GateMode, nodes: usize) -> Graph {
        let config = GraphConfig { gates, ..GraphConfig::new(Scope::Layer) };
        let mut set = GraphSet::new(&self.stream, config).expect("healthy");
        let body = |scope: &mut CaptureScope<'_>| -> Result<(), PgError> {
            for node in 0..nodes {
                let mut turn: Turn<'_> = scope.turn(Pass::Forward);
                if let Some(param) = self.params.get(node) {
                    turn.read(param, &self.stream)?;
                    self.stream.launch(nothing(&self.view))?;
                    turn.done(param, &self.stream)?;
                } else {
                    self.stream.launch(nothing(&self.view))?;
                }
            }
            Ok(())
        };
        set.capture("bench", &self.stream, body).expect("a whole capture").0
    }

    fn run(&self, graph: &Graph) {
        graph.replay(&self.stream, &[]).expect("healthy");
        self.stream.synchronize().expect("healthy");
    }
}

fn vector(device: &Device) -> View {
    device.alloc("v", &[64], DType::F32, MemoryKind::Other).expect("memory")
}

fn nothing(view: &View) -> Op {
    Op::host("nothing", "bench", vec![Access::update(view)], |_| Ok(()))
}

/// The slow twin: the same operations one by one.
#[divan::bench(sample_count = 500)]
fn eager_nodes(bencher: Bencher<'_, '_>) {
    let s = Setup::new(0);
    bencher.counter(ItemsCount::new(NODES)).bench(|| {
        (0..NODES).for_each(|_| s.stream.launch(nothing(&s.view)).expect("healthy"));
        s.stream.synchronize().expect("healthy");
    });
}

/// A chain: what a node costs.
#[divan::bench(sample_count = 500)]
fn replayed_nodes(bencher: Bencher<'_, '_>) {
    let s = Setup::new(0);
    let graph = s.graph(GateMode::InGraph, NODES);
    bencher.counter(ItemsCount::new(NODES)).bench(|| s.run(&graph));
}

/// One node: what a replay costs by itself.
#[divan::bench(sample_count = 2_000)]
fn smallest_replay(bencher: Bencher<'_, '_>) {
    let s = Setup::new(0);
    let graph = s.graph(GateMode::InGraph, 1);
    bencher.bench(|| s.run(&graph));
}

/// As many nodes in all cases; so many gates on either side of them.
#[divan::bench(args = [(GateMode::InGraph, 0), (GateMode::InGraph, 16), (GateMode::InGraph, 48),
    (GateMode::BeforeReplay, 16), (GateMode::BeforeReplay, 48)], sample_count = 1_000)]
fn gates(bencher: Bencher<'_, '_>, (mode, gates): (GateMode, usize)) {
    let s = Setup::new(gates);
    let graph = s.graph(mode, 200);
    bencher.bench(|| s.run(&graph));
}

/// The look at what a graph reads when all of it is published.
#[divan::bench(args = [0, 1, 8, 64], sample_count = 1_000, sample_size = 1_000)]
fn look_at_published(bencher: Bencher<'_, '_>, conditions: usize) {
    let s = Setup::new(conditions);
    let graph = s.graph(GateMode::InGraph, conditions);
    bencher.bench_local(|| graph.make_ready().expect("published"));
    s.device.synchronize().expect("healthy");
}
