//! How many sequences and tokens a microbatch has, for blocks that see a part of its rows.

use device::{Frame, View};
use gtp::layers::Region;
use pgroups::Sequence;

use crate::{ModelError, recompute::FORGOTTEN, rotary::SHARED};

/// Under a split the rows of a rank do not tell how long a sequence is, so whoever has the tokens leaves them here.
const TAG: &str = "sequences";

/// Keeps the tokens, `[batch, sequence]`, for the blocks of this microbatch slot.
pub(crate) fn announce(f: &mut Frame, tokens: &View) {
    let (block, slot) = f.enter(0, 0);
    f.enter(SHARED, slot & !FORGOTTEN);
    f.keep(TAG, tokens);
    f.enter(block, slot);
}

/// Sequences and tokens in each, of the microbatch that the activations `x` belong to.
///
/// # Errors
/// [`ModelError::Activations`] unless `x` is `[batch, sequence, dim]`; under a split [`ModelError::Slice`] unless it is
/// this rank's rows of it, [`device::Error::NotSaved`] if no embedding has seen the tokens in this frame and slot.
pub(crate) fn of(f: &mut Frame, region: &Region, x: &View, dim: usize, site: &str) -> Result<[usize; 2], ModelError> {
    let (site, shape) = (|| site.to_owned(), || x.shape().to_vec());
    if region.sequence() == Sequence::Whole {
        return match *x.shape() {
            [batch, tokens, columns] if columns == dim => Ok([batch, tokens]),
            _ => Err(ModelError::Activations { site: site(), shape: shape(), dim }),
        };
    }
    let (block, slot) = f.enter(0, 0);
    f.enter(SHARED, slot & !FORGOTTEN);
    let tokens = f.saved(TAG);
    f.enter(block, slot);
    let tokens = tokens?;
    let rows = region.own_rows(tokens.numel())?;
    if *x.shape() != [rows, dim] {
        return Err(ModelError::Slice { site: site(), shape: shape(), rows, dim, size: region.size() });
    }
    Ok([tokens.numel() / tokens.cols(), tokens.cols()])
}
