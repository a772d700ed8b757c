//! What a kind of pass does with sharded weights, in order.

use std::fmt;

use pgroups::Pass;

/// A kind of pass: training microbatch, evaluation, generation. Each has a schedule of its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PassKind(pub &'static str);

impl PassKind {
    /// Forward and backward of a microbatch.
    pub const TRAIN: PassKind = PassKind("train");
    /// Forward of an evaluation.
    pub const EVAL: PassKind = PassKind("eval");
    /// Forward of the next token.
    pub const SAMPLE: PassKind = PassKind("sample");
}

impl fmt::Display for PassKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0)
    }
}

/// Number of a sharded weight, in declared order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WeightIndex(pub usize);

/// Number of a use in its schedule: a weight that is used several times has as many.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct UseIndex(pub usize);

/// Number of a gather in its plan: it serves one use, or several that follow each other closely.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GatherIndex(pub usize);

/// Number of a weight gradient in its schedule.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GradIndex(pub usize);

/// One call of a pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// A use of the whole weight begins.
    Take(WeightIndex, Pass),
    /// It ends.
    GiveBack(WeightIndex),
    /// A gradient of the whole weight is about to be written.
    Grad(WeightIndex),
    /// It has been.
    GradDone(WeightIndex),
}

/// A use of a weight. Places are those of its steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Use {
    /// Which weight.
    pub weight: WeightIndex,
    /// In which part of the pass.
    pub pass: Pass,
    /// Place where it begins.
    pub take: usize,
    /// Place where it ends; the last one if it does not.
    pub give_back: usize,
}

/// A weight gradient. Places are those of its steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grad {
    /// Which weight.
    pub weight: WeightIndex,
    /// Place where it may be written.
    pub open: usize,
    /// Place where it has been; the last one if it has not.
    pub done: usize,
}

/// The consumption schedule of a kind of pass: every use of every sharded weight, in order. Pure data, the same on all
/// members of a group.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Schedule {
    steps: Vec<Step>,
    uses: Vec<Use>,
    grads: Vec<Grad>,
}

impl Schedule {
    /// Adds a step.
    pub fn push(&mut self, step: Step) {
        let at = self.steps.len();
        match step {
            Step::Take(weight, pass) => self.uses.push(Use { weight, pass, take: at, give_back: usize::MAX }),
            Step::GiveBack(weight) => {
                let open = |u: &&mut Use| u.weight == weight && u.give_back == usize::MAX;
                if let Some(taken) = self.uses.iter_mut().rev().find(open) {
                    taken.give_back = at;
                }
            }
            Step::Grad(weight) => self.grads.push(Grad { weight, open: at, done: usize::MAX }),
            Step::GradDone(weight) => {
                let open = |g: &&mut Grad| g.weight == weight && g.done == usize::MAX;
                if let Some(opened) = self.grads.iter_mut().rev().find(open) {
                    opened.done = at;
                }
            }
        }
        self.steps.push(step);
    }

    /// All steps.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// All uses, in the order in which they begin.
    #[must_use]
    pub fn uses(&self) -> &[Use] {
        &self.uses
    }

    /// All weight gradients, in the order in which they begin.
    #[must_use]
    pub fn grads(&self) -> &[Grad] {
        &self.grads
    }

    /// Neither uses nor gradients.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The steps in front of place `end`.
    pub(crate) fn prefix(&self, end: usize) -> Schedule {
        let mut prefix = Schedule::default();
        self.steps[..end.min(self.steps.len())].iter().for_each(|step| prefix.push(*step));
        prefix
    }
}

impl FromIterator<Step> for Schedule {
    fn from_iter<I: IntoIterator<Item = Step>>(steps: I) -> Schedule {
        let mut schedule = Schedule::default();
        steps.into_iter().for_each(|step| schedule.push(step));
        schedule
    }
}
