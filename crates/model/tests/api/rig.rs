//! A model with its memory on one device, to be run and read.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use device::{
    DType, Device, Frame, FramePlan, Machine, MemoryKind, Stream, View, bf16,
    ops::{BiasGrad, Factor},
};
use model::{Arch, Gpt, GptConfig, GptPlan, LlamaConfig, Microbatch, ModelError, Output, RecomputeLayers};
use pgroups::{GradOut, Init, InitStream, Param, Pass, PgError, Seed, Turn, Weights, Whole};

use crate::reference::Values;

/// Sizes that fit nothing evenly.
pub(crate) fn tiny() -> GptConfig {
    let (arch, output) = (Arch::Gpt2, Output::Tied);
    GptConfig { arch, layers: 2, dim: 6, heads: 2, ffn_dim: 10, vocab: 9, vocab_rows: 9, seq_len: 7, output }
}

/// Sizes that kernels cut into several tiles.
pub(crate) fn cut() -> GptConfig {
    let (arch, output) = (Arch::Gpt2, Output::Tied);
    GptConfig { arch, layers: 2, dim: 96, heads: 3, ffn_dim: 384, vocab: 257, vocab_rows: 260, seq_len: 129, output }
}

/// Two key heads for four query heads, two pairs of columns each.
pub(crate) fn tiny_llama() -> GptConfig {
    let arch = Arch::Llama(LlamaConfig { kv_heads: 2, rope_base: 50 });
    let output = Output::Own;
    GptConfig { arch, layers: 2, dim: 16, heads: 4, ffn_dim: 11, vocab: 9, vocab_rows: 9, seq_len: 7, output }
}

pub(crate) fn cut_llama() -> GptConfig {
    let arch = Arch::Llama(LlamaConfig { kv_heads: 2, rope_base: LlamaConfig::ROPE_BASE });
    GptConfig { arch, heads: 6, ffn_dim: LlamaConfig::usual_ffn_dim(96), output: Output::Own, ..cut() }
}

/// Values far enough from the initial ones that every path of the gradient counts: no bias is 0, no norm weight 1.
pub(crate) fn values(plan: &GptPlan, seed: u64) -> BTreeMap<String, Vec<f32>> {
    let of = |p: &model::ModelParam| {
        let std = if plan.config().dim < 32 { 0.3 } else { 0.08 };
        let mut values = vec![0.0; p.numel()];
        InitStream::new(Seed(seed), &p.spec.name, Init::Normal { std }).fill(0, &mut values);
        if p.spec.init == Init::Constant(1.0) {
            values.iter_mut().for_each(|v| *v += 1.0);
        }
        (p.spec.name.clone(), values)
    };
    plan.params().iter().map(of).collect()
}

pub(crate) fn exact(values: &BTreeMap<String, Vec<f32>>) -> Values {
    values.iter().map(|(name, v)| (name.clone(), v.iter().map(|v| f64::from(*v)).collect())).collect()
}

/// Token ids without a pattern.
pub(crate) fn ids(n: usize, vocab: usize, seed: u64) -> Vec<i32> {
    (0..n as u64)
        .map(|i| (pgroups::philox_4x32_10([i as u32, 0, 0, 7], [seed as u32, 1])[0] as usize % vocab) as i32)
        .collect()
}

/// Where gradients of a parameter go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Layout {
    /// Added to the main gradient; the first use in the first microbatch overwrites.
    Main,
    /// A fresh buffer each time, added to the main gradient by `grad_done`, as sharded layouts do.
    Scratch,
    /// Biases, or norms where there are none, to scratch, all else to the main gradient.
    Mixed,
}

pub(crate) struct Rig {
    pub(crate) plan: GptPlan,
    pub(crate) gpt: Gpt,
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) params: Vec<Param>,
    pub(crate) loss: View,
    /// 0 in the first microbatch, then 1.
    pub(crate) keep: View,
}

impl Rig {
    pub(crate) fn new(machine: &Machine, config: GptConfig, values: Option<&BTreeMap<String, Vec<f32>>>) -> Rig {
        Rig::recomputing(machine, config, values, &RecomputeLayers::None)
    }

    pub(crate) fn recomputing(
        machine: &Machine,
        config: GptConfig,
        values: Option<&BTreeMap<String, Vec<f32>>>,
        layers: &RecomputeLayers,
    ) -> Rig {
        Rig::storing(DType::F32, machine, config, values, layers)
    }

