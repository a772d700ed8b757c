//! What one rank owns, and one step of it. Nothing here knows which driver it runs on.

use std::sync::Arc;

use device::ops::{Factor, Scale, Sum};
use device::{DType, Frame, FramePlan, MemoryKind, Reduce, Stream, View};
use model::{Gpt, GptPlan, LlamaConfig, Microbatch, RecomputeLayers};
use pgroups::{Group, Key, Needs, Pass, ProcessGroups, Rank, Turn, Weights, Whole};

use super::{
    data_parallel::{DataParallel, Place},
    normalize::{TokenScale, counted},
    phases::{Phase, PhaseClock},
    stop::StopBit,
};
use crate::{Arch, Config, Recompute, TrainError};

/// Plans of the kinds of pass: a training microbatch, the next token of a sample, and evaluation where there is one.
#[derive(Clone)]
pub(super) struct Plans {
    pub(super) train: Arc<FramePlan>,
    pub(super) sample: Arc<FramePlan>,
    pub(super) eval: Option<Arc<FramePlan>>,
}

/// Everything that one rank owns.
pub(super) struct RankRun {
    pub(super) stream: Stream,
    pub(super) groups: ProcessGroups,
    pub(super) stop: StopBit,
    pub(super) model: Gpt,
    pub(super) parallel: DataParallel,
    pub(super) clock: PhaseClock,
    /// Training microbatches.
    pub(super) frame: Frame,
    /// Next tokens.
    pub(super) sample_frame: Frame,
    /// Everyone who reads data of their own.
    data: Group,
    scale: TokenScale,
    inputs: Inputs,
    /// f32 `[1]`: mean over the global batch, in nats per token.
    pub(super) loss: View,
}

/// Memory that the host fills.
struct Inputs {
    /// i32 `[micro_batch, seq_len]`.
    tokens: View,
    targets: View,
    /// i32 `[1, seq_len]`.
    prompt: View,
    /// f32 `[microbatches]`: what each adds to the mean, per token of a microbatch.
    losses: View,
}

impl RankRun {
    /// Allocates and initialises. Frames are planned if there are plans; without, they record.
    pub(super) fn build(rank: &Rank, config: &Config, plans: Option<&Plans>) -> Result<RankRun, TrainError> {
        let needs = Needs::keys([Key::DP_CP, Key::DP_CP_GTP, Key::MP, StopBit::key()]);
        let groups = ProcessGroups::build(rank, &config.ranks(), &needs)?;
        let stream = rank.device.stream("compute")?;
        let plan = gpt_plan(config)?;
        let parallel = DataParallel::build(rank, &groups, &plan, config, &stream)?;
        let recompute = match config.train.recompute {
            Recompute::None => RecomputeLayers::None,
            Recompute::Block => RecomputeLayers::All,
        };
        let model = plan.build_with(parallel.buffers.params(), &recompute)?;
        let frame = |name, plan: Option<&Arc<FramePlan>>| match plan {
            Some(plan) => Frame::planned(&stream, plan),
            None => Ok(Frame::recording(&stream, name)),
        };
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
            data,
            scale,
            inputs,
            loss,
            parallel,
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
        self.scale.begin_step(&stream, parts.iter().map(|part| counted(part.targets)).sum())?;
        for (at, part) in parts.iter().enumerate() {
            stream.upload(&self.inputs.tokens, part.inputs.to_vec())?;
            stream.upload(&self.inputs.targets, part.targets.to_vec())?;
            self.scale.begin_microbatch(&stream, counted(part.targets))?;
            self.microbatch(at, if at + 1 == parts.len() { Place::Last } else { Place::Inner })?;
        }
        self.clock.passed(&stream)?;
        let tokens = Factor::Const(self.inputs.tokens.numel() as f32);
        stream.launch(Sum { x: &self.inputs.losses, factor: tokens, total: &self.loss }.op("loss")?)?;
        self.data.all_reduce(&stream, &self.loss, Reduce::Avg)?;
        self.parallel.step(lr)?;
        self.clock.end(self.parallel.updates())
    }

