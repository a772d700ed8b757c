//! What the verifier has to say.

use std::{fmt, ops::Range};

use device::{Label, MemoryKind, Mode};

use super::place::{Place, verb_of};

/// Two accesses of shared bytes, at least one of them a write, that nothing orders.
#[derive(Clone, Debug, PartialEq)]
pub struct Race {
    /// The one that the verifier met first; neither is first on the machine.
    pub first: Place,
    /// The other.
    pub second: Place,
    /// How each touches the memory.
    pub modes: [Mode; 2],
    /// Memory.
    pub buffer: Label,
    /// What the memory is for.
    pub memory: MemoryKind,
    /// Its number on the rank.
    pub allocation: u32,
    /// First to last shared byte.
    pub bytes: Range<usize>,
    /// Names of waits that would have ordered them and that a mutation test took away.
    pub dropped: Vec<Label>,
}

/// What kind of mistake a race is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hazard {
    /// A read and a write.
    ReadWrite,
    /// Two writes.
    WriteWrite,
    /// Planned memory that has a new tenant while the old one may still be in use.
    SlotReuse,
}

impl Race {
    /// The kind of mistake.
    pub fn hazard(&self) -> Hazard {
        match (self.memory, self.modes.iter().all(|mode| mode.writes())) {
            (MemoryKind::Arena, _) => Hazard::SlotReuse,
            (_, true) => Hazard::WriteWrite,
            (_, false) => Hazard::ReadWrite,
        }
    }
}

/// A read that does not find the newest value.
#[derive(Clone, Debug, PartialEq)]
pub struct Stale {
    /// Parameter.
    pub param: Label,
    /// Whose parameter it is.
    pub publisher: Label,
    /// The read.
    pub read: Place,
    /// Why.
    pub reason: StaleReason,
}

/// Why a read is stale.
#[derive(Clone, Debug, PartialEq)]
pub enum StaleReason {
    /// The last write had not been published when the read was submitted.
    NotIssued {
        /// Last write.
        written: u64,
        /// Last write that was published.
        issued: u64,
    },
    /// It had been published, and yet these bytes come from before.
    NotThere {
        /// The write that should be there.
        epoch: u64,
        /// Bytes of the parameter's memory.
        bytes: Range<usize>,
        /// Who has written them last; `None` if nobody in the trace.
        writer: Option<Box<Place>>,
    },
}

/// A member's view of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Rank.
    pub rank: u32,
    /// What it asks for.
    pub asks: Label,
}

/// Something that keeps something else from going on.
#[derive(Clone, Debug, PartialEq)]
pub struct Blocking {
    /// Who cannot go on.
    pub who: Place,
    /// For what, in words.
    pub until: String,
}

/// One mistake.
#[derive(Clone, Debug, PartialEq)]
pub enum Finding {
    /// Nothing orders two accesses.
    Race(Box<Race>),
    /// A read finds an old value.
    Stale(Stale),
    /// A write was published a second time.
    PublishedTwice {
        /// Whose values.
        publisher: Label,
        /// The write.
        epoch: u64,
        /// First time.
        first: Place,
        /// Second time.
        second: Place,
    },
    /// A bucket was reduced before a gradient was added to it.
    ReducedEarly {
        /// Bucket.
        bucket: Label,
        /// Parameter whose gradient came later.
        param: Label,
        /// The reduction.
        reduced: Place,
        /// The gradient.
        landed: Place,
    },
    /// What happens once a step is inside a graph that runs once a microbatch.
    ForbiddenInGraph {
        /// `publication` or `data-parallel reduction`.
        act: &'static str,
        /// Graph.
        graph: Label,
        /// How much of a step it holds; empty if the trace does not say.
        scope: Label,
        /// The node.
        at: Place,
    },
    /// A graph waits for something that nobody had recorded when it was launched.
    ForeignWait {
        /// Name of the synchronisation.
        why: Label,
        /// Event.
        event: Label,
        /// The node.
        at: Place,
    },
    /// Members of a group ask for different things in the same call.
    Disagree {
        /// Group.
        group: Label,
        /// Position in its sequence.
        seq: u64,
        /// By member.
        asked: Vec<Member>,
    },
    /// A call that some members never make.
    Missing {
        /// Group.
        group: Label,
        /// Position in its sequence.
        seq: u64,
        /// Who waits.
        waiting: Place,
        /// Ranks that do not come.
        missing: Vec<u32>,
    },
    /// Streams wait for each other in a circle: each for the next, the last for the first.
    Circle(Vec<Blocking>),
    /// Ranks submit calls of several groups in orders that contradict each other: a machine that does not start all of
    /// them at once locks up.
    CallOrder(Vec<Place>),
}

