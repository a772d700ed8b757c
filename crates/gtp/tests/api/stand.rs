//! Sharded weights of any layout under passes that are made of single calls, and what whole weights would give.

use std::{collections::BTreeMap, sync::Arc};

use device::{Access, DType, Machine, MemoryKind, Op, Stream, Trace, View, ops::Accumulate};
use graphcap::verify::{Report, VerifyOptions, verify};
use gtp::{Gtp, GtpConfig, GtpPlan, PassKind, ShardAxis};
use pgroups::{
    Axis, GlobalRank, GradOut, Init, Key, Layout, LayoutConfig, Needs, Param, ParamClass, ParamSet, ParamSpec,
    ParamTypes, Pass, Placement, ProcessGroups, Rank, Seed, Turn, Weights, Whole, local,
};

use crate::api::rig::{Caught, options};

/// Uses that a log has room for.
const LOG: usize = 512;

/// One call of a pass, with the operation that comes of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Act {
    /// Takes a weight, and reads it.
    Take(usize),
    /// Reads it once more, and gives it back.
    Back(usize),
    /// Asks for the gradient of a weight, and writes it: something that depends on the last read.
    Grad(usize),
    /// Adds to the gradient, and says that it is done.
    Done(usize),
    /// What follows belongs to this part of the pass.
    Enter(Pass),
    /// What follows is submitted to this stream.
    On(usize),
}

/// Forward through the weights of `order`, then back: use and gradient.
pub(crate) fn there_and_back(order: &[usize]) -> Vec<Act> {
    let mut acts = forward(order);
    acts.push(Act::Enter(Pass::Backward));
    acts.extend(order.iter().rev().flat_map(|&w| [Act::Take(w), Act::Back(w), Act::Grad(w), Act::Done(w)]));
    acts
}

pub(crate) fn forward(order: &[usize]) -> Vec<Act> {
    order.iter().flat_map(|&w| [Act::Take(w), Act::Back(w)]).collect()
}

/// Weights, how they are cut and over whom.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) layout: LayoutConfig,
    pub(crate) specs: Vec<ParamSpec>,
    pub(crate) config: GtpConfig,
    /// Groups with members of the test's choice.
    pub(crate) custom: Vec<(Key, Vec<Vec<u32>>)>,
}

/// A weight of `rows` by `cols`, whole.
pub(crate) fn spec(name: &str, rows: usize, cols: usize) -> ParamSpec {
    ParamSpec {
        name: name.to_owned(),
        class: ParamClass::Dense,
        placement: Placement::whole([rows, cols]),
        init: Init::Normal { std: 0.5 },
    }
}

impl Model {
    /// Weights `w0`, `w1`, ... of rows and columns, cut over `gtp` ranks, one use ahead.
    pub(crate) fn new(gtp: u32, sizes: &[(usize, usize)]) -> Model {
        let cut = |(i, (rows, cols)): (usize, &(usize, usize))| {
            let whole = spec(&format!("w{i}"), *rows, *cols);
            ParamSpec { placement: whole.placement.clone().cut(0, Axis::GTP, 1), ..whole }
        };
        Model {
            layout: LayoutConfig { gtp, ..LayoutConfig::default() },
            specs: sizes.iter().enumerate().map(cut).collect(),
            config: GtpConfig { axes: vec![ShardAxis::new(ParamClass::Dense, Axis::GTP)], ..GtpConfig::default() },
            custom: Vec::new(),
        }
    }

    pub(crate) fn look_ahead(mut self, uses: usize) -> Model {
        self.config.axes.iter_mut().for_each(|axis| axis.look_ahead = uses);
        self
    }

    pub(crate) fn laid_out(&self) -> Layout {
        Layout::new(&self.layout).unwrap()
    }

