//! What must be published before a replay: asked for in order, once, and before anything else happens.

use std::sync::{Arc, atomic::Ordering::SeqCst};

use device::{TraceEvent, WaitOutcome};
use graphcap::{CaptureScope, GateMode, Given, GraphError};
use pgroups::{Pass, PgError, Turn};

use super::support::*;

#[test]
fn there_is_one_condition_a_publisher_in_the_order_of_first_reads() {
    for mode in MODES {
        let rig = Rig::new(&sim(1), &[2, 1, 2]);
        // Parameters 0 and 1 share a bucket, 3 and 4 another; 2 is alone.
        let graph = rig.reading(&mut rig.set(mode), "g", &[4, 1, 3, 0, 2]);
        assert_eq!(graph.conditions(), ["w4", "w1", "w2"]);
        rig.log.take();
        graph.replay(&rig.compute, &[]).unwrap();
        let issued: Vec<String> = rig.log.take().into_iter().filter(|said| said.starts_with("issue")).collect();
        assert_eq!(issued, ["issue b2", "issue b0", "issue b1"]);
    }
}

#[test]
fn a_replay_publishes_then_copies_then_launches() {
    for mode in MODES {
        let rig = Rig::new(&sim(1), &[1, 1]);
        let (mut set, x, slot) = (rig.set(mode), floats(&rig.device, "x", NUMEL), floats(&rig.device, "slot", NUMEL));
        let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
            scope.input("x", &slot)?;
            rig.compute.launch(fold(&slot, &rig.out))?;
            [1, 0].iter().try_for_each(|&i| rig.fold(&mut scope.turn(Pass::Forward), i, &rig.compute))
        };
        let (graph, ()) = set.capture("g", &rig.compute, body).unwrap();
        rig.compute.upload(&x, vec![5f32; NUMEL]).unwrap();
        rig.machine.trace_start();
        graph.replay(&rig.compute, &[("x", (&x).into())]).unwrap();
        let trace = rig.machine.trace_stop();
        assert_eq!(submitted(&trace), ["cast publish b1", "cast publish b0", "cast g.x", "launch g"]);
        // 1, then x, then what bucket 1 and bucket 0 hold.
        assert_eq!(rig.result(), [((3.0 + 5.0) * 3.0 + 2.0) * 3.0 + 1.0; NUMEL]);
    }
}

#[test]
fn refused_arguments_publish_nothing() {
    let rig = Rig::new(&sim(1), &[1]);
    let (mut set, slot) = (rig.set(GateMode::InGraph), floats(&rig.device, "slot", NUMEL));
    let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
        scope.input("x", &slot)?;
        rig.fold(&mut scope.turn(Pass::Forward), 0, &rig.compute)
    };
    let (graph, ()) = set.capture("g", &rig.compute, body).unwrap();
    rig.log.take();
    rig.machine.trace_start();
    for given in [vec![], vec![("x", Given::Value("5"))], vec![("y", (&slot).into())]] {
        assert!(matches!(graph.replay(&rig.compute, &given), Err(GraphError::Arguments { .. })));
    }
    assert!(submitted(&rig.machine.trace_stop()).is_empty() && rig.log.take().is_empty());
    assert_eq!((rig.buckets[0].asked.load(SeqCst), graph.replays()), (0, 0));
}

#[test]
fn an_epoch_is_published_once_however_many_replays_and_graphs_read_it() {
    for mode in MODES {
        for machine in machines() {
            let rig = Rig::new(&machine, &[1, 1]);
            let mut set = rig.set(mode);
            let graphs = [("a", vec![0, 1]), ("b", vec![1, 1, 0])].map(|(n, reads)| rig.reading(&mut set, n, &reads));
            rig.log.take();
            let mut want = 1f32;
            for epoch in 1..4 {
                for _microbatch in 0..3 {
                    graphs.iter().for_each(|graph| graph.replay(&rig.compute, &[]).unwrap());
                    rig.fold(&mut Turn::eager(Pass::Forward), 0, &rig.compute).unwrap();
                    let at = |i: usize| if epoch == 1 { (i + 1) as f32 } else { (10 * epoch + i) as f32 };
                    for read in [0, 1, 1, 1, 0, 0] {
                        want = (3.0 * want + at(read)) % 8191.0;
                    }
                }
                let issues = rig.log.take().into_iter().filter(|said| said.starts_with("issue")).count();
                assert_eq!(issues, 2, "epoch {epoch}");
                assert_eq!(rig.result(), [want; NUMEL], "{mode}, epoch {epoch} on {}", machine.driver());
                for (i, bucket) in rig.buckets.iter().enumerate() {
                    bucket.write(&rig.optimizer, (10 * (epoch + 1) + i) as f32);
                }
            }
        }
    }
}

