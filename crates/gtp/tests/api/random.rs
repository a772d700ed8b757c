//! Passes of any shape: values of whole weights, slots apart, nothing for the verifier to object to.

use std::num::NonZeroUsize;

use device::Machine;
use graphcap::Scope;
use gtp::{Drain, PassKind};
use pgroups::Pass;
use proptest::prelude::*;

use crate::api::{
    mixed::{MODES, capture, set},
    prefetch::keep_apart,
    rig::options,
    script::Act,
    stand::{Model, check_all},
};

/// Calls of a pass: kinds and weights, to be made well-formed.
fn calls() -> impl Strategy<Value = Vec<(u8, usize)>> {
    prop::collection::vec((0u8..12, 0usize..6), 1..24)
}

/// Weights of rows and columns, the alignment of their cuts, peers.
fn models() -> impl Strategy<Value = Model> {
    let sizes = prop::collection::vec((1usize..7, 1usize..5), 2..7);
    let limits = (0usize..4, prop::option::of(1usize..400), 1usize..4);
    (2u32..4, sizes, 1usize..3, limits).prop_map(|(gtp, sizes, alignment, (uses, bytes, behind))| {
        let mut model = Model::new(gtp, &sizes).look_ahead(uses);
        model.specs.iter_mut().for_each(|spec| spec.placement.cuts[0].alignment = alignment);
        model.config.axes[0].look_ahead_bytes = bytes;
        model.config.grads_behind = NonZeroUsize::new(behind).unwrap();
        model
    })
}

/// Uses inside uses, gradients inside gradients, on two streams, each on the one where it began; everything is closed at
/// the end.
fn well_formed(calls: &[(u8, usize)], weights: usize) -> Vec<Act> {
    let (mut acts, mut uses, mut grads) = (Vec::new(), Vec::new(), Vec::new());
    let mut stream = 0;
    for &(kind, number) in calls {
        let weight = number % weights;
        match kind {
            0..=4 => {
                acts.push(Act::Take(weight));
                uses.push((weight, stream));
            }
            5..=7 if !uses.is_empty() => {
                // Of several uses of a weight, the last one ends first.
                let (chosen, _) = uses[number % uses.len()];
                let last = uses.iter().rposition(|(weight, _)| *weight == chosen).expect("chosen of these");
                let (weight, on) = uses.remove(last);
                acts.extend([Act::On(on), Act::Back(weight), Act::On(stream)]);
            }
            8 | 9 if grads.iter().all(|(open, _)| *open != weight) => {
                acts.push(Act::Grad(weight));
                grads.push((weight, stream));
            }
            10 if !grads.is_empty() => {
                let (weight, on) = grads.remove(number % grads.len());
                acts.extend([Act::On(on), Act::Done(weight), Act::On(stream)]);
            }
            11 => {
                stream = 1 - stream;
                acts.push(Act::On(stream));
            }
            _ => acts.push(Act::Enter([Pass::Forward, Pass::Backward, Pass::Recompute][number % 3])),
        }
    }
    acts.extend(grads.into_iter().flat_map(|(weight, on)| [Act::On(on), Act::Done(weight)]));
    acts.extend(uses.into_iter().rev().flat_map(|(weight, on)| [Act::On(on), Act::Back(weight)]));
    acts
}

/// A pass on one stream, in parts that end where nothing is open; each uses a weight.
fn parts(calls: &[(u8, usize)], weights: usize) -> Vec<Vec<Act>> {
    let one_stream: Vec<(u8, usize)> = calls.iter().copied().filter(|(kind, _)| *kind != 11).collect();
    let (mut parts, mut open) = (vec![vec![Act::Take(0), Act::Back(0)]], 0);
    for act in well_formed(&one_stream, weights).into_iter().filter(|act| !matches!(act, Act::On(_))) {
        if open == 0 && matches!(act, Act::Take(_)) {
            parts.push(Vec::new());
        }
        open += match act {
            Act::Take(_) | Act::Grad(_) => 1,
            Act::Back(_) | Act::Done(_) => -1,
            Act::Enter(_) | Act::On(_) => 0,
        };
        parts.last_mut().expect("the first one").push(act);
    }
    parts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_pass_gives_what_whole_weights_give(
        model in models(),
        calls in calls(),
        others in calls(),
        seed in 0u64..1000,
    ) {
        let (acts, others) = (well_formed(&calls, model.specs.len()), well_formed(&others, model.specs.len()));
        // Planned, as planned, another one, and back to the plan.
        let passes: Vec<Vec<Act>> = [&acts, &acts, &acts, &others, &acts, &acts, &acts].map(Clone::clone).into();
        let want = model.whole(&passes);
        let got = model.run(&Machine::sim_with(seed, options()), |stand| {
            passes.iter().try_for_each(|acts| stand.pass(acts))?;
            let plan = stand.plan()?;
            keep_apart(&plan);
            stand.found()
        });
        check_all(&got, &want, &format!("seed {seed}"));
    }

    #[test]
    fn graphs_of_any_parts_in_any_order_give_what_whole_weights_give(
        mut model in models(),
        calls in calls(),
        todo in prop::collection::vec(0usize..12, 1..20),
        two_stage in any::<bool>(),
        gates in 0usize..2,
        seed in 0u64..1000,
    ) {
        let parts = parts(&calls, model.specs.len());
        let acts = parts.concat();
        model.config.drain = if two_stage { Drain::TwoStage } else { Drain::Whole };
        // A part by its number, or the pass as it is submitted.
        let ran = |what: &usize| parts.get(*what).unwrap_or(&acts).clone();
        let want = model.whole(&std::iter::once(acts.clone()).chain(todo.iter().map(ran)).collect::<Vec<_>>());
        let got = model.run(&Machine::sim_with(seed, options()), |stand| {
            stand.pass(&acts)?;
            stand.gtp.plan()?;
            let mut set = set(stand, Scope::Layer, MODES[gates], 1)?;
            let graphs = capture(stand, &mut set, PassKind::TRAIN, &parts)?;
            let lanes = [stand.rank.device.stream("lane a")?, stand.rank.device.stream("lane b")?];
            for (i, what) in todo.iter().enumerate() {
                match graphs.get(*what) {
                    Some(graph) => graph.replay(&lanes[i % 2], &[])?,
                    None => stand.pass(&acts)?,
                }
            }
            stand.found()
        });
        check_all(&got, &want, &format!("seed {seed}"));
    }
}
