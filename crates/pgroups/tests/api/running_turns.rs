//! The contract of reading and writing parameters, with a publisher that counts what is asked of it.

use std::sync::{
    Arc, Mutex, Weak,
    atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
};

use device::{
    Access, DType, Device, Event, Machine, MemoryKind, Note, Op, Stream, Trace, TraceEvent, View, WaitOutcome,
    ops::Accumulate,
};
use pgroups::{After, Epochs, GradOut, Keep, Landed, Param, Pass, PgError, Publish, Recorder, Turn, Weights, Whole};

use crate::running_support::*;

/// What the publisher publishes: copies `source` to the parameter's value on a stream of its own.
struct Bucket {
    stream: Stream,
    source: View,
    value: View,
}

/// Holds its bucket weakly, as a backend's publisher does.
struct Counting {
    bucket: Weak<Bucket>,
    event: Event,
    written: AtomicU64,
    issued: AtomicU64,
    /// Calls of `issue` that came past the first look.
    slow: AtomicUsize,
    asked: AtomicUsize,
    done: Mutex<Vec<String>>,
    /// The caller has taken over the schedule: `issue` starts nothing.
    hands_off: bool,
}

impl Publish for Counting {
    fn epochs(&self) -> Epochs {
        Epochs { written: self.written.load(SeqCst), issued: self.issued.load(SeqCst) }
    }

    fn issue(&self) -> Result<(), PgError> {
        self.asked.fetch_add(1, SeqCst);
        if self.epochs().is_current() {
            return Ok(());
        }
        self.slow.fetch_add(1, SeqCst);
        let Some(bucket) = self.bucket.upgrade().filter(|_| !self.hands_off) else { return Ok(()) };
        let copy = |args: &mut device::Args<'_>| {
            let (source, value) = (args.read::<f32>(0)?, args.write::<f32>(1)?);
            value.copy_from_slice(source);
            Ok(())
        };
        let accesses = vec![Access::read(&bucket.source), Access::write(&bucket.value)];
        bucket.stream.launch(Op::host("publish", "test", accesses, copy))?;
        bucket.stream.record(&self.event)?;
        self.issued.store(self.written.load(SeqCst), SeqCst);
        Ok(())
    }

    fn event(&self) -> &Event {
        &self.event
    }

    fn done(&self, after: After<'_>) -> Result<(), PgError> {
        let what = match after {
            After::Stream(stream) => stream.name().to_owned(),
            After::Gate(event) => event.name().to_owned(),
        };
        self.done.lock().unwrap().push(what);
        Ok(())
    }
}

#[derive(Default)]
struct Sink(Mutex<Vec<String>>);

impl Landed for Sink {
    fn open(&self, param: &Param, stream: &Stream) -> Result<Keep, PgError> {
        self.0.lock().unwrap().push(format!("open {}@{}", param.name(), stream.name()));
        Ok(self.first_use())
    }

    fn first_use(&self) -> Keep {
        Keep::All
    }

    fn landed(&self, param: &Param, after: After<'_>) -> Result<(), PgError> {
        let After::Stream(stream) = after else { panic!("an eager pass lands on streams") };
        self.0.lock().unwrap().push(format!("{}@{}", param.name(), stream.name()));
        Ok(())
    }
}

/// Writes down every call.
#[derive(Default)]
struct Tape(Vec<String>);

impl Tape {
    fn note(&mut self, what: &str, param: &Param, stream: &Stream) -> Result<(), PgError> {
        self.0.push(format!("{what} {}@{}", param.name(), stream.name()));
        Ok(())
    }
}

impl Recorder for Tape {
    fn read(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        self.note("read", param, stream)
    }
    fn done(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        self.note("done", param, stream)
    }
    fn open(&mut self, param: &Param, stream: &Stream) -> Result<Option<Keep>, PgError> {
        self.note("open", param, stream)?;
        Ok(Some(Keep::All))
    }
    fn landed(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        self.note("landed", param, stream)
    }
    fn hand_over(&mut self, _: std::sync::Arc<dyn pgroups::HandOver>) -> Result<(), PgError> {
        self.0.push("hand over".to_owned());
        Ok(())
    }
}

struct Rig {
    device: Device,
    compute: Stream,
    param: Param,
    bucket: Arc<Bucket>,
    publisher: Arc<Counting>,
    sink: Arc<Sink>,
}

