//! What this machine's products can do at best, for the utilisation in the metrics.

use std::time::{Duration, Instant};

use device::ops::{Accumulate, Finish, Gemm, Trans};
use device::{DType, Error, Machine, MemoryKind};

/// Rows, columns and depth of the measured product on a host: in cache, and large enough to be cut among workers.
const ON_HOST: usize = 1024;
/// On a card: large enough to fill it.
const ON_CARD: usize = 4096;

/// Products that a card is given at once, or the host's part of the time would count.
const BURST: usize = 16;

/// Bursts timed at least; the best counts, because the machine may do other things too.
const TIMES: usize = 3;

/// More are timed until this has passed.
const FOR: Duration = Duration::from_millis(300);

/// Floating-point operations per second of a large product of `dtype` on what `rank` has, all workers of a host or one card;
/// multiply and add counted separately. None on a driver that does not compute.
///
/// # Errors
/// The device's error.
pub fn product_peak(machine: &Machine, rank: u32, dtype: DType) -> Result<Option<f64>, Error> {
    if !machine.computes() {
        return Ok(None);
    }
    let device = machine.device(rank)?;
    let stream = device.stream("peak")?;
    let (size, burst) = if machine.driver() == "cuda" { (ON_CARD, BURST) } else { (ON_HOST, 1) };
    let alloc = |label| device.alloc(label, &[size, size], dtype, MemoryKind::Other);
    let (a, b, c) = (alloc("peak.a")?, alloc("peak.b")?, alloc("peak.c")?);
    let gemm = Gemm { a: &a, b: &b, c: &c, trans: Trans::Nt, finish: Finish::Into(Accumulate::Overwrite) };
    let op = gemm.op("peak")?;
    let (mut best, since, mut times) = (f64::INFINITY, Instant::now(), 0);
    while times < TIMES || since.elapsed() < FOR {
        times += 1;
        let began = Instant::now();
        for _ in 0..burst {
            stream.launch(op.clone())?;
        }
        stream.synchronize()?;
        best = best.min(began.elapsed().as_secs_f64());
    }
    Ok(Some(op.flops() as f64 * burst as f64 / best))
}
