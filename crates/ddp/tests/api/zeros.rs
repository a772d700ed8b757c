//! Zeros among the gradients: each element of the model is counted once.

use ddp::{CountZeros, GradCheck, GradType, OptimizerConfig, Sharding};
use device::DType;
use pgroups::{Axis, LayoutConfig, ParamClass, Placement};

use crate::{
    optimizer::{SIZES, no_clip, step_sites},
    support::{Caught, One, Setup, constant, declared, get, machines},
};

fn counting() -> OptimizerConfig {
    OptimizerConfig { zeros: CountZeros::EachStep, ..OptimizerConfig::default() }
}

/// A rank's contribution to a parameter: its place in the model, the rank, the elements.
type Gradient<'g> = &'g (dyn Fn(usize, u32, usize) -> Vec<f32> + Sync);

/// Every rank counts `want` zeros, sharded and whole, on every driver, in two steps.
fn count(setup: &Setup, gradient: Gradient<'_>, want: f32) {
    for machine in machines() {
        let counted = setup.run(&machine, |one: &mut One| -> Result<Vec<f32>, Caught> {
            let mut optimizer = one.optimizer(counting())?;
            let params = one.buffers.params().len();
            let mut seen = Vec::new();
            for _ in 0..2 {
                one.microbatch(|one| {
                    (0..params).rev().try_for_each(|i| {
                        one.contribute_on(&one.stream, i, gradient(i, one.rank, one.param(i).numel()))
                    })
                })?;
                one.ddp.finish_grads()?;
                optimizer.step(&one.stream, &[0.1])?;
                seen.extend(get::<f32>(&one.stream, optimizer.zeros().unwrap())?);
            }
            Ok(seen)
        });
        assert!(counted.as_ref().unwrap().iter().all(|seen| *seen == [want; 2]), "{counted:?}, not {want}");
    }
}

#[test]
fn zeros_are_those_of_the_reduced_gradients_and_no_padding() {
    // A fifth is zero on all ranks; where two of three ranks cancel, only the sum is.
    let gradient = |i: usize, rank: u32, numel: usize| -> Vec<f32> {
        let value = |at: usize| match at % 5 {
            0 => 0.0,
            1 if i == 1 => [1.0, -1.0, 0.0][rank as usize],
            _ => (rank + 1) as f32,
        };
        (0..numel).map(value).collect()
    };
    // Every fifth of 200, 70, 301 and 33, and as many again of the second.
    let want = (40 + 14 + 61 + 7 + 14) as f32;
    let setup = Setup::new(3, declared(&SIZES));
    let mut narrow = setup.clone();
    narrow.declared.iter_mut().for_each(|param| param.stored = DType::Bf16);
    narrow.plan.grad = GradType::AsStored;
    for setup in [setup.clone(), setup.sharded(), narrow.clone(), narrow.sharded()] {
        count(&setup, &gradient, want);
    }
}

#[test]
fn copies_of_a_weight_are_counted_once_and_its_parts_all() {
    // tp = 2, dp = 2: of a weight of 8 that is cut, and of one of 5 that both hold, every other element is zero.
    let mut cut = constant("cut", &[8], 0.0);
    cut.spec.placement = Placement::whole([8]).cut(0, Axis::TP, 0);
    let layout = LayoutConfig { tp: 2, dp: Some(2), ..LayoutConfig::default() };
    let setup = Setup { layout, ..Setup::new(2, vec![cut, constant("norm", &[5], 0.0)]) };
    let every_other = |_: usize, _: u32, numel: usize| (0..numel).map(|at| (at % 2) as f32).collect();
    for setup in [setup.clone(), setup.sharded()] {
        count(&setup, &every_other, 4.0 + 3.0);
    }
}

#[test]
fn a_stage_and_an_expert_count_for_all() {
    let mut stages: [_; 2] = ["first", "second"].map(|name| constant(name, &[6], 1.0));
    for (stage, param) in (0..).zip(&mut stages) {
        param.spec.placement = Placement::whole([6]).pin(Axis::PP, [stage]);
    }
    let layout = LayoutConfig { pp: 2, dp: Some(1), ..LayoutConfig::default() };
    let setup = Setup { layout, ..Setup::new(1, stages.to_vec()) };
    // Stage 0 has two zeros, stage 1 five.
    let stage = |_: usize, rank: u32, numel: usize| {
        (0..numel).map(|at| if at < 2 + 3 * rank as usize { 0.0 } else { 1.0 }).collect()
    };
    count(&setup, &stage, 7.0);

    // World of 4, two experts with two replicas each: {0, 2} and {1, 3}.
    let mut expert = constant("expert", &[100], 0.0);
    expert.spec.class = ParamClass::Expert;
    let layout = LayoutConfig { dp: Some(4), ep: 2, ..LayoutConfig::default() };
    let mut setup = Setup { layout, ..Setup::new(4, vec![constant("dense", &[200], 0.0), expert]) };
    let gradient = |i: usize, rank: u32, numel: usize| {
        let zeros = [[90, 90], [30, 7]][i][rank as usize % 2];
        (0..numel).map(|at| if at < zeros { 0.0 } else { 1.0 }).collect()
    };
    for sharding in [Sharding::Off, Sharding::On { dense: 4, expert: 2 }] {
        setup.plan.sharding = sharding;
        count(&setup, &gradient, (90 + 30 + 7) as f32);
    }
}

#[test]
fn a_skipped_step_is_counted_too_and_nobody_counts_unasked() {
    Setup::new(2, declared(&[10]))
        .run(&crate::support::sim(1), |one| {
            let mut optimizer = one.optimizer(counting())?;
            let bad = vec![f32::NAN, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
            one.microbatch(|one| one.contribute_on(&one.stream, 0, bad.clone()))?;
            one.ddp.finish_grads()?;
            optimizer.step(&one.stream, &[0.1])?;
            assert_eq!(get::<i32>(&one.stream, optimizer.skipped())?, [1]);
            assert_eq!(get::<f32>(&one.stream, optimizer.zeros().unwrap())?, [3.0]);
            assert!(one.optimizer(OptimizerConfig::default())?.zeros().is_none());
            // Also where nothing else makes a step look at all gradients.
            let mut unclipped = one.optimizer(OptimizerConfig { check: GradCheck::WithClip, ..no_clip() })?;
            assert!(!unclipped.config().checks() && unclipped.zeros().is_none());
            let counting = OptimizerConfig { check: GradCheck::WithClip, zeros: CountZeros::EachStep, ..no_clip() };
            unclipped = one.optimizer(counting)?;
            one.microbatch(|one| one.contribute(0, 0.0))?;
            one.ddp.finish_grads()?;
            unclipped.step(&one.stream, &[0.1])?;
            assert_eq!(get::<f32>(&one.stream, unclipped.zeros().unwrap())?, [10.0]);
            Ok(())
        })
        .unwrap();
}

#[test]
fn zeros_are_counted_behind_clipping_and_before_the_update() {
    let mut sites = step_sites(&Setup::new(2, declared(&SIZES)), &counting());
    sites.dedup();
    assert_eq!(sites[1..5], ["ddp.norm", "ddp.clip", "ddp.zeros", "ddp.advance"]);
    assert!(sites[5..].iter().all(|site| site.starts_with("ddp.update")), "{sites:?}");
}
