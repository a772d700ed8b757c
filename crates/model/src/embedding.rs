//! Tokens, and learned positions where there are any, to the residual stream.

use device::{Frame, Site, View};
use gtp::layers::{LearnedPositions, Region, VocabRows, VocabTable};
use pgroups::{Param, Weights};

use crate::{Block, GptConfig, ModelError, sequences};

/// y = table\[token\], + positions\[place in the sequence\] if positions are learned.
pub struct Embedding {
    /// Token table, then the position table.
    params: Vec<Param>,
    table: VocabTable,
    /// Of the position table.
    positions_site: Site,
    seq_len: usize,
    dim: usize,
}

impl Embedding {
    /// Over a table of `[at least vocab, dim]` and, if there is a second, one of `[seq_len, dim]`.
    pub(crate) fn new(params: &[Param], config: &GptConfig) -> Embedding {
        let &GptConfig { seq_len, dim, .. } = config;
        let rows = VocabRows { size: config.vocab, rows: config.vocab_rows };
        let table = VocabTable::new(&params[0], rows, params[0].name());
        let positions_site = params.get(1).map_or("", Param::name).to_owned();
        Embedding { params: params.to_vec(), table, positions_site: Site::from(positions_site), seq_len, dim }
    }

    fn check(&self, x: &View) -> Result<[usize; 2], ModelError> {
        match *x.shape() {
            [batch, tokens] if (1..=self.seq_len).contains(&tokens) && batch > 0 => Ok([batch, tokens]),
            _ => Err(ModelError::Tokens { tensor: "tokens", shape: x.shape().to_vec(), seq_len: self.seq_len }),
        }
    }

    fn positions(&self, seq_len: usize) -> Option<LearnedPositions<'_>> {
        self.params.get(1).map(|table| LearnedPositions { table, seq_len, site: &self.positions_site })
    }
}

impl Block for Embedding {
    fn params(&self) -> &[Param] {
        &self.params
    }

    /// Tokens `[batch, sequence]`, i32, to `[batch, sequence, dim]`, or under a sequence split to this rank's rows of it.
    /// A token outside the vocabulary fails when it runs.
    fn forward(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<View, ModelError> {
        let [batch, tokens] = self.check(x)?;
        f.keep("tokens", x);
        sequences::announce(f, x);
        Ok(self.table.lookup(f, w, x, &[batch, tokens, self.dim], self.positions(tokens))?)
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
        let dy = Region::of(w).gather(f, &dy)?;
        Ok(self.table.lookup_grad(f, w, &tokens, &dy, self.positions(tokens.cols()))?)
    }
}
