//! What recording a trace costs a training step: recorded steps and plain ones in turns, in one process.
//!
//! ```text
//! cargo bench -p trainer --bench recording -- --rounds 31
//! ```
//!
//! Forward, backward and plain descent of a small GPT, one rank, one worker; the host waits for each step, so what it
//! submits later than it could shows.

use std::{error::Error, sync::Arc, time::Instant};

use device::{
    DType, Device, Frame, FramePlan, Machine, MemoryKind, Stream, View,
    ops::{Axpy, Factor, Fill},
};
use model::{Arch, Gpt, GptConfig, GptPlan, Microbatch, Output};
use pgroups::{GlobalRank, Layout, LayoutConfig, ParamSet, ParamTypes, Pass, Rank, Seed, Turn, Whole};

type Failed = Box<dyn Error + Send + Sync>;

/// Sequences of a step.
const BATCH: usize = 4;

/// Name, width, sequence length.
const CASES: [(&str, usize, usize); 3] = [("384 wide", 384, 256), ("128 wide", 128, 128), ("32 wide", 32, 32)];

fn main() -> Result<(), Failed> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let after = |flag: &str| words.iter().position(|word| word == flag).and_then(|at| words.get(at + 1));
    let rounds: usize = after("--rounds").map_or(Ok(31), |word| word.parse())?;
    println!("6 layers, {BATCH} sequences; {rounds} plain and {rounds} recorded steps in turns");
    println!(
        "{:12}{:>12}{:>12}{:>10}{:>18}{:>10}",
        "", "plain, ms", "recorded", "of best", "median of pairs", "events"
    );
    for (name, dim, seq_len) in CASES {
        let (arch, output) = (Arch::Gpt2, Output::Tied);
        let (ffn_dim, vocab) = (4 * dim, 256);
        let config = GptConfig { arch, layers: 6, dim, heads: 4, ffn_dim, vocab, vocab_rows: vocab, seq_len, output };
        let plan = GptPlan::new(config)?;
        let run = Run::new(&Machine::cpu(1)?, &plan)?;
        let mut frame = Frame::planned(&run.stream, &memory(&plan)?)?;
        // Once for caches and pages.
        run.timed(&mut frame)?;
        run.recorded(&mut frame)?;
        let mut pairs: Vec<(f64, f64)> = Vec::new();
        let mut events = 0;
        for _ in 0..rounds {
            let plain = run.timed(&mut frame)?;
            let (recorded, count) = run.recorded(&mut frame)?;
            pairs.push((plain, recorded));
            events = count;
        }
        let best = |of: fn(&(f64, f64)) -> f64| pairs.iter().map(of).fold(f64::INFINITY, f64::min);
        let (plain, recorded) = (best(|pair| pair.0), best(|pair| pair.1));
        let mut ratios: Vec<f64> = pairs.iter().map(|pair| pair.1 / pair.0).collect();
        ratios.sort_by(f64::total_cmp);
        let (ratio, median) = (recorded / plain, ratios[rounds / 2]);
        println!("{name:12}{:12.3}{:12.3}{ratio:10.3}{median:18.3}{events:10}", plain * 1e3, recorded * 1e3);
    }
    Ok(())
}

/// One rank's model and what it trains on.
struct Run {
    machine: Machine,
    gpt: Gpt,
    set: ParamSet,
    device: Device,
    stream: Stream,
    tokens: View,
    loss: View,
    /// 0: the pass overwrites old gradients.
    keep: View,
}

impl Run {
    fn new(machine: &Machine, plan: &GptPlan) -> Result<Run, Failed> {
        let rank = Rank::alone(machine, GlobalRank(0), 1)?;
        let layout = Layout::new(&LayoutConfig::default())?;
        let set = ParamSet::allocate(&rank, &layout, &plan.specs(), ParamTypes::default())?;
        let gpt = plan.build(set.params())?;
        let device = rank.device;
        let stream = device.stream("compute")?;
        let other = |label, shape: &[usize], dtype| device.alloc(label, shape, dtype, MemoryKind::Other);
        let tokens = other("tokens", &[BATCH, plan.config().seq_len], DType::I32)?;
        let (loss, keep) = (other("loss", &[1], DType::F32)?, other("keep", &[1], DType::F32)?);
        set.fill(&stream, Seed(1))?;
        stream.launch(Fill { y: &keep, value: 0.0 }.op("keep")?)?;
        let ids: Vec<i32> = (0..tokens.numel() as i32).map(|i| i * i % 251).collect();
        stream.upload(&tokens, ids)?;
        device.synchronize()?;
        Ok(Run { machine: machine.clone(), gpt, set, device, stream, tokens, loss, keep })
    }

    fn submit(&self, f: &mut Frame) -> Result<(), Failed> {
        let token_scale = Factor::Const(1.0 / self.tokens.numel() as f32);
        let (tokens, loss) = (&self.tokens, &self.loss);
        let microbatch = Microbatch { tokens, targets: tokens, loss, token_scale, slot: 0 };
        f.restart();
        let weights = |pass| Whole::keeping(Turn::eager(pass), &self.keep);
        self.gpt.forward_loss(f, &mut weights(Pass::Forward), &microbatch)?;
        self.gpt.backward(f, &mut weights(Pass::Backward), 0)?;
        let descent = Axpy { alpha: Factor::Const(-1e-3), x: self.set.grads(), y: self.set.values() };
        Ok(self.stream.launch(descent.op("descent")?)?)
    }

    /// Seconds.
    fn timed(&self, f: &mut Frame) -> Result<f64, Failed> {
        let begin = Instant::now();
        self.submit(f)?;
        self.device.synchronize()?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Seconds, and how many events were recorded.
    fn recorded(&self, f: &mut Frame) -> Result<(f64, usize), Failed> {
        self.machine.trace_start();
        let seconds = self.timed(f)?;
        Ok((seconds, self.machine.trace_stop().events.len()))
    }
}

/// The same step without values: what it asks of its frame becomes the plan.
fn memory(plan: &GptPlan) -> Result<Arc<FramePlan>, Failed> {
    let machine = Machine::dry();
    let run = Run::new(&machine, plan)?;
    let mut f = Frame::recording(&run.stream, "step");
    machine.trace_start();
    run.submit(&mut f)?;
    Ok(Arc::new(f.plan(&machine.trace_stop())?))
}
