//! How a model's parameters lie on a layout, and what a layout does not allow.

use std::collections::BTreeMap;

use model::{Arch, GptConfig, GptPlan, LlamaConfig, ModelError, Output, ShardConfig};
use pgroups::{
    Axis, GlobalRank, GroupsPlan, Key, Layout, LayoutConfig, ParamClass, Pass, ProcessGroups, Rank, Seed, Sequence,
    TensorParallel, Turn, Whole,
};

use crate::{
    rig::{tiny, tiny_llama, values},
    tensor_rig::{Work, flat, tensor_groups},
};

fn layout(text: &str) -> Layout {
    Layout::new(&LayoutConfig::parse(text).unwrap()).unwrap()
}

fn shards(alignment: usize, sequence: Sequence, micro_batch: usize) -> ShardConfig {
    ShardConfig { alignment, sequence, micro_batch }
}

fn gpt2() -> GptConfig {
    GptConfig { dim: 16, heads: 4, ffn_dim: 12, ..tiny() }
}

#[test]
fn a_layout_that_cuts_nothing_is_the_plan_without_one() {
    for config in [tiny(), tiny_llama()] {
        let plan = GptPlan::new(config.clone()).unwrap();
        for text in ["dp=4", "pp=2,dp=2"] {
            let on = GptPlan::on(config.clone(), &layout(text), shards(0, Sequence::Split, 3)).unwrap();
            assert_eq!(on, plan, "{text}");
        }
    }
}

/// Local shapes on a layout, by name.
fn local(config: GptConfig, text: &str, shards: ShardConfig) -> BTreeMap<String, Vec<usize>> {
    let layout = layout(text);
    let plan = GptPlan::on(config, &layout, shards).unwrap();
    let shape = |p: &model::ModelParam| {
        let map = p.spec.placement.on(layout.grid(ParamClass::Dense)).unwrap();
        (p.spec.name.clone(), map.local_shape().to_vec())
    };
    plan.params().iter().map(shape).collect()
}

#[test]
fn matrices_are_cut_over_tp_by_kind_and_over_gtp_by_rows() {
    let config = GptConfig { layers: 1, vocab: 9, vocab_rows: 9, ..gpt2() };
    let got = local(config.clone(), "tp=2,gtp=2", shards(4, Sequence::Whole, 1));
    let want: [(&str, &[usize]); 16] = [
        ("wte", &[4, 16]), // 9 rows, 5 each, padded to 8 and halved
        ("wpe", &[4, 16]), // whole over tp
        ("h.0.ln_1.weight", &[16]),
        ("h.0.ln_1.bias", &[16]),
        ("h.0.attn.c_attn.weight", &[12, 16]), // 48 rows, 24 each, 12 each
        ("h.0.attn.c_attn.bias", &[24]),
        ("h.0.attn.c_proj.weight", &[8, 8]), // columns over tp, rows over gtp
        ("h.0.attn.c_proj.bias", &[16]),
        ("h.0.ln_2.weight", &[16]),
        ("h.0.ln_2.bias", &[16]),
        ("h.0.mlp.c_fc.weight", &[4, 16]), // 12, 6 each, padded to 8 and halved
        ("h.0.mlp.c_fc.bias", &[6]),
        ("h.0.mlp.c_proj.weight", &[8, 6]),
        ("h.0.mlp.c_proj.bias", &[16]),
        ("ln_f.weight", &[16]),
        ("ln_f.bias", &[16]),
    ];
    assert_eq!(got, want.into_iter().map(|(name, shape)| (name.to_owned(), shape.to_vec())).collect());
    let fused = GptPlan::on(config, &layout("tp=2,gtp=2"), shards(4, Sequence::Whole, 1)).unwrap();
    let cuts = &fused.params().iter().find(|p| p.spec.name == "h.0.attn.c_attn.weight").unwrap().spec.placement.cuts;
    assert_eq!(
        cuts.iter().map(|cut| (cut.axis.clone(), cut.blocks)).collect::<Vec<_>>(),
        [(Axis::TP, 3), (Axis::GTP, 1)]
    );

    let got = local(GptConfig { layers: 1, ffn_dim: 12, ..tiny_llama() }, "tp=2", shards(4, Sequence::Whole, 1));
    for (name, want) in [
        ("model.layers.0.self_attn.q_proj.weight", [8, 16]),
        ("model.layers.0.self_attn.k_proj.weight", [4, 16]),
        ("model.layers.0.self_attn.o_proj.weight", [16, 8]),
        ("model.layers.0.mlp.up_proj.weight", [6, 16]),
        ("model.layers.0.mlp.down_proj.weight", [16, 6]),
        ("lm_head.weight", [5, 16]),
    ] {
        assert_eq!(got[name], want, "{name}");
    }
}

