//! Short forms for tests that run ranks.

use std::{error::Error as StdError, sync::Arc, time::Duration};

use ddp::{
    BucketSize, Ddp, DdpConfig, DdpError, DeclaredParam, Optimizer, OptimizerConfig, ParamBuffers, PlanConfig, Sharding,
};
use device::{
    Access, DType, Device, Element, Fresh, Machine, MemoryKind, Op, Options, Stream, View, bf16, ops::Accumulate,
};
use pgroups::{
    GlobalRank, Init, Key, Layout, LayoutConfig, Needs, Param, ParamClass, ParamSpec, Pass, Placement, ProcessGroups,
    Rank, Seed, Turn, Weights, Whole, local,
};

pub(crate) type Caught = Box<dyn StdError + Send + Sync>;

/// Machines on which values must agree bit for bit, where sums over ranks do not depend on their order.
pub(crate) fn machines() -> Vec<Machine> {
    hosts().into_iter().chain(cards()).collect()
}

/// Machines on which sums over ranks have one order.
pub(crate) fn hosts() -> Vec<Machine> {
    vec![cpu(), sim(1), sim(2)]
}

/// Gives up after seconds without progress, so that no test hangs; fresh memory holds NaN.
fn options() -> Options {
    Options { timeout: Duration::from_secs(5), fresh: Fresh::Poisoned }
}

pub(crate) fn cpu() -> Machine {
    Machine::cpu_with(2, options()).unwrap()
}

pub(crate) fn sim(seed: u64) -> Machine {
    Machine::sim_with(seed, options())
}

/// The first card, if the tests were built for one.
pub(crate) fn cards() -> Vec<Machine> {
    crate::cards::cards(device::cuda::CudaOptions::default(), options())
}

/// A dense parameter whose elements all begin as `value`.
pub(crate) fn constant(name: &str, shape: &[usize], value: f32) -> DeclaredParam {
    let placement = Placement::whole(shape);
    let init = Init::Constant(value);
    let spec = ParamSpec { name: name.to_owned(), class: ParamClass::Dense, placement, init };
    DeclaredParam::new(spec, DType::F32)
}

/// Dense parameters `p0`, `p1`, ... with random initial values.
pub(crate) fn declared(sizes: &[usize]) -> Vec<DeclaredParam> {
    let random = |(i, &numel): (usize, &usize)| {
        let mut param = constant(&format!("p{i}"), &[numel], 0.0);
        param.spec.init = Init::Uniform { low: -1.0, high: 1.0 };
        param
    };
    sizes.iter().enumerate().map(random).collect()
}

/// What a test wants to differ.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) layout: LayoutConfig,
    /// Member lists of the replicas, if they are not the layout's.
    pub(crate) replicas: Vec<Vec<u32>>,
    pub(crate) declared: Vec<DeclaredParam>,
    pub(crate) plan: PlanConfig,
    pub(crate) ddp: DdpConfig,
}

impl Setup {
    /// `dp` replicas, a bucket for each parameter.
    pub(crate) fn new(dp: u32, declared: Vec<DeclaredParam>) -> Setup {
        Setup {
            layout: LayoutConfig { dp: Some(dp), ..LayoutConfig::default() },
            replicas: Vec::new(),
            declared,
            plan: PlanConfig { bucket_size: BucketSize::PerUnit, ..PlanConfig::default() },
            ddp: DdpConfig::default(),
        }
    }

    /// With sharding over as many ranks as there are replicas.
    pub(crate) fn sharded(mut self) -> Setup {
        let dp = self.replica_count();
        self.plan.sharding = Sharding::On { dense: dp, expert: dp };
        self
    }

    pub(crate) fn replica_count(&self) -> u32 {
        self.replicas.first().map_or(self.layout.dp.unwrap(), |list| list.len() as u32)
    }

    fn layout(&self) -> Layout {
        Layout::new(&self.layout).unwrap()
    }

