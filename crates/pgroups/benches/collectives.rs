//! Collectives of four thread ranks, and the same ones of four processes over gloo.
//!
//! ```text
//! cargo bench -p pgroups --bench collectives                         # times of our own
//! cargo bench -p pgroups --bench collectives -- --peer .venv/bin/python   # against gloo, in turns
//! ```
//!
//! "call" waits for each collective before the next, as a blocking gloo call does; "stream" submits them all and waits
//! once, as training does. The peer needs a Python with torch.

use std::{
    error::Error,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Instant,
};

use device::{DType, Machine, MemoryKind, Reduce, Stream, View};
use pgroups::{Group, Key, Layout, LayoutConfig, Needs, PgError, ProcessGroups, local};

const RANKS: u32 = 4;
const OPS: [&str; 3] = ["all_gather", "reduce_scatter", "all_reduce"];
/// Bytes of the full tensor, f32, and how many calls make a measurement.
const SIZES: [(usize, usize); 3] = [(1 << 10, 200), (256 << 10, 100), (16 << 20, 8)];
/// Pairs of measurements; the median of their ratios counts.
const PAIRS: usize = 9;
/// Times faster than the peer that we aim at, by size.
const AIMS: [f64; 3] = [20.0, 10.0, 4.0];

#[derive(Clone, Copy, PartialEq)]
enum Waits {
    EachCall,
    AtTheEnd,
}

type Failed = Box<dyn Error + Send + Sync>;

fn main() -> Result<(), Failed> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let after = |flag: &str| words.iter().position(|word| word == flag).and_then(|at| words.get(at + 1));
    let workers = after("--workers").map_or(Ok(2), |word| word.parse())?;
    let machine = Machine::cpu(workers)?;
    println!("{RANKS} ranks, {workers} workers, f32, microseconds a collective: median of {PAIRS}");
    match after("--peer") {
        None => alone(&machine),
        Some(python) => against(&machine, &mut Peer::start(python)?),
    }
}

fn alone(machine: &Machine) -> Result<(), Failed> {
    println!("{:16}{:>12}{:>12}{:>12}", "", "bytes", "call", "stream");
    for op in OPS {
        for (bytes, calls) in SIZES {
            let measure = |waits| (0..PAIRS).map(|_| ours(machine, op, bytes, calls, waits)).collect::<Result<_, _>>();
            let [call, stream] = [measure(Waits::EachCall)?, measure(Waits::AtTheEnd)?].map(median);
            println!("{op:16}{bytes:12}{:12.1}{:12.1}", call * 1e6, stream * 1e6);
        }
    }
    Ok(())
}

fn against(machine: &Machine, peer: &mut Peer) -> Result<(), Failed> {
    println!("gloo: {}", peer.name);
    let heads = ["bytes", "call", "stream", "gloo", "x call", "x stream", "aim"];
    println!("{:16}{}", "", heads.map(|head| format!("{head:>11}")).concat());
    for op in OPS {
        for ((bytes, calls), aim) in SIZES.into_iter().zip(AIMS) {
            let mut rows = Vec::new();
            for _ in 0..PAIRS {
                let call = ours(machine, op, bytes, calls, Waits::EachCall)?;
                let gloo = peer.measure(op, bytes, calls)?;
                let stream = ours(machine, op, bytes, calls, Waits::AtTheEnd)?;
                rows.push([call * 1e6, stream * 1e6, gloo * 1e6, gloo / call, gloo / stream]);
            }
            let column = |i: usize| median(rows.iter().map(|row| row[i]).collect());
            let columns = [0, 1, 2, 3, 4].map(|i| format!("{:11.1}", column(i)));
            println!("{op:16}{bytes:11}{}{aim:11.0}", columns.concat());
        }
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What a rank needs for one collective.
struct Tensors {
    full: View,
    part: View,
}

impl Tensors {
    fn submit(&self, group: &Group, stream: &Stream, op: &str) -> Result<(), PgError> {
        match op {
            "all_gather" => group.all_gather(stream, &self.part, &self.full),
            "reduce_scatter" => group.reduce_scatter(stream, &self.full, &self.part, Reduce::Sum),
            // The maximum: a sum would grow from call to call.
            _ => group.all_reduce(stream, &self.full, Reduce::Max),
        }
    }
}

/// Seconds of one collective on rank 0, out of `calls` of them.
fn ours(machine: &Machine, op: &str, bytes: usize, calls: usize, waits: Waits) -> Result<f64, Failed> {
    let layout = Layout::new(&LayoutConfig { dp: Some(RANKS), ..LayoutConfig::default() })?;
    let seconds = local(machine, RANKS, |rank| {
        let groups = ProcessGroups::build(&rank, &layout, &Needs::keys([Key::DP]))?;
        let (group, stream) = (groups.get(&Key::DP, "bench")?, rank.device.stream("bench")?);
        let numel = bytes / DType::F32.size_bytes();
        let alloc = |label, numel| rank.device.alloc(label, &[numel], DType::F32, MemoryKind::Other);
        let tensors = Tensors { full: alloc("full", numel)?, part: alloc("part", numel / RANKS as usize)? };
        for _ in 0..3 {
            tensors.submit(group, &stream, op)?;
        }
        group.barrier(&stream)?;
        stream.synchronize()?;
        let begin = Instant::now();
        for _ in 0..calls {
            tensors.submit(group, &stream, op)?;
            if waits == Waits::EachCall {
                stream.synchronize()?;
            }
        }
        stream.synchronize()?;
        Ok::<_, PgError>(begin.elapsed().as_secs_f64() / calls as f64)
    });
    Ok(seconds?[0])
}

/// The gloo processes: idle, but for one measurement at a time.
struct Peer {
    child: Child,
    ask: ChildStdin,
    answer: BufReader<ChildStdout>,
    name: String,
}

impl Peer {
    fn start(python: &str) -> Result<Peer, Failed> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/gloo_peer.py");
        let mut command = Command::new(python);
        command.args([script, "--world", &RANKS.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let ask = child.stdin.take().ok_or("the peer has no input")?;
        let answer = BufReader::new(child.stdout.take().ok_or("the peer has no output")?);
        let mut peer = Peer { child, ask, answer, name: String::new() };
        peer.name = peer.line()?;
        Ok(peer)
    }

    fn measure(&mut self, op: &str, bytes: usize, calls: usize) -> Result<f64, Failed> {
        writeln!(self.ask, "{op} {bytes} {calls}")?;
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
        let asked = writeln!(self.ask, "end").and_then(|()| self.child.wait());
        if let Err(error) = asked {
            eprintln!("the peer did not end: {error}");
        }
    }
}
