//! Threads that run host operations, as many as run at the same time.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex},
    thread::{self, ThreadId},
};

use super::card::lock;
use crate::cpu::catch;

pub(super) type Job = Box<dyn FnOnce() + Send>;

/// A worker for each host operation that runs, so that none waits behind another one that blocks.
#[derive(Default)]
pub(super) struct Workers {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    idle: usize,
    threads: Vec<ThreadId>,
    /// What jobs left to be done behind them, because it waits for them.
    after: Vec<Job>,
    closed: bool,
}

impl Workers {
    /// Leaves a job to a thread. Called from the driver's own threads: it does not block and calls no CUDA.
    pub(super) fn submit(self: &Arc<Self>, job: Job) {
        let mut state = lock(&self.state);
        state.jobs.push_back(job);
        if state.jobs.len() <= state.idle {
            self.wake.notify_one();
            return;
        }
        let (workers, number) = (self.clone(), state.threads.len());
        let spawned = thread::Builder::new().name(format!("cuda-host-{number}")).spawn(move || workers.work());
        match spawned {
            Ok(thread) => state.threads.push(thread.thread().id()),
            Err(error) => tracing::error!(%error, "cuda.spawn_worker"),
        }
    }

    /// Leaves `job` for the time when the job that calls this is over. `Err` gives it back to a thread that runs none.
    pub(super) fn after_this_job(&self, job: Job) -> Result<(), Job> {
        let mut state = lock(&self.state);
        if !state.threads.contains(&thread::current().id()) {
            return Err(job);
        }
        state.after.push(job);
        Ok(())
    }

    fn work(&self) {
        let mut state = lock(&self.state);
        loop {
            let job = state.jobs.pop_front().or_else(|| state.after.pop());
            if let Some(job) = job {
                drop(state);
                // Operations are caught where they run; what they own can still panic when it goes.
                if let Err(panic) = catch(|| {
                    job();
                    Ok(())
                }) {
                    tracing::error!(panic = %panic, "cuda.catch_panic");
                }
                state = lock(&self.state);
                continue;
            }
            if state.closed {
                return;
            }
            state.idle += 1;
            state = self.wake.wait(state).unwrap_or_else(|poison| poison.into_inner());
            state.idle -= 1;
        }
    }

    /// Threads end when they have nothing to do.
    pub(super) fn close(&self) {
        lock(&self.state).closed = true;
        self.wake.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn jobs_that_wait_for_each_other_all_run() {
        let workers = Arc::new(Workers::default());
        let (to, from): (Vec<_>, Vec<_>) = (0..5).map(|_| mpsc::channel::<u32>()).unzip();
        let (done, all_done) = mpsc::channel();
        for (i, from) in from.into_iter().enumerate() {
            let (next, done) = (to.get(i + 1).cloned(), done.clone());
            workers.submit(Box::new(move || {
                let got = from.recv_timeout(LIMIT).unwrap();
                next.map_or_else(|| done.send(got).unwrap(), |next| next.send(got + 1).unwrap());
            }));
        }
        to[0].send(1).unwrap();
        assert_eq!(all_done.recv_timeout(LIMIT), Ok(5));
        workers.close();
    }

    #[test]
    fn what_is_left_for_later_runs_behind_the_job_that_left_it() {
        let workers = Arc::new(Workers::default());
        let (told, tell) = mpsc::channel();
        assert!(workers.after_this_job(Box::new(|| ())).is_err(), "this thread runs no job");
        let own = workers.clone();
        workers.submit(Box::new(move || {
            let later = told.clone();
            assert!(own.after_this_job(Box::new(move || later.send("later").unwrap())).is_ok());
            told.send("job").unwrap();
        }));
        assert_eq!(tell.recv_timeout(LIMIT), Ok("job"));
        assert_eq!(tell.recv_timeout(LIMIT), Ok("later"));
        workers.close();
    }
}
