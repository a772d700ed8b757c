//! Joint operations in graphs: matched over the ranks by group, launch and position, in whatever order branches run.

use device::*;

use super::{
    capture_graphs::{executable, order},
    drivers::{Driver, SHORT, sim},
    ranks::{all_well, run_ranks},
    work::{Counter, failing, floats, set, step},
};

conformance! {
    every:
        independent_branches_may_meet_in_any_order,
        graphs_and_calls_of_a_group_keep_one_order,
        members_whose_graphs_differ_are_told_the_first_difference,
        a_graph_and_a_call_do_not_meet,
        more_calls_on_one_side_are_told_and_nobody_hangs,
        groups_are_free_again_when_their_graphs_are_gone,
        a_member_that_returns_is_missed_in_a_graph,
        a_member_that_fails_in_a_graph_is_named_to_its_peers;
    computing:
        graphs_of_permuted_groups_compute_what_calls_compute,
        joint_operations_of_two_groups_in_two_branches_compute_what_calls_compute
}

const SUM: Exchange = Exchange::AllReduce(Reduce::Sum);

/// Rank 1 comes last to one branch and first to the other.
fn independent_branches_may_meet_in_any_order(driver: &Driver) {
    let machine = driver.machine();
    let ranks = [0, 1, 2];
    let sums = all_well(&machine, &ranks, |device| {
        let (a, b) = (device.stream("a")?, device.stream("b")?);
        let meeting = machine.meeting("dp", &ranks, device.rank())?;
        let v = floats(device, "v", 2);
        let (x, y) = (v.flat(0..1)?, v.flat(1..2)?);
        let slow = |stream: &Stream, n: u32| (0..n).try_for_each(|_| stream.launch(Counter::default().op(Vec::new())));
        a.launch(set(&x, device.rank() as f32 + 1.0))?;
        a.launch(set(&y, 10.0))?;
        a.begin_capture("g")?;
        order(&a, &b, "fork");
        // Unequal work before the meetings, the other way round on every second rank.
        slow(&a, 3 * (device.rank() % 2))?;
        slow(&b, 3 - 3 * (device.rank() % 2))?;
        a.joint(&meeting, SUM, "x", vec![Access::update(&x)])?;
        b.joint(&meeting, SUM, "y", vec![Access::update(&y)])?;
        order(&b, &a, "join");
        let exec = a.end_capture()?.instantiate()?;
        (0..4).try_for_each(|_| a.launch_graph(&exec))?;
        a.synchronize()?;
        if machine.computes() { a.download::<f32>(&v)?.wait() } else { Ok(vec![162.0, 810.0]) }
    });
    assert_eq!(sums, vec![vec![162.0, 810.0]; 3]);
}

fn graphs_and_calls_of_a_group_keep_one_order(driver: &Driver) {
    let machine = driver.machine();
    let ranks = [1, 0];
    machine.trace_start();
    let values = all_well(&machine, &[0, 1], |device| {
        let (s, v) = (device.stream("s")?, floats(device, "v", 1));
        let meeting = machine.meeting("dp", &ranks, device.rank())?;
        let call = || s.joint(&meeting, SUM, "v", vec![Access::update(&v)]);
        let exec = executable(&s, || (0..3).for_each(|_| call().unwrap()));
        s.launch(set(&v, 1.0))?;
        for _ in 0..2 {
            call()?;
            s.launch_graph(&exec)?;
            s.launch_graph(&exec)?;
        }
        s.synchronize()?;
        if machine.computes() { Ok(s.download::<f32>(&v)?.wait()?[0]) } else { Ok(16_384.0) }
    });
    assert_eq!(values, [16_384.0; 2]);
    let numbers = |rank: u32, trace: &Trace| -> Vec<u64> {
        let numbers = trace.events.iter().filter_map(|event| match event {
            TraceEvent::Joint { rank: r, group_seq, .. } if *r == rank => Some(*group_seq),
            TraceEvent::Launch { rank: r, groups, .. } if *r == rank => Some(groups[0].group_seq),
            _ => None,
        });
        numbers.collect()
    };
    let trace = machine.trace_stop();
    assert_eq!([numbers(0, &trace), numbers(1, &trace)], [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]);
}

