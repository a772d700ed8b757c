//! Gradients land, buckets are reduced: once, completely, by everyone.

use ddp::{BucketSize, DdpConfig, DdpError, GradOverlap, Sharding, Training, Unfilled};
use device::DType;
use pgroups::{GradOut, Keep, Pass, Turn, Weights, Whole};

use crate::support::{Caught, One, Setup, constant, cpu, declared, machines, ours, sim};

/// Sharding off and on.
pub(crate) fn both(setup: Setup) -> [Setup; 2] {
    [setup.clone(), setup.sharded()]
}

/// All elements of a parameter's reduced gradient that this rank holds; every one of them is `want`.
pub(crate) fn assert_grads(one: &One, i: usize, want: f32) -> Result<(), Caught> {
    let grads = one.grads(i)?;
    let held = held(one, i);
    assert!(!held.is_empty() || one.ddp.plan().config().sharding != Sharding::Off);
    for at in held {
        assert_eq!(grads[at], want, "rank {}, parameter {i}, element {at}", one.rank);
    }
    Ok(())
}

/// Elements of a parameter in this rank's shards.
pub(crate) fn held(one: &One, i: usize) -> Vec<usize> {
    let plan = one.ddp.plan();
    let place = one.ddp.replicas(pgroups::ParamClass::Dense).place().0;
    let ids = plan.groups().iter().flatten();
    let fragments = ids.flat_map(|&id| plan.fragments(id, place)).filter(|f| f.param == i);
    fragments.flat_map(|f| f.in_param).collect()
}

#[test]
fn a_bucket_waits_for_every_stream_that_has_written_it() {
    // One bucket, two parameters, each contributed on a stream of its own; rank gradients 1 and 3.
    let mut setup = Setup::new(2, declared(&[500, 300]));
    setup.plan.bucket_size = BucketSize::Unlimited;
    for setup in both(setup) {
        for seed in 0..100 {
            setup
                .run(&sim(seed), |one| {
                    let side = one.device.stream("side")?;
                    for _ in 0..2 {
                        let value = if one.rank == 0 { 1.0 } else { 3.0 };
                        one.microbatch(|one| {
                            one.contribute(0, value)?;
                            one.contribute_on(&side, 1, vec![value; 300])
                        })?;
                        one.ddp.finish_grads()?;
                        assert_grads(one, 0, 2.0)?;
                        assert_grads(one, 1, 2.0)?;
                    }
                    Ok(())
                })
                .unwrap();
        }
    }
}

