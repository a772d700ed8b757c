//! Dynamic loss scale: as large as gradients allow.

use device::{Access, DType, MemoryKind, Op, Stream, View, ops::Fill};

use crate::DdpError;

/// Settings of a dynamic loss scale.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LossScaleConfig {
    /// To begin with.
    pub initial: f32,
    /// Never under this.
    pub floor: f32,
    /// Multiplied in behind a run of clean steps; over 1.
    pub growth: f32,
    /// Multiplied in behind skipped steps; under 1.
    pub backoff: f32,
    /// Clean steps in a run.
    pub interval: u32,
    /// Skipped steps before it backs off; only a whole run of clean steps restores them.
    pub hysteresis: u32,
}

impl Default for LossScaleConfig {
    /// 65536, at least 1, doubled behind 1000 clean steps, halved at the second skipped one.
    fn default() -> LossScaleConfig {
        LossScaleConfig { initial: 65536.0, floor: 1.0, growth: 2.0, backoff: 0.5, interval: 1000, hysteresis: 2 }
    }
}

impl LossScaleConfig {
    pub(crate) fn check(&self) -> Result<(), DdpError> {
        let setting = |holds: bool, setting, value: f32, rule| {
            if holds { Ok(()) } else { Err(DdpError::Setting { setting, value: value.into(), rule }) }
        };
        setting(self.floor > 0.0, "loss_scale.floor", self.floor, "it must be over 0")?;
        setting(self.initial >= self.floor, "loss_scale.initial", self.initial, "it must not be under the floor")?;
        setting(self.growth > 1.0, "loss_scale.growth", self.growth, "it must be over 1")?;
        setting((0.0..1.0).contains(&self.backoff), "loss_scale.backoff", self.backoff, "it must be under 1")?;
        setting(self.interval > 0, "loss_scale.interval", 0.0, "it must be at least 1")?;
        setting(self.hysteresis > 0, "loss_scale.hysteresis", 0.0, "it must be at least 1")
    }
}

/// A loss scale, and how far it is from changing.
///
/// Source: Megatron-LM, `DynamicGradScaler` (behaviour only).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LossScale {
    /// The scale.
    pub scale: f32,
    /// Clean steps of the present run.
    pub clean: i32,
    /// Skipped steps left before it backs off; below 0 each one backs off.
    pub hysteresis: i32,
}

impl LossScale {
    /// To begin with.
    #[must_use]
    pub fn new(config: &LossScaleConfig) -> LossScale {
        LossScale { scale: config.initial, clean: 0, hysteresis: config.hysteresis as i32 }
    }

    /// Behind a step that was skipped, or was not.
    pub fn update(&mut self, config: &LossScaleConfig, step: StepOutcome) {
        match step {
            StepOutcome::Skipped => {
                self.clean = 0;
                self.hysteresis -= 1;
                if self.hysteresis <= 0 {
                    self.scale = (self.scale * config.backoff).max(config.floor);
                }
            }
            StepOutcome::Taken => {
                self.clean += 1;
                if self.clean == config.interval as i32 {
                    self.clean = 0;
                    self.hysteresis = config.hysteresis as i32;
                    self.scale *= config.growth;
                }
            }
        }
    }
}

/// What became of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepOutcome {
    /// All gradients were finite.
    Taken,
    /// Some were not.
    Skipped,
}

/// A loss scale on the device, so that nobody waits for the decision.
pub(super) struct DeviceScale {
    config: LossScaleConfig,
    /// f32 `[1]`.
    scale: View,
    /// i32 `[2]`: clean steps, hysteresis.
    counts: View,
}

impl DeviceScale {
    pub(super) fn new(config: LossScaleConfig, stream: &Stream) -> Result<DeviceScale, DdpError> {
        let device = stream.device();
        let scale = device.alloc("loss_scale", &[1], DType::F32, MemoryKind::Optimizer)?;
        let counts = device.alloc("loss_scale.counts", &[2], DType::I32, MemoryKind::Optimizer)?;
        stream.launch(Fill { y: &scale, value: config.initial }.op("loss_scale")?)?;
        stream.upload(&counts, vec![0, config.hysteresis as i32])?;
        Ok(DeviceScale { config, scale, counts })
    }

    pub(super) fn value(&self) -> &View {
        &self.scale
    }

    /// Behind the decision whether the step is skipped.
    pub(super) fn update(&self, skip: &View, stream: &Stream) -> Result<(), DdpError> {
        let config = self.config;
        let accesses = vec![Access::update(&self.scale), Access::update(&self.counts), Access::read(skip)];
        let op = Op::host("update_loss_scale", "ddp.loss_scale", accesses, move |args| {
            let skipped = args.read::<i32>(2)?[0] != 0;
            let (scale, counts) = (args.write::<f32>(0)?, args.write::<i32>(1)?);
            let mut state = LossScale { scale: scale[0], clean: counts[0], hysteresis: counts[1] };
            state.update(&config, if skipped { StepOutcome::Skipped } else { StepOutcome::Taken });
            scale[0] = state.scale;
            counts.copy_from_slice(&[state.clean, state.hysteresis]);
            Ok(())
        });
        Ok(stream.launch(op)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(config: LossScaleConfig, flags: &[u32]) -> Vec<(f32, i32, i32)> {
        let mut state = LossScale::new(&config);
        let step = |flag| if flag == 1 { StepOutcome::Skipped } else { StepOutcome::Taken };
        let mut next = |&flag: &u32| {
            state.update(&config, step(flag));
            (state.scale, state.clean, state.hysteresis)
        };
        flags.iter().map(&mut next).collect()
    }

    #[test]
    fn only_a_whole_run_of_clean_steps_restores_hysteresis() {
        let config = LossScaleConfig { interval: 3, ..LossScaleConfig::default() };
        let got = trace(config, &[0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]);
        let want = [
            (65536., 1, 2),
            (65536., 0, 1),
            (32768., 0, 0),
            (32768., 1, 0),
            (32768., 2, 0),
            (65536., 0, 2),
            (65536., 0, 1),
            (32768., 0, 0),
            (16384., 0, -1),
            (16384., 1, -1),
            (16384., 2, -1),
            (32768., 0, 2),
            (32768., 1, 2),
            (32768., 2, 2),
            (65536., 0, 2),
        ];
        assert_eq!(got, want);
    }

    #[test]
    fn the_scale_stops_at_its_floor() {
        let config = LossScaleConfig { initial: 4.0, hysteresis: 1, ..LossScaleConfig::default() };
        let scales: Vec<f32> = trace(config, &[1; 5]).iter().map(|state| state.0).collect();
        assert_eq!(scales, [2., 1., 1., 1., 1.]);
    }
}
