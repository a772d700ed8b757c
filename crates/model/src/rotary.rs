//! Positions as angles that queries and keys are turned by.

use device::{
    DType, Frame, Site, View,
    ops::{Rotary, RotaryTable, Turning},
};

use crate::ModelError;

/// Turns heads by their positions, in the half-split form: column i of a head goes with column i + width / 2.
///
/// Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
pub(crate) struct Turner {
    base: usize,
    /// Positions and columns of a head.
    table: [usize; 2],
    site: Site,
}

/// The block under which a frame keeps what all blocks share.
pub(crate) const SHARED: u32 = u32::MAX;

impl Turner {
    /// For heads of `head_dim` columns, at positions `0..seq_len`.
    pub(crate) fn new(base: usize, seq_len: usize, head_dim: usize, site: Site) -> Turner {
        Turner { base, table: [seq_len, head_dim], site }
    }

    /// Turns the heads of `x`, `[.., sequence, columns of whole heads]`, in place.
    pub(crate) fn turn(&self, f: &mut Frame, x: &View, seq_len: usize, turning: Turning) -> Result<(), ModelError> {
        let table = self.angles(f)?;
        f.stream().launch(Rotary { x, table: &table, seq_len, turning, y: x }.op(&self.site)?)?;
        Ok(())
    }

    /// The table of this pass. The first block that asks for it fills it, in whichever microbatch; blocks have no
    /// memory of their own that could outlive a pass.
    fn angles(&self, f: &mut Frame) -> Result<View, ModelError> {
        // Models that share a frame may differ in base or in sizes.
        let back = f.enter(SHARED, self.base as u32);
        let known = f.saved("angles").ok().filter(|table| *table.shape() == self.table);
        let table = known.map_or_else(|| self.fill(f), Ok);
        f.enter(back.0, back.1);
        table
    }

    fn fill(&self, f: &mut Frame) -> Result<View, ModelError> {
        let table = f.save("angles", &self.table, DType::F32)?;
        f.stream().launch(RotaryTable { table: &table, base: self.base as f64 }.op(&self.site)?)?;
        Ok(table)
    }
}
