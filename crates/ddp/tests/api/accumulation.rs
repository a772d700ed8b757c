//! What gradients are summed in, and what they are divided by.

use ddp::{Accumulation, DdpConfig, DdpError, GradType, Precision, Scaling};
use device::{DType, TraceEvent};

use crate::{
    reduction::{accumulate, assert_grads, both, held},
    support::{Caught, Setup, bits, cpu, declared, machines, ours, scalar, sim},
};

#[test]
fn bf16_contributions_are_not_lost_in_an_f32_accumulator() {
    // 1.0, then 256 times 2^-9.
    let mut setup = Setup::new(1, declared(&[4]));
    setup.declared[0].stored = DType::Bf16;
    for (grad, want) in [(GradType::F32, 1.5), (GradType::AsStored, 1.0)] {
        setup.plan.grad = grad;
        let grads = [&[1.0f32][..], &[2f32.powi(-9); 256]].concat();
        setup
            .run(&sim(1), |one| {
                assert_eq!(one.param(0).main_grad().dtype(), grad.of(ddp::Stored::Bf16));
                accumulate(one, &grads)?;
                assert_grads(one, 0, want)
            })
            .unwrap();
    }
    let printed = Precision { param: DType::Bf16, grad: GradType::AsStored, accumulation: Accumulation::F32 };
    let text = "parameters bf16, gradients bf16, reduced as bf16 pieces summed in f32, master values f32, moments f32";
    assert_eq!(printed.to_string(), text);
}

#[test]
fn bf16_pieces_are_summed_in_f32_and_rounded_once() {
    // One 1.0 and n - 1 terms of 2^-8: a sum in bf16 stays 1.0.
    for (ranks, want) in [(2, 1.0), (4, 1.015_625), (8, 1.031_25)] {
        let mut setup = Setup::new(ranks, declared(&[50, 300]));
        setup.declared.iter_mut().for_each(|param| param.stored = DType::Bf16);
        setup.plan.grad = GradType::AsStored;
        setup.ddp.accumulation = Accumulation::F32;
        setup.ddp.scaling = Scaling::PerToken;
        for machine in [cpu(), sim(3)] {
            setup
                .clone()
                .sharded()
                .run(&machine, |one| {
                    let value = if one.rank == 1 { 1.0 } else { 2f32.powi(-8) };
                    let one_token = scalar(&one.stream, 0.0)?;
                    for _ in 0..2 {
                        one.microbatch(|one| (0..2).rev().try_for_each(|i| one.contribute(i, value)))?;
                        one.ddp.finish_grads_per_token(&one.stream, &one_token)?;
                        assert_grads(one, 0, want)?;
                        assert_grads(one, 1, want)?;
                    }
                    Ok(())
                })
                .unwrap();
        }
    }
    let refused = |setup: Setup| ours(&setup.run(&sim(1), |_| Ok(())).unwrap_err()).to_string();
    let mut setup = Setup::new(2, declared(&[8]));
    setup.ddp.accumulation = Accumulation::F32;
    assert!(refused(setup.clone()).contains("turn sharding on"));
    setup.ddp.scaling = Scaling::Averaging;
    assert!(refused(setup.sharded()).contains("not averages"));
}

#[test]
fn two_models_accumulate_as_each_was_told() {
    // One wrapped with f32 accumulation does not change how the other is reduced.
    let mut narrow = Setup::new(2, declared(&[8])).sharded();
    narrow.declared[0].stored = DType::Bf16;
    narrow.plan.grad = GradType::AsStored;
    narrow.ddp.accumulation = Accumulation::F32;
    let plain = Setup { ddp: DdpConfig::default(), ..narrow.clone() };
    let machine = sim(5);
    machine.trace_start();
    pgroups::local(&machine, 2, |rank| {
        for setup in [&narrow, &plain] {
            let one = setup.on(&rank)?;
            one.microbatch(|one| one.contribute(0, 1.0))?;
            one.ddp.finish_grads()?;
            one.device.synchronize()?;
        }
        Ok::<_, Caught>(())
    })
    .unwrap();
    let trace = machine.trace_stop();
    let asked = |wanted: &str| {
        let calls = trace.events.iter().filter(|event| match event {
            TraceEvent::Joint { what, rank: 0, group, .. } => what.starts_with(wanted) && group.contains("ddp_reduce"),
            _ => false,
        });
        calls.count()
    };
    assert_eq!((asked("all_to_all"), asked("reduce_scatter")), (1, 1));
}

#[test]
fn losses_per_token_divide_once_by_the_tokens_of_all() {
    // Rank 0 has one valid token with gradient 6, rank 1 three with gradient 2 each.
    for setup in both(Setup::new(2, declared(&[9]))) {
        let setup = Setup { ddp: DdpConfig { scaling: Scaling::PerToken, ..DdpConfig::default() }, ..setup };
        for machine in machines() {
            setup
                .run(&machine, |one| {
                    let step = |tokens: f32, grad: f32| -> Result<(), Caught> {
                        let tokens = scalar(&one.stream, tokens)?;
                        one.microbatch(|one| one.contribute(0, grad))?;
                        Ok(one.ddp.finish_grads_per_token(&one.stream, &tokens)?)
                    };
                    step(if one.rank == 0 { 1.0 } else { 3.0 }, 6.0)?;
                    assert_grads(one, 0, 3.0)?;
                    // A rank without a valid token contributes nothing; a step without any divides by nothing.
                    step(if one.rank == 0 { 4.0 } else { 0.0 }, if one.rank == 0 { 8.0 } else { 0.0 })?;
                    assert_grads(one, 0, 2.0)?;
                    step(0.0, 0.0)?;
                    assert_grads(one, 0, 0.0)?;
                    assert!(matches!(one.ddp.finish_grads(), Err(DdpError::Tokens { .. })));
                    Ok(())
                })
                .unwrap();
        }
    }
}

#[test]
fn means_and_averages_scale_once_on_permuted_groups_with_gaps() {
    // World of six: replicas {5, 0, 2} and {4, 1, 3}, in that order; rank gradients 1, 2, 4, 8, 16, 32.
    let mut setup = Setup::new(6, declared(&[33, 70]));
    setup.replicas = vec![vec![5, 0, 2], vec![4, 1, 3]];
    for scaling in [Scaling::Mean, Scaling::Averaging] {
        setup.ddp.scaling = scaling;
        for setup in both(setup.clone()) {
            for machine in machines() {
                let run = setup.run(&machine, |one| {
                    let value = 3.0 * (1 << one.rank) as f32;
                    for _ in 0..2 {
                        one.microbatch(|one| (0..2).rev().try_for_each(|i| one.contribute(i, value)))?;
                        one.ddp.finish_grads()?;
                        let want: u32 = if [5, 0, 2].contains(&one.rank) { 32 + 1 + 4 } else { 16 + 2 + 8 };
                        for i in 0..2 {
                            let grads = one.grads(i)?;
                            for at in held(one, i) {
                                assert!((grads[at] - want as f32).abs() < 1e-5, "{} {want}", grads[at]);
                            }
                        }
                    }
                    let mut all = Vec::new();
                    for i in 0..2 {
                        let grads = one.grads(i)?;
                        all.extend(held(one, i).into_iter().map(|at| grads[at]));
                    }
                    Ok(bits(&all))
                });
                run.unwrap();
            }
        }
    }
}
