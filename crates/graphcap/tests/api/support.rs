//! A publisher, and whoever waits for gradients, that say what is asked of them: on one rank, with real values.

use std::{
    error::Error as StdError,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use device::{
    Access, DType, Device, Element, Event, Fresh, Machine, MemoryKind, Op, Options, Stream, Trace, TraceEvent,
    TraceNodeKind, View, Why,
    ops::{Accumulate, Cast},
};
use graphcap::{CaptureScope, GateMode, Graph, GraphConfig, GraphError, GraphSet, Scope};
use pgroups::{After, Epochs, Keep, Landed, Param, Pass, PgError, Publish, Quiet, Turn, Weights, Whole};

pub(crate) type Caught = Box<dyn StdError + Send + Sync>;

pub(crate) const MODES: [GateMode; 2] = [GateMode::BeforeReplay, GateMode::InGraph];

/// Elements of everything.
pub(crate) const NUMEL: usize = 4;

/// Gives up after seconds without progress, so that no test hangs; fresh memory holds NaN.
pub(crate) fn options() -> Options {
    Options { timeout: Duration::from_secs(10), fresh: Fresh::Poisoned }
}

pub(crate) fn cpu() -> Machine {
    Machine::cpu_with(2, options()).unwrap()
}

pub(crate) fn sim(seed: u64) -> Machine {
    Machine::sim_with(seed, options())
}

/// The first card, if the tests were built for one.
pub(crate) fn cards() -> Vec<Machine> {
    crate::cards::cards(device::cuda::CudaOptions::default(), options())
}

pub(crate) fn machines() -> Vec<Machine> {
    [cpu(), sim(1), sim(2), sim(3)].into_iter().chain(cards()).collect()
}

/// What the host was told, in order.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn say(&self, what: String) {
        self.0.lock().unwrap().push(what);
    }

    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

fn name_of(after: After<'_>) -> String {
    match after {
        After::Stream(stream) => stream.name().to_owned(),
        After::Gate(event) => event.name().to_owned(),
    }
}

/// Everything that others leave behind: an event each.
#[derive(Default)]
struct Crowd(Mutex<Vec<Event>>);

impl Crowd {
    fn note(&self, after: After<'_>) -> Result<(), device::Error> {
        let event = match after {
            After::Gate(gate) => gate.clone(),
            After::Stream(stream) => {
                let event = stream.device().event("crowd");
                stream.record(&event)?;
                event
            }
        };
        self.0.lock().unwrap().push(event);
        Ok(())
    }

    fn wait(&self, stream: &Stream, why: Why) -> Result<(), device::Error> {
        self.0.lock().unwrap().iter().try_for_each(|event| stream.wait(event, why))
    }
}

/// Publishes by copying what was written to where readers look.
pub(crate) struct Bucket {
    name: String,
    pub(crate) comm: Stream,
    /// Written, and read.
    pub(crate) memory: Vec<(View, View)>,
    written: Event,
    published: Event,
    epochs: [AtomicU64; 2],
    quiet: Quiet,
    /// It has no quiet flag: asked every time.
    pub(crate) always_asked: AtomicBool,
    /// The caller has taken over the schedule: `issue` starts nothing.
    pub(crate) hands_off: AtomicBool,
    pub(crate) asked: AtomicUsize,
    releases: Crowd,
    log: Log,
}

impl Publish for Bucket {
    fn epochs(&self) -> Epochs {
        Epochs { written: self.epochs[0].load(SeqCst), issued: self.epochs[1].load(SeqCst) }
    }

    fn issue(&self) -> Result<(), PgError> {
        self.asked.fetch_add(1, SeqCst);
        if self.epochs().is_current() || self.hands_off.load(SeqCst) {
            return Ok(());
        }
        self.log.say(format!("issue {}", self.name));
        self.comm.wait(&self.written, Why("test.gather_after_write"))?;
        for (source, value) in &self.memory {
            self.comm.launch(Cast { x: source, y: value }.op(format!("publish {}", self.name))?)?;
        }
        self.comm.record(&self.published)?;
        self.epochs[1].store(self.epochs().written, SeqCst);
        self.quiet.set(true);
        Ok(())
    }

    fn quiet(&self) -> Option<Quiet> {
        (!self.always_asked.load(SeqCst)).then(|| self.quiet.clone())
    }

    fn event(&self) -> &Event {
        &self.published
    }

    fn done(&self, after: After<'_>) -> Result<(), PgError> {
        self.log.say(format!("done {} {}", self.name, name_of(after)));
        Ok(self.releases.note(after)?)
    }
}

