//! Settings of an optimizer.

use crate::{DdpError, LossScaleConfig};

/// AdamW's own settings, which hold for a whole run.
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
    fn check(&self) -> Result<(), DdpError> {
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            setting((0.0..1.0).contains(&beta), name, beta, "it must be at least 0 and under 1")?;
        }
        setting(self.eps > 0.0, "eps", self.eps, "it must be over 0")?;
        setting(self.clip >= 0.0, "clip", self.clip, "it must not be negative; 0 turns clipping off")
    }
}

/// Parameters that share a weight decay and bounds of the learning rate. Groups are never merged, also if they are
/// equal: a schedule, or a checkpoint, finds each by its place.
#[derive(Clone, PartialEq, Debug)]
pub struct ParamGroup {
    /// For messages and checkpoints.
    pub name: String,
    /// Multiplied by the learning rate and subtracted from the weight; not negative.
    pub weight_decay: f64,
    /// The highest learning rate of its schedule.
    pub max_lr: f64,
    /// The lowest, behind warm-up.
    pub min_lr: f64,
}

/// Which norm of the gradients is clipped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum NormKind {
    /// The root of the sum of squares.
    #[default]
    L2,
    /// The largest magnitude.
    Inf,
}

/// Settings that hold for a whole run.
#[derive(Clone, PartialEq, Debug)]
pub struct OptimizerConfig {
    /// Betas, eps, and the norm above which gradients are clipped, 0 for none.
    pub adam: AdamConfig,
    /// Which norm.
    pub norm: NormKind,
    /// Whether gradients are checked where nothing is clipped.
    pub check: GradCheck,
    /// Whether the zeros among the gradients are counted.
    pub zeros: CountZeros,
    /// At least one.
    pub groups: Vec<ParamGroup>,
    /// Dynamic loss scale; none: losses are not scaled.
    pub loss_scale: Option<LossScaleConfig>,
}

/// Whether gradients are checked where nothing is clipped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GradCheck {
    /// Yes: one that is not finite skips the step. All buckets wait for the last one.
    #[default]
    Always,
    /// No: buckets are stepped one by one, each as soon as it is reduced.
    WithClip,
}

/// Whether the zeros among the gradients are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CountZeros {
    /// No.
    #[default]
    Off,
    /// In each step, behind clipping. All buckets wait for the last one, and are checked.
    EachStep,
}

impl Default for OptimizerConfig {
    /// [`AdamConfig`]'s, L2, checked, zeros not counted, one group without weight decay, no loss scale.
    fn default() -> OptimizerConfig {
        let group = ParamGroup { name: "all".to_owned(), weight_decay: 0.0, max_lr: 1e-3, min_lr: 0.0 };
        OptimizerConfig {
            adam: AdamConfig::default(),
            norm: NormKind::L2,
            check: GradCheck::Always,
            zeros: CountZeros::Off,
            groups: vec![group],
            loss_scale: None,
        }
    }
}

impl OptimizerConfig {
    /// Whether a step looks at all gradients before it changes anything.
    #[must_use]
    pub fn checks(&self) -> bool {
        let counts = self.zeros == CountZeros::EachStep;
        counts || self.adam.clip > 0.0 || self.check == GradCheck::Always || self.loss_scale.is_some()
    }

    pub(crate) fn check(&self) -> Result<(), DdpError> {
        self.adam.check()?;
        setting(!self.groups.is_empty(), "groups", 0.0, "there must be at least one")?;
        for group in &self.groups {
            setting(group.weight_decay >= 0.0, "weight_decay", group.weight_decay, "it must not be negative")?;
            setting(group.min_lr >= 0.0, "min_lr", group.min_lr, "it must not be negative")?;
            setting(group.max_lr >= group.min_lr, "max_lr", group.max_lr, "it must not be under min_lr")?;
        }
        self.loss_scale.map_or(Ok(()), |scale| scale.check())
    }

    /// The first setting in which two differ.
    pub(crate) fn difference(&self, other: &OptimizerConfig) -> Option<&'static str> {
        let differences = [
            (self.adam == other.adam, "betas, eps or clip"),
            (self.norm == other.norm, "norm"),
            (self.check == other.check, "check"),
            (self.zeros == other.zeros, "count of zeros"),
            (self.groups == other.groups, "groups"),
            (self.loss_scale == other.loss_scale, "loss scale"),
        ];
        differences.iter().find(|(same, _)| !same).map(|(_, what)| *what)
    }
}

fn setting(holds: bool, setting: &'static str, value: f64, rule: &'static str) -> Result<(), DdpError> {
    if holds { Ok(()) } else { Err(DdpError::Setting { setting, value, rule }) }
}
