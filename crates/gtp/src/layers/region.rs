//! What the ranks of a tensor group do where a parallel region begins and ends.

use device::{Frame, Reduce, View};
use pgroups::{Group, Sequence, TensorParallel, Weights};

use super::LayerError;

/// A stretch of a model in which each rank of the tensor group computes with its part of the weights, over all rows.
///
/// Its two operations are each other's gradient: what is gathered on the way in, forward, is reduced on the way out,
/// backward. They run on the frame's stream; all members call them in the same order.
pub struct Region {
    /// None: nothing is cut.
    tensor: Option<TensorParallel>,
}

impl Region {
    /// As `w` says.
    pub fn of(w: &dyn Weights) -> Region {
        Region { tensor: w.tensor().filter(|tensor| tensor.group().size() > 1).cloned() }
    }

    /// Members of the tensor group; 1 where nothing is cut.
    pub fn size(&self) -> u32 {
        self.group().map_or(1, Group::size)
    }

    /// This rank's place among them.
    pub fn place(&self) -> usize {
        self.group().map_or(0, |group| group.place().index())
    }

    /// What a rank has of the rows outside.
    pub fn sequence(&self) -> Sequence {
        self.tensor.as_ref().map_or(Sequence::Whole, TensorParallel::sequence)
    }

    pub(crate) fn group(&self) -> Option<&Group> {
        self.tensor.as_ref().map(TensorParallel::group)
    }

    /// All rows of `x`, `[.., columns]`: `x` itself, or under a split the members' rows one after the other,
    /// `[rows, columns]`. A split needs `x` contiguous.
    ///
    /// # Errors
    /// Of the device, the frame and the group.
    pub fn gather(&self, f: &mut Frame, x: &View) -> Result<View, LayerError> {
        let (Some(group), Sequence::Split) = (self.group(), self.sequence()) else { return Ok(x.clone()) };
        let whole = f.temp(&[x.row_count() * group.size() as usize, x.cols()], x.dtype())?;
        group.all_gather(f.stream(), x, &whole)?;
        Ok(whole)
    }

    /// The sum of the members' `partial`, `[.., columns]` over all rows: in place on every member, or under a split
    /// each member's own rows, `[rows / size, columns]`. `partial` is contiguous; nothing else is to read it.
    ///
    /// # Errors
    /// [`LayerError::UnevenRows`]; of the device, the frame and the group.
    pub fn reduce(&self, f: &mut Frame, partial: &View) -> Result<View, LayerError> {
        let Some(group) = self.group() else { return Ok(partial.clone()) };
        if self.sequence() == Sequence::Whole {
            group.all_reduce(f.stream(), partial, Reduce::Sum)?;
            return Ok(partial.clone());
        }
        let own = f.temp(&[self.own_rows(partial.row_count())?, partial.cols()], partial.dtype())?;
        group.reduce_scatter(f.stream(), partial, &own, Reduce::Sum)?;
        Ok(own)
    }

    /// How many of `rows` a member has outside.
    ///
    /// # Errors
    /// [`LayerError::UnevenRows`].
    pub fn own_rows(&self, rows: usize) -> Result<usize, LayerError> {
        let (Some(group), Sequence::Split) = (self.group(), self.sequence()) else { return Ok(rows) };
        let size = group.size();
        if !rows.is_multiple_of(size as usize) {
            return Err(LayerError::UnevenRows { group: group.name().to_owned(), rows, size });
        }
        Ok(rows / size as usize)
    }
}