impl Bucket {
    /// Written and issued.
    pub(crate) fn account(&self) -> [u64; 2] {
        let Epochs { written, issued } = self.epochs();
        [written, issued]
    }

    pub(crate) fn set_account(&self, account: [u64; 2]) {
        self.epochs.iter().zip(account).for_each(|(epoch, to)| epoch.store(to, SeqCst));
        self.quiet.set(self.epochs().is_current());
    }

    /// All that others wait for.
    pub(crate) fn events(&self) -> Vec<Event> {
        let releases = self.releases.0.lock().unwrap();
        releases.iter().chain([&self.written, &self.published]).cloned().collect()
    }

    /// What is written depends on `sum`, behind what `reduce` has.
    pub(crate) fn update(&self, optimizer: &Stream, reduce: &Stream, sum: &View) {
        order(reduce, optimizer, "test.step_after_reduce").unwrap();
        self.releases.wait(optimizer, Why("test.write_after_read")).unwrap();
        optimizer.wait(&self.published, Why("test.write_after_publish")).unwrap();
        for (source, _) in &self.memory {
            optimizer.launch(fold(sum, source)).unwrap();
        }
        optimizer.record(&self.written).unwrap();
        self.epochs[0].fetch_add(1, SeqCst);
        self.quiet.set(false);
    }

    /// Writes `value` plus the parameter's place everywhere, behind all reads so far.
    pub(crate) fn write(&self, optimizer: &Stream, value: f32) {
        self.releases.wait(optimizer, Why("test.write_after_read")).unwrap();
        optimizer.wait(&self.published, Why("test.write_after_publish")).unwrap();
        for (at, (source, _)) in self.memory.iter().enumerate() {
            optimizer.upload(source, vec![value + 0.5 * at as f32; NUMEL]).unwrap();
        }
        optimizer.record(&self.written).unwrap();
        self.epochs[0].fetch_add(1, SeqCst);
        self.quiet.set(false);
    }
}

/// Waits for gradients: adds them all up in `sum` when asked to.
pub(crate) struct Sink {
    pub(crate) flag: View,
    flag_set: Event,
    free: Event,
    landed: Crowd,
    log: Log,
}

impl Sink {
    /// Free from the beginning; the flag is 0 for the first microbatch.
    pub(crate) fn new(stream: &Stream, log: &Log) -> Sink {
        let flag = floats(&stream.device(), "flag", 1);
        stream.upload(&flag, vec![0.0f32]).unwrap();
        let [flag_set, free] = ["flag set", "free"].map(|name| stream.device().event(name));
        stream.record(&flag_set).unwrap();
        stream.record(&free).unwrap();
        Sink { flag, flag_set, free, landed: Crowd::default(), log: log.clone() }
    }

    /// The next microbatches add.
    pub(crate) fn set_flag(&self, stream: &Stream, value: f32) {
        self.landed.wait(stream, Why("test.flag_after_landed")).unwrap();
        stream.upload(&self.flag, vec![value]).unwrap();
        stream.record(&self.flag_set).unwrap();
    }

    /// `sum = grad` behind everything that has landed.
    pub(crate) fn reduce(&self, on: &Stream, grad: &View, sum: &View) {
        self.landed.wait(on, Why("test.reduce_after_landed")).unwrap();
        on.launch(Cast { x: grad, y: sum }.op("reduce").unwrap()).unwrap();
        on.record(&self.free).unwrap();
    }
}

impl Sink {
    /// All that others wait for.
    pub(crate) fn events(&self) -> Vec<Event> {
        let landed = self.landed.0.lock().unwrap();
        landed.iter().chain([&self.flag_set, &self.free]).cloned().collect()
    }
}

impl Landed for Sink {
    fn open(&self, param: &Param, stream: &Stream) -> Result<Keep, PgError> {
        self.log.say(format!("open {} {}", param.name(), stream.name()));
        stream.wait(&self.free, Why("test.grad_after_free"))?;
        stream.wait(&self.flag_set, Why("test.grad_after_flag"))?;
        self.landed.wait(stream, Why("test.grad_after_landed"))?;
        Ok(self.first_use())
    }

    fn first_use(&self) -> Keep {
        Keep::Times(self.flag.clone())
    }

    fn landed(&self, param: &Param, after: After<'_>) -> Result<(), PgError> {
        self.log.say(format!("landed {} {}", param.name(), name_of(after)));
        Ok(self.landed.note(after)?)
    }
}

