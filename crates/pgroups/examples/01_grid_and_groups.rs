//! Lays eight ranks on three axes, shows who talks to whom, plans one rank's groups and its part of a weight.
//!
//! Run: `cargo run -p pgroups --example 01_grid_and_groups`

use pgroups::{
    Axis, GlobalRank, GroupsPlan, Init, Key, Layout, LayoutConfig, Needs, ParamClass, ParamSpec, PgError, Placement,
    Seed, groups_report,
};

fn main() -> Result<(), PgError> {
    let mut config = LayoutConfig::parse("tp=2,gtp=2,dp=2")?;
    config.world_size = Some(8);
    let layout = Layout::new(&config)?;
    println!("Eight ranks, tp fastest: {}\n", layout.canonical_text());

    println!("Who is grouped with whom:");
    let report = groups_report(&layout)?;
    for key in [Key::TP, Key::GTP, Key::DP, Key::DP_CP_GTP, Key::MP] {
        let groups = report.get(&key).unwrap_or_default();
        let groups: Vec<Vec<u32>> = groups.iter().map(|g| g.iter().map(|r| r.0).collect()).collect();
        println!("  {:<10} {groups:?}", key.to_string());
    }

    let me = GlobalRank(5);
    let plan = GroupsPlan::new(&layout, &Needs::keys([Key::GTP, Key::TP, Key::DP]), me)?;
    println!("\nRank {me} creates, in the order of every other rank (plan {}):", plan.fingerprint());
    for entry in plan.entries() {
        let own = plan.get(entry.key(), "the example")?;
        let (place, size) = (own.position, own.size());
        println!(
            "  {:<4} group {} of {}, place {place} of {size}",
            entry.key().to_string(),
            own.index,
            entry.group_count()
        );
    }

    let weight = ParamSpec {
        name: "h0.fc1.weight".into(),
        class: ParamClass::Dense,
        // 100 rows: tp halves them, gtp pads each half to 64 and halves it again.
        placement: Placement::whole([100, 3]).cut(0, Axis::TP, 0).cut(0, Axis::GTP, 16),
        init: Init::Normal { std: 0.02 },
    };
    let map = weight.shard_map(&layout)?;
    println!("\n{} of shape {:?} lies in shards of {:?}:", weight.name, map.global_shape(), map.local_shape());
    for rank in 0..layout.world_size() {
        let Some(shard) = map.shard(GlobalRank(rank)) else {
            continue;
        };
        let kind = if shard.is_owner() { "owner" } else { "replica" };
        for span in &shard.region[0] {
            println!("  rank {rank}: rows {:>3}..{:<3} {kind}", span.global.start, span.global.end);
        }
    }

    let stream = weight.init_stream(Seed(7));
    let mut shard = vec![0.0; map.local_shape().iter().product()];
    stream.fill_shard(&map, GlobalRank(3), &mut shard)?;
    println!("\nRow 82 begins with {} in rank 3's shard and {} in the whole tensor.", shard[0], stream.value(82 * 3));

    let wrong = LayoutConfig::parse("tp=3,gtp=2,etp=5").map(|config| LayoutConfig { world_size: Some(8), ..config })?;
    if let Err(refused) = Layout::new(&wrong) {
        println!("\nA layout that does not fit tells everything at once:\n  {refused}");
    }
    Ok(())
}
