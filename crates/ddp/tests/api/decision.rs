//! One decision for all ranks: norm, clipping, skipping, and what completes gradients before.

use ddp::{
    AdamConfig, Completion, CompletionStage, Ddp, DdpConfig, DdpError, LossScaleConfig, NormKind, Optimizer,
    OptimizerConfig, Scaling, Sharding,
};
use pgroups::{Axis, LayoutConfig, ParamClass, Placement};

use crate::{
    optimizer::{SIZES, gradient, no_clip},
    support::{Caught, One, Setup, bits, constant, cpu, declared, get, machines, ours, sim, wide},
};

/// One parameter, one step of gradients by rank; the first value, and the norm.
fn one_step(setup: &Setup, config: &OptimizerConfig, rate: f32, grads: &[f32]) -> Vec<(f32, f32)> {
    let run = setup.run(&sim(2), |one| {
        let mut optimizer = one.optimizer(config.clone())?;
        one.microbatch(|one| one.contribute(0, grads[one.rank as usize % grads.len()]))?;
        one.ddp.finish_grads()?;
        optimizer.step(&one.stream, &[rate])?;
        let norm = get::<f32>(&one.stream, optimizer.grad_norm())?[0];
        Ok((one.read(0)?[0], norm))
    });
    run.unwrap()
}

#[test]
fn replicated_gradients_are_counted_once_in_the_norm() {
    // dp = 4, gradients (3, 4) on each: 5, not 10; scale 1 / 5.
    let mut pair = vec![constant("a", &[1], 1.0), constant("b", &[1], 1.0)];
    for machine in machines() {
        for (kind, want) in [(NormKind::L2, 5.0), (NormKind::Inf, 4.0)] {
            for setup in [Setup::new(4, pair.clone()), Setup::new(4, pair.clone()).sharded()] {
                let config = OptimizerConfig { norm: kind, ..OptimizerConfig::default() };
                let norms = setup.run(&machine, |one| {
                    let mut optimizer = one.optimizer(config.clone())?;
                    one.microbatch(|one| {
                        one.contribute(1, 4.0)?;
                        one.contribute(0, 3.0)
                    })?;
                    one.ddp.finish_grads()?;
                    optimizer.step(&one.stream, &[0.0])?;
                    let second_moment = optimizer.state().map(|state| wide(&one.stream, state.v));
                    let v: Vec<f32> = second_moment.collect::<Result<Vec<_>, _>>()?.concat();
                    Ok((get::<f32>(&one.stream, optimizer.grad_norm())?[0], v.into_iter().fold(0.0, f32::max)))
                });
                for (norm, v) in norms.unwrap() {
                    assert!((norm - want).abs() < 1e-6, "{kind:?}: {norm}");
                    // The second moment holds what the clipped gradient was: 0.05 x (g / norm)^2.
                    let largest = 0.05 * (4.0 / want) * (4.0 / want);
                    assert!(v == 0.0 || (v - largest).abs() < 1e-6 || (v - largest * 9.0 / 16.0).abs() < 1e-6, "{v}");
                }
            }
        }
    }
    pair.truncate(1);
    let clipped = one_step(&Setup::new(1, pair), &no_clip(), 0.0, &[3.0]);
    assert_eq!(clipped, [(1.0, 3.0)]);
}

/// Two stages, each with one parameter of its own, unless `frozen`.
fn stages(frozen: bool) -> Setup {
    let mut stage0 = constant("first", &[1], 1.0);
    stage0.spec.placement = Placement::whole([1]).pin(Axis::PP, [0]);
    let mut stage1 = constant("second", &[1], 1.0);
    stage1.spec.placement = Placement::whole([1]).pin(Axis::PP, [1]);
    if frozen {
        stage1.training = ddp::Training::Frozen;
    }
    let layout = LayoutConfig { pp: 2, dp: Some(1), ..LayoutConfig::default() };
    Setup { layout, ..Setup::new(1, vec![stage0, stage1]) }
}