#[test]
fn who_has_nothing_to_say_is_not_asked() {
    let rig = Rig::new(&sim(1), &[1, 1, 1]);
    let mut set = rig.set(GateMode::InGraph);
    let graph = rig.reading(&mut set, "g", &[0, 1, 2]);
    let empty = set.capture("empty", &rig.compute, |_| Ok::<_, Caught>(())).unwrap().0;
    let asked = || rig.buckets.iter().map(|bucket| bucket.asked.load(SeqCst)).collect::<Vec<_>>();
    empty.replay(&rig.compute, &[]).unwrap();
    assert_eq!(asked(), [0, 0, 0]);
    for _ in 0..5 {
        graph.replay(&rig.compute, &[]).unwrap();
    }
    assert_eq!(asked(), [1, 1, 1]);
    // A write wakes its own bucket only.
    rig.buckets[1].write(&rig.optimizer, 7.0);
    (0..2).for_each(|_| graph.replay(&rig.compute, &[]).unwrap());
    assert_eq!(asked(), [1, 2, 1]);
    // A publisher without a flag to look at is asked every time.
    rig.buckets[2].always_asked.store(true, SeqCst);
    let again = rig.reading(&mut set, "again", &[2]);
    (0..3).for_each(|_| again.replay(&rig.compute, &[]).unwrap());
    assert_eq!(asked(), [1, 2, 4]);
}

#[test]
fn a_value_that_nobody_publishes_is_refused_with_both_epochs_and_nothing_is_launched() {
    for mode in MODES {
        let rig = Rig::new(&sim(1), &[1, 1]);
        let graph = rig.reading(&mut rig.set(mode), "g", &[0, 1]);
        graph.replay(&rig.compute, &[]).unwrap();
        rig.buckets[1].write(&rig.optimizer, 9.0);
        rig.buckets[1].hands_off.store(true, SeqCst);
        rig.log.take();
        rig.machine.trace_start();
        let error = graph.replay(&rig.compute, &[]).unwrap_err();
        assert!(matches!(pg(&error), PgError::Stale { param, written: 2, issued: 1 } if param == "w1"), "{error}");
        assert!(submitted(&rig.machine.trace_stop()).is_empty() && rig.log.take().is_empty());
        assert_eq!(graph.replays(), 1);
        // Whoever owns the schedule publishes, and the same replay is good.
        rig.buckets[1].hands_off.store(false, SeqCst);
        graph.replay(&rig.compute, &[]).unwrap();
        assert_eq!(rig.result(), [((3.0 + 1.0) * 3.0 + 2.0) * 9.0 + 3.0 + 9.0; NUMEL]);
    }
}

#[test]
fn a_published_epoch_costs_no_wait_on_the_launching_stream_in_later_replays() {
    let rig = Rig::new(&sim(1), &[1]);
    let graph = rig.reading(&mut rig.set(GateMode::BeforeReplay), "g", &[0]);
    rig.machine.trace_start();
    (0..3).for_each(|_| graph.replay(&rig.compute, &[]).unwrap());
    let trace = rig.machine.trace_stop();
    let outcome = |event: &TraceEvent| match event {
        TraceEvent::Wait { why, outcome, .. } if *why == *Turn::READ_AFTER_PUBLISH.0 => Some(*outcome),
        _ => None,
    };
    let outcomes: Vec<WaitOutcome> = trace.events.iter().filter_map(outcome).collect();
    assert_eq!(outcomes, [WaitOutcome::Enforced, WaitOutcome::Elided, WaitOutcome::Elided]);
}

#[test]
fn conditions_keep_no_parameter_alive() {
    for mode in MODES {
        let mut rig = Rig::new(&sim(1), &[1, 1]);
        let mut set = rig.set(mode);
        let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
            rig.fold(&mut scope.turn(Pass::Forward), 0, &rig.compute)?;
            rig.fold(&mut scope.turn(Pass::Forward), 1, &rig.compute)?;
            rig.contribute(scope.turn(Pass::Backward), 1, &rig.compute, 1.0)
        };
        let (graph, ()) = set.capture("g", &rig.compute, body).unwrap();
        graph.replay(&rig.compute, &[]).unwrap();
        let weak = rig.params[1].downgrade();
        rig.params.pop();
        assert!(weak.upgrade().is_none(), "neither the graph nor its set holds it");
        let error = graph.replay(&rig.compute, &[]).unwrap_err();
        assert!(error.to_string().contains("parameter 'w1' is gone"), "{error}");
        assert_eq!(graph.replays(), 1);
    }
}

