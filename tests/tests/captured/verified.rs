//! What the verifier proves of captured training, that it notices whatever is taken away, and what overlaps.

use device::{Label, Machine, Note, Reduce, Trace, TraceEvent, TraceNodeKind};
use graphcap::{
    CaptureScope, GateMode, GraphConfig, GraphSet, Scope,
    verify::{Finding, Noticed, StaleReason, VerifyOptions, mutate, verify},
    why,
};
use pgroups::{After, Keep, Landed, Param, ParamClass, PgError, Turn};

use super::{
    left_out::{LeftOut, leave_out},
    support::*,
    training::*,
    unordered::{At, are_unordered},
};

fn traced(program: &Program, machine: &Machine, mutation: Mutation<'_>) -> Result<Trace, PgError> {
    machine.trace_start();
    program.run(machine, mutation)?;
    Ok(machine.trace_stop())
}

#[test]
fn captured_training_has_nothing_to_object_to_and_publishes_each_write_once() {
    let machines: Vec<_> = [sim(0), sim(1), cpu()].into_iter().chain(cards()).collect();
    for scope in [Scope::Layer, Scope::Chunk, Scope::Microbatch] {
        for mode in MODES {
            let program = Program { warm_ups: 1, ..Program::captured(scope, mode) };
            for machine in &machines {
                let trace = traced(&program, machine, &nothing).unwrap();
                let report = verify(&trace, &VerifyOptions::default());
                assert!(report.is_clean(), "{scope}, {mode} on {}: {report}", machine.driver());
                let issued = |note: &Note| matches!(note, Note::Issued { .. });
                let count = trace.events.iter().filter(|e| matches!(e, TraceEvent::Note { note, .. } if issued(note)));
                // Two ranks, three buckets; the initial values are published, and those of three steps.
                assert_eq!(count.count(), 2 * 3 * 3);
            }
        }
    }
}

#[test]
fn whole_steps_are_clean_and_hold_each_publication_and_reduction_once() {
    let program = Program { warm_ups: 1, ..Program::captured(Scope::Step, GateMode::InGraph) };
    for machine in [sim(0), sim(1), cpu()].into_iter().chain(cards()) {
        let trace = traced(&program, &machine, &nothing).unwrap();
        let report = verify(&trace, &VerifyOptions::default());
        assert!(report.is_clean(), "on {}: {report}", machine.driver());
        let launched = trace.events.iter().find_map(|event| match event {
            TraceEvent::Launch { graph, .. } => Some(graph.clone()),
            _ => None,
        });
        let calls = |of: &str| {
            let is = |node: &&device::TraceNode| match &node.what {
                TraceNodeKind::Joint { group, .. } => group.as_str().ends_with(of),
                _ => false,
            };
            launched.as_ref().unwrap().nodes.iter().filter(is).count()
        };
        // Three buckets.
        assert_eq!((calls("ddp_gather"), calls("ddp_reduce")), (3, 3), "{:?}", groups(&trace));
    }
}

#[test]
fn below_a_step_graphs_hold_neither_publication_nor_reduction_and_one_that_does_is_told() {
    let program = Program::captured(Scope::Layer, GateMode::InGraph);
    let trace = traced(&program, &sim(1), &nothing).unwrap();
    let joint = |event: &TraceEvent| match event {
        TraceEvent::Launch { graph, .. } => {
            graph.nodes.iter().any(|node| matches!(node.what, TraceNodeKind::Joint { .. }))
        }
        _ => false,
    };
    assert!(!trace.events.iter().any(joint));
    // The forbidden act: a reduction over the replicas inside a graph that runs once a microbatch.
    let reduces = |trainer: &Trainer| {
        let mut set = GraphSet::new(&trainer.compute, GraphConfig::new(Scope::Layer)).unwrap();
        let group = trainer.ddp.replicas(ParamClass::Dense).clone();
        let sum = floats(&trainer.device, "sum", 8);
        trainer.compute.upload(&sum, vec![1f32; 8]).unwrap();
        let body = |_: &mut CaptureScope<'_>| group.all_reduce(&trainer.compute, &sum, Reduce::Sum);
        let (graph, ()) = set.capture("forbidden", &trainer.compute, body).unwrap();
        graph.replay(&trainer.compute, &[]).unwrap();
        trainer.device.synchronize().unwrap();
    };
    let trace = traced(&program, &sim(1), &reduces).unwrap();
    let report = verify(&trace, &VerifyOptions::default());
    let told = |finding: &Finding| match finding {
        Finding::ForbiddenInGraph { act, graph, scope, .. } => {
            (*act, graph.as_str(), scope.as_str()) == ("data-parallel reduction", "forbidden", "layer")
        }
        _ => false,
    };
    assert!(report.findings().iter().any(told), "{report}");
}