    fn microbatch(&mut self, at: usize, place: Place) -> Result<(), TrainError> {
        let RankRun { stream, model, parallel, frame, scale, clock, .. } = self;
        let Inputs { tokens, targets, losses, .. } = &self.inputs;
        let loss = losses.flat(at..at + 1)?;
        let token_scale = scale.factor();
        let microbatch = Microbatch { tokens, targets, loss: &loss, token_scale, slot: 0 };
        let mut aside = aside(frame, at);
        let frame = aside.as_mut().unwrap_or(frame);
        frame.restart();
        parallel.microbatch(stream, place, |weights| {
            model.forward_loss(frame, weights, &microbatch)?;
            // The model's mean is over all tokens, those that do not count included.
            stream.launch(Scale { x: &loss, factor: token_scale, y: &loss }.op("loss")?)?;
            clock.lap(stream, Phase::Forward)?;
            weights.enter(Pass::Backward);
            model.backward(frame, weights, 0)?;
            clock.lap(stream, Phase::Backward)
        })
    }

    /// The host waits until every rank has come here with nothing in flight.
    pub(super) fn meet(&self) -> Result<(), TrainError> {
        self.stop.everyone().barrier(&self.stream)?;
        Ok(self.stream.device().synchronize()?)
    }

    /// Where the host puts a microbatch's tokens, i32 `[micro_batch, seq_len]`.
    pub(super) fn tokens(&self) -> &View {
        &self.inputs.tokens
    }

    /// Where the host puts a microbatch's targets, as tokens.
    pub(super) fn targets(&self) -> &View {
        &self.inputs.targets
    }

    /// Submits a pass that gives the logits `[1, vocab]` behind position `at` of `tokens`, `seq_len` of them.
    pub(super) fn next_logits(&mut self, tokens: &[i32], at: usize) -> Result<View, TrainError> {
        self.stream.upload(&self.inputs.prompt, tokens.to_vec())?;
        self.sample_frame.restart();
        let mut weights = Whole::new(Turn::eager(Pass::Forward));
        Ok(self.model.logits(&mut self.sample_frame, &mut weights, &self.inputs.prompt, at)?)
    }
}

impl Inputs {
    fn alloc(rank: &Rank, config: &Config) -> Result<Inputs, TrainError> {
        let alloc = |label: &str, shape: &[usize], dtype| rank.device.alloc(label, shape, dtype, MemoryKind::Other);
        let batch = [config.train.micro_batch as usize, config.model.seq_len];
        Ok(Inputs {
            tokens: alloc("tokens", &batch, DType::I32)?,
            targets: alloc("targets", &batch, DType::I32)?,
            prompt: alloc("prompt", &[1, config.model.seq_len], DType::I32)?,
            losses: alloc("losses", &[config.microbatches() as usize], DType::F32)?,
        })
    }
}

/// A frame for a later pass while `frame` records: a plan is read off one pass, because a buffer that several passes
/// use would seem to be in use all the time between them.
pub(super) fn aside(frame: &Frame, pass: usize) -> Option<Frame> {
    (pass > 0 && frame.arena().is_none()).then(|| Frame::recording(frame.stream(), "later passes"))
}

/// The model that a configuration asks for.
pub(crate) fn gpt_plan(config: &Config) -> Result<GptPlan, TrainError> {
    let m = &config.model;
    let arch = match m.arch {
        Arch::Gpt2 => model::Arch::Gpt2,
        Arch::Llama => {
            let rope_base = m.rope_base.unwrap_or(LlamaConfig::ROPE_BASE);
            model::Arch::Llama(LlamaConfig { kv_heads: m.kv_heads, rope_base })
        }
    };
    Ok(GptPlan::new(model::GptConfig {
        arch,
        layers: m.layers,
        dim: m.dim,
        heads: m.heads,
        ffn_dim: m.ffn_dim,
        vocab: m.vocab,
        vocab_rows: m.vocab,
        seq_len: m.seq_len,
        output: if m.tied { model::Output::Tied } else { model::Output::Own },
    })?)
}
