//! The runners of a model.

use std::{collections::BTreeMap, fmt, mem};

use super::{
    call::{CacheKey, CallName, ForwardCall, GradMode, GraphUnit, RunnerIndex},
    error::{OpenCall, RunnerError, Unfit, WhyUnfit},
    pool::{Pool, Sharing},
    state::State,
};
use crate::schedule::{Direction, MicrobatchIndex};

/// All runners of one model on one rank.
///
/// A caller asks with [`forward`](Runners::forward) which runner to use, runs or replays it, and says
/// [`backward`](Runners::backward) before that runner's backward; [`end_pass`](Runners::end_pass) when all microbatches
/// are through; [`create`](Runners::create) once, between two passes.
#[derive(Debug)]
pub struct Runners<R, S> {
    sharing: Sharing,
    phase: Phase,
    /// Since the last clearing.
    runners: Vec<Runner<R, S>>,
    /// Runners made before that: indices are never used twice.
    cleared: usize,
    pools: BTreeMap<GraphUnit, Pool>,
    record: Vec<Recorded>,
    pass: u64,
}

#[derive(Debug)]
struct Runner<R, S> {
    handle: R,
    unit: GraphUnit,
    signature: S,
    grad: GradMode,
    state: State,
    backward: Backward,
}

/// Whether a runner's backward has run before the graphs were created.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Backward {
    Never,
    Recorded,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Recording,
    Created,
}

/// The first forward or the first backward of a runner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Recorded {
    /// The runner.
    pub runner: RunnerIndex,
    /// Its part of the model.
    pub unit: GraphUnit,
    /// The microbatch that asked first.
    pub microbatch: MicrobatchIndex,
    /// [`Direction::Forward`] or [`Direction::Backward`].
    pub direction: Direction,
}

/// What a call of [`Runners::create`] found to do.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Creation {
    /// It captured this many graphs.
    Captured(usize),
    /// Nothing was recorded; recording goes on.
    NothingRecorded,
    /// An earlier call has captured all.
    AlreadyCreated,
}

impl<R, S: Eq + fmt::Debug> Runners<R, S> {
    /// No runner yet.
    #[must_use]
    pub fn new(sharing: Sharing) -> Runners<R, S> {
        let (runners, pools, record) = (Vec::new(), BTreeMap::new(), Vec::new());
        Runners { sharing, phase: Phase::Recording, runners, cleared: 0, pools, record, pass: 0 }
    }

