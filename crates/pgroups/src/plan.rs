//! Which groups are made, in which order, and where one rank stands in them.

use std::fmt;

use crate::{
    grid::OwnGroup,
    keys::Key,
    layout::Layout,
    plan_error::PlanError,
    rank::{GlobalRank, GroupRank, RankList},
    recipe::Recipe,
};

/// What groups a program needs: the same on every rank.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Needs {
    /// Groups that the layout explains. Order and repetition do not matter.
    pub keys: Vec<Key>,
    /// Groups with members of the user's own choice, under a name of their own or in place of the layout's: lists of
    /// ranks in group order, permuted or with gaps as they like, a rank in at most one of them.
    pub custom: Vec<(Key, Vec<Vec<GlobalRank>>)>,
    /// Keys that are supplied as "no group": whoever asks gets [`Planned::Empty`], and nothing is derived.
    pub none: Vec<Key>,
}

impl Needs {
    /// Needs that the layout explains.
    #[must_use]
    pub fn keys(keys: impl IntoIterator<Item = Key>) -> Needs {
        Needs { keys: keys.into_iter().collect(), ..Needs::default() }
    }
}

/// All groups of a program as one rank sees them.
///
/// Every rank creates the same keys in the same order, also those it is no member of; the order is a pure function
/// of layout and needs. Own member lists are laid out, other ranks' are not until [`PlannedKey::members`] asks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupsPlan {
    rank: GlobalRank,
    layout: Layout,
    entries: Vec<PlannedKey>,
}

/// One key of a plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlannedKey {
    key: Key,
    source: Source,
    own: Option<OwnGroup>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Source {
    Layout(Recipe),
    Lists(Vec<Vec<GlobalRank>>),
    None,
}

/// What a plan holds under a key. A key that nobody declared is none of these but [`PlanError::UnknownKey`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Planned<'p> {
    /// Not supplied: it may be derived ([`GroupsPlan::derive`]).
    Absent,
    /// Supplied, and there is no group here.
    Empty(WhyEmpty),
    /// Supplied, and this rank is a member.
    Member(&'p OwnGroup),
}

/// Why a supplied key holds no group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WhyEmpty {
    /// It was supplied as "no group".
    SuppliedAsNone,
    /// Its groups have other members.
    NotAMember,
}

impl fmt::Display for WhyEmpty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WhyEmpty::SuppliedAsNone => "it was supplied as none",
            WhyEmpty::NotAMember => "this rank is in none of its groups",
        })
    }
}

impl GroupsPlan {
    /// Plans the groups of one rank.
    ///
    /// # Errors
    /// [`PlanError::RankOutsideWorld`]; [`PlanError::UnknownKey`] for a needed name that is no standard key and has
    /// no members; [`PlanError::SuppliedTwice`]; for custom groups [`PlanError::NoMembers`] and
    /// [`PlanError::MemberTwice`]; those of the layout's views for axes they do not have.
    pub fn new(layout: &Layout, needs: &Needs, rank: GlobalRank) -> Result<GroupsPlan, PlanError> {
        check_in_world(rank, layout.world_size(), "the plan's own rank")?;
        let mut sources = explicit_sources(layout, needs)?;
        for key in &needs.keys {
            let key = key.canonical(layout)?;
            if sources.iter().any(|(known, _)| *known == key) {
                continue;
            }
            let recipe = key.recipe(layout)?.ok_or_else(|| PlanError::UnknownKey {
                key: key.clone(),
                known: list(sources.iter().map(|(key, _)| key)),
            })?;
            sources.push((key, Source::Layout(recipe)));
        }
        sources.sort_by(|a, b| a.0.cmp(&b.0));
        let entries =
            sources.into_iter().map(|(key, source)| PlannedKey { own: source.own(rank), key, source }).collect();
        Ok(GroupsPlan { rank, layout: layout.clone(), entries })
    }

    /// The rank whose plan this is.
    #[must_use]
    pub fn rank(&self) -> GlobalRank {
        self.rank
    }

    /// The layout behind the plan.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// All keys in creation order.
    #[must_use]
    pub fn entries(&self) -> &[PlannedKey] {
        &self.entries
    }

