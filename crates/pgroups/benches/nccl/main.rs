//! Collectives of groups on cards beside the same calls of NCCL made directly, on the same memory, in turns.
//!
//! ```text
//! cargo bench -p pgroups --bench nccl                  # a rank for each card; two on the only one
//! cargo bench -p pgroups --bench nccl -- --ranks 2
//! cargo bench -p pgroups --bench nccl -- --on cpu      # on a host, without the direct calls
//! ```
//!
//! Before it is timed each collective's result is compared with what it must be, for both. The ratio is time of direct calls
//! over time of ours, the median of pairs.

mod plain;

use std::{
    error::Error,
    process::ExitCode,
    time::{Duration, Instant},
};

use device::{DType, Machine, MemoryKind, Options, Reduce, Stream, View, cuda, cuda::CudaOptions, ops::Fill};
use pgroups::{Group, Key, Layout, LayoutConfig, Needs, ProcessGroups, Rank, local};
use plain::{Member, Plain};

/// MiB of the whole tensor on cards, and on hosts; less where ranks do not divide it.
const MIB: ([usize; 3], [usize; 2]) = ([64, 256, 1024], [1, 4]);
/// Seconds that a measurement takes, about: waking a host up is a thousandth of it.
const SECONDS: f64 = 0.05;
/// Pairs of measurements; the median of their ratios counts.
const PAIRS: usize = 9;
/// The ratio aimed at.
const AIM: f64 = 0.98;
/// Elements, the last of a result, that are compared.
const COMPARED: usize = 1024;

type Failed = Box<dyn Error + Send + Sync>;

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Collective {
    AllGather,
    ReduceScatter,
    AllReduce,
}

impl Collective {
    const ALL: [(&'static str, Collective); 3] = [
        ("all_gather", Collective::AllGather),
        ("reduce_scatter", Collective::ReduceScatter),
        ("all_reduce", Collective::AllReduce),
    ];

    /// What the last elements of the result must be when rank `r` gives numbers `r + 1`.
    fn expected(self, ranks: u32) -> f32 {
        match self {
            Collective::AllGather => ranks as f32,
            Collective::ReduceScatter | Collective::AllReduce => (ranks * (ranks + 1) / 2) as f32,
        }
    }

    /// Bytes that cross each rank's link in one direction, for each byte of the whole tensor.
    fn share(self, ranks: u32) -> f64 {
        let others = f64::from(ranks - 1) / f64::from(ranks);
        if self == Collective::AllReduce { 2.0 * others } else { others }
    }
}

/// What a rank needs for one collective.
struct Tensors {
    source: View,
    dest: View,
}

/// One rank of the bench.
struct Bench<'a> {
    rank: &'a Rank,
    group: &'a Group,
    stream: Stream,
    plain: Option<&'a Member>,
    /// One number that ranks agree on.
    word: View,
}

impl Bench<'_> {
    fn tensors(&self, what: Collective, numel: usize) -> Result<Tensors, Failed> {
        let part = numel / self.rank.world_size as usize;
        let numel = part * self.rank.world_size as usize;
        let (from, to) = match what {
            Collective::AllGather => (part, numel),
            Collective::ReduceScatter => (numel, part),
            Collective::AllReduce => (numel, numel),
        };
        let alloc = |label, numel| self.rank.device.alloc(label, &[numel], DType::F32, MemoryKind::Other);
        let tensors = Tensors { source: alloc("source", from)?, dest: alloc("dest", to)? };
        self.fill(&tensors.source, (self.rank.global.0 + 1) as f32)?;
        Ok(tensors)
    }

    fn fill(&self, y: &View, value: f32) -> Result<(), Failed> {
        Ok(self.stream.launch(Fill { y, value }.op("bench")?)?)
    }

    /// The greatest of all ranks' values. Nobody passes before all have come.
    fn greatest(&self, value: f64) -> Result<f64, Failed> {
        self.stream.upload(&self.word, vec![value as f32])?;
        self.group.all_reduce(&self.stream, &self.word, Reduce::Max)?;
        Ok(f64::from(self.stream.download::<f32>(&self.word)?.wait()?[0]))
    }

    /// Seconds of one of so many calls on the slowest rank.
    fn time(&self, calls: usize, run: impl FnOnce() -> Result<(), Failed>) -> Result<f64, Failed> {
        self.stream.synchronize()?;
        self.greatest(0.0)?;
        let begin = Instant::now();
        run()?;
        self.greatest(begin.elapsed().as_secs_f64() / calls as f64)
    }

    fn ours(&self, what: Collective, tensors: &Tensors, calls: usize) -> Result<(), Failed> {
        let Tensors { source, dest } = tensors;
        for _ in 0..calls {
            match what {
                Collective::AllGather => self.group.all_gather(&self.stream, source, dest)?,
                Collective::ReduceScatter => self.group.reduce_scatter(&self.stream, source, dest, Reduce::Sum)?,
                Collective::AllReduce => self.group.all_reduce_into(&self.stream, source, dest, Reduce::Sum)?,
            }
        }
        Ok(self.stream.synchronize()?)
    }

    /// Ends the process where it fails: the others' calls would wait for this rank's for ever.
    fn direct(&self, plain: &Member, what: Collective, tensors: &Tensors, calls: usize) -> Result<(), Failed> {
        plain.repeat(what, &tensors.source, &tensors.dest, calls).inspect_err(|error| {
            tell(&**error);
            std::process::exit(1);
        })
    }

    /// Whether the last elements are what they must be.
    fn compare(&self, who: &str, what: Collective, tensors: &Tensors) -> Result<(), Failed> {
        let numel = tensors.dest.numel();
        let last = self.stream.download::<f32>(&tensors.dest.flat(numel.saturating_sub(COMPARED)..numel)?)?.wait()?;
        let (want, rank) = (what.expected(self.rank.world_size), self.rank.global);
        match last.iter().find(|value| **value != want) {
            Some(have) => Err(format!("{who} gave rank {rank} {have} where {want} belongs").into()),
            None => Ok(self.fill(&tensors.dest, 0.0)?),
        }
    }

    /// A row of the table.
    fn measure(&self, name: &str, what: Collective, mib: usize) -> Result<String, Failed> {
        let tensors = self.tensors(what, (mib << 20) / DType::F32.size_bytes())?;
        self.time(1, || self.ours(what, &tensors, 1))?;
        self.compare("our group", what, &tensors)?;
        if let Some(plain) = self.plain {
            self.time(1, || self.direct(plain, what, &tensors, 1))?;
            self.compare("NCCL called directly", what, &tensors)?;
        }
        let one = self.time(3, || self.ours(what, &tensors, 3))?;
        let calls = ((SECONDS / one) as usize).clamp(2, 500);
        let (mut all, mut ratios) = (Vec::new(), Vec::new());
        for _ in 0..PAIRS {
            let ours = self.time(calls, || self.ours(what, &tensors, calls))?;
            all.push(ours);
            if let Some(plain) = self.plain {
                ratios.push(self.time(calls, || self.direct(plain, what, &tensors, calls))? / ours);
            }
        }
        let ours = median(&mut all);
        let rate = what.share(self.rank.world_size) * (mib << 20) as f64 / ours / 1e9;
        let row = format!("| {name} | {mib} | {:.1} | {rate:.1} |", ours * 1e6);
        if ratios.is_empty() {
            return Ok(format!("{row} | | |"));
        }
        let ratio = median(&mut ratios);
        let (direct, verdict) = (ratio * ours * 1e6, if ratio >= AIM { "reached" } else { "missed" });
        let (low, high) = (ratios[0], ratios[ratios.len() - 1]);
        Ok(format!("{row} {direct:.1} | {ratio:.3} ({low:.3} to {high:.3}) | {verdict} |"))
    }
}

