//! Data-parallel training over unequal samples, eagerly or by replays: what the claims about real backends run.

use ddp::{
    AdamConfig, BucketSize, Ddp, DdpConfig, DeclaredParam, Optimizer, OptimizerConfig, ParamBuffers, PlanConfig,
    Sharding,
};
use device::{DType, Device, GraphOrder, Machine, Note, Stream, View, ops::Cast};
use graphcap::{CaptureScope, GateMode, Graph, GraphConfig, GraphSet, Scope};
use pgroups::{
    GlobalRank, Init, Key, Layout, LayoutConfig, Needs, Param, ParamClass, ParamSpec, Pass, PgError, Placement,
    ProcessGroups, Rank, Seed, Turn, Weights, Whole, local,
};

use super::{
    support::{Caught, floats, fold, get, order},
    training_ops::{WIDTH, dgrad, early, forward, loss, wgrad},
};

/// Elements of the weights of each layer: none divides the other.
const SIZES: [usize; 3] = [40, 90, 30];
const STEPS: usize = 3;
const MICROBATCHES: usize = 2;

/// How a program runs.
#[derive(Clone)]
pub(crate) struct Program {
    /// How it is cut into pieces.
    pub(crate) scope: Scope,
    /// None: eagerly.
    pub(crate) gates: Option<GateMode>,
    /// Member lists of the replicas.
    pub(crate) replicas: Vec<Vec<u32>>,
    pub(crate) warm_ups: usize,
    /// Captures that fail half way, before the ones that count.
    pub(crate) failures: usize,
}

impl Program {
    pub(crate) fn eager(scope: Scope) -> Program {
        Program { scope, gates: None, replicas: vec![vec![0, 1]], warm_ups: 0, failures: 0 }
    }

    pub(crate) fn captured(scope: Scope, gates: GateMode) -> Program {
        Program { gates: Some(gates), ..Program::eager(scope) }
    }

    fn world(&self) -> u32 {
        self.replicas.iter().map(|list| list.len() as u32).sum()
    }

    /// Runs the whole program; per rank the bits of everything there is in the end.
    pub(crate) fn run(&self, machine: &Machine, mutate: Mutation<'_>) -> Result<Vec<Vec<u32>>, PgError> {
        local(machine, self.world(), |rank| {
            let mut trainer = Trainer::new(&rank, self, "m")?;
            mutate(&trainer);
            let graphs = trainer.prepare()?;
            for step in 0..STEPS {
                trainer.step(graphs.as_ref(), step)?;
            }
            trainer.finish()
        })
    }
}

/// What a test does to a rank before its first step.
pub(crate) type Mutation<'m> = &'m (dyn Fn(&Trainer) + Sync);

pub(crate) fn nothing(_: &Trainer) {}

/// One rank.
pub(crate) struct Trainer {
    program: Program,
    pub(crate) device: Device,
    rank: u32,
    pub(crate) compute: Stream,
    wgrad: Stream,
    optimizing: Stream,
    evaluating: Stream,
    pub(crate) buffers: ParamBuffers,
    pub(crate) ddp: Ddp,
    pub(crate) optimizer: Optimizer,
    /// Samples, by microbatch, where a whole step is captured.
    inputs: Vec<View>,
    /// Inputs of the layers, and the output.
    acts: Vec<View>,
    /// Gradients of them.
    dacts: Vec<View>,
    seen: Vec<View>,
    seen_all: View,
}

/// The graphs of a rank.
pub(crate) struct Graphs {
    pub(crate) training: GraphSet,
    pub(crate) evaluation: GraphSet,
}

