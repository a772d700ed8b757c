//! What one rank keeps of a model on eight ranks, layout by layout: the table of docs/gtp.md.
//!
//!     cargo run --release -p trainer --example 02_memory_by_layout

use std::{error::Error, path::Path};

use device::MemoryKind;
use trainer::{Config, plan_run};

const MODEL: &str = r#"
[model]
layers = 4
dim = 512
heads = 8
seq_len = 128
vocab = 32_000
tied = false
[train]
steps = 1
global_batch = 8
micro_batch = 1
[optimizer]
lr = 1e-3
distributed = true
[data]
path = "none"
"#;

/// tp, gtp, dp: eight ranks.
const LAYOUTS: [(u32, u32, u32); 8] =
    [(1, 1, 8), (1, 2, 4), (2, 1, 4), (1, 4, 2), (2, 2, 2), (1, 8, 1), (2, 4, 1), (8, 1, 1)];

fn main() -> Result<(), Box<dyn Error>> {
    println!("|  tp | gtp |  dp | parameters | gradients | optimizer | together | gather and gradient slots |");
    println!("|----:|----:|----:|-----------:|----------:|----------:|---------:|--------------------------:|");
    for (tp, gtp, dp) in LAYOUTS {
        let set = [format!("layout.tp={tp}"), format!("layout.gtp={gtp}"), format!("layout.dp={dp}")];
        let plan = plan_run(&Config::parse(MODEL, Path::new("example"), Path::new(""), &set)?)?;
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        let of = |kind| plan.memory.get(&kind).map_or(0.0, |bytes| mib(*bytes));
        let [param, grad, optimizer] = [MemoryKind::Param, MemoryKind::Grad, MemoryKind::Optimizer].map(of);
        let (together, slots) = (param + grad + optimizer, mib(plan.gtp.bytes()));
        println!(
            "| {tp:>3} | {gtp:>3} | {dp:>3} | {param:>10.2} | {grad:>9.2} | {optimizer:>9.2} | {together:>8.2} | {slots:>25.2} |"
        );
    }
    println!("\nMiB of one rank.");
    Ok(())
}
