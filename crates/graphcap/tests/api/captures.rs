//! What a capture takes down, and that it does nothing else.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use device::{Error, Exchange, Why};
use graphcap::{CaptureScope, GateMode, GraphError};
use pgroups::{Param, Pass, Turn};

use super::support::*;

#[test]
fn a_graph_lists_what_it_reads_each_once_at_its_first_read() {
    for mode in MODES {
        let rig = Rig::new(&sim(1), &[1, 1, 1]);
        let graph = rig.reading(&mut rig.set(mode), "g", &[2, 0, 2, 1, 0, 0]);
        assert_eq!(graph.reads(), ["w2", "w0", "w1"]);
    }
}

#[test]
fn parameters_are_told_apart_by_object_and_not_by_name() {
    let mut rig = Rig::new(&sim(1), &[1, 1]);
    let (_, value) = &rig.buckets[1].memory[0];
    let twin = Param::new("w0", value, &rig.params[1].main_grad()).unwrap();
    twin.attach(Some(rig.buckets[1].clone()), None);
    rig.params[1] = twin;
    let graph = rig.reading(&mut rig.set(GateMode::InGraph), "g", &[0, 1, 0]);
    assert_eq!((graph.reads(), graph.conditions()), (vec!["w0".into(), "w0".into()], vec!["w0".into(), "w0".into()]));
}

#[test]
fn graphs_of_one_set_keep_separate_lists() {
    let rig = Rig::new(&sim(1), &[1, 1, 1]);
    let mut set = rig.set(GateMode::InGraph);
    let [a, b] = [("a", [0, 1]), ("b", [1, 2])].map(|(name, reads)| rig.reading(&mut set, name, &reads));
    assert_eq!((a.reads(), b.reads()), (vec!["w0".into(), "w1".into()], vec!["w1".to_owned(), "w2".into()]));
    // Nor do eager reads get into any list.
    rig.fold(&mut Turn::eager(Pass::Forward), 2, &rig.compute).unwrap();
    assert_eq!(a.reads(), ["w0", "w1"]);
}

#[test]
fn what_a_graph_prefetches_for_the_next_one_is_in_its_own_list_only() {
    // A reads w0 and w1 and fetches w2 into a slot, B uses that and fetches its own w3.
    for mode in MODES {
        let rig = Rig::new(&sim(1), &[1, 1, 1, 1]);
        let (mut set, slot) = (rig.set(mode), floats(&rig.device, "slot", NUMEL));
        let fetched = rig.device.event("fetched");
        rig.compute.upload(&slot, vec![0f32; NUMEL]).unwrap();
        let a = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
            let mut turn = scope.turn(Pass::Forward);
            [0, 1].iter().try_for_each(|&i| rig.fold(&mut turn, i, &rig.compute))?;
            order(&rig.compute, &rig.side, "fork")?;
            rig.fold_into(&mut turn, 2, &rig.side, &slot)?;
            rig.side.record_external(&fetched)?;
            Ok(order(&rig.side, &rig.compute, "join")?)
        };
        let b = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
            rig.compute.wait_external(&fetched, Why("test.fetched"))?;
            rig.compute.launch(fold(&slot, &rig.out))?;
            rig.fold(&mut scope.turn(Pass::Forward), 3, &rig.compute)
        };
        let (a, ()) = set.capture("a", &rig.compute, a).unwrap();
        let (b, ()) = set.capture("b", &rig.compute, b).unwrap();
        assert_eq!(a.reads(), ["w0", "w1", "w2"]);
        assert_eq!(b.reads(), ["w3"]);
    }
}

#[test]
fn a_read_is_listed_before_its_gate_can_fail() {
    let rig = Rig::new(&sim(1), &[1, 1]);
    let mut set = rig.set(GateMode::InGraph);
    let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
        // This stream takes no part in the capture, so it can have no gate there.
        let refused = scope.turn(Pass::Forward).read(&rig.params[1], &rig.side);
        assert!(refused.is_err());
        rig.fold(&mut scope.turn(Pass::Forward), 0, &rig.compute)
    };
    let (graph, ()) = set.capture("g", &rig.compute, body).unwrap();
    assert_eq!(graph.reads(), ["w1", "w0"]);
}

