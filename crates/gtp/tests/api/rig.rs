//! A chain of products over sharded weights, on several ranks, with real values.

use std::{error::Error as StdError, time::Duration};

use device::{
    DType, Fresh, Machine, MemoryKind, Options, Stream, View,
    cuda::CudaOptions,
    ops::{Accumulate, Finish, Gemm, Trans},
};
use gtp::{Drain, Gtp, GtpConfig, GtpPlan, PassKind, ShardAxis};
use pgroups::{
    Axis, Init, Key, Layout, LayoutConfig, Needs, ParamClass, ParamSet, ParamSpec, ParamTypes, Pass, Placement,
    ProcessGroups, Rank, Seed, Turn, Weights, local,
};

pub(crate) type Caught = Box<dyn StdError + Send + Sync>;

/// Rows of activations: the rank's samples.
pub(crate) const SAMPLES: usize = 3;

/// A chain of `[out, in]` weights, the input of each being the output of the one before.
#[derive(Clone, Debug)]
pub(crate) struct Chain {
    pub(crate) gtp: u32,
    pub(crate) dims: Vec<usize>,
    pub(crate) alignment: usize,
    pub(crate) look_ahead: usize,
    pub(crate) drain: Drain,
}

impl Chain {
    pub(crate) fn new(gtp: u32, dims: &[usize]) -> Chain {
        Chain { gtp, dims: dims.to_vec(), alignment: 1, look_ahead: 1, drain: Drain::Whole }
    }

    fn layout(&self) -> Layout {
        Layout::new(&LayoutConfig { gtp: self.gtp, ..LayoutConfig::default() }).unwrap()
    }

    fn specs(&self) -> Vec<ParamSpec> {
        let spec = |(i, dims): (usize, &[usize])| ParamSpec {
            name: format!("w{i}"),
            class: ParamClass::Dense,
            placement: Placement::whole([dims[1], dims[0]]).cut(0, Axis::GTP, self.alignment),
            init: Init::Normal { std: 0.5 },
        };
        self.dims.windows(2).enumerate().map(spec).collect()
    }

    pub(crate) fn config(&self) -> GtpConfig {
        let axis = ShardAxis { look_ahead: self.look_ahead, ..ShardAxis::new(ParamClass::Dense, Axis::GTP) };
        GtpConfig { axes: vec![axis], drain: self.drain, ..GtpConfig::default() }
    }
}

/// One rank's chain.
pub(crate) struct Rig {
    pub(crate) rank: Rank,
    pub(crate) params: ParamSet,
    pub(crate) gtp: Gtp,
    pub(crate) compute: Stream,
    /// Activations in front of each weight and behind the last, and their gradients.
    pub(crate) x: Vec<View>,
    pub(crate) dx: Vec<View>,
}

impl Rig {
    pub(crate) fn new(rank: &Rank, chain: &Chain, plan: Option<&GtpPlan>) -> Result<Rig, Caught> {
        let layout = chain.layout();
        let groups = ProcessGroups::build(rank, &layout, &Needs::keys([Key::GTP]))?;
        let specs = chain.specs();
        let params = ParamSet::allocate(rank, &layout, &specs, ParamTypes::default())?;
        let compute = rank.device.stream("compute")?;
        params.fill(&compute, Seed(7))?;
        let all = params.params().iter().zip(&specs);
        let gtp = match plan {
            None => Gtp::new(rank, &layout, &groups, all, chain.config())?,
            Some(plan) => Gtp::planned(rank, &layout, &groups, all, chain.config(), plan)?,
        };
        let alloc = |dim: &usize| rank.device.alloc("x", &[SAMPLES, *dim], DType::F32, MemoryKind::Other);
        let x = chain.dims.iter().map(alloc).collect::<Result<Vec<_>, _>>()?;
        let dx = chain.dims.iter().map(alloc).collect::<Result<Vec<_>, _>>()?;
        // Every rank has samples of its own.
        let value = |i: usize| ((i * 7 + rank.global.0 as usize * 5) % 11) as f32 / 8.0 - 0.5;
        compute.upload(&x[0], (0..x[0].numel()).map(value).collect::<Vec<_>>())?;
        let last = dx.len() - 1;
        compute.upload(&dx[last], (0..dx[last].numel()).map(|i| value(i + 3)).collect::<Vec<_>>())?;
        Ok(Rig { rank: rank.clone(), params, gtp, compute, x, dx })
    }

