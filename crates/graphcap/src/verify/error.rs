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
    #[error(
        "this is no trace of this version: its first line is '{found}', needs '{want}'; record it again with this version"
    )]
    NotATrace {
        /// First line.
        found: String,
        /// What it should be.
        want: &'static str,
    },
    /// The line that ends a whole trace is not there.
    #[error("a trace ends behind line {lines} and has no last line: the file was cut; record it again")]
    TraceCut {
        /// Whole lines that are there.
        lines: usize,
    },
    /// The last line of a trace tells of other lines than those before it.
    #[error(
        "a trace has {lines} lines with sum {sum}, and its last line tells of {told_lines} with sum {told_sum}: the file \
         was changed; record it again"
    )]
    TraceChanged {
        /// Lines before the last.
        lines: u64,
        /// Lines that the last one tells of.
        told_lines: u64,
        /// Sum of the bytes of those that are there.
        sum: u64,
        /// Sum that the last line tells.
        told_sum: u64,
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
