//! What a card refuses, and what only a card can show.

use std::{
    fs,
    sync::{Arc, Mutex, mpsc},
    time::Instant,
};

use device::{
    cuda::{CudaError, CudaOptions},
    ops::*,
    *,
};

use super::{
    capture_graphs::{captured, order},
    drivers::{LIMIT, card_turn, cuda},
    work::{floats, op_of, open, set},
};

#[test]
fn a_kernel_that_a_card_does_not_have_is_refused_by_name() {
    let _turn = card_turn();
    let (device, stream) = open(&cuda().machine(), 0, "compute");
    let m = |label, shape: &[usize]| device.alloc(label, shape, DType::F32, MemoryKind::Other).unwrap();
    let ([q, k, v, o], lse) = (["q", "k", "v", "o"].map(|label| m(label, &[4, 300])), m("lse", &[1, 1, 4]));
    // Heads wider than any function takes.
    let attention = || {
        let attention = Attention { q: &q, k: &k, v: &v, o: &o, lse: &lse, head_dim: 300, seq_len: 4, scale: 0.1 };
        attention.op("h3.attn").unwrap()
    };
    let text =
        "attention@h3.attn: driver 'cuda' has no kernel for it; write it as a host operation, or use another driver";
    assert_eq!(stream.launch(attention()).unwrap_err().to_string(), text);
    // In a capture too, and it breaks none.
    let graph = captured(&stream, || assert_eq!(stream.launch(attention()).unwrap_err().to_string(), text));
    assert_eq!(graph.node_count(), 0);
    stream.synchronize().unwrap();
}

/// Submissions look seldom what the card has passed; whoever is short of memory looks.
#[test]
fn memory_that_only_passed_work_holds_is_there_when_memory_is_short() {
    let _turn = card_turn();
    let (device, stream) = open(&cuda().machine(), 0, "compute");
    let done = device.event("done");
    // The largest power of two that fits: two of them do not.
    let take = |elements: usize| device.alloc("most", &[elements], DType::Bf16, MemoryKind::Other);
    let found = (20..40).rev().find_map(|log| take(1 << log).ok().map(|view| (1 << log, view)));
    let (elements, most) = found.expect("a card with memory");
    assert!(matches!(take(elements), Err(Error::OutOfMemory { .. })));
    stream.launch(Fill { y: &most.flat(0..1000).unwrap(), value: 1.0 }.op("test").unwrap()).unwrap();
    stream.record(&done).unwrap();
    drop(most);
    let begin = Instant::now();
    while !done.is_done() {
        assert!(begin.elapsed() < LIMIT, "a fill is not done in {LIMIT:?}");
        std::thread::yield_now();
    }
    take(elements).unwrap();
}

#[test]
fn a_trace_tells_when_operations_and_launches_of_a_card_ran() {
    let _turn = card_turn();
    let machine = cuda().machine();
    let (device, one) = open(&machine, 0, "one");
    let (two, x, y) = (device.stream("two").unwrap(), floats(&device, "x", 1 << 20), floats(&device, "y", 1 << 20));
    let ready = device.event("ready");
    let fill = |y: &View| Fill { y, value: 1.0 }.op("test").unwrap();
    one.launch(fill(&x)).unwrap();
    one.synchronize().unwrap();
    for _ in 0..2 {
        machine.trace_start();
        one.launch(fill(&x)).unwrap();
        one.record(&ready).unwrap();
        two.wait(&ready, Why("test.ready")).unwrap();
        two.launch(Cast { x: &x, y: &y }.op("test").unwrap()).unwrap();
        let graph = captured(&two, || (0..3).for_each(|_| two.launch(fill(&y)).unwrap())).instantiate().unwrap();
        two.launch_graph(&graph).unwrap();
        device.synchronize().unwrap();
        let trace = machine.trace_stop();
        let mut ran: Vec<(u64, u64, String)> = Vec::new();
        ran.extend(trace.events.iter().filter_map(|event| match event {
            TraceEvent::Ran { node: None, name, start, end, .. } => Some((*start, *end, name.to_string())),
            _ => None,
        }));
        ran.sort();
        let names: Vec<&str> = ran.iter().map(|(.., name)| name.as_str()).collect();
        assert_eq!(names[..2], ["fill", "cast"], "{ran:?}");
        assert_eq!(ran.len(), 3, "an operation each, and the launch: {ran:?}");
        // 4 MiB take longer than a card's clock ticks, and nothing here takes a second.
        assert!(ran.iter().all(|(start, end, _)| start < end && *end < 1_000_000_000), "{ran:?}");
        assert!(ran.windows(2).all(|pair| pair[0].1 <= pair[1].0), "one behind the other: {ran:?}");
    }
    one.launch(fill(&x)).unwrap();
    one.synchronize().unwrap();
    machine.trace_start();
    let events = machine.trace_stop().events;
    let told = events.iter().filter(|event| !matches!(event, TraceEvent::Note { .. })).count();
    assert_eq!(told, 0, "nothing ran meanwhile: {events:?}");
}

