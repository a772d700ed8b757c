//! What is wrong with a configuration: every violation, in one report.

use std::{fmt, path::PathBuf};

/// A setting as it would stand in a configuration or behind `--set`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// `section.key`, or what stands in its place.
    pub key: String,
    /// What it is set to.
    pub value: SettingValue,
}

/// What a setting is set to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingValue {
    /// To this, as TOML.
    Toml(String),
    /// To nothing: it is absent, or is to be removed.
    Absent,
    /// It is no setting but a section, or an override that cannot be read.
    Text,
}

impl Setting {
    pub(crate) fn new(key: impl Into<String>, value: impl fmt::Display) -> Setting {
        Setting { key: key.into(), value: SettingValue::Toml(value.to_string()) }
    }

    pub(crate) fn text(key: impl Into<String>, value: impl Into<String>) -> Setting {
        Setting::new(key, toml::Value::String(value.into()))
    }

    pub(crate) fn absent(key: impl Into<String>) -> Setting {
        Setting { key: key.into(), value: SettingValue::Absent }
    }

    pub(crate) fn section(name: &str) -> Setting {
        Setting { key: format!("[{name}]"), value: SettingValue::Text }
    }

    pub(crate) fn unreadable(text: &str) -> Setting {
        Setting { key: format!("--set {text}"), value: SettingValue::Text }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            SettingValue::Toml(value) => write!(f, "{} = {value}", self.key),
            SettingValue::Absent => write!(f, "{} (not set)", self.key),
            SettingValue::Text => f.write_str(&self.key),
        }
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq)]
pub struct Violation {
    /// What it is about, with the values that disagree.
    pub settings: Vec<Setting>,
    /// What must hold.
    pub rule: Rule,
    /// The nearest settings that keep the rule; each of them is enough. Those for a setting that is wrong by itself were
    /// tried with everything else that is set: there may be none.
    pub nearest: Vec<Setting>,
}

impl Violation {
    /// Whether it is about a setting, alone or with others.
    pub(crate) fn names(&self, key: &str) -> bool {
        self.settings.iter().any(|setting| setting.key == key)
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list =
            |settings: &[Setting], or: &str| settings.iter().map(ToString::to_string).collect::<Vec<_>>().join(or);
        write!(f, "{}\n    {}", list(&self.settings, ", "), self.rule)?;
        if !self.nearest.is_empty() {
            write!(f, "\n    nearest valid: {}", list(&self.nearest, "  or  "))?;
        }
        Ok(())
    }
}

/// What must hold of settings.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Rule {
    /// An override without its parts.
    #[error("an override is written --set section.key=value")]
    OverrideForm,
    /// A section that does not exist.
    #[error("there is no such section; sections: {}", known.join(", "))]
    UnknownSection {
        /// All sections.
        known: Vec<&'static str>,
    },
    /// A key that its section does not have.
    #[error("there is no such key; [{section}] has: {}", known.join(", "))]
    UnknownKey {
        /// Where it stands.
        section: &'static str,
        /// All keys of the section.
        known: Vec<&'static str>,
    },
    /// A setting that has no default and cannot be derived.
    #[error("must be set: {meaning}")]
    Required {
        /// What the setting decides.
        meaning: &'static str,
    },
    /// A value of another kind.
    #[error("must be {wanted}, not {found}")]
    Type {
        /// The kind of value that is wanted.
        wanted: &'static str,
        /// The kind that is there.
        found: &'static str,
    },
    /// A name that is not in a closed set.
    #[error("must be one of {}", quoted(known))]
    OneOf {
        /// All names.
        known: Vec<&'static str>,
    },
    /// A number outside its range.
    #[error("must be {range}")]
    Range {
        /// Which numbers are valid.
        range: Range,
    },
    /// Heads of unequal width.
    #[error("heads must divide dim: every head has dim / heads values")]
    HeadsDivideDim,
    /// Heads of odd width where they are turned in pairs.
    #[error("llama turns the values of a head in pairs for its position: heads of {width} values have one left over")]
    EvenHeads {
        /// Values of a head.
        width: usize,
    },
    /// Query heads that do not share key-value heads evenly.
    #[error("kv_heads must divide heads: every key-value head serves heads / kv_heads query heads")]
    KvHeadsDivideHeads,
    /// Grouped queries in a model that has none.
    #[error("gpt2 has a key-value head for every query head")]
    Gpt2HasNoGroups,
    /// A vocabulary that cannot hold every token.
    #[error("vocab must be at least the {tokens} tokens of tokenizer \"{tokenizer}\"")]
    VocabHoldsTokens {
        /// Different tokens.
        tokens: usize,
        /// Of which tokenizer.
        tokenizer: String,
    },
    /// Sizes or an order that make no layout.
    #[error("{problem}")]
    Layout {
        /// The layout's own error.
        problem: String,
    },
    /// A size of the model or of a microbatch that the layout cannot share.
    #[error("{problem}")]
    Share {
        /// The model's own error.
        problem: String,
    },
    /// Sequences that a tensor group cannot split.
    #[error("with layout.sequence_parallel every rank of a tensor group keeps an equal part of the tokens")]
    SplitsTokens,
    /// A split that is not weights.
    #[error("{problem}")]
    Split {
        /// The split's own error.
        problem: String,
    },
    /// A global batch that ranks and microbatches cannot share evenly.
    #[error(
        "global_batch must be a multiple of micro_batch * data ranks = {micro_batch} * {data_ranks} (dp * gtp): every \
         rank runs the same number of microbatches"
    )]
    BatchMultiple {
        /// Sequences per rank and microbatch.
        micro_batch: u64,
        /// Ranks that read distinct data.
        data_ranks: u64,
    },
    /// More tokens in a step than are counted.
    #[error("global_batch * seq_len are {tokens} tokens in a step: at most {most} are counted")]
    BatchTokens {
        /// Tokens of a step.
        tokens: u128,
        /// The most that there can be.
        most: u64,
    },
    /// A final learning rate above the peak.
    #[error("min_lr must not be above lr: the schedule goes down to it")]
    MinLrBelowLr,
    /// An evaluation of text that there is none of.
    #[error("evaluation reads the second part of split, and its weight is 0")]
    EvalSplit,
    /// A setting that would have no effect.
    #[error("would have no effect: {because}")]
    NoEffect {
        /// What switches it off.
        because: NoEffect,
    },
    /// A setting that a later version will have.
    #[error("is not there yet: {what}")]
    NotYet {
        /// What is missing.
        what: NotYet,
    },
}

