//! Values and gradients against a plain f64 model and its finite differences.

use std::collections::BTreeMap;

use model::{Arch, GptConfig, GptPlan, LlamaConfig, Output, RecomputeLayers};

use crate::{
    machines::machines,
    reference::{Reference, Values, differences},
    rig::{Case, Layout, Results, exact, ids, tiny, tiny_llama, values},
};

/// max|a − b| ≤ 2e-6 · max|b| per tensor, with a floor of 2e-7 of the model's largest gradient.
fn assert_gradients(got: &BTreeMap<String, Vec<f32>>, want: &Values, what: &str) {
    let largest = |v: &[f64]| v.iter().fold(0.0f64, |m, g| m.max(g.abs()));
    let floor = 2e-7 * want.values().map(|v| largest(v)).fold(0.0, f64::max);
    assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
    for (name, want) in want {
        let off: Vec<f64> = got[name].iter().zip(want).map(|(a, b)| f64::from(*a) - b).collect();
        assert!(got[name].iter().all(|v| v.is_finite()), "{what}: {name} is not finite");
        let bound = (2e-6 * largest(want)).max(floor);
        assert!(largest(&off) <= bound, "{what}: {name} is off by {:e}, the bound is {bound:e}", largest(&off));
    }
}

fn assert_loss(got: f32, want: f64, what: &str) {
    assert!((f64::from(got) - want).abs() <= 2e-6 * want.abs(), "{what}: loss {got}, the reference says {want}");
}

/// A batch of `batch` sequences of `len`, with one target ignored.
fn batch(config: &GptConfig, batch: usize, len: usize, seed: u64) -> (Vec<i32>, Vec<i32>) {
    let mut targets = ids(batch * len, config.vocab, seed + 100);
    targets[len / 2] = device::ops::IGNORE;
    (ids(batch * len, config.vocab, seed), targets)
}

fn against_reference(config: GptConfig, sequences: usize, len: usize, layout: Layout) {
    let what = format!("{config:?}, {sequences} x {len}, {layout:?}");
    let values = values(&GptPlan::new(config.clone()).unwrap(), 5);
    let microbatches = [batch(&config, sequences, len, 1)];
    let case = Case {
        config: config.clone(),
        values: &values,
        microbatches: &microbatches,
        len,
        recompute: RecomputeLayers::None,
    };
    let ([(tokens, targets)], exact) = (&microbatches, exact(&values));
    let loss = Reference { config: &config, values: &exact }.loss(tokens, targets, len);
    let want = differences(&config, &exact, tokens, targets, len);
    for machine in machines() {
        let what = format!("{what} on {}", machine.driver());
        let (losses, gradients) = case.run(&machine, layout);
        assert_loss(losses[0], loss, &what);
        assert_gradients(&gradients, &want, &what);
    }
}

#[test]
fn every_gradient_agrees_with_finite_differences_of_an_f64_model() {
    against_reference(tiny(), 2, 7, Layout::Main);
}

#[test]
fn a_batch_of_short_sequences_and_a_padded_table_agree_too() {
    // Five of seven positions, eleven of nine rows.
    against_reference(GptConfig { vocab_rows: 11, ..tiny() }, 3, 5, Layout::Main);
}

#[test]
fn one_token_and_one_head_agree_too() {
    against_reference(GptConfig { layers: 1, dim: 5, heads: 1, ..tiny() }, 1, 1, Layout::Main);
}

#[test]
fn an_output_table_of_its_own_agrees_too() {
    against_reference(GptConfig { output: Output::Own, layers: 1, ..tiny() }, 2, 3, Layout::Main);
}

#[test]
fn llama_agrees_with_finite_differences_of_an_f64_model() {
    against_reference(tiny_llama(), 2, 7, Layout::Main);
}