    /// Forward through the weights of `order`, then back.
    pub(crate) fn pass(&mut self, order: &[usize]) -> Result<(), Caught> {
        let Rig { params, gtp, compute, x, dx, .. } = self;
        let mut weights = gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Forward))?;
        train(&mut weights, params, compute, x, dx, order)?;
        Ok(weights.finish()?)
    }

    pub(crate) fn all(&self) -> Vec<usize> {
        (0..self.params.params().len()).collect()
    }

    pub(crate) fn grads(&self) -> Result<Vec<f32>, Caught> {
        self.rank.device.synchronize()?;
        Ok(self.compute.download::<f32>(self.params.grads())?.wait()?)
    }

    pub(crate) fn output(&self) -> Result<Vec<f32>, Caught> {
        Ok(self.compute.download::<f32>(&self.x[self.x.len() - 1])?.wait()?)
    }
}

/// Forward and backward of the weights of `order`, in a pass that is forward.
pub(crate) fn train(
    w: &mut dyn Weights,
    params: &ParamSet,
    on: &Stream,
    x: &[View],
    dx: &[View],
    order: &[usize],
) -> Result<(), Caught> {
    for &i in order {
        forward(w, params, on, x, i)?;
    }
    let back = w.enter(Pass::Backward);
    for &i in order.iter().rev() {
        backward(w, params, on, x, dx, i)?;
    }
    w.enter(back);
    Ok(())
}

pub(crate) fn forward(w: &mut dyn Weights, params: &ParamSet, on: &Stream, x: &[View], i: usize) -> Result<(), Caught> {
    let param = &params.params()[i];
    let value = w.take(param, on)?;
    let finish = Finish::Into(Accumulate::Overwrite);
    on.launch(Gemm { a: &x[i], b: &value, c: &x[i + 1], trans: Trans::Nt, finish }.op("forward")?)?;
    Ok(w.give_back(param, on)?)
}

pub(crate) fn backward(
    w: &mut dyn Weights,
    params: &ParamSet,
    on: &Stream,
    x: &[View],
    dx: &[View],
    i: usize,
) -> Result<(), Caught> {
    let param = &params.params()[i];
    let value = w.take(param, on)?;
    let finish = Finish::Into(Accumulate::Overwrite);
    on.launch(Gemm { a: &dx[i + 1], b: &value, c: &dx[i], trans: Trans::Nn, finish }.op("backward")?)?;
    w.give_back(param, on)?;
    let grad = w.grad(param, on)?;
    let (c, into) = grad.target();
    let finish = Finish::Into(into);
    on.launch(Gemm { a: &dx[i + 1], b: &x[i], c, trans: Trans::Tn, finish }.op("wgrad")?)?;
    Ok(w.grad_done(param, on)?)
}

/// Gives up after seconds without progress; fresh memory holds NaN.
pub(crate) fn options() -> Options {
    Options { timeout: Duration::from_secs(20), fresh: Fresh::Poisoned }
}

/// Machines on which sums over ranks have one order.
pub(crate) fn hosts() -> Vec<Machine> {
    let mut machines = vec![Machine::cpu_with(2, options()).unwrap()];
    machines.extend((0..4).map(|seed| Machine::sim_with(seed, options())));
    machines
}

/// The first card, if the tests were built for one.
pub(crate) fn cards() -> Vec<Machine> {
    crate::cards::cards(CudaOptions::default(), options())
}

pub(crate) fn machines() -> Vec<Machine> {
    hosts().into_iter().chain(cards()).collect()
}

/// Runs `body` with a chain on every rank of `machine`.
pub(crate) fn on_all<T: Send>(
    machine: &Machine,
    chain: &Chain,
    body: impl Fn(Rig) -> Result<T, Caught> + Sync,
) -> Result<Vec<T>, pgroups::PgError> {
    local(machine, chain.gtp, |rank| body(Rig::new(&rank, chain, None)?))
}
