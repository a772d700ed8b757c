//! AdamW over flat buffers. Everything that changes from step to step is device memory, so that a step can be
//! captured: learning rate, step count, bias corrections, clip factor, and the flag that skips a step.

use std::ops::Range;

use device::ops::{AdamW, AdvanceAdam, ClipFactor, Factor, Fill, Hyper, SquaredNorm, Sum};
use device::{DType, MemoryKind, Stream, View};

use crate::DdpError;

/// Settings that hold for a whole run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamConfig {
    /// Decay of the first moment, in 0..1.
    pub beta1: f64,
    /// Decay of the second moment, in 0..1.
    pub beta2: f64,
    /// Added to the root of the second moment, over 0.
    pub eps: f64,
    /// The largest gradient norm that is not clipped; 0 turns clipping off.
    pub clip: f64,
}

impl Default for AdamConfig {
    /// 0.9, 0.95, 1e-8, 1.0.
    fn default() -> Self {
        AdamConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, clip: 1.0 }
    }
}

impl AdamConfig {
    pub(crate) fn check(&self) -> Result<(), DdpError> {
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            setting((0.0..1.0).contains(&beta), name, beta, "it must be at least 0 and under 1")?;
        }
        setting(self.eps > 0.0, "eps", self.eps, "it must be over 0")?;
        setting(self.clip >= 0.0, "clip", self.clip, "it must not be negative; 0 turns clipping off")
    }
}

/// Elements of the flat buffer that share a weight decay.
#[derive(Clone, Debug, PartialEq)]
pub struct DecayRange {
    /// Elements.
    pub range: Range<usize>,
    /// Multiplied by the learning rate and subtracted from the weight; not negative.
    pub weight_decay: f64,
}

/// AdamW with f32 moments over one flat buffer of parameters and one of gradients.
///
/// A step whose gradient norm is NaN or infinite changes no parameter, moment or step count.
pub struct Adam {
    config: AdamConfig,
    values: View,
    grads: View,
    decays: Vec<DecayRange>,
    m: View,
    v: View,
    scalars: View,
    steps: View,
    partials: View,
    squared: View,
    norm: View,
    nonfinite: View,
}

impl Adam {
    /// Moments of zero for `values`, f32 `[numel]`; `grads` has the same sizes. `decays` cover the buffer in order.
    /// The fills are submitted to `stream`.
    ///
    /// # Errors
    /// [`DdpError::Setting`], [`DdpError::DecayRange`], or the device's error.
    pub fn new(
        stream: &Stream,
        values: &View,
        grads: &View,
        decays: &[DecayRange],
        config: AdamConfig,
    ) -> Result<Adam, DdpError> {
        check(values.numel(), decays, config)?;
        let device = stream.device();
        let numel = values.numel();
        let alloc = |label: &str, numel: usize, dtype| device.alloc(label, &[numel], dtype, MemoryKind::Optimizer);
        let scalar = |label: &str, dtype| device.alloc(label, &[1], dtype, MemoryKind::Other);
        let adam = Adam {
            config,
            values: values.clone(),
            grads: grads.clone(),
            decays: merged(decays),
            m: alloc("adam.m", numel, DType::F32)?,
            v: alloc("adam.v", numel, DType::F32)?,
            scalars: device.alloc("adam.scalars", &[Hyper::LEN], DType::F32, MemoryKind::Other)?,
            steps: scalar("adam.steps", DType::I32)?,
            partials: alloc("adam.partials", SquaredNorm::partials(numel), DType::F32)?,
            squared: scalar("adam.squared", DType::F32)?,
            norm: scalar("adam.norm", DType::F32)?,
            nonfinite: scalar("adam.nonfinite", DType::I32)?,
        };
        for view in [&adam.m, &adam.v, &adam.scalars, &adam.steps] {
            stream.launch(Fill { y: view, value: 0.0 }.op("adam.init")?)?;
        }
        Ok(adam)
    }

    /// Submits one step with learning rate `lr`: norm, clip factor, bias corrections, update.
    ///
    /// # Errors
    /// The device's error.
    pub fn step(&self, stream: &Stream, lr: f32) -> Result<(), DdpError> {
        let AdamConfig { beta1, beta2, eps, clip } = self.config;
        stream.upload(&Hyper::entry(&self.scalars, Hyper::LR)?, vec![lr])?;
        stream.launch(SquaredNorm { x: &self.grads, partials: &self.partials }.op("adam.norm")?)?;
        stream.launch(Sum { x: &self.partials, factor: Factor::Const(1.0), total: &self.squared }.op("adam.norm")?)?;
        let factor = Hyper::entry(&self.scalars, Hyper::CLIP)?;
        let clip = ClipFactor {
            squared: &self.squared,
            limit: clip as f32,
            norm: &self.norm,
            factor: &factor,
            nonfinite: &self.nonfinite,
        };
        stream.launch(clip.op("adam.clip")?)?;
        let skip = Some(&self.nonfinite);
        let advance = AdvanceAdam { step: &self.steps, scalars: &self.scalars, skip, beta1, beta2 };
        stream.launch(advance.op("adam.advance")?)?;
        for DecayRange { range, weight_decay } in &self.decays {
            let part = |view: &View| view.flat(range.clone());
            let update = AdamW {
                param: &part(&self.values)?,
                grad: &part(&self.grads)?,
                m: &part(&self.m)?,
                v: &part(&self.v)?,
                copy: None,
                scalars: &self.scalars,
                skip,
                beta1,
                beta2,
                eps,
                weight_decay: *weight_decay,
            };
            stream.launch(update.op("adam.update")?)?;
        }
        Ok(())
    }

    /// f32 `[1]`: gradient norm of the last step, before clipping.
    pub fn grad_norm(&self) -> &View {
        &self.norm
    }

    /// i32 `[1]`: 1 if the last step was skipped because its gradient norm was NaN or infinite.
    pub fn skipped(&self) -> &View {
        &self.nonfinite
    }

    /// i32 `[1]`: steps taken, skipped ones left out.
    pub fn steps(&self) -> &View {
        &self.steps
    }

    /// First and second moment, f32, as the parameters.
    pub fn moments(&self) -> [&View; 2] {
        [&self.m, &self.v]
    }
}

fn setting(holds: bool, setting: &'static str, value: f64, rule: &'static str) -> Result<(), DdpError> {
    if holds { Ok(()) } else { Err(DdpError::Setting { setting, value, rule }) }
}

fn check(numel: usize, decays: &[DecayRange], config: AdamConfig) -> Result<(), DdpError> {
    config.check()?;
    let mut expected = 0;
    for DecayRange { range, weight_decay } in decays {
        setting(*weight_decay >= 0.0, "weight_decay", *weight_decay, "it must not be negative")?;
        if range.start != expected || range.end < range.start || range.end > numel {
            return Err(DdpError::DecayRange { range: range.clone(), expected, numel });
        }
        expected = range.end;
    }
    if expected != numel {
        return Err(DdpError::DecayRange { range: expected..expected, expected: numel, numel });
    }
    Ok(())
}

/// Neighbours with the same decay become one update.
fn merged(decays: &[DecayRange]) -> Vec<DecayRange> {
    let mut out: Vec<DecayRange> = Vec::new();
    for decay in decays.iter().filter(|d| !d.range.is_empty()) {
        match out.last_mut() {
            Some(last) if last.weight_decay == decay.weight_decay => last.range.end = decay.range.end,
            _ => out.push(decay.clone()),
        }
    }
    out
}