    fn needs(&self) -> Needs {
        let keys = [Key::DP_CP, Key::DP_CP_GTP, Key::MP, Key::EXPT_DP, Key::TP_EP_PP];
        if self.replicas.is_empty() {
            return Needs::keys(keys);
        }
        let ranks = |list: &Vec<u32>| list.iter().map(|&rank| GlobalRank(rank)).collect();
        let custom = vec![(Key::DP_CP, self.replicas.iter().map(ranks).collect())];
        Needs { custom, ..Needs::keys([Key::DP_CP_GTP, Key::MP]) }
    }

    /// Builds this rank's part.
    pub(crate) fn on(&self, rank: &Rank) -> Result<One, Caught> {
        let layout = self.layout();
        let groups = ProcessGroups::build(rank, &layout, &self.needs())?;
        let stream = rank.device.stream("compute")?;
        let buffers = ParamBuffers::allocate(rank, &layout, &self.declared, self.plan)?;
        buffers.fill(&stream, Seed(7))?;
        let ddp = Ddp::attach(&buffers, &groups, self.ddp.clone(), &stream)?;
        Ok(One { rank: rank.global.0, handle: rank.clone(), device: rank.device.clone(), stream, buffers, groups, ddp })
    }

    /// Runs `body` on every rank; results by rank.
    pub(crate) fn run<T: Send>(
        &self,
        machine: &Machine,
        body: impl Fn(&mut One) -> Result<T, Caught> + Sync,
    ) -> Result<Vec<T>, pgroups::PgError> {
        let world = self.layout().world_size();
        local(machine, world, |rank| {
            let mut one = self.on(&rank)?;
            let value = body(&mut one)?;
            one.device.synchronize()?;
            Ok::<T, Caught>(value)
        })
    }
}

/// One rank of a test.
pub(crate) struct One {
    pub(crate) rank: u32,
    pub(crate) handle: Rank,
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) buffers: ParamBuffers,
    pub(crate) groups: ProcessGroups,
    pub(crate) ddp: Ddp,
}

impl One {
    pub(crate) fn param(&self, i: usize) -> &Param {
        &self.buffers.params()[i]
    }

    /// Contributes `values` to the gradient of a parameter on `stream`.
    pub(crate) fn contribute_on(&self, stream: &Stream, i: usize, values: Vec<f32>) -> Result<(), Caught> {
        contribute(self.param(i), stream, values)
    }

    /// Contributes the same value to every element.
    pub(crate) fn contribute(&self, i: usize, value: f32) -> Result<(), Caught> {
        let numel = self.param(i).numel();
        self.contribute_on(&self.stream, i, vec![value; numel])
    }

    /// A microbatch in which `backward` contributes.
    pub(crate) fn microbatch(&self, backward: impl Fn(&One) -> Result<(), Caught>) -> Result<(), Caught> {
        self.ddp.begin_microbatch(&self.stream)?;
        backward(self)?;
        Ok(self.ddp.end_microbatch(&self.stream)?)
    }

    /// The reduced gradients of a parameter as far as this rank holds them: its shard, or all.
    pub(crate) fn grads(&self, i: usize) -> Result<Vec<f32>, Caught> {
        self.ddp.read_grads(&self.stream)?;
        let values = wide(&self.stream, &self.param(i).main_grad())?;
        self.ddp.done_grads(&self.stream)?;
        Ok(values)
    }

    /// A parameter's value as a forward pass sees it.
    pub(crate) fn read(&self, i: usize) -> Result<Vec<f32>, Caught> {
        self.read_on(&self.stream, i)
    }

    pub(crate) fn read_on(&self, stream: &Stream, i: usize) -> Result<Vec<f32>, Caught> {
        let mut turn = Turn::eager(Pass::Forward);
        let value = turn.read(self.param(i), stream)?;
        let got = wide(stream, &value)?;
        turn.done(self.param(i), stream)?;
        Ok(got)
    }