#[test]
fn a_capture_asks_nobody_and_submits_nothing() {
    for mode in MODES {
        let rig = Rig::new(&sim(1), &[2, 1]);
        rig.log.take();
        rig.machine.trace_start();
        let mut set = rig.set(mode);
        let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
            [0, 1, 2].iter().try_for_each(|&i| rig.fold(&mut scope.turn(Pass::Forward), i, &rig.compute))?;
            rig.contribute(scope.turn(Pass::Backward), 2, &rig.compute, 1.0)
        };
        set.capture("g", &rig.compute, body).unwrap();
        assert!(submitted(&rig.machine.trace_stop()).is_empty());
        assert!(rig.log.take().is_empty());
        assert!(rig.buckets.iter().all(|bucket| bucket.asked.load(SeqCst) == 0));
        assert_eq!(rig.result(), [1.0; NUMEL]);
    }
}

#[test]
fn backward_and_recompute_list_nothing_and_leave_their_releases() {
    for mode in MODES {
        let rig = Rig::new(&sim(1), &[1, 1, 1]);
        let mut set = rig.set(mode);
        let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
            rig.fold(&mut scope.turn(Pass::Backward), 0, &rig.compute)?;
            rig.fold(&mut scope.turn(Pass::Recompute), 1, &rig.compute)
        };
        let (graph, ()) = set.capture("g", &rig.compute, body).unwrap();
        assert!(graph.reads().is_empty() && graph.conditions().is_empty());
        assert!(!nodes(&graph).iter().any(|node| node.starts_with("wait")));
        rig.log.take();
        graph.replay(&rig.compute, &[]).unwrap();
        assert_eq!(rig.log.take(), ["done b0 graphcap.released.w0", "done b1 graphcap.released.w1"]);
        assert!(rig.buckets.iter().all(|bucket| bucket.asked.load(SeqCst) == 0));
        // The forbidden act: a forward read in a backward graph is found in its list.
        let forbidden = |scope: &mut CaptureScope<'_>| {
            let mut turn = scope.turn(Pass::Backward);
            turn.enter(Pass::Forward);
            rig.fold(&mut turn, 2, &rig.compute)
        };
        assert_eq!(set.capture("f", &rig.compute, forbidden).unwrap().0.conditions(), ["w2"]);
    }
}

#[test]
fn a_second_capture_of_the_device_is_refused_and_the_first_keeps_its_record() {
    let rig = Rig::new(&sim(1), &[1, 1]);
    let (mut outer, mut inner) = (rig.set(GateMode::InGraph), rig.set(GateMode::InGraph));
    let body = |scope: &mut CaptureScope<'_>| -> Result<GraphError, Caught> {
        rig.fold(&mut scope.turn(Pass::Forward), 0, &rig.compute)?;
        let refused = inner.capture("inner", &rig.side, |_| Ok::<_, Caught>(())).map(drop).unwrap_err();
        rig.fold(&mut scope.turn(Pass::Forward), 1, &rig.compute)?;
        Ok(refused)
    };
    let (graph, refused) = outer.capture("outer", &rig.compute, body).unwrap();
    assert!(matches!(&refused, GraphError::CaptureOpen { graph, rank: 0 } if graph == "inner"), "{refused}");
    assert_eq!(graph.reads(), ["w0", "w1"]);
    assert!(inner.graphs().is_empty());
    inner.capture("inner", &rig.side, |_| Ok::<_, Caught>(())).unwrap();
}