#[test]
fn initial_values_are_those_of_the_undivided_model_and_padding_is_zero() {
    for config in [gpt2(), GptConfig { ffn_dim: 12, ..tiny_llama() }] {
        let undivided = GptPlan::new(config.clone()).unwrap();
        for text in ["tp=2", "gtp=4", "tp=2,gtp=2"] {
            let layout = layout(text);
            let plan = GptPlan::on(config.clone(), &layout, shards(4, Sequence::Whole, 1)).unwrap();
            for (param, whole) in plan.params().iter().zip(undivided.params()) {
                let map = param.spec.shard_map(&layout).unwrap();
                let value = whole.spec.init_stream(Seed(3));
                let mut seen = vec![false; whole.numel()];
                for rank in (0..layout.world_size()).map(GlobalRank) {
                    let mut own = vec![f32::NAN; map.local_shape().iter().product()];
                    param.spec.init_stream(Seed(3)).fill_shard(&map, rank, &mut own).unwrap();
                    map.shard(rank).unwrap().each_run(&map, |global, local| {
                        for (at, v) in global.zip(&mut own[local]) {
                            assert_eq!(v.to_bits(), value.value(at).to_bits(), "{} {at} {text}", param.spec.name);
                            seen[at as usize] = true;
                            *v = 0.0;
                        }
                    });
                    assert!(own.iter().all(|v| v.to_bits() == 0), "padding of {}", param.spec.name);
                }
                assert!(seen.iter().all(|seen| *seen), "{}", param.spec.name);
            }
        }
    }
}

#[test]
fn what_does_not_divide_is_told_at_once_with_the_nearest_that_would() {
    let refused = |config, text: &str, shards| GptPlan::on(config, &layout(text), shards).unwrap_err().to_string();
    let text = refused(GptConfig { dim: 24, heads: 6, ffn_dim: 18, ..tiny() }, "tp=4", shards(1, Sequence::Split, 3));
    for part in [
        "3 rules",
        "heads is 6: it must be a multiple of tp, 4; the nearest that would do is 4, the nearest tp that divides all \
         sizes is 3",
        "ffn_dim is 18: it must be a multiple of tp, 4; the nearest that would do is 16, the nearest tp",
        "micro_batch is 3: its 21 tokens (3 x seq_len 7) must divide over tp, 4, under a sequence split; the nearest \
         that does is 4",
    ] {
        assert!(text.contains(part), "{part}\nin {text}");
    }
    // Two key heads over four ranks: four of them, or two ranks.
    let config = GptConfig { ffn_dim: 12, ..tiny_llama() };
    let text = refused(config.clone(), "tp=4", shards(1, Sequence::Whole, 1));
    assert!(text.contains("1 rules") && text.contains("kv_heads is 2: it must be a multiple of tp, 4; the nearest that would do is 4, the nearest tp that divides all sizes is 2"), "{text}");
    // With the model's own rules.
    let text = refused(GptConfig { heads: 5, ffn_dim: 11, ..tiny() }, "tp=2", shards(1, Sequence::Whole, 1));
    assert!(text.contains("heads is 5: it must divide dim, 6") && text.contains("heads is 5: it must be a multiple"));
    assert!(text.contains("ffn_dim is 11") && text.contains("3 rules"), "{text}");
    // No padding allowed: 5 rows of the table, 7 positions; 24 and 16 divide.
    let text = refused(gpt2(), "tp=2,gtp=2", shards(0, Sequence::Whole, 1));
    for part in [
        "2 rules",
        "alignment is 0: weights of 5 rows do not divide over gtp, 2; the nearest is 1 (pads to 6)",
        "weights of 7 rows",
    ] {
        assert!(text.contains(part), "{part}\nin {text}");
    }
    // Those and the others in one answer.
    let text = refused(GptConfig { ffn_dim: 11, ..gpt2() }, "tp=2,gtp=2", shards(0, Sequence::Whole, 1));
    assert!(text.contains("ffn_dim is 11") && text.contains("weights of 7 rows"), "{text}");
}

