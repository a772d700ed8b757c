//! What errors tell beside their message: which operation, who left, who waits for whom.

use std::fmt;

/// Where an operation ran: what a user needs to find it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OpRef {
    /// Name of the operation.
    pub name: &'static str,
    /// Its place in the model.
    pub site: String,
    /// Rank that submitted it.
    pub rank: u32,
    /// Stream it was submitted to.
    pub stream: String,
    /// Position in that stream, from 0.
    pub seq: u64,
    /// The node, if it ran in the launch of a graph at that position.
    pub node: Option<u32>,
}

impl fmt::Display for OpRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{} (rank {}, stream '{}', #{}", self.name, self.site, self.rank, self.stream, self.seq)?;
        match self.node {
            Some(node) => write!(f, " node {node})"),
            None => f.write_str(")"),
        }
    }
}

/// How a rank left its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Departure {
    /// Its program returned while others still waited for it.
    Returned,
    /// It was announced with [`Machine::expect`](crate::Machine::expect) and no thread entered for it.
    NeverEntered,
    /// Its program panicked.
    Panicked,
    /// Its device or its program failed; this is the failure, as text.
    Failed(String),
    /// Its stream was dropped with work in it.
    Dropped,
}

impl fmt::Display for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Departure::Returned => f.write_str("its program returned"),
            Departure::NeverEntered => f.write_str("it was announced and its thread never entered"),
            Departure::Panicked => f.write_str("its program panicked"),
            Departure::Failed(cause) => write!(f, "it failed: {cause}"),
            Departure::Dropped => f.write_str("its stream was dropped with work queued"),
        }
    }
}

/// A joint operation that some members have reached and others have not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingJoint {
    /// Name of the group.
    pub group: String,
    /// Position in the group's sequence, from 0.
    pub seq: u64,
    /// What the ranks that came ask for.
    pub what: String,
    /// Ranks that came.
    pub arrived: Vec<u32>,
    /// Ranks that did not.
    pub missing: Vec<u32>,
}

impl fmt::Display for PendingJoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} #{} on group '{}': ranks {:?} wait for ranks {:?}",
            self.what, self.seq, self.group, self.arrived, self.missing
        )
    }
}

/// List of pending joint operations, one per line, for messages.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Pending(pub Vec<PendingJoint>);

impl fmt::Display for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no joint operation is pending");
        }
        for (i, joint) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("; ")?;
            }
            joint.fmt(f)?;
        }
        Ok(())
    }
}

/// What each member of a joint operation asked for, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked(pub Vec<(u32, String)>);

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (rank, what)) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("; ")?;
            }
            write!(f, "rank {rank} asks {what}")?;
        }
        Ok(())
    }
}
