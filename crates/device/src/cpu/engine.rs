//! Worker threads that run whatever stands at the head of some stream.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, TryLockError,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    exec::{self, Crew},
    tiles::{TileJob, catch},
};
use crate::{
    OpError,
    device::DeviceInner,
    engine::Waited,
    handoff::{Ready, Work},
    joint::{Arrival, JointRef},
    meeting::Met,
    queue::{Item, Lane, Mark, OpAt, PartAt, Stage, StreamInner, Waiter},
};

/// A batch below this is a sign that the worker is faster than whoever submits.
const SMALL_BATCH: usize = 16;

/// Turns of a spin loop that a worker then leaves the inbox alone for: about a microsecond.
const LINGER: usize = if cfg!(miri) { 0 } else { 40 };

/// A worker that has had a stream for so long leaves it between two operations if others wait: they may be short, and
/// somebody may wait for what they tell.
const SLICE: Duration = Duration::from_micros(500);

/// The worker pool.
pub(crate) struct CpuEngine {
    pool: Arc<Pool>,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

/// What workers share.
pub(super) struct Pool {
    pub(super) ready: Ready<Waiter, Arc<TileJob>>,
    helpers: usize,
}

impl CpuEngine {
    pub(crate) fn start(workers: usize) -> Self {
        let pool = Arc::new(Pool { ready: Ready::new(), helpers: workers - 1 });
        let spawn = |i: usize| {
            let pool = pool.clone();
            let name = format!("cpu-worker-{i}");
            thread::Builder::new().name(name).spawn(move || pool.work()).expect("BUG: the host refuses a thread")
        };
        let workers = (0..workers).map(spawn).collect();
        CpuEngine { pool, workers: Mutex::new(workers) }
    }

    pub(crate) fn push(&self, stream: &Arc<StreamInner>, item: Item) -> Vec<Item> {
        let pushed = stream.inbox.push(item);
        if pushed.was_idle {
            self.pool.ready.push(Waiter::Stream(stream.clone()));
        }
        pushed.spent
    }

    pub(crate) fn resume(&self, arrival: &Arrival) {
        self.pool.resume(arrival);
    }

    pub(crate) fn wait_host(&self, device: &DeviceInner, mark: &Mark) -> Waited {
        let limit = device.machine.options.timeout;
        wait(mark, limit, &device.machine.progress)
    }

    pub(crate) fn close(&self, stream: &Arc<StreamInner>) {
        // An operation may own the last handle of a stream, and is dropped by a worker, perhaps by the one that runs
        // this very stream: it must not wait. Whoever runs the stream sees that it was dropped.
        let me = thread::current().id();
        let workers = self.workers.lock().unwrap_or_else(|poison| poison.into_inner());
        let on_worker = workers.iter().any(|w| w.thread().id() == me);
        drop(workers);
        let (limit, begin) = (stream.device.machine.options.timeout, Instant::now());
        let mut end = None;
        while !self.pool.end_idle(stream) && !on_worker && begin.elapsed() < limit {
            let end: &Arc<Mark> = end.get_or_insert_with(|| {
                let mark = Arc::new(Mark::new());
                stream.inbox.free(self.push(stream, Item::Record(mark.clone())));
                mark
            });
            // Looks again now and then: the stream may have parked just before it could see that it was dropped.
            if end.wait_host(Duration::from_millis(10)) {
                return;
            }
        }
    }
}

/// Waits until `mark` is done, or nothing has completed anywhere for `limit`.
fn wait(mark: &Mark, limit: Duration, progress: &AtomicU64) -> Waited {
    let mut seen = progress.load(Ordering::Relaxed);
    let mut since = Instant::now();
    loop {
        if mark.wait_host(limit.saturating_sub(since.elapsed()).min(Duration::from_millis(200))) {
            return Waited::Done;
        }
        let now = progress.load(Ordering::Relaxed);
        if now != seen {
            (seen, since) = (now, Instant::now());
        } else if since.elapsed() >= limit {
            return Waited::NothingMoved;
        }
    }
}

impl Drop for CpuEngine {
    fn drop(&mut self) {
        self.pool.ready.close();
        let me = thread::current().id();
        let workers = self.workers.get_mut().unwrap_or_else(|poison| poison.into_inner());
        for worker in workers.drain(..).filter(|w| w.thread().id() != me) {
            if worker.join().is_err() {
                tracing::error!("BUG: a worker panicked");
            }
        }
    }
}

impl Pool {
    fn work(&self) {
        loop {
            let work = self.ready.take();
            if matches!(work, Work::Close) {
                return;
            }
            // Operations are caught where they run; what they own can still panic when it goes, here with the last
            // reference to its stream, and the worker has others to serve.
            let ended = catch(|| {
                match work {
                    Work::Stream(Waiter::Stream(stream)) => self.run(&stream),
                    Work::Stream(Waiter::Part(part)) => self.resume_part(part),
                    Work::Help(job) => job.work(),
                    Work::Close => {}
                }
                Ok(())
            });
            if let Err(panic) = ended {
                tracing::error!(panic = %panic, "cpu.catch_panic");
            }
        }
    }

