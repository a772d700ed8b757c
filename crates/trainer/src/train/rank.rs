//! What one rank owns, and one step of it. Nothing here knows which driver it runs on.

use std::sync::Arc;

use device::ops::{Factor, Scale, Sum};
use device::{DType, Frame, FramePlan, MemoryKind, Reduce, Stream, View};
use graphcap::{CaptureCost, GraphConfig, Scope};
use gtp::{Gtp, GtpPlan, PassKind};
use model::{ConfigViolations, Gpt, GptPlan, LlamaConfig, Microbatch, RecomputeLayers};
use pgroups::{Group, HostState, Key, Needs, Pass, ProcessGroups, Rank, Replicas, Turn, Weights};

use super::{
    data_parallel::{DataParallel, Place},
    graphs::Graphs,
    normalize::{TokenScale, counted},
    phases::{Phase, PhaseClock},
    sharded,
    stop::StopBit,
};
use crate::{Arch, Config, Recompute, TrainError};

/// Plans of the kinds of pass: a training microbatch, the next token of a sample, and evaluation where there is one.
#[derive(Clone)]
pub(super) struct Plans {
    pub(super) train: Arc<FramePlan>,
    pub(super) sample: Arc<FramePlan>,
    pub(super) eval: Option<Arc<FramePlan>>,
    /// When weights are gathered, and where to.
    pub(super) gtp: Arc<GtpPlan>,
}

impl Plans {
    /// Of all kinds of pass that there are.
    pub(super) fn of_passes(&self) -> impl Iterator<Item = &FramePlan> {
        [&self.train, &self.sample].into_iter().chain(&self.eval).map(|plan| &**plan)
    }
}

/// Everything that one rank owns.
pub(super) struct RankRun {
    pub(super) stream: Stream,
    pub(super) groups: ProcessGroups,
    pub(super) stop: StopBit,
    pub(super) model: Gpt,
    pub(super) parallel: DataParallel,
    pub(super) gtp: Gtp,
    pub(super) clock: PhaseClock,
    /// What all kinds of pass work in, one at a time; none while their plans are made.
    arena: Option<View>,
    /// Training microbatches.
    pub(super) frame: Frame,
    /// Next tokens.
    pub(super) sample_frame: Frame,
    /// Everyone who reads data of their own.
    data: Group,
    scale: TokenScale,
    inputs: Inputs,
    /// Of its training steps; none: what is submitted runs as it is.
    graphs: Option<Graphs>,
    /// f32 `[1]`: mean over the global batch, in nats per token.
    pub(super) loss: View,
}

/// Memory that the host fills.
struct Inputs {
    /// i32 `[micro_batch, seq_len]`, of each microbatch.
    tokens: Vec<View>,
    targets: Vec<View>,
    /// i32 `[1, seq_len]`.
    prompt: View,
    /// f32 `[microbatches]`: what each adds to the mean, per token of a microbatch.
    losses: View,
    /// f32 `[1]`: that of the microbatch that a graph has just run.
    graph_loss: View,
}

impl RankRun {
    /// Allocates and initialises. Frames are planned if there are plans; without, they record.
    pub(super) fn build(rank: &Rank, config: &Config, plans: Option<&Plans>) -> Result<RankRun, TrainError> {
        let own = [Key::DP_CP, Key::DP_CP_GTP, Key::MP, StopBit::key()];
        let needs = Needs::keys(own.into_iter().chain(sharded::KEYS));
        let groups = ProcessGroups::build(rank, &config.ranks(), &needs)?;
        let stream = rank.device.stream("compute")?;
        let plan = gpt_plan(config)?;
        let parallel = DataParallel::build(rank, &groups, &plan, config, &stream)?;
        let held = (parallel.buffers.params(), &plan.specs()[..]);
        let gtp = sharded::build(rank, &groups, held, config, plans.map(|p| &*p.gtp))?;
        let recompute = match config.train.recompute {
            Recompute::None => RecomputeLayers::None,
            Recompute::Block => RecomputeLayers::All,
        };
        let model = plan.build_with(parallel.buffers.params(), &recompute)?;
        let arena = plans.map(|plans| Frame::shared_arena(&stream, "passes", plans.of_passes())).transpose()?;
        let frame = |name, plan: Option<&Arc<FramePlan>>| frame_in(arena.as_ref(), &stream, name, plan);
        let inputs = Inputs::alloc(rank, config)?;
        let data = groups.get(&Key::DP_CP_GTP, "losses")?.clone();
        let scale = TokenScale::alloc(rank, config.train.loss_normalization, &data, config.microbatches() as usize)?;
        let stop = StopBit::alloc(rank, groups.get(&StopBit::key(), "the stop bit")?)?;
        let clock = PhaseClock::alloc(rank, stop.everyone())?;
        let loss = rank.device.alloc("loss", &[1], DType::F32, MemoryKind::Other)?;
        Ok(RankRun {
            model,
            frame: frame("train", plans.map(|p| &p.train))?,
            sample_frame: frame("sample", plans.map(|p| &p.sample))?,
            arena,
            data,
            scale,
            inputs,
            loss,
            parallel,
            gtp,
            graphs: None,
            clock,
            stop,
            groups,
            stream,
        })
    }