    /// What the plan holds under a key: absent, empty and unknown are different answers.
    ///
    /// # Errors
    /// [`PlanError::UnknownKey`] for a name that is neither standard nor in the plan, and for axes that the layout
    /// does not have.
    pub fn supplied(&self, key: &Key) -> Result<Planned<'_>, PlanError> {
        let Some(entry) = self.entry(key)? else {
            return Ok(Planned::Absent);
        };
        Ok(match (&entry.own, &entry.source) {
            (Some(own), _) => Planned::Member(own),
            (None, Source::None) => Planned::Empty(WhyEmpty::SuppliedAsNone),
            (None, _) => Planned::Empty(WhyEmpty::NotAMember),
        })
    }

    /// This rank's group, for a component that cannot do without it.
    ///
    /// # Errors
    /// [`PlanError::MissingGroup`] if absent and [`PlanError::EmptyGroup`] if empty, both with the name of the group
    /// and of who needs it; those of [`GroupsPlan::supplied`].
    pub fn get(&self, key: &Key, needed_by: &'static str) -> Result<&OwnGroup, PlanError> {
        match self.supplied(key)? {
            Planned::Member(own) => Ok(own),
            Planned::Empty(why) => Err(PlanError::EmptyGroup { key: key.clone(), needed_by, rank: self.rank, why }),
            Planned::Absent => Err(self.missing(key, needed_by)),
        }
    }

    /// Every group of the plan in creation order: key, index under the key, members. Lists all ranks' groups.
    pub fn creation_order(&self) -> impl Iterator<Item = (&Key, u32, Vec<GlobalRank>)> {
        self.entries
            .iter()
            .flat_map(|entry| (0..entry.group_count()).map(move |index| (&entry.key, index, entry.members(index))))
    }

    /// What ranks compare before they create anything.
    #[must_use]
    pub fn dump(&self) -> PlanDump {
        let mut lines = vec![self.layout.canonical_text()];
        let groups = self.entries.iter();
        lines.extend(groups.map(|entry| format!("{}: {}", entry.key, entry.source.describe())));
        PlanDump { rank: self.rank, lines }
    }

    /// The plan in 64 bits, equal on every rank.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        self.dump().fingerprint()
    }

    pub(crate) fn entry(&self, key: &Key) -> Result<Option<&PlannedKey>, PlanError> {
        let key = key.canonical(&self.layout)?;
        let found = self.entries.iter().find(|entry| entry.key == key);
        if found.is_none() && key.recipe(&self.layout)?.is_none() {
            return Err(PlanError::UnknownKey { key, known: list(self.entries.iter().map(|entry| &entry.key)) });
        }
        Ok(found)
    }

    pub(crate) fn missing(&self, key: &Key, needed_by: &'static str) -> PlanError {
        PlanError::MissingGroup {
            key: key.clone(),
            needed_by,
            supplied: list(self.entries.iter().map(|entry| &entry.key)),
        }
    }

    pub(crate) fn missing_all(&self, keys: &[Key], needed_by: &'static str) -> PlanError {
        PlanError::MissingGroups {
            keys: list(keys.iter()),
            needed_by,
            supplied: list(self.entries.iter().map(|entry| &entry.key)),
        }
    }
}

/// The groups this rank is in, with their sizes: `rank 5: tp(2), dp(4)`.
impl fmt::Display for GroupsPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = self.entries.iter().filter_map(|entry| Some((&entry.key, entry.own()?.size())));
        let own: Vec<String> = own.map(|(key, size)| format!("{key}({size})")).collect();
        write!(f, "rank {}: {}", self.rank, own.join(", "))
    }
}

impl PlannedKey {
    /// The key.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The group this rank is in; none for a non-member and for a key supplied as none.
    #[must_use]
    pub fn own(&self) -> Option<&OwnGroup> {
        self.own.as_ref()
    }

    /// How many groups the key has over all ranks; 0 for a key supplied as none.
    #[must_use]
    pub fn group_count(&self) -> u32 {
        match &self.source {
            Source::Layout(recipe) => recipe.group_count(),
            Source::Lists(lists) => lists.len() as u32, // no more lists than ranks: none is empty, none shares a rank
            Source::None => 0,
        }
    }