/// One rank with parameters in buckets.
pub(crate) struct Rig {
    pub(crate) machine: Machine,
    pub(crate) device: Device,
    pub(crate) compute: Stream,
    pub(crate) side: Stream,
    pub(crate) optimizer: Stream,
    pub(crate) buckets: Vec<Arc<Bucket>>,
    pub(crate) sinks: Vec<Arc<Sink>>,
    pub(crate) params: Vec<Param>,
    pub(crate) out: View,
    pub(crate) log: Log,
}

impl Rig {
    /// Bucket `i` holds so many parameters, `w0`, `w1`, ... through all of them. Written once and not published: the
    /// values of bucket `i` are `i + 1`.
    pub(crate) fn new(machine: &Machine, sizes: &[usize]) -> Rig {
        let device = machine.device(0).unwrap();
        let [compute, side, optimizer] = ["compute", "side", "optimizer"].map(|name| device.stream(name).unwrap());
        let log = Log::default();
        let out = floats(&device, "out", NUMEL);
        compute.upload(&out, vec![1f32; NUMEL]).unwrap();
        let (mut buckets, mut sinks, mut params) = (Vec::new(), Vec::new(), Vec::new());
        for (i, &size) in sizes.iter().enumerate() {
            let first = params.len();
            let memory: Vec<(View, View)> = (first..first + size)
                .map(|at| (floats(&device, "source", NUMEL), floats(&device, &format!("w{at}"), NUMEL)))
                .collect();
            let bucket = Arc::new(bucket(&device, &format!("b{i}"), memory.clone(), &log));
            bucket.write(&optimizer, (i + 1) as f32);
            for (at, (_, value)) in memory.iter().enumerate() {
                let grad = floats(&device, "grad", NUMEL);
                let param = Param::new(&format!("w{}", first + at), value, &grad).unwrap();
                let sink = Arc::new(Sink::new(&compute, &log));
                param.attach(Some(bucket.clone()), Some(sink.clone()));
                params.push(param);
                sinks.push(sink);
            }
            buckets.push(bucket);
        }
        let machine = machine.clone();
        Rig { machine, device, compute, side, optimizer, buckets, sinks, params, out, log }
    }

    pub(crate) fn set(&self, mode: GateMode) -> GraphSet {
        self.set_of(GraphConfig { gates: mode, ..GraphConfig::new(Scope::Microbatch) })
    }

    pub(crate) fn set_of(&self, config: GraphConfig) -> GraphSet {
        GraphSet::new(&self.compute, config).unwrap()
    }

    /// A graph that reads these parameters in forward, one after the other.
    pub(crate) fn reading(&self, set: &mut GraphSet, name: &str, params: &[usize]) -> Graph {
        let body = |scope: &mut CaptureScope<'_>| {
            params.iter().try_for_each(|&i| self.fold(&mut scope.turn(Pass::Forward), i, &self.compute))
        };
        set.capture(name, &self.compute, body).unwrap().0
    }

    /// Reads a parameter into `out`, in a way that tells orders and values apart.
    pub(crate) fn fold(&self, turn: &mut Turn<'_>, param: usize, on: &Stream) -> Result<(), Caught> {
        self.fold_into(turn, param, on, &self.out)
    }

    pub(crate) fn fold_into(&self, turn: &mut Turn<'_>, param: usize, on: &Stream, out: &View) -> Result<(), Caught> {
        let param = &self.params[param];
        let value = turn.read(param, on)?;
        on.launch(fold(&value, out))?;
        Ok(turn.done(param, on)?)
    }

    /// Adds `value` to the gradient of a parameter.
    pub(crate) fn contribute(&self, turn: Turn<'_>, param: usize, on: &Stream, value: f32) -> Result<(), Caught> {
        let mut weights = Whole::new(turn);
        let grad = weights.grad(&self.params[param], on)?;
        let (into, how) = grad.target();
        on.launch(add(into, how, value))?;
        Ok(weights.grad_done(&self.params[param], on)?)
    }

    /// `out` in the end.
    pub(crate) fn result(&self) -> Vec<f32> {
        get(&self.compute, &self.out)
    }

    /// Reads w0 and w1 in turns, and writes 20, 21, ... to w1 in between.
    pub(crate) fn eagerly_changing(machine: &Machine, rounds: usize) -> Vec<f32> {
        let rig = Rig::new(machine, &[1, 1]);
        for round in 0..rounds {
            for read in [0, 1] {
                rig.fold(&mut Turn::eager(Pass::Forward), read, &rig.compute).unwrap();
            }
            rig.buckets[1].write(&rig.optimizer, 20.0 + round as f32);
        }
        rig.result()
    }

    /// The same reads eagerly, on another rig of the same kind.
    pub(crate) fn eagerly(machine: &Machine, sizes: &[usize], reads: &[usize]) -> Vec<f32> {
        let rig = Rig::new(machine, sizes);
        for &read in reads {
            rig.fold(&mut Turn::eager(Pass::Forward), read, &rig.compute).unwrap();
        }
        rig.result()
    }
}

