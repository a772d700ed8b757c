//! Orders: every one of a small program, and the gates of graphs as points to wait for.

use device::{Options, explore};
use pgroups::{After, GlobalRank, Layout, LayoutConfig, Needs, Pass, ProcessGroups, Rank, Seed, Turn, Weights, Whole};

use crate::support::{Caught, One, Setup, add, bits, constant, machines, sim, wide};

/// One rank, one parameter, three steps: an evaluation reads on a stream of its own while the optimizer writes on
/// another. Without `release` its reads leave nothing behind.
fn small(machine: &device::Machine, release: bool) -> Result<Vec<u32>, Caught> {
    let layout = Layout::new(&LayoutConfig { dp: Some(1), ..LayoutConfig::default() })?;
    let rank = Rank::alone(machine, GlobalRank(0), 1)?;
    let setup = Setup::new(1, vec![constant("w", &[2], 1.0)]);
    let groups = ProcessGroups::build(&rank, &layout, &Needs::default())?;
    let stream = rank.device.stream("compute")?;
    let buffers = ddp::ParamBuffers::allocate(&rank, &layout, &setup.declared, setup.plan)?;
    buffers.fill(&stream, Seed(7))?;
    let ddp = ddp::Ddp::attach(&buffers, &groups, setup.ddp, &stream)?;
    stream.synchronize()?;
    let [eval, side] = ["eval", "optimizer"].map(|name| rank.device.stream(name));
    let (eval, side) = (eval?, side?);
    let param = &buffers.params()[0];
    let mut seen = Vec::new();
    for step in 0..3 {
        let mut turn = Turn::eager(Pass::Forward);
        let value = turn.read(param, &eval)?;
        seen.push(eval.download::<f32>(&value)?);
        if release {
            turn.done(param, &eval)?;
        }
        ddp.begin_microbatch(&stream)?;
        crate::support::contribute(param, &stream, vec![(step + 1) as f32; 2])?;
        ddp.end_microbatch(&stream)?;
        ddp.finish_grads()?;
        ddp.read_grads(&side)?;
        ddp.load(&side, ddp::Loaded::Shards, |bucket| {
            let alpha = device::ops::Factor::Const(-1.0);
            Ok(side.launch(device::ops::Axpy { alpha, x: &bucket.own_grads, y: &bucket.own_values }.op("step")?)?)
        })?;
        ddp.done_grads(&side)?;
    }
    rank.device.synchronize()?;
    let mut result = Vec::new();
    for download in seen {
        result.extend(bits(&download.wait()?));
    }
    let value = Turn::eager(Pass::Forward).read(param, &stream)?;
    result.extend(bits(&wide(&stream, &value)?));
    rank.device.synchronize()?;
    Ok(result)
}

#[test]
fn every_order_of_a_small_program_gives_one_result_and_without_releases_several() {
    let all = |release| {
        explore(20_000, &Options::default(), |machine| {
            Ok(small(machine, release).unwrap_or_else(|error| panic!("{error}")))
        })
        .unwrap()
    };
    let with = all(true);
    assert!(with.complete, "{} orders", with.runs);
    let want = [1.0f32, 1.0, 0.0, 0.0, -2.0, -2.0, -5.0, -5.0].map(f32::to_bits).to_vec();
    assert_eq!(with.results.keys().collect::<Vec<_>>(), [&want]);
    let without = all(false);
    assert!(without.results.len() > 1, "{} orders", without.runs);
}

