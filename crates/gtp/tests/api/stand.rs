//! Sharded weights of any layout, and what whole weights would give.

use std::sync::Arc;

use device::{DType, Machine, MemoryKind, Stream, Trace, View};
use graphcap::verify::{Report, VerifyOptions, verify};
use gtp::{Gtp, GtpConfig, GtpPlan, PassKind, ShardAxis};
use pgroups::{
    Axis, GlobalRank, Init, Key, Layout, LayoutConfig, Needs, ParamClass, ParamSet, ParamSpec, ParamTypes, Pass,
    Placement, ProcessGroups, Rank, Seed, Turn, Whole, local,
};

use crate::api::{
    rig::{Caught, options},
    script::{Act, Script},
};

/// Uses that a log has room for.
const LOG: usize = 2048;

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
        Ok(Stand { rank: rank.clone(), groups: Arc::new(groups), params, gtp, script })
    }

    /// Runs `body` on every rank; the verifier has nothing to object to.
    pub(crate) fn run<T: Send>(
        &self,
        machine: &Machine,
        body: impl Fn(&mut Stand) -> Result<T, Caught> + Sync,
    ) -> Vec<T> {
        let (results, trace) = self.traced(machine, None, body);
        let report = verify(&trace, &VerifyOptions::default());
        let results = results.unwrap_or_else(|error| panic!("on {}: {error:?}; {report}", machine.driver()));
        assert!(report.is_clean(), "on {}: {report}", machine.driver());
        results
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
                // One stream: gradients go straight to where others add too.
                stand.script.streams[1] = stand.script.streams[0].clone();
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
            // Terms are of the order of ten and may cancel; one that is missing is far larger than this.
            let largest = want.iter().fold(10f32, |m, x| m.max(x.abs()));
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
    pub(crate) groups: Arc<ProcessGroups>,
    pub(crate) params: ParamSet,
    pub(crate) gtp: Gtp,
    pub(crate) script: Script,
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