    pub(crate) fn build(&self, rank: &Rank, plan: Option<&GtpPlan>) -> Result<Stand, Caught> {
        let layout = self.laid_out();
        let ranks = |list: &Vec<u32>| list.iter().map(|&rank| GlobalRank(rank)).collect();
        let custom: Vec<(Key, Vec<Vec<GlobalRank>>)> =
            self.custom.iter().map(|(key, lists)| (key.clone(), lists.iter().map(ranks).collect())).collect();
        let keys = self.config.axes.iter().map(ShardAxis::key).filter(|key| custom.iter().all(|(own, _)| own != key));
        let needs = Needs { custom: custom.clone(), ..Needs::keys(keys.chain([Key::DP, Key::EXPT_DP])) };
        let groups = ProcessGroups::build(rank, &layout, &needs)?;
        let params = ParamSet::allocate(rank, &layout, &self.specs, ParamTypes::default())?;
        let streams = [rank.device.stream("compute")?, rank.device.stream("side")?];
        params.fill(&streams[0], Seed(7))?;
        let all = || params.params().iter().zip(&self.specs);
        let gtp = match plan {
            None => Gtp::new(rank, &layout, &groups, all(), self.config.clone())?,
            Some(plan) => Gtp::planned(rank, &layout, &groups, all(), self.config.clone(), plan)?,
        };
        let log = |stream: &Stream| -> Result<View, Caught> {
            let log = rank.device.alloc("log", &[LOG], DType::F32, MemoryKind::Other)?;
            stream.upload(&log, vec![0.0; LOG])?;
            Ok(log)
        };
        let logs = [log(&streams[0])?, log(&streams[1])?];
        // What a test submits next to any stream is behind all of this.
        rank.device.synchronize()?;
        let script = Script { params: params.params().to_vec(), streams, logs, peer: rank.global.0 };
        Ok(Stand { rank: rank.clone(), groups, params, gtp, script })
    }

    /// Runs `body` on every rank; the verifier has nothing to object to.
    pub(crate) fn run<T: Send>(
        &self,
        machine: &Machine,
        body: impl Fn(&mut Stand) -> Result<T, Caught> + Sync,
    ) -> Vec<T> {
        let (results, trace) = self.traced(machine, None, body);
        let report = verify(&trace, &VerifyOptions::default());
        assert!(report.is_clean(), "on {}: {report}", machine.driver());
        results.unwrap_or_else(|error| panic!("on {}: {error:?}", machine.driver()))
    }

    pub(crate) fn traced<T: Send>(
        &self,
        machine: &Machine,
        plan: Option<&GtpPlan>,
        body: impl Fn(&mut Stand) -> Result<T, Caught> + Sync,
    ) -> (Result<Vec<T>, pgroups::PgError>, Trace) {
        machine.trace_start();
        let results = local(machine, self.laid_out().world_size(), |rank| {
            let mut stand = self.build(&rank, plan)?;
            let value = body(&mut stand)?;
            // Before its streams go: they take what is queued with them.
            rank.device.synchronize()?;
            Ok::<T, Caught>(value)
        });
        (results, machine.trace_stop())
    }

    pub(crate) fn verified<T: Send>(
        &self,
        machine: &Machine,
        body: impl Fn(&mut Stand) -> Result<T, Caught> + Sync,
    ) -> Report {
        verify(&self.traced(machine, None, body).1, &VerifyOptions::default())
    }

