//! One piece of a model, as pipelines, recompute wrappers and captures see it.

use device::{Frame, View};
use pgroups::{Param, Weights};

use crate::ModelError;

/// Part of a model with explicit passes. It stores no weight value, group or capture state: all of it arrives
/// through the frame and the weights.
///
/// Who drives blocks enters the frame for each ([`Frame::enter`] with the block's number and the microbatch slot),
/// calls `forward`, and later `backward_input` once and then `backward_weight` once, for the same block and slot. The
/// two halves of the backward pass may lie apart, as zero-bubble schedules need it. The block's number is below
/// `u32::MAX`, which is where blocks share what all of them need, and the slot below `1 << 31`.
pub trait Block: Send + Sync {
    /// Every parameter that it uses, in the order of first use in the forward pass.
    fn params(&self) -> &[Param];

    /// Output for input `x`; keeps in the frame what the backward pass needs.
    ///
    /// # Errors
    /// Of the device when shapes do not fit, of the frame when its plan has something else, of the weights.
    fn forward(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<View, ModelError>;

    /// Keeps in the frame what `forward` keeps, with the same bits, and need not compute the output: inside a backward
    /// pass the output is behind us.
    ///
    /// # Errors
    /// As [`Block::forward`].
    fn recompute(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<(), ModelError> {
        self.forward(f, w, x).map(drop)
    }

    /// Gradient of the input, from the gradient of the output; `None` when the input has none (tokens). Keeps in the
    /// frame what `backward_weight` needs, `dy` too.
    ///
    /// # Errors
    /// As [`Block::forward`]; [`device::Error::NotSaved`] without a forward pass before it.
    fn backward_input(&self, f: &mut Frame, w: &mut dyn Weights, dy: &View) -> Result<Option<View>, ModelError>;

    /// Gradients of all parameters, each handed to where [`Weights::grad`] says.
    ///
    /// # Errors
    /// As [`Block::forward`]; [`device::Error::NotSaved`] without a `backward_input` before it.
    fn backward_weight(&self, f: &mut Frame, w: &mut dyn Weights) -> Result<(), ModelError>;
}
