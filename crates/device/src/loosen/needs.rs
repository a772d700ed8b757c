//! What operations need of earlier ones: whoever touched the same bytes.

use std::collections::HashMap;

use crate::{Access, Mode, Region};

/// An access, as far as it orders.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touch {
    allocation: u32,
    region: Region,
    mode: Mode,
}

impl From<&Access> for Touch {
    fn from(access: &Access) -> Touch {
        Touch { allocation: access.view.allocation_id(), region: access.view.region(), mode: access.mode }
    }
}

impl Touch {
    fn conflicts(&self, other: &Touch) -> bool {
        self.mode.conflicts(other.mode) && self.allocation == other.allocation && self.region.overlaps(&other.region)
    }

    /// It writes every byte of `other`; may be false where it does.
    fn replaces(&self, other: &Touch) -> bool {
        let (outer, inner) = (self.region, other.region);
        let covers = outer == inner || (outer.rows == 1 && outer.start <= inner.start && inner.end() <= outer.end());
        self.mode.writes() && covers
    }
}

/// What a node needs of earlier ones.
#[derive(Clone, Default, PartialEq, Debug)]
pub(super) struct Needs {
    /// Those that touch the same memory, one of the two writing. Who is in front of one of these may be left out.
    pub(super) conflicts: Vec<u32>,
    /// Those of which it reads what they wrote.
    pub(super) reads: Vec<u32>,
}

impl Needs {
    fn add(&mut self, before: u32, touched: &Touch, touch: &Touch) {
        self.conflicts.push(before);
        if touched.mode.writes() && touch.mode != Mode::Write {
            self.reads.push(before);
        }
    }

    fn settled(mut self) -> Needs {
        for list in [&mut self.conflicts, &mut self.reads] {
            list.sort_unstable();
            list.dedup();
        }
        self
    }
}

/// By node, what it needs: `touches` are those of each, `is_before` is the order that there was.
///
/// Memory is cut into pieces where accesses begin or end. A touch looks only at what is open in its own pieces, and a
/// read only at writes, so that many readers of a weight, or many weights of one allocation, cost no more than few.
pub(super) fn needs(touches: &[Vec<Touch>], is_before: impl Fn(u32, u32) -> bool) -> Vec<Needs> {
    let mut memory = Memory::cut(touches);
    let mut all = Vec::with_capacity(touches.len());
    for (at, own) in (0..).zip(touches) {
        let mut found = Needs::default();
        for touch in own {
            for piece in memory.pieces(touch) {
                let mut keep = |(before, touched): &(u32, Touch)| {
                    if *before == at || !touched.conflicts(touch) || !is_before(*before, at) {
                        return true;
                    }
                    found.add(*before, touched, touch);
                    !touch.replaces(touched)
                };
                piece.writes.retain(&mut keep);
                if touch.mode.writes() {
                    piece.reads.retain(keep);
                    piece.writes.push((at, *touch));
                } else {
                    piece.reads.push((at, *touch));
                }
            }
        }
        all.push(found.settled());
    }
    all
}

/// By allocation: where its pieces begin, and the pieces.
struct Memory(HashMap<u32, (Vec<usize>, Vec<Piece>)>);

/// Touches of a piece that no later write has replaced.
#[derive(Clone, Default)]
struct Piece {
    reads: Vec<(u32, Touch)>,
    writes: Vec<(u32, Touch)>,
}

impl Memory {
    fn cut(touches: &[Vec<Touch>]) -> Memory {
        let mut memory: HashMap<u32, (Vec<usize>, Vec<Piece>)> = HashMap::new();
        for touch in touches.iter().flatten() {
            let (cuts, _) = memory.entry(touch.allocation).or_default();
            cuts.extend([touch.region.start, touch.region.end()]);
        }
        for (cuts, pieces) in memory.values_mut() {
            cuts.sort_unstable();
            cuts.dedup();
            pieces.resize(cuts.len(), Piece::default());
        }
        Memory(memory)
    }

