//! Passes of an evaluation from captured graphs.

use device::{Frame, Stream, View};
use graphcap::{CaptureCost, Graph, GraphConfig, GraphSet, Scope};
use gtp::{Gtp, PassKind};
use model::{Gpt, Microbatch};
use pgroups::Pass;

use crate::TrainError;

/// Forward of a pass: a graph for each block, or one for all. It runs several times between two writes of the weights,
/// so it publishes nothing itself even where training captures whole steps.
pub(super) struct EvalGraphs {
    /// In order. The set is kept with them: deleting it would delete them.
    set: GraphSet,
}

impl EvalGraphs {
    /// Tokens, targets and loss of `microbatch` are where every pass finds and leaves them.
    pub(super) fn capture(
        config: GraphConfig,
        (model, gtp): (&Gpt, &mut Gtp),
        frame: &mut Frame,
        microbatch: &Microbatch<'_>,
    ) -> Result<EvalGraphs, TrainError> {
        let stream = frame.stream().clone();
        let scope = config.scope;
        let mut set = GraphSet::new(&stream, config)?;
        frame.restart();
        if scope == Scope::Chunk {
            set.capture("eval", &stream, |scope| -> Result<(), TrainError> {
                let mut weights = gtp.pass(PassKind::EVAL, scope.turn(Pass::Forward))?;
                model.forward_loss(frame, &mut weights, microbatch)?;
                Ok(weights.finish()?)
            })?;
            return Ok(EvalGraphs { set });
        }
        let last = model.blocks().len() - 1;
        let mut x = microbatch.tokens.clone();
        for at in 0..=last {
            let name = format!("eval {at}");
            let (_, y) = set.capture(&name, &stream, |scope| -> Result<View, TrainError> {
                let turn = scope.turn(Pass::Forward);
                let mut weights = if at == 0 { gtp.pass(PassKind::EVAL, turn)? } else { gtp.resume(turn) };
                let y = model.forward_block(frame, &mut weights, at, microbatch.slot, &x)?;
                if at == last {
                    model.loss(frame, &weights, microbatch, &y)?;
                }
                weights.finish()?;
                Ok(y)
            })?;
            x = y;
        }
        Ok(EvalGraphs { set })
    }

    /// What the captures have taken.
    pub(super) fn cost(&self) -> Option<CaptureCost> {
        self.set.cost()
    }

    /// Submits a pass over what lies where it was captured.
    pub(super) fn replay(&self, stream: &Stream, gtp: &Gtp) -> Result<(), TrainError> {
        self.graphs().try_for_each(|graph| graph.replay(stream, &[]))?;
        Ok(gtp.follow_graphs(stream)?)
    }

    fn graphs(&self) -> impl Iterator<Item = &Graph> {
        self.set.graphs().iter()
    }
}