    /// Runs a stream until it is empty, must wait, or has been run for long while others wait for a worker.
    fn run(&self, stream: &Arc<StreamInner>) {
        let begin = Instant::now();
        let mut lane = stream.lane.lock().unwrap_or_else(|poison| poison.into_inner());
        let lane = &mut *lane;
        // Whoever gave the stream back has ended it.
        lane.launch = None;
        let progress = &stream.device.machine.progress;
        loop {
            while lane.at < lane.batch.len() {
                if stream.is_dropped() && self.throw_away(stream, lane, 0) {
                    break;
                }
                let item = &mut lane.batch[lane.at];
                lane.at += 1;
                match item {
                    Item::Op(_) => {
                        // Taken out and put back: the submitter counts the handles, in its core's cache.
                        let Item::Op(body) = std::mem::replace(item, Item::Launch(None)) else { unreachable!() };
                        let start = stream.device.machine.tracer.now();
                        let op = OpAt::Eager(body);
                        exec::run_op(&stream.device, &op, self, true, || {
                            if start > 0 {
                                let end = stream.device.machine.tracer.now();
                                exec::trace_run(&stream.device, op.position(), op.op().name, start, end);
                            }
                        });
                        progress.fetch_add(1, Ordering::Relaxed);
                        if let OpAt::Eager(body) = op {
                            *item = Item::Op(body);
                        }
                        if self.ready.may_wait() && begin.elapsed() >= SLICE && self.ready.has_streams() {
                            self.ready.push(Waiter::Stream(stream.clone()));
                            return;
                        }
                    }
                    Item::Record(mark) => mark.complete().into_iter().for_each(|s| self.ready.push(s)),
                    Item::Wait(mark) => {
                        if mark.park(Waiter::Stream(stream.clone())).is_ok() {
                            return;
                        }
                    }
                    Item::Joint(call) => {
                        let joint = JointRef::Call(call.clone());
                        if !self.arrive(Arrival { stream: stream.clone(), joint }) {
                            return;
                        }
                    }
                    Item::Launch(launch) => {
                        let launch = launch.take().expect("BUG: a launch that has begun begins again");
                        lane.launch = Some(launch.clone());
                        if !self.launch(stream, &launch) {
                            return;
                        }
                        lane.launch = None;
                    }
                }
            }
            lane.at = 0;
            if lane.batch.len() < SMALL_BATCH {
                // A submitter at work would meet this worker at the inbox for every single operation.
                (0..LINGER).for_each(|_| std::hint::spin_loop());
            }
            if !stream.inbox.refill(&mut lane.batch) {
                return;
            }
        }
    }

