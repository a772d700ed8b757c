//! Whole training runs under the verifier: steps, microbatches, an evaluation, the host ahead of the device.

use std::{collections::BTreeSet, path::Path};

use device::{Label, Machine, Options, Trace, TraceEvent, TraceGraph, TraceNode, TraceNodeKind, cuda::CudaOptions};
use graphcap::verify::{Finding, Noticed, VerifyOptions, mutate, verify};
use trainer::{Config, TrainError, trace_steps};

use crate::{cards::cards, graphs::GRAPHS};

const CONFIG: &str = r#"
[model]
layers = 2
dim = 32
heads = 2
seq_len = 16
[layout]
dp = 2
[train]
steps = 10
global_batch = 8
micro_batch = 2
eval_interval = 2
[data]
path = "src/**/*.rs"
"#;

/// Several buckets, each rank stepping its part of each.
const SHARDED: [&str; 2] = ["optimizer.distributed=true", "ddp.bucket_size=4096"];

fn config(overrides: &[&str]) -> Config {
    Config::parse(CONFIG, Path::new("proved"), Path::new(env!("CARGO_MANIFEST_DIR")), overrides).unwrap()
}

fn machines() -> Vec<Machine> {
    let hosts = [Machine::dry(), Machine::sim(3), Machine::cpu(2).unwrap()];
    hosts.into_iter().chain(cards(CudaOptions::default(), Options::default())).collect()
}

fn traced(machine: &Machine, overrides: &[&str]) -> Result<Trace, TrainError> {
    trace_steps(&config(overrides), machine, 3)
}

#[test]
fn three_steps_of_training_are_free_of_races_on_every_driver() {
    for overrides in [&[][..], &SHARDED] {
        for machine in machines() {
            let report = verify(&traced(&machine, overrides).unwrap(), &VerifyOptions::default());
            assert!(report.is_clean(), "{overrides:?} on {}: {report}", machine.driver());
            assert!(report.operations() > 500, "{report}");
        }
    }
}

#[test]
fn steps_from_graphs_of_every_scope_are_free_of_races_on_every_driver() {
    let (machines, dispatches) =
        (machines(), ["ddp.dispatch=chain", "ddp.dispatch=aligned", "ddp.dispatch=with-optimizer"]);
    for (graphs, dispatch) in GRAPHS[1..].iter().flat_map(|graphs| dispatches.map(|dispatch| (*graphs, dispatch))) {
        let overrides = [graphs, &SHARDED, &[dispatch]].concat();
        for machine in &machines {
            let trace = traced(machine, &overrides).unwrap();
            let launches = trace.events.iter().filter(|event| matches!(event, TraceEvent::Launch { .. })).count();
            assert!(launches >= 4, "{overrides:?}: two steps on two ranks are launched, not submitted");
            let report = verify(&trace, &VerifyOptions::default());
            assert!(report.is_clean(), "{overrides:?} on {}: {report}", machine.driver());
        }
    }
}

#[test]
fn training_on_sixty_four_ranks_is_free_of_races() {
    let overrides = ["optimizer.distributed=true", "layout.dp=64", "train.global_batch=128", "train.micro_batch=1"];
    let report = verify(&traced(&Machine::dry(), &overrides).unwrap(), &VerifyOptions::default());
    assert!(report.is_clean(), "{report}");
    assert!(report.operations() > 20_000, "{report}");
}

/// What orders the streams of a training run. Its other waits are covered by its single compute stream; the tests of
/// `ddp` have programs that need them.
const NEEDED: [&str; 6] = [
    "ddp.gather_after_write",
    "ddp.reduce_after_landed",
    "ddp.step_after_reduce",
    "ddp.step_after_step",
    "pgroups.read_after_publish",
    "trainer.update_time_after_passes",
];

#[test]
fn training_without_a_wait_that_orders_its_streams_is_objected_to_by_name() {
    let run = |whys: &[Label]| {
        let machine = Machine::dry();
        whys.iter().for_each(|why| machine.drop_waits(why.clone()));
        traced(&machine, &SHARDED)
    };
    let score = mutate(run, &[], &VerifyOptions::default()).unwrap();
    assert!(score.whole.is_clean(), "{score}");
    let named = score.mutants.iter().filter(|mutant| match &mutant.noticed {
        Noticed::Found(finding) => matches!(&**finding, Finding::Race(race) if race.dropped.contains(&mutant.why)),
        _ => false,
    });
    let named: Vec<&str> = named.map(|mutant| mutant.why.as_str()).collect();
    assert_eq!(named, NEEDED, "{score}");
}

#[test]
fn a_finding_in_a_training_run_names_step_and_microbatch() {
    let machine = Machine::dry();
    machine.drop_waits("pgroups.read_after_publish");
    let all = VerifyOptions { limit: 1_000, ..VerifyOptions::default() };
    let report = verify(&traced(&machine, &SHARDED).unwrap(), &all);
    let races = report.findings().iter().filter(|finding| matches!(finding, Finding::Race(_)));
    let texts: Vec<String> = races.map(Finding::to_string).collect();
    let told = |text: &String| {
        ["step 2", "microbatch 1", "all_gather", "a wait named 'pgroups.read_after_publish' was dropped here"]
            .iter()
            .all(|part| text.contains(part))
    };
    assert!(texts.iter().any(told), "{report}");
}

#[test]
fn replayed_operations_carry_the_names_of_the_blocks_that_submitted_them() {
    // Initial values are those of parameters.
    let is_of_a_block = |(name, site): &(Label, Label)| {
        *name != *"init" && ["h.", "wte", "ln_f"].iter().any(|block| site.as_str().starts_with(block))
    };
    let submitted = traced(&Machine::dry(), &SHARDED).unwrap();
    let wanted: BTreeSet<(Label, Label)> = submitted.events.iter().filter_map(eager).filter(is_of_a_block).collect();
    assert!(wanted.contains(&("gemm".into(), "h.1.mlp.c_fc".into())), "{wanted:?}");
    for graphs in &GRAPHS[1..] {
        let trace = traced(&Machine::dry(), &[*graphs, &SHARDED].concat()).unwrap();
        let nodes = trace.events.iter().filter_map(launched).flat_map(|graph| &graph.nodes);
        let replayed: BTreeSet<(Label, Label)> = nodes.filter_map(node).filter(is_of_a_block).collect();
        assert_eq!(replayed, wanted, "{graphs:?}");
    }
}

fn eager(event: &TraceEvent) -> Option<(Label, Label)> {
    let TraceEvent::Op { name, site, .. } = event else { return None };
    Some((name.clone(), site.clone()))
}

fn launched(event: &TraceEvent) -> Option<&TraceGraph> {
    let TraceEvent::Launch { graph, .. } = event else { return None };
    Some(graph)
}

fn node(node: &TraceNode) -> Option<(Label, Label)> {
    let TraceNodeKind::Op { name, site, .. } = &node.what else { return None };
    Some((name.clone(), site.clone()))
}