#[test]
fn the_norm_is_that_of_the_whole_model_on_every_stage() {
    // Stage gradients 3 and 4, clip 1: 5 and scale 0.2 on both; with the largest magnitude 4.
    for (kind, want) in [(NormKind::L2, 5.0), (NormKind::Inf, 4.0)] {
        let config = OptimizerConfig { norm: kind, ..OptimizerConfig::default() };
        for machine in machines() {
            let norms = stages(false).run(&machine, |one| {
                let mut optimizer = one.optimizer(config.clone())?;
                one.microbatch(|one| one.contribute(0, if one.rank == 0 { 3.0 } else { 4.0 }))?;
                one.ddp.finish_grads()?;
                optimizer.step(&one.stream, &[0.0])?;
                let m = optimizer.state().map(|state| wide(&one.stream, state.m)).collect::<Result<Vec<_>, _>>()?;
                Ok((get::<f32>(&one.stream, optimizer.grad_norm())?[0], m.concat()[0]))
            });
            let norms = norms.unwrap();
            for ((norm, m), grad) in norms.into_iter().zip([3.0, 4.0]) {
                assert!((norm - want).abs() < 1e-6);
                assert!((m - 0.1 * grad / want).abs() < 1e-6, "{m}");
            }
        }
    }
}

#[test]
fn a_frozen_stage_adds_nothing_and_takes_part_in_the_decision() {
    for machine in machines() {
        let run = stages(true).run(&machine, |one| {
            let mut optimizer = one.optimizer(OptimizerConfig::default())?;
            let mut seen = Vec::new();
            for grad in [3.0, f32::NAN, 3.0] {
                one.microbatch(|one| if one.rank == 0 { one.contribute(0, grad) } else { Ok(()) })?;
                one.ddp.finish_grads()?;
                optimizer.step(&one.stream, &[0.1])?;
                let skipped = get::<i32>(&one.stream, optimizer.skipped())?[0];
                seen.push((get::<f32>(&one.stream, optimizer.grad_norm())?[0], skipped));
            }
            assert_eq!(get::<i32>(&one.stream, optimizer.steps(0))?, [2]);
            Ok(seen)
        });
        for seen in run.unwrap() {
            assert_eq!((seen[0], seen[2]), ((3.0, 0), (3.0, 0)));
            assert!(seen[1].0.is_nan() && seen[1].1 == 1);
        }
    }
}

#[test]
fn weights_that_tensor_ranks_replicate_are_counted_once() {
    // tp = 2, dp = 2: a weight cut over tp, one that both hold. Elements: gradient 1 in each of 8 and of 5.
    let mut cut = constant("cut", &[8], 0.0);
    cut.spec.placement = Placement::whole([8]).cut(0, Axis::TP, 0);
    let layout = LayoutConfig { tp: 2, dp: Some(2), ..LayoutConfig::default() };
    let setup = Setup { layout, ..Setup::new(2, vec![cut, constant("norm", &[5], 0.0)]) };
    for setup in [setup.clone(), setup.sharded()] {
        for machine in machines() {
            let norms = setup.run(&machine, |one| {
                let mut optimizer = one.optimizer(OptimizerConfig::default())?;
                one.microbatch(|one| (0..2).rev().try_for_each(|i| one.contribute(i, 1.0)))?;
                one.ddp.finish_grads()?;
                optimizer.step(&one.stream, &[0.0])?;
                Ok(get::<f32>(&one.stream, optimizer.grad_norm())?[0])
            });
            assert!(norms.unwrap().iter().all(|norm| (norm - 13f32.sqrt()).abs() < 1e-6));
        }
    }
}

