//! Every synchronisation of this crate, by name. A reading stream waits under
//! [`Turn::READ_AFTER_PUBLISH`](pgroups::Turn::READ_AFTER_PUBLISH), which is not ours.

use device::Why;

/// The reduction of a bucket reads what the last contribution to each of its gradients has written, on every stream
/// that contributed.
pub const REDUCE_AFTER_LANDED: Why = Why("ddp.reduce_after_landed");

/// The optimizer reads reduced gradients.
pub const STEP_AFTER_REDUCE: Why = Why("ddp.step_after_reduce");

/// Whoever else looks at reduced gradients ([`Ddp::read_grads`](crate::Ddp::read_grads)) reads them reduced.
pub const READ_GRADS_AFTER_REDUCE: Why = Why("ddp.read_grads_after_reduce");

/// The first write of an epoch comes behind all reads of the epoch before it, in any pass, on any stream.
pub const WRITE_AFTER_READ: Why = Why("ddp.write_after_read");

/// The first write of an epoch comes behind the gather of the epoch before it, which reads this rank's shard and
/// writes the others'; nobody need have read what it published.
pub const WRITE_AFTER_PUBLISH: Why = Why("ddp.write_after_publish");

/// A write comes behind the last one, which nobody need have published: a load, then a step on another stream.
pub const WRITE_AFTER_WRITE: Why = Why("ddp.write_after_write");

/// A gather reads the shard that the optimizer has written. As the write is behind all releases, so is what the gather
/// writes of the other shards.
pub const GATHER_AFTER_WRITE: Why = Why("ddp.gather_after_write");

/// A stream that asks for all values at once ([`Ddp::publish`](crate::Ddp::publish)) reads them gathered.
pub const READ_AFTER_PUBLISH: Why = Why("ddp.read_after_publish");

/// The first gradient of a step overwrites what the previous step's norm, optimizer and whoever looked at the
/// gradients have read.
pub const GRAD_AFTER_FREE: Why = Why("ddp.grad_after_free");

/// A contribution is added to what another stream has contributed to the same bucket.
pub const GRAD_AFTER_LANDED: Why = Why("ddp.grad_after_landed");

/// A contribution reads the flag that says whether it is the first of the step.
pub const GRAD_AFTER_FLAG: Why = Why("ddp.grad_after_flag");

/// The flag of a microbatch is set behind the one before it, and behind the contributions that read that one.
pub const FLAG_AFTER_LANDED: Why = Why("ddp.flag_after_landed");

/// The division of the gradients reads the number of tokens that a step has counted.
pub const DIVIDE_AFTER_COUNT: Why = Why("ddp.divide_after_count");

/// A step reads and writes the state that the step before it has written, or the optimizer's creation.
pub const STEP_AFTER_STEP: Why = Why("ddp.step_after_step");

/// Norm, flag, counts, moments and loss scale are read as the last step has left them.
pub const READ_STATE_AFTER_STEP: Why = Why("ddp.read_state_after_step");

/// A step overwrites what others have read of the last one's state.
pub const STEP_AFTER_STATE_READ: Why = Why("ddp.step_after_state_read");

/// All of them, for tests that drop one at a time.
pub const ALL: [Why; 16] = [
    REDUCE_AFTER_LANDED,
    STEP_AFTER_REDUCE,
    READ_GRADS_AFTER_REDUCE,
    WRITE_AFTER_READ,
    WRITE_AFTER_PUBLISH,
    GATHER_AFTER_WRITE,
    READ_AFTER_PUBLISH,
    GRAD_AFTER_FREE,
    GRAD_AFTER_LANDED,
    GRAD_AFTER_FLAG,
    FLAG_AFTER_LANDED,
    DIVIDE_AFTER_COUNT,
    WRITE_AFTER_WRITE,
    STEP_AFTER_STEP,
    READ_STATE_AFTER_STEP,
    STEP_AFTER_STATE_READ,
];
