//! A plain GPT in f64, written from the formulas and for nothing but to be compared with: loss and logits.

use std::collections::BTreeMap;

use model::{Arch, GptConfig, LlamaConfig, Output};

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
        let (wte, table, last) = match self.config.arch {
            Arch::Gpt2 => ("wte", "wte", "ln_f"),
            Arch::Llama(_) => ("model.embed_tokens.weight", "model.embed_tokens.weight", "model.norm"),
        };
        let table = if self.config.output == Output::Own { "lm_head.weight" } else { table };
        let mut x: Vec<Vec<f64>> = tokens.iter().map(|id| self.row(wte, *id as usize).to_vec()).collect();
        if self.config.arch == Arch::Gpt2 {
            x = x.iter().enumerate().map(|(t, x)| add(x, self.row("wpe", t))).collect();
        }
        for layer in 0..self.config.layers {
            match self.config.arch {
                Arch::Gpt2 => self.gpt2_block(&format!("h.{layer}"), &mut x),
                Arch::Llama(llama) => self.llama_block(llama, &format!("model.layers.{layer}"), &mut x),
            }
        }
        let logits = |x: &Vec<f64>| {
            let y = self.norm(last, x);
            (0..self.config.vocab).map(|id| dot(self.row(table, id), &y)).collect()
        };
        x.iter().map(logits).collect()
    }

    fn row(&self, table: &str, at: usize) -> &[f64] {
        let dim = self.config.dim;
        &self.values[table][at * dim..(at + 1) * dim]
    }

    fn gpt2_block(&self, name: &str, x: &mut [Vec<f64>]) {
        let (dim, name) = (self.config.dim, |part: &str| format!("{name}.{part}"));
        let qkv: Vec<_> = x.iter().map(|x| self.linear(&name("attn.c_attn"), &self.norm(&name("ln_1"), x))).collect();
        let part = |at: usize| qkv.iter().map(|row| row[at * dim..(at + 1) * dim].to_vec()).collect();
        for (x, attended) in x.iter_mut().zip(self.attend(&[part(0), part(1), part(2)])) {
            *x = add(x, &self.linear(&name("attn.c_proj"), &attended));
            let hidden = self.linear(&name("mlp.c_fc"), &self.norm(&name("ln_2"), x));
            let active: Vec<f64> = hidden.into_iter().map(gelu).collect();
            *x = add(x, &self.linear(&name("mlp.c_proj"), &active));
        }
    }

    fn llama_block(&self, llama: LlamaConfig, name: &str, x: &mut [Vec<f64>]) {
        let name = |part: &str| format!("{name}.{part}");
        let normed: Vec<_> = x.iter().map(|x| self.norm(&name("input_layernorm"), x)).collect();
        let part = |part: &str| -> Vec<_> { normed.iter().map(|x| self.linear(&name(part), x)).collect() };
        let turned = |rows: Vec<Vec<f64>>| rows.iter().enumerate().map(|(t, row)| self.turned(llama, t, row)).collect();
        let (q, k) = (turned(part("self_attn.q_proj")), turned(part("self_attn.k_proj")));
        for (x, attended) in x.iter_mut().zip(self.attend(&[q, k, part("self_attn.v_proj")])) {
            *x = add(x, &self.linear(&name("self_attn.o_proj"), &attended));
            let y = self.norm(&name("post_attention_layernorm"), x);
            let (gate, up) = (self.linear(&name("mlp.gate_proj"), &y), self.linear(&name("mlp.up_proj"), &y));
            let active: Vec<f64> = gate.iter().zip(&up).map(|(z, up)| z / (1.0 + (-z).exp()) * up).collect();
            *x = add(x, &self.linear(&name("mlp.down_proj"), &active));
        }
    }

    /// Each pair of columns (i, i + half) of each head as a complex number, times e^(angle · sqrt(−1)).
    fn turned(&self, llama: LlamaConfig, t: usize, row: &[f64]) -> Vec<f64> {
        let width = self.config.head_dim();
        let at = |c: usize| {
            let (head, i) = (c / width * width, c % width % (width / 2));
            let angle = t as f64 / (llama.rope_base as f64).powf(2.0 * i as f64 / width as f64);
            let (re, im) = (row[head + i], row[head + i + width / 2]);
            let first = c % width < width / 2;
            if first { re * angle.cos() - im * angle.sin() } else { re * angle.sin() + im * angle.cos() }
        };
        (0..row.len()).map(at).collect()
    }

    /// Layer norm where there is a bias, else RMS norm.
    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let n = x.len() as f64;
        let bias = self.values.get(&format!("{name}.bias"));
        let mean = if bias.is_some() { x.iter().sum::<f64>() / n } else { 0.0 };
        let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        let weight = &self.values[&format!("{name}.weight")];
        let scaled = x.iter().zip(weight).map(|(v, w)| (v - mean) / (variance + 1e-5).sqrt() * w).collect::<Vec<_>>();
        bias.map_or(scaled.clone(), |bias| add(&scaled, bias))
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let products: Vec<f64> =
            self.values[&format!("{name}.weight")].chunks(x.len()).map(|row| dot(row, x)).collect();
        self.values.get(&format!("{name}.bias")).map_or(products.clone(), |bias| add(&products, bias))
    }

    /// Queries, keys and values by token, heads side by side.
    fn attend(&self, [q, k, v]: &[Vec<Vec<f64>>; 3]) -> Vec<Vec<f64>> {
        let (width, group) = (self.config.head_dim(), self.config.heads / self.config.kv_heads());
        let mut out = vec![vec![0.0; self.config.dim]; q.len()];
        for (t, out) in out.iter_mut().enumerate() {
            for head in 0..self.config.heads {
                let (scale, kv) = (1.0 / (width as f64).sqrt(), head / group * width..(head / group + 1) * width);
                let q = &q[t][head * width..][..width];
                let scores: Vec<f64> = (0..=t).map(|s| dot(q, &k[s][kv.clone()]) * scale).collect();
                let top = scores.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                for (s, score) in scores.iter().enumerate() {
                    let p = (score - top).exp() / total;
                    for (o, v) in out[head * width..].iter_mut().zip(&v[s][kv.clone()]) {
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
