//! Writes two small models with tokens, loss and gradients as safetensors, for `scripts/parity_gpt2.py` to compare
//! with PyTorch.
//!
//!     cargo run -p model --example 02_export_parity -- EXPORTS

use std::{error::Error, fs, io::Write, path::Path};

use device::Machine;
use serde_json::{Map, Value, json};

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
use rig::{Case, Layout};

/// Name, element type, sizes, bytes.
type Tensor = (String, &'static str, Vec<usize>, Vec<u8>);

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1);
    for case in GoldenCase::all() {
        let config = case.plan.config().clone();
        let microbatches = [(case.tokens.clone(), case.targets.clone())];
        let run = Case { config, values: &case.values, microbatches: &microbatches, len: case.len };
        let (losses, gradients) = run.run(&Machine::cpu(2)?, Layout::Main);
        println!("{}: {} parameters, loss {}", case.name, case.plan.numel(), losses[0]);

        let Some(folder) = &folder else { continue };
        let mut tensors = Vec::new();
        for p in case.plan.params() {
            let (name, shape) = (&p.spec.name, p.spec.placement.global.clone());
            tensors.push((name.clone(), "F32", shape.clone(), bytes(&case.values[name])));
            tensors.push((format!("ours.grad.{name}"), "F32", shape, bytes(&gradients[name])));
        }
        tensors.push(("ours.loss".into(), "F32", vec![1], bytes(&losses)));
        let shape = vec![case.tokens.len() / case.len, case.len];
        for (name, ids) in [("tokens", &case.tokens), ("targets", &case.targets)] {
            tensors.push((name.into(), "I32", shape.clone(), ids.iter().flat_map(|id| id.to_le_bytes()).collect()));
        }
        fs::create_dir_all(folder)?;
        let path = Path::new(folder).join(format!("{}.safetensors", case.name));
        write(&path, &case, &tensors)?;
        println!("wrote {}", path.display());
    }
    Ok(())
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Length of the header, header, data.
fn write(path: &Path, case: &GoldenCase, tensors: &[Tensor]) -> Result<(), Box<dyn Error>> {
    let c = case.plan.config();
    let sizes = [
        ("layers", c.layers),
        ("dim", c.dim),
        ("heads", c.heads),
        ("ffn_dim", c.ffn_dim),
        ("vocab", c.vocab),
        ("vocab_rows", c.vocab_rows),
        ("seq_len", c.seq_len),
    ];
    let metadata: Map<String, Value> =
        sizes.iter().map(|(name, n)| ((*name).to_owned(), json!(n.to_string()))).collect();
    let mut header = Map::from_iter([("__metadata__".to_owned(), Value::Object(metadata))]);
    let mut at = 0;
    for (name, dtype, shape, data) in tensors {
        let end = at + data.len();
        header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, end] }));
        at = end;
    }
    let header = serde_json::to_vec(&header)?;
    let mut file = fs::File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    for (_, _, _, data) in tensors {
        file.write_all(data)?;
    }
    Ok(())
}
