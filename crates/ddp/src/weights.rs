//! Weights for a model's blocks, with gradients that land in buckets.

use std::sync::Arc;

use device::{Stream, View};
use pgroups::{GradOut, Keep, Param, Pass, PgError, Turn, Weights};

use crate::core::Core;

/// Weights that every replica holds whole: read behind their publication, given back with a release, gradients added
/// to their buckets in order. For eager passes.
///
/// A captured pass takes [`Whole::keeping`](pgroups::Whole::keeping) with [`Ddp::keep`](crate::Ddp::keep): it waits
/// for nothing outside its graph, whose gates do.
pub struct ReplicatedWeights<'c> {
    turn: Turn<'c>,
    core: Arc<Core>,
}

impl<'c> ReplicatedWeights<'c> {
    pub(crate) fn new(turn: Turn<'c>, core: Arc<Core>) -> ReplicatedWeights<'c> {
        ReplicatedWeights { turn, core }
    }
}

impl Weights for ReplicatedWeights<'_> {
    fn take(&mut self, param: &Param, stream: &Stream) -> Result<View, PgError> {
        self.turn.read(param, stream)
    }

    fn give_back(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        self.turn.done(param, stream)
    }

    fn grad(&mut self, param: &Param, stream: &Stream) -> Result<GradOut, PgError> {
        let Some(place) = self.core.place_of(param) else {
            return Ok(GradOut::Main { grad: param.main_grad(), keep: Keep::All });
        };
        let first = self.core.open_grad(place, stream).map_err(|error| error.into_backend(param.name()))?;
        let keep = if first { Keep::Times(self.core.keep.clone()) } else { Keep::All };
        Ok(GradOut::Main { grad: param.main_grad(), keep })
    }

    fn grad_done(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        self.turn.landed(param, stream)
    }

    fn enter(&mut self, pass: Pass) -> Pass {
        self.turn.enter(pass)
    }
}