#[test]
fn a_failed_capture_leaves_everything_as_it_was_and_usable() {
    for mode in MODES {
        let never = Rig::eagerly(&sim(5), &[1, 1], &[0, 1, 0, 1]);
        let rig = Rig::new(&sim(5), &[1, 1]);
        let (mut set, before) = (rig.set(mode), rig.device.graphs());
        rig.log.take();
        let failing = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
            [0, 1].iter().try_for_each(|&i| rig.fold(&mut scope.turn(Pass::Forward), i, &rig.compute))?;
            rig.contribute(scope.turn(Pass::Backward), 1, &rig.compute, 1.0)?;
            Err("the third operation".into())
        };
        let error = set.capture("g", &rig.compute, failing).map(drop).unwrap_err();
        let GraphError::Body { graph, source } = &error else { panic!("{error}") };
        assert_eq!((graph.as_str(), source.to_string().as_str()), ("g", "the third operation"));
        assert_eq!(rig.device.graphs(), before);
        assert!(rig.log.take().is_empty() && set.graphs().is_empty() && !rig.compute.is_capturing());
        // One eager pass, and a second attempt.
        [0, 1].iter().for_each(|&i| rig.fold(&mut Turn::eager(Pass::Forward), i, &rig.compute).unwrap());
        rig.reading(&mut set, "again", &[0, 1]).replay(&rig.compute, &[]).unwrap();
        assert_eq!(rig.result(), never);
        // The first gradient of a parameter is still its first.
        let body = |scope: &mut CaptureScope<'_>| rig.contribute(scope.turn(Pass::Backward), 1, &rig.compute, 1.0);
        let (graph, ()) = set.capture("grad", &rig.compute, body).unwrap();
        let flag = &rig.sinks[1].flag;
        let captured = graph.captured().unwrap();
        let reads_flag = captured.trace().nodes.iter().any(|node| match &node.what {
            device::TraceNodeKind::Op { accesses, .. } => accesses.iter().any(|a| a.allocation == flag.allocation_id()),
            _ => false,
        });
        assert!(reads_flag);
    }
}

#[test]
fn a_body_that_stops_with_a_forked_stream_tells_its_own_error() {
    let rig = Rig::new(&sim(1), &[1]);
    let mut set = rig.set(GateMode::InGraph);
    let fork = |fails: bool| {
        let rig = &rig;
        move |_: &mut CaptureScope<'_>| -> Result<(), Caught> {
            order(&rig.compute, &rig.side, "fork")?;
            rig.side.launch(fold(&rig.buckets[0].memory[0].1, &rig.out))?;
            if fails { Err("its own".into()) } else { Ok(()) }
        }
    };
    let error = set.capture("g", &rig.compute, fork(true)).map(drop).unwrap_err();
    assert!(matches!(&error, GraphError::Body { source, .. } if source.to_string() == "its own"), "{error}");
    let error = set.capture("g", &rig.compute, fork(false)).map(drop).unwrap_err();
    let GraphError::Device(cause) = &error else { panic!("{error}") };
    assert!(matches!(&**cause, Error::Unjoined { streams, .. } if streams == &["side"]), "{cause}");
}

#[test]
fn a_capture_that_panics_gives_its_streams_back() {
    let rig = Rig::new(&sim(1), &[1]);
    let mut set = rig.set(GateMode::InGraph);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        set.capture("g", &rig.compute, |_| -> Result<(), Caught> { panic!("planted") }).map(drop)
    }));
    assert!(caught.is_err() && !rig.compute.is_capturing());
    rig.reading(&mut set, "g", &[0]).replay(&rig.compute, &[]).unwrap();
    assert_eq!(rig.result(), [4.0; NUMEL]);
}

#[test]
fn an_eager_read_inside_a_capture_is_refused_by_name() {
    let rig = Rig::new(&sim(1), &[1]);
    let mut set = rig.set(GateMode::InGraph);
    let body = |_: &mut CaptureScope<'_>| rig.fold(&mut Turn::eager(Pass::Forward), 0, &rig.compute);
    let error = set.capture("g", &rig.compute, body).map(drop).unwrap_err();
    let GraphError::Device(cause) = &error else { panic!("{error}") };
    let Error::CaptureInvalid { source, .. } = &**cause else { panic!("{cause}") };
    assert!(matches!(&**source, Error::ForeignWait { event, .. } if event == "b0.published"), "{source}");
}