#[test]
fn one_ranks_nan_skips_the_step_on_all_and_names_the_first_parameter() {
    for setup in [Setup::new(3, declared(&SIZES)), Setup::new(3, declared(&SIZES)).sharded()] {
        for machine in machines() {
            setup
                .run(&machine, |one| {
                    let mut optimizer = one.optimizer(OptimizerConfig::default())?;
                    let step = |one: &One, optimizer: &mut Optimizer, bad: f32| -> Result<(), Caught> {
                        one.microbatch(|one| {
                            (0..4).rev().try_for_each(|i| {
                                let mut values = gradient(0, one.rank as usize, i, SIZES[i]);
                                if one.rank == 1 && (i == 1 || i == 2) {
                                    *values.last_mut().unwrap() += bad;
                                }
                                one.contribute_on(&one.stream, i, values)
                            })
                        })?;
                        one.ddp.finish_grads()?;
                        Ok(optimizer.step(&one.stream, &[0.01])?)
                    };
                    let state = |one: &One, optimizer: &Optimizer| -> Result<Vec<Vec<u32>>, Caught> {
                        one.ddp.publish(&one.stream)?;
                        let state = optimizer
                            .state()
                            .flat_map(|state| [state.values, state.m, state.v])
                            .map(|view| wide(&one.stream, view));
                        let values = (0..4).map(|i| one.read(i));
                        state.chain(values).map(|values| Ok(bits(&values?))).collect()
                    };
                    step(one, &mut optimizer, 0.0)?;
                    assert_eq!(get::<i32>(&one.stream, optimizer.skipped())?, [0]);
                    assert_eq!(optimizer.first_nonfinite(&one.stream)?, None);
                    let before = state(one, &optimizer)?;
                    for (round, bad) in [f32::NAN, f32::INFINITY].into_iter().enumerate() {
                        step(one, &mut optimizer, bad)?;
                        assert_eq!(get::<i32>(&one.stream, optimizer.skipped())?, [1]);
                        assert_eq!(optimizer.first_nonfinite(&one.stream)?.as_deref(), Some("p1"));
                        // Still a write: its unchanged bytes are published.
                        let epochs = one.param(0).publisher().unwrap().epochs();
                        assert_eq!((epochs.written, epochs.is_current()), (3 + round as u64, false));
                        assert_eq!(state(one, &optimizer)?, before);
                        assert_eq!(get::<i32>(&one.stream, optimizer.steps(0))?, [1]);
                    }
                    step(one, &mut optimizer, 0.0)?;
                    assert_ne!(state(one, &optimizer)?, before);
                    Ok(())
                })
                .unwrap();
        }
    }
}

/// Both ranks of a tensor group hold the element; the norm counts the first one's.
#[test]
fn a_nan_in_a_copy_that_nobody_counts_skips_the_step_on_all() {
    let layout = LayoutConfig { tp: 2, dp: Some(1), ..LayoutConfig::default() };
    let setup = Setup { layout, ..Setup::new(1, vec![constant("w", &[1], 1.0)]) };
    for (machine, norm) in machines().into_iter().flat_map(|m| [(m.clone(), NormKind::L2), (m, NormKind::Inf)]) {
        let told = setup.run(&machine, |one| {
            let mut optimizer = one.optimizer(OptimizerConfig { norm, ..OptimizerConfig::default() })?;
            let mut told = Vec::new();
            for bad in [0.0, f32::NAN] {
                one.microbatch(|one| one.contribute(0, if one.rank == 1 { 3.0 + bad } else { 3.0 }))?;
                one.ddp.finish_grads()?;
                optimizer.step(&one.stream, &[0.1])?;
                let norm = get::<f32>(&one.stream, optimizer.grad_norm())?[0];
                told.push((get::<i32>(&one.stream, optimizer.skipped())?[0], norm.is_nan(), one.read(0)?));
            }
            Ok(told)
        });
        for told in told.unwrap() {
            assert_eq!((told[0].0, told[0].1, told[1].0, told[1].1), (0, false, 1, true));
            assert_eq!(told[0].2, told[1].2, "the second step changes nothing");
            assert_ne!(told[0].2, [1.0], "the first one did");
        }
    }
}

