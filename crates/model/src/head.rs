//! Final norm and logits.

use device::{Frame, View};
use gtp::layers::{Norm, NormConfig, NormTags, Region, VocabRows, VocabTable};
use pgroups::{Param, Weights};

use crate::{Block, GptConfig, ModelError, config::EPS};

/// logits = norm(x) · tableᵀ over the vocabulary and its padding, of which each rank of a tensor group has its share.
pub struct Head {
    /// Norm weight, norm bias if there is one, table.
    params: Vec<Param>,
    norm: Norm,
    table: VocabTable,
}

/// The layer in traces and messages; a tied table has its own name there for its other use.
const SITE: &str = "lm_head";

impl Head {
    /// Over the final norm's weight, and bias if it has one, and a table of `[vocab_rows, dim]`.
    pub(crate) fn new(norm: &[Param], site: &str, table: &Param, config: &GptConfig) -> Head {
        let tags = NormTags { x: "x", y: "norm", mean: "mean", rstd: "rstd", dweight: "dweight", dbias: "dbias" };
        Head {
            params: norm.iter().chain([table]).cloned().collect(),
            norm: Norm::new(&norm[0], norm.get(1), site, NormConfig { eps: EPS, tags }),
            table: Head::table(table, config),
        }
    }

    /// The table, as what turns activations to logits.
    pub(crate) fn table(table: &Param, config: &GptConfig) -> VocabTable {
        VocabTable::new(table, VocabRows { size: config.vocab, rows: config.vocab_rows }, SITE)
    }
}

impl Block for Head {
    fn params(&self) -> &[Param] {
        &self.params
    }

    /// What this rank has of `[.., dim]` to `[.., its rows of the table]`, all rows.
    fn forward(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<View, ModelError> {
        let normed = self.norm.forward(f, w, x, None)?;
        let normed = Region::of(w).gather(f, &normed)?;
        Ok(self.table.logits(f, w, &normed)?)
    }

    fn recompute(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<(), ModelError> {
        Ok(self.norm.forward(f, w, x, None).map(drop)?)
    }

    fn backward_input(&self, f: &mut Frame, w: &mut dyn Weights, dy: &View) -> Result<Option<View>, ModelError> {
        f.keep("dlogits", dy);
        let (_, outer) = dy.shape().split_last().unwrap_or((&0, &[]));
        let dim = f.saved("norm")?.cols();
        let dnorm = f.temp(&[outer, &[dim]].concat(), dy.dtype())?;
        self.table.logits_backward_input(f, w, dy, &dnorm)?;
        let dnorm = Region::of(w).reduce(f, &dnorm)?;
        Ok(Some(self.norm.backward_input(f, w, &dnorm, None)?))
    }

    fn backward_weight(&self, f: &mut Frame, w: &mut dyn Weights) -> Result<(), ModelError> {
        let (dlogits, normed) = (f.saved("dlogits")?, f.saved("norm")?);
        let normed = Region::of(w).gather(f, &normed)?;
        self.table.logits_backward_weight(f, w, &dlogits, &normed)?;
        Ok(self.norm.backward_weight(f, w)?)
    }
}