impl Finding {
    /// What findings are told together by: waits that were taken away, or the kind of mistake.
    pub(super) fn kind(&self) -> String {
        match self {
            Finding::Race(race) if race.dropped.is_empty() => "races".to_owned(),
            Finding::Race(race) => {
                let names: Vec<String> = race.dropped.iter().map(|why| format!("'{why}'")).collect();
                format!("without {}", names.join(" or "))
            }
            Finding::Stale(_) => "stale reads".to_owned(),
            Finding::PublishedTwice { .. } => "writes that are published twice".to_owned(),
            Finding::ReducedEarly { .. } => "buckets that are reduced too early".to_owned(),
            Finding::ForbiddenInGraph { .. } => "inside graphs that are smaller than a step".to_owned(),
            Finding::ForeignWait { why, .. } => format!("nothing was recorded for '{why}'"),
            Finding::Disagree { .. } | Finding::Missing { .. } => "calls that do not meet".to_owned(),
            Finding::Circle(_) | Finding::CallOrder(_) => "orders that can lock up".to_owned(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Race(race) => race.fmt(f),
            Finding::Stale(stale) => stale.fmt(f),
            Finding::PublishedTwice { publisher, epoch, first, second } => {
                write!(f, "published twice: epoch {epoch} of {publisher} by\n  {first} and by\n  {second}")
            }
            Finding::ReducedEarly { bucket, param, reduced, landed } => write!(
                f,
                "reduced too early: bucket {bucket} by\n  {reduced}\nbefore the gradient of {param} landed at\n  {landed}"
            ),
            Finding::ForbiddenInGraph { act, graph, scope, at } => {
                let of = if scope.is_empty() { String::new() } else { format!(" of scope {scope}") };
                write!(f, "{act} inside graph '{graph}'{of}, which runs once a microbatch:\n  {at}")
            }
            Finding::ForeignWait { why, event, at } => {
                write!(f, "wait '{why}' for event '{event}', which nobody had recorded before the launch:\n  {at}")
            }
            Finding::Disagree { group, seq, asked } => {
                write!(f, "members of group '{group}' disagree in call {seq}:")?;
                asked.iter().try_for_each(|member| write!(f, "\n  rank {} asks for {}", member.rank, member.asks))
            }
            Finding::Missing { group, seq, waiting, missing } => {
                let who = if missing.len() == 1 { "rank" } else { "ranks" };
                let list = missing.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
                let verb = if missing.len() == 1 { "does" } else { "do" };
                write!(f, "call {seq} of group '{group}' never happens: {who} {list} {verb} not call\n  {waiting}")
            }
            Finding::Circle(circle) => {
                f.write_str("streams wait for each other in a circle:")?;
                circle.iter().try_for_each(|one| write!(f, "\n  {} waits {}", one.who, one.until))
            }
            Finding::CallOrder(calls) => {
                f.write_str("ranks call groups in contradicting orders:")?;
                calls.iter().try_for_each(|call| write!(f, "\n  {call}, then"))?;
                f.write_str("\n  the first again")
            }
        }
    }
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.hazard() {
            Hazard::ReadWrite => "read and write",
            Hazard::WriteWrite => "two writes",
            Hazard::SlotReuse => "slot reused",
        };
        let Range { start, end } = self.bytes;
        writeln!(f, "race ({what}) on bytes {start}..{end} of '{}' (memory {})", self.buffer, self.allocation)?;
        writeln!(f, "  {} {}", verb_of(self.modes[0]), self.first)?;
        writeln!(f, "  {} {}", verb_of(self.modes[1]), self.second)?;
        write!(f, "no wait orders {} behind {}", self.second.short(), self.first.short())?;
        for why in &self.dropped {
            write!(f, "; a wait named '{why}' was dropped here")?;
        }
        Ok(())
    }
}

impl fmt::Display for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stale read of {} (published by {})\n  {}\n", self.param, self.publisher, self.read)?;
        match &self.reason {
            StaleReason::NotIssued { written, issued } => {
                write!(f, "epoch {written} was written, and only epoch {issued} published by then")
            }
            StaleReason::NotThere { epoch, bytes, writer } => {
                let Range { start, end } = bytes;
                write!(f, "epoch {epoch} was published, but bytes {start}..{end} come from before it: ")?;
                match writer {
                    Some(writer) => write!(f, "written last by\n  {writer}"),
                    None => f.write_str("nobody in the trace has written them"),
                }
            }
        }
    }
}
