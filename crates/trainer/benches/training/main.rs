//! Training steps of a small GPT, ours and PyTorch's in turns, and our step against what the machine can do at best.
//!
//! ```text
//! cargo bench -p trainer --bench training                             # our step against its budget
//! cargo bench -p trainer --bench training -- --peer .venv/bin/python  # and against PyTorch
//! ... --rounds 9 --steps 4 fsdp                                       # more pairs; cases whose name has "fsdp"
//! ```
//!
//! 6 layers, 384 wide, 6 heads, bytes, 8 sequences of 256 tokens, f32, AdamW with clipping, all cores. The text is the
//! source of this workspace, the same bytes for both. The peer needs a Python with torch.

mod budget; // what bounds a step, kernel by kernel
mod ours; // runs of the trainer
mod peer; // processes that train with PyTorch

use std::error::Error;

use ours::{Ours, Setup};
use peer::Peer;

type Failed = Box<dyn Error + Send + Sync>;

/// Tokens of a step.
const TOKENS: f64 = (ours::BATCH * ours::SEQ) as f64;

/// What is compared with what.
struct Case {
    name: &'static str,
    ours: Setup,
    /// What the peer calls it, and its processes.
    peer: (&'static str, u32),
    /// Times faster than the peer that we aim at.
    aim: Option<f64>,
}

const CASES: [Case; 5] = [
    Case { name: "one process", ours: Setup::replicas(1), peer: ("single", 1), aim: Some(1.15) },
    Case { name: "one process, torch.compile", ours: Setup::replicas(1), peer: ("compiled", 1), aim: None },
    Case { name: "dp=2, ddp", ours: Setup::replicas(2), peer: ("ddp", 2), aim: Some(1.2) },
    Case { name: "dp=2, fsdp", ours: Setup::distributed(2), peer: ("fsdp", 2), aim: None },
    Case { name: "dp=4, fsdp", ours: Setup::distributed(4), peer: ("fsdp", 4), aim: Some(1.5) },
];

fn main() -> Result<(), Failed> {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let after = |flag: &str| words.iter().position(|word| word == flag).and_then(|at| words.get(at + 1));
    let number = |flag, usual| after(flag).map_or(Ok(usual), |word| word.parse::<usize>());
    let (rounds, steps) = (number("--rounds", 7)?, number("--steps", 4)?);
    let wanted = words.iter().enumerate().filter(|(at, word)| {
        !word.starts_with("--") && at.checked_sub(1).is_none_or(|before| !words[before].starts_with("--"))
    });
    let wanted: Vec<&str> = wanted.map(|(_, word)| word.as_str()).collect();
    let ours = Ours::new()?;
    if let Some(python) = after("--peer") {
        let cases = CASES.iter().filter(|case| wanted.iter().all(|word| case.name.contains(word)));
        compare(&ours, python, &cases.collect::<Vec<_>>(), rounds, steps)?;
    }
    budget::print(&ours, rounds)
}

/// Tokens a second of both, a line for each case, in pairs of runs.
fn compare(ours: &Ours, python: &str, cases: &[&Case], rounds: usize, steps: usize) -> Result<(), Failed> {
    println!("tokens/s, medians of {rounds} pairs of {steps} steps; ratio: median of the pairs' (smallest to largest)");
    println!("{:28}{:>9}{:>9}{:>8}{:>16}{:>6}{:>16}", "", "ours", "torch", "ratio", "", "aim", "losses");
    for case in cases {
        let mut peer = Peer::start(python, case.peer, ours.text())?;
        let mut rows = Vec::new();
        let mut losses = (0.0, 0.0);
        for _ in 0..rounds {
            let (own, own_loss) = ours.measure(case.ours, steps)?;
            let (other, other_loss) = peer.measure(steps)?;
            rows.push([TOKENS / own, TOKENS / other, other / own]);
            losses = (own_loss, other_loss);
        }
        let column = |i: usize| sorted(rows.iter().map(|row| row[i]).collect());
        let (own, other, ratio) = (median(&column(0)), median(&column(1)), column(2));
        let range = format!("({:.2} to {:.2})", ratio[0], ratio[rounds - 1]);
        let aim = case.aim.map_or("-".to_owned(), |aim| format!("{aim:.2}"));
        // Not the same batches, and the peer goes on from round to round: both have to have learnt something.
        let losses = format!("{:.2}, {:.2}", losses.0, losses.1);
        println!(
            "{:28}{own:9.0}{other:9.0}{:8.2}{range:>16}{aim:>6}{losses:>16}   {}",
            case.name,
            median(&ratio),
            peer.name()
        );
    }
    Ok(())
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

/// Of sorted values.
fn median(values: &[f64]) -> f64 {
    values[values.len() / 2]
}
