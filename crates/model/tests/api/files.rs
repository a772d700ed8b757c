//! Weights as files.

use std::collections::BTreeMap;

use device::{DType, Machine, MemoryKind, Stream, View};
use model::{Arch, GptConfig, GptPlan, LlamaConfig, ModelError, Output};
use pgroups::{GradOut, Param, Pass, PgError, Turn, Weights, Whole};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::rig::{Rig, tiny, tiny_llama, values};

/// Both architectures, both kinds of output, with padded tables.
fn configs() -> [GptConfig; 4] {
    let padded = |config, output| GptConfig { vocab_rows: 12, output, ..config };
    [
        padded(tiny(), Output::Tied),
        padded(tiny(), Output::Own),
        padded(tiny_llama(), Output::Tied),
        padded(tiny_llama(), Output::Own),
    ]
}

fn rig(config: GptConfig, values: &BTreeMap<String, Vec<f32>>) -> Rig {
    Rig::new(&Machine::cpu(1).unwrap(), config, Some(values))
}

fn export(rig: &Rig) -> Vec<u8> {
    rig.plan.export_weights(&rig.params, &mut Whole::new(Turn::eager(Pass::Forward)), &rig.stream).unwrap()
}

/// Changes the tensors of a file: name, type, sizes, bytes.
fn edited(file: &[u8], edit: impl Fn(&mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>)) -> Vec<u8> {
    let tensors = SafeTensors::deserialize(file).unwrap();
    let mut owned: BTreeMap<_, _> =
        tensors.iter().map(|(name, t)| (name.to_owned(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()))).collect();
    edit(&mut owned);
    let views =
        owned.iter().map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

#[test]
fn what_was_exported_comes_back_with_every_bit_of_the_vocabulary() {
    for config in configs() {
        let plan = GptPlan::new(config.clone()).unwrap();
        let values = values(&plan, 31);
        let file = export(&rig(config.clone(), &values));
        for (p, got) in plan.params().iter().zip(plan.import_weights(&file).unwrap()) {
            let mut want = values[&p.spec.name].clone();
            if p.spec.placement.global[0] == 12 {
                want[config.vocab * config.dim..].fill(0.0);
            }
            assert_eq!(got, want, "{}", p.spec.name);
        }
        assert_eq!(file, export(&rig(config, &values)), "equal weights, equal bytes");
    }
}

#[test]
fn files_have_the_names_and_the_layout_of_the_transformers_library() {
    let plan = GptPlan::new(tiny()).unwrap();
    let values = values(&plan, 31);
    let file = export(&rig(tiny(), &values));
    let tensors = SafeTensors::deserialize(&file).unwrap();
    assert_eq!(tensors.len(), plan.params().len());
    let qkv = tensors.tensor("transformer.h.1.attn.c_attn.weight").unwrap();
    assert_eq!((qkv.dtype(), qkv.shape()), (Dtype::F32, &[6, 18][..]));
    // Input 2, output 7.
    let want = values["h.1.attn.c_attn.weight"][7 * 6 + 2];
    assert_eq!(qkv.data()[4 * (2 * 18 + 7)..][..4], want.to_le_bytes());
    for (name, shape) in [("transformer.wte.weight", [9, 6]), ("transformer.wpe.weight", [7, 6])] {
        assert_eq!(tensors.tensor(name).unwrap().shape(), shape);
    }
    let (_, metadata) = SafeTensors::read_metadata(&file).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");

    let plan = GptPlan::new(tiny_llama()).unwrap();
    let file = export(&rig(tiny_llama(), &crate::rig::values(&plan, 31)));
    let mut names: Vec<String> =
        SafeTensors::deserialize(&file).unwrap().names().into_iter().map(String::from).collect();
    let mut want: Vec<String> = plan.params().iter().map(|p| p.spec.name.clone()).collect();
    names.sort();
    want.sort();
    assert_eq!(names, want);
}

#[test]
fn the_configuration_beside_a_file_is_json_with_every_size() {
    let json =
        |config| -> serde_json::Value { serde_json::from_str(&GptPlan::new(config).unwrap().export_config()).unwrap() };
    let gpt2 = json(tiny());
    let want = [("n_layer", 2), ("n_embd", 6), ("n_head", 2), ("n_inner", 10), ("n_positions", 7), ("vocab_size", 9)];
    assert!(want.iter().all(|(key, n)| gpt2[key] == *n), "{gpt2}");
    assert_eq!((&gpt2["model_type"], &gpt2["tie_word_embeddings"]), (&"gpt2".into(), &true.into()));
    let arch = Arch::Llama(LlamaConfig { kv_heads: 1, rope_base: 500_000 });
    let llama = json(GptConfig { arch, vocab_rows: 12, ..tiny_llama() });
    assert_eq!((&llama["num_key_value_heads"], &llama["rope_theta"]), (&1.into(), &500_000.0.into()));
    assert_eq!((&llama["vocab_size"], &llama["rms_norm_eps"]), (&9.into(), &1e-5.into()));
    assert_eq!(llama["tie_word_embeddings"], false);
}

#[test]
fn published_files_are_read_without_prefix_with_buffers_with_padding_and_as_bf16() {
    let plan = GptPlan::new(GptConfig { vocab_rows: 12, ..tiny() }).unwrap();
    let values = values(&plan, 31);
    let file = export(&rig(plan.config().clone(), &values));
    let whole = plan.import_weights(&file).unwrap();
    let bare = edited(&file, |tensors| {
        *tensors = std::mem::take(tensors)
            .into_iter()
            .map(|(name, t)| (name.trim_start_matches("transformer.").to_owned(), t))
            .collect();
        tensors.insert("h.0.attn.bias".into(), (Dtype::U8, vec![1, 1, 2, 2], vec![1; 4]));
    });
    assert_eq!(plan.import_weights(&bare).unwrap(), whole);

    let padded = edited(&file, |tensors| {
        let (_, shape, data) = tensors.get_mut("transformer.wte.weight").unwrap();
        shape[0] = 12;
        data.extend((0..18).flat_map(|_| 2.5f32.to_le_bytes()));
    });
    let wte = plan.import_weights(&padded).unwrap().swap_remove(0);
    assert_eq!((&wte[..54], &wte[54..]), (&whole[0][..54], &[2.5; 18][..]));

    let half = edited(&file, |tensors| {
        for (dtype, _, data) in tensors.values_mut() {
            (*dtype, *data) = (Dtype::BF16, data.chunks(4).flat_map(|b| [b[2], b[3]]).collect());
        }
    });
    let cut = |v: &f32| f32::from_bits(v.to_bits() & 0xFFFF_0000);
    let want: Vec<Vec<f32>> = whole.iter().map(|values| values.iter().map(cut).collect()).collect();
    assert_eq!(plan.import_weights(&half).unwrap(), want);
}

#[test]
fn files_that_do_not_fit_are_refused_by_tensor() {
    let config = tiny_llama();
    let plan = GptPlan::new(config.clone()).unwrap();
    let file = export(&rig(config.clone(), &values(&plan, 31)));
    let refusal = |config: GptConfig, file: &[u8]| GptPlan::new(config).unwrap().import_weights(file).unwrap_err();
    let error = refusal(GptConfig { layers: 3, ..config.clone() }, &file);
    assert!(matches!(&error, ModelError::FileMissing { tensor } if tensor == "model.layers.2.input_layernorm.weight"));
    let error = refusal(GptConfig { layers: 1, ..config.clone() }, &file).to_string();
    assert!(error.contains("no place for the file's tensor 'model.layers.1."), "{error}");
    let error = refusal(GptConfig { output: Output::Tied, ..config.clone() }, &file).to_string();
    assert!(error.contains("'lm_head.weight'"), "{error}");
    let error = refusal(GptConfig { ffn_dim: 12, ..config.clone() }, &file).to_string();
    assert!(
        error.contains("mlp.gate_proj.weight' has sizes [11, 16] in the file, the model needs [12, 16]"),
        "{error}"
    );
    let other = edited(&file, |tensors| tensors.get_mut("model.norm.weight").unwrap().0 = Dtype::I32);
    let error = refusal(config.clone(), &other).to_string();
    assert!(error.contains("'model.norm.weight' is I32"), "{error}");
    let error = refusal(config, &file[..file.len() - 1]);
    assert!(matches!(error, ModelError::File(_)) && std::error::Error::source(&error).is_some(), "{error}");
}

/// Hands out the first rows of matrices.
struct Shards<'a>(Whole<'a>);

