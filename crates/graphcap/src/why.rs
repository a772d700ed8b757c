//! Every synchronisation of this crate, by name. Readers wait under
//! [`Turn::READ_AFTER_PUBLISH`](pgroups::Turn::READ_AFTER_PUBLISH), which is not ours.

use device::Why;

/// The first write to a bucket's gradients in a graph comes behind whatever still needs what they hold.
pub const GRAD_AFTER_FREE: Why = Why("graphcap.grad_after_free");

/// The gate that tells of a bucket's last gradient in a graph is behind that gradient, in every branch.
pub const GATE_AFTER_LANDED: Why = Why("graphcap.gate_after_landed");

/// The gate that tells of a bucket's last read in a graph is behind that read, in every branch.
pub const GATE_AFTER_READ: Why = Why("graphcap.gate_after_read");

/// A graph ends behind its gates: a capture must not leave a stream behind.
pub const END_AFTER_GATES: Why = Why("graphcap.end_after_gates");

/// An argument is copied to its place behind the replays that read what it held, on whatever stream.
pub const INPUT_AFTER_READ: Why = Why("graphcap.input_after_read");

/// All of them, for tests that drop one at a time.
pub const ALL: [Why; 5] = [GRAD_AFTER_FREE, GATE_AFTER_LANDED, GATE_AFTER_READ, END_AFTER_GATES, INPUT_AFTER_READ];