#[test]
fn chained_optimizers_share_norm_and_decision_and_must_agree() {
    // Two chunks of a model, gradients 3 and 4.
    let chunk = |name: &str| Setup::new(2, vec![constant(name, &[1], 1.0)]).sharded();
    let [setup, other] = ["a", "b"].map(chunk);
    for machine in [cpu(), sim(1)] {
        setup
            .run(&machine, |one| {
                let layout = pgroups::Layout::new(&other.layout)?;
                let buffers = ddp::ParamBuffers::allocate(&one.handle, &layout, &other.declared, other.plan)?;
                buffers.fill(&one.stream, pgroups::Seed(7))?;
                let second = ddp::Ddp::attach(&buffers, &one.groups, other.ddp.clone(), &one.stream)?;
                let new = |ddp, config| Optimizer::new(ddp, &one.groups, config, |_| 0, &one.stream);
                let parts = vec![new(&one.ddp, OptimizerConfig::default())?, new(&second, OptimizerConfig::default())?];
                let mut chain = Optimizer::chain(parts, &one.stream)?;
                for bad in [0.0, f32::NAN] {
                    one.microbatch(|one| one.contribute(0, 3.0))?;
                    second.begin_microbatch(&one.stream)?;
                    crate::support::contribute(&buffers.params()[0], &one.stream, vec![4.0 + bad])?;
                    second.end_microbatch(&one.stream)?;
                    one.ddp.finish_grads()?;
                    second.finish_grads()?;
                    chain.step(&one.stream, &[0.5])?;
                    let norm = get::<f32>(&one.stream, chain.grad_norm())?[0];
                    assert!(if bad == 0.0 { (norm - 5.0).abs() < 1e-6 } else { norm.is_nan() });
                    assert!((one.read(0)?[0] - 0.5).abs() < 1e-5, "stepped once, then skipped");
                }
                assert_eq!(get::<i32>(&one.stream, chain.steps(0))?, [1]);
                let parts = vec![new(&one.ddp, OptimizerConfig::default())?, new(&second, no_clip())?];
                let refused = Optimizer::chain(parts, &one.stream).err().unwrap();
                assert_eq!(
                    refused.to_string(),
                    "optimizers 0 and 1 of a chain differ in betas, eps or clip: give them the same"
                );
                assert!(matches!(Optimizer::chain(Vec::new(), &one.stream), Err(DdpError::EmptyChain)));
                one.device.synchronize()?;
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn a_loss_scale_is_taken_out_again_and_backs_off_when_it_overflows() {
    let scale = LossScaleConfig { initial: 1024.0, hysteresis: 1, interval: 2, ..LossScaleConfig::default() };
    let setup = Setup::new(2, vec![constant("w", &[2], 1.0)]).sharded();
    for clip in [0.0, 1.0] {
        let adam = AdamConfig { clip, ..AdamConfig::default() };
        let plain = OptimizerConfig { adam, ..OptimizerConfig::default() };
        let scaled = OptimizerConfig { loss_scale: Some(scale), ..plain.clone() };
        let want = one_step(&setup, &plain, 0.1, &[3.0, 5.0]);
        let got = one_step(&setup, &scaled, 0.1, &[3.0 * 1024.0, 5.0 * 1024.0]);
        assert_eq!(got, want);
        setup
            .run(&sim(1), |one| {
                let mut optimizer = one.optimizer(scaled.clone())?;
                let mut scales = Vec::new();
                for grad in [1.0, f32::INFINITY, 1.0, 1.0] {
                    one.microbatch(|one| one.contribute(0, if one.rank == 0 { grad } else { 1.0 }))?;
                    one.ddp.finish_grads()?;
                    optimizer.step(&one.stream, &[0.1])?;
                    scales.push(get::<f32>(&one.stream, optimizer.loss_scale().unwrap())?[0]);
                }
                assert_eq!(scales, [1024.0, 512.0, 512.0, 1024.0]);
                assert_eq!(get::<i32>(&one.stream, optimizer.steps(0))?, [3]);
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn experts_are_reduced_over_their_own_replicas_and_scaled_as_the_dense() {
    // World of 4, two expert ranks: each expert has two replicas, {0, 2} and {1, 3}.
    let mut expert = constant("expert", &[100], 0.0);
    expert.spec.class = ParamClass::Expert;
    let layout = LayoutConfig { dp: Some(4), ep: 2, ..LayoutConfig::default() };
    let mut setup = Setup { layout, ..Setup::new(4, vec![constant("dense", &[200], 0.0), expert]) };
    for sharding in [Sharding::Off, Sharding::On { dense: 4, expert: 2 }] {
        setup.plan.sharding = sharding;
        for scaling in [Scaling::Mean, Scaling::Averaging] {
            setup.ddp.scaling = scaling;
            let setup = &setup;
            for machine in machines() {
                setup
                    .run(&machine, |one| {
                        let mut optimizer = one.optimizer(no_clip())?;
                        for _ in 0..2 {
                            let grad = 2.0 * (1 << one.rank) as f32;
                            {
                                let params = one.buffers.params().to_vec();
                                let paused = one.ddp.no_sync();
                                paused.begin_microbatch(&one.stream)?;
                                for param in params.iter().rev() {
                                    let values = vec![grad; param.numel()];
                                    crate::support::contribute(param, &one.stream, values)?;
                                }
                                paused.end_microbatch(&one.stream)?;
                            }
                            one.microbatch(|one| (0..2).rev().try_for_each(|i| one.contribute(i, grad)))?;
                            one.ddp.finish_grads()?;
                            let own = if one.rank % 2 == 0 { 1.0 + 4.0 } else { 2.0 + 8.0 };
                            for (i, want) in [(0, 15.0), (1, own)] {
                                let grads = one.grads(i)?;
                                assert!(grads.contains(&want), "{i}: {grads:?} on {}", one.rank);
                            }
                            optimizer.step(&one.stream, &[0.1])?;
                            let norm = get::<f32>(&one.stream, optimizer.grad_norm())?[0];
                            // One copy of the model has both experts.
                            let want = (200.0 * 225.0 + 100.0 * (25.0 + 100.0) as f32).sqrt();
                            assert!((norm - want).abs() < 1e-3 * want, "{norm} {want}");
                        }
                        Ok(())
                    })
                    .unwrap();
            }
        }
    }
}

#[test]
fn copies_on_other_stages_are_completed_behind_the_buckets_and_counted_once() {
    // A tied embedding on both stages: gradients 1 and 2 of its two uses; a norm that only stage 1 has.
    let mut tied = constant("wte", &[90], 1.0);
    tied.copies = ddp::Copies::Shared;
    tied.spec.placement = Placement::whole([90]).pin(Axis::PP, [0, 1]);
    let mut norm = constant("ln_f", &[10], 1.0);
    norm.spec.placement = Placement::whole([10]).pin(Axis::PP, [1]);
    let layout = LayoutConfig { pp: 2, dp: Some(2), ..LayoutConfig::default() };
    let setup = Setup { layout, ..Setup::new(2, vec![tied, norm]) };
    for setup in [setup.clone(), setup.sharded()] {
        for machine in machines() {
            let run = setup.run(&machine, |one| {
                // Ranks 0, 1 are stage 0; 2, 3 stage 1.
                let stage = one.rank / 2;
                let completion = |stage, params: &[&str], group: &pgroups::Group| Completion {
                    stage,
                    params: params.iter().map(|&name| name.to_owned()).collect(),
                    group: group.clone(),
                    reduce: device::Reduce::Sum,
                };
                let embd = one.groups.get(&pgroups::Key::MP, "the test")?.second("embeddings")?;
                let own = Ddp::attach(&one.buffers, &one.groups, setup.ddp.clone(), &one.stream)?;
                one.device.synchronize()?;
                one.ddp = own.completing(&[
                    completion(CompletionStage::Embeddings, &["wte"], &embd),
                    completion(CompletionStage::SequenceParallel, &[], one.groups.single()),
                ])?;
                let mut optimizer = one.optimizer(OptimizerConfig::default())?;
                for _ in 0..2 {
                    one.microbatch(|one| {
                        if stage == 1 {
                            one.contribute(1, 4.0)?;
                        }
                        one.contribute(0, (1 + stage) as f32)
                    })?;
                    one.ddp.finish_grads()?;
                    assert!(one.grads(0)?.contains(&3.0));
                    optimizer.step(&one.stream, &[0.1])?;
                    let norm = get::<f32>(&one.stream, optimizer.grad_norm())?[0];
                    assert!((norm - (90.0 * 9.0 + 10.0 * 16.0f32).sqrt()).abs() < 1e-4, "{norm}");
                }
                Ok(bits(&one.read(0)?))
            });
            let values = run.unwrap();
            assert!(values.iter().all(|value| *value == values[0]), "all copies stay equal");
        }
    }
    let lost = Setup::new(1, declared(&[4])).run(&sim(1), |one| {
        let group = one.groups.single().clone();
        let of = Completion {
            stage: CompletionStage::Routers,
            params: vec!["q".into()],
            group,
            reduce: device::Reduce::Sum,
        };
        Ok(Ddp::attach(&one.buffers, &one.groups, DdpConfig::default(), &one.stream)?.completing(&[of]).map(drop)?)
    });
    assert_eq!(ours(&lost.unwrap_err()).to_string(), "no trained parameter 'q' on this rank");
}