#[test]
fn a_card_that_is_not_there_is_refused_with_how_many_there_are() {
    let _turn = card_turn();
    drop(cuda());
    let options = CudaOptions { cards: vec![0, 4000], ..CudaOptions::default() };
    let Err(Error::Cuda { source: CudaError::NoCard { asked: 4000, have }, .. }) =
        Machine::cuda_with(options, Options::default())
    else {
        panic!("card 4000 was opened")
    };
    assert!(have > 0);
}

#[test]
fn a_value_that_a_kernel_cannot_use_names_the_operation_and_the_position() {
    let _turn = card_turn();
    for captured_first in [false, true] {
        let (device, stream) = open(&cuda().machine(), 3, "compute");
        let ids = device.alloc("ids", &[6], DType::I32, MemoryKind::Other).unwrap();
        let table = device.alloc("wte", &[11, 40], DType::F32, MemoryKind::Param).unwrap();
        let y = device.alloc("y", &[6, 40], DType::F32, MemoryKind::Other).unwrap();
        stream.upload(&ids, vec![1, 0, 10, 2, 70_000, 3]).unwrap();
        let vocab = Vocab::whole(11);
        let submit = || {
            stream.launch(Fill { y: &table, value: 1.0 }.op("before").unwrap()).unwrap();
            let op = Embedding { ids: &ids, table: &table, vocab, positions: None, y: &y }.op("embed").unwrap();
            stream.launch(op).unwrap();
            stream.launch(Fill { y: &y, value: 0.0 }.op("behind").unwrap()).unwrap();
        };
        if captured_first {
            let exec = captured(&stream, submit).instantiate().unwrap();
            stream.launch_graph(&exec).unwrap();
        } else {
            submit();
        }
        let error = stream.synchronize().unwrap_err();
        assert_eq!((op_of(&error).name, &op_of(&error).site[..], op_of(&error).rank), ("embedding", "embed", 3));
        assert_eq!(op_of(&error).node, captured_first.then_some(1));
        let Error::Failed { source, .. } = &error else { panic!("{error}") };
        let want = ValueError::Id { id: 70_000, position: 4, vocab: 11 };
        assert_eq!(source.downcast_ref(), Some(&want), "{}", error.chain());
    }
}

#[test]
fn ranks_that_share_a_card_do_not_disturb_each_other() {
    let _turn = card_turn();
    let machine = cuda().machine();
    let opened: Vec<_> = (0..4).map(|rank| open(&machine, rank, "compute")).collect();
    let views: Vec<View> =
        opened.iter().map(|(device, _)| floats(device, "v", 1000 + device.rank() as usize)).collect();
    std::thread::scope(|scope| {
        for ((device, stream), view) in opened.iter().zip(&views) {
            scope.spawn(move || {
                stream.launch(Fill { y: view, value: 0.0 }.op("test").unwrap()).unwrap();
                for _ in 0..200 {
                    let alpha = Factor::Const(1.0 + device.rank() as f32);
                    let one = floats(device, "one", view.numel());
                    stream.launch(Fill { y: &one, value: 1.0 }.op("test").unwrap()).unwrap();
                    stream.launch(Axpy { alpha, x: &one, y: view }.op("test").unwrap()).unwrap();
                }
            });
        }
    });
    for ((device, stream), view) in opened.iter().zip(&views) {
        let got = stream.download::<f32>(view).unwrap().wait().unwrap();
        assert!(got.iter().all(|x| *x == 200.0 * (1.0 + device.rank() as f32)), "rank {}", device.rank());
    }
}