#[test]
fn every_gate_of_captured_training_is_noticed_by_name_when_it_is_missing() {
    let program = Program::captured(Scope::Microbatch, GateMode::InGraph);
    let run = |without: &[Label]| {
        let machine = sim(0);
        without.iter().for_each(|why| machine.drop_waits(why.clone()));
        traced(&program, &machine, &nothing)
    };
    let score = mutate(run, &[], &VerifyOptions::default()).unwrap();
    assert!(score.whole.is_clean(), "{score}");
    for why in why::ALL.into_iter().chain([Turn::READ_AFTER_PUBLISH]) {
        let noticed = score.mutants.iter().find(|mutant| mutant.why.as_str() == why.0).map(|mutant| &mutant.noticed);
        match why {
            // No node follows it: launches end behind all their nodes. It keeps the rule that captures end joined.
            why::END_AFTER_GATES => assert_eq!(noticed, None, "{score}"),
            // These replays follow each other on one stream; `arguments` has them on two.
            why::INPUT_AFTER_READ => assert_eq!(noticed, Some(&Noticed::Missed), "{score}"),
            _ => {
                let Some(Noticed::Found(finding)) = noticed else { panic!("{why}: {score}") };
                let Finding::Race(race) = &**finding else { panic!("{why}: {finding}") };
                assert!(race.dropped.iter().any(|dropped| *dropped == *why.0), "{why}: {race}");
            }
        }
    }
}

#[test]
fn before_a_replay_the_wait_for_publications_is_noticed_when_it_is_missing() {
    let machine = sim(0);
    machine.drop_waits(Turn::READ_AFTER_PUBLISH);
    let trace = traced(&Program::captured(Scope::Chunk, GateMode::BeforeReplay), &machine, &nothing).unwrap();
    let report = verify(&trace, &VerifyOptions::default());
    let named = |finding: &Finding| match finding {
        Finding::Race(race) => race.dropped.iter().any(|dropped| *dropped == *Turn::READ_AFTER_PUBLISH.0),
        _ => false,
    };
    assert!(report.findings().iter().any(named), "{report}");
}

#[test]
fn a_replay_whose_publications_are_left_out_is_refused_or_told() {
    for mode in MODES {
        let program = Program::captured(Scope::Microbatch, mode);
        let failed = traced(&program, &sim(0), &|trainer| leave_out(trainer, LeftOut::Issue)).unwrap_err();
        assert!(format!("{failed:?}").contains("Stale"), "{failed:?}");
        // A publisher that lies about its epochs is contradicted by the trace.
        let trace = traced(&program, &sim(0), &|trainer| leave_out(trainer, LeftOut::IssueAndEpochs)).unwrap();
        let report = verify(&trace, &VerifyOptions::default());
        let told = |finding: &Finding| match finding {
            Finding::Stale(stale) => matches!(stale.reason, StaleReason::NotIssued { written: 2, issued: 1 }),
            _ => false,
        };
        assert!(report.findings().iter().any(told), "{mode}: {report}");
    }
}

#[test]
fn a_replay_whose_releases_nobody_hears_of_is_told() {
    for mode in MODES {
        let program = Program::captured(Scope::Microbatch, mode);
        let trace = traced(&program, &sim(0), &|trainer| leave_out(trainer, LeftOut::Release)).unwrap();
        let report = verify(&trace, &VerifyOptions::default());
        let races = report.findings().iter().filter(|finding| matches!(finding, Finding::Race(_)));
        assert!(races.count() > 0, "{mode}: {report}");
    }
}

#[test]
fn a_gradient_that_lands_before_its_graph_or_that_nobody_hears_of_is_told() {
    /// Hears of nothing, or of everything at once.
    struct Deaf(Option<std::sync::Arc<dyn Landed>>, device::Stream);
    impl Landed for Deaf {
        fn open(&self, param: &Param, stream: &device::Stream) -> Result<Keep, PgError> {
            self.0.as_ref().map_or(Ok(Keep::All), |inner| inner.open(param, stream))
        }
        fn first_use(&self) -> Keep {
            self.0.as_ref().map_or(Keep::All, |inner| inner.first_use())
        }
        fn landed(&self, param: &Param, _: After<'_>) -> Result<(), PgError> {
            // Behind a stream that is behind nothing, instead of the graph's gate.
            self.0.as_ref().map_or(Ok(()), |inner| inner.landed(param, After::Stream(&self.1)))
        }
    }
    let program = Program::captured(Scope::Microbatch, GateMode::InGraph);
    let deafen = |keeps: bool| {
        move |trainer: &Trainer| {
            let param = trainer.param(1);
            let elsewhere = trainer.device.stream("elsewhere").unwrap();
            let inner = param.landed_sink().filter(|_| keeps);
            param.attach(param.publisher(), Some(std::sync::Arc::new(Deaf(inner, elsewhere))));
        }
    };
    let report = verify(&traced(&program, &sim(0), &deafen(true)).unwrap(), &VerifyOptions::default());
    assert!(report.findings().iter().any(|finding| matches!(finding, Finding::Race(_))), "{report}");
    let failed = traced(&program, &sim(0), &deafen(false)).unwrap_err();
    assert!(format!("{failed:?}").contains("Unfilled"), "{failed:?}");
}

