//! The layout of one buffer.

use std::ops::Range;

use super::{BucketSize, BufferKey, BusPadding, Copies, PlanConfig, PlannedParam, default_bucket_numel};

/// Elements that parameter starts are multiples of under sharding.
const START: usize = 64;
/// Elements that bucket ends are multiples of under sharding, besides the number of shards.
const END: usize = 128;
/// As `END`, with bus padding.
const BUS_END: usize = 1 << 16;

/// One flat buffer of values and one of gradients, laid out alike.
#[derive(Clone, PartialEq, Debug)]
pub struct BufferPlan {
    key: BufferKey,
    shards: Option<u32>,
    slots: Vec<Slot>,
    buckets: Vec<Bucket>,
}

/// Where one parameter lies in its buffer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Slot {
    /// Its place in the declared order.
    pub param: usize,
    /// Its elements in the buffer.
    pub range: Range<usize>,
    /// Its bucket in the buffer.
    pub bucket: usize,
}

/// A part of a buffer that is reduced and published as a whole.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bucket {
    /// Its elements in the buffer, padding included.
    pub range: Range<usize>,
    /// Elements up to the end of its last parameter.
    pub unpadded: usize,
    /// Its parameters by place in the declared order, as they lie: last declared first.
    pub params: Vec<usize>,
}

impl BufferPlan {
    pub(super) fn new(key: BufferKey, members: &[usize], params: &[PlannedParam], config: &PlanConfig) -> BufferPlan {
        let shards = config.sharding.shards(key.class);
        let mut filling = Filling { padding: Padding::new(shards, config.bus_padding), at: 0, open: Vec::new() };
        let mut plan = BufferPlan { key, shards, slots: Vec::new(), buckets: Vec::new() };
        let limit = match config.bucket_size {
            BucketSize::Unlimited | BucketSize::PerUnit => usize::MAX,
            BucketSize::Default => default_bucket_numel(shards.unwrap_or(1)),
            BucketSize::Numel(numel) => numel,
        };
        let mut unit: Option<&str> = None;
        for &param in members.iter().rev() {
            let p = &params[param];
            // Completed between stages before it may be stepped, so nobody else should wait with it.
            let alone = shards.is_some() && p.copies == Copies::Shared;
            let next_unit = config.bucket_size == BucketSize::PerUnit && unit.is_some_and(|unit| unit != p.unit);
            if alone || next_unit {
                plan.close(&mut filling);
            }
            unit = Some(&p.unit);
            let start = filling.padding.start(filling.at);
            filling.open.push(param);
            filling.at = start + p.numel;
            plan.slots.push(Slot { param, range: start..filling.at, bucket: plan.buckets.len() });
            if alone || filling.at - plan.numel() >= limit {
                plan.close(&mut filling);
            }
        }
        plan.close(&mut filling);
        plan
    }

    fn close(&mut self, filling: &mut Filling) {
        if filling.open.is_empty() {
            return;
        }
        let start = self.numel();
        let unpadded = filling.at - start;
        filling.at = filling.padding.end(filling.at);
        self.buckets.push(Bucket { range: start..filling.at, unpadded, params: std::mem::take(&mut filling.open) });
    }

    /// What its parameters have in common.
    #[must_use]
    pub fn key(&self) -> &BufferKey {
        &self.key
    }

    /// Shards of each bucket; none without sharding.
    #[must_use]
    pub fn shards(&self) -> Option<u32> {
        self.shards
    }

    /// Its parameters as they lie: last declared first.
    #[must_use]
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Its buckets, in order.
    #[must_use]
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Elements of the buffer, all padding included.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.buckets.last().map_or(0, |bucket| bucket.range.end)
    }

    /// The elements of a bucket that the shard owner at `place` steps; the whole bucket without sharding.
    ///
    /// # Panics
    /// If there is no such bucket.
    #[must_use]
    pub fn shard(&self, bucket: usize, place: u32) -> Range<usize> {
        let range = &self.buckets[bucket].range;
        match self.shards {
            None => range.clone(),
            Some(shards) => {
                let numel = range.len() / shards as usize;
                let start = range.start + place as usize * numel;
                start..start + numel
            }
        }
    }
}

/// The bucket that is being filled.
struct Filling {
    padding: Padding,
    /// Behind the last parameter.
    at: usize,
    open: Vec<usize>,
}

/// What starts and ends are multiples of: 1 without sharding.
struct Padding {
    start: usize,
    end: usize,
}

impl Padding {
    fn new(shards: Option<u32>, bus: BusPadding) -> Padding {
        let end = match bus {
            BusPadding::Off => END,
            BusPadding::On => BUS_END,
        };
        shards.map_or(Padding { start: 1, end: 1 }, |n| Padding { start: START, end: lcm(n as usize, end) })
    }

    fn start(&self, at: usize) -> usize {
        at.next_multiple_of(self.start)
    }

    fn end(&self, at: usize) -> usize {
        at.next_multiple_of(self.end)
    }
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_and_ends_are_padded_as_the_reference_says() {
        let starts = Padding::new(Some(4), BusPadding::Off);
        let got = [0, 1, 63, 64, 65, 100, 128].map(|at| starts.start(at));
        assert_eq!(got, [0, 64, 64, 64, 128, 128, 128]);
        let ends = |shards, at| Padding::new(Some(shards), BusPadding::Off).end(at);
        assert_eq!([1, 127, 128, 129, 1000].map(|at| ends(4, at)), [128, 128, 128, 256, 1024]);
        assert_eq!([1, 384, 385].map(|at| ends(3, at)), [384, 384, 768]);
    }

    #[test]
    fn bucket_ends_divide_by_shards_and_by_what_the_bus_likes() {
        let divisor = |shards, bus| Padding::new(Some(shards), bus).end;
        for shards in [1, 2, 4, 8, 64] {
            assert_eq!([divisor(shards, BusPadding::Off), divisor(shards, BusPadding::On)], [128, 65536], "{shards}");
        }
        for shards in [3, 6, 48, 96] {
            assert_eq!([divisor(shards, BusPadding::Off), divisor(shards, BusPadding::On)], [384, 196_608], "{shards}");
        }
        assert_eq!([divisor(100, BusPadding::Off), divisor(100, BusPadding::On)], [3200, 1_638_400]);
    }
}
