//! Which buckets are reduced and published together.

use std::collections::BTreeMap;

use pgroups::ParamClass;

use super::{BufferPlan, Stored};
use crate::DdpError;

/// A bucket of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct BucketId {
    /// The buffer.
    pub buffer: usize,
    /// The bucket in it.
    pub bucket: usize,
}

/// Which buckets of a class share their collectives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Joining {
    /// A group for each bucket. With a one-byte buffer its last bucket takes all buckets of other buffers with it:
    /// they are ready last, and few.
    #[default]
    Separate,
    /// As `Separate`, but nothing joins: gradients are summed in f32 out of line, bucket by bucket.
    NeverJoin,
    /// One group for all.
    One,
}

/// Classes by first buffer, then as the buckets lie.
pub(super) fn join(buffers: &[BufferPlan], joining: Joining) -> Result<Vec<Vec<BucketId>>, DdpError> {
    let mut classes: BTreeMap<ParamClass, Vec<usize>> = BTreeMap::new();
    for (i, buffer) in buffers.iter().enumerate() {
        classes.entry(buffer.key().class).or_default().push(i);
    }
    let mut classes: Vec<Vec<usize>> = classes.into_values().collect();
    classes.sort();
    let mut groups = Vec::new();
    for members in classes {
        groups.extend(join_class(buffers, &members, joining)?);
    }
    Ok(groups)
}

fn join_class(buffers: &[BufferPlan], members: &[usize], joining: Joining) -> Result<Vec<Vec<BucketId>>, DdpError> {
    let ids = |buffer: usize| (0..buffers[buffer].buckets().len()).map(move |bucket| BucketId { buffer, bucket });
    let all = || members.iter().flat_map(|&buffer| ids(buffer));
    let (small, others): (Vec<usize>, Vec<usize>) =
        members.iter().partition(|&&buffer| buffers[buffer].key().stored == Stored::OneByte);
    if small.len() > 1 {
        return Err(DdpError::OneByteBuffers { class: buffers[small[0]].key().class, count: small.len() });
    }
    Ok(match (joining, small.first()) {
        (Joining::One, _) => {
            // One-byte buckets first, as where they are joined.
            let group: Vec<BucketId> = small.iter().chain(&others).flat_map(|&buffer| ids(buffer)).collect();
            vec![group]
        }
        (Joining::Separate, Some(&small)) => {
            let mut groups: Vec<Vec<BucketId>> = ids(small).map(|id| vec![id]).collect();
            let last = groups.last_mut().expect("BUG: a buffer has a parameter, so it has a bucket");
            last.extend(others.iter().flat_map(|&buffer| ids(buffer)));
            groups
        }
        (Joining::Separate | Joining::NeverJoin, _) => all().map(|id| vec![id]).collect(),
    })
}

#[cfg(test)]
mod tests {
    use device::DType;

    use super::*;
    use crate::{BufferKey, Copies, PlanConfig, PlannedParam};

    #[test]
    fn two_one_byte_buffers_of_a_class_are_refused() {
        let param = PlannedParam {
            name: "q".into(),
            numel: 8,
            stored: Stored::OneByte,
            class: ParamClass::Dense,
            copies: Copies::None,
            unit: String::new(),
        };
        let buffer = |grad| {
            let key = BufferKey { stored: Stored::OneByte, grad, class: ParamClass::Dense };
            BufferPlan::new(key, &[0], std::slice::from_ref(&param), &PlanConfig::default())
        };
        let two = [buffer(DType::F32), buffer(DType::Bf16)];
        for joining in [Joining::Separate, Joining::NeverJoin, Joining::One] {
            assert!(matches!(join(&two, joining), Err(DdpError::OneByteBuffers { count: 2, .. })), "{joining:?}");
        }
    }
}
