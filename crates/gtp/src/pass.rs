//! Weights as a pass sees them.

use std::sync::Arc;

use device::{Stream, View};
use pgroups::{GradOut, Keep, Param, Pass, PgError, TensorParallel, Turn, Weights};

use crate::{GtpError, core::Core};

/// Hands weights to the blocks of a model for a pass, or for a part of it: sharded ones are gathered ahead of their
/// uses and their gradients reduced to shards, all others are whole where they are used.
///
/// A pass that does what its plan says gathers ahead; one that does something else is right as well, gathers on demand
/// from there on, and is planned anew. What is captured must do what is planned.
pub struct Sharded<'c> {
    core: &'c Arc<Core>,
    turn: Turn<'c>,
    /// Where it submits; none before the first use of a sharded weight.
    compute: Option<Stream>,
}

impl<'c> Sharded<'c> {
    pub(crate) fn new(core: &'c Arc<Core>, turn: Turn<'c>) -> Sharded<'c> {
        Sharded { core, turn, compute: None }
    }

    /// Ends the pass, or this part of it. A captured part ends behind its gathers and reductions, and says what it
    /// leaves.
    ///
    /// # Errors
    /// [`GtpError::StillOpen`]; the device's and the recorder's.
    pub fn finish(mut self) -> Result<(), GtpError> {
        self.core.leave(&mut self.turn, self.compute.as_ref())
    }

    fn at(&mut self, stream: &Stream) {
        if self.compute.is_none() {
            self.compute = Some(stream.clone());
        }
    }
}

fn told(param: &Param, error: GtpError) -> PgError {
    match error {
        GtpError::Groups(error) => error,
        GtpError::Device(error) => error.into(),
        error => PgError::backend("gtp", param.name(), error),
    }
}

impl Weights for Sharded<'_> {
    fn take(&mut self, param: &Param, stream: &Stream) -> Result<View, PgError> {
        let Some(&weight) = self.core.by_param.get(&param.id()) else { return self.turn.read(param, stream) };
        self.at(stream);
        self.core.take(weight, &mut self.turn, stream).map_err(|error| told(param, error))
    }

    fn give_back(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        let Some(&weight) = self.core.by_param.get(&param.id()) else { return self.turn.done(param, stream) };
        self.core.give_back(weight, stream).map_err(|error| told(param, error))
    }

    fn grad(&mut self, param: &Param, stream: &Stream) -> Result<GradOut, PgError> {
        let Some(&weight) = self.core.by_param.get(&param.id()) else {
            let keep = self.turn.open(param, stream)?.unwrap_or(Keep::All);
            return Ok(GradOut::Main { grad: param.main_grad(), keep });
        };
        self.at(stream);
        let grad = self.core.grad(weight, &self.turn, stream).map_err(|error| told(param, error))?;
        Ok(GradOut::Scratch(grad))
    }

    fn grad_done(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        let Some(&weight) = self.core.by_param.get(&param.id()) else { return self.turn.landed(param, stream) };
        self.core.grad_done(weight, &mut self.turn, stream).map_err(|error| told(param, error))
    }

    fn enter(&mut self, pass: Pass) -> Pass {
        self.turn.enter(pass)
    }

    fn tensor(&self) -> Option<&TensorParallel> {
        self.core.tensor.as_ref()
    }
}
