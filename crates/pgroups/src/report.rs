//! Every standard group of a layout, for people and tools to look at.

use std::fmt;

use crate::{
    keys::{Key, Standard},
    layout::Layout,
    plan_error::PlanError,
    rank::{GlobalRank, RankList},
};

/// Every standard key with all its groups, in creation order; groups of one rank too.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupsReport {
    entries: Vec<(Key, Vec<Vec<GlobalRank>>)>,
}

/// Lists the groups of every standard key of a layout: all ranks of all groups.
///
/// # Errors
/// None that a checked layout can cause; those of its grids are passed on.
pub fn groups_report(layout: &Layout) -> Result<GroupsReport, PlanError> {
    let mut entries = Vec::new();
    for standard in Standard::all(layout) {
        let key = Key::from(standard);
        if let Some(recipe) = key.recipe(layout)? {
            let groups = (0..recipe.group_count()).map(|index| recipe.members(index));
            entries.push((key, groups.collect()));
        }
    }
    Ok(GroupsReport { entries })
}

impl GroupsReport {
    /// Keys with their groups.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&Key, &[Vec<GlobalRank>])> {
        self.entries.iter().map(|(key, groups)| (key, &groups[..]))
    }

    /// The groups of one key; none if the report does not have it.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<&[Vec<GlobalRank>]> {
        let found = self.entries.iter().find(|(known, _)| known == key);
        found.map(|(_, groups)| &groups[..])
    }
}

/// A line per key: `tp: [0, 1] [2, 3]`.
impl fmt::Display for GroupsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, groups) in self.iter() {
            write!(f, "{key}:")?;
            for group in groups {
                write!(f, " {}", RankList(group))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
