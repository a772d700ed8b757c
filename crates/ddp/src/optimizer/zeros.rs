//! How many gradients are zero: each element of the model is looked at once.

use device::{
    Access, Args, DType, Device, MemoryKind, Op, OpError, Reduce, Stream, View, bf16,
    ops::{Add, Factor, Fill, Sum},
};
use pgroups::{Group, ParamClass};

use super::{norm::ModelGroups, shards::Part};
use crate::DdpError;

/// Where the zeros of the whole model are added up.
pub(super) struct ZeroCount {
    classes: Vec<ClassZeros>,
    /// f32 `[1]`: of all classes.
    total: View,
}

/// The part of one class.
struct ClassZeros {
    class: ParamClass,
    /// Reduced over, if shards were counted.
    shards: Option<Group>,
    /// Operations that count in one bucket each.
    count: Vec<Op>,
    /// f32 `[buckets]`; none if this rank counts nothing.
    counts: Option<View>,
    /// f32 `[1]`.
    total: View,
}

impl ZeroCount {
    pub(super) fn new(parts: &[Part], device: &Device) -> Result<ZeroCount, DdpError> {
        let has_experts = parts.iter().any(|part| part.core.expert.is_some());
        // Dense always: a rank without parameters takes part in the sum.
        let classes = [ParamClass::Dense].into_iter().chain(has_experts.then_some(ParamClass::Expert));
        Ok(ZeroCount {
            classes: classes.map(|class| ClassZeros::new(parts, class, device)).collect::<Result<_, _>>()?,
            total: device.alloc("ddp.zeros", &[1], DType::F32, MemoryKind::Optimizer)?,
        })
    }

    pub(super) fn total(&self) -> &View {
        &self.total
    }

    /// Submits everything up to the total, which is the same on all ranks.
    pub(super) fn measure(&self, model: &ModelGroups, stream: &Stream) -> Result<(), DdpError> {
        stream.launch(Fill { y: &self.total, value: 0.0 }.op("ddp.zeros")?)?;
        for class in &self.classes {
            class.measure(model.of(class.class), stream)?;
            stream.launch(Add { a: &class.total, b: &self.total, y: &self.total }.op("ddp.zeros")?)?;
        }
        Ok(())
    }
}

impl ClassZeros {
    fn new(parts: &[Part], class: ParamClass, device: &Device) -> Result<ClassZeros, DdpError> {
        let counted: Vec<_> = parts.iter().flat_map(|part| part.counted(class)).collect();
        let alloc = |label: &str, numel| device.alloc(label, &[numel], DType::F32, MemoryKind::Optimizer);
        let counts = (!counted.is_empty()).then(|| alloc("ddp.zeros.counts", counted.len())).transpose()?;
        let mut count = Vec::new();
        for (i, (grads, ranges)) in counted.into_iter().enumerate() {
            let into = counts.as_ref().expect("BUG: allocated for these").flat(i..i + 1)?;
            let accesses = vec![Access::read(&grads), Access::write(&into)];
            count.push(Op::host("count_zeros", "ddp.zeros", accesses, move |args| {
                let zeros: usize = ranges.iter().map(|range| zeros(args, range.clone())).sum::<Result<_, _>>()?;
                args.write::<f32>(1)?[0] = zeros as f32;
                Ok(())
            }));
        }
        let peers = parts.first().map(|part| part.core.peers(class));
        Ok(ClassZeros {
            class,
            shards: peers.filter(|peers| peers.sharded).map(|peers| peers.norm.clone()),
            count,
            counts,
            total: alloc("ddp.zeros.class", 1)?,
        })
    }

    fn measure(&self, model: &Group, stream: &Stream) -> Result<(), DdpError> {
        for op in &self.count {
            stream.launch(op.clone())?;
        }
        let total = &self.total;
        stream.launch(match &self.counts {
            Some(x) => Sum { x, factor: Factor::Const(1.0), total }.op("ddp.zeros")?,
            None => Fill { y: total, value: 0.0 }.op("ddp.zeros")?,
        })?;
        for group in self.shards.iter().chain([model]) {
            group.all_reduce(stream, total, Reduce::Sum)?;
        }
        Ok(())
    }
}

fn zeros(args: &Args<'_>, range: std::ops::Range<usize>) -> Result<usize, OpError> {
    Ok(match args.dtype(0)? {
        DType::Bf16 => args.read::<bf16>(0)?[range].iter().filter(|x| x.to_f32() == 0.0).count(),
        _ => args.read::<f32>(0)?[range].iter().filter(|x| **x == 0.0).count(),
    })
}
