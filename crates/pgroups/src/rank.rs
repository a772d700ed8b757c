//! The two numbers a process goes by: its place in the world and its place in a group.

use std::fmt;

/// A rank's place in the world, `0..world_size`. Never an index into a group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GlobalRank(pub u32);

/// A rank's place in one group, `0..group size`. Never an index into the world.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GroupRank(pub u32);

impl GroupRank {
    /// The place as an index into a member list.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for GlobalRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for GroupRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Ranks as they are printed in messages: `[0, 2, 4]`.
pub(crate) struct RankList<'a>(pub(crate) &'a [GlobalRank]);

impl fmt::Display for RankList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|rank| rank.0)).finish()
    }
}
