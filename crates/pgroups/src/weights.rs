//! The seam between models and layouts: how a block gets its weights and where their gradients go.

use std::collections::HashMap;

use device::{Stream, View, ops::Accumulate};

use crate::{
    error::PgError,
    param::{Param, ParamId},
    tensor::TensorParallel,
    turn::{Pass, Turn},
};

/// Where the weight gradient of one use goes.
#[derive(Clone, Debug)]
pub enum GradOut {
    /// Overwritten; whoever gave it reduces it and adds it to the main gradient.
    Scratch(View),
    /// Added to the main gradient.
    Main {
        /// The main gradient.
        grad: View,
        /// What happens to what it holds.
        keep: Keep,
    },
}

/// What a main gradient holds before a use adds to it.
#[derive(Clone, Debug)]
pub enum Keep {
    /// Earlier contributions: they stay.
    All,
    /// Times this f32 scalar, read on the device when the operation runs: 0 in the first microbatch of a step, else
    /// 1. So no zeroing is needed, and a captured graph reads it anew at each replay.
    Times(View),
}

impl GradOut {
    /// As a kernel takes it: where to, and what to do with what is there.
    #[must_use]
    pub fn target(&self) -> (&View, Accumulate<'_>) {
        match self {
            GradOut::Scratch(grad) => (grad, Accumulate::Overwrite),
            GradOut::Main { grad, keep: Keep::All } => (grad, Accumulate::Add),
            GradOut::Main { grad, keep: Keep::Times(flag) } => (grad, Accumulate::Keep(flag)),
        }
    }
}

/// Hands weights to the blocks of a model for one pass: whole, or gathered on demand, or in a way of the user's own.
///
/// Around each use: `take`, submit what reads the weight, `give_back`. Around each weight gradient: `grad`, submit
/// what writes it, `grad_done`.
pub trait Weights {
    /// The weight, readable by what is submitted to `stream` until it is given back.
    ///
    /// # Errors
    /// [`PgError::Stale`] and others of [`Turn::read`]; the layout's own through [`PgError::backend`].
    fn take(&mut self, param: &Param, stream: &Stream) -> Result<View, PgError>;

    /// The use ends with what was submitted to `stream` so far.
    ///
    /// # Errors
    /// As [`Weights::take`].
    fn give_back(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError>;

    /// Where the gradient of this use goes, writable by what is submitted to `stream` from now on.
    ///
    /// # Errors
    /// As [`Weights::take`].
    fn grad(&mut self, param: &Param, stream: &Stream) -> Result<GradOut, PgError>;

    /// The gradient has been written by what was submitted to `stream` so far.
    ///
    /// # Errors
    /// As [`Weights::take`].
    fn grad_done(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError>;

    /// Changes the pass (recompute inside backward); returns the one to go back to.
    fn enter(&mut self, pass: Pass) -> Pass;

    /// The tensor group that the weights are cut over, whose members compute with their parts together. None, or a
    /// group of one: nothing is cut, and layers submit what they would without a group.
    fn tensor(&self) -> Option<&TensorParallel> {
        None
    }
}

/// Weights that every rank holds as it computes with them: nothing is gathered, gradients go straight to `main_grad`,
/// as whoever waits for them says ([`Landed::open`](crate::Landed::open)).
pub struct Whole<'c> {
    turn: Turn<'c>,
    first: First,
    tensor: Option<TensorParallel>,
}

/// What a parameter's first contribution of the pass does with what its gradient holds if nobody waits for it.
enum First {
    Adds,
    /// Parameters that had theirs: a tied embedding has two uses, and the second must not wipe out the first.
    Keeps {
        flag: View,
        had: HashMap<ParamId, Param>,
    },
}

impl<'c> Whole<'c> {
    /// Every contribution is added where nobody waits for the gradient; whoever begins a step has set it to zero.
    #[must_use]
    pub fn new(turn: Turn<'c>) -> Whole<'c> {
        Whole { turn, first: First::Adds, tensor: None }
    }

    /// Where nobody waits for the gradient, the first contribution of the pass to each parameter multiplies what is
    /// there by `flag`, f32 `[1]` on the device: 0 in the first microbatch of a step, else 1. A parameter without a use
    /// in the first microbatch has to be set to zero.
    #[must_use]
    pub fn keeping(turn: Turn<'c>, flag: &View) -> Whole<'c> {
        Whole { turn, first: First::Keeps { flag: flag.clone(), had: HashMap::new() }, tensor: None }
    }

    /// The weights are this rank's parts of a tensor group's.
    #[must_use]
    pub fn over(self, tensor: &TensorParallel) -> Whole<'c> {
        Whole { tensor: Some(tensor.clone()), ..self }
    }
}

impl Weights for Whole<'_> {
    fn take(&mut self, param: &Param, stream: &Stream) -> Result<View, PgError> {
        self.turn.read(param, stream)
    }

    fn give_back(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        self.turn.done(param, stream)
    }

    fn grad(&mut self, param: &Param, stream: &Stream) -> Result<GradOut, PgError> {
        let keep = match (self.turn.open(param, stream)?, &mut self.first) {
            (Some(keep), _) => keep,
            (None, First::Adds) => Keep::All,
            (None, First::Keeps { flag, had }) => {
                let is_first = had.insert(param.id(), param.clone()).is_none();
                if is_first { Keep::Times(flag.clone()) } else { Keep::All }
            }
        };
        Ok(GradOut::Main { grad: param.main_grad(), keep })
    }

    fn grad_done(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        self.turn.landed(param, stream)
    }

    fn enter(&mut self, pass: Pass) -> Pass {
        self.turn.enter(pass)
    }

    fn tensor(&self) -> Option<&TensorParallel> {
        self.tensor.as_ref()
    }
}
