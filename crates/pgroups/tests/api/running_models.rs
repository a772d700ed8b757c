//! Two models with different layouts in one process.

use device::{Access, Machine, Op, Reduce, Stream, View};
use pgroups::{
    Axis, Init, Key, Layout, LayoutConfig, Needs, ParamClass, ParamSet, ParamSpec, ParamTypes, Pass, PgError,
    Placement, ProcessGroups, Rank, Seed, Turn, Weights, Whole, local,
};

use crate::running_support::*;

/// A model whose step gathers its weight over one group and averages its gradient over another.
struct Tiny {
    groups: ProcessGroups,
    set: ParamSet,
    stream: Stream,
    full: View,
    name: &'static str,
    gather: Key,
    average: Key,
}

/// A name, a layout, the group that gathers and the one that averages.
type Kind = (&'static str, fn() -> Layout, Key, Key);

const KINDS: [Kind; 2] = [
    ("first", || Layout::new(&LayoutConfig::parse("tp=2,dp=2").unwrap()).unwrap(), Key::TP, Key::DP),
    ("second", crossed, Key::GTP, Key::DP_CP),
];

/// Neighbours are replicas here, and gtp cuts what tp cuts in the first model.
fn crossed() -> Layout {
    let config = LayoutConfig { order: "dp-gtp".into(), ..LayoutConfig::parse("gtp=2,dp=2").unwrap() };
    Layout::new(&config).unwrap()
}

impl Tiny {
    fn new(rank: &Rank, (name, layout, gather, average): &Kind) -> Result<Tiny, PgError> {
        let layout = layout();
        let groups = ProcessGroups::build(rank, &layout, &Needs::keys([gather.clone(), average.clone()]))?;
        let axis = if *gather == Key::TP { Axis::TP } else { Axis::GTP };
        let spec = ParamSpec {
            name: "w".into(),
            class: ParamClass::Dense,
            placement: Placement::whole([6, 5]).cut(0, axis, 0),
            init: Init::Normal { std: 1.0 },
        };
        let set = ParamSet::allocate(rank, &layout, &[spec], ParamTypes::default())?;
        let stream = rank.device.stream(name)?;
        set.fill(&stream, Seed(u64::from(name.len() as u32)))?;
        let full = alloc(&rank.device, "full", 30, device::DType::F32);
        Ok(Tiny { groups, set, stream, full, name, gather: gather.clone(), average: average.clone() })
    }

    /// Gather, a gradient that depends on the whole weight and on the rank, average, update.
    fn step(&self, rank: u32, at: usize) -> Result<(), PgError> {
        let (gather, average) = (self.groups.get(&self.gather, "tiny")?, self.groups.get(&self.average, "tiny")?);
        let param = &self.set.params()[0];
        let flat = |view: &View| view.flat(0..view.numel());
        let mut weights = Whole::new(Turn::eager(Pass::Forward));
        let own = weights.take(param, &self.stream)?;
        gather.all_gather(&self.stream, &flat(&own)?, &self.full)?;
        weights.give_back(param, &self.stream)?;
        weights.enter(Pass::Backward);
        let grad = param.main_grad();
        let scale = 0.01 * (rank + 1) as f32 + at as f32 * 0.001;
        let accesses = vec![Access::read(&self.full), Access::write(&grad)];
        self.stream.launch(Op::host("backward", self.name, accesses, move |args| {
            let full = args.read::<f32>(0)?;
            let sum: f32 = full.iter().sum();
            let grad = args.write::<f32>(1)?;
            grad.iter_mut().zip(full).for_each(|(g, w)| *g = scale * (w * w - sum));
            Ok(())
        }))?;
        weights.grad_done(param, &self.stream)?;
        average.all_reduce(&self.stream, self.set.grads(), Reduce::Avg)?;
        let accesses = vec![Access::update(self.set.values()), Access::read(self.set.grads())];
        let update = Op::host("step", self.name, accesses, |args| {
            let grads = args.read::<f32>(1)?;
            args.write::<f32>(0)?.iter_mut().zip(grads).for_each(|(w, g)| *w -= g);
            Ok(())
        });
        Ok(self.stream.launch(update)?)
    }

    fn bits(&self) -> Result<Vec<u32>, PgError> {
        Ok(get::<f32>(&self.stream, self.set.values())?.iter().map(|v| v.to_bits()).collect())
    }
}

/// The weights of all ranks after some steps of the models of `kinds`, in turns.
fn train(machine: &Machine, kinds: &[&Kind]) -> Vec<Vec<Vec<u32>>> {
    let trained = local(machine, 4, |rank| {
        let models = kinds.iter().map(|kind| Tiny::new(&rank, kind)).collect::<Result<Vec<_>, _>>()?;
        for at in 0..5 {
            for model in &models {
                model.step(rank.global.0, at)?;
            }
        }
        models.iter().map(Tiny::bits).collect::<Result<Vec<_>, _>>()
    });
    trained.unwrap_or_else(|e| panic!("{}: {}", machine.driver(), e.chain()))
}

#[test]
fn two_models_in_turns_give_the_bits_that_each_gives_alone() {
    let [first, second] = &KINDS;
    let alone = [train(&cpu(2), &[first]), train(&cpu(2), &[second])];
    assert_ne!(alone[0], alone[1]);
    for machine in machines() {
        for (together, order) in
            [(train(&machine, &[first, second]), [0, 1]), (train(&machine, &[second, first]), [1, 0])]
        {
            for (rank, got) in together.iter().enumerate() {
                let want: Vec<_> = order.iter().map(|&model| alone[model][rank][0].clone()).collect();
                assert_eq!(*got, want, "rank {rank} on {}", machine.driver());
            }
        }
    }
}
