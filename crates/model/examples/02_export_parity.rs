//! Writes small models as `transformers` would (`config.json`, `model.safetensors`), each with `case.safetensors`:
//! tokens, and the loss and gradients that we compute. `scripts/parity.py` compares them with PyTorch.
//!
//!     cargo run -p model --example 02_export_parity -- EXPORTS

use std::{error::Error, fs, path::Path};

use device::Machine;
use model::RecomputeLayers;
use pgroups::{Pass, Turn, Whole};
use safetensors::{Dtype, tensor::TensorView};

#[path = "../tests/api/golden_case.rs"]
mod golden_case;
#[path = "../tests/api/rig.rs"]
#[allow(dead_code)]
mod rig;
/// What `rig` needs.
mod reference {
    pub(crate) type Values = std::collections::BTreeMap<String, Vec<f64>>;
}

use golden_case::GoldenCase;
use rig::{Case, Layout, Results, Rig};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1);
    for case in GoldenCase::all() {
        let config = case.plan.config().clone();
        let (microbatches, recompute) = ([(case.tokens.clone(), case.targets.clone())], RecomputeLayers::None);
        let run = Case { config, values: &case.values, microbatches: &microbatches, len: case.len, recompute };
        let results = run.run_storing(case.dtype, &Machine::cpu(2)?, Layout::Main, None);
        println!("{}: {} parameters, loss {}", case.name, case.plan.numel(), results.0[0]);
        if let Some(folder) = &folder {
            write(&Path::new(folder).join(case.name), &case, &results)?;
        }
    }
    Ok(())
}

fn write(folder: &Path, case: &GoldenCase, results: &Results) -> Result<(), Box<dyn Error>> {
    let (machine, config) = (Machine::cpu(1)?, case.plan.config().clone());
    let rig = Rig::storing(case.dtype, &machine, config, Some(&case.values), &RecomputeLayers::None);
    let mut weights = Whole::new(Turn::eager(Pass::Forward));
    let model = case.plan.export_weights(&rig.params, &mut weights, &rig.stream)?;
    fs::create_dir_all(folder)?;
    fs::write(folder.join("config.json"), case.plan.export_config())?;
    fs::write(folder.join("model.safetensors"), model)?;
    fs::write(folder.join("case.safetensors"), case_file(case, results)?)?;
    println!("wrote {}", folder.display());
    Ok(())
}

fn case_file(case: &GoldenCase, (losses, gradients): &Results) -> Result<Vec<u8>, Box<dyn Error>> {
    let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let ids = |values: &[i32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let batch = vec![case.tokens.len() / case.len, case.len];
    let mut tensors = vec![
        ("tokens".to_owned(), Dtype::I32, batch.clone(), ids(&case.tokens)),
        ("targets".to_owned(), Dtype::I32, batch, ids(&case.targets)),
        ("loss".to_owned(), Dtype::F32, vec![1], floats(losses)),
    ];
    for p in case.plan.params() {
        let (name, shape) = (&p.spec.name, p.spec.placement.global.clone());
        tensors.push((format!("grad.{name}"), Dtype::F32, shape, floats(&gradients[name])));
    }
    let view = |(name, dtype, shape, bytes)| Ok((name, TensorView::new(dtype, shape, bytes)?));
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| view((name, *dtype, shape.clone(), &bytes[..])));
    Ok(safetensors::serialize(views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?, None)?)
}
