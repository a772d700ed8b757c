//! Where in an arena each buffer of a pass lies.

use std::{collections::HashMap, fmt};

use crate::{DType, Error, Shape, Stream, Trace, TraceAccess, TraceEvent, View, cpu::Storage};

/// One buffer of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Sizes.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
    /// First byte in the arena.
    pub offset: usize,
    /// First and last operation that uses it, by position in the pass; both ends included.
    pub life: (usize, usize),
}

impl Place {
    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        self.shape.numel() * self.dtype.size_bytes()
    }
}

/// Requests of a pass, in order, each with a place. Pure data: the plan of a dry pass serves any device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FramePlan {
    name: String,
    places: Vec<Place>,
    bytes: usize,
}

impl FramePlan {
    pub(crate) fn from_trace(name: &str, stream: &Stream, views: &[View], trace: &Trace) -> Result<Self, Error> {
        let (rank, own) = (stream.rank(), stream.index());
        let request: HashMap<u32, usize> = views.iter().enumerate().map(|(i, v)| (v.allocation_id(), i)).collect();
        let mut lives: Vec<Option<(usize, usize)>> = vec![None; views.len()];
        let mut step = 0;
        for event in &trace.events {
            let Some((on, accesses)) = submitted(event, rank) else { continue };
            step += 1;
            for i in accesses.iter().filter(|a| a.rank == rank).filter_map(|a| request.get(&a.allocation)) {
                if on != own {
                    let (label, owner) = (views[*i].label().to_owned(), stream.name().to_owned());
                    return Err(Error::PlannedElsewhere { label, owner, stream: format!("#{on}") });
                }
                let life = lives[*i].get_or_insert((step, step));
                life.1 = step;
            }
        }
        let buffers = views.iter().zip(lives).map(|(v, life)| {
            // What no operation touches may be touched by something unseen: it gets bytes of its own.
            (v.shape_value(), v.dtype(), life.unwrap_or((0, step + 1)))
        });
        Ok(FramePlan::lay_out(name, buffers))
    }

    /// Largest first, each as low as the buffers that live at the same time allow.
    fn lay_out(name: &str, buffers: impl Iterator<Item = (Shape, DType, (usize, usize))>) -> FramePlan {
        let mut places: Vec<Place> =
            buffers.map(|(shape, dtype, life)| Place { shape, dtype, offset: 0, life }).collect();
        let mut order: Vec<usize> = (0..places.len()).collect();
        order.sort_by_key(|i| (std::cmp::Reverse(places[*i].bytes()), *i));
        let mut placed: Vec<usize> = Vec::new();
        let mut bytes = 0;
        for i in order {
            let (life, size) = (places[i].life, padded(places[i].bytes()));
            let mut taken: Vec<(usize, usize)> = placed
                .iter()
                .map(|p| &places[*p])
                .filter(|p| p.life.0 <= life.1 && life.0 <= p.life.1)
                .map(|p| (p.offset, p.offset + padded(p.bytes())))
                .collect();
            taken.sort_unstable();
            let offset = taken.iter().fold((0, None), |(low, found), (from, to)| {
                let found = found.or_else(|| (from.saturating_sub(low) >= size).then_some(low));
                (low.max(*to), found)
            });
            places[i].offset = offset.1.unwrap_or(offset.0);
            bytes = bytes.max(places[i].offset + places[i].bytes());
            placed.push(i);
        }
        FramePlan { name: name.to_owned(), places, bytes }
    }

    /// Name of the frame.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// All buffers, in the order of the requests.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// Bytes of the arena.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes that all buffers would take without sharing.
    pub fn unshared_bytes(&self) -> usize {
        self.places.iter().map(Place::bytes).sum()
    }

    /// The most bytes that live at the same time: no arena can be smaller.
    pub fn peak_live_bytes(&self) -> usize {
        let at = |step| self.places.iter().filter(move |p| p.life.0 <= step && step <= p.life.1);
        let live = self.places.iter().map(|p| at(p.life.0).map(Place::bytes).sum());
        live.max().unwrap_or(0)
    }
}