#[test]
fn what_is_proposed_is_accepted() {
    let base = GptConfig { dim: 24, heads: 6, ffn_dim: 18, ..tiny() };
    let on = |config, text: &str, batch| GptPlan::on(config, &layout(text), shards(1, Sequence::Split, batch));
    assert!(on(base.clone(), "tp=4", 3).is_err());
    on(GptConfig { heads: 4, ffn_dim: 16, ..base.clone() }, "tp=4", 4).unwrap();
    on(base, "tp=3", 3).unwrap();
}

#[test]
fn gradients_to_be_completed_are_named() {
    let on = |config, text: &str, sequence| GptPlan::on(config, &layout(text), shards(1, sequence, 2)).unwrap();
    let none: [&str; 0] = [];
    for text in ["tp=2", "gtp=2", "dp=2"] {
        assert_eq!(on(gpt2(), text, Sequence::Whole).partial_over_tp(), none, "{text}");
    }
    let norms = |layers: &[&str]| layers.iter().flat_map(|l| [format!("{l}.weight"), format!("{l}.bias")]).collect();
    let all: Vec<String> = norms(&["h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"]);
    let split = on(gpt2(), "tp=2,gtp=2", Sequence::Split);
    assert_eq!(split.partial_over_tp(), all);
    // One dimension: norms, and the biases of products.
    let vectors = split.params().iter().filter(|p| p.spec.placement.global.len() == 1);
    assert_eq!(split.whole_over_gtp(), vectors.map(|p| p.spec.name.clone()).collect::<Vec<_>>());
    assert_eq!(on(gpt2(), "tp=2", Sequence::Split).whole_over_gtp(), none);
    let llama = on(GptConfig { layers: 1, ffn_dim: 12, ..tiny_llama() }, "tp=2", Sequence::Split).partial_over_tp();
    let names = ["model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"];
    assert_eq!(llama, names.map(|name| format!("{name}.weight")));
}

#[test]
fn weights_over_another_group_than_the_plans_are_refused() {
    let config = GptConfig {
        arch: Arch::Llama(LlamaConfig { kv_heads: 4, rope_base: 50 }),
        ffn_dim: 12,
        output: Output::Own,
        ..tiny_llama()
    };
    let values = values(&GptPlan::new(config.clone()).unwrap(), 1);
    let recompute = model::RecomputeLayers::None;
    let work = Work { config, values: &values, sequence: Sequence::Split, len: 7, recompute };
    let machine = device::Machine::dry();
    let rank = Rank::alone(&machine, GlobalRank(0), 2).unwrap();
    let plan = GroupsPlan::new(&flat(2), &tensor_groups(&[&[0, 1]]), GlobalRank(0)).unwrap();
    let groups = ProcessGroups::planned(&rank, plan).unwrap();
    let group = groups.get(&Key::named("tensor").unwrap(), "the test").unwrap();
    let part = work.part(&rank, Some(group)).unwrap();
    let tokens = part.ids(&[1; 14], 7);
    let refused = |mut weights: Whole<'_>| {
        let mut f = device::Frame::recording(&part.stream, "frame");
        part.gpt.forward_block(&mut f, &mut weights, 0, 0, &tokens).unwrap_err()
    };
    let whole = || Whole::new(Turn::eager(Pass::Forward));
    let error = refused(whole());
    assert!(matches!(error, ModelError::TensorSize { planned: 2, given: 1 }), "{error}");
    let error = refused(whole().over(&TensorParallel::new(group.clone(), Sequence::Whole)));
    assert!(error.to_string().contains("planned with the sequence Split"), "{error}");
    // The right ones, and then activations of the wrong sizes.
    let tensor = TensorParallel::new(group.clone(), Sequence::Split);
    let mut f = device::Frame::recording(&part.stream, "frame");
    let x = part.gpt.forward_block(&mut f, &mut whole().over(&tensor), 0, 0, &tokens).unwrap();
    assert_eq!(x.shape(), [7, 16]);
    let rows = x.rows(0..6).unwrap();
    let error = part.gpt.forward_block(&mut f, &mut whole().over(&tensor), 1, 0, &rows).unwrap_err().to_string();
    assert!(error.contains("[6, 16]; under a sequence split over 2 ranks it must be [7, 16]"), "{error}");
    // Twenty-one tokens over two ranks.
    let odd = part.ids(&[1; 21], 7);
    let error = part.gpt.forward_block(&mut f, &mut whole().over(&tensor), 0, 0, &odd).unwrap_err().to_string();
    assert!(error.contains("21 rows do not divide over its 2 members"), "{error}");
}
