//! One norm for the whole model: every element is counted once, whoever holds copies of it.

use device::{
    Access, Args, DType, Device, MemoryKind, Op, OpError, Reduce, Stream, View, bf16,
    ops::{Add, Axpy, ClipFactor, Factor, Fill, Scale, SquaredNorm, Sum},
};
use pgroups::{Group, Key, ParamClass, ProcessGroups};

use super::shards::Part;
use crate::{DdpError, NormKind, attach::second, core::Peers};

/// The ranks that hold one copy of the model.
pub(super) struct ModelGroups {
    dense: Group,
    expert: Option<Group>,
}

impl ModelGroups {
    pub(super) fn new(groups: &ProcessGroups, has_experts: bool) -> Result<ModelGroups, DdpError> {
        let open = |key: &Key, who: &'static str| -> Result<Group, DdpError> {
            second(groups.derived(key, who)?.unwrap_or_else(|| groups.single()), "ddp_norm")
        };
        let dense = open(&Key::MP, "norm of all gradients")?;
        let expert = has_experts.then(|| open(&Key::TP_EP_PP, "norm of experts' gradients")).transpose()?;
        Ok(ModelGroups { dense, expert })
    }

    /// Of several chunks of a model, one has the experts.
    pub(super) fn join(&mut self, other: ModelGroups) {
        self.expert = self.expert.take().or(other.expert);
    }

    pub(super) fn of(&self, class: ParamClass) -> &Group {
        match (class, &self.expert) {
            (ParamClass::Expert, Some(expert)) => expert,
            _ => &self.dense,
        }
    }
}

/// Where the norm is put together.
pub(super) struct GlobalNorm {
    kind: NormKind,
    classes: Vec<ClassNorm>,
    /// f32 `[1]`: of all classes; a sum of squares, or a maximum.
    total: View,
    /// f32 `[1]`: finite if everything is that this rank owns, counted or not.
    health: View,
    norm: View,
    /// i32 `[1]`.
    skip: View,
}

/// The part of one class.
struct ClassNorm {
    class: ParamClass,
    /// Reduced over, if shards were counted.
    shards: Option<Group>,
    /// Gradients and their partial results.
    spans: Vec<(View, View)>,
    /// Partial results that are counted here; none if there are none.
    counted: Option<View>,
    /// All partial results.
    all: Option<View>,
    /// f32 `[1]`.
    total: View,
    /// f32 `[1]`.
    health: View,
}

impl GlobalNorm {
    pub(super) fn new(parts: &[Part], kind: NormKind, device: &Device) -> Result<GlobalNorm, DdpError> {
        let scalar = |label: &str, dtype| device.alloc(label, &[1], dtype, MemoryKind::Optimizer);
        let mut classes = Vec::new();
        for class in [ParamClass::Dense, ParamClass::Expert] {
            let experts = parts.iter().any(|part| part.core.expert.is_some());
            // Dense always: a rank without parameters takes part in the decision.
            if class == ParamClass::Dense || experts {
                classes.push(ClassNorm::new(parts, class, kind, device)?);
            }
        }
        Ok(GlobalNorm {
            kind,
            classes,
            total: scalar("ddp.norm.total", DType::F32)?,
            health: scalar("ddp.norm.health", DType::F32)?,
            norm: scalar("ddp.norm", DType::F32)?,
            skip: scalar("ddp.skip", DType::I32)?,
        })
    }

    pub(super) fn value(&self) -> &View {
        &self.norm
    }

    pub(super) fn skip(&self) -> &View {
        &self.skip
    }

    /// Submits everything up to the total, which has the same bits on all ranks.
    pub(super) fn measure(&self, model: &ModelGroups, stream: &Stream) -> Result<(), DdpError> {
        for class in &self.classes {
            class.measure(self.kind, model.of(class.class), stream)?;
        }
        let combine = |views: Vec<&View>, into: &View| -> Result<(), DdpError> {
            let op = match (views.as_slice(), self.kind) {
                // No round trip to the host where a copy does it.
                ([x], _) => Scale { x, y: into, factor: Factor::Const(1.0) }.op("ddp.norm")?,
                ([a, b], NormKind::L2) => Add { a, b, y: into }.op("ddp.norm")?,
                (views, _) => {
                    let mut accesses = vec![Access::write(into)];
                    accesses.extend(views.iter().map(|view| Access::read(view)));
                    Op::host("largest", "ddp.norm", accesses, |args| {
                        let mut most = 0.0;
                        for i in 1..args.len() {
                            most = larger(most, args.read::<f32>(i)?[0]);
                        }
                        args.write::<f32>(0)?[0] = most;
                        Ok(())
                    })
                }
            };
            Ok(stream.launch(op)?)
        };
        combine(self.classes.iter().map(|class| &class.total).collect(), &self.total)?;
        combine(self.classes.iter().map(|class| &class.health).collect(), &self.health)?;
        // 0 times what is not finite is NaN: one that nobody counts still skips the step.
        let health = Axpy { alpha: Factor::Const(0.0), x: &self.health, y: &self.total };
        Ok(stream.launch(health.op("ddp.norm")?)?)
    }

