//! Who has touched which memory last.

use std::ops::Range;

use device::{Mode, Region, TraceAccess};

use super::{
    clock::{Epoch, Point},
    hashing::FastMap,
};

/// An operation that touches memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Toucher {
    pub(super) epoch: Epoch,
    /// Place in the trace.
    pub(super) event: u32,
    pub(super) node: Option<u32>,
    /// Counts operations in the order in which they were looked at.
    pub(super) order: u32,
    /// Place among its accesses.
    pub(super) access: u8,
}

/// Two accesses that nothing orders.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clash {
    pub(super) first: Toucher,
    pub(super) second: Toucher,
}

/// A region that some operation has declared. Others that share bytes with it are its neighbours, itself among them.
struct Cell {
    allocation: u32,
    region: Region,
    neighbours: Vec<u32>,
    writer: Option<Toucher>,
    /// Since the last write of exactly this region: the last of each chain.
    readers: Vec<Toucher>,
}

/// All memory of all ranks.
///
/// A race is found for every byte that has one. Let an operation race with an earlier one. If the earlier one is the
/// last of its region that was kept, the two are compared. If it was replaced, it was so by a later access of the same
/// region (or of the same chain, which is ordered): then either those two race, which was found, or the order of the
/// one that was kept and the new one would order the old and the new one.
#[derive(Default)]
pub(super) struct Cells {
    cells: Vec<Cell>,
    by_region: FastMap<(u32, Region), u32>,
    /// By rank, its incarnation and number on it.
    allocations: FastMap<(u32, u32, u32), u32>,
    /// By allocation.
    members: Vec<Vec<u32>>,
}

impl Cells {
    /// Number of the cell that an access touches; none if it touches no byte. `incarnation` counts how often the
    /// rank's device was opened anew.
    pub(super) fn find(&mut self, access: &TraceAccess, incarnation: u32) -> Option<u32> {
        if access.region.is_empty() {
            return None;
        }
        let next = self.allocations.len() as u32;
        let allocation = *self.allocations.entry((access.rank, incarnation, access.allocation)).or_insert(next);
        if allocation == next && self.members.len() == next as usize {
            self.members.push(Vec::new());
        }
        if let Some(cell) = self.by_region.get(&(allocation, access.region)) {
            return Some(*cell);
        }
        let number = self.cells.len() as u32;
        let others = &self.members[allocation as usize];
        let overlapping = others.iter().copied().filter(|&c| self.cells[c as usize].region.overlaps(&access.region));
        let mut neighbours: Vec<u32> = overlapping.collect();
        neighbours.iter().for_each(|&c| self.cells[c as usize].neighbours.push(number));
        neighbours.push(number);
        self.cells.push(Cell { allocation, region: access.region, neighbours, writer: None, readers: Vec::new() });
        self.by_region.insert((allocation, access.region), number);
        self.members[allocation as usize].push(number);
        Some(number)
    }

    /// `by` touches a cell, behind `point`. Whatever it races with is handed to `clash`.
    pub(super) fn touch(&mut self, cell: u32, mode: Mode, by: Toucher, point: &Point, mut clash: impl FnMut(Clash)) {
        let neighbours = std::mem::take(&mut self.cells[cell as usize].neighbours);
        for &other in &neighbours {
            let other = &self.cells[other as usize];
            let against = |earlier: &&Toucher| !point.is_behind(earlier.epoch);
            other.writer.iter().filter(against).for_each(|&first| clash(Clash { first, second: by }));
            if mode.writes() {
                other.readers.iter().filter(against).for_each(|&first| clash(Clash { first, second: by }));
            }
        }
        let own = &mut self.cells[cell as usize];
        own.neighbours = neighbours;
        if mode.writes() {
            own.writer = Some(by);
            own.readers.clear();
        } else {
            match own.readers.iter_mut().find(|reader| reader.epoch.chain == by.epoch.chain) {
                Some(reader) => *reader = by,
                None => own.readers.push(by),
            }
        }
    }

    /// Who has written the bytes of a cell last, part by part; `None` where nobody has. Strided regions count from
    /// their first byte to their last.
    pub(super) fn writers(&self, cell: u32) -> Vec<(Range<usize>, Option<Toucher>)> {
        let own = &self.cells[cell as usize];
        debug_assert!(own.neighbours.iter().all(|&c| self.cells[c as usize].allocation == own.allocation));
        let mut writes: Vec<(Region, Toucher)> = own
            .neighbours
            .iter()
            .filter_map(|&c| Some((self.cells[c as usize].region, self.cells[c as usize].writer?)))
            .collect();
        writes.sort_unstable_by_key(|(_, writer)| std::cmp::Reverse(writer.order));
        let whole: Range<usize> = own.region.start..own.region.end();
        let mut left = vec![whole];
        let mut found = Vec::new();
        for (region, writer) in writes {
            let mut rest = Vec::new();
            for gap in left {
                let (from, to) = (gap.start.max(region.start), gap.end.min(region.end()));
                if from >= to {
                    rest.push(gap);
                    continue;
                }
                found.push((from..to, Some(writer)));
                rest.extend([gap.start..from, to..gap.end].into_iter().filter(|piece| !piece.is_empty()));
            }
            left = rest;
        }
        found.extend(left.into_iter().map(|gap| (gap, None)));
        found.sort_unstable_by_key(|(range, _)| range.start);
        found
    }
}
