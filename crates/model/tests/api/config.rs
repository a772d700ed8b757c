//! Sizes, declared parameters and operations per token.

use device::{Frame, Machine, TraceEvent};
use model::{Arch, Decay, GptConfig, GptPlan, LlamaConfig, Output};
use pgroups::Init;

use crate::rig::{Layout, Rig, cut, cut_llama, ids, tiny, tiny_llama};

fn gpt2() -> GptConfig {
    let (arch, output) = (Arch::Gpt2, Output::Tied);
    GptConfig {
        arch,
        layers: 12,
        dim: 768,
        heads: 12,
        ffn_dim: 3072,
        vocab: 50257,
        vocab_rows: 50257,
        seq_len: 1024,
        output,
    }
}

#[test]
fn every_broken_rule_is_told_at_once() {
    let config = GptConfig { layers: 0, heads: 4, vocab_rows: 8, ..tiny() };
    let text = GptPlan::new(config).unwrap_err().to_string();
    for part in [
        "3 rules",
        "layers is 0",
        "heads is 4: it must divide dim, 6; the nearest that does is 3",
        "vocab_rows is 8: it must be at least vocab, 9",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let config = GptConfig { vocab: 1 << 31, vocab_rows: 1 << 31, ..tiny() };
    assert!(GptPlan::new(config).unwrap_err().to_string().contains("at most 2147483647"));
}

#[test]
fn llamas_own_rules_are_told_with_the_others() {
    let refusal = |config| GptPlan::new(config).unwrap_err().to_string();
    let llama = |kv_heads, rope_base| Arch::Llama(LlamaConfig { kv_heads, rope_base });
    let text = refusal(GptConfig { arch: llama(3, 0), layers: 0, ..tiny_llama() });
    for part in ["3 rules", "rope_base is 0", "kv_heads is 3: it must divide heads, 4; the nearest that does is 2"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(refusal(GptConfig { arch: llama(0, 1), ..tiny_llama() }).contains("kv_heads is 0: it must be at least 1"));
    let text = refusal(GptConfig { dim: 12, ..tiny_llama() });
    assert!(text.contains("heads of 3 columns cannot be turned in pairs; the nearest that can be is 3"), "{text}");
    // GPT-2 turns nothing.
    GptPlan::new(GptConfig { arch: Arch::Gpt2, dim: 12, ..tiny_llama() }).unwrap();
}

#[test]
fn released_llamas_have_their_published_number_of_parameters() {
    let (ffn_dim, output) = (LlamaConfig::usual_ffn_dim(4096), Output::Own);
    let arch = |kv_heads, rope_base| Arch::Llama(LlamaConfig { kv_heads, rope_base });
    let (layers, dim, heads, vocab) = (32, 4096, 32, 32_000);
    let arch_7b = arch(32, 10_000);
    let llama_2_7b =
        GptConfig { arch: arch_7b, layers, dim, heads, ffn_dim, vocab, vocab_rows: vocab, seq_len: 4096, output };
    assert_eq!(GptPlan::new(llama_2_7b.clone()).unwrap().numel(), 6_738_415_616);
    let (ffn_dim, vocab) = (14_336, 128_256);
    let llama_3_8b = GptConfig { arch: arch(8, 500_000), ffn_dim, vocab, vocab_rows: vocab, ..llama_2_7b };
    assert_eq!(GptPlan::new(llama_3_8b).unwrap().numel(), 8_030_261_248);
}

#[test]
fn the_smallest_gpt2_has_its_published_number_of_parameters() {
    assert_eq!(GptPlan::new(gpt2()).unwrap().numel(), 124_439_808);
    let own = GptConfig { output: Output::Own, ..gpt2() };
    assert_eq!(GptPlan::new(own).unwrap().numel(), 124_439_808 + 50257 * 768);
}

#[test]
fn parameters_come_in_forward_order_under_their_usual_names() {
    let plan = GptPlan::new(tiny()).unwrap();
    let names: Vec<&str> = plan.params().iter().map(|p| p.spec.name.as_str()).collect();
    let block = [
        "ln_1.weight",
        "ln_1.bias",
        "attn.c_attn.weight",
        "attn.c_attn.bias",
        "attn.c_proj.weight",
        "attn.c_proj.bias",
        "ln_2.weight",
        "ln_2.bias",
        "mlp.c_fc.weight",
        "mlp.c_fc.bias",
        "mlp.c_proj.weight",
        "mlp.c_proj.bias",
    ];
    let blocks = (0..2).flat_map(|l| block.map(|part| format!("h.{l}.{part}")));
    let want: Vec<String> = ["wte", "wpe"]
        .map(String::from)
        .into_iter()
        .chain(blocks)
        .chain(["ln_f.weight", "ln_f.bias"].map(String::from))
        .collect();
    assert_eq!(names, want);
}

#[test]
fn llamas_parameters_have_the_names_and_sizes_that_its_users_know() {
    let plan = GptPlan::new(tiny_llama()).unwrap();
    let have: Vec<(&str, &[usize])> =
        plan.params().iter().map(|p| (p.spec.name.as_str(), &p.spec.placement.global[..])).collect();
    let block: [(&str, &[usize]); 9] = [
        ("input_layernorm", &[16]),
        ("self_attn.q_proj", &[16, 16]),
        ("self_attn.k_proj", &[8, 16]),
        ("self_attn.v_proj", &[8, 16]),
        ("self_attn.o_proj", &[16, 16]),
        ("post_attention_layernorm", &[16]),
        ("mlp.gate_proj", &[11, 16]),
        ("mlp.up_proj", &[11, 16]),
        ("mlp.down_proj", &[16, 11]),
    ];
    let mut want: Vec<(String, &[usize])> = vec![("model.embed_tokens.weight".into(), &[9, 16])];
    want.extend((0..2).flat_map(|l| block.map(|(part, shape)| (format!("model.layers.{l}.{part}.weight"), shape))));
    want.extend([("model.norm.weight".into(), &[16][..]), ("lm_head.weight".into(), &[9, 16])]);
    assert_eq!(have, want.iter().map(|(name, shape)| (name.as_str(), *shape)).collect::<Vec<_>>());
}

#[test]
fn residual_projections_start_smaller_and_norms_start_as_identity() {
    let llama = GptConfig { layers: 12, ..tiny_llama() };
    let params = [gpt2(), llama].map(|config| GptPlan::new(config).unwrap().params().to_vec()).concat();
    for p in &params {
        let name = &p.spec.name;
        let want = if ["c_proj.weight", "o_proj.weight", "down_proj.weight"].iter().any(|end| name.ends_with(end)) {
            Init::Normal { std: 0.02 / 24f32.sqrt() }
        } else if name.ends_with(".bias") {
            Init::Constant(0.0)
        } else if name.contains("ln_") || name.contains("norm") {
            Init::Constant(1.0)
        } else {
            Init::Normal { std: 0.02 }
        };
        assert_eq!(p.spec.init, want, "{name}");
    }
}

#[test]
fn weight_decay_reaches_matrices_only() {
    for (config, matrices) in [(tiny(), 2 + 2 * 4), (tiny_llama(), 2 + 2 * 7)] {
        let plan = GptPlan::new(config).unwrap();
        for p in plan.params() {
            let matrix = p.spec.placement.global.len() == 2;
            assert_eq!(p.decay == Decay::Applied, matrix, "{}", p.spec.name);
        }
        assert_eq!(plan.params().iter().filter(|p| p.decay == Decay::Applied).count(), matrices);
    }
}

#[test]
fn parameters_declare_the_sizes_that_the_blocks_use() {
    // A dry pass checks every product's sizes.
    for config in [GptConfig { output: Output::Own, ..cut() }, cut_llama()] {
        let rig = Rig::new(&Machine::dry(), config, None);
        let (tokens, targets) = (rig.ids("tokens", &ids(258, 257, 1), 129), rig.ids("targets", &ids(258, 257, 2), 129));
        let mut f = Frame::recording(&rig.stream, "frame");
        rig.run(&mut f, Layout::Main, [&tokens, &targets], 1.0).unwrap();
    }
}

#[test]
fn operations_per_token_are_those_of_the_kernels_without_what_is_computed_twice() {
    [cut(), cut_llama()].into_iter().for_each(operations_are_those_of_the_kernels);
}

fn operations_are_those_of_the_kernels(config: GptConfig) {
    let machine = Machine::dry();
    let (tokens, len) = (2 * config.seq_len as u64, config.seq_len as u64);
    let rig = Rig::new(&machine, config.clone(), None);
    let [ids, targets] = ["tokens", "targets"].map(|label| rig.ids(label, &ids(258, 257, 1), config.seq_len));
    let mut f = Frame::recording(&rig.stream, "frame");
    machine.trace_start();
    rig.run(&mut f, Layout::Main, [&ids, &targets], 1.0).unwrap();
    let trace = machine.trace_stop();
    let (mut products, mut attention) = (0, 0);
    for event in &trace.events {
        match event {
            TraceEvent::Op { name, accesses, .. } if name == "gemm" => {
                // Elements are m·k, k·n and m·n: their product is the square of m·n·k.
                let numel = |i: usize| (accesses[i].region.rows * accesses[i].region.row_bytes / 4) as f64;
                products += 2 * (numel(0) * numel(1) * numel(2)).sqrt().round() as u64;
            }
            TraceEvent::Op { name, flops, .. } if name == "attention" => attention += flops,
            _ => {}
        }
    }
    // A position attends to (len + 1) / 2 others on average, the usual formula says len / 2. Backward is twice forward
    // where probabilities are not computed again.
    let counted = (products + 3 * attention * len / (len + 1)) as f64 / tokens as f64;
    // Rows that pad the vocabulary are multiplied with, which is no useful work.
    let padding = 6.0 * ((config.vocab_rows - config.vocab) * config.dim) as f64;
    assert_eq!(rig.plan.flops_per_token() + padding, counted);
}