/// The error of every rank, each of which launches the graph of what `body` submits.
fn errors(driver: &Driver, body: impl Fn(u32, &Stream, &Meeting, &View) + Sync) -> Vec<Error> {
    let machine = driver.machine();
    let ended = run_ranks(&machine, &[0, 1], |device| {
        let (s, v) = (device.stream("s")?, floats(device, "v", 4));
        let meeting = machine.meeting("dp", &[0, 1], device.rank())?;
        body(device.rank(), &s, &meeting, &v);
        s.synchronize()
    });
    ended.into_iter().map(|end| end.expect("no panic").expect_err("it must not go well")).collect()
}

fn launch(s: &Stream, body: impl FnOnce()) {
    let exec = executable(s, body);
    // A peer may have failed by now.
    let _ = s.launch_graph(&exec);
}

fn members_whose_graphs_differ_are_told_the_first_difference(driver: &Driver) {
    let got = errors(driver, |rank, s, meeting, v| {
        launch(s, || {
            let n = if rank == 0 { 4 } else { 3 };
            s.joint(meeting, SUM, "same", vec![Access::update(v)]).unwrap();
            s.joint(meeting, SUM, "other", vec![Access::update(&v.flat(0..n).unwrap())]).unwrap();
            s.joint(meeting, Exchange::Barrier, "same", Vec::new()).unwrap();
        });
    });
    for error in got {
        let text = "members of group 'dp' disagree at #0: \
                    rank 0 asks all_reduce(Sum) of 4 f32 as call 1 of 3 of graph 'g'; \
                    rank 1 asks all_reduce(Sum) of 3 f32 as call 1 of 3 of graph 'g'";
        assert_eq!(error.to_string(), text);
    }
}

fn a_graph_and_a_call_do_not_meet(driver: &Driver) {
    let got = errors(driver, |rank, s, meeting, v| {
        let call = || s.joint(meeting, SUM, "v", vec![Access::update(v)]).unwrap();
        if rank == 0 { launch(s, call) } else { call() }
    });
    for error in got {
        let Error::Disagree { seq: 0, asked, .. } = &error else { panic!("{error}") };
        let want = ["all_reduce(Sum) of 4 f32 as call 0 of 1 of graph 'g'", "all_reduce(Sum) of 4 f32"];
        assert_eq!(asked.0.iter().map(|(_, text)| &text[..]).collect::<Vec<_>>(), want);
    }
}

fn more_calls_on_one_side_are_told_and_nobody_hangs(driver: &Driver) {
    let got = errors(driver, |rank, s, meeting, _| {
        let two = s.device().stream("two").unwrap();
        launch(s, || {
            order(s, &two, "fork");
            s.joint(meeting, Exchange::Barrier, "all", Vec::new()).unwrap();
            // In a branch of its own, so that it may come up first.
            if rank == 1 {
                two.joint(meeting, Exchange::Barrier, "more", Vec::new()).unwrap();
            }
            order(&two, s, "join");
        });
    });
    for error in got {
        let Error::Disagree { asked, .. } = &error else { panic!("{error}") };
        let want = ["nothing as call 1 of 1 of graph 'g'", "barrier as call 1 of 2 of graph 'g'"];
        assert_eq!(asked.0.iter().map(|(_, text)| &text[..]).collect::<Vec<_>>(), want);
    }
}

