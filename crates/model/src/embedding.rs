//! Tokens and positions to the residual stream.

use device::{
    DType, Frame, Site, View,
    ops::{self, Positions, Vocab},
};
use pgroups::{Param, Weights};

use crate::{Block, ModelError};

/// y = table\[token\] + positions\[place in the sequence\].
pub struct Embedding {
    /// Token table, position table.
    params: [Param; 2],
    vocab: Vocab,
    seq_len: usize,
    dim: usize,
    sites: [Site; 2],
}

impl Embedding {
    /// Over a table of `[at least vocab, dim]` and one of `[seq_len, dim]`.
    pub(crate) fn new(table: &Param, positions: &Param, vocab: usize, [seq_len, dim]: [usize; 2]) -> Embedding {
        let params = [table.clone(), positions.clone()];
        let sites = [Site::from("wte"), Site::from("wpe")];
        Embedding { params, vocab: Vocab::whole(vocab), seq_len, dim, sites }
    }
}

impl Block for Embedding {
    fn params(&self) -> &[Param] {
        &self.params
    }

    /// Tokens `[batch, sequence]`, i32, to `[batch, sequence, dim]`. A token outside the vocabulary fails when it runs.
    fn forward(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<View, ModelError> {
        let refuse = || ModelError::Tokens { tensor: "tokens", shape: x.shape().to_vec(), seq_len: self.seq_len };
        let [batch, tokens] = *x.shape() else { return Err(refuse()) };
        if !(1..=self.seq_len).contains(&tokens) || batch == 0 {
            return Err(refuse());
        }
        f.keep("tokens", x);
        let y = f.temp(&[batch, tokens, self.dim], DType::F32)?;
        let on = f.stream();
        let table = w.take(&self.params[0], on)?;
        let positions = w.take(&self.params[1], on)?;
        let learned = Some(Positions { table: &positions, seq_len: tokens });
        let lookup = ops::Embedding { ids: x, table: &table, vocab: self.vocab, positions: learned, y: &y };
        on.launch(lookup.op(&self.sites[0])?)?;
        w.give_back(&self.params[0], on)?;
        w.give_back(&self.params[1], on)?;
        Ok(y)
    }

    fn backward_input(&self, f: &mut Frame, _: &mut dyn Weights, dy: &View) -> Result<Option<View>, ModelError> {
        f.keep("dy", dy);
        Ok(None)
    }

    fn backward_weight(&self, f: &mut Frame, w: &mut dyn Weights) -> Result<(), ModelError> {
        let (tokens, dy) = (f.saved("tokens")?, f.saved("dy")?);
        let on = f.stream();
        let [table, positions] = &self.params;
        let grad = w.grad(table, on)?;
        let (dtable, into) = grad.target();
        let vocab = self.vocab;
        on.launch(ops::EmbeddingGrad { ids: &tokens, dy: &dy, vocab, dtable, into }.op(&self.sites[0])?)?;
        w.grad_done(table, on)?;
        let grad = w.grad(positions, on)?;
        let (dtable, into) = grad.target();
        let seq_len = tokens.cols();
        on.launch(ops::PositionGrad { dy: &dy, seq_len, dtable, into }.op(&self.sites[1])?)?;
        Ok(w.grad_done(positions, on)?)
    }
}
