//! The optimizer of a rank: AdamW on its shards, with one norm and one decision for all ranks.

mod loss_scale; // dynamic loss scale
mod norm; //       the norm of all gradients, counted once
mod settings; //   what holds for a run
mod shards; //     rests of masters, and moments
mod zeros; //      how many gradients are zero

use std::sync::Arc;

use device::{
    DType, MemoryKind, Stream, View,
    ops::{AdvanceAdam, Cast, Fill, Hyper},
};
use pgroups::{After, HostState, ProcessGroups};

use self::{
    loss_scale::DeviceScale,
    norm::{GlobalNorm, ModelGroups},
    shards::Part,
    zeros::ZeroCount,
};
pub use self::{
    loss_scale::{LossScale, LossScaleConfig, StepOutcome},
    settings::{AdamConfig, CountZeros, GradCheck, NormKind, OptimizerConfig, ParamGroup},
    shards::StateViews,
};
use crate::{Buffers, Ddp, DdpError, Scaling, account::StateGates, gates::Crowd, why};

/// AdamW with f32 masters and moments for what this rank owns of every bucket; one or several models step as one.
///
/// f32 values are the masters. bf16 values are the upper halves of theirs, and the optimizer keeps the rests beside
/// them: so a step reads the values, and whoever writes them calls [`refresh_masters`](Optimizer::refresh_masters).
///
/// A step: wait for the reduced gradients, norm and check, clip factor, zeros, count, then bucket by bucket update and
/// publish. A step whose gradients are not all finite on all ranks changes no value, moment or count on any, and
/// still is a write: its unchanged values are published. Everything that changes from step to step is device memory.
pub struct Optimizer {
    config: OptimizerConfig,
    parts: Vec<Part>,
    norm: GlobalNorm,
    zeros: Option<ZeroCount>,
    scale: Option<DeviceScale>,
    /// f32 `[groups, Hyper::LEN]`.
    hyper: View,
    /// By optimizer group: i32 `[1]`.
    steps: Vec<View>,
    model: ModelGroups,
    gates: Arc<StateGates>,
}

impl Optimizer {
    /// State of zero moments for the trained parameters of `ddp`; `group_of` gives each parameter's place in
    /// `config.groups` by its name. Creating it is no step. Submitted to `stream`, which is behind the initial values.
    ///
    /// `groups` has the group of one model copy ([`Key::MP`], and [`Key::TP_EP_PP`] with experts), or what it derives
    /// from: norms are summed over it. Communicators are opened here, on all ranks.
    ///
    /// # Errors
    /// [`DdpError::Setting`], [`DdpError::NoSuchGroup`]; a missing group's; the device's.
    ///
    /// [`Key::MP`]: pgroups::Key::MP
    /// [`Key::TP_EP_PP`]: pgroups::Key::TP_EP_PP
    pub fn new(
        ddp: &Ddp,
        groups: &ProcessGroups,
        config: OptimizerConfig,
        group_of: impl Fn(&str) -> usize,
        stream: &Stream,
    ) -> Result<Optimizer, DdpError> {
        config.check()?;
        let core = ddp.core().clone();
        let late = core.config.scaling == Scaling::PerToken || ddp.completes();
        let has_experts = core.expert.is_some();
        let part = Part::new(core, &config, &group_of, late, stream)?;
        let model = ModelGroups::new(groups, has_experts)?;
        Optimizer::assemble(config, vec![part], model, stream)
    }

    /// Several optimizers, of chunks of one model, that step as one: with one norm, and skipped together.
    ///
    /// # Errors
    /// [`DdpError::EmptyChain`]; [`DdpError::ChainDiffers`] if settings differ.
    pub fn chain(optimizers: Vec<Optimizer>, stream: &Stream) -> Result<Optimizer, DdpError> {
        let mut optimizers = optimizers.into_iter();
        let mut first = optimizers.next().ok_or(DdpError::EmptyChain)?;
        first.open_state(stream)?;
        for (i, next) in optimizers.enumerate() {
            if let Some(what) = first.config.difference(&next.config) {
                return Err(DdpError::ChainDiffers { first: 0, second: i + 1, what });
            }
            next.open_state(stream)?;
            first.model.join(next.model);
            first.parts.extend(next.parts);
        }
        Optimizer::assemble(first.config, first.parts, first.model, stream)
    }