#[test]
fn llama_with_one_key_head_a_tied_and_padded_table_and_short_sequences_agrees_too() {
    let arch = Arch::Llama(LlamaConfig { kv_heads: 1, rope_base: 10_000 });
    let (layers, output) = (1, Output::Tied);
    against_reference(GptConfig { arch, layers, heads: 2, output, vocab_rows: 11, ..tiny_llama() }, 3, 5, Layout::Main);
}

#[test]
fn llama_with_a_key_head_for_each_head_and_one_token_agrees_too() {
    let arch = Arch::Llama(LlamaConfig { kv_heads: 3, rope_base: 10_000 });
    against_reference(GptConfig { arch, layers: 1, dim: 6, heads: 3, ffn_dim: 1, ..tiny_llama() }, 1, 1, Layout::Main);
}

#[test]
fn gradients_agree_wherever_the_weights_put_them() {
    for layout in [Layout::Scratch, Layout::Mixed] {
        against_reference(GptConfig { vocab_rows: 11, layers: 1, ..tiny() }, 2, 5, layout);
        against_reference(GptConfig { vocab_rows: 11, layers: 1, ..tiny_llama() }, 2, 5, layout);
    }
}

#[test]
fn two_microbatches_accumulate_to_the_gradient_of_the_joint_batch() {
    for config in [tiny(), GptConfig { layers: 1, ..tiny_llama() }] {
        accumulates_to_the_joint_batch(GptConfig { vocab_rows: 10, ..config });
    }
}

fn accumulates_to_the_joint_batch(config: GptConfig) {
    let values = values(&GptPlan::new(config.clone()).unwrap(), 6);
    let exact = exact(&values);
    let (first, second) = (batch(&config, 2, 7, 3), batch(&config, 2, 7, 4));
    let joint = ([&first.0[..], &second.0].concat(), [&first.1[..], &second.1].concat());
    let want = differences(&config, &exact, &joint.0, &joint.1, 7);
    let (machines, layouts) = (machines(), [Layout::Main, Layout::Scratch, Layout::Mixed]);
    for (machine, layout) in machines.iter().flat_map(|machine| layouts.map(|layout| (machine, layout))) {
        let microbatches = [first.clone(), second.clone()];
        let case = Case {
            config: config.clone(),
            values: &values,
            microbatches: &microbatches,
            len: 7,
            recompute: RecomputeLayers::None,
        };
        let (losses, gradients): Results = case.run(machine, layout);
        let what = format!("{layout:?} on {}", machine.driver());
        for (loss, (tokens, targets)) in losses.iter().zip(&microbatches) {
            assert_loss(*loss, Reference { config: &config, values: &exact }.loss(tokens, targets, 7), &what);
        }
        assert_gradients(&gradients, &want, &what);
    }
}

#[test]
fn rows_past_the_vocabulary_have_no_gradient() {
    let own = GptConfig { layers: 1, vocab_rows: 13, ..tiny_llama() };
    for (config, tables) in [
        (GptConfig { vocab_rows: 13, ..tiny() }, &["wte"][..]),
        (own, &["model.embed_tokens.weight", "lm_head.weight"]),
    ] {
        rest_has_no_gradient(config, tables);
    }
}

fn rest_has_no_gradient(config: GptConfig, tables: &[&str]) {
    let values = values(&GptPlan::new(config.clone()).unwrap(), 8);
    let microbatches = [batch(&config, 2, 7, 3), batch(&config, 2, 7, 4)];
    let case = Case {
        config: config.clone(),
        values: &values,
        microbatches: &microbatches,
        len: 7,
        recompute: RecomputeLayers::None,
    };
    for (machine, table) in machines().iter().flat_map(|machine| tables.iter().map(move |table| (machine, table))) {
        let (_, gradients) = case.run(machine, Layout::Main);
        let (valid, rest) = gradients[*table].split_at(config.vocab * config.dim);
        assert!(rest.iter().all(|g| *g == 0.0), "{table}: {rest:?}");
        assert!(valid.chunks(config.dim).all(|row| row.iter().any(|g| *g != 0.0)), "{table}");
    }
}
