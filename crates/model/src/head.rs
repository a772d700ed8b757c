//! Final norm and logits.

use device::{
    DType, Frame, Site, View,
    ops::{Accumulate, Fill, Finish, Gemm, Trans},
};
use pgroups::{Param, Weights};

use crate::{
    Block, GptConfig, ModelError,
    grad::contribute,
    norm::{Norm, Tags},
};

/// logits = norm(x) · tableᵀ over the valid part of the vocabulary.
pub struct Head {
    /// Norm weight, norm bias if there is one, table.
    params: Vec<Param>,
    norm: Norm,
    table: Param,
    vocab: usize,
    vocab_rows: usize,
    site: Site,
}

impl Head {
    /// Over the final norm's weight, and bias if it has one, and a table of `[vocab_rows, dim]`.
    pub(crate) fn new(norm: &[Param], site: &str, table: &Param, config: &GptConfig) -> Head {
        let tags = Tags { x: "x", y: "norm", mean: "mean", rstd: "rstd", dy: "dnorm" };
        Head {
            params: norm.iter().chain([table]).cloned().collect(),
            norm: Norm::new(&norm[0], norm.get(1), site, tags),
            table: table.clone(),
            vocab: config.vocab,
            vocab_rows: config.vocab_rows,
            site: Site::from("lm_head"),
        }
    }

    fn logits(&self, dims: &[usize]) -> Vec<usize> {
        let (_, outer) = dims.split_last().unwrap_or((&0, &[]));
        [outer, &[self.vocab]].concat()
    }
}

impl Block for Head {
    fn params(&self) -> &[Param] {
        &self.params
    }

    /// `[.., dim]` to `[.., vocab]`.
    fn forward(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<View, ModelError> {
        let normed = self.norm.forward(f, w, x, None)?;
        let logits = f.temp(&self.logits(x.shape()), DType::F32)?;
        let on = f.stream();
        let table = w.take(&self.table, on)?;
        let finish = Finish::Into(Accumulate::Overwrite);
        let valid = table.rows(0..self.vocab)?;
        on.launch(Gemm { a: &normed, b: &valid, c: &logits, trans: Trans::Nt, finish }.op(&self.site)?)?;
        w.give_back(&self.table, on)?;
        Ok(logits)
    }

    fn recompute(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<(), ModelError> {
        self.norm.forward(f, w, x, None).map(drop)
    }

    fn backward_input(&self, f: &mut Frame, w: &mut dyn Weights, dy: &View) -> Result<Option<View>, ModelError> {
        f.keep("dlogits", dy);
        let normed = f.saved("norm")?;
        let dnorm = f.temp(normed.shape(), DType::F32)?;
        let on = f.stream();
        let table = w.take(&self.table, on)?;
        let finish = Finish::Into(Accumulate::Overwrite);
        let valid = table.rows(0..self.vocab)?;
        on.launch(Gemm { a: dy, b: &valid, c: &dnorm, trans: Trans::Nn, finish }.op(&self.site)?)?;
        w.give_back(&self.table, on)?;
        self.norm.backward_input(f, w, &dnorm, None).map(Some)
    }

    fn backward_weight(&self, f: &mut Frame, w: &mut dyn Weights) -> Result<(), ModelError> {
        let (dlogits, normed) = (f.saved("dlogits")?, f.saved("norm")?);
        let table = &self.table;
        let grad = w.grad(table, f.stream())?;
        let (dtable, into) = grad.target();
        let finish = Finish::Into(into);
        let valid = dtable.rows(0..self.vocab)?;
        let product = Gemm { a: &dlogits, b: &normed, c: &valid, trans: Trans::Tn, finish };
        f.stream().launch(product.op(&self.site)?)?;
        if self.vocab_rows > self.vocab {
            // Rows past the vocabulary get 0 like any other contribution: a first one clears what is there.
            let rest = dtable.rows(self.vocab..self.vocab_rows)?;
            let zeros = f.temp(rest.shape(), DType::F32)?;
            f.stream().launch(Fill { y: &zeros, value: 0.0 }.op(&self.site)?)?;
            contribute(&zeros, &rest, into, &self.site, f.stream())?;
        }
        w.grad_done(table, f.stream())?;
        self.norm.backward_weight(f, w)
    }
}
