//! One rank of a GPT over tensor groups, weight shards and replicas: what a trainer composes, with every part in reach.

use ddp::{AdamConfig, Ddp, DeclaredParam, Optimizer, OptimizerConfig, ParamBuffers};
use device::{Access, DType, Download, Frame, Note, Op, Stream, View};
use gtp::{Gtp, PassKind};
use model::{Gpt, GptPlan};
use pgroups::{Epochs, Key, Param, Pass, ProcessGroups, Rank, Seed, TensorParallel, Turn};

use super::{
    captured::Graphs,
    passes::{Carried, Parts, Slot, Source, forward_pieces, pieces},
    program::{Held, Inputs, Lanes, Program, SEQ_LEN, VOCAB},
    support::{Caught, get},
};

pub(crate) struct Worker {
    pub(crate) program: Program,
    pub(crate) rank: Rank,
    pub(crate) groups: ProcessGroups,
    pub(crate) compute: Stream,
    /// Where every second microbatch runs, if they take turns.
    pub(crate) other: Option<Lane>,
    /// Where microbatches begin and end.
    pub(crate) marks: Stream,
    /// Where the optimizer runs.
    pub(crate) updates: Stream,
    pub(crate) plan: GptPlan,
    pub(crate) buffers: ParamBuffers,
    pub(crate) ddp: Ddp,
    pub(crate) optimizer: Optimizer,
    pub(crate) source: Source,
    pub(crate) model: Gpt,
    pub(crate) train: Frame,
    pub(crate) eval: Frame,
    /// Where passes read and leave their loss.
    pub(crate) slot: Slot,
    /// As `slot`, of evaluations, which are all of the same samples.
    pub(crate) eval_slot: Slot,
    pub(crate) graphs: Option<Graphs>,
    /// Adds to a gradient behind each pass, on a stream of its own.
    pub(crate) extra: Option<Stream>,
    /// Times what each token's gradient is: 1.
    pub(crate) token_scale: f32,
    /// Losses of all passes so far, trained on or not.
    losses: Vec<Download<f32>>,
}

/// A stream with memory for passes of its own.
pub(crate) struct Lane {
    stream: Stream,
    frame: Frame,
    slot: Slot,
}

impl Worker {
    /// `name` keeps two models apart.
    pub(crate) fn new(rank: &Rank, program: &Program, name: &str) -> Result<Worker, Caught> {
        let (layout, plan) = (program.plan(), program.gpt()?);
        let groups = ProcessGroups::build(rank, &layout, &program.needs())?;
        let stream = |what: &str| rank.device.stream(&format!("{name}.{what}"));
        let (compute, updates) = (stream("compute")?, stream("optimizer")?);
        let declared: Vec<_> = plan.specs().into_iter().map(|spec| DeclaredParam::new(spec, DType::F32)).collect();
        let buffers = ParamBuffers::allocate(rank, &layout, &declared, program.buckets())?;
        buffers.fill(&compute, Seed(7))?;
        let (ddp, optimizer) = wrap(program, &groups, &plan, &buffers, &compute)?;
        let tensor = if program.layout.tp > 1 {
            let group = groups.get(&Key::TP, "parallel layers")?.second("layers")?;
            Some(TensorParallel::new(group, program.sequence))
        } else {
            None
        };
        let source = match program.held {
            Held::Whole => Source::Whole(tensor),
            Held::Sharded => {
                let (specs, settings) = (plan.specs(), program.gtp());
                let gtp = Gtp::new(rank, &layout, &groups, buffers.params().iter().zip(&specs), settings)?;
                Source::Sharded(match tensor {
                    Some(tensor) => gtp.over(tensor),
                    None => gtp,
                })
            }
        };
        let model = plan.build_with(buffers.params(), &program.recompute)?;
        let slot = Slot::alloc(rank, program)?;
        let (other, marks) = match program.lanes {
            Lanes::One => (None, compute.clone()),
            Lanes::Turns => {
                let other = stream("other")?;
                let frame = Frame::unplanned(&other, &format!("{name}.train.other"));
                (Some(Lane { stream: other, frame, slot: Slot::alloc(rank, program)? }), stream("marks")?)
            }
        };
        let worker = Worker {
            other,
            marks,
            train: Frame::unplanned(&compute, &format!("{name}.train")),
            eval: Frame::unplanned(&compute, &format!("{name}.eval")),
            program: program.clone(),
            rank: rank.clone(),
            groups,
            compute,
            updates,
            plan,
            buffers,
            ddp,
            optimizer,
            source,
            model,
            eval_slot: Slot::alloc(rank, program)?,
            slot,
            graphs: None,
            extra: None,
            token_scale: 1.0,
            losses: Vec::new(),
        };
        worker.given(0, 0, &worker.compute)?.copy_to(&worker.eval_slot, &worker.compute)?;
        Ok(worker)
    }

