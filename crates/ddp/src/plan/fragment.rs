//! What a rank's shard of a bucket holds of each parameter.

use std::ops::Range;

use super::{BucketId, BucketPlan};

/// A parameter's elements in one shard of a bucket, seen from four sides. All ranges have the same length.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fragment {
    /// The parameter's place in the declared order.
    pub param: usize,
    /// In the buffer.
    pub world: Range<usize>,
    /// In the bucket.
    pub in_bucket: Range<usize>,
    /// In the shard.
    pub local: Range<usize>,
    /// In the parameter.
    pub in_param: Range<usize>,
}

impl BucketPlan {
    /// The fragments that the shard owner at `place` has of a bucket, as they lie; whole parameters without
    /// sharding.
    ///
    /// Over all buckets and places the fragments tile every parameter once, and no padding belongs to one.
    ///
    /// # Panics
    /// If the plan has no such bucket.
    #[must_use]
    pub fn fragments(&self, id: BucketId, place: u32) -> Vec<Fragment> {
        let buffer = &self.buffers()[id.buffer];
        let bucket = &buffer.buckets()[id.bucket];
        let shard = buffer.shard(id.bucket, place);
        let of_bucket = buffer.slots().iter().filter(|slot| slot.bucket == id.bucket);
        let cut = of_bucket.filter_map(|slot| {
            let (start, end) = (slot.range.start.max(shard.start), slot.range.end.min(shard.end));
            let from = |origin: usize| start - origin..end - origin;
            (start < end).then(|| Fragment {
                param: slot.param,
                world: start..end,
                in_bucket: from(bucket.range.start),
                local: from(shard.start),
                in_param: from(slot.range.start),
            })
        });
        cut.collect()
    }
}