    /// Ends a dropped stream unless something of it runs. True when it has ended.
    fn end_idle(&self, stream: &Arc<StreamInner>) -> bool {
        let mut lane: MutexGuard<'_, Lane> = match stream.lane.try_lock() {
            Ok(lane) => lane,
            Err(TryLockError::Poisoned(poison)) => poison.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if lane.launch.is_some() {
            self.end_launch(stream, &mut lane);
            return false;
        }
        let mut taken_back = 0;
        if stream.at_joint.load(Ordering::Acquire) {
            let Some(Item::Joint(call)) = lane.at.checked_sub(1).map(|at| &lane.batch[at]) else {
                unreachable!("BUG: stream '{}' is at no joint operation", stream.name)
            };
            if JointRef::Call(call.clone()).withdraw().is_none() {
                // All have come: it runs, or has run and the stream is about to go on.
                return false;
            }
            stream.at_joint.store(false, Ordering::Release);
            taken_back = 1;
        }
        let mut ended = Vec::new();
        if self.throw_away(stream, &mut lane, taken_back) {
            ended = std::mem::take(&mut lane.batch);
            lane.at = 0;
        }
        if taken_back > 0 {
            // The meeting owned the stream; a worker will find it empty and make it idle.
            self.ready.push(Waiter::Stream(stream.clone()));
        }
        // Operations may own handles, whose drop comes back here: not under the lock.
        drop(lane);
        drop(ended);
        true
    }

    /// Throws away what is queued in a dropped stream if operations are among it: marks complete, the rest stays in
    /// the batch, done with.
    pub(super) fn throw_away(&self, stream: &StreamInner, lane: &mut Lane, taken_back: usize) -> bool {
        lane.batch.append(&mut stream.inbox.drain());
        let queued = &lane.batch[lane.at..];
        if !stream.throw_away(queued, taken_back) {
            return false;
        }
        for item in queued {
            item.give_up().into_iter().for_each(|waiter| self.ready.push(waiter));
        }
        lane.at = lane.batch.len();
        true
    }

    /// True when whoever arrives goes on at once; otherwise whoever completes the meeting resumes it.
    pub(super) fn arrive(&self, arrival: Arrival) -> bool {
        let (device, member) = (arrival.stream.device.clone(), arrival.joint.body().member);
        let meeting = arrival.joint.body().meeting.clone();
        arrival.at_joint().store(true, Ordering::Release);
        let arrivals = match meeting.arrive(arrival) {
            Met::Parked => return false,
            Met::Ready(arrivals) => {
                let start = device.machine.tracer.now();
                let ran = exec::run_joint(&arrivals, self);
                if ran && start > 0 {
                    let end = device.machine.tracer.now();
                    for a in &arrivals {
                        exec::trace_run(&a.stream.device, a.joint.position(), a.joint.body().name(), start, end);
                    }
                }
                arrivals
            }
            Met::Disagree { arrivals, asked } => {
                exec::disagree(&arrivals, asked);
                arrivals
            }
            Met::Gone { arrivals, rank, how } => {
                device.machine.poison(&arrivals, rank, &how);
                arrivals
            }
        };
        for other in &arrivals {
            if other.joint.body().member == member {
                other.at_joint().store(false, Ordering::Release);
            } else {
                self.resume(other);
            }
        }
        true
    }

    fn resume(&self, arrival: &Arrival) {
        arrival.at_joint().store(false, Ordering::Release);
        let stream = arrival.stream.clone();
        self.ready.push(match &arrival.joint {
            JointRef::Call(_) => Waiter::Stream(stream),
            JointRef::Node(launch, node) => {
                let (launch, part) = (launch.clone(), launch.exec.part_of(*node));
                Waiter::Part(PartAt { launch, stream, part, stage: Stage::Met })
            }
        });
    }
}

impl Crew for Pool {
    fn run(&self, job: TileJob) -> Result<(), OpError> {
        if self.helpers == 0 {
            job.work();
            return job.finish();
        }
        let job = Arc::new(job);
        self.ready.ask_help(&job, self.helpers.min(job.count() - 1));
        job.work();
        self.ready.end_help(|other| Arc::ptr_eq(other, &job));
        job.finish()
    }
}