    /// Submits one step: every microbatch forward and backward, the reductions, the update. Waits for nothing.
    /// Targets of [`device::ops::IGNORE`] do not count.
    pub(super) fn step(&mut self, parts: &[data::Microbatch<'_>], lr: f32) -> Result<(), TrainError> {
        let _span = tracing::debug_span!("trainer.run_step").entered();
        let stream = self.stream.clone();
        self.clock.begin(&stream)?;
        self.scale.begin_step(&stream, &parts.iter().map(|part| counted(part.targets)).collect::<Vec<_>>())?;
        for (part, (tokens, targets)) in parts.iter().zip(self.inputs.tokens.iter().zip(&self.inputs.targets)) {
            stream.upload(tokens, part.inputs.to_vec())?;
            stream.upload(targets, part.targets.to_vec())?;
        }
        self.parallel.set_rate(lr)?;
        match &self.graphs {
            Some(graphs) if graphs.holds_steps() => {
                graphs.replay_step(&stream)?;
                self.clock.lap(&stream, Phase::Backward)?;
                self.clock.passed(&stream)?;
            }
            _ => self.passes_and_update(&stream)?,
        }
        self.clock.end(self.parallel.updates())
    }

    /// Everything of a step behind its inputs, submitted as it is or microbatch by microbatch from graphs.
    fn passes_and_update(&mut self, stream: &Stream) -> Result<(), TrainError> {
        let places = self.places();
        for (at, place) in places.into_iter().enumerate() {
            let RankRun { model, parallel, gtp, frame, scale, clock, inputs, graphs, .. } = self;
            let given = inputs.microbatch(scale, at)?;
            parallel.microbatch(stream, place, || match graphs {
                Some(graphs) => graphs.replay_microbatch(stream, gtp, &given, clock),
                None => submit_microbatch(model, gtp, frame, &given, at, Some(clock)),
            })?;
        }
        self.clock.passed(stream)?;
        self.finish_step(stream)
    }

    fn places(&self) -> Vec<Place> {
        let count = self.inputs.tokens.len();
        (1..=count).map(|at| if at == count { Place::Last } else { Place::Inner }).collect()
    }

    /// The loss over all ranks, and the update.
    fn finish_step(&mut self, stream: &Stream) -> Result<(), TrainError> {
        let tokens = Factor::Const(self.inputs.tokens[0].numel() as f32);
        stream.launch(Sum { x: &self.inputs.losses, factor: tokens, total: &self.loss }.op("loss")?)?;
        self.data.all_reduce(stream, &self.loss, Reduce::Avg)?;
        self.parallel.step()
    }

    /// Captures what later steps replay. All ranks call it, behind a first step: by then it is known how often each
    /// gradient lands, and everything that is made once is made.
    pub(super) fn capture(&mut self, config: &Config) -> Result<(), TrainError> {
        let Some(scope) = config.graph.scope() else { return Ok(()) };
        let _span = tracing::info_span!("trainer.capture_graphs", %scope).entered();
        // No collective is under way while a graph is captured.
        self.meet()?;
        let stream = self.stream.clone();
        // The passes so far are planned before a capture, which allocates nothing.
        self.gtp.plan()?;
        let accounts = if scope == Scope::Step { self.accounts() } else { Vec::new() };
        let (gates, order) = (config.graph.gate_mode(), config.graph.node_order());
        let set = GraphConfig { gates, order, accounts, ..GraphConfig::new(scope) };
        let mut graphs = Graphs::new(&stream, set, sharded::in_turn(config))?;
        if scope == Scope::Step {
            graphs.capture_step(&stream, || self.submit_step(&stream))?;
        } else {
            let first = self.inputs.microbatch(&self.scale, 0)?;
            let slot = Given { loss: self.inputs.graph_loss.clone(), ..first };
            graphs.capture_microbatch(&self.model, &mut self.gtp, &mut self.frame, &slot)?;
        }
        self.graphs = Some(graphs);
        self.meet()
    }

    /// What the capture has taken; none without graphs.
    pub(super) fn capture_cost(&self) -> Option<CaptureCost> {
        self.graphs.as_ref()?.cost()
    }

    /// The host waits until all ranks that hold the same elements of a parameter have compared them.
    pub(super) fn compare_replicas(&self, replicas: &Replicas) -> Result<(), TrainError> {
        let _span = tracing::info_span!("trainer.compare_replicas").entered();
        Ok(replicas.compare(self.stop.everyone(), &self.stream, self.parallel.buffers.params())?)
    }

    /// What graphs of whole steps must keep in order on the host.
    fn accounts(&self) -> Vec<Arc<dyn HostState>> {
        let sharded = (!self.gtp.is_plain()).then(|| self.gtp.account());
        self.parallel.accounts().into_iter().chain(sharded).collect()
    }

    /// All that a graph of a step holds.
    fn submit_step(&mut self, stream: &Stream) -> Result<(), TrainError> {
        for (at, place) in self.places().into_iter().enumerate() {
            let RankRun { model, parallel, gtp, frame, scale, inputs, .. } = self;
            let given = inputs.microbatch(scale, at)?;
            parallel.microbatch(stream, place, || submit_microbatch(model, gtp, frame, &given, at, None))?;
        }
        self.finish_step(stream)
    }

    /// A frame of this rank's passes; it records if there is no plan.
    pub(super) fn frame_of(&self, name: &str, plan: Option<&Arc<FramePlan>>) -> Result<Frame, TrainError> {
        Ok(frame_in(self.arena.as_ref(), &self.stream, name, plan)?)
    }

    /// The host waits until every rank has come here with nothing in flight.
    pub(super) fn meet(&self) -> Result<(), TrainError> {
        self.stop.everyone().barrier(&self.stream)?;
        Ok(self.stream.device().synchronize()?)
    }

    /// Where the host puts a microbatch's tokens, i32 `[micro_batch, seq_len]`.
    pub(super) fn tokens(&self) -> &View {
        &self.inputs.tokens[0]
    }

    /// Where the host puts a microbatch's targets, as tokens.
    pub(super) fn targets(&self) -> &View {
        &self.inputs.targets[0]
    }

    /// Submits a pass that gives the logits `[1, vocab]` behind position `at` of `tokens`, `seq_len` of them.
    pub(super) fn next_logits(&mut self, tokens: &[i32], at: usize) -> Result<View, TrainError> {
        self.stream.upload(&self.inputs.prompt, tokens.to_vec())?;
        self.sample_frame.restart();
        let mut weights = self.gtp.pass(PassKind::SAMPLE, Turn::eager(Pass::Forward))?;
        let logits = self.model.logits(&mut self.sample_frame, &mut weights, &self.inputs.prompt, at)?;
        weights.finish()?;
        Ok(logits)
    }
}

impl Inputs {
    fn alloc(rank: &Rank, config: &Config) -> Result<Inputs, TrainError> {
        let alloc = |label: &str, shape: &[usize], dtype| rank.device.alloc(label, shape, dtype, MemoryKind::Other);
        let batch = [config.train.micro_batch as usize, config.model.seq_len];
        let count = config.microbatches() as usize;
        let batches = |label| (0..count).map(|_| alloc(label, &batch, DType::I32)).collect::<Result<Vec<_>, _>>();
        Ok(Inputs {
            tokens: batches("tokens")?,
            targets: batches("targets")?,
            prompt: alloc("prompt", &[1, config.model.seq_len], DType::I32)?,
            losses: alloc("losses", &[count], DType::F32)?,
            graph_loss: alloc("graph.loss", &[1], DType::F32)?,
        })
    }
}

impl Inputs {
    fn microbatch(&self, scale: &TokenScale, at: usize) -> Result<Given, TrainError> {
        Ok(Given {
            tokens: self.tokens[at].clone(),
            targets: self.targets[at].clone(),
            scale: scale.factor(at)?,
            loss: self.losses.flat(at..at + 1)?,
        })
    }
}

/// What a microbatch reads, and where its loss goes.
pub(super) struct Given {
    pub(super) tokens: View,
    pub(super) targets: View,
    /// f32 `[1]`: what the gradient of a token's loss is multiplied with.
    pub(super) scale: View,
    /// f32 `[1]`: what the microbatch adds to the mean, per token of it.
    pub(super) loss: View,
}

impl Given {
    pub(super) fn microbatch(&self) -> Microbatch<'_> {
        let Given { tokens, targets, scale, loss } = self;
        Microbatch { tokens, targets, loss, token_scale: Factor::Device(scale), slot: 0 }
    }

