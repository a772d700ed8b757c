//! Training steps from captured graphs.

use device::{Event, Frame, Stream, View, Why, ops::Cast};
use graphcap::{CaptureCost, Graph, GraphConfig, GraphSet, Scope};
use gtp::{Gtp, PassKind};
use model::Gpt;
use pgroups::{Pass, Weights};

use super::{
    phases::{Phase, PhaseClock},
    rank::Given,
};
use crate::TrainError;

/// The graphs of a rank's training, and how a step is put together from them.
pub(super) struct Graphs {
    set: GraphSet,
    program: Program,
    /// Where the captured microbatch leaves its loss, f32 `[1]`.
    loss: Option<View>,
    /// Where every second graph of a pass runs, so that reductions of one end behind the next; none: all on one stream.
    second: Option<(Stream, Event)>,
}

/// What runs on the second stream is behind what precedes the pass.
const PASS_AFTER_INPUTS: Why = Why("trainer.pass_after_inputs");

/// By scope.
enum Program {
    /// Nothing captured yet.
    Empty,
    /// Graphs of a microbatch, in order: those of forward, then those of backward.
    Passes {
        forward: Vec<Part>,
        backward: Vec<Part>,
    },
    Microbatch(Part),
    Step(Graph),
}

/// A graph of a microbatch.
struct Part {
    graph: Graph,
    /// Names of what it is given.
    given: Vec<&'static str>,
}

impl Part {
    fn new(graph: Graph) -> Part {
        let arguments = graph.arguments();
        let given = [TOKENS, TARGETS, SCALE].into_iter().filter(|name| arguments.iter().any(|a| a == name)).collect();
        Part { graph, given }
    }

    fn replay(&self, stream: &Stream, given: &Given) -> Result<(), TrainError> {
        let memory = |name: &&'static str| match *name {
            TOKENS => (*name, (&given.tokens).into()),
            TARGETS => (*name, (&given.targets).into()),
            _ => (*name, (&given.scale).into()),
        };
        Ok(self.graph.replay(stream, &self.given.iter().map(memory).collect::<Vec<_>>())?)
    }
}

/// Names of what a microbatch is given.
const TOKENS: &str = "tokens";
const TARGETS: &str = "targets";
const SCALE: &str = "token_scale";

impl Graphs {
    /// `in_turn`: the graphs of a pass run on two streams in turn.
    pub(super) fn new(stream: &Stream, config: GraphConfig, in_turn: bool) -> Result<Graphs, TrainError> {
        let device = stream.device();
        let second = || Ok::<_, TrainError>((device.stream("compute.second")?, device.event("trainer.inputs")));
        let second = in_turn.then(second).transpose()?;
        Ok(Graphs { set: GraphSet::new(stream, config)?, program: Program::Empty, loss: None, second })
    }

    /// One replay is a step.
    pub(super) fn holds_steps(&self) -> bool {
        matches!(self.program, Program::Step(_))
    }

    /// What the captures have taken.
    pub(super) fn cost(&self) -> Option<CaptureCost> {
        self.set.cost()
    }

    /// Captures what `submit` submits.
    pub(super) fn capture_step(
        &mut self,
        stream: &Stream,
        submit: impl FnOnce() -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        // In a whole step parameters are read as they always are.
        let (graph, ()) = self.set.capture("step", stream, |_| submit())?;
        self.program = Program::Step(graph);
        Ok(())
    }

    /// Captures forward and backward of a microbatch, in as many graphs as the scope asks for. `slot` is what the
    /// graphs read and write; replays are given other memory.
    pub(super) fn capture_microbatch(
        &mut self,
        model: &Gpt,
        gtp: &mut Gtp,
        frame: &mut Frame,
        slot: &Given,
    ) -> Result<(), TrainError> {
        let loss = slot.loss.clone();
        self.program = match self.set.config().scope {
            Scope::Layer => self.capture_layers(model, gtp, frame, slot)?,
            Scope::Chunk => self.capture_chunk(model, gtp, frame, slot)?,
            Scope::Microbatch | Scope::Step => self.capture_whole(model, gtp, frame, slot)?,
        };
        self.loss = Some(loss);
        Ok(())
    }

    fn capture_whole(
        &mut self,
        model: &Gpt,
        gtp: &mut Gtp,
        frame: &mut Frame,
        slot: &Given,
    ) -> Result<Program, TrainError> {
        let stream = frame.stream().clone();
        let (graph, ()) = self.set.capture("microbatch", &stream, |scope| -> Result<(), TrainError> {
            scope.input(TOKENS, &slot.tokens)?;
            scope.input(TARGETS, &slot.targets)?;
            scope.input(SCALE, &slot.scale)?;
            frame.restart();
            let mut weights = gtp.pass(PassKind::TRAIN, scope.turn(Pass::Forward))?;
            model.forward_loss(frame, &mut weights, &slot.microbatch())?;
            slot.scale_loss(&stream)?;
            weights.enter(Pass::Backward);
            model.backward(frame, &mut weights, 0)?;
            Ok(weights.finish()?)
        })?;
        Ok(Program::Microbatch(Part::new(graph)))
    }

