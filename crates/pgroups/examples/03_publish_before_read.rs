//! A parameter's shards are gathered when somebody first reads it: a publisher of one's own, behind a `Turn`.
//!
//! Run: `cargo run -p pgroups --example 03_publish_before_read`

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::SeqCst},
};

use device::{DType, Event, Machine, MemoryKind, Stream, View};
use pgroups::{
    After, Epochs, Group, Key, Layout, LayoutConfig, Needs, Param, Pass, PgError, ProcessGroups, Publish, Rank, Turn,
    local,
};

/// Gathers the shards of one parameter, once for each write of them.
struct Gather {
    group: Group,
    stream: Stream,
    shard: View,
    full: View,
    published: Event,
    written: AtomicU64,
    issued: AtomicU64,
}

impl Publish for Gather {
    fn epochs(&self) -> Epochs {
        Epochs { written: self.written.load(SeqCst), issued: self.issued.load(SeqCst) }
    }

    fn issue(&self) -> Result<(), PgError> {
        let epochs = self.epochs();
        if epochs.is_current() {
            return Ok(());
        }
        self.group.all_gather(&self.stream, &self.shard, &self.full)?;
        self.stream.record(&self.published)?;
        self.issued.store(epochs.written, SeqCst);
        Ok(())
    }

    fn event(&self) -> &Event {
        &self.published
    }

    fn done(&self, after: After<'_>) -> Result<(), PgError> {
        // Whoever writes next waits for all reads. Here the gather itself must not overtake them.
        if let After::Stream(reader) = after {
            let read = reader.device().event("read");
            reader.record(&read)?;
            self.stream.wait(&read, device::Why("example.write_after_read"))?;
        }
        Ok(())
    }
}

fn program(rank: Rank) -> Result<Vec<String>, PgError> {
    let n = rank.world_size as usize;
    let layout = Layout::new(&LayoutConfig { dp: Some(rank.world_size), ..LayoutConfig::default() })?;
    let groups = ProcessGroups::build(&rank, &layout, &Needs::keys([Key::DP]))?;
    let (compute, comm) = (rank.device.stream("compute")?, rank.device.stream("comm")?);
    let alloc = |label, numel| rank.device.alloc(label, &[numel], DType::F32, MemoryKind::Param);
    let (full, grad) = (alloc("value", 2 * n)?, alloc("grad", 2 * n)?);
    let place = rank.global.0 as usize;
    let shard = full.flat(2 * place..2 * place + 2)?;

    let param = Param::new("wte", &full, &grad)?;
    let gather = Arc::new(Gather {
        group: groups.get(&Key::DP, "the example")?.clone(),
        stream: comm.clone(),
        shard: shard.clone(),
        full,
        published: rank.device.event("published"),
        written: AtomicU64::new(0),
        issued: AtomicU64::new(0),
    });
    param.attach(Some(gather.clone()), None);

    let mut seen = Vec::new();
    for step in 1..=2u8 {
        // An optimizer would write this shard.
        comm.upload(&shard, vec![f32::from(step) * 10.0 + place as f32; 2])?;
        gather.written.fetch_add(1, SeqCst);
        for _microbatch in 0..2 {
            let mut turn = Turn::eager(Pass::Forward);
            let value = turn.read(&param, &compute)?; // gathers at the first microbatch only
            seen.push(format!("{:?}", compute.download::<f32>(&value)?.wait()?));
            turn.done(&param, &compute)?;
        }
    }
    Ok(seen)
}

fn main() -> Result<(), PgError> {
    let machine = Machine::cpu(2)?;
    for ranks in [2, 3] {
        machine.trace_start();
        let seen = local(&machine, ranks, program)?;
        let trace = machine.trace_stop().to_text();
        let gathers = trace.lines().filter(|line| line.contains("dp[0]") && line.contains("joint 0.")).count();
        println!("{ranks} ranks, 2 steps of 2 microbatches: rank 0 gathered {gathers} times and read");
        seen[0].iter().for_each(|values| println!("  {values}"));
    }
    Ok(())
}
