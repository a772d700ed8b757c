//! One shard per weight is plain tensor and data parallelism: not a wait, not a byte more.

use device::{Machine, MemoryKind, MemoryUse};
use graphcap::verify::file;
use pgroups::{Sequence, local};

use super::{
    program::{Arch, Held, Program},
    support::{Caught, captures, cards, cpu, sim},
    worker::Worker,
};

/// What a rank has allocated, and its bits.
type OfRank = (Vec<MemoryUse>, Vec<u32>);

/// The trace of a few steps and an evaluation as text, and what every rank has.
fn run(program: &Program, machine: &Machine) -> (String, Vec<OfRank>) {
    machine.trace_start();
    let ran = local(machine, program.world(), |rank| -> Result<_, Caught> {
        let mut worker = Worker::prepared(&rank, program, "m")?;
        worker.evaluate()?;
        (1..3).try_for_each(|step| worker.step(step))?;
        let memory = rank.device.memory();
        let bits = if machine.computes() { worker.finish()? } else { Vec::new() };
        rank.device.synchronize()?;
        Ok((memory, bits))
    });
    let mut text = Vec::new();
    file::write(&machine.trace_stop(), &mut text).unwrap();
    (String::from_utf8(text).unwrap(), ran.unwrap())
}

/// Batches and scratch are not in it: how soon they go depends on how fast the work does.
fn lasting(rank: &OfRank) -> Vec<&MemoryUse> {
    rank.0.iter().filter(|piece| piece.kind != MemoryKind::Other).collect()
}

#[test]
fn one_shard_a_weight_leaves_the_operations_waits_and_memory_of_no_shards_at_all() {
    let base = Program { sequence: Sequence::Split, ..Program::on(2, 1, 2) };
    let running: Vec<_> = [cpu()].into_iter().chain(cards()).collect();
    for arch in [Arch::Gpt2, Arch::Llama] {
        for graphs in [None].into_iter().chain(captures().into_iter().map(Some)) {
            let with = Program { arch, graphs, held: Held::Sharded, ..base.clone() };
            let without = Program { held: Held::Whole, ..with.clone() };
            for machine in [Machine::dry, || sim(3)] {
                let (a, b) = (run(&with, &machine()), run(&without, &machine()));
                assert!(a.0.len() > 10_000 && a.1[0].0.len() > 50, "there is something to compare");
                let differs = a.0.lines().zip(b.0.lines()).find(|(a, b)| a != b);
                assert_eq!(differs, None, "{arch:?} {graphs:?}");
                assert!(a == b, "{arch:?} {graphs:?}");
            }
            // Traces of workers and cards tell in which order they got there.
            for machine in &running {
                let (a, b) = (run(&with, machine).1, run(&without, machine).1);
                for (rank, (a, b)) in a.iter().zip(&b).enumerate() {
                    assert_eq!(lasting(a), lasting(b), "rank {rank}, {arch:?} {graphs:?} on {}", machine.driver());
                    assert!(a.1 == b.1, "values of rank {rank}, {arch:?} {graphs:?} on {}", machine.driver());
                }
            }
        }
    }
    // Two shards a weight do leave more.
    let sharded = Program::on(2, 2, 1);
    assert!(run(&sharded, &Machine::dry()).0.contains("gtp.use_after_gather"));
    assert!(!run(&base, &Machine::dry()).0.contains("gtp."));
}
