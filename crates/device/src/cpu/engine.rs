//! Worker threads that run whatever stands at the head of some stream.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    exec::{self, Crew},
    tiles::TileJob,
};
use crate::{
    Error, OpError,
    device::DeviceInner,
    engine::Waited,
    handoff::{Ready, Work},
    meeting::{Arrival, Met},
    stream::{Item, Mark, StreamInner},
};

/// How long a dropped stream waits while nothing moves, before its rank is taken to be going.
const GRACE: Duration = Duration::from_millis(100);

/// The worker pool.
pub(crate) struct CpuEngine {
    pool: Arc<Pool>,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

/// What workers share.
struct Pool {
    ready: Ready<Arc<StreamInner>, Arc<TileJob>>,
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

    pub(crate) fn push(&self, stream: &Arc<StreamInner>, item: Item) {
        if stream.inbox.push(item) {
            self.pool.ready.push(stream.clone());
        }
    }

    pub(crate) fn resume(&self, stream: &Arc<StreamInner>) {
        stream.at_joint.store(false, Ordering::Release);
        self.pool.ready.push(stream.clone());
    }

    pub(crate) fn wait_host(&self, device: &DeviceInner, mark: &Mark) -> Waited {
        let limit = device.machine.options.timeout;
        wait(mark, limit, &device.machine.progress)
    }

    pub(crate) fn close(&self, stream: &Arc<StreamInner>) {
        // An operation may own the last handle of a stream, and is dropped by a worker: it must not wait for itself.
        let me = thread::current().id();
        let workers = self.workers.lock().unwrap_or_else(|poison| poison.into_inner());
        let on_worker = workers.iter().any(|w| w.thread().id() == me);
        drop(workers);
        if !on_worker && !stream.inbox.is_idle() {
            let (mark, device) = (stream.mark(), &stream.device);
            let machine = &device.machine;
            let limit = machine.options.timeout;
            let waited = wait(&mark, limit.min(GRACE), &machine.progress);
            if matches!(waited, Waited::NothingMoved) && device.waits_for_peers() {
                // It stands behind a stream that waits for a peer, who may be waiting for this rank: leaving frees both.
                let (rank, stream) = (device.rank, stream.name.clone());
                machine.fail(device, Error::Cancelled { rank, stream, queued: 1 });
            }
            wait(&mark, limit, &machine.progress);
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
            match self.ready.take() {
                Work::Stream(stream) => self.run(&stream),
                Work::Help(job) => job.work(),
                Work::Close => return,
            }
        }
    }

    /// Runs a stream until it is empty or must wait.
    fn run(&self, stream: &Arc<StreamInner>) {
        let mut lane = stream.lane.lock().unwrap_or_else(|poison| poison.into_inner());
        let lane = &mut *lane;
        let progress = &stream.device.machine.progress;
        loop {
            while let Some(item) = lane.batch.get(lane.at) {
                lane.at += 1;
                match item {
                    Item::Op(body) => {
                        let start = stream.device.machine.tracer.now();
                        exec::run_op(stream, body, self, true);
                        progress.fetch_add(1, Ordering::Relaxed);
                        if start > 0 {
                            let end = stream.device.machine.tracer.now();
                            exec::trace_run(&stream.device, (body.stream, body.seq, body.op.name), start, end);
                        }
                    }
                    Item::Record(mark) => mark.complete().into_iter().for_each(|s| self.ready.push(s)),
                    Item::Wait(mark) => {
                        if mark.park(stream.clone()).is_ok() {
                            return;
                        }
                    }
                    Item::Joint(_) if exec::cancelled(stream) => {}
                    Item::Joint(body) => {
                        stream.at_joint.store(true, Ordering::Release);
                        if !self.arrive(Arrival { stream: stream.clone(), body: body.clone() }) {
                            return;
                        }
                    }
                }
            }
            lane.at = 0;
            if !stream.inbox.refill(&mut lane.batch) {
                return;
            }
        }
    }

    /// True when the stream goes on at once; otherwise whoever completes the meeting resumes it.
    fn arrive(&self, arrival: Arrival) -> bool {
        let (stream, body) = (arrival.stream.clone(), arrival.body.clone());
        let machine = &stream.device.machine;
        let arrivals = match body.meeting.arrive(arrival) {
            Met::Parked => return false,
            Met::Ready(arrivals) => {
                let start = machine.tracer.now();
                exec::run_joint(&arrivals, self, true);
                if start > 0 {
                    let end = machine.tracer.now();
                    for a in &arrivals {
                        exec::trace_run(&a.stream.device, (a.body.stream, a.body.seq, a.body.name()), start, end);
                    }
                }
                arrivals
            }
            Met::Disagree { arrivals, asked } => {
                exec::disagree(&arrivals, asked);
                arrivals
            }
            Met::Gone { arrival, rank, how } => {
                machine.poison(&[arrival], rank, &how);
                stream.at_joint.store(false, Ordering::Release);
                return true;
            }
        };
        for other in &arrivals {
            other.stream.at_joint.store(false, Ordering::Release);
            if !Arc::ptr_eq(&other.stream, &stream) {
                self.ready.push(other.stream.clone());
            }
        }
        true
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