/// Sorts them.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn one_rank(rank: &Rank, layout: &Layout, plain: Option<&Plain>) -> Result<(), Failed> {
    let groups = ProcessGroups::build(rank, layout, &Needs::keys([Key::DP]))?;
    let stream = rank.device.stream("bench")?;
    let word = rank.device.alloc("word", &[1], DType::F32, MemoryKind::Other)?;
    let plain = plain.map(|plain| plain.member(rank.global.0));
    let bench = Bench { rank, group: groups.get(&Key::DP, "bench")?, stream, plain, word };
    let sizes: &[usize] = if plain.is_some() { &MIB.0 } else { &MIB.1 };
    for (name, what) in Collective::ALL {
        for mib in sizes {
            let row = bench.measure(name, what, *mib)?;
            if rank.global.0 == 0 {
                println!("{row}");
            }
        }
    }
    Ok(())
}

fn run(on_card: bool, ranks: Option<u32>) -> Result<(), Failed> {
    let have = if on_card { cuda::count_cards()? } else { 0 };
    let ranks = ranks.unwrap_or(have.max(2));
    let cards: Vec<u32> = (0..have.min(ranks)).collect();
    let machine = if on_card {
        let options = Options { timeout: Duration::from_secs(30), ..Options::default() };
        Machine::cuda_with(CudaOptions { cards: cards.clone(), ..CudaOptions::default() }, options)?
    } else {
        Machine::cpu(2)?
    };
    let plain = on_card.then(|| Plain::open(ranks, &cards)).transpose()?;
    let layout = Layout::new(&LayoutConfig { dp: Some(ranks), ..LayoutConfig::default() })?;
    println!("{ranks} ranks on {} cards, f32\n", cards.len());
    println!("| collective | MiB | ours, µs | GB/s of a link | direct, µs | direct over ours | at least {AIM} |");
    println!("|---|---:|---:|---:|---:|---:|---|");
    local(&machine, ranks, |rank| one_rank(&rank, &layout, plain.as_ref()))?;
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let result = match &words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => on_cards(None),
        ["--ranks", count] => count.parse().map_err(Failed::from).and_then(|count| on_cards(Some(count))),
        ["--on", "cpu"] => run(false, None),
        ["--on", "cpu", "--ranks", count] => {
            count.parse().map_err(Failed::from).and_then(|count| run(false, Some(count)))
        }
        other => Err(format!("what is {}? There are --on cpu, and then --ranks N", other.join(" ")).into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(&*error);
            ExitCode::FAILURE
        }
    }
}

fn on_cards(ranks: Option<u32>) -> Result<(), Failed> {
    cuda::prepare()?;
    run(true, ranks)
}

fn tell(error: &(dyn Error + 'static)) {
    eprintln!("error: {error}");
    let mut source = error.source();
    while let Some(cause) = source {
        eprintln!("  because {cause}");
        source = cause.source();
    }
}
