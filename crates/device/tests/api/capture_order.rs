//! Graphs whose operations have the order of their accesses: what it keeps of that of submission, and what it opens.

use std::ops::Range;

use device::{
    ops::{Axpy, Factor},
    *,
};
use proptest::prelude::*;

use super::{
    capture_graphs::order,
    drivers::{Driver, dry, sim},
    work::{Counter, floats, open, set},
};

conformance! {
    every:
        gradients_of_weights_lie_beside_those_of_activations,
        memory_that_is_used_again_waits_for_its_readers,
        gates_and_host_functions_keep_their_place,
        a_dropped_wait_is_not_made_good_by_accesses;
    computing:
        a_loosened_graph_gives_the_bits_of_its_eager_twin
}

/// `y += x`.
fn add(x: &View, y: &View) -> Op {
    Axpy { alpha: Factor::Const(1.0), x, y }.op("test").unwrap()
}

/// The graph of what `body` submits.
fn loosened(origin: &Stream, body: impl FnOnce()) -> CapturedGraph {
    origin.begin_capture("g").unwrap();
    body();
    origin.end_capture_in(GraphOrder::Accesses).unwrap()
}

/// By node: all that it is behind.
fn pasts(graph: &CapturedGraph) -> Vec<Vec<bool>> {
    let nodes = &graph.trace().nodes;
    let mut pasts: Vec<Vec<bool>> = Vec::with_capacity(nodes.len());
    for node in nodes {
        let mut past = vec![false; nodes.len()];
        for before in node.behind.iter().map(|before| *before as usize) {
            past[before] = true;
            past.iter_mut().zip(&pasts[before]).for_each(|(own, known)| *own |= *known);
        }
        pasts.push(past);
    }
    pasts
}

const LAYERS: usize = 8;

/// A backward pass in small: each layer's slope from the one behind it, and the gradient of its weight from its slope.
fn backward(stream: &Stream, slopes: &[View], gradients: &[View]) {
    for layer in 0..LAYERS {
        stream.launch(add(&slopes[layer], &slopes[layer + 1])).unwrap();
        stream.launch(add(&slopes[layer], &gradients[layer])).unwrap();
    }
}

fn gradients_of_weights_lie_beside_those_of_activations(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let slopes: Vec<View> = (0..=LAYERS).map(|_| floats(&device, "slope", 4)).collect();
    let gradients: Vec<View> = (0..LAYERS).map(|_| floats(&device, "gradient", 4)).collect();
    let pasts = pasts(&loosened(&stream, || backward(&stream, &slopes, &gradients)));
    for layer in 1..LAYERS {
        let (slope, gradient) = (layer * 2, layer * 2 + 1);
        assert!(pasts[slope][slope - 2] && pasts[gradient][slope - 2], "layer {layer} reads the slope behind it");
        // Near the end a lane of their own would not pay.
        let has_time = layer + 3 < LAYERS;
        assert!(!(has_time && pasts[slope][gradient - 2]), "layer {layer}'s slope needs no gradient of a weight");
    }
}

fn memory_that_is_used_again_waits_for_its_readers(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    // Two buffers in turns: a slope overwrites the one that the gradient two operations before has read.
    let two = [floats(&device, "even", 4), floats(&device, "odd", 4)];
    let slopes: Vec<View> = (0..=LAYERS).map(|layer| two[layer % 2].clone()).collect();
    let gradients: Vec<View> = (0..LAYERS).map(|_| floats(&device, "gradient", 4)).collect();
    let pasts = pasts(&loosened(&stream, || backward(&stream, &slopes, &gradients)));
    for layer in 1..LAYERS {
        let (slope, last) = (layer * 2, layer * 2 - 1);
        assert!(pasts[slope][last], "layer {layer} writes what the last gradient reads");
    }
}

fn gates_and_host_functions_keep_their_place(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let (into, out) = (device.event("in"), device.event("out"));
    let slopes: Vec<View> = (0..=LAYERS).map(|_| floats(&device, "slope", 4)).collect();
    let gradients: Vec<View> = (0..LAYERS).map(|_| floats(&device, "gradient", 4)).collect();
    let count = Counter::default();
    stream.record(&into).unwrap();
    let graph = loosened(&stream, || {
        backward(&stream, &slopes, &gradients);
        stream.record_external(&out).unwrap();
        backward(&stream, &slopes, &gradients);
        stream.wait_external(&into, Why("test.in")).unwrap();
        backward(&stream, &slopes, &gradients);
        stream.launch(count.op(Vec::new())).unwrap();
        backward(&stream, &slopes, &gradients);
    });
    let pasts = pasts(&graph);
    let pass = LAYERS * 2;
    let (record, wait, host) = (pass, 2 * pass + 1, 3 * pass + 2);
    for (node, past) in pasts.iter().enumerate() {
        if node < record {
            assert!(pasts[record][node], "a record stands for all before it, and {node} is");
        }
        if node < host {
            assert!(pasts[host][node], "a host function comes behind {node}");
        }
        assert_eq!(past[wait], node > wait, "what came behind the wait, {node}, stays there");
        assert_eq!(past[host], node > host, "what came behind the host function, {node}, stays there");
    }
    let free = (record + 1..wait).filter(|node| !pasts[*node][record]).count();
    assert!(free > 0, "nobody needs a record");
}