/// Operations of rank 0 in a trace, with the step and microbatch in which they were submitted.
struct Submitted {
    at: At,
    /// Name, or group.
    name: String,
    site: String,
    during: (u64, u64),
}

fn submitted(trace: &Trace) -> Vec<Submitted> {
    let (mut all, mut during) = (Vec::new(), (0, 0));
    for (event, what) in trace.events.iter().enumerate() {
        let mut push = |node, name: &Label, site: &Label| {
            all.push(Submitted { at: At { event, node }, name: name.to_string(), site: site.to_string(), during });
        };
        match what {
            TraceEvent::Note { rank: 0, note: Note::Step(step), .. } => during = (*step, 0),
            TraceEvent::Note { rank: 0, note: Note::Microbatch(number), .. } => during.1 = *number,
            TraceEvent::Op { rank: 0, name, site, .. } => push(None, name, site),
            TraceEvent::Joint { rank: 0, group, site, .. } => push(None, group, site),
            TraceEvent::Launch { rank: 0, graph, .. } => {
                for (node, what) in graph.nodes.iter().enumerate() {
                    if let TraceNodeKind::Op { name, site, .. } = &what.what {
                        push(Some(node), name, site);
                    }
                }
            }
            _ => {}
        }
    }
    all
}

#[test]
fn in_a_graph_gathers_and_reductions_overlap_what_they_need_not_wait_for() {
    for mode in MODES {
        let trace = traced(&Program::captured(Scope::Microbatch, mode), &sim(1), &nothing).unwrap();
        let [published, reduced] = groups(&trace);
        let all = submitted(&trace);
        let (step, in_graph) = (1, mode == GateMode::InGraph);
        // One bucket a layer. Values are gathered in the order of layers, gradients reduced in the other one.
        let calls = |group: &str| -> Vec<At> {
            all.iter().filter(|one| one.name == group && one.during.0 == step).map(|one| one.at).collect()
        };
        let op = |name: &str, layer: usize, microbatch: u64| -> At {
            let site = format!("h{layer}");
            let is = |one: &&Submitted| one.name == name && one.site == site && one.during == (step, microbatch);
            all.iter().find(is).unwrap().at
        };
        let (gathers, reductions) = (calls(&published), calls(&reduced));
        assert_eq!((gathers.len(), reductions.len()), (3, 3));
        for (bucket, layer) in [(1, 0), (2, 0), (2, 1)] {
            // An earlier layer's forward, in the first microbatch; backward of what comes later, in the last one.
            let forward = are_unordered(&trace, [gathers[bucket], op("forward", layer, 1)]);
            assert_eq!(forward, in_graph, "{mode}: gather of bucket {bucket}, forward of layer {layer}");
            let backward = are_unordered(&trace, [reductions[2 - bucket], op("dgrad", layer, 2)]);
            assert!(backward, "{mode}: reduction of bucket {bucket}, backward of layer {layer}");
        }
        for layer in 0..3 {
            assert!(!are_unordered(&trace, [gathers[layer], op("forward", layer, 1)]), "it reads what is gathered");
            assert!(!are_unordered(&trace, [reductions[2 - layer], op("wgrad", layer, 2)]), "it reduces what landed");
        }
    }
}

/// Names of the groups that publish and that reduce.
fn groups(trace: &Trace) -> [String; 2] {
    let find = |of: fn(&Note) -> Option<&Label>| {
        let notes = trace.events.iter().filter_map(|event| match event {
            TraceEvent::Note { note, .. } => of(note),
            _ => None,
        });
        notes.map(Label::to_string).next().unwrap()
    };
    [
        find(|note| match note {
            Note::Issued { group, .. } => Some(group),
            _ => None,
        }),
        find(|note| match note {
            Note::Reduced { group, .. } => Some(group),
            _ => None,
        }),
    ]
}
