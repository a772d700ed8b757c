//! Created once, read after creation, released once.

use crate::{
    axis::Axis,
    plan_error::PlanError,
    views::{ViewKey, ViewName, Views},
};

/// What was created for the axes of a set of views, in creation order.
///
/// `T` is whatever a group is to the caller: a member list while planning, a communicator later. A shared axis is
/// kept under the base, so all views see one object.
#[derive(Debug)]
pub struct Registry<T> {
    views: Views,
    created: Vec<(ViewKey, T)>,
}

impl<T> Registry<T> {
    /// An empty registry over `views`.
    #[must_use]
    pub fn new(views: Views) -> Registry<T> {
        Registry { views, created: Vec::new() }
    }

    /// Keeps what `make` builds for the axes.
    ///
    /// # Errors
    /// [`PlanError::CreatedTwice`] if the same group was created before, since its options could differ; `make` is
    /// not called then. Else those of [`Views::key`].
    pub fn create(
        &mut self,
        view: &ViewName,
        axes: &[Axis],
        make: impl FnOnce(&ViewKey) -> T,
    ) -> Result<&T, PlanError> {
        let key = self.views.key(view, axes)?;
        if self.find(&key).is_some() {
            return Err(PlanError::CreatedTwice { key });
        }
        let value = make(&key);
        self.created.push((key, value));
        let last = self.created.last().map(|(_, value)| value);
        Ok(last.expect("BUG: the entry was pushed on the line above"))
    }

    /// What was created for the axes.
    ///
    /// # Errors
    /// [`PlanError::NotCreated`] before creation; else those of [`Views::key`].
    pub fn get(&self, view: &ViewName, axes: &[Axis]) -> Result<&T, PlanError> {
        let key = self.views.key(view, axes)?;
        self.find(&key).ok_or(PlanError::NotCreated { key })
    }

    /// Keys in creation order.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = &ViewKey> {
        self.created.iter().map(|(key, _)| key)
    }

    /// Gives everything back, last created first, each once.
    #[must_use = "what comes back is to be released"]
    pub fn destroy(self) -> Vec<(ViewKey, T)> {
        self.created.into_iter().rev().collect()
    }

    fn find(&self, key: &ViewKey) -> Option<&T> {
        let found = self.created.iter().find(|(known, _)| known == key);
        found.map(|(_, value)| value)
    }
}