    /// The model's mean is over all tokens, those that do not count included.
    pub(super) fn scale_loss(&self, stream: &Stream) -> Result<(), TrainError> {
        let scaled = Scale { x: &self.loss, factor: Factor::Device(&self.scale), y: &self.loss };
        Ok(stream.launch(scaled.op("loss")?)?)
    }
}

/// Forward and backward of a microbatch.
fn submit_microbatch(
    model: &Gpt,
    gtp: &mut Gtp,
    frame: &mut Frame,
    given: &Given,
    at: usize,
    clock: Option<&PhaseClock>,
) -> Result<(), TrainError> {
    let mut aside = aside(frame, at);
    let frame = aside.as_mut().unwrap_or(frame);
    frame.restart();
    let stream = frame.stream().clone();
    let mut weights = gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Forward))?;
    model.forward_loss(frame, &mut weights, &given.microbatch())?;
    given.scale_loss(&stream)?;
    clock.map_or(Ok(()), |clock| clock.lap(&stream, Phase::Forward))?;
    weights.enter(Pass::Backward);
    model.backward(frame, &mut weights, 0)?;
    weights.finish()?;
    clock.map_or(Ok(()), |clock| clock.lap(&stream, Phase::Backward))
}

fn frame_in(
    arena: Option<&View>,
    stream: &Stream,
    name: &str,
    plan: Option<&Arc<FramePlan>>,
) -> Result<Frame, device::Error> {
    match arena.zip(plan) {
        Some((arena, plan)) => Frame::planned_in(arena, stream, plan),
        None => Ok(Frame::recording(stream, name)),
    }
}

