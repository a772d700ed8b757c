//! A chain of blocks and its loss.

use device::{
    DType, Frame, Site, View,
    ops::{Factor, Sum},
};
use gtp::layers::{Losses, VocabRows, VocabTable, cross_entropy};
use pgroups::{Param, Weights};

use crate::{
    Arch, Block, Embedding, GptConfig, GptPlan, Head, ModelError, Output, Recompute, RecomputeLayers, TransformerBlock,
    params::{GPT2_BLOCK, LLAMA_BLOCK},
    sharding::{Split, WithWholeRows},
};

/// A GPT over the parameters of one layout.
pub struct Gpt {
    config: GptConfig,
    split: Split,
    /// Embedding, transformer blocks, head.
    blocks: Vec<Box<dyn Block>>,
    /// The head's.
    table: VocabTable,
    loss: Site,
}

/// What one pass over one microbatch works on.
#[derive(Clone, Copy, Debug)]
pub struct Microbatch<'a> {
    /// `[batch, sequence]`, i32, contiguous.
    pub tokens: &'a View,
    /// As tokens: the token that follows each, or [`device::ops::IGNORE`].
    pub targets: &'a View,
    /// f32, one element, written: mean of the losses of all tokens; an ignored one counts as 0.
    pub loss: &'a View,
    /// What the gradient of each token's loss is multiplied with. 1 / (tokens of the microbatch · microbatches) makes
    /// the sum over microbatches, averaged over replicas, the gradient of the mean over the global batch.
    pub token_scale: Factor<'a>,
    /// Slot of the frame that keeps activations until backward: one for each microbatch that is under way.
    pub slot: u32,
}

impl GptPlan {
    /// The model over `params`, made from [`GptPlan::specs`] and in the same order. It keeps every activation.
    ///
    /// # Errors
    /// [`ModelError::ParamCount`], [`ModelError::ParamOrder`].
    pub fn build(&self, params: &[Param]) -> Result<Gpt, ModelError> {
        self.build_with(params, &RecomputeLayers::None)
    }

    /// As [`GptPlan::build`]; some layers compute what they keep again in the backward pass, with the same results.
    ///
    /// # Errors
    /// As [`GptPlan::build`]; [`ModelError::NoSuchLayer`].
    pub fn build_with(&self, params: &[Param], recompute: &RecomputeLayers) -> Result<Gpt, ModelError> {
        self.check_params(params)?;
        let c = self.config();
        recompute.check(c.layers)?;
        let parts = Parts::of(c.arch);
        let (front, rest) = params.split_at(parts.front);
        let (layers, last) = rest.split_at(c.layers * parts.block);
        let (norm, own_table) = last.split_at(parts.norm);
        let table = match c.output {
            Output::Tied => &front[0],
            Output::Own => &own_table[0],
        };
        let ranks = self.split().ranks();
        let mut blocks: Vec<Box<dyn Block>> = vec![Box::new(Embedding::new(front, c))];
        for (layer, params) in layers.chunks_exact(parts.block).enumerate() {
            let block = match c.arch {
                Arch::Gpt2 => TransformerBlock::gpt2(c, ranks, layer, exactly::<GPT2_BLOCK>(params)),
                Arch::Llama(llama) => TransformerBlock::llama(c, llama, ranks, layer, exactly::<LLAMA_BLOCK>(params)),
            };
            blocks.push(if recompute.contains(layer) { Box::new(Recompute::new(block)) } else { Box::new(block) });
        }
        blocks.push(Box::new(Head::new(norm, parts.norm_site, table, c)));
        let (table, loss) = (Head::table(table, c), Site::from("loss"));
        Ok(Gpt { config: c.clone(), split: self.split(), blocks, table, loss })
    }

    pub(crate) fn check_params(&self, params: &[Param]) -> Result<(), ModelError> {
        let declared = self.params();
        if declared.len() != params.len() {
            return Err(ModelError::ParamCount { declared: declared.len(), given: params.len() });
        }
        let differs = declared.iter().zip(params).position(|(d, p)| d.spec.name != p.name());
        differs.map_or(Ok(()), |position| {
            let declared = declared[position].spec.name.clone();
            Err(ModelError::ParamOrder { position, declared, given: params[position].name().to_owned() })
        })
    }
}

/// How many parameters each part of a model has.
struct Parts {
    front: usize,
    block: usize,
    norm: usize,
    norm_site: &'static str,
}

impl Parts {
    fn of(arch: Arch) -> Parts {
        match arch {
            Arch::Gpt2 => Parts { front: 2, block: GPT2_BLOCK, norm: 2, norm_site: "ln_f" },
            Arch::Llama(_) => Parts { front: 1, block: LLAMA_BLOCK, norm: 1, norm_site: "model.norm" },
        }
    }
}

fn exactly<const N: usize>(params: &[Param]) -> &[Param; N] {
    params.try_into().expect("BUG: a chunk has as many parameters as a block")
}

impl Gpt {
    /// Sizes.
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// Embedding, transformer blocks, head: for schedules that drive them one by one. A block's number in
    /// [`Frame::enter`] is its place here; what [`Gpt::loss`] keeps belongs to the head.
    pub fn blocks(&self) -> &[Box<dyn Block>] {
        &self.blocks
    }

    /// The same blocks, for schedules that keep, wrap or spread them.
    pub fn into_blocks(self) -> Vec<Box<dyn Block>> {
        self.blocks
    }

