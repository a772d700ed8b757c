//! Sizes of a model, and every rule that they break.

use std::fmt;

use crate::{Arch, LlamaConfig};

/// Added to the variance or the mean square by norms, as in GPT-2 and in LLaMA since its second version.
pub(crate) const EPS: f32 = 1e-5;

/// Where the logits' matrix comes from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Output {
    /// The token embedding's table.
    Tied,
    /// A table of its own, `lm_head.weight`.
    Own,
}

/// Sizes of a GPT.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GptConfig {
    /// Which blocks.
    pub arch: Arch,
    /// Transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Attention heads; divides `dim`.
    pub heads: usize,
    /// Width of the hidden layer.
    pub ffn_dim: usize,
    /// Valid token ids are `0..vocab`.
    pub vocab: usize,
    /// Rows of the embedding table, at least `vocab`. Rows past the vocabulary get no probability and a gradient of
    /// 0.
    pub vocab_rows: usize,
    /// The longest sequence, in tokens.
    pub seq_len: usize,
    /// Where the logits' matrix comes from.
    pub output: Output,
}

impl GptConfig {
    /// Columns of one attention head.
    pub fn head_dim(&self) -> usize {
        self.dim / self.heads
    }

    /// Heads of key and value.
    pub fn kv_heads(&self) -> usize {
        match self.arch {
            Arch::Gpt2 => self.heads,
            Arch::Llama(llama) => llama.kv_heads,
        }
    }

    /// Columns of all key heads.
    pub fn kv_dim(&self) -> usize {
        self.kv_heads() * self.head_dim()
    }

    /// All rules at once.
    ///
    /// # Errors
    /// Every rule that is broken.
    pub fn check(&self) -> Result<(), ConfigViolations> {
        let sizes = [
            ("layers", self.layers),
            ("dim", self.dim),
            ("heads", self.heads),
            ("ffn_dim", self.ffn_dim),
            ("vocab", self.vocab),
            ("seq_len", self.seq_len),
        ];
        let zero = sizes.iter().filter(|(_, n)| *n == 0);
        let mut found: Vec<ConfigViolation> =
            zero.map(|(setting, _)| ConfigViolation { setting, value: 0, rule: ConfigRule::AtLeastOne }).collect();
        let mut refuse = |setting, value, rule| found.push(ConfigViolation { setting, value, rule });
        if self.heads > 0 && !self.dim.is_multiple_of(self.heads) {
            refuse("heads", self.heads, ConfigRule::Divides { setting: "dim", value: self.dim });
        }
        if self.vocab_rows < self.vocab {
            refuse("vocab_rows", self.vocab_rows, ConfigRule::NotBelow { setting: "vocab", value: self.vocab });
        }
        if let Arch::Llama(llama) = self.arch {
            self.check_llama(llama, &mut refuse);
        }
        let ids = i32::MAX as usize;
        if self.vocab > ids {
            refuse("vocab", self.vocab, ConfigRule::AtMost(ids));
        }
        if found.is_empty() { Ok(()) } else { Err(ConfigViolations(found)) }
    }

    fn check_llama(&self, llama: LlamaConfig, refuse: &mut impl FnMut(&'static str, usize, ConfigRule)) {
        let LlamaConfig { kv_heads, rope_base } = llama;
        for (setting, value) in [("kv_heads", kv_heads), ("rope_base", rope_base)] {
            if value == 0 {
                refuse(setting, value, ConfigRule::AtLeastOne);
            }
        }
        if kv_heads > 0 && self.heads > 0 && !self.heads.is_multiple_of(kv_heads) {
            refuse("kv_heads", kv_heads, ConfigRule::Divides { setting: "heads", value: self.heads });
        }
        // With heads that do not divide dim there is no width to judge.
        if self.heads > 0 && self.dim.is_multiple_of(self.heads) && !self.head_dim().is_multiple_of(2) {
            refuse("heads", self.heads, ConfigRule::EvenHeads { dim: self.dim });
        }
    }
}

/// One broken rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigViolation {
    /// The setting.
    pub setting: &'static str,
    /// Its value.
    pub value: usize,
    /// What it breaks.
    pub rule: ConfigRule,
}

/// What a size must obey.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ConfigRule {
    /// It must not be 0.
    AtLeastOne,
    /// It must divide another setting.
    Divides {
        /// The other setting.
        setting: &'static str,
        /// Its value.
        value: usize,
    },
    /// It must not be below another setting.
    NotBelow {
        /// The other setting.
        setting: &'static str,
        /// Its value.
        value: usize,
    },
    /// It must leave each head an even number of columns: rotary positions turn them in pairs.
    EvenHeads {
        /// Columns of all heads.
        dim: usize,
    },
    /// It must not be over this: token ids are i32.
    AtMost(usize),
    /// It must be a multiple of the tensor size: each rank has as many.
    DividesOver {
        /// Tensor size.
        tp: u32,
        /// The nearest value that would do, if one is near.
        nearest: Option<usize>,
        /// The nearest tensor size that divides heads, key heads and hidden columns.
        nearest_tp: usize,
    },
    /// Its tokens must divide over the tensor size: a sequence split gives each rank as many.
    SplitsTokens {
        /// Tokens of a sequence.
        seq_len: usize,
        /// Tensor size.
        tp: u32,
    },
    /// It must make rows divide over the weight-shard size: padding is a multiple of it, and 0 allows none.
    PadsRows {
        /// Rows of one rank of the tensor axis.
        rows: usize,
        /// Weight-shard size.
        gtp: u32,
    },
}

