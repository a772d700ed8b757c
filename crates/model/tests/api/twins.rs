//! The same computation in other ways: equal bits wherever the order of sums is equal.

use std::collections::BTreeMap;

use device::{DType, Frame, Machine, MemoryKind, View, ops::Factor};
use model::{Arch, GptConfig, GptPlan, LlamaConfig, Microbatch, Output, RecomputeLayers};
use pgroups::Pass;

use crate::{
    machines::machines,
    rig::{Case, Layout, Results, Rig, cut, cut_llama, ids, tiny, tiny_llama, values},
};

pub(crate) fn bits((losses, gradients): &Results) -> (Vec<u32>, BTreeMap<String, Vec<u32>>) {
    let of = |v: &Vec<f32>| v.iter().map(|x| x.to_bits()).collect();
    (of(losses), gradients.iter().map(|(name, v)| (name.clone(), of(v))).collect())
}

/// Names of the gradients whose bits differ.
pub(crate) fn differing(a: &Results, b: &Results) -> Vec<String> {
    let (a, b) = (bits(a), bits(b));
    assert_eq!(a.0, b.0, "losses");
    a.1.iter().filter(|(name, v)| b.1[*name] != **v).map(|(name, _)| name.clone()).collect()
}

pub(crate) fn inputs(config: &GptConfig, n: usize, seed: u64) -> (Vec<i32>, Vec<i32>) {
    (ids(n, config.vocab, seed), ids(n, config.vocab, seed + 1))
}

#[test]
fn any_number_of_workers_and_the_simulator_give_equal_bits() {
    [cut(), cut_llama()].into_iter().for_each(workers_and_the_simulator_agree);
}

fn workers_and_the_simulator_agree(config: GptConfig) {
    let values = values(&GptPlan::new(config.clone()).unwrap(), 1);
    // Rows of 4 x 129 tokens: several tiles of every kernel.
    let microbatches = [inputs(&config, 4 * 129, 1), inputs(&config, 4 * 129, 5)];
    let case =
        Case { config, values: &values, microbatches: &microbatches, len: 129, recompute: RecomputeLayers::None };
    let one = case.run(&Machine::cpu(1).unwrap(), Layout::Main);
    for workers in [2, 3] {
        let more = case.run(&Machine::cpu(workers).unwrap(), Layout::Main);
        assert_eq!(differing(&one, &more), [""; 0], "{workers} workers");
    }
    for seed in [0, 1] {
        assert_eq!(differing(&one, &case.run(&Machine::sim(seed), Layout::Main)), [""; 0], "sim, seed {seed}");
    }
}

#[test]
fn a_planned_frame_is_the_twin_of_an_unplanned_one() {
    let machines = machines();
    for (config, len, batch) in [
        (tiny(), 7, 3),
        (cut(), 129, 2),
        (GptConfig { vocab_rows: 12, ..tiny() }, 5, 1),
        (tiny_llama(), 6, 3),
        (cut_llama(), 129, 2),
    ] {
        let values = values(&GptPlan::new(config.clone()).unwrap(), 2);
        let microbatches = [inputs(&config, batch * len, 1), inputs(&config, batch * len, 5)];
        let case = Case { config, values: &values, microbatches: &microbatches, len, recompute: RecomputeLayers::None };
        let plan = case.plan();
        for machine in &machines {
            let unplanned = case.run(machine, Layout::Main);
            let planned = case.run_in(machine, Layout::Main, Some(&plan));
            assert!(planned.0.iter().all(|loss| loss.is_finite()));
            assert_eq!(differing(&unplanned, &planned), [""; 0], "{}", machine.driver());
        }
        assert!(plan.bytes() < plan.unshared_bytes());
    }
}

