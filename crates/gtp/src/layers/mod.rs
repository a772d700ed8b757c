//! Layers of which each rank of a tensor group computes a part.
//!
//! A layer holds parameters and names, no value and no group: weights come from the [`Weights`](pgroups::Weights) that
//! it is handed, and with them the group ([`Weights::tensor`](pgroups::Weights::tensor)). Without a group, or in a group
//! of one, a layer submits what an undivided one does and nothing else.
//!
//! Between parallel regions every rank has all rows or, under [`Sequence::Split`](pgroups::Sequence::Split), its own.
//! A [`Region`] leads in and out:
//!
//! ```text
//!            into the region          inside, on this rank's part              out of it
//! forward    gather   x, all rows     Linear (weight cut by rows), RowLinear   its sum, inside RowLinear
//! backward   gather   dy, all rows    dx of RowLinear, then of Linear          reduce  dx
//! ```
//!
//! [`VocabTable`] and [`cross_entropy`] cut the vocabulary, [`Norm`] works on the rows that a rank has.

mod cross_entropy; // losses of logits that are cut by columns
mod error;
mod grad; //          where a weight gradient goes
mod linear; //        one product with its weight, cut by rows or by columns
mod norm; //          one norm with its weights
mod region; //        what the group does where a parallel region begins and ends
mod vocab; //         tables with a row for each token

pub use self::{
    cross_entropy::{Losses, cross_entropy},
    error::LayerError,
    linear::{Linear, RowLinear, Then},
    norm::{Norm, NormConfig, NormTags},
    region::Region,
    vocab::{LearnedPositions, VocabRows, VocabShard, VocabTable},
};
