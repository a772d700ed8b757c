//! Tokens, and learned positions where there are any, to the residual stream.

use device::{
    DType, Frame, Site, View,
    ops::{self, Positions, Vocab},
};
use pgroups::{Param, Weights};

use crate::{Block, GptConfig, ModelError};

/// y = table\[token\], + positions\[place in the sequence\] if positions are learned.
pub struct Embedding {
    /// Token table, then the position table.
    params: Vec<Param>,
    /// One for each parameter.
    sites: Vec<Site>,
    vocab: Vocab,
    seq_len: usize,
    dim: usize,
}

impl Embedding {
    /// Over a table of `[at least vocab, dim]` and, if there is a second, one of `[seq_len, dim]`.
    pub(crate) fn new(params: &[Param], config: &GptConfig) -> Embedding {
        let sites = params.iter().map(|p| Site::from(p.name().to_owned())).collect();
        let &GptConfig { vocab, seq_len, dim, .. } = config;
        Embedding { params: params.to_vec(), sites, vocab: Vocab::whole(vocab), seq_len, dim }
    }

    fn check(&self, x: &View) -> Result<[usize; 2], ModelError> {
        match *x.shape() {
            [batch, tokens] if (1..=self.seq_len).contains(&tokens) && batch > 0 => Ok([batch, tokens]),
            _ => Err(ModelError::Tokens { tensor: "tokens", shape: x.shape().to_vec(), seq_len: self.seq_len }),
        }
    }
}

impl Block for Embedding {
    fn params(&self) -> &[Param] {
        &self.params
    }

    /// Tokens `[batch, sequence]`, i32, to `[batch, sequence, dim]`. A token outside the vocabulary fails when it runs.
    fn forward(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<View, ModelError> {
        let [batch, tokens] = self.check(x)?;
        f.keep("tokens", x);
        let y = f.temp(&[batch, tokens, self.dim], DType::F32)?;
        let on = f.stream();
        let tables = self.params.iter().map(|p| w.take(p, on)).collect::<Result<Vec<View>, _>>()?;
        let positions = tables.get(1).map(|table| Positions { table, seq_len: tokens });
        let lookup = ops::Embedding { ids: x, table: &tables[0], vocab: self.vocab, positions, y: &y };
        on.launch(lookup.op(&self.sites[0])?)?;
        self.params.iter().try_for_each(|p| w.give_back(p, on))?;
        Ok(y)
    }

    fn recompute(&self, f: &mut Frame, _: &mut dyn Weights, x: &View) -> Result<(), ModelError> {
        f.keep("tokens", x);
        Ok(())
    }

    fn backward_input(&self, f: &mut Frame, _: &mut dyn Weights, dy: &View) -> Result<Option<View>, ModelError> {
        f.keep("dy", dy);
        Ok(None)
    }

    fn backward_weight(&self, f: &mut Frame, w: &mut dyn Weights) -> Result<(), ModelError> {
        let (tokens, dy) = (f.saved("tokens")?, f.saved("dy")?);
        let on = f.stream();
        let table = &self.params[0];
        let grad = w.grad(table, on)?;
        let (dtable, into) = grad.target();
        let vocab = self.vocab;
        on.launch(ops::EmbeddingGrad { ids: &tokens, dy: &dy, vocab, dtable, into }.op(&self.sites[0])?)?;
        w.grad_done(table, on)?;
        let Some(positions) = self.params.get(1) else { return Ok(()) };
        let grad = w.grad(positions, on)?;
        let (dtable, into) = grad.target();
        let seq_len = tokens.cols();
        on.launch(ops::PositionGrad { dy: &dy, seq_len, dtable, into }.op(&self.sites[1])?)?;
        Ok(w.grad_done(positions, on)?)
    }
}
