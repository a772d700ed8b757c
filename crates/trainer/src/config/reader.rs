//! TOML values to settings; what does not fit becomes a violation, and reading goes on.

use super::{
    choices::Choice,
    nearest::{nearest_word, nearest_words, shares_word},
    violation::{Range, Rule, Setting, SettingValue, Violation},
};
use std::fmt;
use toml::{Table, Value};

/// A configuration being read, section by section.
#[derive(Clone)]
pub(crate) struct Reader {
    table: Table,
    violations: Vec<Violation>,
    /// Sections and keys that were asked for: all there are.
    known: Vec<(&'static str, Vec<&'static str>)>,
    /// Of those the ones that are set, right or wrong.
    given: Vec<(&'static str, &'static str)>,
    /// What was not asked for, by section.
    left: Vec<(&'static str, Table)>,
}

impl Reader {
    pub(crate) fn new(table: Table) -> Reader {
        Reader { table, violations: Vec::new(), known: Vec::new(), given: Vec::new(), left: Vec::new() }
    }

    /// Puts `section.key=value` over what the file says. The value is TOML; what is no TOML value is a string, so that
    /// `--set model.arch=gpt2` needs no quotes. Without a value the file's setting goes; where there is none, it is read
    /// as an empty one, so that a misspelled key is told.
    pub(crate) fn set(&mut self, text: &str) {
        let parts = text.split_once('=').and_then(|(name, value)| {
            let (section, key) = name.trim().split_once('.')?;
            let whole = !section.is_empty() && !key.is_empty() && !key.contains('.');
            whole.then_some((section, key, value.trim()))
        });
        let Some((section, key, value)) = parts else {
            self.push(Violation {
                settings: vec![Setting::unreadable(text)],
                rule: Rule::OverrideForm,
                nearest: vec![],
            });
            return;
        };
        let entry = self.table.entry(section).or_insert_with(|| Value::Table(Table::new()));
        // A section that is no table is reported when it is read.
        if let Value::Table(entry) = entry {
            let is_taken_away = value.is_empty() && entry.remove(key).is_some();
            if !is_taken_away {
                entry.insert(key.to_owned(), override_value(value));
            }
        }
    }

    /// A copy in which a proposal is followed; where its section is none, it becomes one.
    pub(crate) fn with(&self, proposal: &Setting) -> Reader {
        let mut followed = self.clone();
        let section = proposal.key.split_once('.').map(|(section, _)| section);
        if let (SettingValue::Toml(value), Some(section)) = (&proposal.value, section) {
            if !followed.table.get(section).is_some_and(Value::is_table) {
                followed.table.insert(section.to_owned(), Value::Table(Table::new()));
            }
            followed.set(&format!("{}={value}", proposal.key));
        }
        followed
    }

    /// Reads a section; one that is absent is read as empty.
    pub(crate) fn section<T>(&mut self, name: &'static str, read: impl FnOnce(&mut Section) -> T) -> T {
        let values = match self.table.remove(name) {
            Some(Value::Table(values)) => values,
            Some(other) => {
                let found = other.type_str();
                self.push(Violation {
                    settings: vec![Setting::new(name, other)],
                    rule: Rule::Type { wanted: "a section", found },
                    nearest: vec![Setting::section(name)],
                });
                Table::new()
            }
            None => Table::new(),
        };
        let (asked, given, violations) = (Vec::new(), Vec::new(), Vec::new());
        let mut section = Section { name, values, asked, given, violations };
        let read = read(&mut section);
        self.violations.append(&mut section.violations);
        self.known.push((name, section.asked));
        self.given.extend(section.given.into_iter().map(|key| (name, key)));
        self.left.push((name, section.values));
        read
    }

    /// Whether a setting stands there; else it has its default.
    pub(crate) fn is_given(&self, section: &str, key: &str) -> bool {
        self.given.contains(&(section, key))
    }

    /// Adds what follows from several settings, unless one of them is wrong by itself: then the rest is a guess.
    pub(crate) fn check(&mut self, violations: Vec<Violation>) {
        let mut wrong: Vec<String> =
            self.violations.iter().flat_map(|v| &v.settings).map(|setting| setting.key.clone()).collect();
        if wrong.iter().any(|key| key == "model.dim") {
            // Left open, these follow the width.
            wrong.extend(["heads", "kv_heads", "ffn_dim"].map(|key| format!("model.{key}")));
        }
        let of_good = |v: &Violation| !v.settings.iter().any(|setting| wrong.contains(&setting.key));
        self.violations.extend(violations.into_iter().filter(of_good));
    }

