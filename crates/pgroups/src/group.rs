//! One group of ranks: its members, its communicators, this rank's place.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, Mutex},
};

use device::{Meeting, Site};

use crate::{
    axis::check_name,
    error::PgError,
    grid::OwnGroup,
    local::Rank,
    rank::{GlobalRank, GroupRank, RankList},
};

/// Ranks that communicate, as one of them sees them. Cloning gives another handle of the same communicator.
///
/// Its collectives are ordered by the streams they are submitted to: there is nothing for the host to hold or wait
/// for. All members submit the same collectives of a group in the same order; those of another group, or of a
/// [second](Group::second) communicator, count for themselves.
#[derive(Clone)]
pub struct Group(pub(crate) Arc<GroupInner>);

pub(crate) struct GroupInner {
    /// Key, index under the key, collection: unique in the process.
    pub(crate) name: String,
    pub(crate) site: Site,
    pub(crate) members: Arc<[GlobalRank]>,
    pub(crate) place: GroupRank,
    pub(crate) rank: Rank,
    pub(crate) link: Link,
    seconds: Mutex<BTreeSet<String>>,
}

/// How the members of a group reach each other.
pub(crate) enum Link {
    /// There is nobody else.
    Alone,
    /// Through meetings, all opened when the group was made.
    Local(Channels),
    /// Not at all: calls are recorded as operations of this rank.
    Planned,
}

/// The meetings of one communicator.
pub(crate) struct Channels {
    pub(crate) all: Meeting,
    /// By place in the group: the meeting in which this rank sends to that one; none to itself.
    pub(crate) to: Vec<Option<Meeting>>,
    /// By place in the group: the meeting in which this rank receives from that one.
    pub(crate) from: Vec<Option<Meeting>>,
}

/// Whether the members of a new group meet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    Meet,
    PlanOnly,
}

impl Group {
    pub(crate) fn open(rank: &Rank, name: String, own: &OwnGroup, reach: Reach) -> Result<Group, PgError> {
        let link = match reach {
            _ if own.members.len() == 1 => Link::Alone,
            Reach::PlanOnly => Link::Planned,
            Reach::Meet => Link::Local(Channels::open(rank, &name, &own.members, own.position)?),
        };
        Ok(Group(Arc::new(GroupInner {
            site: Site::from(name.clone()),
            name,
            members: own.members.clone(),
            place: own.position,
            rank: rank.clone(),
            link,
            seconds: Mutex::default(),
        })))
    }

    /// The same members on another communicator, with a sequence of its own: its collectives neither wait for this
    /// one's nor are counted with them. All members make it.
    ///
    /// # Errors
    /// [`PgError::SecondTwice`] for a label that this group's communicator has already;
    /// [`PlanError::BadName`](crate::PlanError::BadName) unless the label is spelled like a key.
    pub fn second(&self, label: &str) -> Result<Group, PgError> {
        // Names join labels with `/`: one inside a label would make two communicators one.
        check_name(label, "a second communicator")?;
        let inner = &self.0;
        let mut seconds = inner.seconds.lock().unwrap_or_else(|poison| poison.into_inner());
        if !seconds.insert(label.to_owned()) {
            return Err(PgError::SecondTwice { group: inner.name.clone(), label: label.to_owned() });
        }
        let own = OwnGroup { index: 0, members: inner.members.clone(), position: inner.place };
        let reach = if matches!(inner.link, Link::Planned) { Reach::PlanOnly } else { Reach::Meet };
        Group::open(&inner.rank, format!("{}/{label}", inner.name), &own, reach)
    }

    /// Its name in messages and traces: key, index under the key, collection (`tp[1]@0..8#0`).
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Members, in group order.
    #[must_use]
    pub fn members(&self) -> &[GlobalRank] {
        &self.0.members
    }

    /// Number of members.
    #[must_use]
    pub fn size(&self) -> u32 {
        // A member list never holds more ranks than a world, which is counted in u32.
        self.0.members.len() as u32
    }

    /// This rank's place among the members.
    #[must_use]
    pub fn place(&self) -> GroupRank {
        self.0.place
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> GlobalRank {
        self.0.rank.global
    }

    /// The rank at a place; none beyond the last.
    #[must_use]
    pub fn member(&self, place: GroupRank) -> Option<GlobalRank> {
        self.0.members.get(place.index()).copied()
    }

    /// The place of a rank; none for a rank that is no member.
    #[must_use]
    pub fn place_of(&self, rank: GlobalRank) -> Option<GroupRank> {
        let place = self.0.members.iter().position(|&member| member == rank)?;
        Some(GroupRank(place as u32)) // below `size()`, a u32
    }

    /// Same communicator.
    #[must_use]
    pub fn is(&self, other: &Group) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// `tp[1]@0..8#0 [2, 3], place 1`.
impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}, place {}", self.0.name, RankList(&self.0.members), self.0.place)
    }
}

impl Channels {
    /// Opens the meeting of all members and one for each direction of each pair with this rank.
    fn open(rank: &Rank, name: &str, members: &[GlobalRank], place: GroupRank) -> Result<Channels, PgError> {
        let machine = rank.device.machine();
        let open = |name: &str, members: &[u32]| machine.meeting(name, members, rank.global.0);
        let ranks: Vec<u32> = members.iter().map(|member| member.0).collect();
        let pair = |from: u32, to: u32| open(&format!("{name}:{from}>{to}"), &[from, to]);
        let me = ranks[place.index()];
        let others = |one_way: &dyn Fn(u32) -> Result<Meeting, device::Error>| {
            let meetings = ranks.iter().map(|&peer| if peer == me { Ok(None) } else { one_way(peer).map(Some) });
            meetings.collect::<Result<Vec<_>, _>>()
        };
        Ok(Channels {
            all: open(name, &ranks)?,
            to: others(&|peer| pair(me, peer))?,
            from: others(&|peer| pair(peer, me))?,
        })
    }
}
