//! Several named collections of groups for one pipeline of modules.

use crate::plan_error::PlanError;

/// Whether a module is the one that produces the language loss.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ModuleRole {
    /// The language module: at most one.
    Language,
    /// Any other.
    Other,
}

/// A collection of groups for each module, by name and in a fixed order.
///
/// `T` is a [`GroupsPlan`](crate::GroupsPlan) while planning, the groups themselves later.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Modules<T> {
    entries: Vec<(String, T)>,
    language: Option<usize>,
}

impl<T> Modules<T> {
    /// Names the modules.
    ///
    /// # Errors
    /// [`PlanError::ModuleTwice`], [`PlanError::TwoLanguageModules`].
    pub fn new(modules: impl IntoIterator<Item = (String, ModuleRole, T)>) -> Result<Modules<T>, PlanError> {
        let mut all = Modules { entries: Vec::new(), language: None };
        for (name, role, value) in modules {
            if all.entries.iter().any(|(known, _)| *known == name) {
                return Err(PlanError::ModuleTwice { name });
            }
            if role == ModuleRole::Language
                && let Some(first) = all.language.replace(all.entries.len())
            {
                let first = all.entries[first].0.clone();
                return Err(PlanError::TwoLanguageModules { first, second: name });
            }
            all.entries.push((name, value));
        }
        Ok(all)
    }

    /// The collection of a module.
    ///
    /// # Errors
    /// [`PlanError::UnknownModule`] with the names there are.
    pub fn get(&self, name: &str) -> Result<&T, PlanError> {
        let found = self.entries.iter().find(|(known, _)| known == name);
        found
            .map(|(_, value)| value)
            .ok_or_else(|| PlanError::UnknownModule { name: name.to_owned(), known: self.names() })
    }

    /// The name and the collection of the language module.
    ///
    /// # Errors
    /// [`PlanError::NoLanguageModule`] if none was designated.
    pub fn language(&self) -> Result<(&str, &T), PlanError> {
        let entry = self.language.map(|i| &self.entries[i]);
        entry
            .map(|(name, value)| (name.as_str(), value))
            .ok_or_else(|| PlanError::NoLanguageModule { known: self.names() })
    }

    /// Number of modules.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no module.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Names and collections in the order they were given.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &T)> {
        self.entries.iter().map(|(name, value)| (name.as_str(), value))
    }

    fn names(&self) -> String {
        let names: Vec<&str> = self.entries.iter().map(|(name, _)| name.as_str()).collect();
        names.join(", ")
    }
}