#[test]
fn a_graphs_gates_stand_for_its_gradients_and_its_reads() {
    // What a replay does: launches on a stream of its own, then tells sink and publisher of its gates.
    let setup = Setup::new(2, vec![constant("a", &[40], 1.0), constant("b", &[30], 1.0)]).sharded();
    for seed in 0..100 {
        setup
            .run(&sim(seed), |one| {
                let lane = one.device.stream("lane")?;
                let side = one.device.stream("optimizer")?;
                let [landed, read] = ["landed", "read"].map(|name| one.device.event(name));
                let mut seen = Vec::new();
                for step in 0..3 {
                    one.ddp.begin_microbatch(&lane)?;
                    for i in 0..2 {
                        let value = Turn::eager(Pass::Forward).read(one.param(i), &lane)?;
                        seen.push(lane.download::<f32>(&value)?);
                    }
                    lane.record(&read)?;
                    for i in [1, 0] {
                        let mut whole = Whole::keeping(Turn::eager(Pass::Backward), one.ddp.keep());
                        let grad = whole.grad(one.param(i), &lane)?;
                        let (into, how) = grad.target();
                        lane.launch(add(into, how, vec![(one.rank + 1) as f32; one.param(i).numel()]))?;
                    }
                    lane.record(&landed)?;
                    for i in [1, 0] {
                        one.param(i).publisher().unwrap().done(After::Gate(&read))?;
                        let sink = one.param(i).landed_sink().unwrap();
                        sink.landed(one.param(i), After::Gate(&landed))?;
                    }
                    one.ddp.end_microbatch(&lane)?;
                    one.ddp.finish_grads()?;
                    one.descend(&side, 1.0)?;
                    let expected = 1.0 - 1.5 * step as f32;
                    let [b, a] = [seen.pop().unwrap(), seen.pop().unwrap()];
                    assert_eq!((a.wait()?, b.wait()?), (vec![expected; 40], vec![expected; 30]));
                }
                one.device.synchronize()?;
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn the_flag_of_a_step_is_set_behind_the_graphs_of_the_step_before_on_whatever_stream() {
    let setup = Setup::new(2, vec![constant("a", &[40], 1.0)]);
    // Gradients of three steps of two microbatches; the flag is set on a stream that nothing else orders.
    let grads = |seed: u64, dropped: Option<device::Why>| {
        let machine = sim(seed);
        dropped.into_iter().for_each(|why| machine.drop_waits(why));
        let ran = setup.run(&machine, |one| {
            let [lane, marks, side] = ["lane", "marks", "optimizer"].map(|name| one.device.stream(name));
            let (lane, marks, side) = (lane?, marks?, side?);
            let landed = one.device.event("landed");
            let param = one.param(0).clone();
            let seen = one.device.alloc("seen", &[3, 40], device::DType::F32, device::MemoryKind::Other)?;
            for step in 0..3 {
                for at in 0..2 {
                    let _adding_up = (at == 0).then(|| one.ddp.no_sync());
                    one.ddp.begin_microbatch(&marks)?;
                    let mut whole = Whole::keeping(Turn::eager(Pass::Backward), one.ddp.keep());
                    let grad = whole.grad(&param, &lane)?;
                    let (into, how) = grad.target();
                    lane.launch(add(into, how, vec![(1 + at + step) as f32; 40]))?;
                    lane.record(&landed)?;
                    param.landed_sink().unwrap().landed(&param, After::Gate(&landed))?;
                    one.ddp.end_microbatch(&marks)?;
                }
                one.ddp.finish_grads()?;
                one.ddp.read_grads(&side)?;
                for bucket in one.ddp.buckets() {
                    let (x, y) = (bucket.own_grads.flat(0..40)?, seen.flat(40 * step..40 * (step + 1))?);
                    side.launch(device::ops::Cast { x: &x, y: &y }.op("look")?)?;
                }
                one.ddp.done_grads(&side)?;
            }
            one.device.synchronize()?;
            wide(&side, &seen)
        });
        ran.unwrap()
    };
    let want: Vec<f32> = [3.0, 5.0, 7.0].into_iter().flat_map(|sum| [sum; 40]).collect();
    assert!((0..100).all(|seed| grads(seed, None).iter().all(|seen| *seen == want)));
    let dropped = Some(ddp::why::FLAG_AFTER_LANDED);
    assert!((0..100).any(|seed| grads(seed, dropped).iter().any(|seen| *seen != want)));
}

#[test]
fn whole_weights_with_the_flag_of_the_device_add_up_alike() {
    let setup = Setup::new(2, vec![constant("a", &[40], 1.0)]);
    for machine in machines() {
        setup
            .run(&machine, |one| {
                for _ in 0..3 {
                    let stream = one.stream.clone();
                    let param = one.param(0).clone();
                    let microbatch = |ddp: &ddp::Ddp| -> Result<(), Caught> {
                        ddp.begin_microbatch(&stream)?;
                        let mut whole = Whole::keeping(Turn::eager(Pass::Backward), ddp.keep());
                        for value in [1.0, 2.0] {
                            let grad = whole.grad(&param, &stream)?;
                            let (into, how) = grad.target();
                            stream.launch(add(into, how, vec![value; 40]))?;
                            whole.grad_done(&param, &stream)?;
                        }
                        Ok(ddp.end_microbatch(&stream)?)
                    };
                    {
                        let paused = one.ddp.no_sync();
                        microbatch(&paused)?;
                    }
                    microbatch(&one.ddp)?;
                    one.ddp.finish_grads()?;
                    assert_eq!(one.grads(0)?, [6.0; 40]);
                }
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn a_rank_that_stops_in_the_middle_fails_the_others_at_once() {
    let setup = Setup::new(3, vec![constant("a", &[40], 1.0)]).sharded();
    for machine in machines() {
        let failed = setup.run(&machine, |one: &mut One| {
            one.microbatch(|one| one.contribute(0, 1.0))?;
            if one.rank == 1 {
                return Err("gone".into());
            }
            one.ddp.finish_grads()?;
            one.grads(0)
        });
        let text = format!("{:?}", failed.unwrap_err());
        assert!(text.contains("gone") && text.contains("GlobalRank(1)"), "{text}");
    }
}
