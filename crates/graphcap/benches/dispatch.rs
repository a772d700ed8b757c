//! What a small operation costs beside its work: ours one by one, ours in a replayed graph, and PyTorch's eager dispatch
//! on the CPU, in turns.
//!
//! ```text
//! cargo bench -p graphcap --bench dispatch                             # ours
//! cargo bench -p graphcap --bench dispatch -- --peer .venv/bin/python  # and PyTorch's; --rounds 31
//! ```
//!
//! The operation adds 64 numbers to 64 others. One worker; a round waits for its last operation only.

use std::{
    error::Error,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Instant,
};

use device::{DType, Machine, MemoryKind, Stream, View, ops::Axpy, ops::Factor};
use graphcap::{CaptureScope, Graph, GraphConfig, GraphSet, Scope};

type Failed = Box<dyn Error + Send + Sync>;

/// Operations of a round, and nodes of the graph.
const OPS: usize = 2_000;

fn main() -> Result<(), Failed> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let after = |flag: &str| words.iter().position(|word| word == flag).and_then(|at| words.get(at + 1));
    let rounds: usize = after("--rounds").map_or(Ok(31), |word| word.parse())?;
    let mut peer = after("--peer").map(|python| Peer::start(python)).transpose()?;
    let ours = Ours::new()?;
    // Once for caches and pages.
    ours.eager()?;
    ours.replay()?;
    let mut rows: Vec<[f64; 3]> = Vec::new();
    for _ in 0..rounds {
        let torch = peer.as_mut().map_or(Ok(f64::NAN), Peer::measure)?;
        rows.push([ours.eager()?, ours.replay()?, torch]);
    }
    println!("ns for each operation, {rounds} rounds in turns of {OPS}");
    println!("{:28}{:>9}{:>9}{:>18}", "", "best", "median", "times the peer's");
    let names = ["ours, one by one", "ours, in a graph", peer.as_ref().map_or("", |peer| &peer.name)];
    for (i, name) in names.into_iter().enumerate().filter(|(_, name)| !name.is_empty()) {
        let own = sorted(rows.iter().map(|row| row[i]).collect());
        let ratio = sorted(rows.iter().map(|row| row[2] / row[i]).collect());
        let ratio = if peer.is_some() { format!("{:.1}", ratio[rounds / 2]) } else { String::new() };
        println!("{name:28}{:9.0}{:9.0}{ratio:>18}", own[0], own[rounds / 2]);
    }
    Ok(())
}

struct Ours {
    stream: Stream,
    x: View,
    y: View,
    graph: Graph,
}

impl Ours {
    fn new() -> Result<Ours, Failed> {
        let device = Machine::cpu(1)?.device(0)?;
        let stream = device.stream("compute")?;
        let vector = |label: &str| device.alloc(label, &[64], DType::F32, MemoryKind::Other);
        let (x, y) = (vector("x")?, vector("y")?);
        let mut set = GraphSet::new(&stream, GraphConfig::new(Scope::Layer))?;
        let body = |_: &mut CaptureScope<'_>| (0..OPS).try_for_each(|_| -> Result<(), Failed> { add(&stream, &x, &y) });
        let (graph, ()) = set.capture("bench", &stream, body)?;
        Ok(Ours { stream, x, y, graph })
    }

    fn eager(&self) -> Result<f64, Failed> {
        let begin = Instant::now();
        (0..OPS).try_for_each(|_| add(&self.stream, &self.x, &self.y))?;
        self.stream.synchronize()?;
        Ok(nanoseconds(begin))
    }

    fn replay(&self) -> Result<f64, Failed> {
        let begin = Instant::now();
        self.graph.replay(&self.stream, &[])?;
        self.stream.synchronize()?;
        Ok(nanoseconds(begin))
    }
}

/// Built and submitted, as code that is not captured does each time.
fn add(stream: &Stream, x: &View, y: &View) -> Result<(), Failed> {
    Ok(stream.launch(Axpy { alpha: Factor::Const(1.0), x, y }.op("add")?)?)
}

fn nanoseconds(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1e9 / OPS as f64
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

/// A process with PyTorch, idle but for one measurement at a time.
struct Peer {
    child: Child,
    ask: ChildStdin,
    answer: BufReader<ChildStdout>,
    name: String,
}

impl Peer {
    fn start(python: &str) -> Result<Peer, Failed> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/torch_dispatch.py");
        let mut child = Command::new(python).arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let ask = child.stdin.take().ok_or("the peer has no input")?;
        let answer = BufReader::new(child.stdout.take().ok_or("the peer has no output")?);
        let mut peer = Peer { child, ask, answer, name: String::new() };
        peer.name = peer.line()?;
        peer.measure()?;
        Ok(peer)
    }

    fn measure(&mut self) -> Result<f64, Failed> {
        writeln!(self.ask, "{OPS}")?;
        Ok(self.line()?.parse()?)
    }

    fn line(&mut self) -> Result<String, Failed> {
        let mut line = String::new();
        if self.answer.read_line(&mut line)? == 0 {
            return Err("the peer has ended; its own message is above".into());
        }
        Ok(line.trim().to_owned())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let asked = writeln!(self.ask, "0").and_then(|()| self.child.wait());
        if let Err(error) = asked {
            eprintln!("the peer did not end: {error}");
        }
    }
}
