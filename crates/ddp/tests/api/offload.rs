//! Buffers that leave the device between two steps come back bit for bit.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use ddp::{AdamConfig, Buffers, DdpError, Dispatch, GradCheck, Loaded, Optimizer, OptimizerConfig, why};
use device::{DType, Machine, ops::Fill};
use pgroups::{Pass, PgError, Turn};

use crate::support::{Caught, One, Setup, bits, cpu, declared, ours, sim, wide};

const SIZES: [usize; 3] = [100, 41, 77];
const ALL: [Buffers; 3] = [Buffers::Values, Buffers::Grads, Buffers::All];

fn step(one: &One, optimizer: &mut Optimizer, step: usize) -> Result<(), Caught> {
    one.microbatch(|one| {
        (0..SIZES.len()).rev().try_for_each(|i| {
            let grad =
                (0..SIZES[i]).map(|at| ((at + 7 * step + 3 * i) as f32 * 0.37 + one.rank as f32).sin()).collect();
            one.contribute_on(&one.stream, i, grad)
        })
    })?;
    one.ddp.finish_grads()?;
    Ok(optimizer.step(&one.stream, &[0.01])?)
}

/// Offloads, lets someone else use the memory, and takes it back.
fn away_and_back(one: &One, what: Buffers) -> Result<(), Caught> {
    let addresses = |one: &One| one.buffers.params().iter().map(|param| param.address()).collect::<Vec<_>>();
    let before = addresses(one);
    let offloaded = one.ddp.offload(what, &one.stream)?;
    assert_eq!(offloaded.memory().count(), if what == Buffers::All { 6 } else { 3 });
    let tenant = one.device.stream("tenant")?;
    for view in offloaded.memory() {
        tenant.launch(Fill { y: view, value: f32::NAN }.op("tenant")?)?;
    }
    tenant.synchronize()?;
    offloaded.restore(&one.stream)?;
    assert_eq!(addresses(one), before, "a captured graph finds everything where it was");
    Ok(())
}

/// Bits of all gradients behind the second step, and of all values behind the fourth.
fn train(one: &mut One, away: Option<Buffers>) -> Result<Vec<Vec<u32>>, Caught> {
    let mut optimizer = one.optimizer(OptimizerConfig::default())?;
    let mut seen = Vec::new();
    for at in 0..4 {
        step(one, &mut optimizer, at)?;
        if at == 1 {
            if let Some(what) = away {
                away_and_back(one, what)?;
            }
            one.ddp.read_grads(&one.stream)?;
            for bucket in one.ddp.buckets() {
                seen.push(bits(&wide(&one.stream, &bucket.grads)?));
            }
            one.ddp.done_grads(&one.stream)?;
        }
    }
    for i in 0..SIZES.len() {
        seen.push(bits(&one.read(i)?));
    }
    Ok(seen)
}