#[test]
fn a_list_is_frozen_by_the_end_of_its_capture() {
    let rig = Rig::new(&sim(1), &[1, 1, 1]);
    let mut set = rig.set(GateMode::InGraph);
    let graph = rig.reading(&mut set, "g", &[1]);
    // What an eager pass, another capture and a failed one read.
    rig.fold(&mut Turn::eager(Pass::Forward), 0, &rig.compute).unwrap();
    rig.reading(&mut set, "other", &[2, 0]);
    let failing = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
        rig.fold(&mut scope.turn(Pass::Forward), 2, &rig.compute)?;
        Err("stopped".into())
    };
    assert!(set.capture("failed", &rig.compute, failing).is_err());
    graph.warm_up(&rig.compute, 2).unwrap();
    assert_eq!((graph.reads(), graph.conditions()), (vec!["w1".to_owned()], vec!["w1".to_owned()]));
}

#[test]
fn a_publisher_that_comes_after_the_capture_is_asked_waited_for_and_told() {
    for mode in MODES {
        for seed in 0..30 {
            let rig = Rig::new(&sim(seed), &[1]);
            let publisher = rig.params[0].publisher();
            rig.params[0].attach(None, None);
            rig.compute.upload(&rig.buckets[0].memory[0].1, vec![0f32; NUMEL]).unwrap();
            rig.compute.synchronize().unwrap();
            let graph = rig.reading(&mut rig.set(mode), "g", &[0]);
            assert!(graph.conditions().is_empty());
            rig.params[0].attach(publisher, None);
            let mut want = 1f32;
            for epoch in 1..6 {
                rig.log.take();
                graph.replay(&rig.compute, &[]).unwrap();
                assert_eq!(rig.log.take(), ["issue b0", "done b0 compute"]);
                want = (3.0 * want + epoch as f32) % 8191.0;
                // Behind the release of that read.
                rig.buckets[0].write(&rig.optimizer, epoch as f32 + 1.0);
            }
            assert_eq!((graph.conditions(), rig.result()), (vec!["w0".to_owned()], vec![want; NUMEL]), "seed {seed}");
        }
    }
}

#[test]
fn what_a_graph_reads_can_be_published_ahead_of_its_replay() {
    for mode in MODES {
        let rig = Rig::new(&sim(1), &[1, 1]);
        let graph = rig.reading(&mut rig.set(mode), "g", &[1, 0]);
        rig.log.take();
        (0..2).for_each(|_| graph.make_ready().unwrap());
        assert_eq!((rig.log.take(), graph.replays()), (vec!["issue b1".into(), "issue b0".to_owned()], 0));
        graph.replay(&rig.compute, &[]).unwrap();
        assert!(!rig.log.take().iter().any(|said| said.starts_with("issue")));
        assert_eq!(rig.result(), [(3.0 + 2.0) * 3.0 + 1.0; NUMEL]);
    }
}

#[test]
fn readiness_is_told_by_whoever_publishes_now_and_by_nobody_after_deletion() {
    let rig = Rig::new(&sim(1), &[1, 1]);
    let mut set = rig.set(GateMode::InGraph);
    let graph = rig.reading(&mut set, "g", &[0, 1]);
    let asked = |bucket: &Bucket| bucket.asked.load(SeqCst);
    (0..3).for_each(|_| graph.make_ready().unwrap());
    assert_eq!([asked(&rig.buckets[0]), asked(&rig.buckets[1])], [1, 1], "later looks ask nobody");
    rig.buckets[1].write(&rig.optimizer, 7.0);
    (0..3).for_each(|_| graph.make_ready().unwrap());
    assert_eq!([asked(&rig.buckets[0]), asked(&rig.buckets[1])], [1, 2]);
    // Another owner, twice: its flag counts, not the one that the graph was captured with.
    for round in 0..2 {
        rig.device.synchronize().unwrap();
        let next = Arc::new(bucket(&rig.device, "next", rig.buckets[0].memory.clone(), &rig.log));
        rig.params[0].attach(Some(next.clone()), rig.params[0].landed_sink());
        next.write(&rig.optimizer, 9.0 + round as f32);
        (0..3).for_each(|_| graph.make_ready().unwrap());
        assert_eq!((asked(&next), asked(&rig.buckets[0])), (1, 1), "round {round}");
        rig.log.take();
        graph.replay(&rig.compute, &[]).unwrap();
        assert!(!rig.log.take().iter().any(|said| said.starts_with("issue")));
        next.write(&rig.optimizer, 5.0);
        graph.make_ready().unwrap();
        assert_eq!(asked(&next), 2, "round {round}");
    }
    // A publisher without a flag is asked every time.
    rig.buckets[1].always_asked.store(true, SeqCst);
    rig.params[1].attach(Some(rig.buckets[1].clone()), rig.params[1].landed_sink());
    let before = asked(&rig.buckets[1]);
    (0..3).for_each(|_| graph.make_ready().unwrap());
    assert_eq!(asked(&rig.buckets[1]), before + 3);
    set.delete();
    assert!(matches!(graph.make_ready(), Err(GraphError::Deleted { .. })));
}