impl Rig {
    /// Values are written as 5 at epoch 1, and not published.
    fn new(machine: &Machine, hands_off: bool) -> Rig {
        let device = machine.device(0).unwrap();
        let (compute, comm) = (device.stream("compute").unwrap(), device.stream("comm").unwrap());
        let view = |label| device.alloc(label, &[4], DType::F32, MemoryKind::Param).unwrap();
        let (source, value) = (view("source"), view("value"));
        comm.upload(&source, vec![5f32; 4]).unwrap();
        let param = Param::new("wte", &value, &view("grad")).unwrap();
        let bucket = Arc::new(Bucket { stream: comm, source, value });
        let publisher = Arc::new(Counting {
            bucket: Arc::downgrade(&bucket),
            event: device.event("published"),
            written: AtomicU64::new(1),
            issued: AtomicU64::new(0),
            slow: AtomicUsize::new(0),
            asked: AtomicUsize::new(0),
            done: Mutex::default(),
            hands_off,
        });
        let sink = Arc::new(Sink::default());
        param.attach(Some(publisher.clone()), Some(sink.clone()));
        Rig { device, compute, param, bucket, publisher, sink }
    }

    fn counts(&self) -> (usize, usize) {
        (self.publisher.asked.load(SeqCst), self.publisher.slow.load(SeqCst))
    }
}

#[test]
fn an_eager_forward_read_sees_what_was_written_last() {
    for machine in machines() {
        let rig = Rig::new(&machine, false);
        for epoch in 1..4u64 {
            let value = Turn::eager(Pass::Forward).read(&rig.param, &rig.compute).unwrap();
            assert_eq!(get::<f32>(&rig.compute, &value).unwrap(), [epoch as f32 + 4.0; 4], "{}", machine.driver());
            // The next write waits for this read, as a release would make it.
            rig.compute.synchronize().unwrap();
            rig.bucket.stream.upload(&rig.bucket.source, vec![epoch as f32 + 5.0; 4]).unwrap();
            rig.publisher.written.fetch_add(1, SeqCst);
        }
    }
}

#[test]
fn the_read_waits_behind_the_publication_under_its_name() {
    // Without the wait, some order reads the old values; with it, none does.
    let read = |seed: u64, drop_wait: bool| {
        let machine = Machine::sim(seed);
        if drop_wait {
            machine.drop_waits(Turn::READ_AFTER_PUBLISH);
        }
        let rig = Rig::new(&machine, false);
        let value = Turn::eager(Pass::Forward).read(&rig.param, &rig.compute).unwrap();
        get::<f32>(&rig.compute, &value).unwrap()[0]
    };
    assert!((0..20).all(|seed| read(seed, false) == 5.0));
    assert!((0..20).any(|seed| read(seed, true) != 5.0));
}

#[test]
fn a_published_parameter_costs_one_look_a_read() {
    let machine = Machine::sim(1);
    let rig = Rig::new(&machine, false);
    machine.trace_start();
    let side = rig.device.stream("side").unwrap();
    for microbatch in 0..4 {
        for stream in [&rig.compute, &side] {
            Turn::eager(Pass::Forward).read(&rig.param, stream).unwrap();
        }
        assert_eq!(rig.counts(), (2 * (microbatch + 1), 1), "past the first look once an epoch");
    }
    let trace = machine.trace_stop();
    let waits = |want: WaitOutcome| {
        let is = |e: &&TraceEvent| matches!(e, TraceEvent::Wait { outcome, .. } if *outcome == want);
        trace.events.iter().filter(is).count()
    };
    // Each of the two streams waits once; after that it is behind the publication already.
    assert_eq!((waits(WaitOutcome::Enforced), waits(WaitOutcome::Elided)), (2, 6));
    let publications = trace.events.iter().filter(|e| matches!(e, TraceEvent::Op { name, .. } if name == "publish"));
    assert_eq!(publications.count(), 1);
}

#[test]
fn a_stale_value_is_refused_with_both_epochs() {
    let machine = Machine::sim(1);
    let rig = Rig::new(&machine, true);
    rig.publisher.written.store(7, SeqCst);
    rig.publisher.issued.store(6, SeqCst);
    let error = Turn::eager(Pass::Forward).read(&rig.param, &rig.compute).unwrap_err();
    assert!(matches!(&error, PgError::Stale { param, written: 7, issued: 6 } if param == "wte"), "{error}");
    // Whoever holds the schedule publishes, and the same read is good.
    rig.bucket.stream.record(&rig.publisher.event).unwrap();
    rig.publisher.issued.store(7, SeqCst);
    Turn::eager(Pass::Forward).read(&rig.param, &rig.compute).unwrap();
    // A publisher whose backend is gone publishes nothing, and nobody reads old values silently.
    let orphan = Rig::new(&Machine::sim(1), false);
    let Rig { bucket, param, compute, .. } = orphan;
    drop(bucket);
    let error = Turn::eager(Pass::Forward).read(&param, &compute).unwrap_err();
    assert!(matches!(error, PgError::Stale { written: 1, issued: 0, .. }), "{error}");
}