    fn assemble(
        config: OptimizerConfig,
        parts: Vec<Part>,
        model: ModelGroups,
        stream: &Stream,
    ) -> Result<Optimizer, DdpError> {
        let device = stream.device();
        let alloc = |label: &str, numel: usize, dtype| device.alloc(label, &[numel], dtype, MemoryKind::Optimizer);
        let sizes = [config.groups.len(), Hyper::LEN];
        let hyper = device.alloc("hyper", &sizes, DType::F32, MemoryKind::Optimizer)?;
        let mut steps = Vec::new();
        for (place, group) in config.groups.iter().enumerate() {
            let scalars = hyper.rows(place..place + 1)?;
            stream.launch(Fill { y: &scalars, value: 0.0 }.op("ddp.hyper")?)?;
            // Where nothing is clipped or checked, nobody writes it again.
            stream.launch(Fill { y: &Hyper::entry(&scalars, Hyper::CLIP)?, value: 1.0 }.op("ddp.hyper")?)?;
            let step = alloc(&format!("steps.{}", group.name), 1, DType::I32)?;
            stream.launch(Fill { y: &step, value: 0.0 }.op("ddp.steps")?)?;
            steps.push(step);
        }
        let norm = GlobalNorm::new(&parts, config.norm, &device)?;
        for (view, value) in [(norm.value(), 0.0), (norm.skip(), 0.0)] {
            stream.launch(Fill { y: view, value }.op("ddp.norm")?)?;
        }
        let zeros = match config.zeros {
            CountZeros::EachStep => Some(ZeroCount::new(&parts, &device)?),
            CountZeros::Off => None,
        };
        let scale = config.loss_scale.map(|scale| DeviceScale::new(scale, stream)).transpose()?;
        let stepped = device.event("ddp.stepped");
        stream.record(&stepped)?;
        Ok(Optimizer {
            config,
            parts,
            norm,
            zeros,
            scale,
            hyper,
            steps,
            model,
            gates: Arc::new(StateGates { stepped, readers: Crowd::new("ddp.state".into()) }),
        })
    }

    /// Submits one step to `stream`, with a learning rate for each optimizer group.
    ///
    /// Without clipping and check, each bucket is stepped as soon as it is reduced, in that order; else all of them in
    /// the order in which forward reads them.
    ///
    /// # Errors
    /// [`DdpError::Rates`]; [`DdpError::Offloaded`]; those of the device and of the groups.
    pub fn step(&mut self, stream: &Stream, rates: &[f32]) -> Result<(), DdpError> {
        self.parts.iter().try_for_each(|part| part.core.resident(Buffers::All))?;
        self.set_rates(stream, rates)?;
        self.step_at_rates(stream)
    }

    /// Sets the learning rate of each optimizer group, for the steps behind it on the device: the only part of a step
    /// that a graph cannot hold.
    ///
    /// # Errors
    /// [`DdpError::Rates`]; the device's.
    pub fn set_rates(&self, stream: &Stream, rates: &[f32]) -> Result<(), DdpError> {
        if rates.len() != self.config.groups.len() {
            return Err(DdpError::Rates { got: rates.len(), want: self.config.groups.len() });
        }
        self.open_state(stream)?;
        for (group, rate) in rates.iter().enumerate() {
            stream.upload(&Hyper::entry(&self.scalars(group)?, Hyper::LR)?, vec![*rate])?;
        }
        Ok(stream.record(&self.gates.stepped)?)
    }

    /// As [`step`](Optimizer::step), with the rates that are set.
    ///
    /// # Errors
    /// [`DdpError::Offloaded`]; those of the device and of the groups.
    pub fn step_at_rates(&mut self, stream: &Stream) -> Result<(), DdpError> {
        self.parts.iter().try_for_each(|part| part.core.resident(Buffers::All))?;
        let _span = tracing::debug_span!("ddp.step_optimizer").entered();
        self.open_state(stream)?;
        let checked = self.config.checks();
        if checked {
            for part in &self.parts {
                stream.wait(&part.core.finished, why::STEP_AFTER_REDUCE)?;
            }
            self.decide(stream)?;
            if let Some(zeros) = &self.zeros {
                zeros.measure(&self.model, stream)?;
            }
        }
        self.advance(stream, checked)?;
        let skip = checked.then(|| self.norm.skip());
        for part in &self.parts {
            let order: Vec<usize> = match checked {
                true => part.core.first_read.clone(),
                false => part.core.reduce_order.clone(),
            };
            for group in order {
                if !checked {
                    let core = &part.core;
                    let ready = if part.late { &core.finished } else { &core.groups[group].reduced };
                    stream.wait(ready, why::STEP_AFTER_REDUCE)?;
                }
                part.update(group, &self.hyper, skip, &self.config, stream)?;
            }
        }
        if let Some(scale) = &self.scale {
            scale.update(self.norm.skip(), stream)?;
        }
        stream.record(&self.gates.stepped)?;
        self.parts.iter().try_for_each(|part| part.close(stream))
    }

    /// Steps may be submitted to one stream or to another; each is behind the last, and behind who has read of it.
    fn open_state(&self, stream: &Stream) -> Result<(), DdpError> {
        stream.wait(&self.gates.stepped, why::STEP_AFTER_STEP)?;
        Ok(self.gates.readers.settle(stream, why::STEP_AFTER_STATE_READ)?)
    }

