//! Where f32 masters are, and that bf16 values with their rests are them.

use ddp::{BucketSize, Dispatch, Loaded, Optimizer, OptimizerConfig, ParamGroup, StateViews};
use device::{DType, Machine, Stream, bf16, ops::join_master};

use crate::support::{Caught, One, Setup, declared, get, machines, sim};

const SIZES: [usize; 4] = [200, 131, 70, 301];

fn setup(stored: DType) -> Setup {
    let mut setup = Setup::new(2, declared(&SIZES)).sharded();
    setup.declared.iter_mut().for_each(|param| param.stored = stored);
    setup
}

/// The bits of a bucket's masters.
fn masters(stream: &Stream, state: StateViews<'_>) -> Result<Vec<u32>, Caught> {
    let Some(rest) = state.rest else {
        return Ok(get::<f32>(stream, state.values)?.into_iter().map(f32::to_bits).collect());
    };
    let halves = get::<bf16>(stream, state.values)?.into_iter().zip(get::<i16>(stream, rest)?);
    Ok(halves.map(|(value, rest)| join_master(value, rest).to_bits()).collect())
}

#[test]
fn f32_masters_are_the_values_and_bf16_ones_begin_as_them() {
    for (stored, rest) in [(DType::F32, None), (DType::Bf16, Some(DType::I16))] {
        let run = setup(stored).run(&sim(1), |one| {
            let optimizer = one.optimizer(OptimizerConfig::default())?;
            for (memory, state) in one.ddp.buckets().zip(optimizer.state()) {
                assert!(state.values.same_as(&memory.own_values));
                assert_eq!(state.rest.map(|rest| rest.dtype()), rest);
                let numel = state.values.numel();
                assert_eq!([state.m.numel(), state.v.numel(), memory.values.numel() / 2], [numel; 3]);
                assert_eq!(state.rest.map_or(numel, |rest| rest.numel()), numel);
                let values = crate::support::wide(&one.stream, state.values)?;
                assert_eq!(masters(&one.stream, state)?, values.into_iter().map(f32::to_bits).collect::<Vec<_>>());
            }
            Ok(())
        });
        run.unwrap();
    }
}

/// Writes values that bf16 holds exactly, other ones each time, and tells the optimizer.
fn load(one: &One, optimizer: &mut Optimizer, salt: usize) -> Result<(), Caught> {
    one.ddp.load(&one.stream, Loaded::Shards, |bucket| {
        let values = (0..bucket.own_values.numel()).map(|i| ((i * 37 + 11 * salt) % 251) as f32 / 64.0 - 2.0);
        match bucket.own_values.dtype() {
            DType::Bf16 => one.stream.upload(&bucket.own_values, values.map(bf16::from_f32).collect())?,
            _ => one.stream.upload::<f32>(&bucket.own_values, values.collect())?,
        }
        Ok(())
    })?;
    Ok(optimizer.refresh_masters(&one.stream)?)
}

/// The masters behind each of twelve steps, two of them skipped and one behind another load.
fn steps(setup: &Setup, machine: &Machine) -> Vec<Vec<Vec<u32>>> {
    let group = |name: &str, weight_decay| ParamGroup { name: name.into(), weight_decay, max_lr: 0.1, min_lr: 0.0 };
    let groups = vec![group("decayed", 0.1), group("plain", 0.0)];
    let config = OptimizerConfig { groups, ..OptimizerConfig::default() };
    let run = setup.run(machine, |one| {
        let group_of = |name: &str| usize::from(name == "p1" || name == "p3");
        let mut optimizer = Optimizer::new(&one.ddp, &one.groups, config.clone(), group_of, &one.stream)?;
        let mut all = Vec::new();
        for step in 0..12 {
            if step == 0 || step == 7 {
                one.ddp.publish(&one.stream)?;
                load(one, &mut optimizer, step)?;
            }
            one.microbatch(|one| {
                (0..4).rev().try_for_each(|i| {
                    let of = |k: usize| ((k * (i + 3) + step) as f32 * 1.3 + one.rank as f32).sin();
                    let mut grads: Vec<f32> = (0..SIZES[i]).map(of).collect();
                    if matches!(step, 4 | 9) && i == 2 {
                        grads[5] = f32::NAN;
                    }
                    one.contribute_on(&one.stream, i, grads)
                })
            })?;
            one.ddp.finish_grads()?;
            optimizer.step(&one.stream, &[0.03, 1e-4])?;
            let skipped = get::<i32>(&one.stream, optimizer.skipped())?;
            assert_eq!(skipped, [i32::from(matches!(step, 4 | 9))], "step {step}");
            one.ddp.publish(&one.stream)?;
            all.push(
                optimizer.state().map(|state| masters(&one.stream, state)).collect::<Result<Vec<_>, _>>()?.concat(),
            );
        }
        Ok(all)
    });
    run.unwrap()
}

#[test]
fn bf16_values_with_their_rests_take_the_steps_of_f32_values() {
    for dispatch in [Dispatch::Chain, Dispatch::WithOptimizer] {
        for size in [BucketSize::PerUnit, BucketSize::Unlimited] {
            let of = |stored| {
                let mut setup = setup(stored);
                (setup.ddp.dispatch, setup.plan.bucket_size) = (dispatch, size);
                setup
            };
            for machine in machines() {
                let [want, got] = [DType::F32, DType::Bf16].map(|stored| steps(&of(stored), &machine));
                let still = want[0].windows(2).filter(|pair| pair[0] == pair[1]).count();
                assert_eq!(still, 2, "all steps but the skipped ones move something");
                assert!(got == want, "{dispatch:?}, {size:?}, {}", machine.driver());
            }
        }
    }
}