#[test]
fn a_capture_joins_its_own_streams_and_waits_for_no_others() {
    for machine in [cpu(), sim(1)] {
        let rig = Rig::new(&machine, &[1]);
        // Another stream cannot go on: rank 77 comes later.
        let ranks = [0, 77];
        let own = machine.meeting("held", &ranks, 0).unwrap();
        let eager = rig.device.stream("eager").unwrap();
        eager.joint(&own, Exchange::Barrier, "test", Vec::new()).unwrap();
        let end = rig.device.event("end");
        eager.record(&end).unwrap();
        let graph = rig.reading(&mut rig.set(GateMode::InGraph), "g", &[0]);
        graph.replay(&rig.compute, &[]).unwrap();
        assert_eq!(rig.result(), [4.0; NUMEL]);
        assert!(!end.is_done());
        let late = machine.device(77).unwrap();
        let stream = late.stream("late").unwrap();
        stream.joint(&machine.meeting("held", &ranks, 77).unwrap(), Exchange::Barrier, "test", Vec::new()).unwrap();
        eager.synchronize().unwrap();
    }
}

#[test]
fn a_publication_that_nobody_has_waited_for_before_the_capture_is_waited_for_in_every_replay() {
    // An eager step has asked for the next value and never used it; then a capture begins.
    for mode in MODES {
        for seed in 0..20 {
            let rig = Rig::new(&sim(seed), &[1]);
            rig.params[0].publisher().unwrap().issue().unwrap();
            let graph = rig.reading(&mut rig.set(mode), "g", &[0]);
            let mut want = 1.0;
            for round in 1..=10 {
                graph.replay(&rig.compute, &[]).unwrap();
                want = 3.0 * want % 8191.0 + round as f32;
                want %= 8191.0;
                assert_eq!(rig.result(), [want; NUMEL], "seed {seed}, round {round}");
                rig.buckets[0].write(&rig.optimizer, round as f32 + 1.0);
                rig.params[0].publisher().unwrap().issue().unwrap();
            }
        }
    }
}

#[test]
fn asking_for_events_from_another_thread_breaks_no_capture() {
    const CAPTURES: usize = 1_000;
    let machine = cpu();
    let rig = Rig::new(&machine, &[1]);
    let peer = machine.device(1).unwrap();
    let (theirs, ours) = (peer.stream("peer").unwrap(), rig.device.stream("collectives").unwrap());
    let meetings = [0, 1].map(|rank| machine.meeting("all", &[0, 1], rank).unwrap());
    let last = rig.device.event("last");
    ours.record(&last).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let poller = {
        let (stop, last) = (stop.clone(), last.clone());
        thread::spawn(move || {
            let (mut done, mut pending) = (0u64, 0u64);
            while !stop.load(SeqCst) {
                if last.is_done() {
                    done += 1
                } else {
                    pending += 1
                }
                thread::sleep(Duration::from_micros(50));
            }
            (done, pending)
        })
    };
    let mut set = rig.set(GateMode::InGraph);
    for _ in 0..CAPTURES {
        ours.joint(&meetings[0], Exchange::Barrier, "test", Vec::new()).unwrap();
        ours.record(&last).unwrap();
        let graph = rig.reading(&mut set, "g", &[0]);
        theirs.joint(&meetings[1], Exchange::Barrier, "test", Vec::new()).unwrap();
        graph.replay(&rig.compute, &[]).unwrap();
    }
    rig.device.synchronize().unwrap();
    // One that never ends is still seen to be under way.
    ours.joint(&meetings[0], Exchange::Barrier, "test", Vec::new()).unwrap();
    ours.record(&last).unwrap();
    thread::sleep(Duration::from_millis(5));
    assert!(!last.is_done());
    theirs.joint(&meetings[1], Exchange::Barrier, "test", Vec::new()).unwrap();
    stop.store(true, SeqCst);
    let (_, pending) = poller.join().unwrap();
    assert_eq!(set.graphs().len(), CAPTURES);
    assert!(pending > 0, "the poller has seen the last one under way");
}