    pub(crate) fn optimizer(&self, config: OptimizerConfig) -> Result<Optimizer, DdpError> {
        Optimizer::new(&self.ddp, &self.groups, config, |_| 0, &self.stream)
    }

    /// Plain gradient descent on what this rank owns: a user's own optimizer.
    pub(crate) fn descend(&self, stream: &Stream, rate: f32) -> Result<(), Caught> {
        self.ddp.read_grads(stream)?;
        self.ddp.load(stream, ddp::Loaded::Shards, |bucket| {
            let alpha = device::ops::Factor::Const(-rate);
            let (x, y) = (&bucket.own_grads, &bucket.own_values);
            Ok(stream.launch(device::ops::Axpy { alpha, x, y }.op("descend")?)?)
        })?;
        Ok(self.ddp.done_grads(stream)?)
    }
}

pub(crate) fn contribute(param: &Param, stream: &Stream, values: Vec<f32>) -> Result<(), Caught> {
    let mut weights = Whole::new(Turn::eager(Pass::Backward));
    let out = weights.grad(param, stream)?;
    let (grad, into) = out.target();
    stream.launch(add(grad, into, values))?;
    Ok(weights.grad_done(param, stream)?)
}

/// Adds values into a gradient of any type, as kernels do.
pub(crate) fn add(grad: &View, into: Accumulate<'_>, values: Vec<f32>) -> Op {
    let mut accesses = vec![Access::update(grad)];
    let overwrite = matches!(into, Accumulate::Overwrite);
    if let Accumulate::Keep(flag) = into {
        accesses.push(Access::read(flag));
    }
    Op::host("contribute", grad.label().to_owned(), accesses, move |args| {
        let keep = if args.len() > 1 { args.read::<f32>(1)?[0] } else { 1.0 };
        let kept = |old: f32| if overwrite || keep == 0.0 { 0.0 } else { keep * old };
        match args.dtype(0)? {
            DType::Bf16 => {
                let grad = args.write::<bf16>(0)?;
                grad.iter_mut().zip(&values).for_each(|(g, v)| *g = bf16::from_f32(kept(g.to_f32()) + v));
            }
            _ => args.write::<f32>(0)?.iter_mut().zip(&values).for_each(|(g, v)| *g = kept(*g) + v),
        }
        Ok(())
    })
}

/// The values of a view of f32 or bf16.
pub(crate) fn wide(stream: &Stream, view: &View) -> Result<Vec<f32>, Caught> {
    Ok(match view.dtype() {
        DType::Bf16 => get::<bf16>(stream, view)?.into_iter().map(bf16::to_f32).collect(),
        _ => get::<f32>(stream, view)?,
    })
}

pub(crate) fn get<T: Element>(stream: &Stream, view: &View) -> Result<Vec<T>, Caught> {
    Ok(stream.download::<T>(view)?.wait()?)
}

/// A device scalar that holds `value`.
pub(crate) fn scalar(stream: &Stream, value: f32) -> Result<View, Caught> {
    let view = stream.device().alloc("scalar", &[1], DType::F32, MemoryKind::Other)?;
    stream.upload(&view, vec![value])?;
    Ok(view)
}

/// The first error of type `T` among a failure and its causes, shared ones opened.
pub(crate) fn cause<'e, T: StdError + 'static>(error: &'e (dyn StdError + 'static)) -> &'e T {
    let mut next = Some(error);
    while let Some(error) = next {
        let error = error.downcast_ref::<Arc<dyn StdError + Send + Sync>>().map_or(error, |shared| &**shared);
        if let Some(found) = error.downcast_ref() {
            return found;
        }
        next = error.source();
    }
    panic!("no such cause in {error:?}")
}

/// The first error of this crate among a failure and its causes.
pub(crate) fn ours(error: &pgroups::PgError) -> &DdpError {
    cause(error)
}

/// The bits, for comparisons without tolerance.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