/// Loss and gradients when all input gradients come first and the weight gradients in the order of `order`.
fn split(config: &GptConfig, values: &BTreeMap<String, Vec<f32>>, order: &[usize], joined: bool) -> Results {
    let machine = Machine::cpu(2).unwrap();
    let rig = Rig::new(&machine, config.clone(), Some(values));
    let (tokens, targets) = inputs(config, 2 * 7, 9);
    let (tokens, targets) = (rig.ids("tokens", &tokens, 7), rig.ids("targets", &targets, 7));
    let mut f = Frame::unplanned(&rig.stream, "frame");
    let mut w = rig.weights(Layout::Main, Pass::Forward);
    let token_scale = Factor::Const(1.0 / 14.0);
    let m = Microbatch { tokens: &tokens, targets: &targets, loss: &rig.loss, token_scale, slot: 3 };
    rig.set_keep(0.0);
    rig.gpt.forward_loss(&mut f, &mut w, &m).unwrap();
    w.settled();
    let mut w = rig.weights(Layout::Main, Pass::Backward);
    if joined {
        rig.gpt.backward(&mut f, &mut w, 3).unwrap();
    } else {
        let head = rig.gpt.blocks().len() - 1;
        f.enter(head as u32, 3);
        let mut dy = Some(f.saved("logits").unwrap());
        for (at, block) in rig.gpt.blocks().iter().enumerate().rev() {
            f.enter(at as u32, 3);
            dy = block.backward_input(&mut f, &mut w, &dy.unwrap()).unwrap();
        }
        assert!(dy.is_none(), "tokens have no gradient");
        for at in order {
            f.enter(*at as u32, 3);
            rig.gpt.blocks()[*at].backward_weight(&mut f, &mut w).unwrap();
        }
    }
    w.settled();
    let (loss, gradients) = rig.results();
    (vec![loss], gradients)
}

#[test]
fn weight_gradients_may_come_later_and_in_any_order_of_blocks() {
    weight_gradients_may_come_later(&tiny(), Some("wte"));
    weight_gradients_may_come_later(&tiny_llama(), None);
    weight_gradients_may_come_later(
        &GptConfig { output: Output::Tied, ..tiny_llama() },
        Some("model.embed_tokens.weight"),
    );
}

/// `tied`: the table with two contributions.
fn weight_gradients_may_come_later(config: &GptConfig, tied: Option<&str>) {
    let values = values(&GptPlan::new(config.clone()).unwrap(), 3);
    let joined = split(config, &values, &[], true);
    for order in [[3, 2, 1, 0], [3, 0, 1, 2], [2, 3, 1, 0], [1, 2, 3, 0]] {
        assert_eq!(differing(&joined, &split(config, &values, &order, false)), [""; 0], "{order:?}");
    }
    // The tied table's two contributions are then added the other way round: it alone may round otherwise.
    for order in [[0, 1, 2, 3], [0, 3, 2, 1]] {
        let other = split(config, &values, &order, false);
        let differ = differing(&joined, &other);
        assert!(differ.iter().all(|name| Some(name.as_str()) == tied), "{order:?}: {differ:?}");
        let Some(tied) = tied else { continue };
        let largest = joined.1[tied].iter().fold(0.0f32, |m, g| m.max(g.abs()));
        let close = joined.1[tied].iter().zip(&other.1[tied]).all(|(a, b)| (a - b).abs() <= 2e-6 * largest);
        assert!(close, "{order:?}");
    }
}

#[test]
fn two_microbatches_under_way_do_not_touch_each_other() {
    for recompute in [RecomputeLayers::None, RecomputeLayers::All] {
        two_under_way(tiny(), &recompute);
        two_under_way(tiny_llama(), &recompute);
    }
}

fn two_under_way(config: GptConfig, recompute: &RecomputeLayers) {
    let values = values(&GptPlan::new(config.clone()).unwrap(), 4);
    let rig = Rig::recomputing(&Machine::cpu(2).unwrap(), config.clone(), Some(&values), recompute);
    let batches = [inputs(&config, 14, 20), inputs(&config, 14, 30)];
    let ids: Vec<[View; 2]> = batches
        .iter()
        .map(|(tokens, targets)| [rig.ids("tokens", tokens, 7), rig.ids("targets", targets, 7)])
        .collect();
    let mut f = Frame::unplanned(&rig.stream, "frame");
    let mut losses = Vec::new();
    for (slot, [tokens, targets]) in ids.iter().enumerate() {
        let token_scale = Factor::Const(1.0 / 28.0);
        let m = Microbatch { tokens, targets, loss: &rig.loss, token_scale, slot: slot as u32 };
        rig.gpt.forward_loss(&mut f, &mut rig.weights(Layout::Main, Pass::Forward), &m).unwrap();
        losses.push(rig.read(&rig.loss)[0]);
    }
    for slot in [0, 1] {
        rig.set_keep(slot as f32);
        rig.gpt.backward(&mut f, &mut rig.weights(Layout::Main, Pass::Backward), slot).unwrap();
    }
    let case = Case { config, values: &values, microbatches: &batches, len: 7, recompute: RecomputeLayers::None };
    let apart = case.run(&Machine::cpu(2).unwrap(), Layout::Main);
    assert_eq!(differing(&apart, &(losses, rig.results().1)), [""; 0]);
}