/// Waits on `to` for what is on `from` now.
pub(crate) fn order(from: &Stream, to: &Stream, why: &'static str) -> Result<(), device::Error> {
    let event = from.device().event(why);
    from.record(&event)?;
    to.wait(&event, Why(why))
}

pub(crate) fn bucket(device: &Device, name: &str, memory: Vec<(View, View)>, log: &Log) -> Bucket {
    let comm = device.stream(&format!("comm.{name}")).unwrap();
    let (written, published) = (device.event(&format!("{name}.written")), device.event(&format!("{name}.published")));
    comm.record(&written).unwrap();
    comm.record(&published).unwrap();
    Bucket {
        name: name.to_owned(),
        comm,
        memory,
        written,
        published,
        epochs: [AtomicU64::new(0), AtomicU64::new(0)],
        quiet: Quiet::new(true),
        always_asked: AtomicBool::new(false),
        hands_off: AtomicBool::new(false),
        asked: AtomicUsize::new(0),
        releases: Crowd::default(),
        log: log.clone(),
    }
}

pub(crate) fn floats(device: &Device, label: &str, n: usize) -> View {
    device.alloc(label, &[n], DType::F32, MemoryKind::Other).unwrap()
}

pub(crate) fn get<T: Element>(stream: &Stream, view: &View) -> Vec<T> {
    stream.download::<T>(view).unwrap().wait().unwrap()
}

/// `out = (3 out + value) % 8191`: exact in f32 for halves, and no two of them commute.
pub(crate) fn fold(value: &View, out: &View) -> Op {
    Op::host("fold", value.label().to_owned(), vec![Access::read(value), Access::update(out)], |args| {
        let value = args.read::<f32>(0)?;
        args.write::<f32>(1)?.iter_mut().zip(value).for_each(|(out, value)| *out = (3.0 * *out + value) % 8191.0);
        Ok(())
    })
}

/// Adds into a gradient, as kernels do.
pub(crate) fn add(grad: &View, how: Accumulate<'_>, value: f32) -> Op {
    let mut accesses = vec![Access::update(grad)];
    let overwrite = matches!(how, Accumulate::Overwrite);
    if let Accumulate::Keep(flag) = how {
        accesses.push(Access::read(flag));
    }
    Op::host("add", "test", accesses, move |args| {
        let keep = if args.len() > 1 { args.read::<f32>(1)?[0] } else { 1.0 };
        let kept = |old: f32| if overwrite || keep == 0.0 { 0.0 } else { keep * old };
        args.write::<f32>(0)?.iter_mut().for_each(|g| *g = kept(*g) + value);
        Ok(())
    })
}

/// What a graph's nodes are, for short: names of operations, `wait E`, `record E`.
pub(crate) fn nodes(graph: &Graph) -> Vec<String> {
    let captured = graph.captured().unwrap();
    let name = |what: &TraceNodeKind| match what {
        TraceNodeKind::Op { name, .. } => name.to_string(),
        TraceNodeKind::Joint { group, .. } => format!("joint {group}"),
        TraceNodeKind::Wait { event, .. } => format!("wait {event}"),
        TraceNodeKind::Record { event } => format!("record {event}"),
    };
    captured.trace().nodes.iter().map(|node| name(&node.what)).collect()
}

/// What was submitted, for short: `site` of operations, `launch G`.
pub(crate) fn submitted(trace: &Trace) -> Vec<String> {
    let name = |event: &TraceEvent| match event {
        TraceEvent::Op { name, site, .. } => Some(format!("{name} {site}")),
        TraceEvent::Joint { group, .. } => Some(format!("joint {group}")),
        TraceEvent::Launch { graph, .. } => Some(format!("launch {}", graph.name)),
        _ => None,
    };
    trace.events.iter().filter_map(name).collect()
}

/// What is behind a crate's own error.
pub(crate) fn pg(error: &GraphError) -> &PgError {
    match error {
        GraphError::Groups(error) => error,
        other => panic!("not of the groups: {other}"),
    }
}
