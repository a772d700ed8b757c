//! Leads a run where a search wants it, and keeps what the search has to know of it.

use std::{
    collections::HashMap,
    sync::Arc,
    thread::{self, ThreadId},
};

use super::{moves::Move, past::Past};
use crate::{device::DeviceInner, queue::Mark};

/// See above.
pub(crate) struct Guide {
    /// By step: which of the moves.
    script: Vec<usize>,
    /// Moves that need not come next, because runs in which they do were made: of the last scripted step until that has
    /// run, then of the next one.
    sleep: Vec<Move>,
    steps: Vec<Asked>,
    redundant: Option<usize>,
    marks: HashMap<usize, (Arc<Mark>, Past)>,
    hosts: HashMap<ThreadId, Past>,
    devices: Vec<Arc<DeviceInner>>,
    left_over: bool,
}

/// A step of a run: a question of the scheduler, and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) moves: Vec<Move>,
    pub(crate) picked: usize,
    /// Earlier steps that the picked move had to wait for, whatever memory it touches. None is named that it could have
    /// gone ahead of; some may be missing.
    pub(crate) past: Past,
    /// Moves that need not be picked here.
    pub(crate) sleep: Vec<Move>,
}

/// What a run has shown.
pub(crate) struct Followed {
    pub(crate) steps: Vec<Asked>,
    /// From this step on it does what another run has done, in another order.
    pub(crate) redundant: Option<usize>,
    /// The program ended before all that it had submitted.
    pub(crate) left_over: bool,
}

impl Guide {
    pub(crate) fn new(script: Vec<usize>, sleep: Vec<Move>) -> Guide {
        Guide {
            script,
            sleep,
            steps: Vec::new(),
            redundant: None,
            marks: HashMap::new(),
            hosts: HashMap::new(),
            devices: Vec::new(),
            left_over: false,
        }
    }

    /// Number of the next step.
    pub(super) fn step(&self) -> usize {
        self.steps.len()
    }

    /// Which of `moves` comes next.
    pub(super) fn pick(&mut self, moves: Vec<Move>) -> usize {
        self.look_for_failures();
        let step = self.step();
        if step >= self.script.len()
            && let Some(last) = self.steps.last()
        {
            let last = &last.moves[last.picked];
            self.sleep.retain(|asleep| asleep.commutes_with(last));
        }
        let asleep = |one: &Move| self.sleep.iter().any(|asleep| asleep.id == one.id);
        let picked = match self.script.get(step) {
            Some(picked) => *picked,
            None => moves.iter().position(|one| !asleep(one)).unwrap_or_else(|| {
                self.redundant.get_or_insert(step);
                0
            }),
        };
        assert!(picked < moves.len(), "a program that is searched must submit the same on each run");
        self.steps.push(Asked { moves, picked, past: Past::default(), sleep: self.sleep.clone() });
        picked
    }

    /// The move that was picked last comes after `past`.
    pub(super) fn comes_after(&mut self, past: Past) {
        self.steps.last_mut().expect("BUG: nothing was picked").past = past;
    }

    /// Failures change what others do without any access to memory.
    fn look_for_failures(&mut self) {
        if self.devices.iter().any(|device| device.failed()) {
            self.mark_last();
        }
    }

    pub(super) fn opened(&mut self, device: &Arc<DeviceInner>) {
        if !self.devices.iter().any(|known| Arc::ptr_eq(known, device)) {
            self.devices.push(device.clone());
        }
    }

    /// A mark is done: `past` comes before all that waits for it.
    pub(super) fn reached(&mut self, mark: &Arc<Mark>, past: Past) {
        self.marks.insert(Arc::as_ptr(mark).addr(), (mark.clone(), past));
    }

    /// What comes before whatever waits for `mark`, as far as it is known.
    pub(super) fn past_of(&self, mark: &Arc<Mark>) -> Past {
        self.marks.get(&Arc::as_ptr(mark).addr()).map_or_else(Past::default, |(_, past)| past.clone())
    }

    /// This thread has waited for `mark`.
    pub(super) fn host_waited(&mut self, mark: &Arc<Mark>) {
        let past = self.past_of(mark);
        self.hosts.entry(thread::current().id()).or_default().join(&past);
    }

    /// What comes before whatever this thread submits now.
    pub(super) fn host_past(&self) -> Past {
        self.hosts.get(&thread::current().id()).cloned().unwrap_or_default()
    }

    /// Something was submitted that does not run, or is brought to its end by a host that drops its stream.
    pub(super) fn leaves_over(&mut self) {
        self.left_over = true;
        self.mark_last();
    }

    fn mark_last(&mut self) {
        if let Some(last) = self.steps.last_mut() {
            last.moves[last.picked].spreads = true;
        }
    }

    /// At the end of the run. What the guide has held of it is let go.
    pub(super) fn take(&mut self) -> Followed {
        self.look_for_failures();
        let Guide { steps, redundant, left_over, .. } = std::mem::replace(self, Guide::new(Vec::new(), Vec::new()));
        Followed { steps, redundant, left_over }
    }
}
