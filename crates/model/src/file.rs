//! Weights as other programs read and write them: safetensors under the names of the `transformers` library.

use std::{borrow::Cow, collections::BTreeMap};

use device::{DType, Stream, bf16};
use pgroups::{Param, Weights};
use safetensors::{Dtype, SafeTensors, View, serialize, tensor::TensorView};

use crate::{Arch, GptConfig, GptPlan, ModelError, ModelParam, Output, config::EPS};

impl GptPlan {
    /// A safetensors file of all weights, in the types that they have, under the names and in the layout that
    /// `transformers` uses: matrices of GPT-2 transposed, tables without the rows past the vocabulary. Equal weights give
    /// equal bytes.
    ///
    /// `params` are those of [`GptPlan::build`]. Each is taken whole from `w`, one at a time, on `on`; the host waits
    /// for each. Where taking is collective, all ranks call.
    ///
    /// # Errors
    /// [`ModelError::ParamCount`], [`ModelError::ParamOrder`]; [`ModelError::NotWhole`] if `w` hands out parts; of the
    /// weights and the device.
    pub fn export_weights(&self, params: &[Param], w: &mut dyn Weights, on: &Stream) -> Result<Vec<u8>, ModelError> {
        self.check_params(params)?;
        let mut tensors = Vec::with_capacity(params.len());
        for (declared, param) in self.params().iter().zip(params) {
            let view = w.take(param, on)?;
            let need = &declared.spec.placement.global;
            if view.shape() != need {
                let (param, have) = (param.name().to_owned(), view.shape().to_vec());
                return Err(ModelError::NotWhole { param, have, need: need.clone() });
            }
            let values = match view.dtype() {
                DType::Bf16 => on.download::<bf16>(&view)?.wait()?.into_iter().map(bf16::to_f32).collect(),
                _ => on.download::<f32>(&view)?.wait()?,
            };
            w.give_back(param, on)?;
            let filed = Filed::of(self.config(), declared);
            tensors.push((filed.name.clone(), filed.write(&values, view.dtype())));
        }
        // What `transformers` asks for. One entry, since several would come in any order.
        let metadata = [("format".to_owned(), "pt".to_owned())].into_iter().collect();
        Ok(serialize(tensors, Some(metadata))?)
    }

    /// Values of all parameters from a safetensors file, f32 or bf16, in the order and layout of [`GptPlan::params`].
    /// Takes what [`GptPlan::export_weights`] and `transformers` write. Rows past the vocabulary are 0 where the file
    /// has none; buffers that are no weights (GPT-2's masks, rotary frequencies) are passed over.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::FileMissing`], [`ModelError::FileExtra`], [`ModelError::FileShape`],
    /// [`ModelError::FileType`].
    pub fn import_weights(&self, file: &[u8]) -> Result<Vec<Vec<f32>>, ModelError> {
        let file = SafeTensors::deserialize(file)?;
        let mut tensors: BTreeMap<&str, TensorView<'_>> = file.iter().map(|(name, t)| (bare(name), t)).collect();
        let read = |declared: &ModelParam| {
            let filed = Filed::of(self.config(), declared);
            let tensor = tensors.remove(bare(&filed.name));
            let tensor = tensor.ok_or_else(|| ModelError::FileMissing { tensor: filed.name.clone() })?;
            filed.read(&tensor, declared.numel())
        };
        let values = self.params().iter().map(read).collect::<Result<_, _>>()?;
        match tensors.keys().find(|name| !is_buffer(name)) {
            Some(name) => Err(ModelError::FileExtra { tensor: (*name).to_owned() }),
            None => Ok(values),
        }
    }

