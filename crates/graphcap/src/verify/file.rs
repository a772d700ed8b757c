//! Traces as text: written, read back, and checked again.
//!
//! The first line names the format. Then one line an event, and before it whatever it is the first to name: a label
//! (`L`), a member list (`M`), a graph (`G`) with its nodes (`N`), each kind numbered from 0 in the order of the file.
//! A line is a letter and numbers with spaces between them; lists begin with their length.

mod decode;
mod encode;

use std::io::{BufRead, Write};

use device::{MemoryKind, Mode, Trace, WaitOutcome};

use crate::verify::TraceError;

const HEADER: &str = "warpweft trace 1";

/// By number in a file.
const MODES: [Mode; 3] = [Mode::Read, Mode::Write, Mode::Update];
const OUTCOMES: [WaitOutcome; 3] = [WaitOutcome::Enforced, WaitOutcome::Elided, WaitOutcome::Dropped];
const KINDS: [MemoryKind; 5] =
    [MemoryKind::Param, MemoryKind::Grad, MemoryKind::Optimizer, MemoryKind::Arena, MemoryKind::Other];

/// Writes a trace.
///
/// # Errors
/// [`TraceError::WriteTrace`].
pub fn write(trace: &Trace, out: &mut impl Write) -> Result<(), TraceError> {
    encode::trace(trace, out).map_err(|source| TraceError::WriteTrace { source })
}

/// Reads a trace that [`write()`] has written. It is equal to that one.
///
/// # Errors
/// [`TraceError::ReadTrace`], [`TraceError::NotATrace`], [`TraceError::TraceLine`].
pub fn read(from: impl BufRead) -> Result<Trace, TraceError> {
    decode::trace(from)
}
