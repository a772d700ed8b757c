//! What a pass keeps.

use device::{Frame, Machine, ops::Factor};
use model::{GptConfig, Microbatch};
use pgroups::Pass;

use crate::rig::{Case, Layout, Rig, cut, ids};

#[test]
fn the_plan_is_near_the_most_that_lives_at_once() {
    let config = GptConfig { layers: 6, ..cut() };
    let values = std::collections::BTreeMap::new();
    let microbatches = [(ids(4 * 129, 257, 1), ids(4 * 129, 257, 2))];
    let plan = Case { config, values: &values, microbatches: &microbatches, len: 129 }.plan();
    let ratio = plan.bytes() as f64 / plan.peak_live_bytes() as f64;
    assert!(ratio <= 1.15, "{plan}: {ratio}");
}

/// Bytes of the plan of a whole microbatch with so many layers, and of a forward pass alone.
fn planned(layers: usize) -> [usize; 2] {
    let config = GptConfig { layers, ..cut() };
    let machine = Machine::dry();
    let rig = Rig::new(&machine, config.clone(), None);
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

#[test]
fn a_layer_more_keeps_what_its_page_says_and_nothing_else() {
    let (rows, c) = (2 * 129, cut());
    // Input, norm, attention, sum, norm; query, key, value; around the activation; statistics.
    let per_token = 5 * c.dim + 3 * c.dim + 2 * c.ffn_dim + c.heads + 4;
    let ([three, _], [five, _]) = (planned(3), planned(5));
    let each = (five - three) / 2;
    let told = 4 * rows * per_token;
    // Buffers start at multiples of 128 bytes.
    assert!(each.abs_diff(told) <= 16 * 128, "{each} bytes a layer, {told} told");
}

#[test]
fn a_forward_pass_alone_keeps_no_layer() {
    let ([_, three], [_, nine]) = (planned(3), planned(9));
    assert_eq!(three, nine);
}