    /// Those that `touch` lies in.
    fn pieces(&mut self, touch: &Touch) -> &mut [Piece] {
        let (cuts, pieces) = self.0.get_mut(&touch.allocation).expect("BUG: an allocation that is not cut");
        let place = |byte: usize| cuts.partition_point(|cut| *cut < byte);
        &mut pieces[place(touch.region.start)..place(touch.region.end())]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The slow twin: every touch looks at all earlier ones of its allocation that are not replaced.
    fn every_pair(touches: &[Vec<Touch>], is_before: impl Fn(u32, u32) -> bool) -> Vec<Needs> {
        let mut open: Vec<(u32, Touch)> = Vec::new();
        let mut all = Vec::new();
        for (at, own) in (0..).zip(touches) {
            let mut found = Needs::default();
            for touch in own {
                open.retain(|(before, touched)| {
                    if *before == at || !touched.conflicts(touch) || !is_before(*before, at) {
                        return true;
                    }
                    found.add(*before, touched, touch);
                    !touch.replaces(touched)
                });
                open.push((at, *touch));
            }
            all.push(found.settled());
        }
        all
    }

    fn touches() -> impl Strategy<Value = Touch> {
        let region = (0usize..24, 0usize..6, 0usize..4, 0usize..4).prop_map(|(start, row_bytes, rows, gap)| Region {
            start,
            row_bytes,
            rows,
            pitch: row_bytes + gap,
        });
        let mode = prop::sample::select(vec![Mode::Read, Mode::Write, Mode::Update]);
        (0u32..2, region, mode).prop_map(|(allocation, region, mode)| Touch { allocation, region, mode })
    }

    proptest! {
        /// Nodes of three streams that wait for each other now and then, or for nobody.
        #[test]
        fn pieces_of_memory_find_what_every_pair_finds(
            nodes in prop::collection::vec((prop::collection::vec(touches(), 0..4), 0usize..3, any::<[bool; 3]>()), 0..60),
        ) {
            let mut clocks: Vec<[u32; 3]> = Vec::new();
            let mut heads = [[0u32; 3]; 3];
            for (_, stream, waits) in &nodes {
                let mut clock = heads[*stream];
                for other in (0..3).filter(|other| waits[*other]) {
                    (0..3).for_each(|lane| clock[lane] = clock[lane].max(heads[other][lane]));
                }
                clock[*stream] += 1;
                heads[*stream] = clock;
                clocks.push(clock);
            }
            let is_before = |first: u32, second: u32| {
                let stream = nodes[first as usize].1;
                first < second && clocks[second as usize][stream] >= clocks[first as usize][stream]
            };
            let touches: Vec<Vec<Touch>> = nodes.iter().map(|(touches, ..)| touches.clone()).collect();
            prop_assert_eq!(needs(&touches, is_before), every_pair(&touches, is_before));
        }
    }

    #[test]
    fn many_readers_and_many_weights_of_one_allocation_are_looked_at_once() {
        let touch = |start: usize, mode| Touch { allocation: 0, region: Region::contiguous(start, 4), mode };
        let weights = 200;
        let pairs = std::cell::Cell::new(0u64);
        let mut touches: Vec<Vec<Touch>> = vec![(0..weights).map(|w| touch(w * 4, Mode::Write)).collect()];
        let readers = 20_000;
        touches.extend((0..readers).map(|at| vec![touch(at % weights * 4, Mode::Read)]));
        touches.push((0..weights).map(|w| touch(w * 4, Mode::Update)).collect());
        let found = needs(&touches, |first, second| {
            pairs.set(pairs.get() + 1);
            first < second
        });
        assert_eq!(found[readers + 1].conflicts.len(), readers + 1);
        // A pair for each reader with its write, one for each write that is replaced, and one for each read that is.
        assert_eq!(pairs.get(), (2 * readers + weights) as u64);
    }
}
