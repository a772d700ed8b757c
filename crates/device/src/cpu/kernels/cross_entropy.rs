//! Softmax cross-entropy: each row is read from memory once and stays in cache for its passes.

use super::{
    lines,
    math::{self, exp_or_zero_of},
    wide::wide,
};
use crate::{
    Args, OpError,
    ops::{CrossEntropySpec, IGNORE, Place, ValueError, VocabFinishSpec, VocabPartialsSpec},
};

/// Targets of the last `rows` rows: a tile also gets those before it, so that errors can tell positions.
struct Targets<'a> {
    all: &'a [i32],
    first: usize,
    vocab: usize,
}

impl<'a> Targets<'a> {
    fn new(all: &'a [i32], rows: usize, vocab: usize) -> Targets<'a> {
        Targets { all, first: all.len() - rows, vocab }
    }

    /// `None`: ignored.
    fn at(&self, row: usize) -> Result<Option<usize>, ValueError> {
        let position = self.first + row;
        let id = self.all[position];
        if id == IGNORE {
            return Ok(None);
        }
        let valid = usize::try_from(id).ok().filter(|id| *id < self.vocab);
        valid.map(Some).ok_or(ValueError::Target { id, position, vocab: self.vocab })
    }
}

pub(super) fn cross_entropy(spec: &CrossEntropySpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let mut d = args.rows_mut::<f32>(0)?;
    let targets = Targets::new(args.read(1)?, d.len(), d.cols());
    let losses = args.write::<f32>(2)?;
    let (logits, scalar) = match spec.place {
        Place::InPlace => (None, 3),
        Place::Apart => (Some(args.rows::<f32>(3)?), 4),
    };
    let scale = lines::factor(spec.scale, args, scalar)?;
    for (i, loss) in losses.iter_mut().enumerate() {
        let d = d.row_mut(i);
        let Some(target) = targets.at(i)? else {
            *loss = 0.0;
            d.fill(0.0);
            continue;
        };
        let row = logits.as_ref().map(|logits| logits.row(i));
        let logit = row.unwrap_or(d)[target];
        let (max, sum) = softmax(d, row, scale);
        *loss = (f64::from(max) - f64::from(logit) + f64::from(sum).ln()) as f32;
        d[target] -= scale;
    }
    Ok(())
}

/// Elements that get a maximum of their own, so that a long row is read from memory once.
const RUN: usize = 1024;

wide! {
    /// d = scale · softmax(x), or of d itself; returns the maximum and the sum of exponentials.
    fn softmax(d: &mut [f32], x: Option<&[f32]>, scale: f32) -> (f32, f32) {
        let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
        let runs = d.len().div_ceil(RUN);
        let mut maxima = [0.0; MAX_RUNS];
        let step = if runs <= MAX_RUNS { RUN } else { d.len().div_ceil(MAX_RUNS) };
        for (i, d) in d.chunks_mut(step).enumerate() {
            let from = x.map(|x| &x[i * step..i * step + d.len()]);
            maxima[i] = math::max::<V>(from.unwrap_or(d));
            let own = math::exp_and_sum::<V>(d, from, maxima[i]);
            let new = if maxima[i] > max { maxima[i] } else { max };
            sum = sum * exp_or_zero_of(max - new) + own * exp_or_zero_of(maxima[i] - new);
            max = new;
        }
        for (d, &own) in d.chunks_mut(step).zip(&maxima) {
            let factor = exp_or_zero_of(own - max) * (scale / sum);
            d.iter_mut().for_each(|d| *d *= factor);
        }
        (max, sum)
    }
}

/// Runs of a row whose maxima are kept; longer rows have longer runs.
const MAX_RUNS: usize = 256;

pub(super) fn partials(spec: &VocabPartialsSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let logits = args.rows::<f32>(0)?;
    let targets = Targets::new(args.read(1)?, logits.len(), spec.vocab.size);
    let (max, sum, target) = (args.write::<f32>(2)?, args.write::<f32>(3)?, args.write::<f32>(4)?);
    for i in 0..logits.len() {
        let row = logits.row(i);
        (max[i], sum[i]) = max_and_sum(row);
        let own = targets.at(i)?.and_then(|id| id.checked_sub(spec.vocab.start)).and_then(|id| row.get(id));
        target[i] = own.copied().unwrap_or(0.0);
    }
    Ok(())
}

wide! {
    fn max_and_sum(x: &[f32]) -> (f32, f32) {
        let max = math::max::<V>(x);
        let sum = x.chunks(RUN).map(|x| math::exp_and_sum::<V>(&mut [0.0; RUN][..x.len()], Some(x), max));
        (max, sum.sum())
    }
}

pub(super) fn rescale(args: &mut Args<'_>) -> Result<(), OpError> {
    let (local, global, sum) = (args.read::<f32>(0)?, args.read::<f32>(1)?, args.write::<f32>(2)?);
    for ((sum, &local), &global) in sum.iter_mut().zip(local).zip(global) {
        *sum *= exp_or_zero_of(local - global);
    }
    Ok(())
}

pub(super) fn finish(spec: &VocabFinishSpec, args: &mut Args<'_>) -> Result<(), OpError> {
    let mut d = args.rows_mut::<f32>(0)?;
    let targets = Targets::new(args.read(1)?, d.len(), spec.vocab.size);
    let (max, sum, target) = (args.read::<f32>(2)?, args.read::<f32>(3)?, args.read::<f32>(4)?);
    let losses = args.write::<f32>(5)?;
    let (logits, scalar) = match spec.place {
        Place::InPlace => (None, 6),
        Place::Apart => (Some(args.rows::<f32>(6)?), 7),
    };
    let scale = lines::factor(spec.scale, args, scalar)?;
    for (i, loss) in losses.iter_mut().enumerate() {
        let d = d.row_mut(i);
        let Some(id) = targets.at(i)? else {
            *loss = 0.0;
            d.fill(0.0);
            continue;
        };
        *loss = (f64::from(max[i]) - f64::from(target[i]) + f64::from(sum[i]).ln()) as f32;
        shifted_exp(d, logits.as_ref().map(|logits| logits.row(i)), max[i], scale / sum[i]);
        if let Some(d) = id.checked_sub(spec.vocab.start).and_then(|id| d.get_mut(id)) {
            *d -= scale;
        }
    }
    Ok(())
}

wide! {
    /// d = factor · exp(x − shift), or of d itself.
    fn shifted_exp(d: &mut [f32], x: Option<&[f32]>, shift: f32, factor: f32) {
        match x {
            Some(x) => d.iter_mut().zip(x).for_each(|(d, &x)| *d = factor * exp_or_zero_of(x - shift)),
            None => d.iter_mut().for_each(|d| *d = factor * exp_or_zero_of(*d - shift)),
        }
    }
}

#[cfg(test)]
mod tests;
