//! A tiny GPT learns one line by heart: memory planned on the dry driver, then steps of plain gradient descent, then a
//! sample.
//!
//!     cargo run --release -p model --example 01_memorise

use std::{error::Error, sync::Arc};

use device::{
    DType, Device, Frame, FramePlan, Machine, MemoryKind, Stream, View,
    ops::{Axpy, Factor, Fill},
};
use model::{Arch, Draw, Gpt, GptConfig, GptPlan, Microbatch, Output, Sampling, sample};
use pgroups::{GlobalRank, Layout, LayoutConfig, ParamSet, ParamTypes, Pass, Rank, Seed, Turn, Whole};

type Any = Box<dyn Error>;

const LINE: &[u8] = b"the quick brown fox jumps over the lazy dog";
const STEPS: usize = 60;

/// One rank's model and what it trains on.
struct World {
    gpt: Gpt,
    set: ParamSet,
    device: Device,
    stream: Stream,
    tokens: View,
    targets: View,
    loss: View,
    /// 0: the pass overwrites old gradients.
    keep: View,
}

impl World {
    fn new(machine: &Machine, plan: &GptPlan) -> Result<World, Any> {
        let rank = Rank::alone(machine, GlobalRank(0), 1)?;
        let layout = Layout::new(&LayoutConfig::default())?;
        let set = ParamSet::allocate(&rank, &layout, &plan.specs(), ParamTypes::default())?;
        let gpt = plan.build(set.params())?;
        let device = rank.device;
        let stream = device.stream("compute")?;
        let ids = [1, plan.config().seq_len];
        let other = |label, shape: &[usize], dtype| device.alloc(label, shape, dtype, MemoryKind::Other);
        let (tokens, targets) = (other("tokens", &ids, DType::I32)?, other("targets", &ids, DType::I32)?);
        let (loss, keep) = (other("loss", &[1], DType::F32)?, other("keep", &[1], DType::F32)?);
        set.fill(&stream, Seed(1))?;
        stream.launch(Fill { y: &keep, value: 0.0 }.op("keep")?)?;
        Ok(World { gpt, set, device, stream, tokens, targets, loss, keep })
    }

    /// Forward, backward, and a step downhill.
    fn step(&self, f: &mut Frame) -> Result<(), Any> {
        let tokens = LINE.len() - 1;
        let token_scale = Factor::Const(1.0 / tokens as f32);
        let m = Microbatch { tokens: &self.tokens, targets: &self.targets, loss: &self.loss, token_scale, slot: 0 };
        f.restart();
        let weights = |pass| Whole::keeping(Turn::eager(pass), &self.keep);
        self.gpt.forward_loss(f, &mut weights(Pass::Forward), &m)?;
        self.gpt.backward(f, &mut weights(Pass::Backward), 0)?;
        let descent = Axpy { alpha: Factor::Const(-0.3), x: self.set.grads(), y: self.set.values() };
        Ok(self.stream.launch(descent.op("sgd")?)?)
    }

    /// Continues the first letters.
    fn continue_from(&self, letters: usize) -> Result<String, Any> {
        let len = self.tokens.cols();
        let mut text: Vec<i32> = LINE[..letters].iter().map(|b| i32::from(*b)).collect();
        let mut f = Frame::unplanned(&self.stream, "generation");
        while text.len() <= len {
            let mut padded = text.clone();
            padded.resize(len, 0);
            self.stream.upload(&self.tokens, padded)?;
            f.restart();
            let mut weights = Whole::new(Turn::eager(Pass::Forward));
            let logits = self.gpt.logits(&mut f, &mut weights, &self.tokens, text.len() - 1)?;
            let logits = self.stream.download::<f32>(&logits)?.wait()?;
            let draw = Draw { seed: 1, index: text.len() as u64 };
            text.push(sample(&logits, Sampling::Greedy, draw)? as i32);
        }
        Ok(text.iter().map(|id| char::from(*id as u8)).collect())
    }
}

/// The same step without values: what it asks of its frame becomes the plan.
fn plan_memory(plan: &GptPlan) -> Result<Arc<FramePlan>, Any> {
    let machine = Machine::dry();
    let world = World::new(&machine, plan)?;
    let mut f = Frame::recording(&world.stream, "step");
    machine.trace_start();
    world.step(&mut f)?;
    Ok(Arc::new(f.plan(&machine.trace_stop())?))
}

fn main() -> Result<(), Any> {
    let (arch, layers, dim, heads, output) = (Arch::Gpt2, 2, 64, 4, Output::Tied);
    let seq_len = LINE.len() - 1;
    let config = GptConfig { arch, layers, dim, heads, ffn_dim: 256, vocab: 128, vocab_rows: 128, seq_len, output };
    let plan = GptPlan::new(config)?;
    println!("{} parameters, {} FLOP per token", plan.numel(), plan.flops_per_token());
    let memory = plan_memory(&plan)?;
    println!("{memory}");

    let world = World::new(&Machine::cpu(2)?, &plan)?;
    let ids = |bytes: &[u8]| bytes.iter().map(|b| i32::from(*b)).collect::<Vec<i32>>();
    world.stream.upload(&world.tokens, ids(&LINE[..seq_len]))?;
    world.stream.upload(&world.targets, ids(&LINE[1..]))?;
    let mut frame = Frame::planned(&world.stream, &memory)?;
    for step in 0..=STEPS {
        world.step(&mut frame)?;
        if step % 20 == 0 {
            let loss = world.stream.download::<f32>(&world.loss)?.wait()?[0];
            println!("step {step}: loss {loss:.4}");
        }
    }
    let text = world.continue_from(3)?;
    println!("the -> {text}");
    world.device.synchronize()?;
    if text.as_bytes() == LINE { Ok(()) } else { Err("the line was not learned".into()) }
}
