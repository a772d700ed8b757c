//! A worker's passes as graphs.

use std::num::NonZeroUsize;

use device::{GraphOrder, Stream, Why};
use graphcap::{GateMode, Graph, GraphConfig, GraphSet, Scope, Survivor};
use pgroups::Pass;

use super::{
    passes::{Carried, Parts, Piece, Slot, Source, forward_pieces, pieces},
    program::Lanes,
    support::Caught,
    worker::Worker,
};

/// The graphs of a rank: of a training microbatch, in order, and of an evaluation block by block.
pub(crate) struct Graphs {
    pub(crate) training: GraphSet,
    pub(crate) evaluation: GraphSet,
}

/// What runs on the second lane is behind what precedes the pass.
pub(crate) const PASS_AFTER_INPUTS: Why = Why("test.pass_after_inputs");

/// Both orders have their turn, each with one mode of gates.
fn order(gates: GateMode) -> GraphOrder {
    match gates {
        GateMode::InGraph => GraphOrder::Accesses,
        GateMode::BeforeReplay => GraphOrder::Submission,
    }
}

impl Graphs {
    pub(crate) fn capture(worker: &mut Worker, scope: Scope, gates: GateMode) -> Result<Graphs, Caught> {
        // What overlaps itself needs two of each.
        let lanes = match worker.program.lanes {
            Lanes::One => NonZeroUsize::MIN,
            Lanes::Turns => NonZeroUsize::MIN.saturating_add(1),
        };
        let config = GraphConfig { gates, order: order(gates), lanes, ..GraphConfig::new(scope) };
        let mut training = GraphSet::new(&worker.compute, config.clone())?;
        let evaluation = GraphSet::new(&worker.compute, GraphConfig { scope: Scope::Layer, ..config })?;
        let all = pieces(&worker.model);
        capture(worker, &mut training, &cut(&all, scope), Worker::training)?;
        Ok(Graphs { training, evaluation })
    }

    /// A graph of each block of an evaluation; the worker has evaluated before.
    pub(crate) fn capture_evaluation(worker: &mut Worker) -> Result<(), Caught> {
        worker.source.settle()?;
        worker.rank.device.synchronize()?;
        let mut graphs = worker.graphs.take().expect("graphs of training");
        let forward = cut(&forward_pieces(&worker.model), Scope::Layer);
        capture(worker, &mut graphs.evaluation, &forward, Worker::evaluation)?;
        worker.graphs = Some(graphs);
        Ok(())
    }

    /// One microbatch, over what it is given, on `lanes` in turn. It begins on the first, and what is submitted there
    /// next is behind it.
    pub(crate) fn replay(&self, lanes: &[&Stream], source: &Source, given: &Slot) -> Result<(), Caught> {
        let inputs = lanes[0].device().event("inputs");
        lanes[0].record(&inputs)?;
        for (at, graph) in self.training.graphs().iter().enumerate() {
            let on = lanes[at % lanes.len()];
            if at > 0 && at < lanes.len() {
                on.wait(&inputs, PASS_AFTER_INPUTS)?;
            }
            replay(graph, on, given)?;
        }
        if lanes.len() > 1 { source.follow_graphs(lanes[0]) } else { Ok(()) }
    }

    /// Lets all of them go.
    pub(crate) fn delete(self) -> Vec<Survivor> {
        let mut survivors = self.training.delete();
        survivors.extend(self.evaluation.delete());
        survivors
    }
}

/// Captures a graph of each part.
fn capture(
    worker: &mut Worker,
    set: &mut GraphSet,
    parts: &[Vec<Piece>],
    of: impl Fn(&mut Worker) -> Parts<'_>,
) -> Result<(), Caught> {
    let Parts { frame, slot, .. } = of(worker);
    let (on, slot, mut carried) = (frame.stream().clone(), slot.clone(), Carried::default());
    for (at, pieces) in parts.iter().enumerate() {
        set.capture(&format!("{at}"), &on, |scope| -> Result<(), Caught> {
            if at == 0 {
                scope.input("tokens", &slot.tokens)?;
            }
            if pieces.contains(&Piece::Loss) {
                scope.input("targets", &slot.targets)?;
                scope.input("scale", &slot.scale)?;
            }
            of(worker).run(pieces, scope.turn(Pass::Forward), &mut carried)
        })?;
    }
    Ok(())
}

pub(crate) fn replay(graph: &Graph, on: &Stream, given: &Slot) -> Result<(), Caught> {
    let of = |name: &String| match name.as_str() {
        "tokens" => ("tokens", (&given.tokens).into()),
        "targets" => ("targets", (&given.targets).into()),
        _ => ("scale", (&given.scale).into()),
    };
    Ok(graph.replay(on, &graph.arguments().iter().map(of).collect::<Vec<_>>())?)
}

/// A microbatch cut into graphs.
fn cut(pieces: &[Piece], scope: Scope) -> Vec<Vec<Piece>> {
    let loss = pieces.iter().position(|piece| *piece == Piece::Loss).expect("a pass has a loss");
    match scope {
        Scope::Layer => {
            let mut parts: Vec<Vec<Piece>> = Vec::new();
            for &piece in pieces {
                match (piece, parts.last_mut()) {
                    // With the last block.
                    (Piece::Loss, Some(last)) => last.push(piece),
                    _ => parts.push(vec![piece]),
                }
            }
            parts
        }
        Scope::Chunk => vec![pieces[..=loss].to_vec(), pieces[loss + 1..].to_vec()],
        Scope::Microbatch | Scope::Step => vec![pieces.to_vec()],
    }
}