impl fmt::Display for ConfigViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ConfigViolation { setting, value, rule } = self;
        write!(f, "{setting} is {value}: ")?;
        match *rule {
            ConfigRule::AtLeastOne => f.write_str("it must be at least 1"),
            ConfigRule::Divides { setting, value: whole } => {
                write!(f, "it must divide {setting}, {whole}; the nearest that does is {}", nearest(*value, whole))
            }
            ConfigRule::NotBelow { setting, value } => write!(f, "it must be at least {setting}, {value}"),
            ConfigRule::EvenHeads { dim } if dim.is_multiple_of(2) => {
                let (heads, width) = (nearest(*value, dim / 2), dim / value);
                write!(f, "heads of {width} columns cannot be turned in pairs; the nearest that can be is {heads}")
            }
            ConfigRule::EvenHeads { dim } => {
                write!(f, "heads of {} columns cannot be turned in pairs; dim, {dim}, must be even", dim / value)
            }
            ConfigRule::AtMost(most) => write!(f, "token ids are i32, so it must be at most {most}"),
            ConfigRule::DividesOver { tp, nearest, nearest_tp } => {
                write!(f, "it must be a multiple of tp, {tp}; ")?;
                if let Some(nearest) = nearest {
                    write!(f, "the nearest that would do is {nearest}, ")?;
                }
                write!(f, "the nearest tp that divides all sizes is {nearest_tp}")
            }
            ConfigRule::SplitsTokens { seq_len, tp } => {
                let tokens = value * seq_len;
                write!(
                    f,
                    "its {tokens} tokens ({value} x seq_len {seq_len}) must divide over tp, {tp}, under a sequence "
                )?;
                let nearest = nearest_split(*value, seq_len, tp as usize);
                write!(f, "split; the nearest that does is {nearest}")
            }
            ConfigRule::PadsRows { rows, gtp } if *value == 0 => {
                let padded = rows.next_multiple_of(gtp as usize);
                write!(f, "weights of {rows} rows do not divide over gtp, {gtp}; the nearest is 1 (pads to {padded})")
            }
            ConfigRule::PadsRows { rows, gtp } => {
                write!(f, "{rows} rows padded to a multiple of {value} x gtp, {gtp}, are too many; the nearest is 1")
            }
        }
    }
}

/// The number of sequences nearest to `wish`, the smaller of two, whose tokens divide over `ranks`.
fn nearest_split(wish: usize, seq_len: usize, ranks: usize) -> usize {
    let divides = |n: &usize| (n * seq_len).is_multiple_of(ranks);
    (1..=wish + ranks).filter(divides).min_by_key(|n| (n.abs_diff(wish), *n)).unwrap_or(ranks)
}

/// The divisor of `whole` that is nearest to `wish`, the smaller of two.
fn nearest(wish: usize, whole: usize) -> usize {
    let divides = |n: &usize| *n > 0 && whole.is_multiple_of(*n);
    let below = (1..=wish.min(whole)).rev().find(divides).unwrap_or(1);
    let above = (wish..=whole).find(divides).unwrap_or(below);
    if above > wish && above - wish < wish - below { above } else { below }
}

/// All broken rules of a configuration, one per line.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub struct ConfigViolations(pub Vec<ConfigViolation>);

impl fmt::Display for ConfigViolations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the model's sizes break {} rules:", self.0.len())?;
        self.0.iter().try_for_each(|violation| write!(f, "\n  {violation}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_divisor_is_offered() {
        assert_eq!(nearest(5, 12), 4);
        assert_eq!(nearest(7, 384), 6);
        assert_eq!(nearest(11, 384), 12);
        assert_eq!(nearest(9, 8), 8);
        assert_eq!(nearest(5, 7), 7);
        assert_eq!(nearest(3, 7), 1);
    }

    #[test]
    fn heads_that_cannot_be_turned_are_told_the_nearest_that_can() {
        let text =
            |value, dim| ConfigViolation { setting: "heads", value, rule: ConfigRule::EvenHeads { dim } }.to_string();
        assert_eq!(
            text(4, 12),
            "heads is 4: heads of 3 columns cannot be turned in pairs; the nearest that can be is 3"
        );
        assert_eq!(text(3, 9), "heads is 3: heads of 3 columns cannot be turned in pairs; dim, 9, must be even");
    }
}
