//! What does not fit is refused, with both sizes.

use device::{DType, Frame, Machine, MemoryKind, ops::Factor};
use model::{Block, Gpt, GptConfig, GptPlan, Microbatch, ModelError, RecomputeLayers};
use pgroups::{Pass, Weights};

use crate::rig::{Layout, Rig, ids, tiny, values};

fn rig() -> Rig {
    let config = tiny();
    let values = values(&GptPlan::new(config.clone()).unwrap(), 1);
    Rig::new(&Machine::cpu(1).unwrap(), config, Some(&values))
}

fn forward(rig: &Rig, tokens: &device::View, targets: &device::View) -> Result<(), ModelError> {
    let mut f = Frame::unplanned(&rig.stream, "frame");
    let token_scale = Factor::Const(1.0);
    let m = Microbatch { tokens, targets, loss: &rig.loss, token_scale, slot: 0 };
    rig.gpt.forward_loss(&mut f, &mut rig.weights(Layout::Main, Pass::Forward), &m)
}

#[test]
fn tokens_that_are_no_batch_of_sequences_are_refused() {
    let rig = rig();
    for shape in [vec![7], vec![1, 8], vec![2, 0], vec![0, 7], vec![1, 2, 3]] {
        let view = rig.device.alloc("tokens", &shape, DType::I32, MemoryKind::Other).unwrap();
        let error = forward(&rig, &view, &view).unwrap_err();
        assert!(matches!(error, ModelError::Tokens { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&format!("{shape:?}")) && text.contains("1 to 7 tokens"), "{text}");
    }
}

#[test]
fn targets_of_other_sizes_are_refused() {
    let rig = rig();
    let (tokens, targets) = (rig.ids("tokens", &ids(14, 9, 1), 7), rig.ids("targets", &ids(7, 9, 2), 7));
    let text = forward(&rig, &tokens, &targets).unwrap_err().to_string();
    assert!(text.contains("[2, 7]") && text.contains("[1, 7]"), "{text}");
}

#[test]
fn tokens_of_another_type_are_refused_by_the_device() {
    let rig = rig();
    let view = rig.device.alloc("tokens", &[1, 7], DType::F32, MemoryKind::Other).unwrap();
    let error = forward(&rig, &view, &view).unwrap_err();
    assert!(matches!(error, ModelError::Device(device::Error::ElementType { .. })), "{error}");
}

#[test]
fn a_token_outside_the_vocabulary_is_told_by_its_place() {
    let rig = rig();
    let mut tokens = ids(14, 9, 1);
    tokens[10] = 9;
    let (tokens, targets) = (rig.ids("tokens", &tokens, 7), rig.ids("targets", &ids(14, 9, 2), 7));
    // The failure is sticky: later launches may or may not meet it already.
    let _ = forward(&rig, &tokens, &targets);
    let error = rig.stream.synchronize().unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(error.to_string().contains("wte") && cause.contains("id 9 at position 10"), "{error}: {cause}");
}

#[test]
fn a_block_refuses_activations_of_another_width() {
    let rig = rig();
    let mut f = Frame::unplanned(&rig.stream, "frame");
    let blocks: &[Box<dyn Block>] = rig.gpt.blocks();
    for shape in [vec![2, 7, 5], vec![14, 6]] {
        let x = rig.device.alloc("x", &shape, DType::F32, MemoryKind::Other).unwrap();
        let error = blocks[1].forward(&mut f, &mut rig.weights(Layout::Main, Pass::Forward), &x).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("h.0") && text.contains(&format!("{shape:?}")), "{text}");
    }
    let x = rig.device.alloc("x", &[2, 7, 5], DType::F32, MemoryKind::Other).unwrap();
    let error = blocks[3].forward(&mut f, &mut rig.weights(Layout::Main, Pass::Forward), &x).unwrap_err();
    assert!(matches!(error, ModelError::Device(device::Error::Shapes { .. })), "{error}");
}

#[test]
fn backward_without_its_forward_is_refused() {
    let rig = rig();
    let (tokens, targets) = (rig.ids("tokens", &ids(7, 9, 1), 7), rig.ids("targets", &ids(7, 9, 2), 7));
    let mut f = Frame::unplanned(&rig.stream, "frame");
    let mut w = rig.weights(Layout::Main, Pass::Forward);
    fn refused(gpt: &Gpt, f: &mut Frame, w: &mut dyn Weights, slot: u32) -> bool {
        matches!(gpt.backward(f, w, slot), Err(ModelError::Device(device::Error::NotSaved { .. })))
    }
    assert!(refused(&rig.gpt, &mut f, &mut w, 0));
    let token_scale = Factor::Const(1.0);
    let m = Microbatch { tokens: &tokens, targets: &targets, loss: &rig.loss, token_scale, slot: 1 };
    rig.gpt.forward_loss(&mut f, &mut w, &m).unwrap();
    assert!(refused(&rig.gpt, &mut f, &mut w, 0), "another slot");
    rig.gpt.backward(&mut f, &mut w, 1).unwrap();
}

#[test]
fn logits_behind_the_sequence_are_refused() {
    let rig = rig();
    let tokens = rig.ids("tokens", &ids(5, 9, 1), 5);
    let mut f = Frame::unplanned(&rig.stream, "frame");
    let error = rig.gpt.logits(&mut f, &mut rig.weights(Layout::Main, Pass::Forward), &tokens, 5).unwrap_err();
    assert!(matches!(error, ModelError::Position { position: 5, tokens: 5 }), "{error}");
}

#[test]
fn a_layer_to_recompute_that_is_not_there_is_refused() {
    let rig = rig();
    let error = rig.plan.build_with(&rig.params, &RecomputeLayers::These(vec![1, 2])).err().unwrap();
    assert_eq!(error.to_string(), "layer 2 is to be recomputed, the model has layers 0 to 1");
}

#[test]
fn parameters_of_another_model_are_refused() {
    let rig = rig();
    let plan = GptPlan::new(GptConfig { layers: 3, ..tiny() }).unwrap();
    let error = plan.build(&rig.params).err().unwrap();
    assert!(matches!(error, ModelError::ParamCount { declared: 40, given: 28 }), "{error}");
    let mut swapped = rig.params.clone();
    swapped.swap(4, 6);
    let error = rig.plan.build(&swapped).err().unwrap().to_string();
    assert!(error.contains("parameter 4 must be 'h.0.attn.c_attn.weight'"), "{error}");
}
