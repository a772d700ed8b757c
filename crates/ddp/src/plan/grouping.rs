//! Which parameters share a buffer.

use device::DType;
use pgroups::ParamClass;

use super::PlannedParam;

/// Element type of stored values.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Stored {
    /// f32.
    F32,
    /// bf16.
    Bf16,
    /// Quantised: one byte an element, whatever its scales.
    OneByte,
}

/// Element type of gradient buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GradType {
    /// f32 for all: small contributions of many microbatches are not lost.
    #[default]
    F32,
    /// As the values are stored; bf16 where they are quantised.
    AsStored,
}

/// What parameters of one buffer have in common.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BufferKey {
    /// Element type of the stored values.
    pub stored: Stored,
    /// Element type of the gradients.
    pub grad: DType,
    /// Dense or of experts.
    pub class: ParamClass,
}

impl GradType {
    /// The gradients' element type for values of a type.
    #[must_use]
    pub fn of(self, stored: Stored) -> DType {
        match (self, stored) {
            (GradType::F32, _) | (GradType::AsStored, Stored::F32) => DType::F32,
            (GradType::AsStored, Stored::Bf16 | Stored::OneByte) => DType::Bf16,
        }
    }
}

/// Keys by first declared parameter, each with its parameters in declared order.
pub(super) fn group(params: &[PlannedParam], grad: GradType) -> Vec<(BufferKey, Vec<usize>)> {
    let mut groups: Vec<(BufferKey, Vec<usize>)> = Vec::new();
    for (i, p) in params.iter().enumerate() {
        let key = BufferKey { stored: p.stored, grad: grad.of(p.stored), class: p.class };
        match groups.iter_mut().find(|(k, _)| *k == key) {
            Some((_, members)) => members.push(i),
            None => groups.push((key, vec![i])),
        }
    }
    groups
}