fn a_dropped_wait_is_not_made_good_by_accesses(driver: &Driver) {
    let machine = driver.machine();
    let (device, a) = open(&machine, 0, "a");
    let (b, [x, y, z]) = (device.stream("b").unwrap(), [0; 3].map(|_| floats(&device, "v", 4)));
    machine.drop_waits(Why("fork"));
    let graph = loosened(&a, || {
        a.launch(add(&x, &y)).unwrap();
        order(&a, &b, "fork");
        b.launch(add(&y, &z)).unwrap();
        order(&b, &a, "join");
        a.launch(add(&z, &x)).unwrap();
    });
    let pasts = pasts(&graph);
    assert!(!pasts[1][0], "the wait that ordered the read behind the write is gone");
    assert!(pasts[2][0] && pasts[2][1], "the others are there");
}

/// One call of a program: `to[at] += from[at]` on memory of two kinds.
#[derive(Clone, Debug)]
struct Call {
    stream: usize,
    from: usize,
    to: usize,
    at: Range<usize>,
    /// Behind all that the other stream has.
    joins: bool,
}

const WIDTH: usize = 12;

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let range = (0..WIDTH, 1..=WIDTH).prop_map(|(from, n)| from..(from + n).min(WIDTH));
    let call = (0..2usize, 0..4usize, 0..3usize, range, any::<bool>()).prop_map(|(stream, from, other, at, joins)| {
        let to = (from + 1 + other) % 4;
        Call { stream, from, to, at, joins }
    });
    prop::collection::vec(call, 1..40)
}

/// Everything in one allocation, as in an arena.
fn program(streams: &[Stream; 2], memory: &View, calls: &[Call]) {
    order(&streams[0], &streams[1], "start");
    let cut = |part: usize, at: &Range<usize>| memory.flat(part * WIDTH + at.start..part * WIDTH + at.end).unwrap();
    for call in calls {
        let (own, other) = (&streams[call.stream], &streams[1 - call.stream]);
        if call.joins {
            order(other, own, "joins");
        }
        own.launch(add(&cut(call.from, &call.at), &cut(call.to, &call.at))).unwrap();
    }
    order(&streams[1], &streams[0], "end");
}

fn conflict(first: &TraceNode, second: &TraceNode) -> bool {
    let accesses = |node: &TraceNode| match &node.what {
        TraceNodeKind::Op { accesses, .. } => accesses.clone(),
        other => panic!("no operation: {other:?}"),
    };
    let (first, second) = (accesses(first), accesses(second));
    first.iter().any(|a| {
        second.iter().any(|b| a.allocation == b.allocation && a.mode.conflicts(b.mode) && a.region.overlaps(&b.region))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_looser_order_keeps_every_conflict_and_adds_nothing(calls in calls()) {
        let (device, a) = open(&dry().machine(), 0, "a");
        let streams = [a.clone(), device.stream("b").unwrap()];
        let memory = floats(&device, "arena", 4 * WIDTH);
        let graphs = [GraphOrder::Submission, GraphOrder::Accesses].map(|order| {
            a.begin_capture("g").unwrap();
            program(&streams, &memory, &calls);
            a.end_capture_in(order).unwrap()
        });
        let nodes = &graphs[0].trace().nodes;
        let [submitted, loosened] = [&graphs[0], &graphs[1]].map(pasts);
        // Conflicts that the program itself leaves without order are none of ours, nor is what lies between them.
        let races = (0..nodes.len())
            .any(|second| (0..second).any(|first| conflict(&nodes[first], &nodes[second]) && !submitted[second][first]));
        for second in 0..nodes.len() {
            for first in 0..second {
                prop_assert!(submitted[second][first] || !loosened[second][first], "{first} and {second} were beside");
                let kept = loosened[second][first] || !submitted[second][first];
                prop_assert!(races || kept || !conflict(&nodes[first], &nodes[second]), "{first} before {second}");
            }
        }
    }
}

fn a_loosened_graph_gives_the_bits_of_its_eager_twin(driver: &Driver) {
    let bits = |driver: &Driver, replayed: bool| {
        let (device, stream) = open(&driver.machine(), 0, "compute");
        let two = [floats(&device, "even", 4), floats(&device, "odd", 4)];
        let slopes: Vec<View> = (0..=LAYERS).map(|layer| two[layer % 2].clone()).collect();
        let gradients: Vec<View> = (0..LAYERS).map(|_| floats(&device, "gradient", 4)).collect();
        for (at, view) in two.iter().chain(&gradients).enumerate() {
            stream.launch(set(view, 1.0 + 0.37 * at as f32)).unwrap();
        }
        if replayed {
            let exec = loosened(&stream, || backward(&stream, &slopes, &gradients)).instantiate().unwrap();
            (0..2).for_each(|_| stream.launch_graph(&exec).unwrap());
        } else {
            (0..2).for_each(|_| backward(&stream, &slopes, &gradients));
        }
        let values = gradients.iter().flat_map(|view| stream.download::<f32>(view).unwrap().wait().unwrap());
        values.map(f32::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(bits(driver, true), bits(&sim(0), false));
}