    /// Two eager steps, then the graphs that the program asks for.
    pub(crate) fn prepared(rank: &Rank, program: &Program, name: &str) -> Result<Worker, Caught> {
        let mut worker = Worker::new(rank, program, name)?;
        worker.step(0)?;
        worker.capture()?;
        Ok(worker)
    }

    /// Everything up to the update.
    pub(crate) fn step(&mut self, step: usize) -> Result<(), Caught> {
        self.passes(step)?;
        Ok(self.optimizer.step_at_rates(&self.updates.clone())?)
    }

    /// All microbatches of a step, and what of its reductions is left.
    pub(crate) fn passes(&mut self, step: usize) -> Result<(), Caught> {
        self.rank.device.note(|| Note::Step(step as u64));
        self.optimizer.set_rates(&self.updates, &[0.01 * (step + 1) as f32])?;
        for at in 0..self.program.microbatches {
            self.microbatch(step, at)?;
        }
        Ok(self.ddp.finish_grads()?)
    }

    pub(crate) fn microbatch(&mut self, step: usize, at: usize) -> Result<(), Caught> {
        let lanes = [&self.compute].into_iter().chain(self.other.iter().map(|lane| &lane.stream));
        let mut lanes: Vec<Stream> = lanes.cloned().collect();
        // Several graphs of a microbatch take turns by themselves.
        let whole = self.graphs.as_ref().is_none_or(|graphs| graphs.training.graphs().len() == 1);
        let turn = if whole { at % lanes.len() } else { 0 };
        lanes.rotate_left(turn);
        let given = match self.program.inputs {
            Inputs::InPlace if self.graphs.is_some() => self.slot.clone(),
            _ => self.given(step, at, &lanes[0])?,
        };
        let Worker { ddp, marks, graphs, model, source, train, slot, other, losses, .. } = self;
        let _adding_up = (at + 1 < self.program.microbatches).then(|| ddp.no_sync());
        ddp.begin_microbatch(marks)?;
        let loss = match (graphs, other.as_mut().filter(|_| turn == 1)) {
            (Some(graphs), _) => {
                graphs.replay(&lanes.iter().collect::<Vec<_>>(), source, &given)?;
                &slot.loss
            }
            (None, other) => {
                let (frame, slot) = other.map_or((train, &*slot), |lane| (&mut lane.frame, &lane.slot));
                given.copy_to(slot, &lanes[0])?;
                let (pieces, mut carried) = (pieces(model), Carried::default());
                let mut parts = Parts { model, source, frame, slot, kind: PassKind::TRAIN };
                parts.run(&pieces, Turn::eager(Pass::Forward), &mut carried)?;
                &slot.loss
            }
        };
        if self.rank.device.machine().computes() {
            losses.push(lanes[0].download(loss)?);
        }
        if let Some(extra) = &self.extra {
            contribute(self.buffers.get("ln_f.bias").expect("a norm"), extra)?;
        }
        Ok(ddp.end_microbatch(marks)?)
    }