#[test]
fn backward_and_recompute_never_issue_and_never_check() {
    let machine = Machine::sim(1);
    let rig = Rig::new(&machine, false);
    for pass in [Pass::Backward, Pass::Recompute] {
        let mut turn = Turn::eager(pass);
        turn.read(&rig.param, &rig.compute).unwrap();
        turn.done(&rig.param, &rig.compute).unwrap();
    }
    assert_eq!(rig.counts(), (0, 0));
    assert_eq!(*rig.publisher.done.lock().unwrap(), ["compute", "compute"], "their releases count like any other");
    // Recompute inside backward, and back.
    let mut turn = Turn::eager(Pass::Backward);
    let back = turn.enter(Pass::Recompute);
    assert_eq!((back, turn.pass()), (Pass::Backward, Pass::Recompute));
    assert_eq!((turn.enter(back), turn.pass()), (Pass::Recompute, Pass::Backward));
}

#[test]
fn a_recorded_pass_tells_the_recorder_and_nobody_else() {
    let machine = Machine::sim(1);
    let rig = Rig::new(&machine, false);
    let mut tape = Tape::default();
    machine.trace_start();
    for pass in [Pass::Forward, Pass::Backward, Pass::Recompute] {
        let mut turn = Turn::recorded(pass, &mut tape);
        turn.read(&rig.param, &rig.compute).unwrap();
        turn.done(&rig.param, &rig.compute).unwrap();
        assert!(matches!(turn.open(&rig.param, &rig.compute).unwrap(), Some(Keep::All)));
        turn.landed(&rig.param, &rig.compute).unwrap();
    }
    let [done, open, landed] = ["done wte@compute", "open wte@compute", "landed wte@compute"];
    assert_eq!(tape.0, ["read wte@compute", done, open, landed, done, open, landed, done, open, landed]);
    assert_eq!(rig.counts(), (0, 0));
    assert!(rig.publisher.done.lock().unwrap().is_empty() && rig.sink.0.lock().unwrap().is_empty());
    assert!(submitted_nothing(&machine.trace_stop()));
    // Also a parameter without a publisher: one may be attached before the replay.
    rig.param.attach(None, None);
    Turn::recorded(Pass::Forward, &mut tape).read(&rig.param, &rig.compute).unwrap();
    assert_eq!(tape.0.len(), 11);
}

/// Names of streams are all there is.
fn submitted_nothing(trace: &Trace) -> bool {
    trace.events.iter().all(|event| matches!(event, TraceEvent::Note { note: Note::Stream { .. }, .. }))
}

#[test]
fn a_parameter_without_a_publisher_costs_nothing() {
    let machine = Machine::sim(1);
    let rig = Rig::new(&machine, true);
    rig.param.attach(None, None);
    machine.trace_start();
    let mut turn = Turn::eager(Pass::Forward);
    assert!(turn.read(&rig.param, &rig.compute).unwrap().same_as(&rig.bucket.value));
    turn.done(&rig.param, &rig.compute).unwrap();
    turn.landed(&rig.param, &rig.compute).unwrap();
    assert_eq!(rig.counts(), (0, 0));
    assert!(submitted_nothing(&machine.trace_stop()));
}

#[test]
fn attaching_again_replaces_and_lets_go() {
    let machine = Machine::sim(1);
    let rig = Rig::new(&machine, false);
    let old = Arc::downgrade(&rig.publisher);
    let next = Rig::new(&Machine::sim(2), false);
    rig.param.attach(Some(next.publisher.clone()), None);
    assert!(rig.param.landed_sink().is_none());
    let attached = rig.param.publisher().expect("one is attached");
    assert_eq!(attached.event().name(), "published");
    let Rig { publisher, param, .. } = rig;
    drop(publisher);
    assert!(old.upgrade().is_none(), "the parameter keeps no replaced publisher alive");
    // Parameters keep the publisher, never what it publishes.
    let bucket = Arc::downgrade(&next.bucket);
    let Rig { bucket: owner, .. } = next;
    drop(owner);
    assert!(bucket.upgrade().is_none() && param.publisher().is_some());
}

