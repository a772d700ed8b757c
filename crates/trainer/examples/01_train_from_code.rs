//! A run from a program: a configuration as text, two ranks, an evaluation, an end before the last step.
//!
//!     cargo run --release -p trainer --example 01_train_from_code

use std::{error::Error, path::Path};

use trainer::{Config, RunOptions, Signal, StopSource, train};

const CONFIG: &str = r#"
[model]
layers = 2
dim = 64
seq_len = 64
[layout]
dp = 2
[train]
steps = 100
global_batch = 8
eval_interval = 10
[data]
path = "src/**/*.rs"
[log]
progress = "lines"
"#;

fn main() -> Result<(), Box<dyn Error>> {
    let base = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = Config::parse(CONFIG, Path::new("example"), base, &["train.seed=7"])?;
    let dir = std::env::temp_dir().join(format!("train-from-code-{}", std::process::id()));
    let mut options = RunOptions::new(&dir);
    options.lines = Box::new(std::io::stdout());
    // Rank 1 is asked to end when it is about to submit step 14; all ranks end behind step 15.
    options.stop = StopSource::AtStep { rank: 1, step: 14, signal: Signal::Terminate };
    let trained = train(&config, options)?;
    println!("{trained}");
    assert_eq!(trained.steps_by_rank, [15, 15]);
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
