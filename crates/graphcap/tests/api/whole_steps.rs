//! Graphs of whole steps: publications and reductions inside, each once a replay; host accounts as data.

use std::{
    any::Any,
    sync::{Arc, atomic::Ordering::SeqCst},
};

use device::{Access, Machine, Op, Stream, TraceEvent, View};
use graphcap::{
    CaptureScope, GraphConfig, GraphError, Scope,
    verify::{VerifyOptions, verify},
};
use pgroups::{HostState, Pass, PgError, Turn};

use super::support::*;

/// The account of a rig's publisher and sink.
struct Account {
    buckets: Vec<Arc<Bucket>>,
    sinks: Vec<Arc<Sink>>,
}

type Epochs = Vec<[u64; 2]>;

fn epochs(saved: &(dyn Any + Send + Sync)) -> &Epochs {
    saved.downcast_ref().expect("what this account gave")
}

impl HostState for Account {
    fn save(&self) -> Box<dyn Any + Send + Sync> {
        Box::new(self.buckets.iter().map(|bucket| bucket.account()).collect::<Epochs>())
    }

    fn restore(&self, saved: &(dyn Any + Send + Sync)) {
        self.buckets.iter().zip(epochs(saved)).for_each(|(bucket, account)| bucket.set_account(*account));
    }

    fn begin_step(&self) {
        for bucket in &self.buckets {
            let [written, _] = bucket.account();
            bucket.set_account([written, written - 1]);
        }
    }

    fn since(&self, before: &(dyn Any + Send + Sync)) -> Box<dyn Any + Send + Sync> {
        let now = self.buckets.iter().map(|bucket| bucket.account());
        Box::new(now.zip(epochs(before)).map(|(now, was)| [now[0] - was[0], now[1] - was[1]]).collect::<Epochs>())
    }

    fn announce(&self, _: &(dyn Any + Send + Sync), _: &Stream) {}

    fn add(&self, effects: &(dyn Any + Send + Sync), _: &Stream) {
        for (bucket, added) in self.buckets.iter().zip(epochs(effects)) {
            let now = bucket.account();
            bucket.set_account([now[0] + added[0], now[1] + added[1]]);
        }
    }

    fn join(&self, stream: &Stream) -> Result<(), PgError> {
        let events = self.buckets.iter().flat_map(|b| b.events()).chain(self.sinks.iter().flat_map(|s| s.events()));
        Ok(events.into_iter().try_for_each(|event| stream.wait(&event, device::Why("test.join")))?)
    }

    fn mark(&self, stream: &Stream) -> Result<(), PgError> {
        let events = self.buckets.iter().flat_map(|b| b.events()).chain(self.sinks.iter().flat_map(|s| s.events()));
        Ok(events.into_iter().try_for_each(|event| stream.record(&event))?)
    }
}

/// Reads, adds to a gradient, reduces it, and writes what follows from it.
fn step(rig: &Rig, reduce: &Stream, sum: &View, mut scope: Option<&mut CaptureScope<'_>>) -> Result<(), Caught> {
    for i in 0..2 {
        rig.fold(&mut turn(&mut scope, Pass::Forward), i, &rig.compute)?;
    }
    rig.contribute(turn(&mut scope, Pass::Backward), 0, &rig.compute, 1.5)?;
    rig.sinks[0].reduce(reduce, &rig.params[0].main_grad(), sum);
    for bucket in &rig.buckets {
        bucket.update(&rig.optimizer, reduce, sum);
    }
    Ok(())
}

fn turn<'t>(scope: &'t mut Option<&mut CaptureScope<'_>>, pass: Pass) -> Turn<'t> {
    match scope {
        Some(scope) => scope.turn(pass),
        None => Turn::eager(pass),
    }
}