#[test]
fn offloaded_buffers_come_back_bit_for_bit_and_training_goes_on_as_without() {
    for stored in [DType::F32, DType::Bf16] {
        for dispatch in [Dispatch::Chain, Dispatch::Aligned, Dispatch::WithOptimizer, Dispatch::AtStep] {
            let mut setup = Setup::new(2, declared(&SIZES));
            setup.declared.iter_mut().for_each(|param| param.stored = stored);
            setup.ddp.dispatch = dispatch;
            for setup in [setup.clone(), setup.sharded()] {
                let run = |machine: &Machine, away| setup.run(machine, |one| train(one, away)).unwrap();
                let want = run(&sim(1), None);
                for what in ALL {
                    for machine in [cpu(), sim(2), sim(3)] {
                        assert_eq!(run(&machine, Some(what)), want, "{what} as {stored}, {dispatch:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn publications_are_completed_with_the_work_behind_them_before_values_leave() {
    let calls = Arc::new(AtomicU64::new(0));
    let counted = calls.clone();
    let mut setup = Setup::new(2, declared(&SIZES)).sharded();
    setup.ddp.post_gather = Some(Arc::new(move |_, _| {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }));
    setup
        .run(&sim(1), |one| {
            let mut optimizer = one.optimizer(OptimizerConfig::default())?;
            step(one, &mut optimizer, 0)?;
            // Two of three buckets are on their way.
            Turn::eager(Pass::Forward).read(one.param(0), &one.stream)?;
            assert_eq!(one.ddp.counters().publications, 2);
            let offloaded = one.ddp.offload(Buffers::Values, &one.stream)?;
            assert_eq!(one.ddp.counters().publications, 3);
            offloaded.restore(&one.stream)?;
            let epochs = one.param(2).publisher().unwrap().epochs();
            assert!(epochs.is_current() && epochs.written == 3, "initial values, a step, a restore: {epochs:?}");
            let stepped: Vec<f32> = (0..3).map(|i| one.read(i)).collect::<Result<Vec<_>, _>>()?.concat();
            assert!(stepped.iter().all(|value| value.is_finite()));
            assert_eq!(one.ddp.counters().publications, 3, "nothing is gathered again");
            Ok(())
        })
        .unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 6, "three buckets on two ranks, once each");
}

#[test]
fn memory_is_lent_only_when_nobody_reads_it_any_more() {
    // A reader on a stream of its own, released but perhaps not run; then a tenant writes.
    let read = |machine: &Machine| {
        let setup = Setup::new(1, declared(&SIZES));
        let run = setup.run(machine, |one| {
            let (late, tenant) = (one.device.stream("late")?, one.device.stream("tenant")?);
            let noise = one.device.alloc("noise", &[1], DType::F32, device::MemoryKind::Other)?;
            for _ in 0..8 {
                late.launch(Fill { y: &noise, value: 0.0 }.op("late")?)?;
            }
            let mut turn = Turn::eager(Pass::Forward);
            let value = turn.read(one.param(1), &late)?;
            let seen = late.download::<f32>(&value)?;
            turn.done(one.param(1), &late)?;
            let offloaded = one.ddp.offload(Buffers::Values, &one.stream)?;
            for view in offloaded.memory() {
                tenant.launch(Fill { y: view, value: 9.0 }.op("tenant")?)?;
            }
            tenant.synchronize()?;
            let seen = seen.wait()?;
            offloaded.restore(&one.stream)?;
            assert!(one.read(1)?.iter().all(|value| value.abs() <= 1.0));
            Ok(seen.iter().all(|value| value.abs() <= 1.0))
        });
        run.unwrap()[0]
    };
    assert!((0..50).all(|seed| read(&sim(seed))));
    let without = |seed| {
        let machine = sim(seed);
        machine.drop_waits(why::WRITE_AFTER_READ);
        read(&machine)
    };
    assert!((0..50).any(|seed| !without(seed)), "the releases are what it waits for");
}

/// What readers on streams of their own see of gradients that leave and come back on another: before, behind, in the
/// next step, and the values of an optimizer that steps each bucket as soon as it is reduced.
fn grads_beside_others(machine: &Machine) -> Vec<Vec<f32>> {
    let run = Setup::new(1, declared(&[40])).run(machine, |one| {
        let stream = |name: &str| one.device.stream(name);
        let (loader, tenant, wgrad) = (stream("loader")?, stream("tenant")?, stream("wgrad")?);
        let (logger, updates) = (stream("logger")?, stream("updates")?);
        let adam = AdamConfig { clip: 0.0, ..AdamConfig::default() };
        let unchecked = OptimizerConfig { adam, check: GradCheck::WithClip, ..OptimizerConfig::default() };
        let mut optimizer = one.optimizer(unchecked)?;
        let noise = one.device.alloc("noise", &[1], DType::F32, device::MemoryKind::Other)?;
        let log = |on: &device::Stream| -> Result<_, Caught> {
            one.ddp.read_grads(on)?;
            let seen = on.download::<f32>(&one.param(0).main_grad())?;
            one.ddp.done_grads(on)?;
            Ok(seen)
        };
        one.microbatch(|one| one.contribute_on(&wgrad, 0, vec![1.0; 40]))?;
        one.ddp.finish_grads()?;
        (0..8).try_for_each(|_| logger.launch(Fill { y: &noise, value: 0.0 }.op("late")?))?;
        let before = log(&logger)?;
        let offloaded = one.ddp.offload(Buffers::Grads, &loader)?;
        for view in offloaded.memory() {
            tenant.launch(Fill { y: view, value: 9.0 }.op("tenant")?)?;
        }
        tenant.synchronize()?;
        let before = before.wait()?;
        (0..8).try_for_each(|_| loader.launch(Fill { y: &noise, value: 0.0 }.op("late")?))?;
        offloaded.restore(&loader)?;
        optimizer.step(&updates, &[0.1])?;
        let behind = log(&logger)?;
        one.microbatch(|one| one.contribute_on(&wgrad, 0, vec![2.0; 40]))?;
        one.ddp.finish_grads()?;
        let next = log(&logger)?;
        Ok([before, behind.wait()?, next.wait()?, wide(&updates, &optimizer.state().next().unwrap().m.flat(0..40)?)?])
    });
    run.unwrap().remove(0).into()
}

#[test]
fn gradients_leave_behind_their_readers_and_come_back_before_the_next_ones() {
    let first_moment = (1.0f64 - AdamConfig::default().beta1) as f32;
    for seed in 0..100 {
        let [before, behind, next, moment] = grads_beside_others(&sim(seed)).try_into().unwrap();
        assert_eq!((before, behind, next), (vec![1.0; 40], vec![1.0; 40], vec![2.0; 40]), "seed {seed}");
        assert!(moment.iter().all(|m| (m - first_moment).abs() < 1e-6), "seed {seed}: {moment:?}");
    }
}

#[test]
fn what_is_away_is_refused_by_name() {
    fn away<T>(result: Result<T, DdpError>, what: Buffers) -> bool {
        matches!(result, Err(DdpError::Offloaded { what: told }) if told == what)
    }
    for what in ALL {
        Setup::new(2, declared(&SIZES))
            .run(&sim(1), |one| {
                let mut optimizer = one.optimizer(OptimizerConfig::default())?;
                step(one, &mut optimizer, 0)?;
                let stream = &one.stream;
                let offloaded = one.ddp.offload(what, stream)?;
                assert_eq!(offloaded.what(), what);
                assert!(away(one.ddp.begin_microbatch(stream), what) && away(optimizer.step(stream, &[0.1]), what));
                assert!(away(one.ddp.offload(Buffers::Grads, stream).map(drop), what));
                let values = what != Buffers::Grads;
                let read = Turn::eager(Pass::Forward).read(one.param(1), stream).map(drop);
                assert_eq!(read.as_ref().is_err_and(|e| away::<()>(Err(ours(e).clone()), what)), values, "{read:?}");
                assert_eq!(away(one.ddp.publish(stream), what), values);
                assert_eq!(away(one.ddp.dispatch(), what), values);
                if values {
                    assert!(away(one.ddp.dispatch_group(0), what));
                    assert!(away(one.ddp.load(stream, Loaded::Whole, |_| Ok(())), what));
                    assert!(away(optimizer.refresh_masters(stream), what));
                }
                let grads = what != Buffers::Values;
                assert_eq!(away(one.ddp.read_grads(stream), what), grads);
                if grads {
                    assert!(away(one.ddp.zero_grads(stream), what) && away(optimizer.first_nonfinite(stream), what));
                }
                // Lost: nobody reads what a tenant has left there.
                drop(offloaded);
                assert!(away(one.ddp.begin_microbatch(stream), what));
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn nothing_leaves_in_the_middle_of_a_step() {
    let refused = |one: &One| {
        let refused = one.ddp.offload(Buffers::All, &one.stream).map(drop);
        assert!(matches!(refused, Err(DdpError::OffloadInStep { what: Buffers::All })), "{refused:?}");
    };
    Setup::new(1, declared(&SIZES))
        .run(&sim(1), |one| {
            one.ddp.begin_microbatch(&one.stream)?;
            refused(one);
            (0..3).try_for_each(|i| one.contribute(i, 1.0))?;
            one.ddp.end_microbatch(&one.stream)?;
            refused(one);
            one.ddp.finish_grads()?;
            one.ddp.offload(Buffers::All, &one.stream)?.restore(&one.stream)?;
            assert_eq!(one.grads(0)?, [1.0; 100]);
            Ok::<_, Caught>(())
        })
        .map(|_: Vec<()>| ())
        .unwrap_or_else(|error: PgError| panic!("{}", error.chain()));
}
