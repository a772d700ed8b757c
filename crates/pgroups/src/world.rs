//! Where a process stands, as its launcher says.

use std::{collections::HashMap, ops::Range};

use crate::{plan_error::PlanError, rank::GlobalRank};

/// What a launcher tells a process about itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct World {
    /// The process's rank.
    pub rank: GlobalRank,
    /// Ranks in the world.
    pub world_size: u32,
    /// The rank among the processes of the same host; the device index, unless the user says otherwise.
    pub local_rank: u32,
}

impl World {
    /// Reads `RANK`, `WORLD_SIZE` and `LOCAL_RANK` through `look_up`, which is the environment of the process or a
    /// test's stand-in.
    ///
    /// # Errors
    /// [`PlanError::VariableMissing`] or [`PlanError::VariableUnreadable`], with variable, value and allowed range:
    /// an unreadable rank never becomes rank 0.
    pub fn from_env(look_up: impl Fn(&str) -> Option<String>) -> Result<World, PlanError> {
        let read = |variable, allowed| read_number(&look_up, variable, allowed);
        let world_size = read("WORLD_SIZE", 1..u32::MAX)?;
        let rank = read("RANK", 0..world_size)?;
        let local_rank = read("LOCAL_RANK", 0..world_size)?;
        Ok(World { rank: GlobalRank(rank), world_size, local_rank })
    }

    /// [`World::from_env`] on the environment of this process.
    ///
    /// # Errors
    /// As [`World::from_env`].
    pub fn from_process_env() -> Result<World, PlanError> {
        // Bytes that are no text become text that is no number, and the error shows them.
        World::from_env(|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }
}

fn read_number(
    look_up: impl Fn(&str) -> Option<String>,
    variable: &'static str,
    allowed: Range<u32>,
) -> Result<u32, PlanError> {
    let Some(value) = look_up(variable) else {
        return Err(PlanError::VariableMissing { variable, allowed });
    };
    match value.trim().parse() {
        Ok(number) if allowed.contains(&number) => Ok(number),
        _ => Err(PlanError::VariableUnreadable { variable, value, allowed }),
    }
}

/// What one process announces before any group is made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Attendee {
    /// Its rank.
    pub rank: GlobalRank,
    /// Its host.
    pub host: String,
    /// The device it uses there.
    pub device: u32,
    /// How to find it: a process id, a thread name.
    pub process: String,
}

/// Whether two ranks may use one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceSharing {
    /// Refused: two processes on one device wait for each other.
    Refuse,
    /// The user asked for it.
    Allow,
}

/// Checks what all processes of a world announced.
///
/// # Errors
/// [`PlanError::RankOutsideWorld`], [`PlanError::RankTwice`] with both processes, [`PlanError::RanksMissing`] with
/// all that are missing, and [`PlanError::DeviceShared`] with both ranks.
pub fn check_attendance(world_size: u32, attendees: &[Attendee], sharing: DeviceSharing) -> Result<(), PlanError> {
    let mut processes: HashMap<u32, &Attendee> = HashMap::new();
    let mut devices: HashMap<(&str, u32), GlobalRank> = HashMap::new();
    for attendee in attendees {
        let rank = attendee.rank;
        if rank.0 >= world_size {
            return Err(PlanError::RankOutsideWorld { what: "an announced rank", rank, world_size });
        }
        if let Some(first) = processes.insert(rank.0, attendee) {
            return Err(PlanError::RankTwice { rank, first: first.process.clone(), second: attendee.process.clone() });
        }
        let before = devices.insert((&attendee.host, attendee.device), rank);
        if let (DeviceSharing::Refuse, Some(first)) = (sharing, before) {
            return Err(PlanError::DeviceShared {
                host: attendee.host.clone(),
                device: attendee.device,
                first,
                second: rank,
            });
        }
    }
    let absent = |rank: &u32| !processes.contains_key(rank);
    let missing: Vec<u32> = (0..world_size).filter(absent).collect();
    if missing.is_empty() { Ok(()) } else { Err(PlanError::RanksMissing { missing, world_size }) }
}