    fn capture_chunk(
        &mut self,
        model: &Gpt,
        gtp: &mut Gtp,
        frame: &mut Frame,
        slot: &Given,
    ) -> Result<Program, TrainError> {
        let stream = frame.stream().clone();
        let (forward, ()) = self.set.capture("forward", &stream, |scope| -> Result<(), TrainError> {
            scope.input(TOKENS, &slot.tokens)?;
            scope.input(TARGETS, &slot.targets)?;
            scope.input(SCALE, &slot.scale)?;
            frame.restart();
            let mut weights = gtp.pass(PassKind::TRAIN, scope.turn(Pass::Forward))?;
            model.forward_loss(frame, &mut weights, &slot.microbatch())?;
            slot.scale_loss(&stream)?;
            Ok(weights.finish()?)
        })?;
        let (backward, ()) = self.set.capture("backward", &stream, |scope| -> Result<(), TrainError> {
            let mut weights = gtp.resume(scope.turn(Pass::Backward));
            model.backward(frame, &mut weights, 0)?;
            Ok(weights.finish()?)
        })?;
        Ok(Program::Passes { forward: vec![Part::new(forward)], backward: vec![Part::new(backward)] })
    }

    fn capture_layers(
        &mut self,
        model: &Gpt,
        gtp: &mut Gtp,
        frame: &mut Frame,
        slot: &Given,
    ) -> Result<Program, TrainError> {
        let (stream, last) = (frame.stream().clone(), model.blocks().len() - 1);
        let (mut forward, mut backward) = (Vec::new(), Vec::new());
        frame.restart();
        let mut x = slot.tokens.clone();
        for at in 0..=last {
            let (graph, y) =
                self.set.capture(&format!("forward {at}"), &stream, |scope| -> Result<View, TrainError> {
                    if at == 0 {
                        scope.input(TOKENS, &slot.tokens)?;
                    }
                    if at == last {
                        scope.input(TARGETS, &slot.targets)?;
                        scope.input(SCALE, &slot.scale)?;
                    }
                    let turn = scope.turn(Pass::Forward);
                    let mut weights = if at == 0 { gtp.pass(PassKind::TRAIN, turn)? } else { gtp.resume(turn) };
                    let y = model.forward_block(frame, &mut weights, at, 0, &x)?;
                    if at == last {
                        model.loss(frame, &weights, &slot.microbatch(), &y)?;
                        slot.scale_loss(&stream)?;
                    }
                    weights.finish()?;
                    Ok(y)
                })?;
            forward.push(Part::new(graph));
            x = y;
        }
        let mut dy = None;
        for at in (0..=last).rev() {
            let (graph, dx) =
                self.set.capture(&format!("backward {at}"), &stream, |scope| -> Result<Option<View>, TrainError> {
                    let mut weights = gtp.resume(scope.turn(Pass::Backward));
                    let dx = model.backward_block(frame, &mut weights, at, 0, dy.as_ref())?;
                    weights.finish()?;
                    Ok(dx)
                })?;
            backward.push(Part::new(graph));
            dy = dx;
        }
        Ok(Program::Passes { forward, backward })
    }

    /// Replays a step, whose inputs lie where they were captured.
    pub(super) fn replay_step(&self, stream: &Stream) -> Result<(), TrainError> {
        match &self.program {
            Program::Step(graph) => Ok(graph.replay(stream, &[])?),
            Program::Empty | Program::Passes { .. } | Program::Microbatch(_) => {
                unreachable!("BUG: these graphs hold no step")
            }
        }
    }

    /// Replays a microbatch over what it is given. A graph of both passes has one time, which counts as backward's.
    pub(super) fn replay_microbatch(
        &self,
        stream: &Stream,
        gtp: &Gtp,
        given: &Given,
        clock: &PhaseClock,
    ) -> Result<(), TrainError> {
        if let Some((second, inputs)) = &self.second {
            stream.record(inputs)?;
            second.wait(inputs, PASS_AFTER_INPUTS)?;
        }
        let lane = |at: usize| self.second.as_ref().filter(|_| at % 2 == 1).map_or(stream, |(second, _)| second);
        match &self.program {
            Program::Passes { forward, backward } => {
                for (at, part) in forward.iter().enumerate() {
                    part.replay(lane(at), given)?;
                }
                gtp.follow_graphs(stream)?;
                clock.lap(stream, Phase::Forward)?;
                for (at, part) in (forward.len()..).zip(backward) {
                    part.replay(lane(at), given)?;
                }
                gtp.follow_graphs(stream)?;
            }
            Program::Microbatch(part) => part.replay(stream, given)?,
            Program::Empty | Program::Step(_) => unreachable!("BUG: these graphs hold no microbatch"),
        }
        clock.lap(stream, Phase::Backward)?;
        let loss = self.loss.as_ref().expect("BUG: a captured microbatch has a loss");
        Ok(stream.launch(Cast { x: loss, y: &given.loss }.op("loss")?)?)
    }
}
