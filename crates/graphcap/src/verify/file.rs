//! Traces as text: written, read back, and checked again.
//!
//! The first line names the format. Then one line an event, and before it whatever it is the first to name: a label
//! (`L`), a member list (`M`), a graph (`G`) with its nodes (`N`), each kind numbered from 0 in the order of the file.
//! A line is a letter and numbers with spaces between them; lists begin with their length. The last line (`E`) has the
//! number of lines before it and a sum of their bytes: without it a file that was cut between two events would be a
//! trace of fewer events, and what is missing would not be found.

mod decode;
mod encode;

use std::io::{BufRead, Write};

use device::{MemoryKind, Mode, Trace, WaitOutcome};

use crate::verify::TraceError;

/// 2: with a last line. A file of version 1 does not show whether it was cut, and is refused.
const HEADER: &str = "warpweft trace 2";

/// By number in a file.
const MODES: [Mode; 3] = [Mode::Read, Mode::Write, Mode::Update];
const OUTCOMES: [WaitOutcome; 3] = [WaitOutcome::Enforced, WaitOutcome::Elided, WaitOutcome::Dropped];
const KINDS: [MemoryKind; 5] =
    [MemoryKind::Param, MemoryKind::Grad, MemoryKind::Optimizer, MemoryKind::Arena, MemoryKind::Other];

/// What the last line tells of those before it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Tally {
    lines: u64,
    /// FNV-1a: any one byte that differs makes another sum.
    sum: u64,
}

impl Tally {
    const EMPTY: Tally = Tally { lines: 0, sum: 0xCBF2_9CE4_8422_2325 };

    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.lines += u64::from(*byte == b'\n');
            self.sum = (self.sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3);
        }
    }
}

/// Writes a trace.
///
/// # Errors
/// [`TraceError::WriteTrace`].
pub fn write(trace: &Trace, out: &mut impl Write) -> Result<(), TraceError> {
    encode::trace(trace, out).map_err(|source| TraceError::WriteTrace { source })
}

/// Reads a trace that [`write()`] has written. It is equal to that one: a part of it, or one that was changed, is refused.
///
/// # Errors
/// [`TraceError::ReadTrace`], [`TraceError::NotATrace`], [`TraceError::TraceCut`], [`TraceError::TraceChanged`],
/// [`TraceError::TraceLine`].
pub fn read(from: impl BufRead) -> Result<Trace, TraceError> {
    decode::trace(from)
}