impl fmt::Display for FramePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "arena '{}': {} buffers in {} bytes ({} live at most, {} without sharing)",
            self.name,
            self.places.len(),
            self.bytes,
            self.peak_live_bytes(),
            self.unshared_bytes()
        )
    }
}

/// Buffers start where vector loads are aligned.
fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(Storage::ALIGN)
}

/// The stream and accesses of an operation that `rank` submitted.
fn submitted(event: &TraceEvent, rank: u32) -> Option<(u32, &[TraceAccess])> {
    match event {
        TraceEvent::Op { rank: r, stream, accesses, .. } | TraceEvent::Joint { rank: r, stream, accesses, .. }
            if *r == rank =>
        {
            Some((*stream, accesses))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn buffers() -> impl Strategy<Value = Vec<(usize, usize, usize)>> {
        prop::collection::vec((0usize..5000, 0usize..40, 0usize..12), 0..40)
    }

    fn lay_out(buffers: &[(usize, usize, usize)]) -> FramePlan {
        let shaped = buffers
            .iter()
            .map(|&(numel, from, len)| (Shape::new(&[numel]).expect("one dimension"), DType::F32, (from, from + len)));
        FramePlan::lay_out("test", shaped)
    }

    proptest! {
        #[test]
        fn buffers_that_live_together_share_no_byte(buffers in buffers()) {
            let plan = lay_out(&buffers);
            for (i, a) in plan.places().iter().enumerate() {
                prop_assert!(a.offset + a.bytes() <= plan.bytes() && a.offset % Storage::ALIGN == 0);
                for b in &plan.places()[..i] {
                    let together = a.life.0 <= b.life.1 && b.life.0 <= a.life.1;
                    let apart = a.offset + a.bytes() <= b.offset || b.offset + b.bytes() <= a.offset;
                    prop_assert!(!together || apart, "{a:?} {b:?}");
                }
            }
            prop_assert!(plan.peak_live_bytes() <= plan.bytes());
            prop_assert!(plan.bytes() <= plan.unshared_bytes() + buffers.len() * Storage::ALIGN);
        }
    }

    #[test]
    fn buffers_that_follow_each_other_share_their_bytes() {
        let plan = lay_out(&[(1000, 0, 1), (1000, 2, 1), (1000, 4, 0)]);
        assert_eq!(plan.bytes(), 4000);
        assert_eq!(plan.unshared_bytes(), 12_000);
    }

    #[test]
    fn buffers_that_one_operation_uses_are_live_together() {
        // The last use of the first is the first use of the second.
        let plan = lay_out(&[(1000, 0, 2), (500, 2, 1)]);
        assert_eq!((plan.bytes(), plan.peak_live_bytes()), (4096 + 2000, 6000));
    }

    #[test]
    fn what_no_operation_touches_has_bytes_of_its_own() {
        let dry = crate::Machine::dry();
        dry.trace_start();
        let device = dry.device(0).expect("a device");
        let stream = device.stream("compute").expect("a stream");
        let mut frame = crate::Frame::recording(&stream, "pass");
        let [_unseen, a, c] = [0; 3].map(|_| frame.temp(&[64], DType::F32).expect("a buffer"));
        for view in [&a, &c] {
            let touch = crate::Op::host("touch", "test", vec![crate::Access::write(view)], |_| Ok(()));
            stream.launch(touch).expect("its own stream");
        }
        let plan = frame.plan(&dry.trace_stop()).expect("a plan");
        let offsets: Vec<usize> = plan.places().iter().map(|place| place.offset).collect();
        assert!(offsets[1] == offsets[2] && offsets[0] != offsets[1], "{offsets:?}");
        assert_eq!(plan.bytes(), 2 * 256);
    }
}
