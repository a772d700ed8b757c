//! Training steps of a small GPT: layouts in turns with each other and with PyTorch, and our step against what the
//! machine can do at best.
//!
//! ```text
//! cargo bench -p trainer --bench training                             # our step against its budget
//! cargo bench -p trainer --bench training -- --layouts                # and layouts against each other
//! cargo bench -p trainer --bench training -- --peer .venv/bin/python  # and all of it against PyTorch
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
    other: Other,
    /// Times faster than the other that we aim at.
    aim: Option<f64>,
}

/// Whom a setup is compared with.
enum Other {
    /// PyTorch: what the script calls it, and its processes.
    Torch(&'static str, u32),
    /// Our own setup.
    Own(Setup),
}

const fn against_torch(name: &'static str, ours: Setup, kind: &'static str, processes: u32, aim: Option<f64>) -> Case {
    Case { name, ours, other: Other::Torch(kind, processes), aim }
}

const CASES: [Case; 9] = [
    against_torch("one process", Setup::replicas(1), "single", 1, Some(1.15)),
    against_torch("one process, torch.compile", Setup::replicas(1), "compiled", 1, None),
    against_torch("dp=2, ddp", Setup::replicas(2), "ddp", 2, Some(1.2)),
    against_torch("dp=2, fsdp", Setup::distributed(2), "fsdp", 2, None),
    against_torch("dp=4, fsdp", Setup::distributed(4), "fsdp", 4, Some(1.5)),
    against_torch("gtp=4, fsdp", Setup::sharded(1, 4), "fsdp", 4, Some(1.5)),
    against_torch("tp=2 gtp=2, fsdp", Setup::sharded(2, 2), "fsdp", 4, Some(1.5)),
    Case { name: "gtp=4, own dp=4", ours: Setup::sharded(1, 4), other: Other::Own(Setup::replicas(4)), aim: Some(0.9) },
    Case {
        name: "tp=2 gtp=2, own dp=4",
        ours: Setup::sharded(2, 2),
        other: Other::Own(Setup::replicas(4)),
        aim: Some(0.9),
    },
];

fn main() -> Result<(), Failed> {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let after = |flag: &str| words.iter().position(|word| word == flag).and_then(|at| words.get(at + 1));
    let number = |flag, usual| after(flag).map_or(Ok(usual), |word| word.parse::<usize>());
    let (rounds, steps) = (number("--rounds", 7)?, number("--steps", 4)?);
    let wanted = words.iter().enumerate().filter(|(at, word)| {
        let value = |before: usize| words[before].starts_with("--") && words[before] != "--layouts";
        !word.starts_with("--") && !at.checked_sub(1).is_some_and(value)
    });
    let wanted: Vec<&str> = wanted.map(|(_, word)| word.as_str()).collect();
    let ours = Ours::new()?;
    let (python, layouts) = (after("--peer"), words.iter().any(|word| word == "--layouts"));
    let runs = |case: &&Case| match case.other {
        Other::Torch(..) => python.is_some(),
        Other::Own(_) => python.is_some() || layouts,
    };
    let named = |case: &&Case| wanted.iter().all(|word| case.name.contains(word));
    let cases: Vec<_> = CASES.iter().filter(runs).filter(named).collect();
    if !cases.is_empty() {
        compare(&ours, python.map(String::as_str), &cases, rounds, steps)?;
    }
    budget::print(&ours, rounds)
}

/// Who runs the other half of a pair.
enum Opponent<'o> {
    Torch(Peer),
    Own(&'o Ours, Setup),
}

impl Opponent<'_> {
    /// Seconds a step, and the loss of the last one.
    fn measure(&mut self, steps: usize) -> Result<(f64, f64), Failed> {
        match self {
            Opponent::Torch(peer) => peer.measure(steps),
            Opponent::Own(ours, setup) => ours.measure(*setup, steps),
        }
    }

    fn name(&self) -> &str {
        match self {
            Opponent::Torch(peer) => peer.name(),
            Opponent::Own(..) => "",
        }
    }
}

/// Tokens a second of both, a line for each case, in pairs of runs.
fn compare(ours: &Ours, python: Option<&str>, cases: &[&Case], rounds: usize, steps: usize) -> Result<(), Failed> {
    println!("tokens/s, medians of {rounds} pairs of {steps} steps; ratio: median of the pairs' (smallest to largest)");
    println!("{:28}{:>9}{:>9}{:>8}{:>16}{:>6}{:>16}", "", "ours", "other", "ratio", "", "aim", "losses");
    for case in cases {
        let mut other = match (&case.other, python) {
            (Other::Torch(kind, processes), Some(python)) => {
                Opponent::Torch(Peer::start(python, (kind, *processes), ours.text())?)
            }
            (Other::Torch(..), None) => return Err("comparing with PyTorch takes --peer PYTHON".into()),
            (Other::Own(setup), _) => Opponent::Own(ours, *setup),
        };
        let mut rows = Vec::new();
        let mut losses = (0.0, 0.0);
        for _ in 0..rounds {
            let (own, own_loss) = ours.measure(case.ours, steps)?;
            let (theirs, other_loss) = other.measure(steps)?;
            rows.push([TOKENS / own, TOKENS / theirs, theirs / own]);
            losses = (own_loss, other_loss);
        }
        let column = |i: usize| sorted(rows.iter().map(|row| row[i]).collect());
        let (own, theirs, ratio) = (median(&column(0)), median(&column(1)), column(2));
        let range = format!("({:.2} to {:.2})", ratio[0], ratio[rounds - 1]);
        let aim = case.aim.map_or("-".to_owned(), |aim| format!("{aim:.2}"));
        // Not the same batches, and the peer goes on from round to round: both have to have learnt something.
        let losses = format!("{:.2}, {:.2}", losses.0, losses.1);
        println!(
            "{:28}{own:9.0}{theirs:9.0}{:8.2}{range:>16}{aim:>6}{losses:>16}   {}",
            case.name,
            median(&ratio),
            other.name()
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
