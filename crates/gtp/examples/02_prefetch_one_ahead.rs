//! A chain of weights, each cut into shards over two, then three ranks. The first pass gathers every weight when it is
//! used; from the second one on each is gathered while the one before it is in use, and its gradient reduced behind it.
//!
//! Run: `cargo run -p gtp --example 02_prefetch_one_ahead`

use device::{DType, Machine, MemoryKind, View, ops};
use gtp::{Counters, Gtp, GtpConfig, GtpPlan, PassKind};
use pgroups::{
    Axis, Init, Key, Layout, LayoutConfig, Needs, ParamClass, ParamSet, ParamSpec, ParamTypes, Pass, Placement,
    ProcessGroups, Rank, Seed, Turn, Weights, local,
};

type Failed = Box<dyn std::error::Error + Send + Sync>;

/// Rows and columns; 10 rows over 3 ranks take padding.
const SIZES: [(usize, usize); 4] = [(10, 6), (6, 10), (10, 6), (6, 10)];

fn main() -> Result<(), Failed> {
    let machine = Machine::cpu(2)?;
    for ranks in [2, 3] {
        let told = local(&machine, ranks, |rank| train(&rank))?;
        let (plan, counters, mean) = &told[0];
        println!("{ranks} ranks: {plan}");
        for (pass, counters) in counters.iter().enumerate() {
            let Counters { planned, on_demand, reduced, .. } = counters;
            println!("after pass {pass}: {planned} gathered ahead, {on_demand} on demand, {reduced} reduced");
        }
        println!("mean gradient of w0's first element: {mean}\n");
    }
    Ok(())
}

fn train(rank: &Rank) -> Result<(GtpPlan, Vec<Counters>, f32), Failed> {
    let layout = Layout::new(&LayoutConfig { gtp: rank.world_size, ..LayoutConfig::default() })?;
    let groups = ProcessGroups::build(rank, &layout, &Needs::keys([Key::GTP]))?;
    let spec = |(i, (rows, cols)): (usize, (usize, usize))| ParamSpec {
        name: format!("w{i}"),
        class: ParamClass::Dense,
        placement: Placement::whole([rows, cols]).cut(0, Axis::GTP, 1),
        init: Init::Normal { std: 0.5 },
    };
    let specs: Vec<ParamSpec> = SIZES.into_iter().enumerate().map(spec).collect();
    let set = ParamSet::allocate(rank, &layout, &specs, ParamTypes::default())?;
    let on = rank.device.stream("compute")?;
    set.fill(&on, Seed(1))?;
    let mut gtp = Gtp::new(rank, &layout, &groups, set.params().iter().zip(&specs), GtpConfig::default())?;
    let sum = rank.device.alloc("sum", &[1], DType::F32, MemoryKind::Other)?;

    let mut counters = Vec::new();
    for _ in 0..3 {
        let mut w = gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Forward))?;
        let use_it = |w: &mut dyn Weights, i: usize| -> Result<(), Failed> {
            // Whole, whoever holds which rows of it.
            let value: View = w.take(&set.params()[i], &on)?;
            on.launch(ops::Sum { x: &value, factor: ops::Factor::Const(1.0), total: &sum }.op("use")?)?;
            Ok(w.give_back(&set.params()[i], &on)?)
        };
        (0..SIZES.len()).try_for_each(|i| use_it(&mut w, i))?;
        w.enter(Pass::Backward);
        for i in (0..SIZES.len()).rev() {
            use_it(&mut w, i)?;
            let grad = w.grad(&set.params()[i], &on)?;
            // Of this rank's samples; what arrives in the main gradient is the mean over the ranks.
            on.launch(ops::Fill { y: grad.target().0, value: 1.0 + rank.global.0 as f32 }.op("gradient")?)?;
            w.grad_done(&set.params()[i], &on)?;
        }
        w.finish()?;
        counters.push(gtp.counters());
    }
    rank.device.synchronize()?;
    let mean = on.download::<f32>(&set.params()[0].main_grad())?.wait()?[0] / 3.0;
    Ok((gtp.plan()?, counters, mean))
}
