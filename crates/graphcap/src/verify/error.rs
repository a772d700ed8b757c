//! What can go wrong with traces.

use std::io;

/// Failures of trace files and of shrinking.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A trace cannot be written.
    #[error("a trace cannot be written")]
    WriteTrace {
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A trace cannot be read.
    #[error("a trace cannot be read")]
    ReadTrace {
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is something else, or of another version.
    #[error("this is no trace: its first line is '{found}', needs '{want}'; record it again with this version")]
    NotATrace {
        /// First line.
        found: String,
        /// What it should be.
        want: &'static str,
    },
    /// A line of a trace makes no sense.
    #[error("line {line} of a trace: needs {want}, has '{found}'; the file was cut or changed")]
    TraceLine {
        /// From 1.
        line: usize,
        /// What should stand there.
        want: &'static str,
        /// What stands there; empty at the end of the line.
        found: String,
    },
    /// Nothing to shrink: the trace has no such finding.
    #[error("the trace has {}, none with number {asked}; numbers start at 0", super::counted(*.findings as u64, "finding"))]
    NoSuchFinding {
        /// How many there are.
        findings: usize,
        /// Which was asked for.
        asked: usize,
    },
}