    /// Parameters of `dtype`; gradients are f32.
    pub(crate) fn storing(
        dtype: DType,
        machine: &Machine,
        config: GptConfig,
        values: Option<&BTreeMap<String, Vec<f32>>>,
        layers: &RecomputeLayers,
    ) -> Rig {
        let plan = GptPlan::new(config).unwrap();
        let device = machine.device(0).unwrap();
        let stream = device.stream("compute").unwrap();
        let alloc = |label: &str, shape: &[usize], kind| device.alloc(label, shape, DType::F32, kind).unwrap();
        let upload = |value: &View, values: &[f32]| match dtype {
            DType::Bf16 => stream.upload(value, values.iter().map(|x| bf16::from_f32(*x)).collect()).unwrap(),
            _ => stream.upload(value, values.to_vec()).unwrap(),
        };
        let make = |p: &model::ModelParam| {
            let (name, shape) = (p.spec.name.clone(), &p.spec.placement.global);
            let value = device.alloc(&name, shape, dtype, MemoryKind::Param).unwrap();
            if let Some(values) = values {
                upload(&value, &values[&name]);
            }
            let grad = alloc(&format!("{name}.grad"), shape, MemoryKind::Grad);
            Param::new(&name, &value, &grad).unwrap()
        };
        let params: Vec<Param> = plan.params().iter().map(make).collect();
        let gpt = plan.build_with(&params, layers).unwrap();
        let scalar = |label| alloc(label, &[], MemoryKind::Other);
        let (loss, keep) = (scalar("loss"), scalar("keep"));
        Rig { plan, gpt, device, stream, params, loss, keep }
    }

    pub(crate) fn ids(&self, label: &str, ids: &[i32], len: usize) -> View {
        let shape = [ids.len() / len, len];
        let view = self.device.alloc(label, &shape, DType::I32, MemoryKind::Other).unwrap();
        self.stream.upload(&view, ids.to_vec()).unwrap();
        view
    }

    pub(crate) fn weights(&self, layout: Layout, pass: Pass) -> Books<'_> {
        let whole = Whole::keeping(Turn::eager(pass), &self.keep);
        Books { rig: self, layout, whole, open: HashMap::new(), scratch: HashMap::new() }
    }

    /// The device's flag: 0 before the first microbatch, 1 before later ones.
    pub(crate) fn set_keep(&self, keep: f32) {
        self.stream.upload(&self.keep, vec![keep]).unwrap();
    }

    /// One microbatch, forward and backward, in `frame`.
    pub(crate) fn run(
        &self,
        frame: &mut Frame,
        layout: Layout,
        [tokens, targets]: [&View; 2],
        scale: f32,
    ) -> Result<(), ModelError> {
        let mut w = self.weights(layout, Pass::Forward);
        let m = Microbatch { tokens, targets, loss: &self.loss, token_scale: Factor::Const(scale), slot: 0 };
        self.gpt.forward_loss(frame, &mut w, &m)?;
        w.settled();
        let mut w = self.weights(layout, Pass::Backward);
        self.gpt.backward(frame, &mut w, 0)?;
        w.settled();
        Ok(())
    }

    pub(crate) fn read(&self, view: &View) -> Vec<f32> {
        self.stream.download(view).unwrap().wait().unwrap()
    }

    /// The loss and every gradient, by name.
    pub(crate) fn results(&self) -> (f32, BTreeMap<String, Vec<f32>>) {
        let grads = self.params.iter().map(|p| (p.name().to_owned(), self.read(&p.main_grad()))).collect();
        (self.read(&self.loss)[0], grads)
    }
}

/// Loss and gradients of the mean over microbatches, which are run one after the other.
pub(crate) struct Case<'a> {
    pub(crate) config: GptConfig,
    pub(crate) values: &'a BTreeMap<String, Vec<f32>>,
    /// Tokens and targets of each microbatch.
    pub(crate) microbatches: &'a [(Vec<i32>, Vec<i32>)],
    pub(crate) len: usize,
    pub(crate) recompute: RecomputeLayers,
}

pub(crate) type Results = (Vec<f32>, BTreeMap<String, Vec<f32>>);

