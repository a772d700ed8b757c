//! What may depend on workers and seeds: nothing that is ordered, and nothing at all twice under one seed.

use std::collections::BTreeSet;

use device::*;

use super::{
    drivers::{Driver, cpu, dry, sim},
    ranks::all_well,
    work::{Counter, failing, floats, open, set, step},
};

/// Four ranks, each with a computing and a communicating stream that hand a buffer to and fro.
fn ordered(machine: &Machine) -> Vec<Vec<u32>> {
    let ranks = [2, 0, 3, 1];
    all_well(machine, &ranks, |device| {
        let (compute, comm) = (device.stream("compute")?, device.stream("comm")?);
        let (ready, reduced) = (device.event("ready"), device.event("reduced"));
        let meeting = device.machine().meeting("dp", &ranks, device.rank())?;
        let grads: Vec<View> = (0..3).map(|i| floats(device, "grad", 40 + i)).collect();
        for (i, grad) in grads.iter().enumerate() {
            compute.launch(set(grad, 0.1 * (device.rank() + 1) as f32 + i as f32))?;
        }
        for _ in 0..5 {
            for grad in &grads {
                compute.launch(step(grad, 1.3, 0.7))?;
                compute.record(&ready)?;
                comm.wait(&ready, Why("test.ready"))?;
                let accesses = vec![Access::update(grad)];
                comm.joint(&meeting, Exchange::AllReduce(Reduce::Avg), "bucket", accesses)?;
            }
            comm.record(&reduced)?;
            compute.wait(&reduced, Why("test.reduced"))?;
            compute.synchronize()?;
        }
        if !device.machine().computes() {
            return Ok(Vec::new());
        }
        let values = grads.iter().map(|g| compute.download::<f32>(g)?.wait()).collect::<Result<Vec<_>, _>>()?;
        Ok(values.concat().into_iter().map(f32::to_bits).collect())
    })
}

#[test]
fn an_ordered_program_gives_the_same_bits_on_any_workers_and_seeds() {
    let want = ordered(&sim(0).machine());
    for workers in [1, 2, 3, 4] {
        for _ in 0..5 {
            assert_eq!(ordered(&cpu(workers).machine()), want, "{workers} workers");
        }
    }
    for seed in 1..30 {
        assert_eq!(ordered(&sim(seed).machine()), want, "seed {seed}");
    }
}

fn traced(driver: &Driver) -> String {
    let machine = driver.machine();
    machine.trace_start();
    ordered(&machine);
    machine.trace_stop().to_text()
}

#[test]
fn one_seed_gives_one_trace_byte_for_byte() {
    for seed in [0, 7, u64::MAX] {
        let first = traced(&sim(seed));
        assert!(first.lines().count() > 300, "{first}");
        (0..20).for_each(|_| assert_eq!(traced(&sim(seed)), first, "seed {seed}"));
    }
    let first = traced(&dry());
    (0..20).for_each(|_| assert_eq!(traced(&dry()), first));
}

#[test]
fn seeds_give_different_traces_where_there_is_freedom() {
    let traces: BTreeSet<String> = (0..20).map(|seed| traced(&sim(seed))).collect();
    assert_eq!(traces.len(), 20);
}

#[test]
fn the_dry_driver_submits_what_the_others_submit() {
    let submitted = |driver: &Driver| {
        let text = traced(driver);
        let by_rank = |rank: usize| {
            let own = move |line: &&str| line.split(' ').nth(1).is_some_and(|at| at.starts_with(&format!("{rank}.")));
            // Downloads are not submitted where there are no values.
            let kept = text.lines().filter(own).filter(|l| !l.starts_with("ran") && !l.contains("download"));
            kept.map(str::to_owned).collect::<Vec<_>>()
        };
        [0, 1, 2, 3].map(by_rank)
    };
    let want = submitted(&dry());
    assert!(want.iter().all(|lines| lines.len() > 70));
    assert_eq!(submitted(&sim(5)), want);
    assert_eq!(submitted(&cpu(2)), want);
}

conformance! {
    computing:
        nothing_is_traced_outside_of_a_recording;
    computing_on_hosts:
        a_trace_tells_what_ran_and_not_what_was_skipped
}

fn ran(trace: &Trace) -> Vec<(&str, u64)> {
    let ran = trace.events.iter().filter_map(|e| match e {
        TraceEvent::Ran { name, seq, start, end, .. } if start <= end => Some((name.as_str(), *seq)),
        _ => None,
    });
    ran.collect()
}

fn a_trace_tells_what_ran_and_not_what_was_skipped(driver: &Driver) {
    let machine = driver.machine();
    let (_zero, stream) = open(&machine, 0, "compute");
    let (_one, other) = open(&machine, 1, "compute");
    let meeting = |rank| machine.meeting("g", &[0, 1], rank).unwrap();
    machine.trace_start();
    let counter = Counter::default();
    stream.joint(&meeting(0), Exchange::Barrier, "test", Vec::new()).unwrap();
    stream.launch(counter.op(Vec::new())).unwrap();
    stream.launch(failing("here", "it fails")).unwrap();
    stream.launch(counter.op(Vec::new())).unwrap();
    stream.joint(&meeting(0), Exchange::Barrier, "test", Vec::new()).unwrap();
    other.joint(&meeting(1), Exchange::Barrier, "test", Vec::new()).unwrap();
    other.synchronize().unwrap();
    stream.synchronize().unwrap_err();
    let trace = machine.trace_stop();
    let mut all = ran(&trace);
    all.sort();
    assert_eq!(all, [("barrier", 0), ("barrier", 0), ("count", 1), ("fail", 2)]);
    assert_eq!((trace.work(0).operations, trace.work(1).operations), (5, 1));
}

fn nothing_is_traced_outside_of_a_recording(driver: &Driver) {
    let machine = driver.machine();
    let (_device, stream) = open(&machine, 0, "compute");
    let run = || {
        stream.launch(Counter::default().op(Vec::new())).unwrap();
        stream.synchronize().unwrap();
    };
    run();
    machine.trace_start();
    run();
    assert_eq!(ran(&machine.trace_stop()).len(), 1);
    run();
    assert!(machine.trace_stop().events.is_empty());
}
