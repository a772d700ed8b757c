//! What the crates above say about the host's program, so that findings can name it.

use std::fmt;

use super::{TraceAccess, accesses_to};
use crate::Label;

/// A remark on what the host does at this point.
#[derive(Clone, Debug, PartialEq)]
pub enum Note {
    /// The device has a stream of this name.
    Stream {
        /// Number on its device.
        stream: u32,
        /// Name.
        name: Label,
    },
    /// A step begins.
    Step(u64),
    /// A microbatch begins.
    Microbatch(u64),
    /// A pass begins (`forward`).
    Pass(Label),
    /// What precedes this point of the stream has written parameters that others must publish before they are read.
    Written {
        /// Whose parameters they are.
        publisher: Label,
        /// Counts the writes.
        epoch: u64,
        /// What was written on this rank.
        regions: Vec<TraceAccess>,
    },
    /// The publication that begins at this point of the stream makes a write readable.
    Issued {
        /// Whose parameters they are.
        publisher: Label,
        /// The write.
        epoch: u64,
        /// Group of its joint operations; empty if it needs none.
        group: Label,
        /// Who has started it (`read`, `optimizer`).
        by: Label,
        /// What readers may read behind it.
        regions: Vec<TraceAccess>,
    },
    /// What follows on the stream reads a parameter.
    Read {
        /// Whose parameter it is.
        publisher: Label,
        /// Parameter.
        param: Label,
        /// In which pass.
        pass: Label,
        /// Last write by then.
        written: u64,
        /// Last publication by then.
        issued: u64,
        /// The value.
        regions: Vec<TraceAccess>,
    },
    /// Reads on this stream have ended; the next write may follow.
    Released {
        /// Whose parameters they are.
        publisher: Label,
    },
    /// What precedes this point of the stream has added a use's gradient.
    Landed {
        /// Parameter.
        param: Label,
        /// The gradient.
        regions: Vec<TraceAccess>,
    },
    /// The reduction of a bucket's gradients begins at this point of the stream.
    Reduced {
        /// Bucket.
        bucket: Label,
        /// Group of its joint operations; empty if it needs none.
        group: Label,
        /// The gradients.
        regions: Vec<TraceAccess>,
    },
    /// What follows on the stream makes a sharded weight whole.
    Gathered {
        /// Parameter.
        param: Label,
        /// Last write by then; 0 if nobody counts them.
        epoch: u64,
        /// Where the whole weight lies.
        regions: Vec<TraceAccess>,
    },
    /// What follows on the stream uses a weight that was gathered.
    Used {
        /// Parameter.
        param: Label,
        /// Last write by then; 0 if nobody counts them.
        epoch: u64,
        /// Where the whole weight lies.
        regions: Vec<TraceAccess>,
    },
    /// How much of a step an executable graph holds.
    Scope {
        /// Number of the executable.
        graph: u64,
        /// `layer`, `chunk`, `microbatch` or `step`.
        scope: Label,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let regions = match self {
            Note::Stream { stream, name } => return write!(f, "stream {stream} is {name}"),
            Note::Step(n) => return write!(f, "step {n}"),
            Note::Microbatch(n) => return write!(f, "microbatch {n}"),
            Note::Pass(pass) => return write!(f, "pass {pass}"),
            Note::Released { publisher } => return write!(f, "released {publisher}"),
            Note::Scope { graph, scope } => return write!(f, "graph {graph} is a {scope}"),
            Note::Written { publisher, epoch, regions } => {
                write!(f, "written {publisher} epoch={epoch}")?;
                regions
            }
            Note::Issued { publisher, epoch, group, by, regions } => {
                write!(f, "issued {publisher} epoch={epoch} over {group} by {by}")?;
                regions
            }
            Note::Read { publisher, param, pass, written, issued, regions } => {
                write!(f, "read {param} of {publisher} in {pass} written={written} issued={issued}")?;
                regions
            }
            Note::Landed { param, regions } => {
                write!(f, "landed {param}")?;
                regions
            }
            Note::Gathered { param, epoch, regions } => {
                write!(f, "gathered {param} epoch={epoch}")?;
                regions
            }
            Note::Used { param, epoch, regions } => {
                write!(f, "used {param} epoch={epoch}")?;
                regions
            }
            Note::Reduced { bucket, group, regions } => {
                write!(f, "reduced {bucket} over {group}")?;
                regions
            }
        };
        accesses_to(f, regions)
    }
}