#[test]
fn logits_for_generation_are_those_of_training_and_ignore_what_follows() {
    for config in [tiny(), tiny_llama()] {
        logits_ignore_what_follows(GptConfig { vocab_rows: 10, ..config });
    }
}

fn logits_ignore_what_follows(config: GptConfig) {
    let values = values(&GptPlan::new(config.clone()).unwrap(), 4);
    let exact = crate::rig::exact(&values);
    let reference = crate::reference::Reference { config: &config, values: &exact };
    let rig = Rig::new(&Machine::cpu(2).unwrap(), config.clone(), Some(&values));
    let tokens = ids(2 * 7, 9, 12);
    let mut f = Frame::unplanned(&rig.stream, "generation");
    for at in 0..7 {
        let mut seen = Vec::new();
        for tail in [0, 8] {
            let padded: Vec<i32> =
                tokens.iter().enumerate().map(|(i, id)| if i % 7 > at { tail } else { *id }).collect();
            f.restart();
            let view = rig
                .gpt
                .logits(&mut f, &mut rig.weights(Layout::Main, Pass::Forward), &rig.ids("tokens", &padded, 7), at)
                .unwrap();
            assert_eq!((view.shape(), view.dtype()), (&[2, 9][..], DType::F32));
            seen.push(rig.read(&view));
        }
        assert_eq!(seen[0], seen[1], "position {at}");
        let want: Vec<f64> = tokens.chunks(7).flat_map(|row| reference.logits(row)[at].clone()).collect();
        let largest = want.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        let off = seen[0].iter().zip(&want).fold(0.0f64, |m, (a, b)| m.max((f64::from(*a) - b).abs()));
        assert!(off <= 2e-6 * largest, "position {at}: off by {off}");
    }
}

#[test]
fn models_that_share_a_frame_have_angles_of_their_own() {
    let arch = |kv_heads, rope_base| Arch::Llama(LlamaConfig { kv_heads, rope_base });
    // Other angles; as many key columns in one head.
    let configs = [
        tiny_llama(),
        GptConfig { arch: arch(2, 9), ..tiny_llama() },
        GptConfig { arch: arch(1, 50), heads: 2, ..tiny_llama() },
    ];
    let values = values(&GptPlan::new(tiny_llama()).unwrap(), 4);
    let shared = Rig::new(&Machine::cpu(2).unwrap(), tiny_llama(), Some(&values));
    let models = configs.map(|config| GptPlan::new(config).unwrap().build(&shared.params).unwrap());
    let x = shared.device.alloc("x", &[2, 5, 16], DType::F32, MemoryKind::Other).unwrap();
    shared.stream.upload(&x, (0..160).map(|i| (i * 37 % 41) as f32 / 20.0 - 1.0).collect::<Vec<f32>>()).unwrap();
    let forward = |f: &mut Frame, model: usize| {
        f.enter(model as u32, 0);
        let y = models[model].blocks()[1].forward(f, &mut shared.weights(Layout::Main, Pass::Forward), &x).unwrap();
        shared.read(&y)
    };
    let apart = [0, 1, 2].map(|model| forward(&mut Frame::unplanned(&shared.stream, "apart"), model));
    assert!(apart[0] != apart[1] && apart[0] != apart[2]);
    let mut f = Frame::unplanned(&shared.stream, "together");
    for model in [0, 1, 2, 0, 2, 1] {
        assert_eq!(forward(&mut f, model), apart[model], "model {model}");
    }
}
