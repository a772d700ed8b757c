//! Runs one operation: claims its memory, computes, gives the memory back, reports.

use std::sync::{Arc, atomic::Ordering};

use super::{
    Args, Claim,
    claims::Conflict,
    exchange,
    tiles::{OpPanic, TileClaims, TileJob, catch},
};
use crate::{
    Access, Asked, Departure, Error, Launch, OpError, OpRef, Position, TraceEvent,
    device::DeviceInner,
    joint::{Arrival, pieces_of},
    ops::Kernel,
    queue::OpAt,
};

/// Whoever can help with the pieces of a large operation.
pub(crate) trait Crew {
    /// Runs all pieces; returns when all are done.
    fn run(&self, job: TileJob) -> Result<(), OpError>;
}

/// Nobody helps: pieces run in order.
pub(crate) struct Alone;

impl Crew for Alone {
    fn run(&self, job: TileJob) -> Result<(), OpError> {
        job.work();
        job.finish()
    }
}

/// Runs `op` unless its device has failed. `ran` is called when it has run, well or not, before anybody learns of its error.
pub(crate) fn run_op(device: &DeviceInner, op: &OpAt, crew: &dyn Crew, computes: bool, ran: impl FnOnce()) {
    if device.failed() {
        return;
    }
    let claim = Claim::Op(op.clone());
    if let Err(conflict) = device.claims.acquire(&claim) {
        device.machine.fail(device, race(device, &conflict, &claim));
        return;
    }
    run_claimed(device, op, crew, computes, ran);
    device.claims.release(&claim);
}

/// As [`run_op`], for a caller that holds a claim on all accesses of `op`. False when it did not run.
pub(crate) fn run_claimed(
    device: &DeviceInner,
    op: &OpAt,
    crew: &dyn Crew,
    computes: bool,
    ran: impl FnOnce(),
) -> bool {
    if device.failed() {
        return false;
    }
    let result = if computes { catch(|| compute(op, crew)) } else { Ok(()) };
    ran();
    if let Err(error) = result {
        device.machine.fail(device, failure(device.op_ref(op), error));
    }
    true
}

/// The error of `second`, which was refused its memory.
pub(crate) fn race(device: &DeviceInner, conflict: &Conflict, second: &Claim) -> Error {
    Error::Race {
        label: conflict.label.clone(),
        first: Box::new(conflict.first.op_ref(device, second.accesses())),
        second: Box::new(second.op_ref(device, conflict.first.accesses())),
    }
}

pub(crate) fn trace_run(device: &DeviceInner, at: Position, name: &'static str, start: u64, end: u64) {
    let (rank, Position { stream, seq, node }) = (device.rank, at);
    device.machine.tracer.add(rank, || TraceEvent::Ran { rank, stream, seq, node, name: name.into(), start, end });
}

/// What the device fails with when `op` ended with `error`.
pub(crate) fn failure(op: OpRef, error: OpError) -> Error {
    match error.downcast::<OpPanic>() {
        Ok(panic) => Error::Panicked { op, message: panic.0 },
        Err(error) => Error::Failed { op, source: Arc::from(error) },
    }
}

fn compute(op: &OpAt, crew: &dyn Crew) -> Result<(), OpError> {
    let accesses = &op.op().accesses;
    match &op.op().launch {
        Launch::Kernel(kernel) => match kernel.tiles(accesses) {
            0 | 1 => {
                // SAFETY: whoever runs an operation holds a claim on these accesses until this returns, `launch` refused
                // accesses that conflict with each other, and there is storage because the driver computes.
                kernel.run(&mut unsafe { Args::new(accesses) })
            }
            count => crew.run(kernel_job(kernel, accesses, count, op.clone())),
        },
        launch => {
            let run = launch.on_host().expect("BUG: neither a kernel nor a function");
            // SAFETY: as above.
            run(&mut unsafe { Args::new(accesses) })
        }
    }
}