    /// A training pass, to run or to capture.
    pub(crate) fn training(&mut self) -> Parts<'_> {
        let Worker { model, source, train, slot, .. } = self;
        Parts { model, source, frame: train, slot, kind: PassKind::TRAIN }
    }

    /// As [`Worker::training`], for an evaluation.
    pub(crate) fn evaluation(&mut self) -> Parts<'_> {
        let Worker { model, source, eval, eval_slot, .. } = self;
        Parts { model, source, frame: eval, slot: eval_slot, kind: PassKind::EVAL }
    }

    /// Samples of a microbatch, which follow from their place in the batch: every rank that reads data has its own.
    fn given(&self, step: usize, at: usize, on: &Stream) -> Result<Slot, Caught> {
        let place = self.groups.get(&Key::DP_CP_GTP, "data")?.place().0 as usize;
        let rows = self.program.micro_batch();
        let first = (step * self.program.batch + (place * self.program.microbatches + at) * rows) * SEQ_LEN;
        let text = |from: usize| (from..from + rows * SEQ_LEN).map(|i| (i * i * 7 + i) as i32 % VOCAB as i32);
        let given = Slot::alloc(&self.rank, &self.program)?;
        on.upload(&given.tokens, text(first).collect())?;
        on.upload(&given.targets, text(first + 1).collect())?;
        let scale = self.token_scale / (rows * SEQ_LEN * self.program.microbatches) as f32;
        on.upload(&given.scale, vec![scale])?;
        Ok(given)
    }

    /// The loss of a forward pass, on values as they are then.
    pub(crate) fn evaluate(&mut self) -> Result<(), Caught> {
        let forward = forward_pieces(&self.model);
        self.evaluation().run(&forward, Turn::eager(Pass::Forward), &mut Carried::default())?;
        self.log_loss(PassKind::EVAL)
    }

    /// Of the pass that was submitted last; where nothing computes there is none.
    pub(crate) fn log_loss(&mut self, of: PassKind) -> Result<(), Caught> {
        let slot = if of == PassKind::EVAL { &self.eval_slot } else { &self.slot };
        if self.rank.device.machine().computes() {
            self.losses.push(self.compute.download(&slot.loss)?);
        }
        Ok(())
    }

    /// Captures what the program wants captured.
    pub(crate) fn capture(&mut self) -> Result<(), Caught> {
        let Some((scope, gates)) = self.program.graphs else { return Ok(()) };
        // The passes so far are planned, and nothing is under way.
        self.source.settle()?;
        self.rank.device.synchronize()?;
        self.graphs = Some(Graphs::capture(self, scope, gates)?);
        Ok(())
    }

    /// Replaces the data parallelism by another one over the same parameters. Its optimizer begins anew.
    pub(crate) fn wrap_again(&mut self) -> Result<(), Caught> {
        self.ddp.publish(&self.compute)?;
        self.rank.device.synchronize()?;
        let (ddp, optimizer) = wrap(&self.program, &self.groups, &self.plan, &self.buffers, &self.compute)?;
        (self.ddp, self.optimizer) = (ddp, optimizer);
        Ok(())
    }

    /// Losses, then all values and moments that this rank has.
    pub(crate) fn finish(mut self) -> Result<Vec<u32>, Caught> {
        self.ddp.publish(&self.compute)?;
        self.bits()
    }

    /// As [`Worker::finish`], of a run that goes on. Values that are not published yet are as they are.
    pub(crate) fn bits(&mut self) -> Result<Vec<u32>, Caught> {
        self.rank.device.synchronize()?;
        let mut all = self.losses()?;
        let values: Vec<View> = self.ddp.buckets().map(|bucket| bucket.values).collect();
        let state = self.optimizer.state().flat_map(|state| [state.values, state.m, state.v]);
        let state: Vec<View> = state.cloned().collect();
        for view in values.iter().chain(&state) {
            all.extend(get::<f32>(&self.compute, view)?);
        }
        Ok(all.into_iter().map(f32::to_bits).collect())
    }

    /// Of all passes since it was asked last, trained on or not.
    pub(crate) fn losses(&mut self) -> Result<Vec<f32>, Caught> {
        let mut all = Vec::new();
        for loss in std::mem::take(&mut self.losses) {
            all.extend(loss.wait()?);
        }
        Ok(all)
    }

    /// Of every parameter.
    pub(crate) fn epochs(&self) -> Vec<Epochs> {
        self.buffers.params().iter().filter_map(|param| param.publisher()).map(|p| p.epochs()).collect()
    }

    /// What the host keeps account of.
    pub(crate) fn accounts(&self) -> Vec<String> {
        let own = [format!("{:?}", self.ddp.publications()), format!("{:?}", self.source.counters())];
        self.epochs().iter().map(|epochs| format!("{epochs:?}")).chain(own).collect()
    }
}

/// Another use of a parameter.
fn contribute(param: &Param, on: &Stream) -> Result<(), Caught> {
    let mut turn = Turn::eager(Pass::Backward);
    turn.open(param, on)?;
    on.launch(Op::host("contribute", "extra", vec![Access::update(&param.main_grad())], |args| {
        args.write::<f32>(0)?.iter_mut().for_each(|grad| *grad += 0.125);
        Ok(())
    }))?;
    Ok(turn.landed(param, on)?)
}

fn wrap(
    program: &Program,
    groups: &ProcessGroups,
    plan: &GptPlan,
    buffers: &ParamBuffers,
    on: &Stream,
) -> Result<(Ddp, Optimizer), Caught> {
    let ddp = Ddp::attach(buffers, groups, program.ddp(), on)?;
    let completions = program.completions(groups, plan)?;
    let ddp = if completions.is_empty() { ddp } else { ddp.completing(&completions)? };
    let adam = AdamConfig { clip: program.clip, ..AdamConfig::default() };
    let config = OptimizerConfig { adam, ..OptimizerConfig::default() };
    let optimizer = Optimizer::new(&ddp, groups, config, |_| 0, on)?;
    Ok((ddp, optimizer))
}
