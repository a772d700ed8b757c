//! Passes of a model, piece by piece, over weights from one source or another.

use device::{
    DType, Frame, MemoryKind, Stream, View,
    ops::{Cast, Factor},
};
use gtp::{Counters, Gtp, PassKind};
use model::{Gpt, Microbatch};
use pgroups::{Pass, Rank, TensorParallel, Turn, Weights, Whole};

use super::{
    program::{Program, SEQ_LEN},
    support::Caught,
};

/// Where a pass gets weights from.
pub(crate) enum Source {
    Sharded(Gtp),
    /// Without the crate that gathers.
    Whole(Option<TensorParallel>),
}

impl Source {
    /// The passes so far are planned.
    pub(crate) fn settle(&mut self) -> Result<(), Caught> {
        match self {
            Source::Sharded(gtp) => drop(gtp.plan()?),
            Source::Whole(_) => {}
        }
        Ok(())
    }

    /// What is submitted to `on` comes behind all graphs.
    pub(crate) fn follow_graphs(&self, on: &Stream) -> Result<(), Caught> {
        match self {
            Source::Sharded(gtp) => Ok(gtp.follow_graphs(on)?),
            Source::Whole(_) => Ok(()),
        }
    }

    pub(crate) fn counters(&self) -> Counters {
        match self {
            Source::Sharded(gtp) => gtp.counters(),
            Source::Whole(_) => Counters::default(),
        }
    }
}

/// Memory of a microbatch.
#[derive(Clone)]
pub(crate) struct Slot {
    pub(crate) tokens: View,
    pub(crate) targets: View,
    /// What the gradient of a token's loss is multiplied with.
    pub(crate) scale: View,
    pub(crate) loss: View,
}

impl Slot {
    pub(crate) fn alloc(rank: &Rank, program: &Program) -> Result<Slot, Caught> {
        let shape = [program.micro_batch(), SEQ_LEN];
        let alloc = |label: &str, shape: &[usize], dtype| rank.device.alloc(label, shape, dtype, MemoryKind::Other);
        Ok(Slot {
            tokens: alloc("tokens", &shape, DType::I32)?,
            targets: alloc("targets", &shape, DType::I32)?,
            scale: alloc("scale", &[1], DType::F32)?,
            loss: alloc("loss", &[1], DType::F32)?,
        })
    }

    /// Samples that are all alike.
    pub(crate) fn clear(&self, on: &Stream) -> Result<(), Caught> {
        on.upload(&self.tokens, vec![0; self.tokens.numel()])?;
        on.upload(&self.targets, vec![0; self.targets.numel()])?;
        Ok(on.upload(&self.scale, vec![1.0f32])?)
    }

    /// What passes read.
    pub(crate) fn copy_to(&self, slot: &Slot, on: &Stream) -> Result<(), Caught> {
        let pairs = [(&self.tokens, &slot.tokens), (&self.targets, &slot.targets), (&self.scale, &slot.scale)];
        Ok(pairs.into_iter().try_for_each(|(x, y)| on.launch(Cast { x, y }.op("inputs")?))?)
    }

    pub(crate) fn microbatch(&self) -> Microbatch<'_> {
        let Slot { tokens, targets, scale, loss } = self;
        Microbatch { tokens, targets, loss, token_scale: Factor::Device(scale), slot: 0 }
    }
}

/// Part of a pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Piece {
    Forward(usize),
    Loss,
    Backward(usize),
}

/// What one piece leaves to the next.
#[derive(Default)]
pub(crate) struct Carried {
    x: Option<View>,
    dy: Option<View>,
}

/// Forward and loss, block by block.
pub(crate) fn forward_pieces(model: &Gpt) -> Vec<Piece> {
    (0..model.blocks().len()).map(Piece::Forward).chain([Piece::Loss]).collect()
}

/// Forward, loss and backward.
pub(crate) fn pieces(model: &Gpt) -> Vec<Piece> {
    let backward = (0..model.blocks().len()).rev().map(Piece::Backward);
    forward_pieces(model).into_iter().chain(backward).collect()
}

/// What a pass works with.
pub(crate) struct Parts<'w> {
    pub(crate) model: &'w Gpt,
    pub(crate) source: &'w mut Source,
    pub(crate) frame: &'w mut Frame,
    pub(crate) slot: &'w Slot,
    pub(crate) kind: PassKind,
}

impl Parts<'_> {
    /// Runs or captures pieces of a pass: begins it with the first one.
    pub(crate) fn run<'c>(&'c mut self, pieces: &[Piece], turn: Turn<'c>, carried: &mut Carried) -> Result<(), Caught> {
        let begins = pieces.first() == Some(&Piece::Forward(0));
        if begins {
            self.frame.restart();
            carried.x = Some(self.slot.tokens.clone());
        }
        let Parts { model, source, frame, slot, kind } = self;
        match source {
            Source::Sharded(gtp) => {
                let mut weights = if begins { gtp.pass(*kind, turn)? } else { gtp.resume(turn) };
                run(model, frame, slot, &mut weights, pieces, carried)?;
                Ok(weights.finish()?)
            }
            Source::Whole(tensor) => {
                let whole = Whole::new(turn);
                let mut weights = match tensor {
                    Some(tensor) => whole.over(tensor),
                    None => whole,
                };
                run(model, frame, slot, &mut weights, pieces, carried)
            }
        }
    }
}

fn run(
    model: &Gpt,
    frame: &mut Frame,
    slot: &Slot,
    weights: &mut dyn Weights,
    pieces: &[Piece],
    carried: &mut Carried,
) -> Result<(), Caught> {
    for piece in pieces {
        let x = carried.x.clone().expect("a pass begins with its first block");
        match *piece {
            Piece::Forward(at) => {
                weights.enter(Pass::Forward);
                carried.x = Some(model.forward_block(frame, weights, at, 0, &x)?);
            }
            Piece::Loss => model.loss(frame, weights, &slot.microbatch(), &x)?,
            Piece::Backward(at) => {
                weights.enter(Pass::Backward);
                carried.dy = model.backward_block(frame, weights, at, 0, carried.dy.as_ref())?;
            }
        }
    }
    Ok(())
}