impl Rule {
    /// Whether it is about one setting, whatever the others are.
    pub(crate) fn is_of_one_setting(&self) -> bool {
        use Rule::{OneOf, Range, Required, Split, Type};
        matches!(self, OneOf { .. } | Range { .. } | Required { .. } | Split { .. } | Type { .. })
    }
}

/// Which numbers are valid.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Range {
    /// Whole numbers, both ends included.
    #[error("a whole number from {0} to {1}")]
    Whole(u64, u64),
    /// Larger than.
    #[error("a finite number above {0}")]
    Above(f64),
    /// As large or larger.
    #[error("a finite number of at least {0}")]
    AtLeast(f64),
    /// The first included, the second not.
    #[error("at least {0} and below {1}")]
    Below(f64, f64),
}

/// Why a setting would have no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoEffect {
    /// A final value of a schedule that stays.
    #[error("the constant schedule stays at lr after warm-up")]
    ConstantSchedule,
    /// Steps of a decay that the schedule does not have.
    #[error("only the wsd schedule has a decay of its own length")]
    DecaySteps,
    /// Angles of positions that are not turned.
    #[error("gpt2 learns its positions; only llama turns them")]
    LearnedPositions,
    /// Samples of an evaluation that never comes.
    #[error("an eval_interval of 0 means that there is no evaluation")]
    NeverEvaluated,
    /// Gathered parameters without a distributed optimizer.
    #[error("parameters are gathered only if optimizer.distributed = true, else every rank updates all of them")]
    NothingGathered,
    /// A schedule of gathers that do not overlap.
    #[error("only gathers beside forward have a schedule, and there are none")]
    NothingDispatched,
    /// Text that is not read.
    #[error("random tokens take the place of text")]
    RandomTokens,
    /// Settings of shards where there are none.
    #[error("weights are gathered only where they are sharded, with layout.gtp above 1")]
    NoShards,
    /// Tokens that nobody shares.
    #[error("tokens are split over a tensor group, with layout.tp above 1")]
    NoTensorGroup,
    /// Gates where no graph has any.
    #[error("only graphs of a layer, a chunk or a microbatch wait at gates")]
    NoGates,
    /// An order of nodes where there are none.
    #[error("no graph is captured whose operations could have an order")]
    NoGraphs,
}

/// What a later version will have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotYet {
    /// A parallel axis.
    #[error("this run spreads over tp, gtp and dp; the other axes can be planned with `trainer groups`")]
    Axis,
    /// Gradients or the optimizer's numbers in fewer bits.
    #[error("gradients, their sums and what the optimizer keeps are f32; only precision.param may be bf16")]
    Bf16,
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}

/// Everything that is wrong with a configuration, in one go.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The file; none: text from elsewhere.
    pub path: Option<PathBuf>,
    /// In the order of the sections; at least one.
    pub violations: Vec<Violation>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => write!(f, "configuration '{}'", path.display())?,
            None => f.write_str("configuration")?,
        }
        let count = self.violations.len();
        write!(f, ": {count} {} to change, nothing was started", if count == 1 { "setting" } else { "settings" })?;
        for (i, violation) in self.violations.iter().enumerate() {
            write!(f, "\n{:>2}. {violation}", i + 1)?;
        }
        Ok(())
    }
}

impl std::error::Error for Report {}
