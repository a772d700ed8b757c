//! The closed set of kernels: typed requests that check their shapes once and become an [`Op`](crate::Op).

use crate::{Access, Args, Op, OpError};

/// A known kernel with its settings: plain data, matched once per driver.
#[derive(Clone, Debug)]
pub enum Kernel {}

impl Kernel {
    /// Pieces that may run at the same time; by shape only, so results do not depend on how many run.
    pub(crate) fn tiles(&self, _accesses: &[Access]) -> usize {
        match *self {}
    }

    /// The accesses of piece `tile`: the same kernel over parts of its views.
    pub(crate) fn tile(&self, _accesses: &[Access], _tile: usize) -> Vec<Access> {
        match *self {}
    }

    /// Computes on the host.
    pub(crate) fn run(&self, _args: &mut Args<'_>) -> Result<(), OpError> {
        match *self {}
    }

    /// Floating-point operations, multiply and add counted separately.
    pub(crate) fn flops(&self, _accesses: &[Access]) -> u64 {
        match *self {}
    }
}

/// Runs `op` at once on this thread, for tests of kernels.
#[cfg(test)]
pub(crate) fn run_now(op: &Op) -> Result<(), OpError> {
    let run = |accesses: &[Access]| {
        for (i, a) in accesses.iter().enumerate() {
            assert!(accesses[i + 1..].iter().all(|b| !a.conflicts(b)), "{}: accesses conflict", op.name);
        }
        // SAFETY: the views are the test's own and no other thread knows them; conflicts were excluded above.
        let mut args = unsafe { Args::new(accesses) };
        match &op.launch {
            crate::Launch::Kernel(kernel) => kernel.run(&mut args),
            crate::Launch::Host(run) => run(&mut args),
        }
    };
    run(&op.accesses)
}