    /// What every rank finds if each weight is whole and each of `passes` runs on every rank by itself; gradients
    /// averaged over the ranks that share a weight, cut as theirs are.
    pub(crate) fn whole(&self, passes: &[Vec<Act>]) -> Vec<Found> {
        let (layout, world) = (self.laid_out(), self.laid_out().world_size());
        let uncut = |spec: &ParamSpec| ParamSpec {
            placement: Placement::whole(spec.placement.global.clone()),
            class: ParamClass::Dense,
            ..spec.clone()
        };
        let single = Model {
            layout: LayoutConfig::default(),
            specs: self.specs.iter().map(uncut).collect(),
            config: GtpConfig::default(),
            custom: Vec::new(),
        };
        let alone = |peer: u32| {
            let machine = Machine::cpu_with(1, options()).unwrap();
            let body = |stand: &mut Stand| {
                stand.script.peer = peer;
                passes
                    .iter()
                    .try_for_each(|acts| stand.script.play(&mut Whole::new(Turn::eager(Pass::Forward)), acts))?;
                stand.found()
            };
            single.traced(&machine, None, body).0.unwrap().remove(0)
        };
        let alone: Vec<Found> = (0..world).map(alone).collect();
        let of = |rank: u32| -> Found {
            let grads = self.specs.iter().enumerate().map(|(i, spec)| {
                let full = |peer: u32| &alone[peer as usize].grads[i];
                let Some(cut) = spec.placement.cuts.iter().find(|cut| layout.size(spec.class, &cut.axis) > 1) else {
                    return full(rank).clone();
                };
                let grid = layout.grid(spec.class);
                let axis = std::slice::from_ref(&cut.axis);
                let own = grid.own_group(axis, GlobalRank(rank)).unwrap().unwrap();
                let peers: Vec<u32> = own.members.iter().map(|peer| peer.0).collect();
                let place = grid.coordinate(GlobalRank(rank), &cut.axis).unwrap() as usize;
                let mean = |e: usize| peers.iter().map(|p| full(*p)[e]).sum::<f32>() / peers.len() as f32;
                let (rows, cols) = (spec.placement.global[0], spec.placement.global[1]);
                let (each, _) = pgroups::padded_cut(rows, peers.len() as u32, cut.alignment).unwrap();
                let element = |e: usize| {
                    let global = place * each * cols + e;
                    if global < rows * cols { mean(global) } else { 0.0 }
                };
                (0..each * cols).map(element).collect()
            });
            Found { grads: grads.collect(), logs: alone[rank as usize].logs.clone() }
        };
        (0..world).map(of).collect()
    }
}

/// What a rank finds behind its passes.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Found {
    /// By weight: the main gradient.
    pub(crate) grads: Vec<Vec<f32>>,
    /// By stream: of every read, in order, a sum that depends on each element's place.
    pub(crate) logs: [Vec<f32>; 2],
}

impl Found {
    /// Sums over peers may differ in the last bits, what was read may not.
    pub(crate) fn check(&self, want: &Found, what: &str) {
        assert_eq!(self.logs, want.logs, "{what}");
        for (i, (got, want)) in self.grads.iter().zip(&want.grads).enumerate() {
            let largest = want.iter().fold(0f32, |m, x| m.max(x.abs()));
            let close = got.iter().zip(want).all(|(a, b)| (a - b).abs() <= 2e-6 * largest);
            assert!(got.len() == want.len() && close, "{what}: gradient of w{i}: {got:?}, wanted {want:?}");
        }
    }
}

pub(crate) fn check_all(got: &[Found], want: &[Found], what: &str) {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).enumerate().for_each(|(rank, (got, want))| got.check(want, &format!("{what}, rank {rank}")));
}

/// One rank of a test.
pub(crate) struct Stand {
    pub(crate) rank: Rank,
    pub(crate) groups: ProcessGroups,
    pub(crate) params: ParamSet,
    pub(crate) gtp: Gtp,
    pub(crate) script: Script,
}

/// All that acts need.
#[derive(Clone)]
pub(crate) struct Script {
    pub(crate) params: Vec<Param>,
    pub(crate) streams: [Stream; 2],
    pub(crate) logs: [View; 2],
    /// Whose samples it has.
    pub(crate) peer: u32,
}

impl Stand {
    /// A training pass, as it is submitted.
    pub(crate) fn pass(&mut self, acts: &[Act]) -> Result<(), Caught> {
        self.pass_of(PassKind::TRAIN, acts)
    }

    pub(crate) fn pass_of(&mut self, kind: PassKind, acts: &[Act]) -> Result<(), Caught> {
        let mut weights = self.gtp.pass(kind, Turn::eager(Pass::Forward))?;
        self.script.play(&mut weights, acts)?;
        Ok(weights.finish()?)
    }

    /// Waits for everything, then reads logs and gradients.
    pub(crate) fn found(&self) -> Result<Found, Caught> {
        self.rank.device.synchronize()?;
        let on = &self.script.streams[0];
        let get = |view: &View| -> Result<Vec<f32>, Caught> { Ok(on.download::<f32>(view)?.wait()?) };
        let grads = self.script.params.iter().map(|param| get(&param.main_grad())).collect::<Result<_, _>>()?;
        Ok(Found { grads, logs: [get(&self.script.logs[0])?, get(&self.script.logs[1])?] })
    }

    pub(crate) fn plan(&mut self) -> Result<Arc<gtp::PassPlan>, Caught> {
        Ok(self.gtp.plan()?.pass(PassKind::TRAIN).expect("a training pass has run").clone())
    }
}

