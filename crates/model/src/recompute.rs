//! Computing what a block keeps a second time instead of keeping it.

use device::{Frame, View};
use pgroups::{Param, Pass, Weights};

use crate::{Block, ModelError};

/// Any block, of which only the input lives from forward to backward.
///
/// `backward_input` runs [`Block::recompute`] first, with the weights in [`Pass::Recompute`], so that its reads
/// neither publish nor register anything. The same operations on the same values give the same bits, so losses and
/// gradients are those of the block alone.
pub struct Recompute<B> {
    block: B,
}

/// Where a forward pass keeps what nobody is to find: as a slot that no driver uses.
pub(crate) const FORGOTTEN: u32 = 1 << 31;

const INPUT: &str = "recompute.x";

impl<B: Block> Recompute<B> {
    /// Around `block`.
    pub fn new(block: B) -> Recompute<B> {
        Recompute { block }
    }
}

impl<B: Block> Block for Recompute<B> {
    fn params(&self) -> &[Param] {
        self.block.params()
    }

    fn forward(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<View, ModelError> {
        f.keep(INPUT, x);
        // Nothing that is saved in here is read later, so its bytes are free again with the block's last operation;
        // and whoever looked for it would be told that it is not there, not find bytes that others have written.
        let (block, slot) = f.enter(0, 0);
        f.enter(block, slot | FORGOTTEN);
        let y = self.block.forward(f, w, x);
        f.enter(block, slot);
        y
    }

    fn backward_input(&self, f: &mut Frame, w: &mut dyn Weights, dy: &View) -> Result<Option<View>, ModelError> {
        let x = f.saved(INPUT)?;
        let back = w.enter(Pass::Recompute);
        let again = self.block.recompute(f, w, &x);
        w.enter(back);
        again?;
        self.block.backward_input(f, w, dy)
    }

    fn backward_weight(&self, f: &mut Frame, w: &mut dyn Weights) -> Result<(), ModelError> {
        self.block.backward_weight(f, w)
    }
}

impl<B: Block + ?Sized> Block for Box<B> {
    fn params(&self) -> &[Param] {
        (**self).params()
    }

    fn forward(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<View, ModelError> {
        (**self).forward(f, w, x)
    }

    fn recompute(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<(), ModelError> {
        (**self).recompute(f, w, x)
    }

    fn backward_input(&self, f: &mut Frame, w: &mut dyn Weights, dy: &View) -> Result<Option<View>, ModelError> {
        (**self).backward_input(f, w, dy)
    }

    fn backward_weight(&self, f: &mut Frame, w: &mut dyn Weights) -> Result<(), ModelError> {
        (**self).backward_weight(f, w)
    }
}

/// Transformer blocks that are recomputed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum RecomputeLayers {
    /// None: the fastest, and the most memory.
    #[default]
    None,
    /// All.
    All,
    /// Layers 0, n, 2n and so on. Counted from the first, because the last layer saves the least: backward begins with
    /// it, so what it keeps is soon needed.
    Every(std::num::NonZeroUsize),
    /// These, by number from 0.
    These(Vec<usize>),
}

impl RecomputeLayers {
    /// Whether `layer` is among them.
    pub fn contains(&self, layer: usize) -> bool {
        match self {
            RecomputeLayers::None => false,
            RecomputeLayers::All => true,
            RecomputeLayers::Every(n) => layer.is_multiple_of(n.get()),
            RecomputeLayers::These(layers) => layers.contains(&layer),
        }
    }

    /// # Errors
    /// [`ModelError::NoSuchLayer`] for a number that none of `layers` layers has.
    pub(crate) fn check(&self, layers: usize) -> Result<(), ModelError> {
        match self {
            RecomputeLayers::These(these) => match these.iter().find(|layer| **layer >= layers) {
                Some(&layer) => Err(ModelError::NoSuchLayer { layer, layers }),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }
}
