//! What is submitted, waited for and closed. Everything goes to the card at once; items stay with their streams until
//! the card has passed them.

use std::{
    collections::{BTreeSet, HashMap},
    path::PathBuf,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    CudaError, CudaOptions, GraphOnCard, StreamOnCard,
    begin::STANDING,
    card::{Card, lock, open_driver},
    clique::Cliques,
    event::{CardEvent, Point},
    gang::Gangs,
    graph::{self, Unplaced},
    host::{HostCall, Told, run_host},
    memory::DeviceMemory,
    prepare::check_environment,
    requests,
    stream::{Along, Beside, Passed, on_card},
    times::{self, Zeros},
    workers::Workers,
};
use crate::{
    Error, Launch, Op, OpRef,
    cpu::failure,
    device::DeviceInner,
    engine::{Engine, Waited},
    graph::GraphInner,
    launch::LaunchBody,
    queue::{Item, Mark, OpAt, OpBody, StreamInner},
};

/// How long a waiting host looks without pause: about what a short wait takes.
const LOOK: Duration = Duration::from_micros(100);
/// Then it sleeps between looks.
const PAUSE: Duration = Duration::from_micros(50);
/// How often a waiting host asks whether collectives have failed.
const ASK: Duration = Duration::from_millis(20);

pub(crate) struct CudaEngine {
    /// By the order of the options.
    pub(super) cards: Vec<Arc<Card>>,
    /// Where what was compiled and measured is kept.
    pub(super) folder: Option<PathBuf>,
    workers: Arc<Workers>,
    /// Those that are open.
    streams: Mutex<Vec<Weak<StreamInner>>>,
    pub(super) cliques: Arc<Cliques>,
    pub(super) gangs: Mutex<Gangs>,
    /// Ends of launches that met on one card, of each rank the last.
    pub(super) last_met: Mutex<HashMap<u32, Arc<Mark>>>,
    /// Streams whose lines stand at marks, and how many.
    pub(super) standing: Mutex<Vec<Arc<StreamInner>>>,
    pub(super) stand: AtomicUsize,
    pub(super) zeros: Zeros,
}

impl CudaEngine {
    pub(crate) fn open(options: &CudaOptions) -> Result<CudaEngine, CudaError> {
        let have = open_driver()?;
        check_environment()?;
        let numbers: BTreeSet<u32> = options.cards.iter().copied().collect();
        if let Some(asked) = numbers.iter().copied().find(|number| *number >= have) {
            return Err(CudaError::NoCard { asked, have });
        }
        if numbers.is_empty() {
            return Err(CudaError::NoCard { asked: 0, have: 0 });
        }
        let beginnings = Arc::default();
        let opened =
            numbers.iter().map(|number| Card::open(*number, options, &beginnings)).collect::<Result<Vec<_>, _>>()?;
        let by_number = |number: &u32| opened.iter().find(|card| card.ordinal == *number).cloned();
        let cards: Vec<Arc<Card>> = options.cards.iter().filter_map(by_number).collect();
        Ok(CudaEngine {
            cliques: Cliques::new(cards.clone(), options.ctas),
            cards,
            folder: options.kernel_cache.clone(),
            workers: Arc::default(),
            streams: Mutex::default(),
            gangs: Mutex::default(),
            last_met: Mutex::default(),
            standing: Mutex::default(),
            stand: AtomicUsize::new(0),
            zeros: Zeros::default(),
        })
    }

    pub(super) fn card(&self, rank: u32) -> &Arc<Card> {
        &self.cards[rank as usize % self.cards.len()]
    }

    /// The sticky error for what happened outside of an operation.
    fn fail(&self, device: &DeviceInner, what: impl FnOnce() -> String, source: CudaError) -> Error {
        if source.is_fatal() {
            self.break_card(self.card(device.rank));
        }
        // Not the first failure of a device whose streams were on the broken card.
        device.machine.fail(device, Error::Cuda { what: what(), source });
        device.check().expect_err("BUG: a device that has just failed")
    }