    /// Whether microbatches share runners.
    #[must_use]
    pub fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// How many runners there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.runners.len()
    }

    /// There is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runners.is_empty()
    }

    /// What a runner was made with; none for a runner that was cleared.
    #[must_use]
    pub fn get(&self, runner: RunnerIndex) -> Option<&R> {
        let place = runner.0.checked_sub(self.cleared)?;
        self.runners.get(place).map(|runner| &runner.handle)
    }

    /// First forwards and backwards, in the order they ran.
    #[must_use]
    pub fn recorded(&self) -> &[Recorded] {
        &self.record
    }

    /// The runner of a forward; `make` makes one if none fits and the graphs are not created yet.
    ///
    /// Shared: that of the call's key, else the first of the part that is ready, has the signature and brings
    /// gradients if the call wants them. One a microbatch: the next in turn, of the calls with or of those without
    /// gradients; a round begins again after the last.
    ///
    /// # Errors
    /// [`RunnerError::NoneLeft`] or [`RunnerError::UnknownKey`] if none fits and none may be made;
    /// [`RunnerError::OutOfTurn`] if the only one awaits its backward; [`RunnerError::OtherSignature`],
    /// [`RunnerError::OtherGradMode`], [`RunnerError::OtherOrder`] if the only one is made for other calls;
    /// [`RunnerError::KeyAcrossStages`]. No runner has changed then.
    pub fn forward(&mut self, call: ForwardCall<S>, make: impl FnOnce() -> R) -> Result<RunnerIndex, RunnerError> {
        let name = self.name(call.microbatch);
        let found = match (self.sharing, call.key) {
            (Sharing::AcrossMicrobatches, Some(key)) => self.keyed(&call, name, key)?,
            (Sharing::AcrossMicrobatches, None) => self.first_fit(&call, name)?,
            (Sharing::PerMicrobatch { .. }, None) => self.next_in_turn(&call, name)?,
            (Sharing::PerMicrobatch { stages }, Some(key)) => {
                return Err(RunnerError::KeyAcrossStages { unit: call.unit, call: name, key, stages });
            }
        };
        let Some(index) = found else { return Ok(self.add(call, name, make())) };
        let runner = &mut self.runners[index.0 - self.cleared];
        let moved = runner.state.forward(name, call.grad);
        runner.state = moved.map_err(|source| RunnerError::OutOfTurn { unit: call.unit, runner: index, source })?;
        if let Sharing::PerMicrobatch { .. } = self.sharing {
            self.pools.entry(call.unit).or_default().ring(call.grad).turn += 1;
        }
        Ok(index)
    }

    /// Says that a runner goes backward now.
    ///
    /// # Errors
    /// [`RunnerError::OutOfTurn`] unless its last call was this microbatch's forward with gradients;
    /// [`RunnerError::NotRecorded`] for the first backward of a runner after creation; [`RunnerError::UnknownRunner`].
    pub fn backward(&mut self, runner: RunnerIndex, microbatch: MicrobatchIndex) -> Result<(), RunnerError> {
        let (call, index) = (self.name(microbatch), runner);
        let unknown =
            RunnerError::UnknownRunner { runner, first: self.cleared, end: self.cleared + self.runners.len() };
        let place = runner.0.checked_sub(self.cleared);
        let runner = place.and_then(|place| self.runners.get_mut(place)).ok_or(unknown)?;
        let unit = runner.unit;
        let moved = runner.state.backward(call);
        let moved = moved.map_err(|source| RunnerError::OutOfTurn { unit, runner: index, source })?;
        if runner.backward == Backward::Never {
            if self.phase == Phase::Created {
                return Err(RunnerError::NotRecorded { unit, runner: index, call });
            }
            runner.backward = Backward::Recorded;
            self.record.push(Recorded { runner: index, unit, microbatch, direction: Direction::Backward });
        }
        runner.state = moved;
        Ok(())
    }

    /// Captures every recorded forward and backward, in recorded order. `capture` gets the runner's handle.
    ///
    /// # Errors
    /// What `capture` failed with. Nothing counts as created then, and the record is kept: a later call captures all
    /// of it from the start.
    pub fn create<E>(&mut self, mut capture: impl FnMut(&mut R, &Recorded) -> Result<(), E>) -> Result<Creation, E> {
        if self.phase == Phase::Created {
            return Ok(Creation::AlreadyCreated);
        }
        if self.record.is_empty() {
            return Ok(Creation::NothingRecorded);
        }
        for recorded in &self.record {
            capture(&mut self.runners[recorded.runner.0 - self.cleared].handle, recorded)?;
        }
        self.phase = Phase::Created;
        Ok(Creation::Captured(self.record.len()))
    }

    /// Ends a pass: what comes next begins with the first microbatch again.
    ///
    /// # Errors
    /// [`RunnerError::PassUnfinished`] with every forward that still waits for its backward and every round that is
    /// not through. They are given up: the next pass begins clean in any case.
    pub fn end_pass(&mut self) -> Result<(), RunnerError> {
        let mut open = Vec::new();
        for (index, runner) in self.runners.iter_mut().enumerate() {
            if let State::Awaiting(forward) = runner.state {
                open.push(OpenCall::Backward { unit: runner.unit, runner: RunnerIndex(self.cleared + index), forward });
                runner.state = State::given_up(forward);
            }
        }
        for (&unit, pool) in &mut self.pools {
            for grad in [GradMode::Off, GradMode::On] {
                let ring = pool.ring(grad);
                if let Some(done) = ring.end_pass() {
                    open.push(OpenCall::Turns { unit, grad, done, recorded: ring.runners.len() });
                }
            }
        }
        let pass = self.pass;
        self.pass += 1;
        if open.is_empty() { Ok(()) } else { Err(RunnerError::PassUnfinished { pass, open }) }
    }

    /// Gives back every runner, captured or only recorded, in the order of making; recording begins again.
    #[must_use = "graphs live until their runners are dropped"]
    pub fn clear(&mut self) -> Vec<R> {
        self.phase = Phase::Recording;
        self.record.clear();
        self.pools.clear();
        self.cleared += self.runners.len();
        mem::take(&mut self.runners).into_iter().map(|runner| runner.handle).collect()
    }

    fn name(&self, microbatch: MicrobatchIndex) -> CallName {
        CallName { pass: self.pass, microbatch }
    }

    /// Pools hold only runners made since the last clearing.
    fn runner(&self, index: RunnerIndex) -> &Runner<R, S> {
        &self.runners[index.0 - self.cleared]
    }

    fn keyed(&self, call: &ForwardCall<S>, name: CallName, key: CacheKey) -> Result<Option<RunnerIndex>, RunnerError> {
        let found = self.pools.get(&call.unit).and_then(|pool| pool.keyed.get(&key));
        let Some(&index) = found else {
            let missing = RunnerError::UnknownKey { unit: call.unit, call: name, key };
            return if self.phase == Phase::Created { Err(missing) } else { Ok(None) };
        };
        self.made_for(call, name, index)?;
        let made_for = self.runner(index).grad;
        if made_for < call.grad {
            let (unit, grad) = (call.unit, call.grad);
            return Err(RunnerError::OtherGradMode { unit, call: name, runner: index, made_for, grad });
        }
        Ok(Some(index))
    }

    fn first_fit(&self, call: &ForwardCall<S>, name: CallName) -> Result<Option<RunnerIndex>, RunnerError> {
        let shared = self.pools.get(&call.unit).map_or(&[][..], |pool| &pool.shared);
        let fits = |index: &&RunnerIndex| self.runner(**index).fits(call);
        let found = shared.iter().find(fits).copied();
        if found.is_some() || self.phase == Phase::Recording {
            return Ok(found);
        }
        let unfit = shared.iter().map(|&runner| Unfit { runner, why: self.runner(runner).why_unfit(call) });
        let (unit, grad, signature) = (call.unit, call.grad, format!("{:?}", call.signature));
        Err(RunnerError::NoneLeft { unit, call: name, signature, grad, unfit: unfit.collect() })
    }

    fn next_in_turn(&mut self, call: &ForwardCall<S>, name: CallName) -> Result<Option<RunnerIndex>, RunnerError> {
        let phase = self.phase;
        let ring = self.pools.entry(call.unit).or_default().ring(call.grad);
        if ring.turn == ring.runners.len() {
            if phase == Phase::Recording {
                return Ok(None);
            }
            ring.turn = 0;
        }
        let Some(&(turn, runner)) = ring.runners.get(ring.turn) else {
            let (unit, grad, signature) = (call.unit, call.grad, format!("{:?}", call.signature));
            return Err(RunnerError::NoneLeft { unit, call: name, signature, grad, unfit: Vec::new() });
        };
        if turn != call.microbatch {
            return Err(RunnerError::OtherOrder { unit: call.unit, call: name, turn, runner });
        }
        self.made_for(call, name, runner)?;
        Ok(Some(runner))
    }

    fn made_for(&self, call: &ForwardCall<S>, name: CallName, runner: RunnerIndex) -> Result<(), RunnerError> {
        let signature = &self.runner(runner).signature;
        if *signature == call.signature {
            return Ok(());
        }
        let (made_for, signature) = (format!("{signature:?}"), format!("{:?}", call.signature));
        Err(RunnerError::OtherSignature { unit: call.unit, call: name, runner, made_for, signature })
    }

    fn add(&mut self, call: ForwardCall<S>, name: CallName, handle: R) -> RunnerIndex {
        let ForwardCall { unit, microbatch, signature, grad, key } = call;
        let index = RunnerIndex(self.cleared + self.runners.len());
        let pool = self.pools.entry(unit).or_default();
        match (self.sharing, key) {
            (Sharing::AcrossMicrobatches, Some(key)) => drop(pool.keyed.insert(key, index)),
            (Sharing::AcrossMicrobatches, None) => pool.shared.push(index),
            (Sharing::PerMicrobatch { .. }, _) => {
                let ring = pool.ring(grad);
                ring.runners.push((microbatch, index));
                ring.turn += 1;
            }
        }
        let state = State::NEW.forward(name, grad).expect("BUG: a new runner is ready");
        self.runners.push(Runner { handle, unit, signature, grad, state, backward: Backward::Never });
        self.record.push(Recorded { runner: index, unit, microbatch, direction: Direction::Forward });
        index
    }
}

impl<R, S: Eq + fmt::Debug> Runner<R, S> {
    fn fits(&self, call: &ForwardCall<S>) -> bool {
        self.state.is_ready() && self.grad >= call.grad && self.signature == call.signature
    }

    /// Of one that does not fit.
    fn why_unfit(&self, call: &ForwardCall<S>) -> WhyUnfit {
        if !self.state.is_ready() {
            WhyUnfit::Awaits
        } else if self.grad < call.grad {
            WhyUnfit::NoGradients
        } else {
            WhyUnfit::MadeFor(format!("{:?}", self.signature))
        }
    }
}