fn groups_are_free_again_when_their_graphs_are_gone(driver: &Driver) {
    let machine = driver.machine();
    all_well(&machine, &[0, 1], |device| {
        let s = device.stream("s")?;
        for round in 0..10 {
            // Under one name with other members each time: refused while a graph keeps the group open.
            let members = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            let meeting = machine.meeting("dp", &members, device.rank())?;
            let exec = executable(&s, || s.joint(&meeting, Exchange::Barrier, "b", Vec::new()).unwrap());
            s.launch_graph(&exec)?;
            s.synchronize()?;
            drop((meeting, exec));
            // Both have let go before one opens it anew.
            let turn = machine.meeting(&format!("turn {round}"), &[0, 1], device.rank())?;
            s.joint(&turn, Exchange::Barrier, "turn", Vec::new())?;
            s.synchronize()?;
        }
        Ok(())
    });
    let device = machine.device(0).unwrap();
    assert_eq!(device.graphs(), GraphUse::default());
}

fn a_member_that_returns_is_missed_in_a_graph(driver: &Driver) {
    let machine = driver.limited(SHORT * 20);
    let ended = run_ranks(&machine, &[0, 1, 2], |device| {
        let s = device.stream("s")?;
        let meeting = machine.meeting("dp", &[2, 0, 1], device.rank())?;
        if device.rank() == 1 {
            return Ok(());
        }
        let out = device.event("out");
        launch(&s, || {
            s.joint(&meeting, Exchange::Barrier, "b", Vec::new()).unwrap();
            s.record_external(&out).unwrap();
        });
        let waited = s.synchronize();
        assert!(out.is_done() || out.generation() == 0, "gates open behind a failure");
        waited
    });
    for rank in [0, 2] {
        let error = ended[rank].as_ref().unwrap().as_ref().unwrap_err();
        assert!(matches!(error, Error::PeerGone { rank: 1, how: Departure::Returned, .. }), "{error}");
    }
}

fn a_member_that_fails_in_a_graph_is_named_to_its_peers(driver: &Driver) {
    let machine = driver.machine();
    if !machine.computes() {
        return;
    }
    let ended = run_ranks(&machine, &[0, 1], |device| {
        let (s, two) = (device.stream("s")?, device.stream("two")?);
        let meeting = machine.meeting("dp", &[0, 1], device.rank())?;
        launch(&s, || {
            order(&s, &two, "fork");
            if device.rank() == 1 {
                s.launch(failing("h1", "no luck")).unwrap();
            }
            s.joint(&meeting, Exchange::Barrier, "b", Vec::new()).unwrap();
            two.joint(&meeting, Exchange::Barrier, "c", Vec::new()).unwrap();
            order(&two, &s, "join");
        });
        s.synchronize()
    });
    let errors: Vec<Error> = ended.into_iter().map(|end| end.unwrap().unwrap_err()).collect();
    assert!(
        matches!(&errors[0], Error::PeerGone { rank: 1, how: Departure::Failed(text), .. } if text.contains("no luck"))
    );
    let Error::Failed { op, .. } = &errors[1] else { panic!("{}", errors[1]) };
    assert_eq!((op.name, op.node), ("fail", Some(0)));
    assert_eq!(op.to_string(), "fail@h1 (rank 1, stream 's', #0 node 0)");
}

fn graphs_of_permuted_groups_compute_what_calls_compute(driver: &Driver) {
    let order_of = [3, 0, 2];
    let run = |replay: bool| {
        let machine = driver.machine();
        all_well(&machine, &[0, 2, 3], |device| {
            let s = device.stream("s")?;
            let (shard, full) = (floats(device, "shard", 2), floats(device, "full", 6));
            let meeting = machine.meeting("gtp", &order_of, device.rank())?;
            let body = || -> Result<(), Error> {
                let gather = vec![Access::read(&shard), Access::write(&full)];
                s.joint(&meeting, Exchange::AllGather, "gather", gather)?;
                s.launch(step(&full, 3.0, device.rank() as f32))?;
                let scatter = vec![Access::read(&full), Access::write(&shard)];
                s.joint(&meeting, Exchange::ReduceScatter(Reduce::Avg), "scatter", scatter)
            };
            s.upload(&shard, vec![device.rank() as f32, 0.5])?;
            let exec = if replay { Some(executable(&s, || body().unwrap())) } else { None };
            for _ in 0..3 {
                match &exec {
                    Some(exec) => s.launch_graph(exec)?,
                    None => body()?,
                }
            }
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            Ok((bits(s.download::<f32>(&shard)?.wait()?), bits(s.download::<f32>(&full)?.wait()?)))
        })
    };
    assert_eq!(run(true), run(false));
}