impl Trainer {
    /// `name` keeps two models apart.
    pub(crate) fn new(rank: &Rank, program: &Program, name: &str) -> Result<Trainer, Caught> {
        let world = program.world();
        let layout = Layout::new(&LayoutConfig { dp: Some(world), ..LayoutConfig::default() })?;
        let lists = program.replicas.iter().map(|list| list.iter().map(|&rank| GlobalRank(rank)).collect());
        let needs = Needs { custom: vec![(Key::DP_CP, lists.collect())], ..Needs::keys([Key::DP_CP_GTP, Key::MP]) };
        let groups = ProcessGroups::build(rank, &layout, &needs)?;
        let device = rank.device.clone();
        let stream = |what: &str| device.stream(&format!("{name}.{what}"));
        let [compute, wgrad, optimizing, evaluating] = ["compute", "wgrad", "optimizer", "evaluation"].map(stream);
        let (compute, wgrad, optimizing, evaluating) = (compute?, wgrad?, optimizing?, evaluating?);
        let declared: Vec<DeclaredParam> = (0..).zip(SIZES).map(|(i, numel)| declared(name, i, numel)).collect();
        let dp = program.replicas[0].len() as u32;
        let sharding = Sharding::On { dense: dp, expert: dp };
        let plan = PlanConfig { bucket_size: BucketSize::PerUnit, sharding, ..PlanConfig::default() };
        let buffers = ParamBuffers::allocate(rank, &layout, &declared, plan)?;
        buffers.fill(&compute, Seed(7))?;
        let ddp = Ddp::attach(&buffers, &groups, DdpConfig::default(), &compute)?;
        let config =
            OptimizerConfig { adam: AdamConfig { clip: 0.5, ..AdamConfig::default() }, ..OptimizerConfig::default() };
        let optimizer = Optimizer::new(&ddp, &groups, config, |_| 0, &compute)?;
        let some = |label: &str| (0..=SIZES.len()).map(|_| floats(&device, label, WIDTH)).collect::<Vec<View>>();
        let (acts, dacts, seen, inputs) = (some("act"), some("dact"), some("seen"), some("input"));
        let seen_all = floats(&device, "seen all", WIDTH);
        for view in acts.iter().chain(&dacts).chain(&seen).chain(&inputs).chain([&seen_all]) {
            compute.upload(view, vec![0.25f32; WIDTH])?;
        }
        device.synchronize()?;
        let (program, rank) = (program.clone(), rank.global.0);
        Ok(Trainer {
            program,
            device,
            rank,
            compute,
            wgrad,
            optimizing,
            evaluating,
            buffers,
            ddp,
            optimizer,
            inputs,
            acts,
            dacts,
            seen,
            seen_all,
        })
    }

    pub(crate) fn param(&self, i: usize) -> &Param {
        &self.buffers.params()[i]
    }

