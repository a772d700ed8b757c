//! What this machine's products can do at best, for the utilisation in the metrics.

use std::time::{Duration, Instant};

use device::ops::{Accumulate, Finish, Gemm, Trans};
use device::{DType, Error, Machine, MemoryKind};

/// Rows, columns and depth of the measured product: in cache, and large enough to be cut among workers.
const SIZE: usize = 1024;

/// Products timed at least; the best counts, because the machine may do other things too.
const TIMES: usize = 3;

/// More are timed until this has passed.
const FOR: Duration = Duration::from_millis(300);

/// Floating-point operations per second of a large f32 product on all workers of `machine`, multiply and add counted
/// separately. None on a driver that does not compute.
///
/// # Errors
/// The device's error.
pub fn product_peak(machine: &Machine, rank: u32) -> Result<Option<f64>, Error> {
    if !machine.computes() {
        return Ok(None);
    }
    let device = machine.device(rank)?;
    let stream = device.stream("peak")?;
    let alloc = |label| device.alloc(label, &[SIZE, SIZE], DType::F32, MemoryKind::Other);
    let (a, b, c) = (alloc("peak.a")?, alloc("peak.b")?, alloc("peak.c")?);
    let gemm = Gemm { a: &a, b: &b, c: &c, trans: Trans::Nt, finish: Finish::Into(Accumulate::Overwrite) };
    let op = gemm.op("peak")?;
    let (mut best, since, mut times) = (f64::INFINITY, Instant::now(), 0);
    while times < TIMES || since.elapsed() < FOR {
        times += 1;
        let began = Instant::now();
        stream.launch(op.clone())?;
        stream.synchronize()?;
        best = best.min(began.elapsed().as_secs_f64());
    }
    Ok(Some(op.flops() as f64 / best))
}
