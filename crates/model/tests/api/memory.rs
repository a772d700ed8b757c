//! What a pass keeps.

use std::num::NonZeroUsize;

use device::{Frame, Machine, ops::Factor};
use model::{GptConfig, Microbatch, RecomputeLayers};
use pgroups::Pass;

use crate::rig::{Case, Layout, Rig, cut, cut_llama, ids};

#[test]
fn the_plan_is_near_the_most_that_lives_at_once() {
    let values = std::collections::BTreeMap::new();
    let microbatches = [(ids(4 * 129, 257, 1), ids(4 * 129, 257, 2))];
    for config in [cut(), cut_llama()] {
        for recompute in [RecomputeLayers::None, RecomputeLayers::All, RecomputeLayers::These(vec![1, 2, 4])] {
            let config = GptConfig { layers: 6, ..config.clone() };
            let plan = Case { config, values: &values, microbatches: &microbatches, len: 129, recompute }.plan();
            let ratio = plan.bytes() as f64 / plan.peak_live_bytes() as f64;
            assert!(ratio <= 1.15, "{plan}: {ratio}");
        }
    }
}

/// Bytes of the plan of a whole microbatch with so many layers, and of a forward pass alone.
fn planned(config: GptConfig, layers: usize, recompute: &RecomputeLayers) -> [usize; 2] {
    let config = GptConfig { layers, ..config };
    let machine = Machine::dry();
    let rig = Rig::recomputing(&machine, config, None, recompute);
    let (tokens, targets) = (rig.ids("tokens", &ids(258, 257, 1), 129), rig.ids("targets", &ids(258, 257, 2), 129));
    [true, false].map(|train| {
        let mut f = Frame::recording(&rig.stream, "frame");
        machine.trace_start();
        let mut w = rig.weights(Layout::Main, Pass::Forward);
        if train {
            rig.run(&mut f, Layout::Main, [&tokens, &targets], 1.0).unwrap();
        } else {
            let token_scale = Factor::Const(1.0);
            let m = Microbatch { tokens: &tokens, targets: &targets, loss: &rig.loss, token_scale, slot: 0 };
            rig.gpt.forward_loss(&mut f, &mut w, &m).unwrap();
        }
        f.plan(&machine.trace_stop()).unwrap().bytes()
    })
}

/// What a layer more keeps from forward to backward, in bytes, of 258 tokens.
fn each(config: GptConfig, recompute: &RecomputeLayers) -> usize {
    let [three, five] = [3, 5].map(|layers| planned(config.clone(), layers, recompute)[0]);
    (five - three) / 2
}

/// Bytes that as many elements a token take; buffers start at multiples of 128 bytes.
fn assert_told(each: usize, per_token: usize) {
    let told = 4 * 258 * per_token;
    assert!(each.abs_diff(told) <= 16 * 128, "{each} bytes a layer, {told} told");
}

#[test]
fn a_layer_more_keeps_what_its_page_says_and_nothing_else() {
    let c = cut();
    // Input, norm, attention, sum, norm; query, key, value; around the activation; statistics.
    assert_told(each(cut(), &RecomputeLayers::None), 5 * c.dim + 3 * c.dim + 2 * c.ffn_dim + c.heads + 4);
    let c = cut_llama();
    let qkv = c.dim + 2 * c.kv_dim();
    assert_told(each(c.clone(), &RecomputeLayers::None), 5 * c.dim + qkv + 3 * c.ffn_dim + c.heads + 2);
}

#[test]
fn a_recomputed_layer_more_keeps_its_input_alone() {
    for config in [cut(), cut_llama()] {
        assert_told(each(config.clone(), &RecomputeLayers::All), config.dim);
    }
}

#[test]
fn the_plan_shrinks_with_every_layer_that_is_recomputed() {
    for config in [cut(), cut_llama()] {
        let bytes = |which: &RecomputeLayers| planned(config.clone(), 6, which)[0];
        let (two, three) = (NonZeroUsize::new(2).unwrap(), NonZeroUsize::new(3).unwrap());
        let plans = [
            RecomputeLayers::None,
            RecomputeLayers::These(vec![2]),
            RecomputeLayers::Every(three),
            RecomputeLayers::Every(two),
            RecomputeLayers::These(vec![0, 1, 2, 3]),
            RecomputeLayers::These(vec![0, 1, 2, 3, 4]),
        ]
        .map(|which| bytes(&which));
        assert!(plans.is_sorted_by(|more, less| more > less), "{plans:?}");
        // Backward begins with the last layer, so what it keeps is soon needed: recomputing it frees room beside the
        // loss only.
        let by_another = plans[4] - plans[5];
        let by_the_last = plans[5].saturating_sub(bytes(&RecomputeLayers::All));
        assert!(by_the_last < by_another / 2, "{by_the_last} of {by_another}");
    }
}

#[test]
fn a_forward_pass_alone_keeps_no_layer() {
    for config in [cut(), cut_llama()] {
        let [three, nine] = [3, 9].map(|layers| planned(config.clone(), layers, &RecomputeLayers::None)[1]);
        assert_eq!(three, nine);
    }
}