    /// Captures what the program wants captured.
    pub(crate) fn prepare(&mut self) -> Result<Option<Graphs>, Caught> {
        if self.program.scope == Scope::Step {
            return self.prepare_step();
        }
        let (scope, Some(gates)) = (self.program.scope, self.program.gates) else { return Ok(None) };
        // Both orders have their turn, each with one mode of gates.
        let order = if gates == GateMode::InGraph { GraphOrder::Accesses } else { GraphOrder::Submission };
        let config = GraphConfig { gates, order, ..GraphConfig::new(scope) };
        let mut training = GraphSet::new(&self.compute, config.clone())?;
        let mut evaluation = GraphSet::new(&self.evaluating, config)?;
        for _ in 0..self.program.failures {
            let failing = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
                self.pieces().iter().try_for_each(|piece| self.run_piece(piece, Some(scope)))?;
                Err("planted".into())
            };
            let failed = training.capture("failing", &self.compute, failing).map(drop);
            assert!(failed.unwrap_err().to_string().contains("nothing is left of the capture"));
        }
        for (at, part) in self.parts().iter().enumerate() {
            let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
                if at == 0 {
                    scope.input("x", &self.acts[0])?;
                }
                part.iter().try_for_each(|piece| self.run_piece(piece, Some(scope)))
            };
            training.capture(&format!("training.{at}"), &self.compute, body)?;
        }
        evaluation.capture("evaluation", &self.evaluating, |scope| self.evaluate(scope.turn(Pass::Forward)))?;
        training.warm_up(&self.compute, self.program.warm_ups)?;
        evaluation.warm_up(&self.evaluating, self.program.warm_ups)?;
        Ok(Some(Graphs { training, evaluation }))
    }

    /// Captures everything as one.
    fn prepare_step(&mut self) -> Result<Option<Graphs>, Caught> {
        let Some(gates) = self.program.gates else { return Ok(None) };
        let accounts = vec![self.ddp.account(), self.optimizer.account()];
        let order = GraphOrder::Accesses;
        let config = GraphConfig { gates, order, accounts, ..GraphConfig::new(Scope::Step) };
        let compute = self.compute.clone();
        let mut training = GraphSet::new(&compute, config)?;
        let evaluation = GraphSet::new(&self.evaluating, GraphConfig::new(Scope::Chunk))?;
        training.capture("step", &compute, |scope| -> Result<(), Caught> {
            (0..MICROBATCHES).try_for_each(|i| scope.input(&format!("x{i}"), &self.inputs[i]))?;
            self.whole_step(Some(scope))
        })?;
        training.warm_up(&compute, self.program.warm_ups)?;
        Ok(Some(Graphs { training, evaluation }))
    }

    /// What a graph of a step holds.
    fn whole_step(&mut self, mut scope: Option<&mut CaptureScope<'_>>) -> Result<(), Caught> {
        for microbatch in 0..MICROBATCHES {
            let paused = (microbatch + 1 < MICROBATCHES).then(|| self.ddp.no_sync());
            self.ddp.begin_microbatch(&self.compute)?;
            self.compute.launch(Cast { x: &self.inputs[microbatch], y: &self.acts[0] }.op("x")?)?;
            self.pieces().iter().try_for_each(|piece| self.run_piece(piece, scope.as_deref_mut()))?;
            self.ddp.end_microbatch(&self.compute)?;
            drop(paused);
        }
        self.ddp.finish_grads()?;
        let optimizing = self.optimizing.clone();
        Ok(self.optimizer.step_at_rates(&optimizing)?)
    }

    /// Samples of a microbatch: every rank has its own.
    pub(crate) fn sample(&self, step: usize, microbatch: usize) -> Result<View, Caught> {
        let x = floats(&self.device, "x", WIDTH);
        let salt = (self.rank * 11 + 3 * step as u32 + microbatch as u32) as f32;
        self.compute.upload(&x, (0..WIDTH).map(|k| ((k as f32 + salt) * 0.37).sin()).collect())?;
        Ok(x)
    }

    /// A microbatch cut into graphs.
    fn parts(&self) -> Vec<Vec<Piece>> {
        let pieces = self.pieces();
        match self.program.scope {
            Scope::Layer => pieces.into_iter().map(|piece| vec![piece]).collect(),
            Scope::Chunk => {
                let backward = pieces.iter().position(|piece| !matches!(piece, Piece::Forward(_))).unwrap();
                vec![pieces[..backward].to_vec(), pieces[backward..].to_vec()]
            }
            Scope::Microbatch | Scope::Step => vec![pieces],
        }
    }

    fn pieces(&self) -> Vec<Piece> {
        let layers = SIZES.len();
        let forward = (0..layers).map(Piece::Forward);
        let backward = std::iter::once(Piece::Loss).chain((0..layers).rev().map(Piece::Backward));
        match self.program.scope {
            Scope::Microbatch | Scope::Step => {
                std::iter::once(Piece::Early).chain(forward).chain(backward).chain([Piece::Join]).collect()
            }
            Scope::Layer | Scope::Chunk => forward.chain(backward).collect(),
        }
    }

    pub(crate) fn step(&mut self, graphs: Option<&Graphs>, step: usize) -> Result<(), Caught> {
        self.device.note(|| Note::Step(step as u64));
        let optimizing = self.optimizing.clone();
        self.optimizer.set_rates(&optimizing, &[0.01 * (step + 1) as f32])?;
        if self.program.scope == Scope::Step {
            let given = [self.sample(step, 0)?, self.sample(step, 1)?];
            if let Some(graphs) = graphs {
                let given = [("x0", (&given[0]).into()), ("x1", (&given[1]).into())];
                return Ok(graphs.training.graphs()[0].replay(&self.compute, &given)?);
            }
            for (x, slot) in given.iter().zip(&self.inputs) {
                self.compute.launch(Cast { x, y: slot }.op("x")?)?;
            }
            return self.whole_step(None);
        }
        for microbatch in 0..MICROBATCHES {
            let paused = (microbatch + 1 < MICROBATCHES).then(|| self.ddp.no_sync());
            self.microbatch(graphs, step, microbatch)?;
            drop(paused);
        }
        self.ddp.finish_grads()?;
        match graphs {
            Some(graphs) => graphs.evaluation.graphs()[0].replay(&self.evaluating, &[])?,
            None => self.evaluate(Turn::eager(Pass::Forward))?,
        }
        Ok(self.optimizer.step_at_rates(&optimizing)?)
    }

    fn microbatch(&self, graphs: Option<&Graphs>, step: usize, microbatch: usize) -> Result<(), Caught> {
        self.ddp.begin_microbatch(&self.compute)?;
        let x = self.sample(step, microbatch)?;
        match graphs {
            Some(graphs) => {
                for (at, graph) in graphs.training.graphs().iter().enumerate() {
                    let given = [("x", (&x).into())];
                    graph.replay(&self.compute, if at == 0 { &given } else { &[] })?;
                }
            }
            None => {
                self.compute.launch(Cast { x: &x, y: &self.acts[0] }.op("x")?)?;
                self.pieces().iter().try_for_each(|piece| self.run_piece(piece, None))?;
            }
        }
        Ok(self.ddp.end_microbatch(&self.compute)?)
    }

    fn run_piece(&self, piece: &Piece, scope: Option<&mut CaptureScope<'_>>) -> Result<(), Caught> {
        let pass = if matches!(piece, Piece::Forward(_)) { Pass::Forward } else { Pass::Backward };
        let mut weights = Whole::new(match scope {
            Some(scope) => scope.turn(pass),
            None => Turn::eager(pass),
        });
        match *piece {
            Piece::Early => {
                order(&self.compute, &self.wgrad, "test.fork")?;
                let grad = weights.grad(self.param(2), &self.wgrad)?;
                self.wgrad.launch(early(&grad, 0.125 * (self.rank + 1) as f32))?;
                Ok(weights.grad_done(self.param(2), &self.wgrad)?)
            }
            Piece::Forward(i) => {
                let w = weights.take(self.param(i), &self.compute)?;
                self.compute.launch(forward(&self.acts[i], &w, &self.acts[i + 1], format!("h{i}")))?;
                Ok(weights.give_back(self.param(i), &self.compute)?)
            }
            Piece::Loss => {
                let (y, dy) = (&self.acts[SIZES.len()], &self.dacts[SIZES.len()]);
                Ok(self.compute.launch(loss(y, dy))?)
            }
            Piece::Backward(i) => self.backward(i, &mut weights),
            Piece::Join => Ok(order(&self.wgrad, &self.compute, "test.join")?),
        }
    }

    /// The weight's gradient on a stream of its own, joined where its graph ends.
    fn backward(&self, i: usize, weights: &mut Whole<'_>) -> Result<(), Caught> {
        order(&self.compute, &self.wgrad, "test.wgrad")?;
        let grad = weights.grad(self.param(i), &self.wgrad)?;
        self.wgrad.launch(wgrad(&self.acts[i], &self.dacts[i + 1], &grad, format!("h{i}")))?;
        weights.grad_done(self.param(i), &self.wgrad)?;
        let w = weights.take(self.param(i), &self.compute)?;
        self.compute.launch(dgrad(&self.dacts[i + 1], &w, &self.dacts[i], format!("h{i}")))?;
        weights.give_back(self.param(i), &self.compute)?;
        match self.program.scope {
            Scope::Layer | Scope::Chunk => Ok(order(&self.wgrad, &self.compute, "test.join")?),
            Scope::Microbatch | Scope::Step => Ok(()),
        }
    }

    /// On its own stream, of the values that the step is about to overwrite.
    fn evaluate(&self, turn: Turn<'_>) -> Result<(), Caught> {
        let mut weights = Whole::new(turn);
        for i in 0..SIZES.len() {
            let w = weights.take(self.param(i), &self.evaluating)?;
            self.evaluating.launch(forward(&self.seen[i], &w, &self.seen[i + 1], format!("seen{i}")))?;
            weights.give_back(self.param(i), &self.evaluating)?;
        }
        Ok(self.evaluating.launch(fold(&self.seen[SIZES.len()], &self.seen_all))?)
    }

    /// All values, moments, counts, activations.
    pub(crate) fn finish(self) -> Result<Vec<u32>, Caught> {
        self.ddp.publish(&self.compute)?;
        let all = self.snapshot()?;
        self.device.synchronize()?;
        Ok(all)
    }

    /// Every byte that training can see, and what the host keeps account of.
    pub(crate) fn snapshot(&self) -> Result<Vec<u32>, Caught> {
        self.device.synchronize()?;
        let mut views: Vec<View> = Vec::new();
        views.extend(self.ddp.buckets().flat_map(|bucket| [bucket.values, bucket.grads]));
        views.extend(self.optimizer.state().flat_map(|state| [state.values, state.m, state.v]).cloned());
        views.extend([self.optimizer.grad_norm().clone(), self.ddp.keep().clone(), self.seen_all.clone()]);
        views.extend(self.acts.iter().chain(&self.dacts).chain(&self.seen).cloned());
        let mut all: Vec<u32> =
            views.iter().flat_map(|view| get::<f32>(&self.compute, view)).map(f32::to_bits).collect();
        all.extend(get::<i32>(&self.compute, self.optimizer.steps(0)).into_iter().map(|count| count as u32));
        Ok(all)
    }

    /// What the host keeps account of.
    pub(crate) fn accounts(&self) -> Vec<String> {
        let epochs = self.buffers.params().iter().filter_map(|p| p.publisher()).map(|p| format!("{:?}", p.epochs()));
        let backend = [format!("{:?}", self.ddp.counters()), format!("{:?}", self.ddp.publications())];
        epochs.chain(backend).collect()
    }
}

/// Part of a microbatch.
#[derive(Clone, Copy)]
enum Piece {
    /// A gradient that needs nothing of this pass.
    Early,
    Forward(usize),
    Loss,
    Backward(usize),
    Join,
}

fn declared(model: &str, i: usize, numel: usize) -> DeclaredParam {
    let init = Init::Uniform { low: -1.0, high: 1.0 };
    let (name, placement) = (format!("{model}.p{i}"), Placement::whole([numel]));
    DeclaredParam::new(ParamSpec { name, class: ParamClass::Dense, placement, init }, DType::F32)
}

pub(crate) fn replays(graphs: &[Graph]) -> Vec<u64> {
    graphs.iter().map(Graph::replays).collect()
}