    /// The `config.json` that goes with [`GptPlan::export_weights`], for `transformers` to load both.
    pub fn export_config(&self) -> String {
        let c = self.config();
        let tied = c.output == Output::Tied;
        let text = |value: &str| format!("\"{value}\"");
        let number = |value: usize| value.to_string();
        let common = [("vocab_size", number(c.vocab)), ("tie_word_embeddings", tied.to_string())];
        let own: Vec<(&str, String)> = match c.arch {
            Arch::Gpt2 => vec![
                ("architectures", "[\"GPT2LMHeadModel\"]".into()),
                ("model_type", text("gpt2")),
                ("n_layer", number(c.layers)),
                ("n_embd", number(c.dim)),
                ("n_head", number(c.heads)),
                ("n_inner", number(c.ffn_dim)),
                ("n_positions", number(c.seq_len)),
                ("activation_function", text("gelu_new")),
                ("layer_norm_epsilon", EPS.to_string()),
                ("attn_pdrop", number(0)),
                ("embd_pdrop", number(0)),
                ("resid_pdrop", number(0)),
            ],
            Arch::Llama(llama) => vec![
                ("architectures", "[\"LlamaForCausalLM\"]".into()),
                ("model_type", text("llama")),
                ("num_hidden_layers", number(c.layers)),
                ("hidden_size", number(c.dim)),
                ("num_attention_heads", number(c.heads)),
                ("num_key_value_heads", number(llama.kv_heads)),
                ("intermediate_size", number(c.ffn_dim)),
                ("max_position_embeddings", number(c.seq_len)),
                ("hidden_act", text("silu")),
                ("rms_norm_eps", EPS.to_string()),
                ("rope_theta", format!("{}.0", llama.rope_base)),
            ],
        };
        let lines: Vec<String> =
            own.iter().chain(&common).map(|(key, value)| format!("  \"{key}\": {value}")).collect();
        format!("{{\n{}\n}}\n", lines.join(",\n"))
    }
}

/// How a parameter lies in a file.
struct Filed {
    name: String,
    shape: Vec<usize>,
    order: Order,
}

#[derive(PartialEq)]
enum Order {
    /// As here; rows past those of the file belong to no token.
    Same,
    /// `[in, out]`.
    Transposed,
}

impl Filed {
    fn of(config: &GptConfig, declared: &ModelParam) -> Filed {
        let (ours, global) = (declared.spec.name.as_str(), &declared.spec.placement.global);
        let mut shape = global.clone();
        if matches!(ours, "wte" | "model.embed_tokens.weight" | "lm_head.weight") {
            shape[0] = config.vocab;
        }
        let (name, order) = match (config.arch, ours) {
            (Arch::Llama(_), _) | (_, "lm_head.weight") => (ours.to_owned(), Order::Same),
            (Arch::Gpt2, "wte" | "wpe") => (format!("transformer.{ours}.weight"), Order::Same),
            (Arch::Gpt2, _) if shape.len() == 2 => {
                shape.reverse();
                (format!("transformer.{ours}"), Order::Transposed)
            }
            (Arch::Gpt2, _) => (format!("transformer.{ours}"), Order::Same),
        };
        Filed { name, shape, order }
    }

    fn write(self, values: &[f32], dtype: DType) -> Bytes {
        let numel = self.shape.iter().product();
        let values = match self.order {
            Order::Same => Cow::Borrowed(&values[..numel]),
            Order::Transposed => Cow::Owned(transposed(values, self.shape[0])),
        };
        let (dtype, bytes) = match dtype {
            DType::Bf16 => (Dtype::BF16, values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect()),
            _ => (Dtype::F32, values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        };
        Bytes { dtype, shape: self.shape, bytes }
    }

    fn read(&self, tensor: &TensorView<'_>, numel: usize) -> Result<Vec<f32>, ModelError> {
        let (have, need) = (tensor.shape(), &self.shape);
        // A table may come with its padding.
        let whole =
            self.order == Order::Same && have.len() == 2 && have[1..] == need[1..] && have[0] * have[1] == numel;
        if have != need && !whole {
            let (tensor, have, need) = (self.name.clone(), have.to_vec(), need.clone());
            return Err(ModelError::FileShape { tensor, have, need });
        }
        let bytes = tensor.data();
        let mut values: Vec<f32> = match tensor.dtype() {
            Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            // bf16 is the upper half of an f32.
            Dtype::BF16 => bytes.chunks_exact(2).map(|b| f32::from_le_bytes([0, 0, b[0], b[1]])).collect(),
            other => return Err(ModelError::FileType { tensor: self.name.clone(), have: format!("{other:?}") }),
        };
        if self.order == Order::Transposed {
            values = transposed(&values, self.shape[1]);
        }
        values.resize(numel, 0.0);
        Ok(values)
    }
}

/// Rows and columns of a matrix of `cols` columns exchanged.
fn transposed(values: &[f32], cols: usize) -> Vec<f32> {
    let rows = values.len() / cols;
    (0..cols).flat_map(|col| (0..rows).map(move |row| values[row * cols + col])).collect()
}

/// The published GPT-2 files leave the prefix out that `transformers` writes.
fn bare(name: &str) -> &str {
    name.strip_prefix("transformer.").unwrap_or(name)
}

/// Constants that some files carry along.
fn is_buffer(name: &str) -> bool {
    [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"].iter().any(|end| name.ends_with(end))
}

/// A tensor to be written.
struct Bytes {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for Bytes {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}