    /// One microbatch up to its loss, with weights whose pass is forward.
    ///
    /// # Errors
    /// [`ModelError::Tokens`], [`ModelError::Targets`]; of the device, the frame and the weights. A token outside the
    /// vocabulary fails when it runs.
    pub fn forward_loss(&self, f: &mut Frame, w: &mut dyn Weights, m: &Microbatch<'_>) -> Result<(), ModelError> {
        let shapes = || (m.tokens.shape().to_vec(), m.targets.shape().to_vec());
        if m.tokens.shape() != m.targets.shape() {
            let (tokens, targets) = shapes();
            return Err(ModelError::Targets { tokens, targets });
        }
        self.split.check(w)?;
        let hidden = self.trunk(f, w, m.tokens, m.slot)?;
        let logits = self.forward_block(f, w, self.head(), m.slot, &hidden)?;
        self.loss(f, w, m, &logits)
    }

    /// One block of a forward pass, by its place in [`Gpt::blocks`], for schedules and captures that drive blocks one by
    /// one. What the last one gives goes to [`Gpt::loss`].
    ///
    /// # Errors
    /// As [`Block::forward`].
    pub fn forward_block(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        at: usize,
        slot: u32,
        x: &View,
    ) -> Result<View, ModelError> {
        self.split.check(w)?;
        self.forward_at(f, w, at, slot, x)
    }

    fn forward_at(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        at: usize,
        slot: u32,
        x: &View,
    ) -> Result<View, ModelError> {
        self.within(f, at, slot, |f, block| block.forward(f, w, x))
    }

    /// One block of a backward pass: the gradient of its input, if it has one, then those of its weights. `dy` is the
    /// gradient of its output; none for the last block, whose gradient [`Gpt::loss`] has kept.
    ///
    /// # Errors
    /// As [`Block::backward_input`].
    pub fn backward_block(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        at: usize,
        slot: u32,
        dy: Option<&View>,
    ) -> Result<Option<View>, ModelError> {
        self.split.check(w)?;
        self.within(f, at, slot, |f, block| {
            let dy = dy.map_or_else(|| f.saved("logits"), |dy| Ok(dy.clone()))?;
            let dx = block.backward_input(f, w, &dy)?;
            block.backward_weight(f, w)?;
            Ok(dx)
        })
    }

    /// Turns the head's logits into losses, their mean, and their gradient, which takes the logits' place. Keeps it for
    /// [`Gpt::backward`]. `w` says which tensor group the logits are cut over; all its members get the same loss.
    ///
    /// # Errors
    /// Of the device, the frame and the group.
    pub fn loss(&self, f: &mut Frame, w: &dyn Weights, m: &Microbatch<'_>, logits: &View) -> Result<(), ModelError> {
        self.split.check(w)?;
        let losses = f.temp(&[logits.row_count()], DType::F32)?;
        let back = f.enter(self.head() as u32, m.slot);
        f.keep("logits", logits);
        f.enter(back.0, back.1);
        let vocab = VocabRows { size: self.config.vocab, rows: self.config.vocab_rows };
        let given = Losses { logits, targets: m.targets, losses: &losses, vocab, scale: m.token_scale };
        cross_entropy(f, w, &self.loss, &given)?;
        let factor = Factor::Const(1.0 / logits.row_count() as f32);
        f.stream().launch(Sum { x: &losses, factor, total: m.loss }.op(&self.loss)?)?;
        Ok(())
    }

    /// All gradients of one microbatch after its [`Gpt::forward_loss`], with weights whose pass is backward. Last block
    /// first; in each the input's gradient, then the weights'.
    ///
    /// # Errors
    /// Of the device, the frame and the weights; [`device::Error::NotSaved`] without a forward pass in this slot.
    pub fn backward(&self, f: &mut Frame, w: &mut dyn Weights, slot: u32) -> Result<(), ModelError> {
        let mut dy = None;
        for at in (0..self.blocks.len()).rev() {
            dy = self.backward_block(f, w, at, slot, dy.as_ref())?;
            if dy.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// Logits `[batch, vocab]` for the token after position `at` of each sequence, with weights whose pass is forward:
    /// the whole vocabulary on every rank of a tensor group.
    /// What stands behind that position changes nothing, so a frame's plan serves a sequence while it grows.
    ///
    /// # Errors
    /// [`ModelError::Tokens`], [`ModelError::Position`]; of the device, the frame and the weights.
    pub fn logits(&self, f: &mut Frame, w: &mut dyn Weights, tokens: &View, at: usize) -> Result<View, ModelError> {
        if at >= tokens.cols() {
            return Err(ModelError::Position { position: at, tokens: tokens.cols() });
        }
        self.split.check(w)?;
        // Whatever training does: a prompt has any number of tokens, and little to save.
        let mut w = WithWholeRows::new(w);
        let hidden = self.trunk(f, &mut w, tokens, 0)?;
        let dim = self.config.dim;
        let sequences = hidden.reshape(&[hidden.numel() / (tokens.cols() * dim), tokens.cols() * dim])?;
        let last = sequences.columns(at * dim..(at + 1) * dim)?;
        let logits = self.forward_at(f, &mut w, self.head(), 0, &last)?;
        Ok(self.table.gather_logits(f, &w, &logits)?)
    }

    fn head(&self) -> usize {
        self.blocks.len() - 1
    }

    /// All blocks but the head.
    fn trunk(&self, f: &mut Frame, w: &mut dyn Weights, tokens: &View, slot: u32) -> Result<View, ModelError> {
        (0..self.head()).try_fold(tokens.clone(), |x, at| self.forward_at(f, w, at, slot, &x))
    }

    /// Runs `body` for block `at` with the frame entered for it, and leaves the frame as it was.
    fn within<T>(
        &self,
        f: &mut Frame,
        at: usize,
        slot: u32,
        body: impl FnOnce(&mut Frame, &dyn Block) -> Result<T, ModelError>,
    ) -> Result<T, ModelError> {
        let back = f.enter(at as u32, slot);
        let result = body(f, &*self.blocks[at]);
        f.enter(back.0, back.1);
        result
    }
}