    /// Makes norm, flag, counts, rests and moments, and the loss scale, readable by what is submitted to `stream`,
    /// until [`done_state`](Optimizer::done_state).
    ///
    /// # Errors
    /// The device's.
    pub fn read_state(&self, stream: &Stream) -> Result<(), DdpError> {
        Ok(stream.wait(&self.gates.stepped, why::READ_STATE_AFTER_STEP)?)
    }

    /// What was submitted to `stream` so far has read the state: the next step may change it behind that.
    ///
    /// # Errors
    /// The device's.
    pub fn done_state(&self, stream: &Stream) -> Result<(), DdpError> {
        Ok(self.gates.readers.note(After::Stream(stream))?)
    }

    /// Norm, skip flag and clip factor, the same on all ranks.
    fn decide(&self, stream: &Stream) -> Result<(), DdpError> {
        self.norm.measure(&self.model, stream)?;
        let factor = Hyper::entry(&self.scalars(0)?, Hyper::CLIP)?;
        let unscale = self.scale.as_ref().map(DeviceScale::value);
        self.norm.clip(self.config.adam.clip, unscale, &factor, stream)?;
        for group in 1..self.config.groups.len() {
            let own = Hyper::entry(&self.scalars(group)?, Hyper::CLIP)?;
            stream.launch(Cast { x: &factor, y: &own }.op("ddp.clip")?)?;
        }
        Ok(())
    }

    fn advance(&self, stream: &Stream, checked: bool) -> Result<(), DdpError> {
        let (beta1, beta2) = (self.config.adam.beta1, self.config.adam.beta2);
        let skip = checked.then(|| self.norm.skip());
        for (group, step) in self.steps.iter().enumerate() {
            let scalars = &self.scalars(group)?;
            stream.launch(AdvanceAdam { step, scalars, skip, beta1, beta2 }.op("ddp.advance")?)?;
        }
        Ok(())
    }

    /// Of an optimizer group: f32 `[1, Hyper::LEN]`.
    fn scalars(&self, group: usize) -> Result<View, DdpError> {
        Ok(self.hyper.rows(group..group + 1)?)
    }

    /// Makes the masters what the stored values are: behind a load, in whichever order they come on the device.
    ///
    /// # Errors
    /// The device's.
    pub fn refresh_masters(&self, stream: &Stream) -> Result<(), DdpError> {
        self.parts.iter().try_for_each(|part| part.core.resident(Buffers::Values))?;
        self.open_state(stream)?;
        self.parts.iter().try_for_each(|part| part.refresh(stream))?;
        Ok(stream.record(&self.gates.stepped)?)
    }

    /// Name of the first trained parameter, in declared order, whose gradient is not finite on some rank; none if all
    /// are. The host waits. All ranks call it, behind a step that was skipped and before the next one's gradients.
    ///
    /// # Errors
    /// The device's.
    pub fn first_nonfinite(&self, stream: &Stream) -> Result<Option<String>, DdpError> {
        for part in &self.parts {
            part.core.resident(Buffers::Grads)?;
            if let Some(param) = part.first_nonfinite(stream)? {
                return Ok(Some(param));
            }
        }
        Ok(None)
    }

    /// f32 `[1]`: norm of the last step's gradients, unscaled, before clipping. 0 if nothing is clipped or checked.
    #[must_use]
    pub fn grad_norm(&self) -> &View {
        self.norm.value()
    }

    /// i32 `[1]`: 1 if the last step was skipped.
    #[must_use]
    pub fn skipped(&self) -> &View {
        self.norm.skip()
    }

    /// f32 `[1]`: elements of the last step's gradients that are zero, over the whole model, each counted once, also in
    /// a step that was skipped; whole numbers up to 2^24, rounded beyond. None where they are not counted.
    #[must_use]
    pub fn zeros(&self) -> Option<&View> {
        self.zeros.as_ref().map(ZeroCount::total)
    }

    /// i32 `[1]` of an optimizer group: steps taken, skipped ones left out.
    ///
    /// # Panics
    /// If there is no such group.
    #[must_use]
    pub fn steps(&self, group: usize) -> &View {
        &self.steps[group]
    }

    /// f32 `[1]` on the device: what losses are to be multiplied by; none without loss scaling.
    #[must_use]
    pub fn loss_scale(&self) -> Option<&View> {
        self.scale.as_ref().map(DeviceScale::value)
    }

    /// What graphs of whole steps need: who is behind the optimizer's state.
    #[must_use]
    pub fn account(&self) -> Arc<dyn HostState> {
        self.gates.clone()
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &OptimizerConfig {
        &self.config
    }

    /// What is kept of each bucket for the part that this rank owns, in the order of [`Ddp::buckets`].
    pub fn state(&self) -> impl Iterator<Item = StateViews<'_>> {
        self.parts.iter().flat_map(Part::state)
    }
}
