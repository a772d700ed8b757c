//! Text of a trace: shared, never copied for an event.

use std::{
    cmp::Ordering,
    fmt,
    hash::{Hash, Hasher},
    ops::Deref,
    sync::Arc,
};

use crate::{Site, Why};

/// A name in a trace. Cloning shares the text; equality, order and hash are those of the text.
#[derive(Clone)]
pub enum Label {
    /// Known when the program was written.
    Static(&'static str),
    /// Made once, when the thing it names was made.
    Shared(Arc<str>),
}

impl Label {
    /// The text.
    pub fn as_str(&self) -> &str {
        match self {
            Label::Static(s) => s,
            Label::Shared(s) => s,
        }
    }
}

impl Deref for Label {
    type Target = str;

    fn deref(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self)
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl PartialEq for Label {
    fn eq(&self, other: &Label) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for Label {}

impl PartialEq<str> for Label {
    fn eq(&self, other: &str) -> bool {
        self.as_str() == other
    }
}

impl PartialEq<&str> for Label {
    fn eq(&self, other: &&str) -> bool {
        self.as_str() == *other
    }
}

impl PartialOrd for Label {
    fn partial_cmp(&self, other: &Label) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Label {
    fn cmp(&self, other: &Label) -> Ordering {
        self.as_str().cmp(other.as_str())
    }
}

impl Hash for Label {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl From<&'static str> for Label {
    fn from(s: &'static str) -> Label {
        Label::Static(s)
    }
}

impl From<String> for Label {
    fn from(s: String) -> Label {
        Label::Shared(s.into())
    }
}

impl From<&Arc<str>> for Label {
    fn from(s: &Arc<str>) -> Label {
        Label::Shared(s.clone())
    }
}

impl From<&Site> for Label {
    fn from(s: &Site) -> Label {
        match s {
            Site::Static(s) => Label::Static(s),
            Site::Shared(s) => Label::Shared(s.clone()),
        }
    }
}

impl From<Why> for Label {
    fn from(why: Why) -> Label {
        Label::Static(why.0)
    }
}
