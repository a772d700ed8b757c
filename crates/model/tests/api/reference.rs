//! A plain GPT in f64, written from the formulas and for nothing but to be compared with: loss and logits.

use std::collections::BTreeMap;

use model::{GptConfig, Output};

/// Values by parameter name.
pub(crate) type Values = BTreeMap<String, Vec<f64>>;

pub(crate) struct Reference<'a> {
    pub(crate) config: &'a GptConfig,
    pub(crate) values: &'a Values,
}

impl Reference<'_> {
    /// Mean loss of sequences of `len` tokens.
    pub(crate) fn loss(&self, tokens: &[i32], targets: &[i32], len: usize) -> f64 {
        let mut total = 0.0;
        for (tokens, targets) in tokens.chunks(len).zip(targets.chunks(len)) {
            for (logits, target) in self.logits(tokens).iter().zip(targets) {
                let top = logits.iter().copied().fold(f64::MIN, f64::max);
                let sum: f64 = logits.iter().map(|l| (l - top).exp()).sum();
                total += if *target < 0 { 0.0 } else { top + sum.ln() - logits[*target as usize] };
            }
        }
        total / tokens.len() as f64
    }

    /// Logits after each token of one sequence.
    pub(crate) fn logits(&self, tokens: &[i32]) -> Vec<Vec<f64>> {
        let dim = self.config.dim;
        let row = |name: &str, at: usize| &self.values[name][at * dim..(at + 1) * dim];
        let mut x: Vec<Vec<f64>> =
            tokens.iter().enumerate().map(|(t, id)| add(row("wte", *id as usize), row("wpe", t))).collect();
        for layer in 0..self.config.layers {
            let name = |part: &str| format!("h.{layer}.{part}");
            let qkv: Vec<_> =
                x.iter().map(|x| self.linear(&name("attn.c_attn"), &self.norm(&name("ln_1"), x))).collect();
            for (t, attended) in self.attend(&qkv).iter().enumerate() {
                x[t] = add(&x[t], &self.linear(&name("attn.c_proj"), attended));
            }
            for x in &mut x {
                let hidden = self.linear(&name("mlp.c_fc"), &self.norm(&name("ln_2"), x));
                let active: Vec<f64> = hidden.into_iter().map(gelu).collect();
                *x = add(x, &self.linear(&name("mlp.c_proj"), &active));
            }
        }
        let table = match self.config.output {
            Output::Tied => "wte",
            Output::Own => "lm_head.weight",
        };
        let logits = |x: &Vec<f64>| {
            let y = self.norm("ln_f", x);
            (0..self.config.vocab).map(|id| dot(row(table, id), &y)).collect()
        };
        x.iter().map(logits).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        let (weight, bias) = (&self.values[&format!("{name}.weight")], &self.values[&format!("{name}.bias")]);
        let scaled = |(i, v): (usize, &f64)| (v - mean) / (variance + 1e-5).sqrt() * weight[i] + bias[i];
        x.iter().enumerate().map(scaled).collect()
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let (weight, bias) = (&self.values[&format!("{name}.weight")], &self.values[&format!("{name}.bias")]);
        weight.chunks(x.len()).zip(bias).map(|(row, b)| dot(row, x) + b).collect()
    }

    /// Each row of `qkv` is query, key and value of one token, heads side by side.
    fn attend(&self, qkv: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let (dim, width) = (self.config.dim, self.config.dim / self.config.heads);
        let part = |t: usize, part: usize, head: usize| &qkv[t][part * dim + head * width..][..width];
        let mut out = vec![vec![0.0; dim]; qkv.len()];
        for (t, out) in out.iter_mut().enumerate() {
            for head in 0..self.config.heads {
                let scale = 1.0 / (width as f64).sqrt();
                let scores: Vec<f64> = (0..=t).map(|s| dot(part(t, 0, head), part(s, 1, head)) * scale).collect();
                let top = scores.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                for (s, score) in scores.iter().enumerate() {
                    let p = (score - top).exp() / total;
                    for (o, v) in out[head * width..].iter_mut().zip(part(s, 2, head)) {
                        *o += p * v;
                    }
                }
            }
        }
        out
    }
}

fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    0.5 * x * (1.0 + inner.tanh())
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Central differences of the loss in every element of every parameter.
///
/// In f64 a step of 1e-4 leaves an error near 1e-9, far below f32's.
pub(crate) fn differences(config: &GptConfig, values: &Values, tokens: &[i32], targets: &[i32], len: usize) -> Values {
    const STEP: f64 = 1e-4;
    let mut moved = values.clone();
    let mut gradients = Values::new();
    for (name, old) in values {
        let mut gradient = Vec::with_capacity(old.len());
        for (at, value) in old.iter().enumerate() {
            let mut loss_at = |moved_to: f64| {
                moved.get_mut(name).unwrap()[at] = moved_to;
                Reference { config, values: &moved }.loss(tokens, targets, len)
            };
            let rise = loss_at(value + STEP) - loss_at(value - STEP);
            moved.get_mut(name).unwrap()[at] = *value;
            gradient.push(rise / (2.0 * STEP));
        }
        gradients.insert(name.clone(), gradient);
    }
    gradients
}