    /// The members of one of the key's groups, in group order.
    ///
    /// # Panics
    /// If `index` is not below [`PlannedKey::group_count`].
    #[must_use]
    pub fn members(&self, index: u32) -> Vec<GlobalRank> {
        assert!(
            index < self.group_count(),
            "BUG: group {index} of key '{}', which has {}",
            self.key,
            self.group_count()
        );
        match &self.source {
            Source::Layout(recipe) => recipe.members(index),
            Source::Lists(lists) => lists[index as usize].clone(),
            Source::None => Vec::new(),
        }
    }
}

impl Source {
    fn own(&self, rank: GlobalRank) -> Option<OwnGroup> {
        match self {
            Source::Layout(recipe) => recipe.own(rank),
            Source::Lists(lists) => lists.iter().zip(0..).find_map(|(members, index)| {
                let position = members.iter().position(|&member| member == rank)?;
                Some(OwnGroup { index, members: members.as_slice().into(), position: GroupRank(position as u32) })
            }),
            Source::None => None,
        }
    }

    fn describe(&self) -> String {
        match self {
            Source::Layout(recipe) => recipe.describe(),
            Source::Lists(lists) => {
                let lists: Vec<String> = lists.iter().map(|l| RankList(l).to_string()).collect();
                format!("members {}", lists.join(" "))
            }
            Source::None => "none".to_owned(),
        }
    }
}

/// What one rank plans to create, a line per key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlanDump {
    /// The rank that planned it.
    pub rank: GlobalRank,
    /// The layout, then the keys in creation order.
    pub lines: Vec<String>,
}

impl PlanDump {
    /// Checks that another rank plans the same.
    ///
    /// # Errors
    /// [`PlanError::PlansDiffer`] with the first line that differs.
    pub fn agrees_with(&self, other: &PlanDump) -> Result<(), PlanError> {
        let longest = self.lines.len().max(other.lines.len());
        let differing = (0..longest).find(|&i| self.lines.get(i) != other.lines.get(i));
        let Some(line) = differing else { return Ok(()) };
        let text = |dump: &PlanDump| dump.lines.get(line).map_or("(nothing)", |l| l).to_owned();
        Err(PlanError::PlansDiffer { line, rank: self.rank, ours: text(self), other: other.rank, theirs: text(other) })
    }

    /// The lines in 64 bits (FNV-1a); the rank is no part of it.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let bytes = self.lines.iter().flat_map(|l| l.bytes().chain([b'\n']));
        Fingerprint(crate::philox::fnv1a_64(bytes))
    }
}

impl fmt::Display for PlanDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.lines {
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}

/// A plan in 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fingerprint(pub u64);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

fn explicit_sources(layout: &Layout, needs: &Needs) -> Result<Vec<(Key, Source)>, PlanError> {
    let mut sources: Vec<(Key, Source)> = Vec::new();
    let custom = needs.custom.iter().map(|(key, lists)| (key, Some(lists)));
    let none = needs.none.iter().map(|key| (key, None));
    for (key, lists) in custom.chain(none) {
        let key = key.canonical(layout)?;
        if sources.iter().any(|(known, _)| *known == key) {
            return Err(PlanError::SuppliedTwice { key });
        }
        let source = match lists {
            Some(lists) => {
                check_members(&key, lists, layout.world_size())?;
                Source::Lists(lists.clone())
            }
            None => Source::None,
        };
        sources.push((key, source));
    }
    Ok(sources)
}

fn check_members(key: &Key, lists: &[Vec<GlobalRank>], world_size: u32) -> Result<(), PlanError> {
    let mut home = std::collections::HashMap::new();
    for (index, members) in lists.iter().enumerate() {
        if members.is_empty() {
            return Err(PlanError::NoMembers { key: key.clone(), index });
        }
        for &rank in members {
            check_in_world(rank, world_size, "a member of a custom group")?;
            if let Some(first) = home.insert(rank, index) {
                return Err(PlanError::MemberTwice { key: key.clone(), rank, first, second: index });
            }
        }
    }
    Ok(())
}

fn check_in_world(rank: GlobalRank, world_size: u32, what: &'static str) -> Result<(), PlanError> {
    if rank.0 < world_size {
        return Ok(());
    }
    Err(PlanError::RankOutsideWorld { what, rank, world_size })
}

fn list<'a>(keys: impl Iterator<Item = &'a Key>) -> String {
    let names: Vec<String> = keys.map(Key::to_string).collect();
    if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
}