/// One step of a rank in two groups, over two branches.
fn two_groups(device: &Device, streams: [&Stream; 2], groups: [&Meeting; 2], v: &View) -> Result<(), Error> {
    let [a, b] = streams;
    let (x, y) = (v.flat(0..2)?, v.flat(2..4)?);
    order(a, b, "fork");
    a.launch(step(&x, 2.0, device.rank() as f32))?;
    a.joint(groups[0], SUM, "tp", vec![Access::update(&x)])?;
    b.joint(groups[1], SUM, "dp", vec![Access::update(&y)])?;
    b.launch(step(&y, 3.0, 1.0))?;
    b.joint(groups[1], SUM, "dp again", vec![Access::update(&y)])?;
    order(b, a, "join");
    a.launch(step(v, 1.0, 1.0))
}

fn joint_operations_of_two_groups_in_two_branches_compute_what_calls_compute(driver: &Driver) {
    let run = |replay: bool| {
        let machine = driver.machine();
        all_well(&machine, &[0, 1, 2, 3], |device| {
            let (a, b, rank) = (device.stream("a")?, device.stream("b")?, device.rank());
            let tp = if rank < 2 { [1, 0] } else { [2, 3] };
            let dp = if rank % 2 == 0 { [0, 2] } else { [3, 1] };
            let groups = [
                &machine.meeting(&format!("tp{tp:?}"), &tp, rank)?,
                &machine.meeting(&format!("dp{dp:?}"), &dp, rank)?,
            ];
            let v = floats(device, "v", 4);
            a.launch(set(&v, rank as f32 + 1.0))?;
            let step = || two_groups(device, [&a, &b], groups, &v);
            let exec = if replay { Some(executable(&a, || step().unwrap())) } else { None };
            for _ in 0..4 {
                match &exec {
                    Some(exec) => a.launch_graph(exec)?,
                    None => step()?,
                }
            }
            a.download::<f32>(&v)?.wait()
        })
    };
    let replayed = run(true);
    assert_eq!(replayed, run(false));
    assert_ne!(replayed[0], replayed[1]);
}

/// Meetings of one launch complete in more than one order.
#[test]
fn seeds_complete_the_meetings_of_independent_branches_in_every_order() {
    let first = |seed: u64| {
        let driver = sim(seed);
        let machine = driver.machine();
        machine.trace_start();
        all_well(&machine, &[0, 1], |device| {
            let (a, b) = (device.stream("a")?, device.stream("b")?);
            let meeting = machine.meeting("dp", &[0, 1], device.rank())?;
            let v = floats(device, "v", 2);
            a.begin_capture("g")?;
            order(&a, &b, "fork");
            a.joint(&meeting, SUM, "x", vec![Access::update(&v.flat(0..1)?)])?;
            b.joint(&meeting, SUM, "y", vec![Access::update(&v.flat(1..2)?)])?;
            order(&b, &a, "join");
            a.launch_graph(&a.end_capture()?.instantiate()?)?;
            a.synchronize()
        });
        let ran = machine.trace_stop().events.into_iter().find_map(|event| match event {
            TraceEvent::Ran { rank: 0, node, .. } => node,
            _ => None,
        });
        ran.expect("something ran")
    };
    let firsts: std::collections::BTreeSet<u32> = (0..20).map(first).collect();
    assert_eq!(firsts.into_iter().collect::<Vec<_>>(), [0, 1]);
}
