//! Against files that PyTorch computed; `scripts/parity.py` says how.

use std::collections::BTreeMap;

use device::DType;
use model::RecomputeLayers;
use serde_json::Value;

use crate::{
    golden_case::GoldenCase,
    machines::machines,
    rig::{Case, Layout},
};

fn golden(name: &str) -> Value {
    let text = match name {
        "gpt2_initial" => include_str!("../golden/gpt2_initial.json"),
        "gpt2_spread" => include_str!("../golden/gpt2_spread.json"),
        "llama_initial" => include_str!("../golden/llama_initial.json"),
        "llama_spread" => include_str!("../golden/llama_spread.json"),
        "gpt2_bf16" => include_str!("../golden/gpt2_bf16.json"),
        "llama_bf16" => include_str!("../golden/llama_bf16.json"),
        other => panic!("no golden file is named {other}"),
    };
    serde_json::from_str(text).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

/// Of each gradient: the largest element, and some elements by index.
type Gradients = BTreeMap<String, (f64, Vec<(usize, f64)>)>;

fn gradients(file: &Value) -> Gradients {
    let entry = |entry: &Value| {
        let indices = entry["at"].as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as usize);
        let values = entry["values"].as_array().unwrap().iter().map(number);
        (number(&entry["max"]), indices.zip(values).collect())
    };
    file["gradients"].as_object().unwrap().iter().map(|(name, e)| (name.clone(), entry(e))).collect()
}

#[test]
fn loss_and_gradients_are_those_of_pytorch() {
    let machines = machines();
    let cases = || GoldenCase::all().into_iter().filter(|case| case.dtype == DType::F32);
    for (machine, case) in machines.iter().flat_map(|machine| cases().map(move |case| (machine, case))) {
        let (file, name) = (golden(case.name), format!("{} on {}", case.name, machine.driver()));
        let config = case.plan.config().clone();
        let model: Value = serde_json::from_str(&case.plan.export_config()).unwrap();
        assert_eq!(file["model"], model, "the golden file is of another model");
        let (microbatches, recompute) = ([(case.tokens, case.targets)], RecomputeLayers::None);
        let (losses, got) =
            Case { config, values: &case.values, microbatches: &microbatches, len: case.len, recompute }
                .run(machine, Layout::Main);
        let (loss, want) = (number(&file["loss"]), gradients(&file));
        assert!((f64::from(losses[0]) - loss).abs() <= 2e-6 * loss, "{name}: loss {} of {loss}", losses[0]);
        assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
        let floor = 2e-7 * want.values().map(|(max, _)| *max).fold(0.0, f64::max);
        for (param, (max, elements)) in &want {
            let bound = (2e-6 * max).max(floor);
            assert!(elements.len() >= got[param].len().min(12), "{name}: too few elements of {param}");
            for (i, want) in elements {
                let off = (f64::from(got[param][*i]) - want).abs();
                assert!(off <= bound, "{name}: {param}[{i}] is off by {off:e}, the bound is {bound:e}");
            }
        }
    }
}

/// Root of the mean square.
fn rms(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    (values.map(|x| x * x).sum::<f64>() / count).sqrt()
}

#[test]
fn loss_and_gradients_in_bf16_are_as_near_to_f64_as_those_of_pytorch_in_bf16() {
    let machines = machines();
    let cases = || GoldenCase::all().into_iter().filter(|case| case.dtype == DType::Bf16);
    for (machine, case) in machines.iter().flat_map(|machine| cases().map(move |case| (machine, case))) {
        let (file, name) = (golden(case.name), format!("{} on {}", case.name, machine.driver()));
        let config = case.plan.config().clone();
        let (microbatches, recompute) = ([(case.tokens, case.targets)], RecomputeLayers::None);
        let run = Case { config, values: &case.values, microbatches: &microbatches, len: case.len, recompute };
        let (losses, got) = run.run_storing(case.dtype, machine, Layout::Main, None);
        // Half a step of bf16, 2⁻⁹ of a token's loss, in the mean over 51 tokens: 2⁻¹², and room for four of them.
        let (loss, bound) = (number(&file["loss"]), 1.0 / 1024.0);
        assert!((f64::from(losses[0]) - loss).abs() <= bound * loss, "{name}: loss {} of {loss}", losses[0]);
        let want = gradients(&file);
        assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
        let mut ratios = Vec::new();
        for (param, (_, elements)) in &want {
            let off = rms(elements.iter().map(|(i, want)| f64::from(got[param][*i]) - want));
            let theirs = number(&file["gradients"][param]["bf16"]);
            // Both are chance, of few elements.
            assert!(off <= 2.0 * theirs, "{name}: {param} is off by {off:e}, PyTorch by {theirs:e}");
            ratios.push(off / theirs);
        }
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        assert!(mean <= 1.0, "{name}: {mean} times as far off as PyTorch");
    }
}