#[test]
fn gradients_are_overwritten_only_behind_whoever_still_reads_them() {
    // A copy of the reduced gradient is taken on a second stream while the next step begins.
    for seed in 0..100 {
        let setup = Setup::new(2, declared(&[50]));
        setup
            .run(&sim(seed), |one| {
                let logger = one.device.stream("logger")?;
                let mut copies = Vec::new();
                for step in 0..3 {
                    one.microbatch(|one| one.contribute(0, (step + 1) as f32 * (one.rank + 1) as f32))?;
                    one.ddp.finish_grads()?;
                    one.ddp.read_grads(&logger)?;
                    copies.push(logger.download::<f32>(&one.param(0).main_grad())?);
                    one.ddp.done_grads(&logger)?;
                    // Fresh memory may not be what was freed under a reader.
                    for _ in 0..20 {
                        let view = one.device.alloc("noise", &[50], DType::F32, device::MemoryKind::Other)?;
                        one.stream.launch(device::ops::Fill { y: &view, value: 9.0 }.op("noise")?)?;
                    }
                }
                for (step, copy) in copies.into_iter().enumerate() {
                    assert_eq!(copy.wait()?, [1.5 * (step + 1) as f32; 50]);
                }
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn microbatches_add_up_and_are_reduced_once_a_step() {
    // Rank r's gradient is r + 1 in every microbatch: three steps of four, then three of one.
    for setup in both(Setup::new(2, declared(&[100, 30, 7]))) {
        for machine in machines() {
            setup
                .run(&machine, |one| {
                    let value = (one.rank + 1) as f32;
                    let all = |one: &One| (0..3).rev().try_for_each(|i| one.contribute(i, value));
                    for step in 0..6 {
                        if step < 3 {
                            let paused = one.ddp.no_sync();
                            for _ in 0..3 {
                                paused.begin_microbatch(&one.stream)?;
                                for i in (0..3).rev() {
                                    let param = &one.buffers.params()[i];
                                    let values = vec![value; param.numel()];
                                    crate::support::contribute(param, &one.stream, values)?;
                                }
                                paused.end_microbatch(&one.stream)?;
                            }
                        }
                        one.microbatch(all)?;
                        one.ddp.finish_grads()?;
                        for i in 0..3 {
                            assert_grads(one, i, if step < 3 { 6.0 } else { 1.5 })?;
                        }
                        assert_eq!(one.ddp.counters().reductions, 3 * (step + 1));
                    }
                    Ok(())
                })
                .unwrap();
        }
    }
}

/// The sum of `grads` microbatch by microbatch, the last one outside `no_sync`.
pub(crate) fn accumulate(one: &mut One, grads: &[f32]) -> Result<(), Caught> {
    let (last, first) = grads.split_last().unwrap();
    {
        let stream = one.stream.clone();
        let param = one.param(0).clone();
        let paused = one.ddp.no_sync();
        for &value in first {
            paused.begin_microbatch(&stream)?;
            crate::support::contribute(&param, &stream, vec![value; param.numel()])?;
            paused.end_microbatch(&stream)?;
        }
    }
    one.microbatch(|one| one.contribute(0, *last))?;
    Ok(one.ddp.finish_grads()?)
}

#[test]
fn the_last_microbatch_is_reduced_too() {
    for setup in both(Setup::new(2, declared(&[10]))) {
        for machine in machines() {
            setup
                .run(&machine, |one| {
                    for _ in 0..3 {
                        accumulate(one, &[1.0, 1.0, 1.0, if one.rank == 0 { 1.0 } else { 5.0 }])?;
                        assert_grads(one, 0, 6.0)?;
                        accumulate(one, &[1.0, 2.0, 3.0])?;
                        assert_grads(one, 0, 6.0)?;
                    }
                    Ok(())
                })
                .unwrap();
        }
    }
}

#[test]
fn a_tied_parameter_is_complete_behind_its_second_use() {
    // One bucket: a weight with contributions 1 and 2, another with 5, on identical ranks.
    let mut setup = Setup::new(2, declared(&[40, 20]));
    setup.plan.bucket_size = BucketSize::Unlimited;
    for setup in both(setup) {
        for machine in machines() {
            setup
                .run(&machine, |one| {
                    for step in 0..3 {
                        one.microbatch(|one| {
                            one.contribute(0, 1.0)?;
                            one.contribute(1, 5.0)?;
                            assert_eq!(one.ddp.counters().reductions, step, "one use is not all");
                            one.contribute(0, 2.0)?;
                            let now = if step == 0 { 0 } else { step + 1 };
                            assert_eq!(one.ddp.counters().reductions, now, "the first step counts");
                            Ok(())
                        })?;
                        one.ddp.finish_grads()?;
                        assert_grads(one, 0, 3.0)?;
                        assert_grads(one, 1, 5.0)?;
                        assert_eq!(one.ddp.counters().reductions, step + 1);
                    }
                    Ok(())
                })
                .unwrap();
        }
    }
}

/// Reductions so far behind each contribution of one step, and at its end.
fn reductions(one: &One, order: &[usize]) -> Result<Vec<u64>, Caught> {
    let before = one.ddp.counters().reductions;
    let mut seen = Vec::new();
    one.ddp.begin_microbatch(&one.stream)?;
    for &i in order {
        one.contribute(i, 1.0)?;
        seen.push(one.ddp.counters().reductions - before);
    }
    one.ddp.end_microbatch(&one.stream)?;
    one.ddp.finish_grads()?;
    one.ddp.finish_grads()?; // nothing more
    seen.push(one.ddp.counters().reductions - before);
    Ok(seen)
}

#[test]
fn the_second_step_reduces_at_each_arrival() {
    let overlap = |overlap| DdpConfig { overlap, ..DdpConfig::default() };
    for setup in both(Setup::new(2, declared(&[64, 64, 64]))) {
        setup
            .run(&sim(1), |one| {
                assert_eq!(reductions(one, &[2, 1, 0])?, [0, 0, 0, 3]);
                assert_eq!(reductions(one, &[2, 1, 0])?, [1, 2, 3, 3]);
                // Another order: ranks must not reduce different buckets with each other, so the first one waits.
                assert_eq!(reductions(one, &[1, 2, 0])?, [0, 2, 3, 3]);
                Ok(())
            })
            .unwrap();
        let setup = Setup { ddp: overlap(GradOverlap::AtFinish), ..setup };
        let at_end = |one: &mut One| {
            for _ in 0..2 {
                assert_eq!(reductions(one, &[2, 1, 0])?, [0, 0, 0, 3]);
            }
            Ok(())
        };
        setup.run(&sim(1), at_end).unwrap();
    }
}

#[test]
fn a_bucket_that_never_fills_is_an_error_with_ready_and_total() {
    let mut setup = Setup::new(2, declared(&[64, 64, 64]));
    setup.declared[1].spec.name = "p2b".into(); // the bucket of p2
    let failed = setup.run(&sim(1), |one| {
        one.microbatch(|one| one.contribute(2, 1.0))?;
        Ok(one.ddp.finish_grads()?)
    });
    let failed = failed.unwrap_err();
    let text = ours(&failed).to_string();
    assert!(matches!(ours(&failed), DdpError::Unfilled { groups } if groups.len() == 2), "{text}");
    assert!(text.contains("(0/1 parameters ready, 'p2b' is not)") && text.contains("'p0' is not"), "{text}");
    let failed = setup.run(&sim(1), |one| {
        one.microbatch(|one| (0..3).try_for_each(|i| one.contribute(i, 1.0)))?;
        one.ddp.finish_grads()?;
        one.microbatch(|one| (1..3).try_for_each(|i| one.contribute(i, 1.0)))?;
        Ok(one.ddp.finish_grads()?)
    });
    let text = ours(&failed.unwrap_err()).to_string();
    assert!(text.contains("bucket group 2 ('p0' on) (0/1 parameters ready, 'p0' is not)"), "{text}");
}

#[test]
fn a_parameter_that_the_first_microbatch_does_not_use_contributes_zeros_not_the_last_steps_gradient() {
    let config = DdpConfig { unfilled: Unfilled::Zero, ..DdpConfig::default() };
    for setup in both(Setup { ddp: config, ..Setup::new(2, declared(&[30, 40])) }) {
        for machine in machines() {
            setup
                .run(&machine, |one| {
                    one.microbatch(|one| (0..2).try_for_each(|i| one.contribute(i, 4.0)))?;
                    one.ddp.finish_grads()?;
                    assert_grads(one, 0, 4.0)?;
                    for _ in 0..3 {
                        one.microbatch(|one| one.contribute(1, 3.0))?;
                        one.ddp.finish_grads()?;
                        assert_grads(one, 0, 0.0)?;
                        assert_grads(one, 1, 3.0)?;
                    }
                    // Unused in the first of two microbatches, used in the second.
                    let stream = one.stream.clone();
                    {
                        let params = one.buffers.params().to_vec();
                        let paused = one.ddp.no_sync();
                        paused.begin_microbatch(&stream)?;
                        crate::support::contribute(&params[1], &stream, vec![3.0; 40])?;
                        paused.end_microbatch(&stream)?;
                    }
                    one.microbatch(|one| (0..2).try_for_each(|i| one.contribute(i, 5.0)))?;
                    one.ddp.finish_grads()?;
                    assert_grads(one, 0, 5.0)?;
                    assert_grads(one, 1, 8.0)
                })
                .unwrap();
        }
    }
}

#[test]
fn no_sync_ends_with_its_guard_also_by_an_early_return_or_a_panic() {
    let setup = Setup::new(2, declared(&[8]));
    setup
        .run(&sim(1), |one| {
            fn leaves(one: &mut One) -> Result<(), Caught> {
                let paused = one.ddp.no_sync();
                paused.end_microbatch(&one.stream)?; // no microbatch: an error
                Ok(())
            }
            assert!(leaves(one).is_err());
            let ddp = &mut one.ddp;
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let _paused = ddp.no_sync();
                panic!("in the middle");
            }));
            assert!(panicked.is_err());
            one.microbatch(|one| one.contribute(0, (one.rank + 1) as f32))?;
            one.ddp.finish_grads()?;
            assert_grads(one, 0, 1.5)?;
            let stream = one.stream.clone();
            let outer = one.ddp.no_sync();
            let inner = outer.no_sync();
            drop(inner);
            outer.begin_microbatch(&stream)?;
            outer.end_microbatch(&stream)?;
            let refused = outer.finish_grads().unwrap_err();
            assert!(matches!(refused, DdpError::StillPaused), "{refused}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn gradients_outside_a_microbatch_or_behind_the_reduction_are_refused() {
    let setup = Setup::new(2, declared(&[8]));
    setup
        .run(&sim(1), |one| {
            let text = one.contribute(0, 1.0).unwrap_err().to_string();
            assert!(text.contains("p0"), "{text}");
            one.ddp.begin_microbatch(&one.stream)?;
            assert!(matches!(one.ddp.begin_microbatch(&one.stream), Err(DdpError::MicrobatchOpen { microbatch: 1 })));
            assert!(matches!(one.ddp.finish_grads(), Err(DdpError::MicrobatchOpen { microbatch: 1 })));
            one.contribute(0, 1.0)?;
            one.ddp.end_microbatch(&one.stream)?;
            one.ddp.finish_grads()?;
            one.ddp.begin_microbatch(&one.stream)?;
            one.contribute(0, 1.0)?;
            let late = one.contribute(0, 1.0).unwrap_err();
            let late = late.downcast_ref::<pgroups::PgError>().map(ours);
            assert!(matches!(late, Some(DdpError::LandedAfterReduce { param, .. }) if param == "p0"), "{late:?}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn zeroing_resets_what_has_landed_as_well_as_the_data() {
    for setup in both(Setup::new(2, declared(&[8, 8]))) {
        setup
            .run(&sim(1), |one| {
                for _ in 0..2 {
                    one.ddp.begin_microbatch(&one.stream)?;
                    one.contribute(1, 7.0)?; // and then the step is given up
                    one.ddp.zero_grads(&one.stream)?;
                    one.microbatch(|one| (0..2).rev().try_for_each(|i| one.contribute(i, 2.0)))?;
                    one.ddp.finish_grads()?;
                    assert_grads(one, 0, 2.0)?;
                    assert_grads(one, 1, 2.0)?;
                    one.ddp.zero_grads(&one.stream)?;
                    assert_grads(one, 0, 0.0)?;
                }
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn ranks_with_other_parameters_are_told_the_first_that_differs_before_anything_moves() {
    // Rank 1 has one more, frozen or trained, before the last; or one of another size.
    let extra = |training| {
        let mut param = constant("p1b", &[3, 5], 0.0);
        param.training = training;
        param
    };
    for training in [Training::Frozen, Training::Trained] {
        let more = {
            let mut list = declared(&[4, 8, 16]);
            list.insert(2, extra(training));
            list
        };
        let kind = if training == Training::Frozen { "frozen" } else { "trained" };
        let text = differing(declared(&[4, 8, 16]), more);
        let want = [format!("'p1b [3, 5] f32 {kind}'"), "'p2 [16] f32 trained'".into(), "parameter 2".into()];
        assert!(want.iter().all(|part| text.contains(part)), "{text}");
    }
    let text = differing(declared(&[4, 8]), declared(&[4, 8, 16]));
    assert!(text.contains("parameter 2 is 'nothing' on rank 0, 'p2 [16] f32 trained' on rank 1"), "{text}");
    let text = differing(declared(&[4, 8]), declared(&[4, 9]));
    assert!(text.contains("'p1 [8] f32 trained'") && text.contains("'p1 [9] f32 trained'"), "{text}");
}

/// What rank 0 is told when rank 1 declares something else; both fail, at once.
fn differing(first: Vec<ddp::DeclaredParam>, second: Vec<ddp::DeclaredParam>) -> String {
    let mut told = Vec::new();
    for machine in [cpu(), sim(1)] {
        let errors = pgroups::local(&machine, 2, |rank| {
            let setup = Setup::new(2, if rank.global.0 == 0 { first.clone() } else { second.clone() });
            let error = setup.on(&rank).err().expect("the ranks differ");
            Ok::<_, Caught>(error.to_string())
        });
        let errors = errors.unwrap();
        assert!(errors.iter().all(|error| error.contains("declare the same on all")), "{errors:?}");
        told.push(errors[0].clone());
    }
    assert_eq!(told[0], told[1]);
    told.remove(0)
}

#[test]
fn a_captured_pass_lands_nothing_and_a_foreign_parameter_just_adds() {
    let setup = Setup::new(1, declared(&[4]));
    setup
        .run(&sim(1), |one| {
            let view = || one.device.alloc("own", &[2], DType::F32, device::MemoryKind::Other);
            let foreign = pgroups::Param::new("foreign", &view()?, &view()?)?;
            let mut weights = Whole::new(Turn::eager(Pass::Backward));
            let GradOut::Main { keep, .. } = weights.grad(&foreign, &one.stream)? else { panic!("scratch") };
            assert!(matches!(keep, Keep::All));
            weights.grad_done(&foreign, &one.stream)?;
            struct Tape(Vec<String>);
            impl pgroups::Recorder for Tape {
                fn read(&mut self, p: &pgroups::Param, _: &device::Stream) -> Result<(), pgroups::PgError> {
                    self.0.push(format!("read {}", p.name()));
                    Ok(())
                }
                fn done(&mut self, p: &pgroups::Param, _: &device::Stream) -> Result<(), pgroups::PgError> {
                    self.0.push(format!("done {}", p.name()));
                    Ok(())
                }
                fn open(&mut self, p: &pgroups::Param, _: &device::Stream) -> Result<Option<Keep>, pgroups::PgError> {
                    self.0.push(format!("open {}", p.name()));
                    Ok(p.landed_sink().map(|sink| sink.first_use()))
                }
                fn landed(&mut self, p: &pgroups::Param, _: &device::Stream) -> Result<(), pgroups::PgError> {
                    self.0.push(format!("landed {}", p.name()));
                    Ok(())
                }

                fn hand_over(&mut self, _: std::sync::Arc<dyn pgroups::HandOver>) -> Result<(), pgroups::PgError> {
                    unreachable!("whole weights hand nothing over")
                }
            }
            let mut tape = Tape(Vec::new());
            let mut weights = Whole::new(Turn::recorded(Pass::Forward, &mut tape));
            weights.take(one.param(0), &one.stream)?;
            weights.give_back(one.param(0), &one.stream)?;
            weights.enter(Pass::Backward);
            let GradOut::Main { keep, .. } = weights.grad(one.param(0), &one.stream)? else { panic!("scratch") };
            assert!(matches!(keep, Keep::Times(flag) if flag.same_as(one.ddp.keep())));
            weights.grad_done(one.param(0), &one.stream)?;
            drop(weights);
            assert_eq!(tape.0, ["read p0", "done p0", "open p0", "landed p0"]);
            assert_eq!(one.ddp.counters(), ddp::Counters::default());
            Ok(())
        })
        .unwrap();
}

#[test]
fn ranks_with_other_settings_are_told_both() {
    for machine in [cpu(), sim(1)] {
        let errors = pgroups::local(&machine, 2, |rank| {
            let mut setup = Setup::new(2, declared(&[8]));
            if rank.global.0 == 1 {
                setup.ddp.overlap = GradOverlap::AtFinish;
            }
            let error = setup.on(&rank).err().expect("the ranks differ");
            Ok::<_, Caught>(error.to_string())
        });
        for error in errors.unwrap() {
            assert!(error.contains("Overlapped") && error.contains("AtFinish"), "{error}");
        }
    }
}

#[test]
fn buckets_of_every_class_and_type_are_reduced_as_backward_fills_them() {
    // Layers of a dense f32, a dense bf16 and an expert weight: three buffers, one bucket for each weight.
    let mut params = declared(&[40; 6]);
    for (i, param) in params.iter_mut().enumerate() {
        param.spec.name = format!("h{i}.w");
        param.stored = if i % 3 == 1 { DType::Bf16 } else { DType::F32 };
        param.spec.class = if i % 3 == 2 { pgroups::ParamClass::Expert } else { pgroups::ParamClass::Dense };
    }
    for setup in both(Setup::new(2, params)) {
        setup
            .run(&sim(3), |one| {
                assert_eq!(one.ddp.plan().buffers().len(), 3);
                assert_eq!(reductions(one, &[5, 4, 3, 2, 1, 0])?, [0, 0, 0, 0, 0, 0, 6]);
                assert_eq!(reductions(one, &[5, 4, 3, 2, 1, 0])?, [1, 2, 3, 4, 5, 6, 6]);
                Ok(())
            })
            .unwrap();
    }
}
