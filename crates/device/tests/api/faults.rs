//! Failures that other frameworks had, at this level: reductions that ran before all copies, buffers reused under a
//! reader, collectives that hung instead of failing.

use std::time::{Duration, Instant};

use device::*;

use super::{
    drivers::{Driver, LIMIT, SHORT},
    ranks::{all_well, run_ranks},
    work::{Never, copy, expect_values, floats, open, set},
};

conformance! {
    every:
        whoever_waits_in_vain_is_told_whether_for_a_stream_an_event_or_values,
        members_with_different_sizes_fail_and_name_both,
        a_rank_that_never_starts_is_named;
    computing:
        memory_lives_until_its_last_queued_reader_is_done,
        a_reduction_waits_for_every_stream_that_filled_its_bucket,
        a_thousand_reductions_of_the_rank_give_the_same_sum
}

/// Writes `value`, late.
fn slow_set(view: &View, value: f32) -> Op {
    Op::host("slow_set", "test", vec![Access::write(view)], move |args| {
        std::thread::sleep(Duration::from_millis(2));
        args.write::<f32>(0)?.fill(value);
        Ok(())
    })
}

fn a_reduction_waits_for_every_stream_that_filled_its_bucket(driver: &Driver) {
    let ranks = [0, 1];
    let got = all_well(&driver.machine(), &ranks, |device| {
        let (first, second, comm) = (device.stream("first")?, device.stream("second")?, device.stream("comm")?);
        let meeting = device.machine().meeting("dp", &ranks, device.rank())?;
        let (bucket, filled) = (floats(device, "bucket", 4), [device.event("filled 0"), device.event("filled 1")]);
        let mut means = Vec::new();
        for round in 0..10 {
            let gradient = 1.0 + 2.0 * device.rank() as f32;
            first.launch(set(&bucket.flat(0..2)?, gradient))?;
            // Sometimes one stream is late, sometimes the other.
            let late = if round % 2 == 0 { slow_set } else { set };
            second.launch(late(&bucket.flat(2..4)?, gradient))?;
            for (stream, event) in [&first, &second].into_iter().zip(&filled) {
                stream.record(event)?;
                comm.wait(event, Why("test.filled"))?;
            }
            comm.joint(&meeting, Exchange::AllReduce(Reduce::Avg), "bucket", vec![Access::update(&bucket)])?;
            means.extend(comm.download::<f32>(&bucket)?.wait()?);
        }
        Ok(means)
    });
    assert_eq!(got, [vec![2.0; 40], vec![2.0; 40]]);
}

fn memory_lives_until_its_last_queued_reader_is_done(driver: &Driver) {
    let (device, writer) = open(&driver.machine(), 0, "writer");
    let (reader, written) = (device.stream("reader").unwrap(), device.event("written"));
    let out = floats(&device, "out", 64);
    for round in 0..10 {
        let value = 1.0 + round as f32;
        let gradient = floats(&device, "gradient", 64);
        writer.launch(slow_set(&gradient, value)).unwrap();
        writer.record(&written).unwrap();
        reader.wait(&written, Why("test.written")).unwrap();
        reader.launch(copy(&gradient, &out)).unwrap();
        // The only handle goes while its writer runs and its reader waits; others take what is free.
        drop(gradient);
        let others: Vec<View> = (0..20).map(|_| floats(&device, "other", 64)).collect();
        others.iter().for_each(|other| writer.launch(set(other, -1.0)).unwrap());
        expect_values(&reader, &out, &[value; 64]);
    }
    writer.synchronize().unwrap();
}

fn members_with_different_sizes_fail_and_name_both(driver: &Driver) {
    let begin = Instant::now();
    let ended = run_ranks(&driver.machine(), &[0, 1], |device| {
        let stream = device.stream("comm")?;
        let meeting = device.machine().meeting("dp", &[0, 1], device.rank())?;
        let v = floats(device, "v", if device.rank() == 0 { 4 } else { 8 });
        stream.joint(&meeting, Exchange::AllReduce(Reduce::Sum), "test", vec![Access::update(&v)])?;
        stream.synchronize()
    });
    for error in ended {
        let text = error.unwrap().unwrap_err().to_string();
        assert!(text.contains("group 'dp' disagree at #0"), "{text}");
        assert!(text.contains("all_reduce(Sum) of 4 f32") && text.contains("all_reduce(Sum) of 8 f32"), "{text}");
    }
    assert!(begin.elapsed() < LIMIT);
}

fn a_rank_that_never_starts_is_named(driver: &Driver) {
    let machine = driver.limited(SHORT);
    let (_device, stream) = open(&machine, 0, "comm");
    let meeting = machine.meeting("dp", &[0, 1], 0).unwrap();
    stream.joint(&meeting, Exchange::Barrier, "test", Vec::new()).unwrap();
    let error = stream.synchronize().unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Timeout { rank: 0, .. } | Error::Deadlock { .. }), "{text}");
    assert!(text.contains("barrier #0 on group 'dp': ranks [0] wait for ranks [1]"), "{text}");
}

fn whoever_waits_in_vain_is_told_whether_for_a_stream_an_event_or_values(driver: &Driver) {
    type Wait = fn(&Device, &Stream) -> Result<(), Error>;
    let waits: [(Wait, &str); 4] = [
        (|_, stream| stream.synchronize(), "stream 'comm'"),
        (|device, _| device.synchronize(), "stream 'comm'"),
        (
            |device, stream| {
                let event = device.event("met");
                stream.record(&event)?;
                event.synchronize()
            },
            "event 'met'",
        ),
        (|device, stream| stream.download::<f32>(&floats(device, "loss", 1))?.wait().map(drop), "the values of 'loss'"),
    ];
    for (wait, what) in waits {
        let machine = driver.limited(SHORT);
        if !machine.computes() && what.contains("values") {
            continue; // it has none to wait for
        }
        let (device, stream) = open(&machine, 0, "comm");
        let _never = Never::before(&stream);
        let text = wait(&device, &stream).unwrap_err().to_string();
        assert!(text.contains(&format!("for {what}")), "{text}");
    }
}

fn a_thousand_reductions_of_the_rank_give_the_same_sum(driver: &Driver) {
    let ranks = [0, 1, 2, 3];
    let sums = all_well(&driver.machine(), &ranks, |device| {
        let stream = device.stream("comm")?;
        let meeting = device.machine().meeting("all", &ranks, device.rank())?;
        let (id, sums) = (floats(device, "id", 1), floats(device, "sums", 1000));
        stream.launch(set(&id, device.rank() as f32))?;
        for i in 0..1000 {
            let accesses = vec![Access::read(&id), Access::write(&sums.flat(i..i + 1)?)];
            stream.joint(&meeting, Exchange::AllReduce(Reduce::Sum), "test", accesses)?;
        }
        stream.download::<f32>(&sums)?.wait()
    });
    assert_eq!(sums, vec![vec![6.0; 1000]; 4]);
}
