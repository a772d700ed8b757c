//! What recording a trace costs a training step: some steps of each run are recorded, those before and behind are not.
//!
//! ```text
//! cargo bench -p trainer --bench recording -- --rounds 9
//! ```

use std::{error::Error, fs, path::PathBuf};

use trainer::{Config, RunOptions, TimelineConfig};

type Failed = Box<dyn Error + Send + Sync>;

/// Recorded steps of a run, and as many before and behind them.
const STEPS: usize = 6;

/// Steps before: they touch memory for the first time.
const WARM_UP: usize = 2;

/// Name, width, layers, sequence length, replicas.
const CASES: [(&str, usize, usize, usize, usize); 3] = [
    ("6 layers, 384 wide", 384, 6, 256, 1),
    ("6 layers, 64 wide", 64, 6, 64, 1),
    ("6 layers, 64 wide, dp=2", 64, 6, 64, 2),
];

fn main() -> Result<(), Failed> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let after = |flag: &str| words.iter().position(|word| word == flag).and_then(|at| words.get(at + 1));
    let rounds: usize = after("--rounds").map_or(Ok(9), |word| word.parse())?;
    let folder = std::env::temp_dir().join(format!("recording-bench-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let text: String = (0..20_000).map(|i| format!("line {} of a text\n", i * i % 7919)).collect();
    fs::write(folder.join("text.txt"), text)?;
    println!("a recorded step over one that is not, {rounds} runs of {STEPS} recorded steps among {}", 3 * STEPS);
    println!("{:28}{:>10}{:>10}{:>10}{:>10}", "", "ms", "best", "median", "events");
    for case in CASES {
        let mut rows: Vec<[f64; 3]> = (0..rounds).map(|_| measure(&folder, case)).collect::<Result<_, _>>()?;
        rows.sort_by(|a, b| a[1].total_cmp(&b[1]));
        let [plain, best, events] = rows[0];
        println!("{:28}{:10.1}{best:10.3}{:10.3}{events:10.0}", case.0, plain * 1e3, rows[rounds / 2][1]);
    }
    Ok(fs::remove_dir_all(&folder)?)
}

/// Seconds of a plain step, the ratio of a recorded one to it, and how many operations were recorded a step.
fn measure(
    folder: &PathBuf,
    (_, dim, layers, seq, ranks): (&str, usize, usize, usize, usize),
) -> Result<[f64; 3], Failed> {
    let steps = WARM_UP + 3 * STEPS;
    let text = format!(
        "[model]\narch = \"gpt2\"\nlayers = {layers}\ndim = {dim}\nheads = 4\nseq_len = {seq}\n[layout]\ndp = {ranks}\n\
         [train]\nsteps = {steps}\nglobal_batch = 8\n[optimizer]\nlr = 3e-4\nschedule = \"constant\"\n\
         [data]\npath = \"text.txt\"\n[log]\nprogress = \"none\"\nsample_tokens = 0\ntensorboard = false\n"
    );
    let config = Config::parse(&text, folder, folder, &[] as &[&str])?;
    let (path, first) = (folder.join("timeline.json"), WARM_UP + STEPS + 1);
    let mut options = RunOptions::new(folder.join("run"));
    options.timeline = Some(TimelineConfig { path: path.clone(), steps: first as u64..=(first + STEPS - 1) as u64 });
    let trained = trainer::train(&config, options)?;
    // The fastest of each: what other processes take is in no one's.
    let fastest =
        |from: usize| trained.metrics[from..from + STEPS].iter().map(|step| step.seconds).fold(f64::INFINITY, f64::min);
    let plain = fastest(WARM_UP).min(fastest(WARM_UP + 2 * STEPS));
    let events = fs::read_to_string(path)?.matches("\"ph\":\"X\"").count();
    Ok([plain, fastest(WARM_UP + STEPS) / plain, events as f64 / STEPS as f64])
}
