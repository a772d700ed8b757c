//! The models of the golden files, shared by the test and by the example that exports them.

use std::collections::BTreeMap;

use device::DType;
use model::{Arch, GptConfig, GptPlan, LlamaConfig, Output};
use pgroups::{Init, InitStream, Seed, philox_4x32_10};

/// Everything that a golden file is about.
pub(crate) struct GoldenCase {
    pub(crate) name: &'static str,
    pub(crate) plan: GptPlan,
    /// Of parameters and activations.
    pub(crate) dtype: DType,
    pub(crate) values: BTreeMap<String, Vec<f32>>,
    pub(crate) tokens: Vec<i32>,
    pub(crate) targets: Vec<i32>,
    /// Tokens of a sequence.
    pub(crate) len: usize,
}

const SEED: Seed = Seed(20_24);

impl GoldenCase {
    /// `initial` has the declared initial values; `spread` has larger ones, no bias of 0 and no norm weight of 1, so that
    /// every path of the gradient counts; `bf16` has these, rounded.
    pub(crate) fn all() -> [GoldenCase; 6] {
        [
            GoldenCase::new("gpt2_initial", gpt2()),
            GoldenCase::new("gpt2_spread", gpt2()),
            GoldenCase::new("llama_initial", llama()),
            GoldenCase::new("llama_spread", llama()),
            GoldenCase::new("gpt2_bf16", gpt2()),
            GoldenCase::new("llama_bf16", llama()),
        ]
    }

    fn new(name: &'static str, config: GptConfig) -> GoldenCase {
        let (len, vocab) = (17, config.vocab);
        let plan = GptPlan::new(config).expect("sizes that obey the rules");
        let values = plan.params().iter().map(|p| (p.spec.name.clone(), draw(p, name))).collect();
        let ids = |stream: u32| {
            let id = |i: u32| (philox_4x32_10([i, stream, 0, 0], [SEED.0 as u32, 0])[0] as usize % vocab) as i32;
            (0..3 * len as u32).map(id).collect::<Vec<i32>>()
        };
        let (tokens, mut targets) = (ids(1), ids(2));
        targets[20] = device::ops::IGNORE;
        let dtype = if name.ends_with("bf16") { DType::Bf16 } else { DType::F32 };
        GoldenCase { name, plan, dtype, values, tokens, targets, len }
    }
}

fn gpt2() -> GptConfig {
    let (arch, output) = (Arch::Gpt2, Output::Tied);
    GptConfig { arch, layers: 2, dim: 32, heads: 4, ffn_dim: 96, vocab: 41, vocab_rows: 48, seq_len: 20, output }
}

/// Grouped-query, and an output table of its own.
fn llama() -> GptConfig {
    let arch = Arch::Llama(LlamaConfig { kv_heads: 2, rope_base: 500 });
    GptConfig { arch, ffn_dim: 88, output: Output::Own, ..gpt2() }
}

fn draw(p: &model::ModelParam, case: &str) -> Vec<f32> {
    let mut values = vec![0.0; p.numel()];
    if case.ends_with("initial") {
        p.spec.init_stream(SEED).fill(0, &mut values);
        return values;
    }
    InitStream::new(SEED, &p.spec.name, Init::Normal { std: 0.15 }).fill(0, &mut values);
    if p.spec.init == Init::Constant(1.0) {
        values.iter_mut().for_each(|v| *v += 1.0);
    }
    values
}
