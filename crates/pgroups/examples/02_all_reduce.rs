//! Runs ranks as threads, averages their gradients over one group, then shows what a rank is told whose peer asks for
//! something else.
//!
//! Run: `cargo run -p pgroups --example 02_all_reduce`

use device::{DType, Machine, MemoryKind, Reduce};
use pgroups::{Key, Layout, LayoutConfig, Needs, PgError, ProcessGroups, Rank, local};

fn main() -> Result<(), PgError> {
    let machine = Machine::cpu(2)?;
    for ranks in [2, 3] {
        let means = local(&machine, ranks, average)?;
        println!("{ranks} ranks: rank r brings r + 1; each gets {means:?}");
    }

    println!("\nA rank with another size is told at once, and so is its peer:");
    if let Err(error) = local(&machine, 2, different_sizes) {
        println!("  {}", error.chain());
    }
    Ok(())
}

/// One rank's program. It finds its group through the collection and nowhere else.
fn average(rank: Rank) -> Result<f32, PgError> {
    let layout = Layout::new(&LayoutConfig { dp: Some(rank.world_size), ..LayoutConfig::default() })?;
    let groups = ProcessGroups::build(&rank, &layout, &Needs::keys([Key::DP]))?;
    let replicas = groups.get(&Key::DP, "the example")?;

    let stream = rank.device.stream("compute")?;
    let grad = rank.device.alloc("grad", &[1], DType::F32, MemoryKind::Grad)?;
    stream.upload(&grad, vec![rank.global.0 as f32 + 1.0])?;
    replicas.all_reduce(&stream, &grad, Reduce::Avg)?;
    // So far everything was only submitted; the host waits here.
    Ok(stream.download::<f32>(&grad)?.wait()?[0])
}

fn different_sizes(rank: Rank) -> Result<(), PgError> {
    let layout = Layout::new(&LayoutConfig { dp: Some(2), ..LayoutConfig::default() })?;
    let groups = ProcessGroups::build(&rank, &layout, &Needs::keys([Key::DP]))?;
    let stream = rank.device.stream("compute")?;
    let numel = if rank.global.0 == 0 { 4 } else { 8 };
    let grad = rank.device.alloc("grad", &[numel], DType::F32, MemoryKind::Grad)?;
    groups.get(&Key::DP, "the example")?.all_reduce(&stream, &grad, Reduce::Sum)?;
    Ok(stream.synchronize()?)
}