impl Case<'_> {
    /// Without a plan.
    pub(crate) fn run(&self, machine: &Machine, layout: Layout) -> Results {
        self.run_in(machine, layout, None)
    }

    pub(crate) fn run_in(&self, machine: &Machine, layout: Layout, plan: Option<&Arc<FramePlan>>) -> Results {
        self.run_storing(DType::F32, machine, layout, plan)
    }

    /// Parameters and activations of `dtype`.
    pub(crate) fn run_storing(
        &self,
        dtype: DType,
        machine: &Machine,
        layout: Layout,
        plan: Option<&Arc<FramePlan>>,
    ) -> Results {
        let rig = Rig::storing(dtype, machine, self.config.clone(), Some(self.values), &self.recompute);
        let mut frame = match plan {
            Some(plan) => Frame::planned(&rig.stream, plan).unwrap(),
            None => Frame::unplanned(&rig.stream, "frame"),
        };
        let mut losses = Vec::new();
        for (i, (tokens, targets)) in self.microbatches.iter().enumerate() {
            let scale = 1.0 / (tokens.len() * self.microbatches.len()) as f32;
            let (tokens, targets) = (rig.ids("tokens", tokens, self.len), rig.ids("targets", targets, self.len));
            rig.set_keep(if i == 0 { 0.0 } else { 1.0 });
            frame.restart();
            rig.run(&mut frame, layout, [&tokens, &targets], scale).unwrap();
            losses.push(rig.read(&rig.loss)[0]);
        }
        (losses, rig.results().1)
    }

    /// The plan that a dry pass over one microbatch gives.
    pub(crate) fn plan(&self) -> Arc<FramePlan> {
        self.plan_storing(DType::F32)
    }

    pub(crate) fn plan_storing(&self, dtype: DType) -> Arc<FramePlan> {
        let machine = Machine::dry();
        let rig = Rig::storing(dtype, &machine, self.config.clone(), None, &self.recompute);
        let mut frame = Frame::recording(&rig.stream, "frame");
        let (tokens, targets) = &self.microbatches[0];
        let (tokens, targets) = (rig.ids("tokens", tokens, self.len), rig.ids("targets", targets, self.len));
        machine.trace_start();
        rig.run(&mut frame, Layout::Main, [&tokens, &targets], 1.0).unwrap();
        Arc::new(frame.plan(&machine.trace_stop()).unwrap())
    }
}

/// [`Whole`] with books: what is taken must be given back, a gradient that is asked for must be done. Sends gradients
/// through scratch where the layout says so.
pub(crate) struct Books<'a> {
    rig: &'a Rig,
    layout: Layout,
    whole: Whole<'a>,
    /// Takes without their give-back, gradients without their done.
    open: HashMap<(String, &'static str), i32>,
    /// Scratch of a gradient, and where it goes when it is done.
    scratch: HashMap<String, (View, GradOut)>,
}

impl Books<'_> {
    fn book(&mut self, p: &Param, what: &'static str, by: i32) {
        let count = self.open.entry((p.name().to_owned(), what)).or_default();
        *count += by;
        assert!(*count >= 0, "{what} of {} ended before it began", p.name());
    }

    pub(crate) fn settled(&self) {
        let left: Vec<_> = self.open.iter().filter(|(_, n)| **n != 0).collect();
        assert!(left.is_empty(), "left open: {left:?}");
    }

    fn goes_through_scratch(&self, p: &Param) -> bool {
        match self.layout {
            Layout::Main => false,
            Layout::Scratch => true,
            Layout::Mixed => p.name().ends_with(".bias") || p.name().contains("norm"),
        }
    }
}

impl Weights for Books<'_> {
    fn take(&mut self, p: &Param, on: &Stream) -> Result<View, PgError> {
        self.book(p, "take", 1);
        self.whole.take(p, on)
    }

    fn give_back(&mut self, p: &Param, on: &Stream) -> Result<(), PgError> {
        self.book(p, "take", -1);
        self.whole.give_back(p, on)
    }

    fn grad(&mut self, p: &Param, on: &Stream) -> Result<GradOut, PgError> {
        self.book(p, "grad", 1);
        let main = self.whole.grad(p, on)?;
        if !self.goes_through_scratch(p) {
            return Ok(main);
        }
        let shape = p.main_grad().shape_value();
        let scratch = self.rig.device.alloc("scratch", shape.dims(), DType::F32, MemoryKind::Grad).unwrap();
        self.scratch.insert(p.name().to_owned(), (scratch.clone(), main));
        Ok(GradOut::Scratch(scratch))
    }

    fn grad_done(&mut self, p: &Param, on: &Stream) -> Result<(), PgError> {
        self.book(p, "grad", -1);
        if let Some((scratch, main)) = self.scratch.remove(p.name()) {
            let ((grad, into), flat) = (main.target(), [scratch.numel()]);
            let (dy, dbias) = (scratch.reshape(&flat).unwrap(), grad.reshape(&flat).unwrap());
            on.launch(BiasGrad { dy: &dy, dbias: &dbias, into }.op("main_grad").unwrap()).unwrap();
        }
        self.whole.grad_done(p, on)
    }

    fn enter(&mut self, pass: Pass) -> Pass {
        self.whole.enter(pass)
    }
}