/// A frame for a later pass while `frame` records: a plan is read off one pass, because a buffer that several passes
/// use would seem to be in use all the time between them.
pub(super) fn aside(frame: &Frame, pass: usize) -> Option<Frame> {
    (pass > 0 && frame.arena().is_none()).then(|| Frame::recording(frame.stream(), "later passes"))
}

/// The model that a configuration asks for.
pub(crate) fn gpt_plan(config: &Config) -> Result<GptPlan, TrainError> {
    Ok(lay_out(config)?)
}

/// As [`gpt_plan`], or everything of it that its layout cannot share.
pub(crate) fn lay_out(config: &Config) -> Result<GptPlan, ConfigViolations> {
    GptPlan::on(sizes(config), &config.ranks(), sharded::shard_config(config))
}

/// Of the model, whatever its layout.
pub(super) fn sizes(config: &Config) -> model::GptConfig {
    let m = &config.model;
    let arch = match m.arch {
        Arch::Gpt2 => model::Arch::Gpt2,
        Arch::Llama => {
            let rope_base = m.rope_base.unwrap_or(LlamaConfig::ROPE_BASE);
            model::Arch::Llama(LlamaConfig { kv_heads: m.kv_heads, rope_base })
        }
    };
    model::GptConfig {
        arch,
        layers: m.layers,
        dim: m.dim,
        heads: m.heads,
        ffn_dim: m.ffn_dim,
        vocab: m.vocab,
        vocab_rows: m.vocab_rows,
        seq_len: m.seq_len,
        output: if m.tied { model::Output::Tied } else { model::Output::Own },
    }
}

/// This rank's place among those that read data of their own.
pub(super) fn data_place(groups: &ProcessGroups) -> Result<u32, TrainError> {
    Ok(groups.get(&Key::DP_CP_GTP, "data")?.place().0)
}