    /// All violations; what nobody asked for is one. A setting that is wrong by itself comes with proposals that
    /// `accepts` has tried, or with none.
    pub(crate) fn finish(mut self, accepts: &dyn Fn(&Setting) -> bool) -> Vec<Violation> {
        for violation in self.violations.iter_mut().filter(|violation| violation.rule.is_of_one_setting()) {
            violation.nearest.retain(|proposal| proposal.value == SettingValue::Text || accepts(proposal));
        }
        let sections: Vec<&'static str> = self.known.iter().map(|(name, _)| *name).collect();
        for (name, value) in std::mem::take(&mut self.table) {
            let (nearest, setting) = match value {
                Value::Table(values) => {
                    let near = nearest_word(&name, sections.iter().copied());
                    // A section that has nothing like what stands here is not meant.
                    let has_any = |near: &&str| values.is_empty() || values.keys().any(|key| self.has_like(near, key));
                    (near.filter(has_any).map(Setting::section).into_iter().collect(), Setting::section(&name))
                }
                value => (self.meant_by(&name, &value, None, accepts), Setting::new(&name, value)),
            };
            self.push(Violation {
                settings: vec![setting],
                rule: Rule::UnknownSection { known: sections.clone() },
                nearest,
            });
        }
        for (section, values) in std::mem::take(&mut self.left) {
            let known = self.keys(section).to_vec();
            for (key, value) in values {
                let nearest = self.meant_by(&key, &value, Some(section), accepts);
                self.push(Violation {
                    settings: vec![Setting::new(format!("{section}.{key}"), value)],
                    rule: Rule::UnknownKey { section, known: known.clone() },
                    nearest,
                });
            }
        }
        self.violations
    }