#[test]
fn a_publisher_that_fails_is_told_with_its_cause() {
    struct Broken(Event);
    impl Publish for Broken {
        fn epochs(&self) -> Epochs {
            Epochs::default()
        }
        fn issue(&self) -> Result<(), PgError> {
            Err(PgError::backend("ddp", "wte", "bucket 3 has no shard"))
        }
        fn event(&self) -> &Event {
            &self.0
        }
        fn done(&self, _after: After<'_>) -> Result<(), PgError> {
            Ok(())
        }
    }
    let machine = Machine::sim(1);
    let rig = Rig::new(&machine, false);
    rig.param.attach(Some(Arc::new(Broken(rig.device.event("never")))), None);
    let error = Turn::eager(Pass::Forward).read(&rig.param, &rig.compute).unwrap_err();
    assert_eq!(error.chain(), "ddp failed at parameter 'wte': bucket 3 has no shard");
}

#[test]
fn a_publisher_that_never_recorded_its_event_is_found() {
    let machine = Machine::sim(1);
    let rig = Rig::new(&machine, true);
    rig.publisher.issued.store(1, SeqCst);
    let error = Turn::eager(Pass::Forward).read(&rig.param, &rig.compute).unwrap_err();
    assert!(matches!(error.cause(), Some(device::Error::NeverRecorded { .. })), "{}", error.chain());
}

#[test]
fn whole_weights_take_give_back_and_land_through_the_turn() {
    let machine = Machine::sim(1);
    let rig = Rig::new(&machine, false);
    let mut weights = Whole::new(Turn::eager(Pass::Forward));
    let taken = weights.take(&rig.param, &rig.compute).unwrap();
    assert!(taken.same_as(&rig.bucket.value));
    weights.give_back(&rig.param, &rig.compute).unwrap();
    assert_eq!(weights.enter(Pass::Backward), Pass::Forward);
    for _ in 0..2 {
        let grad = weights.grad(&rig.param, &rig.compute).unwrap();
        let (view, into) = grad.target();
        assert!(view.same_as(&rig.param.main_grad()) && matches!(into, Accumulate::Add));
        weights.grad_done(&rig.param, &rig.compute).unwrap();
    }
    assert_eq!(rig.counts(), (1, 1));
    assert_eq!(*rig.publisher.done.lock().unwrap(), ["compute"]);
    let [open, landed] = ["open wte@compute", "wte@compute"];
    assert_eq!(*rig.sink.0.lock().unwrap(), [open, landed, open, landed]);
}

#[test]
fn whoever_waits_for_a_gradient_says_what_a_use_does_with_what_it_holds() {
    struct Flagged(Keep);
    impl Landed for Flagged {
        fn open(&self, _: &Param, _: &Stream) -> Result<Keep, PgError> {
            Ok(self.0.clone())
        }
        fn first_use(&self) -> Keep {
            self.0.clone()
        }
        fn landed(&self, _: &Param, _: After<'_>) -> Result<(), PgError> {
            Ok(())
        }
    }
    let machine = Machine::sim(1);
    let rig = Rig::new(&machine, false);
    let flag = |label| rig.device.alloc(label, &[1], DType::F32, MemoryKind::Other).unwrap();
    let (sinks, callers) = (flag("the sink's"), flag("the caller's"));
    rig.param.attach(None, Some(Arc::new(Flagged(Keep::Times(sinks.clone())))));
    for mut weights in [Whole::new(Turn::eager(Pass::Backward)), Whole::keeping(Turn::eager(Pass::Backward), &callers)]
    {
        let GradOut::Main { keep: Keep::Times(by), .. } = weights.grad(&rig.param, &rig.compute).unwrap() else {
            panic!("the sink has a flag")
        };
        assert!(by.same_as(&sinks));
    }
}

#[test]
fn the_flag_governs_a_parameters_first_contribution_of_a_pass_only() {
    let machine = Machine::dry();
    let device = machine.device(0).unwrap();
    let stream = device.stream("compute").unwrap();
    let view = |label| device.alloc(label, &[1], DType::F32, MemoryKind::Other).unwrap();
    let flag = view("keep");
    let [tied, other] = ["tied", "other"].map(|name| Param::new(name, &view("value"), &view("grad")).unwrap());
    for _microbatch in 0..2 {
        let mut weights = Whole::keeping(Turn::eager(Pass::Backward), &flag);
        let mut first = |param: &Param| match weights.grad(param, &stream).unwrap() {
            GradOut::Main { keep: Keep::Times(by), .. } => by.same_as(&flag),
            GradOut::Main { keep: Keep::All, .. } => false,
            GradOut::Scratch(_) => panic!("whole weights have no scratch"),
        };
        assert_eq!([first(&tied), first(&other), first(&tied), first(&other)], [true, true, false, false]);
    }
    assert!(matches!(GradOut::Scratch(flag.clone()).target().1, Accumulate::Overwrite));
    assert!(matches!(GradOut::Main { grad: flag.clone(), keep: Keep::Times(flag) }.target().1, Accumulate::Keep(_)));
}
