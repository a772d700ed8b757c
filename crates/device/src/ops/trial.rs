//! Runs operations on this thread, for tests of kernels.

use crate::{Access, Args, Kernel, Launch, Mode, Op, OpError};

/// Runs `op` as the scheduler does, piece by piece, but last piece first: results may not depend on the order.
pub(crate) fn run_now(op: &Op) -> Result<(), OpError> {
    match &op.launch {
        Launch::Kernel(kernel) => pieces(op).iter().rev().try_for_each(|piece| run_piece(op.name, kernel, piece)),
        Launch::Host(run) => {
            exclude_conflicts(op.name, &op.accesses);
            // SAFETY: the views are the test's own and no other thread knows them; conflicts were excluded above.
            run(&mut unsafe { Args::new(&op.accesses) })
        }
    }
}

/// Runs `op` first piece first.
pub(crate) fn run_in_order(op: &Op) {
    let Launch::Kernel(kernel) = &op.launch else { panic!("not a kernel") };
    pieces(op).iter().try_for_each(|piece| run_piece(op.name, kernel, piece)).expect("the kernel runs");
}

fn run_piece(name: &str, kernel: &Kernel, accesses: &[Access]) -> Result<(), OpError> {
    exclude_conflicts(name, accesses);
    // SAFETY: the views are the test's own and no other thread knows them; conflicts were excluded above.
    kernel.run(&mut unsafe { Args::new(accesses) })
}

fn exclude_conflicts(name: &str, accesses: &[Access]) {
    for (i, a) in accesses.iter().enumerate() {
        assert!(accesses[i + 1..].iter().all(|b| !a.conflicts(b)), "{name}: accesses conflict");
    }
}

/// The accesses of each piece.
pub(crate) fn pieces(op: &Op) -> Vec<Vec<Access>> {
    let Launch::Kernel(kernel) = &op.launch else { panic!("not a kernel") };
    match kernel.tiles(&op.accesses) {
        1 => vec![op.accesses.clone()],
        n => (0..n).map(|i| kernel.tile(&op.accesses, i)).collect(),
    }
}

/// The pieces of `op` ask for nothing but what it declares, write disjoint bytes and together all of them.
pub(crate) fn assert_pieces_partition(op: &Op) {
    let pieces = pieces(op);
    for (at, whole) in op.accesses.iter().enumerate() {
        let parts: Vec<&Access> = pieces.iter().map(|piece| &piece[at]).collect();
        for part in &parts {
            assert_eq!(part.mode, whole.mode, "{}: mode of access {at}", op.name);
            let (inner, outer) = (part.view.region(), whole.view.region());
            assert!(inner.is_empty() || inner.start >= outer.start && inner.end() <= outer.end(), "{}: {at}", op.name);
        }
        if whole.mode == Mode::Read {
            continue;
        }
        let bytes: usize = parts.iter().map(|part| part.view.bytes()).sum();
        assert_eq!(bytes, whole.view.bytes(), "{}: pieces of access {at} cover it", op.name);
        for (i, a) in parts.iter().enumerate() {
            assert!(parts[i + 1..].iter().all(|b| !a.conflicts(b)), "{}: pieces of access {at} are disjoint", op.name);
        }
    }
}