impl Script {
    pub(crate) fn play(&self, weights: &mut dyn Weights, acts: &[Act]) -> Result<(), Caught> {
        let mut on = 0;
        let mut values: BTreeMap<usize, Vec<View>> = BTreeMap::new();
        let mut grads: BTreeMap<usize, GradOut> = BTreeMap::new();
        for act in acts {
            let stream = &self.streams[on];
            match *act {
                Act::On(next) => on = next,
                Act::Enter(pass) => drop(weights.enter(pass)),
                Act::Take(w) => {
                    let value = weights.take(&self.params[w], stream)?;
                    self.read(on, &value)?;
                    values.entry(w).or_default().push(value);
                }
                Act::Back(w) => {
                    let value = values.get_mut(&w).and_then(Vec::pop).expect("taken");
                    self.read(on, &value)?;
                    weights.give_back(&self.params[w], stream)?;
                }
                Act::Grad(w) => {
                    let grad = weights.grad(&self.params[w], stream)?;
                    self.write(on, w, &grad)?;
                    grads.insert(w, grad);
                }
                Act::Done(w) => {
                    self.add_more(on, w, &grads.remove(&w).expect("asked for"))?;
                    weights.grad_done(&self.params[w], stream)?;
                }
            }
        }
        Ok(())
    }

    /// All that [`Act::Grad`] and [`Act::Done`] do with a gradient that has been asked for.
    pub(crate) fn finish_grad(&self, weights: &mut dyn Weights, weight: usize, grad: &GradOut) -> Result<(), Caught> {
        self.write(0, weight, grad)?;
        self.add_more(0, weight, grad)?;
        Ok(weights.grad_done(&self.params[weight], &self.streams[0])?)
    }

    /// The gradient is written up to the end.
    fn add_more(&self, on: usize, weight: usize, grad: &GradOut) -> Result<(), Caught> {
        let (view, _) = grad.target();
        let more = Op::host("wgrad more", format!("w{weight}"), vec![Access::update(view)], |args| {
            args.write::<f32>(0)?.iter_mut().for_each(|g| *g += 0.25);
            Ok(())
        });
        Ok(self.streams[on].launch(more)?)
    }

    /// Logs a sum of the elements, each times a number of its own.
    fn read(&self, on: usize, value: &View) -> Result<(), Caught> {
        let accesses = vec![Access::read(value), Access::update(&self.logs[on])];
        let op = Op::host("use", value.label().to_owned(), accesses, |args| {
            let weighed = |(i, x): (usize, &f32)| x * (1 + i % 13) as f32;
            let sum: f32 = args.read::<f32>(0)?.iter().enumerate().map(weighed).sum();
            let log = args.write::<f32>(1)?;
            log[0] += 1.0;
            let at = log[0] as usize;
            log[at] = sum;
            Ok(())
        });
        Ok(self.streams[on].launch(op)?)
    }

    /// A gradient of this rank's samples that depends on the last value read.
    fn write(&self, on: usize, weight: usize, grad: &GradOut) -> Result<(), Caught> {
        let (view, into) = grad.target();
        let mut accesses = vec![Access::update(view), Access::read(&self.logs[on])];
        if let Accumulate::Keep(flag) = into {
            accesses.push(Access::read(flag));
        }
        let (overwrite, peer) = (matches!(into, Accumulate::Overwrite), self.peer as usize);
        let op = Op::host("wgrad", format!("w{weight}"), accesses, move |args| {
            let kept = if args.len() > 2 { args.read::<f32>(2)?[0] } else { 1.0 };
            let kept = if overwrite { 0.0 } else { kept };
            let log = args.read::<f32>(1)?;
            let last = log[log[0] as usize];
            let value = |e: usize| ((e * 3 + peer * 5 + weight * 2) % 17) as f32 / 16.0 + 0.125 * last;
            let keep = |old: f32| if kept == 0.0 { 0.0 } else { kept * old };
            args.write::<f32>(0)?.iter_mut().enumerate().for_each(|(e, g)| *g = keep(*g) + value(e));
            Ok(())
        });
        Ok(self.streams[on].launch(op)?)
    }
}