    /// Norm of the unscaled gradients, skip flag, and what gradients are multiplied by.
    pub(super) fn clip(
        &self,
        limit: f64,
        unscale: Option<&View>,
        factor: &View,
        stream: &Stream,
    ) -> Result<(), DdpError> {
        if let (NormKind::L2, None) = (self.kind, unscale) {
            let (squared, norm, nonfinite) = (&self.total, &self.norm, &self.skip);
            let clip = ClipFactor { squared, limit: limit as f32, norm, factor, nonfinite };
            return Ok(stream.launch(clip.op("ddp.clip")?)?);
        }
        let mut accesses = vec![Access::read(&self.total)];
        accesses.extend([&self.norm, factor, &self.skip].map(Access::write));
        accesses.extend(unscale.map(Access::read));
        let kind = self.kind;
        let op = Op::host("clip_scaled", "ddp.clip", accesses, move |args| {
            let total = f64::from(args.read::<f32>(0)?[0]);
            let scale = if args.len() > 4 { f64::from(args.read::<f32>(4)?[0]) } else { 1.0 };
            let norm = if kind == NormKind::L2 { total.sqrt() } else { total } / scale;
            args.write::<f32>(1)?[0] = norm as f32;
            args.write::<f32>(2)?[0] = match limit {
                _ if !norm.is_finite() => 0.0,
                0.0 => (1.0 / scale) as f32,
                _ => ((limit / (norm + 1e-6)).min(1.0) / scale) as f32,
            };
            args.write::<i32>(3)?[0] = i32::from(!norm.is_finite());
            Ok(())
        });
        Ok(stream.launch(op)?)
    }
}

impl ClassNorm {
    fn new(parts: &[Part], class: ParamClass, kind: NormKind, device: &Device) -> Result<ClassNorm, DdpError> {
        let mut gradients = [Vec::new(), Vec::new()];
        for part in parts {
            for (all, own) in gradients.iter_mut().zip(part.gradients(class)?) {
                all.extend(own);
            }
        }
        let partials = |view: &View| match kind {
            NormKind::L2 => SquaredNorm::partials(view.numel()),
            NormKind::Inf => 1,
        };
        let [counted, elsewhere] =
            [&gradients[0], &gradients[1]].map(|views| views.iter().map(partials).sum::<usize>());
        let alloc = |label: &str, numel| device.alloc(label, &[numel], DType::F32, MemoryKind::Optimizer);
        let all = alloc("ddp.norm.partials", counted + elsewhere)?;
        let mut at = 0;
        let mut spans = Vec::new();
        for grad in gradients.into_iter().flatten() {
            let end = at + partials(&grad);
            spans.push((grad, all.flat(at..end)?));
            at = end;
        }
        let some = |view: View| (view.numel() > 0).then_some(view);
        let peers: Option<&Peers> = parts.first().map(|part| part.core.peers(class));
        Ok(ClassNorm {
            class,
            shards: peers.filter(|peers| peers.sharded).map(|peers| peers.norm.clone()),
            spans,
            counted: some(all.flat(0..counted)?),
            all: some(all),
            total: alloc("ddp.norm.class", 1)?,
            health: alloc("ddp.norm.class_health", 1)?,
        })
    }

    fn measure(&self, kind: NormKind, model: &Group, stream: &Stream) -> Result<(), DdpError> {
        for (grad, partials) in &self.spans {
            let op = match kind {
                NormKind::L2 => SquaredNorm { x: grad, partials }.op("ddp.norm")?,
                NormKind::Inf => largest_magnitude(grad, partials),
            };
            stream.launch(op)?;
        }
        let reduce = match kind {
            NormKind::L2 => Reduce::Sum,
            NormKind::Inf => Reduce::Max,
        };
        // Squares have no signs, so a sum of them is finite only if they are; it is made without the host.
        for (partials, total) in [(&self.counted, &self.total), (&self.all, &self.health)] {
            let op = match (partials, reduce) {
                (None, _) => Fill { y: total, value: 0.0 }.op("ddp.norm")?,
                (Some(x), Reduce::Max) => largest_magnitude(x, total),
                (Some(x), _) => Sum { x, factor: Factor::Const(1.0), total }.op("ddp.norm")?,
            };
            stream.launch(op)?;
        }
        for group in self.shards.iter().chain([model]) {
            let batch = group.batch().all_reduce(&self.total, reduce).all_reduce(&self.health, Reduce::Max);
            batch.submit(stream)?;
        }
        Ok(())
    }
}

/// One element: the largest magnitude; NaN wins.
fn largest_magnitude(x: &View, most: &View) -> Op {
    Op::host("largest_magnitude", "ddp.norm", vec![Access::read(x), Access::write(most)], |args| {
        let most = magnitude(args)?;
        args.write::<f32>(1)?[0] = most;
        Ok(())
    })
}

fn magnitude(args: &Args<'_>) -> Result<f32, OpError> {
    Ok(match args.dtype(0)? {
        DType::Bf16 => args.read::<bf16>(0)?.iter().map(|x| x.to_f32()).fold(0.0, |a, b| larger(a, b.abs())),
        _ => args.read::<f32>(0)?.iter().fold(0.0, |a, b| larger(a, b.abs())),
    })
}

fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || b <= a { a } else { b }
}