fn run(machine: &Machine, captured: bool) -> (Vec<f32>, Vec<[u64; 2]>) {
    let rig = Rig::new(machine, &[1, 1]);
    let (reduce, sum) = (rig.device.stream("reduce").unwrap(), floats(&rig.device, "sum", NUMEL));
    rig.compute.upload(&sum, vec![0f32; NUMEL]).unwrap();
    rig.sinks[0].set_flag(&rig.compute, 0.0);
    rig.compute.synchronize().unwrap();
    let account = Arc::new(Account { buckets: rig.buckets.clone(), sinks: rig.sinks.clone() });
    let accounts = rig.buckets.iter().map(|bucket| bucket.account()).collect::<Vec<_>>();
    let graph = captured.then(|| {
        let config = GraphConfig { accounts: vec![account.clone()], ..GraphConfig::new(Scope::Step) };
        let mut set = rig.set_of(config);
        let (graph, ()) = set.capture("step", &rig.compute, |scope| step(&rig, &reduce, &sum, Some(scope))).unwrap();
        assert!(graph.conditions().is_empty() && graph.reads().is_empty());
        let nodes = nodes(&graph);
        assert!(!nodes.iter().any(|node| node.starts_with("wait") || node.starts_with("record")), "{nodes:?}");
        let now = rig.buckets.iter().map(|bucket| bucket.account()).collect::<Vec<_>>();
        assert_eq!(now, accounts, "captured code changes no state of the host");
        graph.warm_up(&rig.compute, 2).unwrap();
        graph
    });
    for _ in 0..4 {
        match &graph {
            Some(graph) => graph.replay(&rig.compute, &[]).unwrap(),
            None => step(&rig, &reduce, &sum, None).unwrap(),
        }
    }
    // An eager read behind it all.
    rig.fold(&mut Turn::eager(Pass::Forward), 1, &rig.compute).unwrap();
    rig.device.synchronize().unwrap();
    let all = rig.result().into_iter().chain(get(&rig.compute, &sum)).collect();
    (all, rig.buckets.iter().map(|bucket| bucket.account()).collect())
}

#[test]
fn replays_of_whole_steps_give_the_bits_and_the_accounts_of_eager_steps() {
    let want = run(&sim(0), false);
    assert!(want.0.iter().all(|value| value.is_finite()));
    // Written at the beginning and by each step; published by each step, and once more for the second bucket.
    assert_eq!(want.1, [[5, 4], [5, 5]]);
    for seed in 0..40 {
        assert_eq!(run(&sim(seed), true), want, "seed {seed}");
    }
    assert_eq!(run(&cpu(), true), want);
}

#[test]
fn a_graph_of_a_step_holds_each_publication_and_reduction_once() {
    let machine = sim(1);
    machine.trace_start();
    run(&machine, true);
    let trace = machine.trace_stop();
    let report = verify(&trace, &VerifyOptions::default());
    assert!(report.is_clean(), "{report}");
    let graph = trace.events.iter().find_map(|event| match event {
        TraceEvent::Launch { graph, .. } => Some(graph.clone()),
        _ => None,
    });
    let sites = |of: &str| {
        let site = |node: &device::TraceNode| match &node.what {
            device::TraceNodeKind::Op { site, .. } => site.to_string(),
            _ => String::new(),
        };
        graph.as_ref().unwrap().nodes.iter().filter(|node| site(node) == of).count()
    };
    assert_eq!((sites("publish b0"), sites("publish b1"), sites("reduce")), (1, 1, 1));
}

#[test]
fn accounts_are_for_whole_steps_and_have_to_be_there() {
    let rig = Rig::new(&sim(1), &[1]);
    let account: Arc<dyn HostState> = Arc::new(Account { buckets: rig.buckets.clone(), sinks: rig.sinks.clone() });
    let config = |scope| GraphConfig { accounts: vec![account.clone()], ..GraphConfig::new(scope) };
    let refused = graphcap::GraphSet::new(&rig.compute, config(Scope::Microbatch)).map(drop).unwrap_err();
    assert!(matches!(refused, GraphError::AccountsBelowStep { scope: Scope::Microbatch, accounts: 1, .. }));
    let mut set = rig.set_of(config(Scope::Step));
    let nothing =
        |_: &mut CaptureScope<'_>| rig.compute.launch(Op::host("x", "test", Vec::<Access>::new(), |_| Ok(())));
    let (graph, ()) = set.capture("g", &rig.compute, nothing).unwrap();
    graph.replay(&rig.compute, &[]).unwrap();
    // The set keeps the account, its graphs do not.
    drop((set, account));
    let gone = graph.replay(&rig.compute, &[]).unwrap_err();
    assert!(matches!(gone, GraphError::AccountGone { .. }), "{gone}");
    assert_eq!(rig.buckets[0].asked.load(SeqCst), 0);
}
