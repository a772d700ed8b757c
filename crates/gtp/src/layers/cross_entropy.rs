//! Losses of logits that a tensor group has cut by columns.

use device::{
    DType, Frame, Reduce, Site, View,
    ops::{CrossEntropy, Factor, Fill, VocabFinish, VocabPartials, VocabRescale},
};
use pgroups::Weights;

use super::{LayerError, Region, VocabRows};

/// What [`cross_entropy`] works on.
#[derive(Clone, Copy, Debug)]
pub struct Losses<'a> {
    /// What [`VocabTable::logits`](super::VocabTable::logits) gives, f32 or bf16; becomes its gradient.
    pub logits: &'a View,
    /// `[rows]`, i32, contiguous: ids of the whole vocabulary, or [`IGNORE`](device::ops::IGNORE).
    pub targets: &'a View,
    /// `[rows]`, f32, contiguous, written: not scaled, the same on every member.
    pub losses: &'a View,
    /// The vocabulary.
    pub vocab: VocabRows,
    /// Of the gradient only.
    pub scale: Factor<'a>,
}

/// losses = log Σ exp(logits) − logits\[target\] over the whole vocabulary, logits = scale · (softmax − onehot).
///
/// Of a row the group exchanges three numbers: the greatest logit, then the sum of exponentials and the target's logit.
/// Columns of padding are not read, so nothing has to be masked; their gradient is 0.
///
/// # Errors
/// Of the device, the frame and the group. A target that is no valid id fails when it runs.
pub fn cross_entropy(f: &mut Frame, w: &dyn Weights, site: &Site, l: &Losses<'_>) -> Result<(), LayerError> {
    let region = Region::of(w);
    let &Losses { targets, losses, scale, .. } = l;
    let on = f.stream().clone();
    let shard = l.vocab.shard(&region);
    let logits = &shard.valid_of(l.logits)?;
    if let Some(padding) = shard.padding_of(l.logits)? {
        on.launch(Fill { y: &padding, value: 0.0 }.op(site)?)?;
    }
    let Some(group) = region.group() else {
        let whole = CrossEntropy { logits, targets, losses, dlogits: logits, scale };
        return Ok(on.launch(whole.op(site)?)?);
    };
    let vocab = shard.ids;
    let rows = logits.row_count();
    let own_max = f.temp(&[rows], DType::F32)?;
    let max = f.temp(&[rows], DType::F32)?;
    let both = f.temp(&[2 * rows], DType::F32)?;
    let (sum, target) = (both.rows(0..rows)?, both.rows(rows..2 * rows)?);
    let partials = VocabPartials { logits, targets, vocab, max: &own_max, sum: &sum, target: &target };
    on.launch(partials.op(site)?)?;
    group.all_reduce_into(&on, &own_max, &max, Reduce::Max)?;
    on.launch(VocabRescale { local: &own_max, global: &max, sum: &sum }.op(site)?)?;
    group.all_reduce(&on, &both, Reduce::Sum)?;
    let finish =
        VocabFinish { logits, targets, vocab, max: &max, sum: &sum, target: &target, losses, dlogits: logits, scale };
    Ok(on.launch(finish.op(site)?)?)
}