    /// What an unknown key may stand for, tried with its value: a key that is spelled the same in another section; else
    /// the nearest in its own; else those in its own that share a word with it; else one that is a slip away elsewhere.
    fn meant_by(
        &self,
        key: &str,
        value: &Value,
        section: Option<&'static str>,
        accepts: &dyn Fn(&Setting) -> bool,
    ) -> Vec<Setting> {
        type Keys = [&'static str];
        type Like<'a> = &'a dyn Fn(&Keys) -> Vec<&'static str>;
        let (own, others): (Vec<_>, Vec<_>) = self.known.iter().partition(|(name, _)| Some(*name) == section);
        let same = |keys: &Keys| keys.iter().copied().filter(|known| *known == key).collect();
        let near = |keys: &Keys| nearest_words(key, keys.iter().copied(), 2);
        let sharing = |keys: &Keys| keys.iter().copied().filter(|known| shares_word(key, known)).collect();
        // Elsewhere there are so many keys that one of them is always near.
        let slip = |keys: &Keys| nearest_words(key, keys.iter().copied(), 4);
        let ways: [(_, Like<'_>); 4] = [(&others, &same), (&own, &near), (&own, &sharing), (&others, &slip)];
        let accepted = ways.into_iter().map(|(sections, like)| -> Vec<Setting> {
            let keys = sections.iter().flat_map(|(name, keys)| like(keys).into_iter().map(move |key| (name, key)));
            keys.map(|(name, key)| Setting::new(format!("{name}.{key}"), value)).filter(accepts).collect()
        });
        accepted.into_iter().find(|proposals| !proposals.is_empty()).unwrap_or_default()
    }

    /// Whether a section has a key that `key` may stand for.
    fn has_like(&self, section: &str, key: &str) -> bool {
        let keys = self.keys(section);
        nearest_word(key, keys.iter().copied()).is_some() || keys.iter().any(|known| shares_word(key, known))
    }

    fn keys(&self, section: &str) -> &[&'static str] {
        self.known.iter().find(|(name, _)| *name == section).map_or(&[], |(_, keys)| keys)
    }

    fn push(&mut self, violation: Violation) {
        self.violations.push(violation);
    }
}

fn override_value(text: &str) -> Value {
    // A line break would let the text smuggle in a second key.
    let document = (!text.contains('\n')).then(|| format!("value = {text}"));
    let parsed = document.and_then(|document| document.parse::<Table>().ok());
    parsed.and_then(|mut table| table.remove("value")).unwrap_or_else(|| Value::String(text.to_owned()))
}

/// One section being read. Every method takes a key out; what is left at the end is unknown.
pub(crate) struct Section {
    name: &'static str,
    values: Table,
    asked: Vec<&'static str>,
    given: Vec<&'static str>,
    violations: Vec<Violation>,
}

impl Section {
    /// A whole number from `low` to the largest that a TOML integer holds.
    pub(crate) fn whole(&mut self, key: &'static str, low: u64) -> Option<u64> {
        self.whole_within(key, low, i64::MAX as u64)
    }

    /// A size: a whole number from `low` to 2^32 - 1, so that products of two fit everywhere.
    pub(crate) fn size(&mut self, key: &'static str, low: u32) -> Option<usize> {
        self.whole_within(key, low.into(), u32::MAX.into()).map(|size| size as usize)
    }

    /// As many workers as a machine can have.
    pub(crate) fn threads(&mut self, key: &'static str) -> Option<u32> {
        self.whole_within(key, 1, 1024).and_then(|n| u32::try_from(n).ok())
    }

    /// How many of something, from none to `most`.
    pub(crate) fn up_to(&mut self, key: &'static str, most: u32) -> Option<usize> {
        self.whole_within(key, 0, most.into()).map(|n| n as usize)
    }

    /// A whole number of 32 bits.
    pub(crate) fn small(&mut self, key: &'static str, low: u32) -> Option<u32> {
        self.whole_within(key, low.into(), u32::MAX.into()).and_then(|n| u32::try_from(n).ok())
    }

    fn whole_within(&mut self, key: &'static str, low: u64, high: u64) -> Option<u64> {
        let value = self.take(key)?;
        // What is too large for a TOML integer comes as text out of an override.
        let beyond = |text: &str| text.parse::<i128>().ok().filter(|n| i64::try_from(*n).is_err());
        let n = match &value {
            Value::Integer(n) => i128::from(*n),
            other => match other.as_str().and_then(beyond) {
                Some(n) => n,
                None => {
                    let low = i64::try_from(low).ok().map(Value::Integer);
                    return self.wrong_type_or(key, &value, Wanted::Whole, low);
                }
            },
        };
        let clamped = n.clamp(low.into(), high.into());
        if clamped == n {
            return u64::try_from(n).ok();
        }
        self.wrong(key, n, Rule::Range { range: Range::Whole(low, high) }, clamped.to_string())
    }

    /// A number within `range`; `nearest` is what a value outside is told to be, if the range has no nearest number.
    pub(crate) fn number(&mut self, key: &'static str, range: Range, nearest: f64) -> Option<f64> {
        let value = self.take(key)?;
        let n = match value {
            Value::Float(n) => n,
            Value::Integer(n) => n as f64,
            _ => return self.wrong_type_or(key, &value, Wanted::Number, Some(Value::Float(nearest))),
        };
        let (holds, nearest) = match range {
            Range::Whole(low, high) => (n.fract() == 0.0 && n >= low as f64 && n <= high as f64, nearest),
            Range::Above(low) => (n > low, nearest),
            Range::AtLeast(low) => (n >= low, if n < low { low } else { nearest }),
            Range::Below(low, high) => (n >= low && n < high, if n < low { low } else { nearest }),
        };
        if holds && n.is_finite() {
            return Some(n);
        }
        self.wrong(key, &value, Rule::Range { range }, Value::Float(nearest).to_string())
    }

    pub(crate) fn flag(&mut self, key: &'static str) -> Option<bool> {
        match self.take(key)? {
            Value::Boolean(flag) => Some(flag),
            other => self.wrong_type(key, &other, Wanted::Flag),
        }
    }

    /// A string; `form` says what stands in it, with an example.
    pub(crate) fn text(&mut self, key: &'static str, form: &'static str) -> Option<String> {
        match self.take(key)? {
            Value::String(text) => Some(text),
            other => self.wrong_type(key, &other, Wanted::Text { form }),
        }
    }

    /// A string, or a list of them.
    pub(crate) fn texts(&mut self, key: &'static str) -> Option<Vec<String>> {
        match self.take(key)? {
            Value::String(text) => Some(vec![text]),
            Value::Array(list) => {
                let texts: Option<Vec<String>> = list.iter().map(|item| item.as_str().map(str::to_owned)).collect();
                texts.or_else(|| self.wrong_type(key, &Value::Array(list), Wanted::Texts))
            }
            other => self.wrong_type(key, &other, Wanted::Texts),
        }
    }

    pub(crate) fn choice<C: Choice>(&mut self, key: &'static str) -> Option<C> {
        let value = self.take(key)?;
        let name = value.as_str();
        if let Some((_, choice)) = C::ALL.iter().find(|(known, _)| Some(*known) == name) {
            return Some(*choice);
        }
        let known: Vec<&'static str> = C::ALL.iter().map(|(known, _)| *known).collect();
        let nearest = name.and_then(|name| nearest_word(name, known.iter().copied())).unwrap_or(known[0]);
        let nearest = Value::String(nearest.to_owned()).to_string();
        self.wrong(key, &value, Rule::OneOf { known }, nearest)
    }

    /// Says that a key must be set, unless it is there but wrong. `example` is a value to begin with.
    pub(crate) fn required<T>(&mut self, key: &'static str, value: Option<T>, need: Need<'_, T>) -> T {
        value.unwrap_or_else(|| {
            let key = self.key(key);
            let already = self.violations.iter().any(|v| v.settings.iter().any(|s| s.key == key));
            if !already {
                self.violations.push(Violation {
                    settings: vec![Setting::absent(&key)],
                    rule: Rule::Required { meaning: need.meaning },
                    nearest: vec![Setting::new(key, need.example)],
                });
            }
            need.meanwhile
        })
    }

    /// Adds a violation that the caller has found in a value of this section.
    pub(crate) fn push(&mut self, violation: Violation) {
        self.violations.push(violation);
    }

    fn take(&mut self, key: &'static str) -> Option<Value> {
        self.asked.push(key);
        let value = self.values.remove(key)?;
        self.given.push(key);
        Some(value)
    }

    fn wrong_type<T>(&mut self, key: &str, value: &Value, wanted: Wanted) -> Option<T> {
        self.wrong_type_or(key, value, wanted, None)
    }

    /// `otherwise` is the nearest setting if the value does not show what was meant.
    fn wrong_type_or<T>(&mut self, key: &str, value: &Value, wanted: Wanted, otherwise: Option<Value>) -> Option<T> {
        let key = self.key(key);
        let nearest = wanted.meant_by(value).or(otherwise).map(|meant| Setting::new(&key, meant));
        self.violations.push(Violation {
            settings: vec![Setting::new(&key, value)],
            rule: Rule::Type { wanted: wanted.name(), found: value.type_str() },
            nearest: nearest.into_iter().collect(),
        });
        None
    }

    fn wrong<T>(&mut self, key: &str, value: impl fmt::Display, rule: Rule, nearest: String) -> Option<T> {
        let key = self.key(key);
        self.violations.push(Violation {
            settings: vec![Setting::new(&key, value)],
            rule,
            nearest: vec![Setting::new(key, nearest)],
        });
        None
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }
}

/// What to say of a setting that is absent but must be there, and what to go on with meanwhile.
pub(crate) struct Need<'a, T> {
    pub(crate) meaning: &'static str,
    pub(crate) example: &'a str,
    pub(crate) meanwhile: T,
}

/// A kind of value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Whole,
    Number,
    Flag,
    Text { form: &'static str },
    Texts,
}

impl Wanted {
    fn name(self) -> &'static str {
        match self {
            Wanted::Whole => "a whole number",
            Wanted::Number => "a number",
            Wanted::Flag => "true or false",
            Wanted::Text { form } => form,
            Wanted::Texts => "a string or a list of strings",
        }
    }

    /// Quotes too many or too few are the usual slip: what is meant by `"12"` for a number, or by 12 for a string.
    fn meant_by(self, value: &Value) -> Option<Value> {
        let unquoted = || value.as_str().map(override_value);
        match self {
            Wanted::Whole => unquoted().or_else(|| whole(value)).filter(Value::is_integer),
            Wanted::Number => unquoted().filter(|v| v.is_float() || v.is_integer()),
            Wanted::Flag => Some(Value::Boolean(!matches!(
                value.to_string().trim_matches('"').to_lowercase().as_str(),
                "false" | "no" | "off" | "0" | "none"
            ))),
            Wanted::Text { .. } | Wanted::Texts => match value {
                Value::Array(list) if self == Wanted::Texts => Some(Value::Array(list.iter().map(as_text).collect())),
                Value::Array(_) | Value::Table(_) => None,
                scalar => Some(as_text(scalar)),
            },
        }
    }
}

fn as_text(value: &Value) -> Value {
    Value::String(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

/// `1e3` and `4.0` are floats in TOML, but whole.
fn whole(value: &Value) -> Option<Value> {
    let n = value.as_float()?;
    // Above 2^53 a float stands for several whole numbers.
    (n.fract() == 0.0 && n.abs() < 9e15).then_some(Value::Integer(n as i64))
}