fn kernel_job(kernel: &Kernel, accesses: &[Access], count: usize, op: OpAt) -> TileJob {
    let tiles: Vec<Vec<Access>> = (0..count).map(|i| kernel.tile(accesses, i)).collect();
    let claims = TileClaims::new();
    TileJob::new(count, move |i| {
        let Launch::Kernel(kernel) = &op.op().launch else { unreachable!("BUG: a job of a kernel") };
        claims.with(&tiles, i, || {
            // SAFETY: the whole operation's claim covers every piece, because pieces are cut from its views; it is
            // held until the job is finished. Among the pieces, `claims` refuses those that conflict.
            kernel.run(&mut unsafe { Args::new(&tiles[i]) })
        })
    })
}

/// Calls `run` while the memory of all `arrivals` is claimed. `None` when some of it cannot be: then all their devices
/// have failed.
pub(crate) fn with_claims<T>(arrivals: &[Arrival], run: impl FnOnce() -> T) -> Option<T> {
    for (held, arrival) in arrivals.iter().enumerate() {
        let device = &arrival.stream.device;
        let claim = Claim::Joint(arrival.joint.clone());
        if let Err(conflict) = device.claims.acquire(&claim) {
            release(&arrivals[..held]);
            fail_joint(arrivals, device, race(device, &conflict, &claim));
            return None;
        }
    }
    let out = run();
    release(arrivals);
    Some(out)
}

/// Runs the joint operation of `arrivals`, all of whom have come and agree. True when it happened; otherwise their
/// devices have failed.
pub(crate) fn run_joint(arrivals: &[Arrival], crew: &dyn Crew) -> bool {
    let exchange = || catch(|| exchange::run(pieces_of(arrivals), crew));
    let Some(result) = with_claims(arrivals, exchange) else { return false };
    arrivals[0].stream.device.machine.progress.fetch_add(1, Ordering::Relaxed);
    let Err(error) = result else { return true };
    let device = &arrivals[0].stream.device;
    fail_joint(arrivals, device, failure(device.joint_ref(&arrivals[0].joint), error));
    false
}

/// All members have come and ask for different things: each of them gets that error, none an echo of it.
pub(crate) fn disagree(arrivals: &[Arrival], asked: Asked) {
    let (group, seq) = (arrivals[0].joint.body().meeting.name.to_string(), arrivals[0].joint.number());
    let error = Error::Disagree { group, seq, asked };
    let how = Departure::Failed(error.chain());
    let first: Vec<_> = arrivals.iter().filter(|a| a.stream.device.set_error(error.clone())).collect();
    for arrival in first {
        arrival.stream.device.machine.depart(arrival.stream.device.rank, how.clone());
    }
}

fn release(arrivals: &[Arrival]) {
    for arrival in arrivals {
        arrival.stream.device.claims.release(&Claim::Joint(arrival.joint.clone()));
    }
}

/// `device` failed with `error` in the joint operation, and takes the others with it.
fn fail_joint(arrivals: &[Arrival], device: &DeviceInner, error: Error) {
    let how = Departure::Failed(error.chain());
    device.machine.fail(device, error);
    device.machine.poison(arrivals, device.rank, &how);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Machine, Op, queue::OpBody};

    #[test]
    fn what_ran_is_told_before_its_error_is() {
        let device = Machine::sim(1).device(0).unwrap();
        let _stream = device.stream("compute").unwrap();
        let op = Op::host("fail", "here".to_owned(), Vec::new(), |_| Err("it fails".into()));
        let op = OpAt::Eager(OpBody { op, stream: 0, seq: 1 });
        let mut failed = None;
        run_op(device.inner(), &op, &Alone, true, || failed = Some(device.inner().failed()));
        assert_eq!((failed, device.inner().failed()), (Some(false), true));
        run_op(device.inner(), &op, &Alone, true, || unreachable!("a device that has failed runs nothing"));
    }
}
