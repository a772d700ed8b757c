//! What may run next, as a search knows it: the same in every run that has come to the same point.

use crate::{Access, Position, Region};

/// Names a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MoveId {
    pub(crate) rank: u32,
    pub(crate) at: Position,
    pub(crate) part: Part,
}

/// What of the thing at that position.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    Op,
    /// The sources of a joint operation are read.
    Take,
    /// A member of it gets its part.
    Deliver,
}

/// Something that may run, and the memory that it touches.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Move {
    pub(crate) id: MoveId,
    pub(crate) touches: Vec<Touch>,
    /// Something has failed or was thrown away by the time it was over: others are reached by more than memory.
    pub(crate) spreads: bool,
}

/// An access to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Touch {
    rank: u32,
    allocation: u32,
    region: Region,
    writes: bool,
}

impl Touch {
    pub(crate) fn new(access: &Access, writes: bool) -> Touch {
        let view = &access.view;
        Touch { rank: view.rank(), allocation: view.allocation_id(), region: view.region(), writes }
    }

    fn conflicts(&self, other: &Touch) -> bool {
        (self.writes || other.writes)
            && (self.rank, self.allocation) == (other.rank, other.allocation)
            && self.region.overlaps(&other.region)
    }
}

impl Move {
    /// One after the other gives the same as the other after the one, where both may run.
    pub(crate) fn commutes_with(&self, other: &Move) -> bool {
        let conflict = |touch: &Touch| other.touches.iter().any(|against| touch.conflicts(against));
        !self.spreads && !other.spreads && !self.touches.iter().any(conflict)
    }
}