    fn open_stream(&self, stream: &Arc<StreamInner>) -> Result<(), CudaError> {
        let card = self.card(stream.device.rank);
        card.bind()?;
        let first = stream.on_card.set(StreamOnCard::new(card)?);
        debug_assert!(first.is_ok(), "BUG: a stream is opened twice");
        let mut streams = lock(&self.streams);
        streams.retain(|known| known.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
        Ok(())
    }

    pub(crate) fn open_on(&self, stream: &Arc<StreamInner>) -> Result<(), Error> {
        let what = || format!("stream '{}' of rank {} cannot be opened", stream.name, stream.device.rank);
        self.open_stream(stream).map_err(|source| self.fail(&stream.device, what, source))
    }

    pub(crate) fn alloc(&self, device: &DeviceInner, label: &str, bytes: usize) -> Result<DeviceMemory, Error> {
        let take = || DeviceMemory::new(self.card(device.rank), bytes, device.machine.options.fresh);
        let memory = take().and_then(|memory| {
            if memory.is_none() {
                // What the card has passed may hold memory that nobody else does.
                self.look(device);
                self.free_spent(self.card(device.rank));
                return take();
            }
            Ok(memory)
        });
        let what = || format!("memory for '{label}' of rank {}", device.rank);
        let memory = memory.map_err(|source| self.fail(device, what, source))?;
        memory.ok_or_else(|| Error::OutOfMemory { label: label.to_owned(), bytes })
    }

    /// Refuses a group that could not communicate.
    pub(crate) fn check_group(&self, members: &[u32]) -> Result<(), CudaError> {
        if members.len() > 1 { self.cliques.check(members) } else { Ok(()) }
    }

    pub(crate) fn check_op(&self, op: &Op) -> Result<(), Error> {
        match &op.launch {
            Launch::Kernel(kernel) if !requests::is_there(kernel) => {
                Err(Error::NoKernel { op: op.name, site: op.site.as_str().to_owned(), driver: "cuda" })
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn instantiate(&self, device: &Arc<DeviceInner>, graph: &Arc<GraphInner>) -> Result<GraphOnCard, Error> {
        let card = self.card(device.rank);
        // What ran once eagerly to be captured will not run so again, and the graph can work where that did.
        self.look(device);
        self.give_up_workspaces(device);
        let made = card.bind().and_then(|()| GraphOnCard::new(card, self, device, graph));
        made.map_err(|source| {
            if source.is_fatal() {
                return self.fail(device, || format!("rank {}", device.rank), source);
            }
            Error::Cuda { what: format!("graph '{}' of rank {} cannot be made", graph.name, device.rank), source }
        })
    }

    pub(super) fn workers(&self) -> &Arc<Workers> {
        &self.workers
    }

    /// Hands back what the card has passed meanwhile, if it is time to look.
    pub(crate) fn push(&self, stream: &Arc<StreamInner>, item: Item) -> Vec<Item> {
        let on = stream_on_card(stream);
        if let Some(item) = on.line.enter(item) {
            self.run_line(stream, item);
        }
        if !on.is_time_to_look() {
            return Vec::new();
        }
        let mut passed = Passed::default();
        on.take_passed(&mut passed);
        self.settle(stream, passed)
    }

    /// Sends `item`, whose turn in its stream it is; the stream keeps it. On a device that has failed, operations are
    /// kept only.
    pub(super) fn put(&self, stream: &Arc<StreamInner>, on: &StreamOnCard, item: Item) {
        let sent = match &item {
            Item::Op(_) if stream.device.failed() => None,
            Item::Launch(Some(launch)) if stream.device.failed() => {
                graph::lose(launch);
                None
            }
            item => self.send(stream, on, item).map_err(|error| self.fail_item(stream, item, error)).ok(),
        };
        if matches!(item, Item::Wait(_)) {
            // The stream is bound to the record by now: whoever records next may find its event free.
            return;
        }
        let mark_next = match sent {
            Some(along) => on.keep(item, along),
            None => on.keep_lost(item),
        };
        if mark_next {
            self.mark(stream);
        }
    }

    fn send(&self, stream: &Arc<StreamInner>, on: &StreamOnCard, item: &Item) -> Result<Beside, CudaError> {
        let card = &on.card;
        card.bind()?;
        match item {
            Item::Op(body) => match &body.op.launch {
                Launch::Kernel(kernel) => {
                    let interval = self.begin_interval(stream, on)?;
                    on.send_kernel(&body.op, kernel, body.seq + 1)?;
                    return Along::timed(interval, on);
                }
                launch => {
                    let interval = match launch {
                        Launch::Upload(_) | Launch::Download(_) => self.begin_interval(stream, on)?,
                        _ => None,
                    };
                    let call = self.host_call(stream, body, card)?;
                    let queued = match launch {
                        Launch::Upload(_) => call.queue_upload(card, on.raw),
                        Launch::Download(landing) => {
                            let own = call.clone();
                            landing.put_off(move || own.land());
                            call.queue_download(card, on.raw)
                        }
                        _ => call.queue(card, on.raw),
                    };
                    match queued.and_then(|()| Along::timed(interval, on)) {
                        Ok(mut along) => {
                            along.get_or_insert_default().host = Some(call);
                            return Ok(along);
                        }
                        Err(error) => {
                            // Some of it may be on its way.
                            std::mem::forget(call);
                            return Err(error);
                        }
                    }
                }
            },
            Item::Record(mark) => record(on, mark)?,
            Item::Wait(mark) => on.wait_for(mark)?,
            Item::Launch(Some(launch)) => return self.send_launch(stream, on, launch).map(|(along, _)| along),
            Item::Joint(_) => unreachable!("BUG: a call that meets nobody"),
            Item::Launch(None) => unreachable!("BUG: this driver was never given one"),
        }
        Ok(None)
    }

    /// The context is current.
    pub(super) fn send_launch(
        &self,
        stream: &StreamInner,
        on: &StreamOnCard,
        launch: &LaunchBody,
    ) -> Result<(Beside, Unplaced), CudaError> {
        let interval = self.begin_interval(stream, on)?;
        let (unplaced, ends) = on_card(launch).launch(on.raw, launch)?;
        let mut along = Along::timed(interval, on)?;
        if !ends.is_empty() {
            along.get_or_insert_default().ends = ends;
        }
        Ok((along, unplaced))
    }

    fn host_call(&self, stream: &StreamInner, body: &OpBody, card: &Arc<Card>) -> Result<Arc<HostCall>, CudaError> {
        let (device, at) = (stream.device.clone(), OpAt::Eager(body.clone()).position());
        // Without what waits for it: a download that nobody waits for goes with its last handle.
        let run = body.op.launch.on_host().expect("BUG: a kernel is no host operation");
        let op = Op::new(body.op.name, body.op.site.clone(), body.op.accesses.clone(), Launch::Host(run.clone()));
        // Copies are timed on the card.
        let told = if matches!(body.op.launch, Launch::Host(_)) { Told::AsItRuns } else { Told::Not };
        let run = move |staged: &_| run_host(&device, (&op, at), staged, told);
        HostCall::new(card, &self.workers, &stream.device, &body.op.accesses, run)
    }

    /// `item` did not get to the card, or not all of it.
    pub(super) fn fail_item(&self, stream: &StreamInner, item: &Item, error: CudaError) {
        match item {
            Item::Record(mark) => mark.lose(),
            Item::Launch(Some(launch)) => graph::lose(launch),
            Item::Op(_) | Item::Wait(_) | Item::Joint(_) | Item::Launch(None) => {}
        }
        let device = &stream.device;
        match item {
            Item::Op(body) if !error.is_fatal() => {
                let op = device.op_ref(&OpAt::Eager(body.clone()));
                device.machine.fail(device, Error::Failed { op, source: Arc::new(error) });
            }
            _ => {
                let what = || format!("stream '{}' of rank {} cannot go on", stream.name, device.rank);
                drop(self.fail(device, what, error));
            }
        }
    }

    /// Tells what kernels refused, and counts what has passed.
    fn settle(&self, stream: &StreamInner, passed: Passed) -> Vec<Item> {
        let device = &stream.device;
        if passed.some {
            device.machine.progress.fetch_add(1, Ordering::Relaxed);
        }
        for (at, interval) in &passed.ran {
            times::tell(stream, &passed.items[*at], interval);
        }
        for (op, error) in passed.refused {
            let op = device.op_ref_of(op.op().name, op.op().site.as_str(), op.position());
            device.machine.fail(device, failure(op, error));
        }
        if let Some(error) = stream_on_card(stream).card.lost()
            && !device.failed()
        {
            drop(self.fail(device, || format!("rank {}", device.rank), error.clone()));
        }
        passed.items
    }

    pub(super) fn open_streams(&self) -> Vec<Arc<StreamInner>> {
        lock(&self.streams).iter().filter_map(Weak::upgrade).collect()
    }

    /// Looks what the card has passed in the streams of `device`. No lock is held.
    fn look(&self, device: &DeviceInner) {
        for stream in self.open_streams().iter().filter(|stream| std::ptr::eq(&*stream.device, device)) {
            let mut passed = Passed::default();
            stream_on_card(stream).take_all_passed(&mut passed);
            drop(self.settle(stream, passed));
        }
    }

    /// Streams of all ranks on `card` let go what only passed kernels hold.
    fn free_spent(&self, card: &Arc<Card>) {
        for on in self.open_streams().iter().map(|stream| stream_on_card(stream)) {
            if Arc::ptr_eq(&on.card, card) {
                drop(on.take_spent());
            }
        }
    }

    /// Some kernel broke the context: every device on the card fails, with the operations that had begun.
    fn break_card(&self, card: &Arc<Card>) {
        let Some(source) = card.lost() else { return };
        let streams = self.open_streams();
        let streams: Vec<_> = streams.iter().filter(|s| Arc::ptr_eq(&stream_on_card(s).card, card)).collect();
        let mut begun: Vec<OpRef> = Vec::new();
        let mut items = Vec::new();
        for stream in &streams {
            let (op, sent) = stream_on_card(stream).take_broken();
            begun.extend(op.map(|op| stream.device.op_ref(&op)));
            items.extend(sent);
        }
        let error = match &begun[..] {
            [op] => Error::Failed { op: op.clone(), source: Arc::new(source.clone()) },
            several => {
                let begun = several.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                Error::CardLost { begun, source: source.clone() }
            }
        };
        for stream in &streams {
            stream.device.machine.fail(&stream.device, error.clone());
        }
        for item in &items {
            match item {
                Item::Launch(Some(launch)) => drop(launch.finish()),
                Item::Record(mark) => drop(mark.complete()),
                _ => {}
            }
        }
    }

    pub(crate) fn wait_host(&self, device: &DeviceInner, mark: &Mark) -> Waited {
        let (limit, progress) = (device.machine.options.timeout, &device.machine.progress);
        let begin = Instant::now();
        let (mut seen, mut since) = (progress.load(Ordering::Relaxed), begin);
        let mut looked = begin;
        while !mark.is_done() {
            if begin.elapsed() < LOOK {
                thread::yield_now();
                continue;
            }
            thread::sleep(PAUSE);
            self.look(device);
            if looked.elapsed() >= ASK {
                self.ask_collectives();
                looked = Instant::now();
            }
            let now = progress.load(Ordering::Relaxed);
            if now != seen || self.cliques.makes_some() {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() >= limit {
                return Waited::NothingMoved;
            }
        }
        self.look(device);
        Waited::Done
    }

    /// The stream was dropped: what is on the card runs, and this waits for it, as long as a host may wait. What waits
    /// for ranks that have not come is taken back.
    pub(crate) fn close(&self, stream: &Arc<StreamInner>) {
        if stream.on_card.get().is_none() {
            return;
        }
        // A host operation that owns the last handle of its stream would wait for itself.
        let own = stream.clone();
        let later = Box::new(move || {
            if let Engine::Cuda(cuda) = &own.device.machine.engine {
                cuda.run_out(&own);
            }
        });
        if let Err(_on_no_worker) = self.workers.after_this_job(later) {
            self.run_out(stream);
        }
    }

    fn run_out(&self, stream: &Arc<StreamInner>) {
        let on = stream_on_card(stream);
        self.take_back(stream);
        let end = Arc::new(Mark::new());
        drop(self.push(stream, Item::Record(end.clone())));
        let (timeout, begin) = (stream.device.machine.options.timeout, Instant::now());
        // Whoever gave a communicator up has waited for as long already.
        let limit = if self.cliques.some_stand() { timeout.min(STANDING) } else { timeout };
        drop(on.take_spent());
        while on.has_operations() && on.card.lost().is_none() && begin.elapsed() < limit {
            let mut passed = Passed::default();
            on.take_all_passed(&mut passed);
            drop(self.settle(stream, passed));
            if !end.is_done() {
                thread::sleep(PAUSE);
            }
        }
    }
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        self.workers.close();
    }
}

pub(super) fn stream_on_card(stream: &StreamInner) -> &StreamOnCard {
    stream.on_card.get().expect("BUG: a stream that was never opened on its card")
}

/// Records `mark` behind what was sent to the stream.
pub(super) fn record(on: &StreamOnCard, mark: &Mark) -> Result<(), CudaError> {
    mark.put_on_card(Point::Event(Arc::new(CardEvent::record(&on.card, on.raw)?)));
    Ok(())
}
