//! The order of capture as a list of numbers: what logs and other tools' tests show.

use std::fmt;

use super::steps::Direction;

/// A chunk or layer with the pass over it, as one number: counted from 1, negative for backward, with a half for the
/// weight gradients of a backward in two parts (`3`, `-3`, `-3.5`).
///
/// The gradients of inputs and a backward in one piece both print as `-3`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct OrderId {
    number: usize,
    direction: Direction,
}

impl OrderId {
    /// `number` counts from 1.
    pub(super) fn new(number: usize, direction: Direction) -> OrderId {
        OrderId { number, direction }
    }

    /// The chunk or layer, counted from 1.
    #[must_use]
    pub fn number(self) -> usize {
        self.number
    }

    /// Which pass.
    #[must_use]
    pub fn direction(self) -> Direction {
        self.direction
    }
}

impl fmt::Display for OrderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.direction {
            Direction::Forward => write!(f, "{}", self.number),
            Direction::Backward | Direction::BackwardInput => write!(f, "-{}", self.number),
            Direction::BackwardWeight => write!(f, "-{}.5", self.number),
        }
    }
}

/// What is captured in which order. Prints as `[1,1,2,-2,1,-1]`.
///
/// Source of the notation: Megatron-LM, `transformer/cuda_graphs.py`, `convert_schedule_table_to_order`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CaptureOrder(Vec<OrderId>);

impl CaptureOrder {
    pub(super) fn new(ids: Vec<OrderId>) -> CaptureOrder {
        CaptureOrder(ids)
    }

    /// First captured first.
    #[must_use]
    pub fn ids(&self) -> &[OrderId] {
        &self.0
    }
}

impl fmt::Display for CaptureOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, id) in self.0.iter().enumerate() {
            let gap = if i == 0 { "" } else { "," };
            write!(f, "{gap}{id}")?;
        }
        f.write_str("]")
    }
}