impl Weights for Shards<'_> {
    fn take(&mut self, p: &Param, on: &Stream) -> Result<View, PgError> {
        let whole = self.0.take(p, on)?;
        Ok(whole.rows(0..1)?)
    }

    fn give_back(&mut self, p: &Param, on: &Stream) -> Result<(), PgError> {
        self.0.give_back(p, on)
    }

    fn grad(&mut self, p: &Param, on: &Stream) -> Result<GradOut, PgError> {
        self.0.grad(p, on)
    }

    fn grad_done(&mut self, p: &Param, on: &Stream) -> Result<(), PgError> {
        self.0.grad_done(p, on)
    }

    fn enter(&mut self, pass: Pass) -> Pass {
        self.0.enter(pass)
    }
}

#[test]
fn an_export_of_parts_or_of_another_models_parameters_is_refused() {
    let plan = GptPlan::new(tiny()).unwrap();
    let rig = rig(tiny(), &values(&plan, 31));
    let mut shards = Shards(Whole::new(Turn::eager(Pass::Forward)));
    let error = plan.export_weights(&rig.params, &mut shards, &rig.stream).unwrap_err().to_string();
    assert!(error.contains("'wte' is [1, 6] here and [9, 6] whole"), "{error}");
    let mut whole = Whole::new(Turn::eager(Pass::Forward));
    let error = plan.export_weights(&rig.params[1..], &mut whole, &rig.stream).unwrap_err();
    assert!(matches!(error, ModelError::ParamCount { declared: 28, given: 27 }), "{error}");
}

#[test]
fn a_model_that_was_read_gives_the_logits_of_the_one_that_was_written() {
    for config in configs() {
        let plan = GptPlan::new(config.clone()).unwrap();
        let written = rig(config.clone(), &values(&plan, 31));
        let read = plan.import_weights(&export(&written)).unwrap();
        let read = plan.params().iter().map(|p| p.spec.name.clone()).zip(read).collect();
        let logits = |rig: &Rig| {
            let tokens = rig.device.alloc("tokens", &[1, 5], DType::I32, MemoryKind::Other).unwrap();
            rig.stream.upload(&tokens, vec![3, 1, 4, 1, 5]).unwrap();
            let mut f = device::Frame::unplanned(&rig.stream, "frame");
            let mut w = Whole::new(Turn::eager(Pass::Forward));
            rig.read(&rig.gpt.logits(&mut f, &mut w, &tokens, 4).unwrap())
        };
        assert_eq!(logits(&written), logits(&rig(config, &read)));
    }
}
