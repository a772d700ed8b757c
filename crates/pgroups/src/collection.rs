//! The groups of a program, handed down to whoever needs one.

use std::{collections::BTreeMap, fmt};

use crate::{
    agreement::Agreement,
    axis::ParamClass,
    derived::Derived,
    error::PgError,
    grid::OwnGroup,
    group::{Group, Reach},
    keys::Key,
    layout::Layout,
    local::Rank,
    plan::{GroupsPlan, Needs, Planned, WhyEmpty},
    rank::GroupRank,
};

/// All groups of one rank: built explicitly, at once, in an order that is the same on every rank; never lazily.
///
/// Several collections, also of different layouts, live in one process and know nothing of each other: no operation
/// finds a group but through the collection it was handed.
pub struct ProcessGroups {
    plan: GroupsPlan,
    groups: BTreeMap<Key, Group>,
    single: Group,
}

/// What a collection holds under a key. A key that nobody declared is none of these but
/// [`PlanError::UnknownKey`](crate::PlanError::UnknownKey).
#[derive(Clone, Copy, Debug)]
pub enum Supplied<'a> {
    /// Not supplied: it may be [derived](ProcessGroups::derived).
    Absent,
    /// Supplied, and there is no group here.
    Empty(WhyEmpty),
    /// Supplied, and this rank is a member.
    Group(&'a Group),
}

impl ProcessGroups {
    /// Builds the groups that `needs` names over `layout`. Every rank of the layout's grid calls it, with the same
    /// layout and needs, which they compare before any group is made; ranks outside may call it too.
    ///
    /// # Errors
    /// Those of [`GroupsPlan::new`]; [`PgError::WorldSize`]; [`PgError::NeedsDiffer`] with the first rank that
    /// builds something else; [`PgError::Device`] if a rank never builds.
    pub fn build(rank: &Rank, layout: &Layout, needs: &Needs) -> Result<ProcessGroups, PgError> {
        ProcessGroups::from_plan(rank, GroupsPlan::new(layout, needs, rank.global)?)
    }

    /// As [`ProcessGroups::build`], from a plan that is there already.
    ///
    /// # Errors
    /// As [`ProcessGroups::build`]; [`PgError::PlanOfAnotherRank`].
    pub fn from_plan(rank: &Rank, plan: GroupsPlan) -> Result<ProcessGroups, PgError> {
        ProcessGroups::make(rank, plan, Reach::Meet)
    }

    /// The groups of one rank that meet nobody: each collective is recorded as an operation of this rank with the
    /// accesses it would have. One rank of any layout is planned so, alone, on the dry driver.
    ///
    /// # Errors
    /// [`PgError::PlannedComputes`] on a driver that computes; [`PgError::WorldSize`];
    /// [`PgError::PlanOfAnotherRank`].
    pub fn planned(rank: &Rank, plan: GroupsPlan) -> Result<ProcessGroups, PgError> {
        let machine = rank.device.machine();
        if machine.computes() {
            return Err(PgError::PlannedComputes { driver: machine.driver() });
        }
        ProcessGroups::make(rank, plan, Reach::PlanOnly)
    }

    fn make(rank: &Rank, plan: GroupsPlan, reach: Reach) -> Result<ProcessGroups, PgError> {
        check_plan(rank, &plan)?;
        let grid = plan.layout().grid(ParamClass::Dense);
        let (first, end) = (grid.offset().0, grid.offset().0 + grid.size());
        let collection = format!("{first}..{end}#{}", rank.next_build(first, end));
        if reach == Reach::Meet && grid.contains(rank.global) && grid.size() > 1 {
            let everyone: Vec<u32> = (first..end).collect();
            let machine = rank.device.machine();
            let meeting = machine.meeting(&format!("build@{collection}"), &everyone, rank.global.0)?;
            Agreement::new(&rank.device, &meeting)?.on(&plan)?;
        }
        let mut groups = BTreeMap::new();
        for entry in plan.entries() {
            if let Some(own) = entry.own() {
                let name = format!("{}[{}]@{collection}", entry.key(), own.index);
                groups.insert(entry.key().clone(), Group::open(rank, name, own, reach)?);
            }
        }
        let own = OwnGroup { index: 0, members: [rank.global].into(), position: GroupRank(0) };
        let single = Group::open(rank, format!("single[{}]@{collection}", rank.global), &own, reach)?;
        Ok(ProcessGroups { plan, groups, single })
    }

    /// This rank's group, for a component that cannot do without it.
    ///
    /// # Errors
    /// [`PlanError::MissingGroup`](crate::PlanError::MissingGroup) if it was not supplied and
    /// [`PlanError::EmptyGroup`](crate::PlanError::EmptyGroup) if it is empty here, both with the group and who needs
    /// it; [`PlanError::UnknownKey`](crate::PlanError::UnknownKey).
    pub fn get(&self, key: &Key, needed_by: &'static str) -> Result<&Group, PgError> {
        self.plan.get(key, needed_by)?;
        Ok(self.built(key)?.expect("BUG: a group of the plan was not built"))
    }

    /// What the collection holds under a key: absent, empty and unknown are different answers.
    ///
    /// # Errors
    /// [`PlanError::UnknownKey`](crate::PlanError::UnknownKey), and axes that the layout does not have.
    pub fn supplied(&self, key: &Key) -> Result<Supplied<'_>, PgError> {
        Ok(match self.plan.supplied(key)? {
            Planned::Absent => Supplied::Absent,
            Planned::Empty(why) => Supplied::Empty(why),
            Planned::Member(_) => Supplied::Group(self.built(key)?.expect("BUG: a group of the plan was not built")),
        })
    }

    /// What stands for a key: its own group if it was supplied; else the group of a supplied key with the same
    /// members, or this rank alone, where the layout proves it. None if it is empty here.
    ///
    /// # Errors
    /// [`PlanError::MissingGroup`](crate::PlanError::MissingGroup) if nothing that was supplied can stand for it.
    pub fn derived(&self, key: &Key, needed_by: &'static str) -> Result<Option<&Group>, PgError> {
        match self.plan.derive(key, needed_by)? {
            Derived::Supplied => self.built(key),
            Derived::SameAs(twin) => self.built(&twin),
            Derived::Single => Ok(Some(&self.single)),
            Derived::Empty => Ok(None),
        }
    }

    /// Groups this rank is in, in creation order.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &Group)> {
        self.groups.iter()
    }

    /// This rank alone: a group of one, whose collectives copy at most.
    #[must_use]
    pub fn single(&self) -> &Group {
        &self.single
    }

    /// The plan behind the collection.
    #[must_use]
    pub fn plan(&self) -> &GroupsPlan {
        &self.plan
    }

    fn built(&self, key: &Key) -> Result<Option<&Group>, PgError> {
        let key = key.canonical(self.plan.layout())?;
        Ok(self.groups.get(&key))
    }
}

/// The groups this rank is in, with their sizes: `ProcessGroups(rank 5: tp(2), dp(4))`.
impl fmt::Debug for ProcessGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessGroups({})", self.plan)
    }
}

fn check_plan(rank: &Rank, plan: &GroupsPlan) -> Result<(), PgError> {
    if plan.rank() != rank.global {
        return Err(PgError::PlanOfAnotherRank { rank: rank.global, planned: plan.rank() });
    }
    let (layout, world) = (plan.layout().world_size(), rank.world_size);
    if layout != world {
        return Err(PgError::WorldSize { rank: rank.global, layout, world });
    }
    Ok(())
}