/// Kernels, host operations, branches and gates together.
#[test]
fn a_captured_step_of_kernels_gives_the_bits_of_its_eager_twin() {
    let _turn = card_turn();
    let run = |replay: bool| {
        let (device, one) = open(&cuda().machine(), 0, "one");
        let (two, n) = (device.stream("two").unwrap(), 12_345);
        let make = |label| floats(&device, label, n);
        let (w, m, v, g, h) = (make("w"), make("m"), make("v"), make("g"), make("h"));
        for (view, value) in [(&w, 0.5), (&m, 0.0), (&v, 0.0)] {
            one.launch(set(view, value)).unwrap();
        }
        let scalars = floats(&device, "scalars", Hyper::LEN);
        let step = device.alloc("step", &[1], DType::I32, MemoryKind::Other).unwrap();
        one.upload(&scalars, vec![1e-2f32, 0.0, 0.0, 1.0]).unwrap();
        one.upload(&step, vec![0]).unwrap();
        let (beta1, beta2) = (0.9, 0.99);
        let submit = || {
            one.launch(Gelu { x: &w, y: &h }.op("mlp").unwrap()).unwrap();
            order(&one, &two, "fork");
            two.launch(AdvanceAdam { step: &step, scalars: &scalars, skip: None, beta1, beta2 }.op("opt").unwrap())
                .unwrap();
            one.launch(GeluBackward { dy: &h, x: &w, dx: &g }.op("mlp").unwrap()).unwrap();
            let double = Op::host("double", "mlp", vec![Access::update(&g)], |args| {
                args.write::<f32>(0)?.iter_mut().for_each(|x| *x *= 2.0);
                Ok(())
            });
            one.launch(double).unwrap();
            order(&two, &one, "join");
            let (eps, weight_decay) = (1e-8, 0.01);
            let (param, grad, scalars) = (&w, &g, &scalars);
            let adamw =
                AdamW { param, rest: None, grad, m: &m, v: &v, scalars, skip: None, beta1, beta2, eps, weight_decay };
            one.launch(adamw.op("opt").unwrap()).unwrap();
        };
        let exec = replay.then(|| captured(&one, submit).instantiate().unwrap());
        for _ in 0..10 {
            exec.as_ref().map_or_else(submit, |exec| one.launch_graph(exec).unwrap());
        }
        let values = one.download::<f32>(&w).unwrap().wait().unwrap();
        assert!(values[0] < 0.5 && one.download::<i32>(&step).unwrap().wait().unwrap() == [10]);
        values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn compiled_kernels_are_kept_and_used_again() {
    let _turn = card_turn();
    drop(cuda());
    let folder = std::env::temp_dir().join(format!("warpweft-kernel-cache-{}", std::process::id()));
    let open = || {
        let options = CudaOptions { kernel_cache: Some(folder.clone()), ..CudaOptions::default() };
        Machine::cuda_with(options, Options::default()).unwrap()
    };
    let list = || {
        let files = fs::read_dir(&folder).unwrap().map(|file| file.unwrap());
        let mut files: Vec<_> = files.map(|f| (f.path(), f.metadata().unwrap().modified().unwrap())).collect();
        files.sort();
        files
    };
    open();
    let first = list();
    assert!(first.len() >= 4, "{first:?}");
    let machine = open();
    assert_eq!(list(), first, "nothing was compiled again");
    let (device, stream) = self::open_on(&machine);
    let v = floats(&device, "v", 3);
    stream.launch(Fill { y: &v, value: 2.0 }.op("test").unwrap()).unwrap();
    assert_eq!(stream.download::<f32>(&v).unwrap().wait().unwrap(), [2.0; 3]);
    fs::remove_dir_all(&folder).unwrap();
}

fn open_on(machine: &Machine) -> (Device, Stream) {
    open(machine, 0, "compute")
}

/// Gates of a graph are events of the card: a host operation behind the record holds the graph, not who waits for it.
#[test]
fn a_record_in_the_middle_of_a_graph_lets_others_go_on() {
    let _turn = card_turn();
    let (device, one) = open(&cuda().machine(), 0, "one");
    let (two, v, seen) = (device.stream("two").unwrap(), floats(&device, "v", 5), floats(&device, "seen", 5));
    let (landed, end) = (device.event("landed"), device.event("end"));
    let (op, begun, go) = super::work::held(Vec::new());
    let exec = captured(&one, || {
        one.launch(Fill { y: &v, value: 5.0 }.op("test").unwrap()).unwrap();
        one.record_external(&landed).unwrap();
        one.launch(op).unwrap();
        one.launch(Fill { y: &v, value: 6.0 }.op("test").unwrap()).unwrap();
    });
    one.launch_graph(&exec.instantiate().unwrap()).unwrap();
    one.record(&end).unwrap();
    two.wait(&landed, Why("test.landed")).unwrap();
    two.launch(Cast { x: &v, y: &seen }.op("test").unwrap()).unwrap();
    assert_eq!(two.download::<f32>(&seen).unwrap().wait().unwrap(), [5.0; 5]);
    begun.recv_timeout(super::drivers::LIMIT).unwrap();
    assert!(landed.is_done() && !end.is_done());
    go.send(()).unwrap();
    assert_eq!(one.download::<f32>(&v).unwrap().wait().unwrap(), [6.0; 5]);
}

/// What operations hold goes when the card has passed them, also when nobody waits.
#[test]
fn memory_goes_back_while_a_stream_is_fed() {
    let _turn = card_turn();
    let (device, stream) = open(&cuda().machine(), 0, "compute");
    let owned = Arc::new(());
    for i in 0..5000 {
        let view = floats(&device, "temp", 100);
        if i % 500 == 0 {
            let owned = owned.clone();
            let use_it = move |_: &mut Args<'_>| {
                let _ = &owned;
                Ok(())
            };
            stream.launch(Op::host("own", "test", vec![Access::write(&view)], use_it)).unwrap();
        }
        stream.launch(Fill { y: &view, value: 1.0 }.op("test").unwrap()).unwrap();
    }
    assert!(device.memory().len() < 2500, "{} temporaries are left", device.memory().len());
    stream.synchronize().unwrap();
    assert_eq!((device.memory().len(), Arc::strong_count(&owned)), (0, 1));
}

/// Operations go a few at a time when the card has passed them; of very many that it passed at once few are left by the
/// next look, which comes within 128 submissions.
#[test]
fn memory_of_a_backlog_goes_back_with_the_next_look() {
    let _turn = card_turn();
    let (device, stream) = open(&cuda().machine(), 0, "compute");
    let (fixed, end) = (floats(&device, "fixed", 100), device.event("end"));
    let (go, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let stand = move |_: &mut Args<'_>| gate.lock().unwrap().recv_timeout(LIMIT).map_err(Into::into);
    stream.launch(Op::host("stand", "test", vec![Access::update(&fixed)], stand)).unwrap();
    // Fewer than a card's queue holds.
    for _ in 0..600 {
        stream.launch(Fill { y: &floats(&device, "temp", 100), value: 1.0 }.op("test").unwrap()).unwrap();
    }
    stream.record(&end).unwrap();
    assert!(device.memory().len() > 600, "{} are held", device.memory().len());
    go.send(()).unwrap();
    let begin = Instant::now();
    while !end.is_done() {
        assert!(begin.elapsed() < LIMIT, "fills are not done in {LIMIT:?}");
        std::thread::yield_now();
    }
    for _ in 0..128 {
        stream.launch(Fill { y: &fixed, value: 1.0 }.op("test").unwrap()).unwrap();
    }
    assert!(device.memory().len() <= 1 + 256, "{} are left", device.memory().len());
    stream.synchronize().unwrap();
    assert_eq!(device.memory().len(), 1);
}
